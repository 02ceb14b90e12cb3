"""From rows with advantages to the minibatches of optimizer steps: dealt over ranks, scored, cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefrl import distributed
from prefrl.losses.reduce import row_sums
from prefrl.rollout.buffer import Minibatch
from prefrl.rollout.share import share_out

if TYPE_CHECKING:
    from prefrl.trainer.base.scorer import Scorer
    from prefrl.trainer.online.config import OnlineConfig
    from prefrl.trainer.online.learner import Learned, Objective
    from prefrl.types import TokenBatch

__all__ = ["MinibatchMaker"]


@dataclass
class MinibatchMaker:
    """Makes minibatches of rows that an objective learns from.

    Args:
        args: Options.
        objective: Says what it reads and which rows have a gradient.
        scorer: Scores what the objective reads.
        cut: From a minibatch to micro-batches.
        hidden_size: Of the policy; what a row costs depends on it.
    """

    args: OnlineConfig
    objective: Objective
    scorer: Scorer
    cut: Callable[[TokenBatch], list[TokenBatch]]
    hidden_size: int

    def of(self, learned: Learned, *, over_ranks: bool = True) -> list[Minibatch]:
        """One for each optimizer step of a pass over the rows.

        Args:
            learned: Rows of this rank.
            over_ranks: Whether all ranks are here with theirs, and rows are dealt to all of them.
        """
        return [
            self._minibatch(learned.batch, rows, is_first=i == 0, over_ranks=over_ranks)
            for i, rows in enumerate(learned.parts)
        ]

    def _minibatch(self, batch: TokenBatch, rows: Sequence[int], *, is_first: bool, over_ranks: bool) -> Minibatch:
        batch = batch.select(rows)
        if is_first:
            # The policy that learns is still the one that sampled. Its fresh log-probs make ratios of exactly 1.
            batch = batch.replace(old_logprobs=None)
        num_items = float(self.objective.num_items(batch))
        batch, rest = self._with_gradient(self.objective.prepared(batch, num_items=num_items))
        metrics = self.objective.metrics_without_pass(rest)
        if over_ranks and distributed.world_size() > 1:
            batch = share_out(
                batch,
                hidden_size=self.hidden_size,
                # Under a budget of tokens, micro-batches do not have a number of rows.
                equal_counts=self.args.max_tokens_per_micro_batch is None,
                device=self.args.device,
            )
        # Scored before it is cut: a prompt is computed once for its whole group. Earlier minibatches will have moved
        # the policy by the time that a later one is learned from, so its old log-probs are made now.
        batch = self.scorer.annotate(
            batch,
            self.objective.needs(is_first=is_first),
            rows_per_pass=self.args.per_device_train_batch_size,
        )
        return Minibatch(self.cut(batch), num_items, metrics)

    def _with_gradient(self, batch: TokenBatch) -> tuple[TokenBatch, TokenBatch]:
        """The rows whose loss has a gradient, and those with trainable tokens whose loss has none."""
        acts = [True] * batch.num_rows
        if not self.objective.learns_from_zero_advantage:
            assert batch.advantages is not None
            sums = row_sums(batch.advantages.abs(), batch.trainable, batch.row_index, batch.num_rows)
            acts = (sums > 0).tolist()
        rows: dict[bool, list[int]] = {True: [], False: []}
        for row, (count, has_gradient) in enumerate(zip(batch.trainable_counts, acts, strict=True)):
            if count > 0:
                rows[has_gradient].append(row)
        return batch.select(rows[True]), batch.select(rows[False])
