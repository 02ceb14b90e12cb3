"""What an algorithm that learns from its own completions is: what it needs to know, its advantages, its objective."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from prefrl.losses.logprobs import TokenScores, WantName
    from prefrl.metrics import Metric
    from prefrl.trainer.base.scorer import Annotation
    from prefrl.types import LossOutput, Rollout, TokenBatch

__all__ = ["Learned", "Learner", "Objective"]


@dataclass(frozen=True, slots=True)
class Learned:
    """What optimizer steps learn from the rollouts of a generation batch."""

    batch: TokenBatch  # B rows, one for each rollout
    parts: list[list[int]]  # rows of each optimizer step, in order; a row may come several times, or never
    advantages: list[float]  # [B] mean over the row's tokens, for the table of completions
    metrics: dict[str, Metric] = field(default_factory=dict)


class Objective(Protocol):
    """The loss of a micro-batch, and what moves with it."""

    @property
    def want(self) -> tuple[WantName, ...]:
        """What a training pass computes beside log-probs."""
        ...

    @property
    def learns_from_zero_advantage(self) -> bool:
        """Whether a row without an advantage still has a gradient."""
        ...

    def needs(self, *, is_first: bool) -> Collection[Annotation]:
        """What the loss reads of a minibatch beside advantages.

        Args:
            is_first: The policy that learns is still the one that sampled: its own log-probs are the old ones.
        """
        ...

    def num_items(self, batch: TokenBatch) -> Tensor:
        """Scalar: what the loss sums over."""
        ...

    def prepared(self, batch: TokenBatch, *, num_items: float) -> TokenBatch:
        """The rows of a minibatch with what depends on all of them. All ranks must call it.

        Args:
            batch: All rows of the minibatch on this rank.
            num_items: What they count for.
        """
        ...

    def metrics_without_pass(self, batch: TokenBatch) -> dict[str, Metric]:
        """What is logged of rows without a gradient, which no forward pass runs; host numbers."""
        ...

    def __call__(self, batch: TokenBatch, scores: TokenScores, old_logprobs: Tensor) -> LossOutput:
        """The SUM over a micro-batch.

        Args:
            batch: With advantages.
            scores: Of a pass with gradients, with what `want` names.
            old_logprobs: [N] nats, of the policy before this generation's first update.
        """
        ...

    def end_step(self, device: torch.device) -> None:
        """Called on all ranks after the last micro-batch of an optimizer step."""
        ...

    def state_dict(self) -> dict[str, dict[str, float]]:
        """What decides the next update, fit for JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from what `state_dict` gave."""
        ...


class Learner(Protocol):
    """From scored rollouts to rows with advantages, and their loss."""

    @property
    def objective(self) -> Objective:
        """The loss."""
        ...

    @property
    def needs(self) -> Collection[Annotation]:
        """What `advantages` reads of the models, before anything is learned."""
        ...

    def advantages(
        self, batch: TokenBatch, rollouts: Sequence[Rollout], *, num_parts: int, step: int, over_ranks: bool
    ) -> Learned:
        """What optimizer steps learn from.

        Args:
            batch: The rollouts' rows, with what `needs` names.
            rollouts: This rank's, whole groups, with rewards and totals.
            num_parts: Optimizer steps of one pass over them.
            step: Optimizer step that begins to learn from them.
            over_ranks: Whether all ranks are here with theirs, and statistics are over all of them.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What decides the next advantages, fit for JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        ...
