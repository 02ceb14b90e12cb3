"""Makes the minibatches of optimizer steps from rows with advantages: balances ranks, scores, cuts."""

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
    """Makes the minibatches that an objective learns from.

    Args:
        args: Options.
        objective: Determines the scores that are needed and which rows have a gradient.
        scorer: Computes these scores.
        cut: Cuts a minibatch into micro-batches.
        hidden_size: The policy's hidden size, which the cost of a row depends on.
    """

    args: OnlineConfig
    objective: Objective
    scorer: Scorer
    cut: Callable[[TokenBatch], list[TokenBatch]]
    hidden_size: int

    def of(self, learned: Learned, *, over_ranks: bool = True) -> list[Minibatch]:
        """One minibatch for each optimizer step in a pass over the rows.

        Args:
            learned: The rows of this rank.
            over_ranks: Whether all ranks call this with their rows, so that rows can be redistributed among them.
        """
        return [
            self._minibatch(learned.batch, rows, is_first=i == 0, over_ranks=over_ranks)
            for i, rows in enumerate(learned.parts)
        ]

    def _minibatch(self, batch: TokenBatch, rows: Sequence[int], *, is_first: bool, over_ranks: bool) -> Minibatch:
        batch = batch.select(rows)
        if is_first:
            # The policy is still the one that sampled. Its fresh log-probs serve as old ones: ratios are exactly 1.
            batch = batch.replace(old_logprobs=None)
        num_items = float(self.objective.num_items(batch))
        batch, rest = self._with_gradient(self.objective.prepared(batch, num_items=num_items))
        metrics = self.objective.metrics_without_pass(rest)
        if over_ranks and distributed.world_size() > 1:
            batch = share_out(
                batch,
                hidden_size=self.hidden_size,
                # With a token budget, micro-batches have no fixed number of rows.
                equal_counts=self.args.max_tokens_per_micro_batch is None,
                device=self.args.device,
            )
        # Score before cutting, so that a prompt is computed once for its whole group. Later minibatches are scored
        # now, too: by the time the policy learns from them, earlier minibatches have updated it.
        batch = self.scorer.annotate(
            batch,
            self.objective.needs(is_first=is_first),
            rows_per_pass=self.args.per_device_train_batch_size,
        )
        return Minibatch(self.cut(batch), num_items, metrics)

    def _with_gradient(self, batch: TokenBatch) -> tuple[TokenBatch, TokenBatch]:
        """Split the rows with trainable tokens into those whose loss has a gradient, and those whose loss has none."""
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
