"""Makes the minibatches of optimizer steps from rows with advantages, or from groups in the order of their arrival."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import datasets
import torch

from prefrl import distributed
from prefrl.data.packing import list_lengths
from prefrl.data.samplers import cost_of_segments, deal
from prefrl.errors import ConfigError
from prefrl.rollout.batches import Minibatch
from prefrl.trainer.online.learner import Ready, Rows
from prefrl.types import Completion, Rollout, TokenBatch, Turn

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prefrl.trainer.configs import OnlineConfig, PolicyGradientConfig
    from prefrl.trainer.online.learner import Learned, Objective
    from prefrl.trainer.scorer import ScoreNeed, Scorer, Scores
    from prefrl.trainer.steps import MicroStep
    from prefrl.types import IdleBatch


@dataclass
class MinibatchMaker(Generic[Rows, Ready]):
    """Makes the minibatches that an objective learns from.

    Args:
        args: Options.
        objective: Determines which rows have a gradient, and adds the scores that the loss reads.
        scorer: Computes these scores.
        cut: Cuts a minibatch into micro-batches.
        hidden_size: The policy's hidden size, which the cost of a row depends on.
    """

    args: OnlineConfig
    objective: Objective[Rows, Ready]
    scorer: Scorer
    cut: Callable[[Ready], list[Ready]]
    hidden_size: int

    def of(self, learned: Learned[Rows], *, over_ranks: bool = True) -> list[Minibatch[Ready]]:
        """One minibatch for each optimizer step in a pass over the rows.

        Args:
            learned: The rows of this rank.
            over_ranks: Whether all ranks call this with their rows, so that rows can be redistributed among them.
        """
        minibatches = []
        for i, rows in enumerate(learned.parts):
            batch = learned.batch.select(rows)
            num_items = float(self.objective.row_items(batch).sum())
            batch = self.objective.prepared(batch, num_items=num_items)
            # Of the rows with trainable tokens, those whose loss has a gradient, and those whose loss has none.
            learning: list[int] = []
            others: list[int] = []
            acts = self.objective.has_gradient(batch)
            for row, (count, has_gradient) in enumerate(zip(batch.trainable_counts, acts, strict=True)):
                if count > 0:
                    (learning if has_gradient else others).append(row)
            metrics = self.objective.metrics_without_pass(batch.select(others)) if others else {}
            batch = batch.select(learning)
            if over_ranks and distributed.world_size() > 1:
                batch = share_out(
                    batch,
                    hidden_size=self.hidden_size,
                    rows_together=self._rows_together,
                    # With a token budget, micro-batches have no fixed number of rows.
                    equal_counts=self.args.max_tokens_per_micro_batch is None,
                    device=self.args.device,
                )
            # Score before cutting, so that a prompt is computed once for its whole group. Later minibatches are scored
            # now, too: by the time the policy learns from them, earlier minibatches have updated it.
            # So is the first one, if its own experts shall be those of all visits.
            is_first = i == 0 and self.args.router_replay != "R2"
            micro_batches = self.cut(self.objective.ready(batch, self._score, is_first=is_first))
            minibatches.append(Minibatch(micro_batches, num_items, metrics))
        return minibatches

    @property
    def _rows_together(self) -> int | None:
        """Rows of a group that one rank takes; None: all of them.

        If groups were dealt whole, ranks could not always have equally many rows: 3 groups on 2 ranks.
        """
        per_rank = self.args.completions_per_rank // self.args.updates_per_generation
        size = gcd(per_rank, self.args.num_generations)
        return size if self.objective.splits_groups and size < self.args.num_generations else None

    def _score(self, batch: Rows, needs: Collection[ScoreNeed]) -> Scores:
        return self.scorer.needed(batch, needs, rows_per_pass=self.args.rows_per_micro_batch)


Batch = TypeVar("Batch", bound=TokenBatch)


def share_out(
    batch: Batch, *, hidden_size: int, rows_together: int | None = None, equal_counts: bool, device: torch.device
) -> Batch:
    """This rank's share of the rows of all ranks, dealt in groups by cost. All ranks must call it.

    Args:
        batch: This rank's rows, possibly none.
        hidden_size: The model's hidden size.
        rows_together: Deal larger groups in pieces of this many rows; None: in whole groups.
        equal_counts: Whether numbers of pieces differ by at most one between ranks; otherwise only costs are balanced.
        device: The device used to exchange rows.

    Returns:
        Pieces in descending order of cost; all fields of each row move with it.
    """
    own = _pieces(batch, rows_together)
    mine = [(len(rows), _cost(batch, rows, hidden_size)) for rows in own]
    everyone, start = distributed.gather_rows(mine)
    dealt = deal([cost for _, cost in everyone], distributed.world_size(), equal_counts=equal_counts)
    here = range(start, start + len(own))
    rows_to = [[row for i in sorted(part) if i in here for row in own[i - start]] for part in dealt]
    # Of hundreds of ranks, most get nothing from this one.
    leaving = [batch.select(rows_of) if rows_of else None for rows_of in rows_to]
    arrived = [part for part in distributed.exchange(leaving, device) if part is not None]
    batch = type(batch).concat(arrived or [batch.select([])])
    part, first, rows = dealt[distributed.rank()], 0, {}
    for i in sorted(part):  # as they arrive: those of each rank in order
        rows[i] = range(first, first + everyone[i][0])
        first = rows[i].stop
    return batch.select([row for i in part for row in rows[i]])


def _pieces(batch: TokenBatch, most_rows: int | None) -> list[list[int]]:
    """The rows of each group, in pieces of at most `most_rows`."""
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_index):
        groups.setdefault(group, []).append(row)
    size = most_rows or batch.num_rows
    return [rows[first : first + size] for rows in groups.values() for first in range(0, len(rows), size)]


def _cost(batch: TokenBatch, rows: list[int], hidden_size: int) -> float:
    """Forward cost of rows, each prompt once."""
    segments = [(float(before), float(length)) for before, length in batch.segments(rows)]
    return cost_of_segments(segments, hidden_size=hidden_size)


@dataclass
class OverlapStep:
    """A `Step` that trains on groups in the order in which they arrive.

    The item count that the sums are divided by is known only when the last group has arrived. Gradients are linear in
    the loss, so they are divided at the end, and the update equals that of a step that waited for all groups.

    Args:
        arriving: Yields a minibatch for each group, and waits until it has arrived.
        policy: Returns the model that is trained, without the backend's wrapper.
        idle: One token without a loss.
        accelerator: HuggingFace's accelerator.
    """

    arriving: Iterator[Minibatch[Any]]
    policy: Callable[[], nn.Module]
    idle: IdleBatch
    accelerator: Any
    micro_batches: list[TokenBatch] = field(default_factory=list)
    num_items: float = 1.0

    def run(self, model: nn.Module, micro_step: MicroStep, num_items: Tensor | float | None) -> Tensor:
        """Run forward and backward passes of each group once its completions are there; `num_items` is ignored."""
        device = self.accelerator.device
        total, own_items = torch.zeros((), device=device), 0.0
        for minibatch in self.arriving:
            own_items += minibatch.num_items
            # All ranks have the same number of groups, but not the same number of micro-batches in each.
            num_missing = distributed.missing_passes(self.policy(), len(minibatch.micro_batches), device)
            for batch in [*minibatch.micro_batches, *[self.idle] * num_missing]:
                total += micro_step(model, batch, 1.0, is_last=False)
            self.micro_batches += minibatch.micro_batches
        (count,) = distributed.sum_over_ranks([own_items], device)
        self.num_items = max(count, 1.0)
        with distributed.divided_update(self.accelerator, model, self.num_items):
            # No rank knows which of its groups comes last, so a pass without a loss synchronizes the gradients.
            if distributed.world_size() > 1 or distributed.updates_in_backward(self.accelerator):
                micro_step(model, self.idle, 1.0, is_last=True)
        return total / self.num_items


# How many times the rollouts of a micro-batch are made: some of them may have no gradient.
_FACTORS = (2, 4, 8, 16)


@dataclass(frozen=True)
class LongestRollouts:
    """Groups with the longest prompt and completions of the maximal length.

    Args:
        args: Options.
        dataset: Prepared prompts; a stream has prompts of `max_prompt_length` tokens.
        reward_names: Names of the rewards.
    """

    args: PolicyGradientConfig
    dataset: Any
    reward_names: Sequence[str]

    def micro_batch(self, num_rows: int, learn: Callable[[list[Rollout]], list[Minibatch[Ready]]]) -> Ready:
        """A full micro-batch, or the largest that some more rollouts give.

        Args:
            num_rows: Rollouts that a micro-batch starts from.
            learn: The minibatch of some rollouts, cut into micro-batches.
        """
        for factor in _FACTORS:
            (minibatch,) = learn(self.rollouts(factor * num_rows))
            if len(minibatch.micro_batches) > 1:  # only the last one may be smaller than the others
                break
        return minibatch.micro_batches[0]

    def rollouts(self, count: int) -> list[Rollout]:
        """Two or more whole groups with at least `count` rollouts. Rewards differ, so that they have advantages."""
        row, size = self._longest_prompt(), self.args.num_generations
        num_groups = max(2, -(-count // size))
        first = distributed.rank() * num_groups  # numbers of groups are unique over all ranks
        return [
            self._rollout(row, group, reward=float((number if size > 1 else group) % 2))
            for group in range(first, first + num_groups)
            for number in range(size)
        ]

    def _rollout(self, row: dict[str, Any], group: int, *, reward: float) -> Rollout:
        prompt_ids, length = list(row["prompt_ids"]), self.args.longest_completion
        completion = Completion(
            token_ids=[prompt_ids[-1]] * length,
            finish_reason="stop",
            logprobs=[-math.log(2.0)] * length,
            trainable=[True] * length,
            policy_versions=[0] * length,
        )
        return Rollout(
            turns=[Turn(prompt_ids, completion)],
            row=row,
            group=group,
            rewards=dict.fromkeys(self.reward_names, reward),
            reward=reward,
            greedy_reward=0.5 if self.args.needs_greedy else math.nan,
        )

    def _longest_prompt(self) -> dict[str, Any]:
        if not isinstance(self.dataset, datasets.IterableDataset):
            return dict(self.dataset[int(list_lengths(self.dataset, "prompt_ids").argmax())])
        if self.args.max_prompt_length is None:
            raise ConfigError(
                "max_prompt_length=None with an IterableDataset: the longest prompt is not known, so sizes cannot be "
                "'auto'. Set max_prompt_length, or numbers."
            )
        return {**next(iter(self.dataset)), "prompt_ids": [0] * self.args.max_prompt_length}
