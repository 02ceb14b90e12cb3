"""Notices when the rewards do not say which completions are better."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefrl import distributed
from prefrl.errors import RewardError
from prefrl.metrics import Mean, Metric
from prefrl.printable import printable

if TYPE_CHECKING:
    from prefrl.options.policy_gradient import PolicyGradientOptions
    from prefrl.types import Rollout

__all__ = ["SignalHealth"]

logger = logging.getLogger(__name__)

# Optimizer steps without a learning signal after which a warning is logged.
_WINDOW = 10


class SignalHealth:
    """Warns once, and stops the run if that was asked for, when there has been nothing to learn for many steps.

    Also warns once of a completion that no reward scored.

    There is nothing to learn from a generation batch if all its advantages are 0, its completions are excluded from
    the loss, or its rewards are all equal, which a critic's advantages would hide. A resumed run counts anew.

    Args:
        args: Options.
    """

    def __init__(self, args: PolicyGradientOptions) -> None:
        self._args = args
        self._num_steps = 0  # without a signal, one after another
        # In these steps: all completions; those with an advantage that is not 0, and trained on; those for which every
        # reward returned None; those that were cut off.
        self._counts: Counter[str] = Counter()
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
        masks = self._args.mask_truncated_completions
        mine, batch = Counter({"all": len(rollouts), "with_signal": 0}), Counter[str]()
        own_totals: set[float] = set()
        own_row: str | None = None  # the dataset row of the first completion that no reward scored
        for rollout in rollouts:
            is_cut_off, has_none = rollout.finish_reason == "length", math.isnan(rollout.reward)
            mine["with_signal"] += abs(rollout.advantage) > 0 and not (masks and is_cut_off)  # False for NaN
            mine["without_reward"] += has_none
            mine["cut_off"] += is_cut_off
            if not has_none:
                own_totals.add(rollout.reward)
            elif own_row is None and not rollout.has_failed:
                own_row = _shown(rollout)
        totals: set[float] = set()
        for counts, some, row in distributed.gather_objects((mine, own_totals, own_row)):
            batch.update(counts)
            totals |= some
            if row is not None:
                self._tell_unscored(row)
        if len(totals) < 2:
            mine["with_signal"] = batch["with_signal"] = 0
        if batch["with_signal"]:
            self._num_steps, self._counts, self._had_signal = 0, Counter(), True
        else:
            self._note(batch)
        metrics: dict[str, Metric] = {"health/signal_fraction": Mean(mine["with_signal"], mine["all"])}
        for name in rollouts[0].rewards if rollouts else ():
            num_none = sum(rollout.rewards[name] is None for rollout in rollouts)
            metrics[f"rewards/{name}/none"] = Mean(num_none, len(rollouts))
        return metrics

    def end(self) -> None:
        """Called at the end of training: warns of a run without any signal that was shorter than the window."""
        if self._num_steps > 0 and not self._had_signal:
            self._warn()

    def _tell_unscored(self, row: str) -> None:
        """Warn of the first completion that no reward scored."""
        if self._has_told_unscored:
            return
        self._has_told_unscored = True
        if distributed.is_main():
            logger.warning(
                "every reward returned None for completions of this dataset row: %s. Nothing is learned from such "
                "completions; frac_unscored is their share. Check the columns that the rewards read.",
                row,
            )

    def _note(self, batch: Counter[str]) -> None:
        """A batch without a signal."""
        self._num_steps += self._args.steps_of_a_generation
        self._counts.update(batch)
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
        args, reasons = self._args, []
        num, without_reward, cut_off = (self._counts[name] for name in ("all", "without_reward", "cut_off"))
        if without_reward:
            share = without_reward / num
            reasons.append(f"{share:.0%} got None from every reward: check the columns that rewards read")
        if cut_off:
            masked = " and masked by mask_truncated_completions" if args.mask_truncated_completions else ""
            option = f"max_completion_length={args.max_completion_length}"
            reasons.append(f"{cut_off / num:.0%} were cut off{masked}: raise {option}")
        if without_reward < num:
            reasons.append("completions that are compared have equal rewards: check the rewards, or raise temperature")
        return (
            f"no learning signal in {self._num_steps} consecutive optimizer steps. Of {num} completions, "
            f"{'; '.join(reasons)}."
        )


def _shown(rollout: Rollout) -> str:
    """The dataset row of a rollout, without token ids."""
    row = {name: value for name, value in rollout.row.items() if name != "prompt_ids"}
    return printable(repr(row), max_characters=1000)
