"""What a forward pass computes for each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self, get_args

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["ScoreName", "TokenScores", "WantName"]

# What can be computed besides log-probs: scores of TokenScores, and "entropy_gradient", which lets gradients flow
# through the entropy. Most losses only log it, and its gradient costs most of a backward pass through the head. The
# other score, `full_kl`, needs a reference.
WantName = Literal["entropy", "entropy_gradient", "correct", "predicted", "mean_logit", "log_collision", "hidden"]

ScoreName = Literal["entropy", "correct", "predicted", "mean_logit", "log_collision", "hidden", "full_kl"]


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
    def full_kl(self) -> Tensor:
        """[M] nats, KL(p || reference's p) over the vocabulary, gradient flows."""
        return self._read("full_kl")

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
