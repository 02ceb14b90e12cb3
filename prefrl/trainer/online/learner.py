"""The parts of an online algorithm: the scores that it needs, its advantages and its objective."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from prefrl.types import TokenBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from prefrl.losses.per_token import TokenScores, WantName
    from prefrl.metrics import Metric
    from prefrl.trainer.scorer import ScoreNeed, Scores
    from prefrl.types import LossOutput, Rollout, SampledBatch

Rows = TypeVar("Rows", bound=TokenBatch)  # the rows that a learner makes
Ready = TypeVar("Ready", bound=TokenBatch)  # these rows with everything that their loss reads


@dataclass(frozen=True)
class Learned(Generic[Rows]):
    """A generation batch with advantages, and the rows that each optimizer step trains on."""

    batch: Rows  # B rows, one for each rollout
    parts: list[list[int]]  # rows of each optimizer step, in order; a row may occur several times, or never
    advantages: list[float]  # [B] mean advantage over the row's tokens, for the table of completions
    metrics: dict[str, Metric] = field(default_factory=dict)


class Objective(Protocol[Rows, Ready]):
    """The loss of a micro-batch, and the state that adapts during training.

    For each minibatch, `MinibatchMaker` calls `row_items`, `prepared`, `has_gradient`, `metrics_without_pass` for the
    rows without a gradient, and `ready` for the others. The trainer calls the objective for each micro-batch and, at
    the end of the step, `end_step`, and `visited` if the rows are learned from again.
    """

    @property
    def splits_groups(self) -> bool:
        """Whether rows of a group can be on several ranks."""
        ...

    @property
    def stage(self) -> type[Ready]:
        """The class of the batches that the loss reads."""
        ...

    @property
    def want(self) -> tuple[WantName, ...]:
        """What a training pass computes in addition to log-probs."""
        ...

    def row_items(self, batch: Rows) -> Tensor:
        """[B] what each row counts among the items that the loss sums over."""
        ...

    def has_gradient(self, batch: Rows) -> list[bool]:
        """[B] whether a row changes the weights, if it has trainable tokens."""
        ...

    def prepared(self, batch: Rows, *, num_items: float) -> Rows:
        """Add the fields that depend on all rows of a minibatch. All ranks must call it.

        Args:
            batch: All rows of the minibatch on this rank.
            num_items: The item count of these rows.
        """
        ...

    def metrics_without_pass(self, batch: Rows) -> dict[str, Metric]:
        """Metrics of rows without a gradient, which are left out of the forward pass; on the host."""
        ...

    def ready(self, batch: Rows, score: Callable[[Rows, Collection[ScoreNeed]], Scores], *, is_first: bool) -> Ready:
        """Add the scores that the loss reads. All ranks must call it, even those without rows.

        Args:
            batch: The rows of a minibatch that have a gradient.
            score: Runs the passes that some scores need.
            is_first: Whether the policy is still the one that sampled, so its fresh log-probs are the old ones.
        """
        ...

    def __call__(self, batch: Ready, scores: TokenScores) -> LossOutput:
        """The SUM of the loss over a micro-batch.

        Args:
            batch: The rows.
            scores: Scores from a training pass, including those that `want` names.
        """
        ...

    def visited(self, batch: Ready, logprobs: Tensor) -> Ready:
        """The micro-batch for its later visits, after the first one.

        Args:
            batch: The rows.
            logprobs: [N] nats, from the training pass of the first visit.
        """
        ...

    def end_step(self, device: torch.device) -> None:
        """Called on all ranks after the last micro-batch of an optimizer step."""
        ...

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The state that the next update depends on, JSON-serializable."""
        ...

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore what `state_dict` returned."""
        ...


class PlainObjective(Generic[Rows, Ready]):
    """Base of objectives in which every row has a gradient, and nothing adapts. For its methods see `Objective`."""

    def has_gradient(self, batch: Rows) -> list[bool]:
        """True for every row."""
        return [True] * batch.num_rows

    def prepared(self, batch: Rows, *, num_items: float) -> Rows:
        """The batch unchanged."""
        return batch

    def metrics_without_pass(self, batch: Rows) -> dict[str, Metric]:
        """Empty."""
        return {}

    def visited(self, batch: Ready, logprobs: Tensor) -> Ready:
        """The batch unchanged: the loss does not compare with the policy of the first visit."""
        return batch

    def end_step(self, device: torch.device) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Does nothing."""


class Learner(Protocol[Rows, Ready]):
    """Turns scored rollouts into rows with advantages, and holds their loss."""

    @property
    def objective(self) -> Objective[Rows, Ready]:
        """The loss."""
        ...

    @property
    def needs(self) -> Collection[ScoreNeed]:
        """The scores that `advantages` reads, computed before the first update from the rollouts."""
        ...

    def advantages(
        self,
        batch: SampledBatch,
        scores: Scores,
        rollouts: Sequence[Rollout],
        *,
        num_parts: int,
        step: int,
        over_ranks: bool,
    ) -> Learned[Rows]:
        """Compute advantages, and divide the rows among optimizer steps.

        Args:
            batch: The rows of the rollouts.
            scores: The scores that `needs` names.
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
        """Restore what `state_dict` returned."""
        ...


def state_of(learner: Learner[Any, Any]) -> dict[str, Any]:
    """The state of a learner and of its objective, JSON-serializable."""
    return {"objective": learner.objective.state_dict(), "learner": learner.state_dict()}


def restore(learner: Learner[Any, Any], state: Mapping[str, Any]) -> None:
    """Restore what `state_of` returned."""
    learner.objective.load_state_dict(state["objective"])
    learner.load_state_dict(state["learner"])
