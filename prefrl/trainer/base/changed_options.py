"""Options that a resumed run may change and that checkpoints would otherwise override."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from prefrl.trainer.base.scheduler import refresh

__all__ = ["GroupOptions"]

_RATES = frozenset({"critic_learning_rate", "learning_rate", "learning_rates"})
_DECAYS = frozenset({"critic_optim_kwargs", "weight_decay", "weight_decay_schedule"})


@dataclass(frozen=True)
class GroupOptions:
    """The learning rates and weight decays of a new optimizer, whose state is about to be read from a checkpoint."""

    learning_rates: list[float]  # one for each parameter group, at the start of the schedule
    weight_decays: list[float]

    @classmethod
    def of(cls, optimizer: Any) -> GroupOptions:
        """What the options of this run ask for.

        Args:
            optimizer: Before its state is read.
        """
        groups = optimizer.param_groups
        return cls(
            [group.get("initial_lr", group["lr"]) for group in groups],
            [group.get("weight_decay", 0.0) for group in groups],
        )

    def apply(self, changed: Collection[str], optimizer: Any, scheduler: Any) -> None:
        """Give the changed options effect again, after the state was read.

        Args:
            changed: Names of the options that differ from the checkpoint.
            optimizer: After its state was read.
            scheduler: Its schedule, which may be another one now, goes on from the same step; learning rates are
                proportional to those at its start.
        """
        if not _DECAYS.isdisjoint(changed):
            for group, weight_decay in zip(optimizer.param_groups, self.weight_decays, strict=True):
                group["weight_decay"] = weight_decay
        if not _RATES.isdisjoint(changed):
            for group, initial in zip(optimizer.param_groups, self.learning_rates, strict=True):
                group["lr"] *= initial / group["initial_lr"]
                group["initial_lr"] = initial
            scheduler.base_lrs = list(self.learning_rates)
            scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # what is logged
        if isinstance(scheduler, LambdaLR):
            refresh(scheduler)
