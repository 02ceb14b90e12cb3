"""The parts of an online algorithm: the scores that it needs, its advantages and its objective."""

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
    """A generation batch with advantages, and the rows that each optimizer step trains on."""

    batch: TokenBatch  # B rows, one for each rollout
    parts: list[list[int]]  # rows of each optimizer step, in order; a row may occur several times, or never
    advantages: list[float]  # [B] mean advantage over the row's tokens, for the table of completions
    metrics: dict[str, Metric] = field(default_factory=dict)


class Objective(Protocol):
    """The loss of a micro-batch, and the state that adapts during training."""

    @property
    def want(self) -> tuple[WantName, ...]:
        """What a training pass computes in addition to log-probs."""
        ...

    @property
    def learns_from_zero_advantage(self) -> bool:
        """Whether a row with zero advantage still has a gradient."""
        ...

    def needs(self, *, is_first: bool) -> Collection[Annotation]:
        """The fields of a minibatch that the loss reads in addition to advantages.

        Args:
            is_first: Whether the policy is still the one that sampled, so that its fresh log-probs are the old ones.
        """
        ...

    def num_items(self, batch: TokenBatch) -> Tensor:
        """Scalar: the number of items that the loss sums over."""
        ...

    def prepared(self, batch: TokenBatch, *, num_items: float) -> TokenBatch:
        """Add the fields that depend on all rows of a minibatch. All ranks must call it.

        Args:
            batch: All rows of the minibatch on this rank.
            num_items: The item count of these rows.
        """
        ...

    def metrics_without_pass(self, batch: TokenBatch) -> dict[str, Metric]:
        """Metrics of rows without a gradient, which are left out of the forward pass; on the host."""
        ...

    def __call__(self, batch: TokenBatch, scores: TokenScores, old_logprobs: Tensor) -> LossOutput:
        """The SUM of the loss over a micro-batch.

        Args:
            batch: The rows, with advantages.
            scores: Scores from a training pass, including those that `want` names.
            old_logprobs: [N] nats, log-probs of the policy before the first update from this generation batch.
        """
        ...

    def end_step(self, device: torch.device) -> None:
        """Called on all ranks after the last micro-batch of an optimizer step."""
        ...

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The state that the next update depends on, JSON-serializable."""
        ...

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from what `state_dict` gave."""
        ...


class Learner(Protocol):
    """Turns scored rollouts into rows with advantages, and holds their loss."""

    @property
    def objective(self) -> Objective:
        """The loss."""
        ...

    @property
    def needs(self) -> Collection[Annotation]:
        """The scores that `advantages` reads, computed before the first update from the rollouts."""
        ...

    def advantages(
        self, batch: TokenBatch, rollouts: Sequence[Rollout], *, num_parts: int, step: int, over_ranks: bool
    ) -> Learned:
        """Compute advantages, and divide the rows among optimizer steps.

        Args:
            batch: The rows of the rollouts, with the fields that `needs` names.
            rollouts: The rollouts of this rank: whole groups, with rewards and totals.
            num_parts: Number of optimizer steps in one pass over them.
            step: The first optimizer step that learns from them.
            over_ranks: Whether all ranks call this with their rollouts, so that statistics are over all of them.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state that the next advantages depend on, JSON-serializable."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        ...
