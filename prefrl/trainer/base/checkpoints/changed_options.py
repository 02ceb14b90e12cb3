"""Options that a resumed run may change and that checkpoints would otherwise override."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from prefrl.trainer.base.scheduler import refresh

__all__ = ["GroupOptions"]

_RATES = frozenset({"critic_learning_rate", "learning_rate"})
# Option -> what it sets in parameter groups.
_SETTINGS = {
    "adam_beta1": ("betas",),
    "adam_beta2": ("betas",),
    "adam_epsilon": ("eps",),
    "critic_optim_kwargs": ("betas", "eps", "weight_decay"),
    "weight_decay": ("weight_decay",),
    "weight_decay_schedule": ("weight_decay",),
}


@dataclass(frozen=True)
class GroupOptions:
    """The settings of a new optimizer's parameter groups, whose state is about to be read from a checkpoint."""

    learning_rates: list[float]  # one for each parameter group, at the start of the schedule
    settings: list[dict[str, Any]]  # what `_SETTINGS` names, and the group has

    @classmethod
    def of(cls, optimizer: Any) -> GroupOptions:
        """What the options of this run ask for.

        Args:
            optimizer: Before its state is read.
        """
        groups = optimizer.param_groups
        return cls(
            [group.get("initial_lr", group["lr"]) for group in groups],
            [{key: group[key] for keys in _SETTINGS.values() for key in keys if key in group} for group in groups],
        )

    def apply(self, changed: Collection[str], optimizer: Any, scheduler: Any) -> None:
        """Give the changed options effect again, after the state was read.

        Args:
            changed: Names of the options that differ from the checkpoint.
            optimizer: After its state was read.
            scheduler: Its schedule, which may be another one now, goes on from the same step; learning rates are
                proportional to those at its start.
        """
        keys = {key for option in changed for key in _SETTINGS.get(option, ())}
        for group, settings in zip(optimizer.param_groups, self.settings, strict=True):
            group.update({key: value for key, value in settings.items() if key in keys})
        if not _RATES.isdisjoint(changed):
            for group, initial in zip(optimizer.param_groups, self.learning_rates, strict=True):
                before = group["initial_lr"]  # 0 for weights that learning_rates freezes
                group["lr"] = group["lr"] * initial / before if before else initial
                group["initial_lr"] = initial
            scheduler.base_lrs = list(self.learning_rates)
            scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # what is logged
        if isinstance(scheduler, LambdaLR):
            refresh(scheduler)
