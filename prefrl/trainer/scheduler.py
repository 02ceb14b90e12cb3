"""The scheduler behind prefrl's options of schedules: a torch scheduler that also knows plateaus and weight decays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from prefrl.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from prefrl.options.schedule import PlateauParams
    from prefrl.trainer.base_config import BaseConfig

__all__ = ["RatePlateau", "Scheduler", "own_scheduler", "refresh"]

# What a plateau's later decisions depend on.
_REMEMBERED = ("num_reductions", "_best", "_num_bad", "_sum", "_count")
# Attributes of the scheduler that the options decide.
_NOT_SAVED = ("plateau", "_weight_decay_factor", "_weight_decays")


class RatePlateau:
    """The factor to which reductions on a plateau have brought the learning rate.

    A reduction multiplies it by `params.factor`, after more than `patience` values in a row that do not surpass the
    best one by the share `threshold` of its size. Without a cooldown, this is what torch's ReduceLROnPlateau does, but
    for negative values: torch takes one that is slightly worse than the best for an improvement.

    Args:
        params: Hyperparameters.
        most: The largest number of reductions.
    """

    def __init__(self, params: PlateauParams, most: int) -> None:
        self.params = params
        self.most = most
        self.num_reductions = 0
        self._best: float | None = None
        self._num_bad = 0  # values in a row that did not surpass it
        self._sum, self._count = 0.0, 0  # of the window

    @property
    def factor(self) -> float:
        """What the learning rate is multiplied by."""
        return float(self.params.factor**self.num_reductions)

    def reduced(self, factor: Callable[[int], float]) -> Callable[[int], float]:
        """A factor of the learning rate by the step, times `self.factor`."""
        return lambda step: factor(step) * self.factor

    def observe(self, value: float) -> bool:
        """Take a value of the metric; whether the learning rate must be reduced now."""
        if self.num_reductions >= self.most:
            return False
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self.params.window:
            return False
        mean, self._sum, self._count = self._sum / self._count, 0.0, 0
        if self._is_better(mean):
            self._best, self._num_bad = mean, 0
        else:
            self._num_bad += 1
        is_reduced = self._num_bad > self.params.patience
        if is_reduced:
            self._num_bad, self.num_reductions = 0, self.num_reductions + 1
        return is_reduced

    def _is_better(self, value: float) -> bool:
        if self._best is None:
            return not math.isnan(value)
        gain = value - self._best if self.params.mode == "max" else self._best - value
        return gain > self.params.threshold * abs(self._best)

    def state(self) -> dict[str, float | None]:
        """Everything that later decisions depend on."""
        return {name: getattr(self, name) for name in _REMEMBERED}

    def load(self, state: Mapping[str, float | None]) -> None:
        """Go on from what `state` returned."""
        for name in _REMEMBERED:
            setattr(self, name, state[name])


class Scheduler(LambdaLR):
    """learning rate of a step = initial one * factor(step) * plateau factor, for each parameter group.

    Args:
        optimizer: Its learning rates and weight decays are the initial ones.
        factor: Of the learning rates; see `BaseConfig.learning_rate_factor`.
        weight_decay_factor: Of the weight decays; None: they stay as they are.
        plateau: Reduces the learning rate when a metric stops improving.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        factor: Callable[[int], float],
        *,
        weight_decay_factor: Callable[[int], float] | None = None,
        plateau: RatePlateau | None = None,
    ) -> None:
        self.plateau = plateau
        self._weight_decay_factor = weight_decay_factor
        self._weight_decays = [group.get("weight_decay") for group in optimizer.param_groups]
        super().__init__(optimizer, factor if plateau is None else plateau.reduced(factor))

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates and weight decays of the next step."""
        super().step(epoch)
        self.set_weight_decays()

    @property
    def weight_decay_factor(self) -> float:
        """What the weight decays of the step that the schedule is at are multiplied by."""
        return 1.0 if self._weight_decay_factor is None else self._weight_decay_factor(self.last_epoch)

    def set_weight_decays(self) -> None:
        """Set the weight decays of the step that the schedule is at."""
        if self._weight_decay_factor is None:
            return
        factor = self.weight_decay_factor
        for group, initial in zip(self.optimizer.param_groups, self._weight_decays, strict=True):
            if initial is not None:
                group["weight_decay"] = initial * factor

    def state_dict(self) -> dict[str, Any]:
        """The state of torch's scheduler, and that of the plateau."""
        state = {name: value for name, value in super().state_dict().items() if name not in _NOT_SAVED}
        return state if self.plateau is None else {**state, "plateau": self.plateau.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Read what `state_dict` returned; a scheduler without a plateau may have written it."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "plateau"})
        if self.plateau is not None and "plateau" in state_dict:
            self.plateau.load(state_dict["plateau"])


def own_scheduler(config: BaseConfig, given: Any, optimizer: Optimizer, num_training_steps: int) -> Scheduler | None:
    """The scheduler that the options ask for; None: HuggingFace's.

    Args:
        config: Options.
        given: The scheduler that there is already, if there is one.
        optimizer: New, or before its state is read.
        num_training_steps: Steps of the training.

    Raises:
        ConfigError: An argument of the schedule does not fit the number of steps, or another scheduler is given.
    """
    if not config.has_own_schedule or isinstance(given, Scheduler):
        return None
    if given is not None:
        raise ConfigError(
            f"lr_scheduler_type={str(config.lr_scheduler_type)!r} and the options of schedules have no effect because "
            "the trainer was given a scheduler in optimizers. Remove it, or these options."
        )
    plateau = RatePlateau(config.plateau_params, config.reduce_on_plateau) if config.reduces_on_plateau else None
    return Scheduler(
        optimizer,
        config.learning_rate_factor(num_training_steps),
        weight_decay_factor=config.weight_decay_factor(num_training_steps),
        plateau=plateau,
    )


def refresh(scheduler: LambdaLR) -> None:
    """Set learning rates and weight decays of the current step, after what they depend on has changed."""
    groups = scheduler.optimizer.param_groups
    for group, initial, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = initial * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in groups]  # what is logged
    if isinstance(scheduler, Scheduler):
        scheduler.set_weight_decays()
