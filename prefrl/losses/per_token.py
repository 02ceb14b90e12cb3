"""What a forward pass computes for each token, and how the losses of tokens become one number.

    total = (token_weights * token_loss).sum()
    loss  = (sum of totals) / (sum of item_counts), both over all micro-batches and ranks of an optimizer step

so that the loss does not depend on how a step is split.

| reduction | loss |
|---|---|
| token | mean over all trainable tokens of the step |
| sequence_mean | mean over rows of the mean over their trainable tokens |
| sequence_sum | mean over rows of the sum over their trainable tokens |
| constant | sum over trainable tokens / (rows * constant), Dr. GRPO |

A row without a trainable token counts as a row whose loss is 0, as in TRL.

Legend: `trainable` [N] bool, tokens that have a loss; `row_index` [N] int64, row of each token, in 0 .. B-1;
`num_rows` is B.

Tensors with an entry for each token, row or pair need equal shapes: functions raise ValueError if they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from prefrl.options.policy import Reduction

# What can be computed besides log-probs: scores of TokenScores, and "entropy_gradient", which lets gradients flow
# through the entropy. Most losses only log it, and its gradient costs most of a backward pass through the head. The
# other score, `divergence`, needs a reference.
WantName = Literal["entropy", "entropy_gradient", "correct", "predicted", "mean_logit", "log_collision", "hidden"]

ScoreName = Literal["entropy", "correct", "predicted", "mean_logit", "log_collision", "hidden", "divergence"]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of each token, in float32, or in float64 if the hidden states are. Only requested scores can be read.

    p is the scored distribution: softmax(logits / temperature).

    Raises:
        ValueError: A score is read that was not requested.
    """

    logprobs: Tensor  # [M] nats, gradient flows
    wanted: Mapping[ScoreName, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, logprobs: Tensor, **found: Tensor | None) -> Self:
        """Scores by name; None: not requested."""
        scores = {name: found.get(name) for name in get_args(ScoreName)}
        return cls(logprobs, {name: score for name, score in scores.items() if score is not None})

    @property
    def entropy(self) -> Tensor:
        """[M] nats, -sum p log p; gradient flows if "entropy_gradient" is wanted."""
        return self._read("entropy")

    @property
    def correct(self) -> Tensor:
        """[M] bool: the token is the most likely one."""
        return self._read("correct")

    @property
    def predicted(self) -> Tensor:
        """[M] int64, the most likely token at the token's place."""
        return self._read("predicted")

    @property
    def mean_logit(self) -> Tensor:
        """[M] mean over the vocabulary of the logits before temperature, constant."""
        return self._read("mean_logit")

    @property
    def log_collision(self) -> Tensor:
        """[M] nats, log sum p^2, constant."""
        return self._read("log_collision")

    @property
    def hidden(self) -> Tensor:
        """[M, h] last hidden states that predict the token, gradient flows."""
        return self._read("hidden")

    @property
    def divergence(self) -> Tensor:
        """[M] nats, of p from the reference's p over the vocabulary, see `losses.kl.divergence`; gradient flows."""
        return self._read("divergence")

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The scores, each changed by `function`."""
        return type(self)(function(self.logprobs), {name: function(score) for name, score in self.wanted.items()})

    def to(self, device: torch.device) -> Self:
        """A copy on `device`."""
        return self.map(lambda score: score.to(device))

    def without(self, name: ScoreName) -> Self:
        """All scores but this one."""
        return type(self)(self.logprobs, {other: score for other, score in self.wanted.items() if other != name})

    def _read(self, name: ScoreName) -> Tensor:
        if name not in self.wanted:
            raise ValueError(
                f"{name} was not computed: these scores have logprobs and {', '.join(self.wanted) or 'nothing else'}"
            )
        return self.wanted[name]


def score_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype of everything after the product with the head: float32, or float64 for float64 input."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def log_sum_of_squares(probs: Tensor) -> Tensor:
    """[c] log sum p^2 from [c, V], without another [c, V] tensor. The sum is >= 1 / V, so it cannot underflow."""
    norms: Tensor = torch.linalg.vector_norm(probs, dim=1)
    return norms.log() * 2


def check_inputs(
    hidden: Tensor, targets: Tensor, temperature: float, want: Collection[WantName], chunk_size: int
) -> None:
    """Reject shapes that do not match, numbers that are not positive and unknown names."""
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, targets {tuple(targets.shape)}: need to be [M, h] and [M]")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: needs to be positive")
    unknown = set(want) - set(get_args(WantName))
    if unknown:
        raise ValueError(f"want={sorted(unknown)}: allowed are {', '.join(get_args(WantName))}")
    if "entropy_gradient" in want and "entropy" not in want:
        raise ValueError(f"want={sorted(want)}: 'entropy_gradient' is the gradient of 'entropy'. Ask for both.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: needs to be >= 1")


def check_same_shape(**tensors: Tensor) -> None:
    """Reject tensors of different shapes, which might broadcast silently.

    Raises:
        ValueError: Shapes differ.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        named = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"shapes differ: {named}; all of them need to be equal")


def trainable_per_row(trainable: Tensor, row_index: Tensor, num_rows: int) -> Tensor:
    """[B] float32: trainable tokens of each row."""
    check_same_shape(trainable=trainable, row_index=row_index)
    counts = torch.zeros(num_rows, dtype=torch.float32, device=trainable.device)
    return counts.index_add_(0, row_index, trainable.float())


def row_sums(values: Tensor, trainable: Tensor, row_index: Tensor, num_rows: int) -> Tensor:
    """[B] sum of a per-token quantity over the trainable tokens of each row; 0 in rows without one.

    Gradient flows to `values`, [N], which are read at trainable tokens only.
    """
    check_same_shape(values=values, trainable=trainable, row_index=row_index)
    return values.new_zeros(num_rows).index_add(0, row_index, values.where(trainable, 0.0))


def token_weights(
    trainable: Tensor,
    row_index: Tensor,
    num_rows: int,
    *,
    reduction: Reduction,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[N] weight of each token's loss in the sum; 0 where a token is not trainable.

    It is 1 / (trainable tokens of the row) for `sequence_mean`, else 1.
    """
    check_same_shape(trainable=trainable, row_index=row_index)
    if reduction != "sequence_mean":
        return trainable.to(dtype)
    return trainable / trainable_per_row(trainable, row_index, num_rows).to(dtype).clamp(min=1)[row_index]


def item_count(
    trainable: Tensor, row_index: Tensor, num_rows: int, *, reduction: Reduction, constant: float | None
) -> Tensor:
    """Number of items that the weighted sum of these rows is divided by, added over micro-batches and ranks.

    Returns:
        Scalar float32, the sum of `row_items`, which see.
    """
    return row_items(trainable, row_index, num_rows, reduction=reduction, constant=constant).sum()


def row_items(
    trainable: Tensor, row_index: Tensor, num_rows: int, *, reduction: Reduction, constant: float | None
) -> Tensor:
    """[B] float32: what each row counts among the items that the weighted sum of a step is divided by.

    With reduction `constant`, a row counts as `constant` tokens. Dr. GRPO uses the maximum completion length.

    Raises:
        ValueError: Shapes differ, or `constant` is missing, not positive, or given where it has no effect.

    Source: Liu et al. 2025, arXiv 2503.20783, section 3.2 (constant)
    """
    check_same_shape(trainable=trainable, row_index=row_index)
    if reduction != "constant" and constant is not None:
        raise ValueError(f"constant={constant} has no effect with reduction={reduction!r}: pass None")
    if reduction == "token":
        return trainable_per_row(trainable, row_index, num_rows)
    tokens_per_row = 1.0
    if reduction == "constant":
        if constant is None or constant <= 0:
            raise ValueError(f"constant={constant}: reduction='constant' needs a positive number of tokens")
        tokens_per_row = constant
    return torch.full((num_rows,), tokens_per_row, dtype=torch.float32, device=trainable.device)
