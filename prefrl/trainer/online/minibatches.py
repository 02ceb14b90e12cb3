"""Makes the minibatches of optimizer steps from rows with advantages: balances ranks, scores, cuts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Generic

from prefrl import distributed
from prefrl.rollout.buffer import Minibatch
from prefrl.rollout.share import share_out
from prefrl.trainer.online.learner import Ready, Row

if TYPE_CHECKING:
    from prefrl.trainer.base.scorer import ScoreNeed, Scorer, Scores
    from prefrl.trainer.online.config import OnlineConfig
    from prefrl.trainer.online.learner import Learned, Objective

__all__ = ["MinibatchMaker"]


@dataclass
class MinibatchMaker(Generic[Row, Ready]):
    """Makes the minibatches that an objective learns from.

    Args:
        args: Options.
        objective: Determines which rows have a gradient, and adds the scores that the loss reads.
        scorer: Computes these scores.
        cut: Cuts a minibatch into micro-batches.
        hidden_size: The policy's hidden size, which the cost of a row depends on.
    """

    args: OnlineConfig
    objective: Objective[Row, Ready]
    scorer: Scorer
    cut: Callable[[Ready], list[Ready]]
    hidden_size: int

    def of(self, learned: Learned[Row], *, over_ranks: bool = True) -> list[Minibatch[Ready]]:
        """One minibatch for each optimizer step in a pass over the rows.

        Args:
            learned: The rows of this rank.
            over_ranks: Whether all ranks call this with their rows, so that rows can be redistributed among them.
        """
        return [
            self._minibatch(learned.batch, rows, is_first=i == 0, over_ranks=over_ranks)
            for i, rows in enumerate(learned.parts)
        ]

    def _minibatch(self, batch: Row, rows: Sequence[int], *, is_first: bool, over_ranks: bool) -> Minibatch[Ready]:
        batch = batch.select(rows)
        num_items = float(self.objective.row_items(batch).sum())
        batch, rest = self._with_gradient(self.objective.prepared(batch, num_items=num_items))
        metrics = self.objective.metrics_without_pass(rest)
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
        return Minibatch(self.cut(self.objective.ready(batch, self._score, is_first=is_first)), num_items, metrics)

    @property
    def _rows_together(self) -> int | None:
        """Rows of a group that one rank takes, so that all ranks can take the same number; None: all of them."""
        per_rank = self.args.completions_per_rank // self.args.updates_per_generation
        size = gcd(per_rank, self.args.num_generations)
        return size if self.objective.splits_groups and size < self.args.num_generations else None

    def _score(self, batch: Row, needs: Collection[ScoreNeed]) -> Scores:
        return self.scorer.needed(batch, needs, rows_per_pass=self.args.rows_per_micro_batch)

    def _with_gradient(self, batch: Row) -> tuple[Row, Row]:
        """Split the rows with trainable tokens into those whose loss has a gradient, and those whose loss has none."""
        acts = self.objective.has_gradient(batch)
        rows: dict[bool, list[int]] = {True: [], False: []}
        for row, (count, has_gradient) in enumerate(zip(batch.trainable_counts, acts, strict=True)):
            if count > 0:
                rows[has_gradient].append(row)
        return batch.select(rows[True]), batch.select(rows[False])
