"""Schedules of the learning rate and the weight decay: functions of the step that multiply what the options say.

The scheduler that runs them is a torch scheduler that also knows plateaus and weight decays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LRScheduler, OneCycleLR
from transformers.optimization import get_scheduler, get_wsd_schedule
from transformers.trainer_utils import SchedulerType

from prefrl.errors import ConfigError
from prefrl.options.params import Params
from prefrl.options.schedule import (
    SCHEDULE_FACTS,
    CosineWarmRestartsParams,
    ExponentialParams,
    OneCycleParams,
    PlateauParams,
    WeightDecayParams,
    WsdParams,
)

Factor = Callable[[int], float]  # of the number of optimizer steps so far


@dataclass(frozen=True)
class Span:
    """What a schedule is laid over."""

    learning_rate: float  # that rates among the hyperparameters are relative to
    num_warmup: int  # steps of the warm-up
    num_steps: int  # steps of the whole schedule

    @property
    def num_after(self) -> int:
        """Steps after the warm-up."""
        return max(self.num_steps - self.num_warmup, 1)


class _Stepped:
    """The learning rates of a torch scheduler, which can only go on to the next one."""

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._rates = [float(scheduler.get_last_lr()[0])]

    def __call__(self, step: int) -> float:
        while len(self._rates) <= step:
            self._optimizer.step()
            self._scheduler.step()
            self._rates.append(float(self._scheduler.get_last_lr()[0]))
        return self._rates[step]


def _optimizer(learning_rate: float = 1.0) -> Optimizer:
    """An optimizer that nothing is trained with, for schedulers that want one."""
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=learning_rate)


def one_cycle(params: OneCycleParams, span: Span) -> Factor:
    """The curve of torch's OneCycleLR: up to max_lr along half a cosine, and down along another one.

    Momentum stays as it is.

    Raises:
        ConfigError: torch cannot place the largest rate.

    Source: Smith and Topin 2017, arXiv 1708.07120
    """
    optimizer = _optimizer()
    try:
        scheduler = OneCycleLR(
            optimizer,
            max_lr=1.0,
            total_steps=span.num_after,
            pct_start=params.pct_start,
            div_factor=params.div_factor,
            final_div_factor=params.final_div_factor,
            cycle_momentum=False,
        )
    except ZeroDivisionError as error:
        raise ConfigError(
            f"lr_scheduler_kwargs: pct_start={params.pct_start} of {span.num_after} steps is a single step, in which "
            "the rate cannot rise. Set another pct_start."
        ) from error
    rates, peak = _Stepped(optimizer, scheduler), (params.max_lr or span.learning_rate) / span.learning_rate
    return lambda step: peak * rates(min(step, span.num_after - 1))  # torch has no rate after the last step


def exponential(params: ExponentialParams, span: Span) -> Factor:
    """decay_rate ** (step / decay_steps), with a whole exponent if `staircase` is set."""

    def factor(step: int) -> float:
        exponent = step / params.decay_steps
        return float(params.decay_rate ** (math.floor(exponent) if params.staircase else exponent))

    return factor


def cosine_warm_restarts(params: CosineWarmRestartsParams, span: Span) -> Factor:
    """The curve of torch's CosineAnnealingWarmRestarts: along half a cosine down to eta_min, again and again.

    Raises:
        ConfigError: `t_0` is not set.

    Source: Loshchilov and Hutter 2016 (SGDR), arXiv 1608.03983, eq. 5
    """
    if params.t_0 is None:
        raise ConfigError(
            "lr_scheduler_kwargs: t_0=None with lr_scheduler_type='cosine_warm_restarts'. Set t_0, the number of "
            "steps of the first cycle."
        )
    optimizer = _optimizer()
    lowest = params.eta_min / span.learning_rate
    return _Stepped(
        optimizer, CosineAnnealingWarmRestarts(optimizer, T_0=params.t_0, T_mult=params.t_mult, eta_min=lowest)
    )


def wsd(params: WsdParams, span: Span) -> Factor:
    """1, and from the last `decay_fraction` of the whole schedule on m + (1 - m) d(p), where p rises from 0 to 1.

    m is min_lr_ratio; d(p) is 1 - p, (1 + cos(pi p)) / 2, 1 - sqrt(p) or 2^(1 - p) - 1.

    Source: Hu et al. 2024 (MiniCPM), arXiv 2404.06395; transformers; Megatron-LM for "exponential"
    """
    num_decay = min(round(params.decay_fraction * span.num_steps), span.num_after)
    num_stable, lowest = span.num_after - num_decay, params.min_lr_ratio
    if params.decay_type != "exponential":
        scheduler: Any = get_wsd_schedule(
            _optimizer(),
            num_warmup_steps=0,
            num_decay_steps=num_decay,
            num_stable_steps=num_stable,
            decay_type=params.decay_type,
            min_lr_ratio=lowest,
        )
        factor: Factor = scheduler.lr_lambdas[0]
        return factor

    def exponential_decay(step: int) -> float:
        progress = min(max(step - num_stable, 0) / max(num_decay, 1), 1.0)
        return float(lowest + (1 - lowest) * (2 ** (1 - progress) - 1))

    return exponential_decay


@dataclass(frozen=True)
class Schedule:
    """A schedule that transformers does not have; see `ScheduleFacts`."""

    make: Callable[[Any, Span], Factor]  # the factor of each step after the warm-up, the first of them being 0
    params: type[Params]
    has_warmup: bool
    knows_length: bool


_FUNCTIONS: dict[str, Callable[[Any, Span], Factor]] = {
    "one_cycle": one_cycle,
    "exponential": exponential,
    "cosine_warm_restarts": cosine_warm_restarts,
    "wsd": wsd,
}
SCHEDULES: Mapping[str, Schedule] = {
    name: Schedule(make, **vars(SCHEDULE_FACTS[name])) for name, make in _FUNCTIONS.items()
}
SCHEDULE_NAMES = (*(name.value for name in SchedulerType), *SCHEDULES)


def of_huggingface(name: str, kwargs: Mapping[str, Any] | None, span: Span) -> Factor:
    """A schedule of transformers, with its warm-up.

    Args:
        name: The schedule.
        kwargs: Its arguments.
        span: What it is laid over.
    """
    scheduler = get_scheduler(
        name,
        _optimizer(span.learning_rate),
        num_warmup_steps=span.num_warmup,
        num_training_steps=span.num_steps,
        scheduler_specific_kwargs=dict(kwargs or {}),
    )
    factor: Factor = scheduler.lr_lambdas[0]
    return factor


def check_arguments(name: str, kwargs: Mapping[str, Any] | None) -> None:
    """Reject arguments that a schedule of transformers does not take.

    Raises:
        TypeError: An argument is missing or unknown.
        ValueError: A value is not allowed.
    """
    get_scheduler(
        name, _optimizer(), num_warmup_steps=1, num_training_steps=10, scheduler_specific_kwargs=dict(kwargs or {})
    )


def delayed(factor: Factor, num_steps: int) -> Factor:
    """The same factors `num_steps` steps later."""
    return lambda step: factor(step - num_steps)


def with_warmup(after: Factor, *, num_warmup: int, start_factor: float) -> Factor:
    """start_factor + (1 - start_factor) step / num_warmup in the first `num_warmup` steps, then `after`.

    Args:
        after: Called with the number of the step, the first of all being 0.
        num_warmup: Steps of the warm-up.
        start_factor: The first factor.
    """

    def factor(step: int) -> float:
        if step < num_warmup:
            return start_factor + (1 - start_factor) * (step / num_warmup)
        return after(step)

    return factor


def weight_decay_factor(params: WeightDecayParams, kind: Literal["linear", "cosine"], num_steps: int) -> Factor:
    """start_factor + (end_factor - start_factor) c(step / num_steps), with c(p) = p or (1 - cos(pi p)) / 2.

    Source: Megatron-LM, weight_decay_incr_style
    """

    def factor(step: int) -> float:
        progress = min(step / num_steps, 1.0)
        share = progress if kind == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return params.start_factor + (params.end_factor - params.start_factor) * share

    return factor


# The scheduler.

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


def refresh(scheduler: LambdaLR) -> None:
    """Set learning rates and weight decays of the current step, after what they depend on has changed."""
    groups = scheduler.optimizer.param_groups
    for group, initial, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = initial * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in groups]  # what is logged
    if isinstance(scheduler, Scheduler):
        scheduler.set_weight_decays()
