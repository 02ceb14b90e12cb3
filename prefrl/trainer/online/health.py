"""Notices when the rewards do not say which completions are better."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from prefrl import distributed
from prefrl.errors import RewardError
from prefrl.metrics import Mean, Metric
from prefrl.printable import printable
from prefrl.rollout.summary import is_unscored

if TYPE_CHECKING:
    from prefrl.trainer.online.config import PolicyGradientConfig
    from prefrl.types import Rollout

__all__ = ["SignalHealth"]

logger = logging.getLogger(__name__)

# Optimizer steps without a learning signal after which a warning is logged.
_WINDOW = 10


@dataclass
class _Counts:
    """Numbers of completions."""

    all: int = 0
    with_signal: int = 0  # with an advantage that is not 0, and trained on
    without_reward: int = 0  # for which every reward returned None
    cut_off: int = 0

    def add(self, other: _Counts) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class SignalHealth:
    """Warns once, and stops the run if that was asked for, when there has been nothing to learn for many steps.

    Also warns once of a completion that no reward scored.

    There is nothing to learn from a generation batch if all its advantages are 0, its completions are excluded from
    the loss, or its rewards are all equal, which a critic's advantages would hide. A resumed run counts anew.

    Args:
        args: Options.
    """

    def __init__(self, args: PolicyGradientConfig) -> None:
        self._args = args
        self._num_steps = 0  # without a signal, one after another
        self._counts = _Counts()  # in these steps
        self._had_signal = False
        self._has_warned = False
        self._has_told_unscored = False

    def check(self, rollouts: Sequence[Rollout]) -> dict[str, Metric]:
        """Look at a generation batch. All ranks must call it.

        Args:
            rollouts: The rollouts of this rank, with their advantages.
        Returns:
            `health/signal_fraction`, the share of completions with a signal, and `rewards/<name>/none`, the share for
            which a reward returned None.
        Raises:
            RewardError: There was no signal in `stop_without_signal` steps.
        """
        mine, batch = self._counted(rollouts), _Counts()
        totals: set[float] = set()
        own_totals = {rollout.reward for rollout in rollouts if not math.isnan(rollout.reward)}
        own_row = next((_shown(rollout) for rollout in rollouts if is_unscored(rollout)), None)
        for counts, some, row in distributed.gather_objects((mine, own_totals, own_row)):
            batch.add(counts)
            totals |= some
            self._tell_unscored(row)
        if len(totals) < 2:
            mine.with_signal = batch.with_signal = 0
        self._note(batch)
        metrics: dict[str, Metric] = {"health/signal_fraction": Mean(mine.with_signal, mine.all)}
        for name in rollouts[0].rewards if rollouts else ():
            num_none = sum(rollout.rewards[name] is None for rollout in rollouts)
            metrics[f"rewards/{name}/none"] = Mean(num_none, len(rollouts))
        return metrics

    def end(self) -> None:
        """Called at the end of training: warns of a run without any signal that was shorter than the window."""
        if self._num_steps > 0 and not self._had_signal:
            self._warn()

    def _tell_unscored(self, row: str | None) -> None:
        """Warn of the first completion that no reward scored."""
        if row is None or self._has_told_unscored:
            return
        self._has_told_unscored = True
        if distributed.is_main():
            logger.warning(
                "every reward returned None for completions of this dataset row: %s. Nothing is learned from such "
                "completions; frac_unscored is their share. Check the columns that the rewards read.",
                row,
            )

    def _counted(self, rollouts: Sequence[Rollout]) -> _Counts:
        masks = self._args.mask_truncated_completions
        counts = _Counts(len(rollouts))
        for rollout in rollouts:
            is_cut_off = rollout.finish_reason == "length"
            counts.with_signal += abs(rollout.advantage) > 0 and not (masks and is_cut_off)  # False for NaN
            counts.without_reward += math.isnan(rollout.reward)
            counts.cut_off += is_cut_off
        return counts

    def _note(self, batch: _Counts) -> None:
        if batch.with_signal:
            self._num_steps, self._counts, self._had_signal = 0, _Counts(), True
            return
        self._num_steps += self._args.steps_of_a_generation
        self._counts.add(batch)
        limit = self._args.stop_without_signal
        if limit is not None and self._num_steps >= limit:
            raise RewardError(f"{self._finding()} stop_without_signal={limit} ends the run")
        if self._num_steps >= _WINDOW:
            self._warn()

    def _warn(self) -> None:
        if not self._has_warned and distributed.is_main():
            logger.warning("%s stop_without_signal would end such a run", self._finding())
        self._has_warned = True

    def _finding(self) -> str:
        counts, args, reasons = self._counts, self._args, []
        if counts.without_reward:
            share = counts.without_reward / counts.all
            reasons.append(f"{share:.0%} got None from every reward: check the columns that rewards read")
        if counts.cut_off:
            masked = " and masked by mask_truncated_completions" if args.mask_truncated_completions else ""
            option = f"max_completion_length={args.max_completion_length}"
            reasons.append(f"{counts.cut_off / counts.all:.0%} were cut off{masked}: raise {option}")
        if counts.without_reward < counts.all:
            reasons.append("completions that are compared have equal rewards: check the rewards, or raise temperature")
        return (
            f"no learning signal in {self._num_steps} consecutive optimizer steps. Of {counts.all} completions, "
            f"{'; '.join(reasons)}."
        )


def _shown(rollout: Rollout) -> str:
    """The dataset row of a rollout, without token ids."""
    row = {name: value for name, value in rollout.row.items() if name != "prompt_ids"}
    return printable(repr(row), max_characters=1000)
