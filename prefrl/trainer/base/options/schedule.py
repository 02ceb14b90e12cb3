"""Options of the schedules of learning rate and weight decay, and what they make of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.options.fields import mapping_of, opt, plain_value
from prefrl.options.kwargs import KwargsValue, ParamsOf, kwargs
from prefrl.options.params import Params
from prefrl.options.rules import apply
from prefrl.options.schedule import WeightDecayParams, WsdParams
from prefrl.options.schedule_rules import (
    METRIC_SCHEDULE_RULES,
    PLATEAU_RULES,
    SCHEDULE_RULES,
    WARMUP_EVALUATIONS_RULES,
    WARMUP_RULES,
    own_options,
    takes_warmup,
)
from prefrl.options.suggest import check_known
from prefrl.trainer.base.optimizers.schedules import (
    SCHEDULES,
    Span,
    check_arguments,
    delayed,
    of_huggingface,
    weight_decay_factor,
    with_warmup,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SCHEDULE_NAMES", "PlateauParams", "ScheduleOptions"]

SCHEDULE_NAMES = (*(name.value for name in SchedulerType), *SCHEDULES)
# Of transformers, independent of the number of steps.
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
_SOME_STEPS = 1009  # to try a schedule out before the number of steps is known
# Exponent of the number of ranks.
_SCALINGS = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True)
class PlateauParams(Params):
    """Of `reduce_on_plateau`."""

    metric: str = opt(
        "eval_loss", "Name of a logged metric; names that start with eval_ are from evaluations, others from training."
    )
    mode: Literal["min", "max"] | None = opt(
        None, "Whether the metric is minimized or maximized; None: minimized if its name ends in loss."
    )
    patience: Annotated[int, Ge(0)] = opt(
        10, "Number of consecutive values without an improvement that are tolerated."
    )
    factor: Annotated[float, Gt(0), Lt(1)] = opt(0.1, "Factor by which a reduction multiplies the learning rate.")
    threshold: Annotated[float, Ge(0)] = opt(1e-4, "Minimum improvement that counts, as a fraction of the best value.")
    window: Annotated[int, Ge(1)] = opt(1, "Number of logged values that are averaged into one.")


@dataclass
class ScheduleOptions(TrainingArguments):
    """Schedules of the learning rate and the weight decay; see docs/schedules.md."""

    lr_scheduler_type: str = opt(
        "linear",
        f"Schedule of the learning rate: one of transformers, or {', '.join(SCHEDULES)}.",
    )
    lr_scheduler_kwargs: KwargsValue = kwargs(
        "Hyperparameters of lr_scheduler_type, see docs/schedules.md; for schedules of transformers, their arguments.",
        {name: schedule.params for name, schedule in SCHEDULES.items()},
        switch="lr_scheduler_type",
        checked_elsewhere=tuple(SchedulerType),
    )
    warmup_steps: float = opt(
        0, "Steps in which the learning rate rises to its full value; a value below 1 is a fraction of all steps."
    )
    lr_decay_steps: Annotated[int, Ge(1)] | None = opt(
        None,
        "Step at which the schedule ends; after it, the learning rate is constant. None: the last step of training.",
    )
    warmup_start_factor: Annotated[float, Ge(0), Le(1)] | None = opt(
        None,
        "Fraction of learning_rate at which the warm-up begins; None: 0, unless the schedule has another default.",
    )
    warmup_evaluations: Annotated[int, Ge(0)] = opt(
        0, "Set warmup_steps to this multiple of eval_steps; needs eval_strategy='steps'. 0: off."
    )
    learning_rate_scaling: Literal["constant", "sqrt", "linear"] = opt(
        "constant", "Multiply learning rates by 1, the square root of the number of processes, or this number."
    )
    reduce_on_plateau: Annotated[int, Ge(0)] = opt(
        0,
        "Maximum number of times that the learning rate is reduced, on top of its schedule, when a metric stops "
        "improving; 0: never.",
    )
    reduce_on_plateau_kwargs: KwargsValue = kwargs(
        "Hyperparameters of reduce_on_plateau.",
        {True: PlateauParams},
        switch="reduces_on_plateau",
        label="reduce_on_plateau",
        off="reduce_on_plateau=0. Set it to the number of times that the learning rate may be reduced.",
    )
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = opt(
        "constant", "How the weight decay changes during training: not at all, linearly, or along half a cosine."
    )
    weight_decay_schedule_kwargs: KwargsValue = kwargs(
        "Hyperparameters of weight_decay_schedule.",
        {"linear": WeightDecayParams, "cosine": WeightDecayParams},
        switch="weight_decay_schedule",
    )

    plateau_params = ParamsOf("reduce_on_plateau_kwargs", PlateauParams)
    schedule_params = ParamsOf("lr_scheduler_kwargs", Params)
    weight_decay_params = ParamsOf("weight_decay_schedule_kwargs", WeightDecayParams)

    def __post_init__(self) -> None:
        name = self._schedule_name
        check_known("lr_scheduler_type", name, SCHEDULE_NAMES, "schedule")
        if name in SCHEDULES:
            self.lr_scheduler_type = SchedulerType.CONSTANT  # HuggingFace accepts only its own
        super().__post_init__()
        if name in SCHEDULES:
            self.lr_scheduler_type = name
        if self.warmup_evaluations:
            self._count_evaluations()

    def _count_evaluations(self) -> None:
        apply(self, WARMUP_EVALUATIONS_RULES)
        self.warmup_steps = self.warmup_evaluations * self.eval_steps

    @property
    def _schedule_name(self) -> str:
        return str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))

    @property
    def reduces_on_plateau(self) -> bool:
        """Whether the learning rate is reduced when a metric stops improving."""
        return self.reduce_on_plateau > 0

    @property
    def has_own_schedule(self) -> bool:
        """Whether the schedule is more than one of transformers."""
        return bool(own_options(self)) or self._schedule_name in SCHEDULES

    @property
    def depends_on_length(self) -> bool:
        """Whether learning rate or weight decay of a step depend on the number of steps of the training."""
        if self.lr_decay_steps is not None:
            return False
        own = SCHEDULES.get(self._schedule_name)
        knows_length = self._schedule_name not in _ENDLESS if own is None else own.knows_length
        return knows_length or 0 < self.warmup_steps < 1 or self.weight_decay_schedule != "constant"

    @property
    def takes_warmup(self) -> bool:
        """Whether the schedule reads `warmup_steps`."""
        return takes_warmup(self)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """HuggingFace's method: the steps of the warm-up in a schedule of this length."""
        if self._schedule_name == "wsd" and self.warmup_steps == 0:
            fraction = self._wsd_params.warmup_fraction
            return round((0.1 if fraction is None else fraction) * num_training_steps)
        return int(super().get_warmup_steps(num_training_steps))

    @property
    def _wsd_params(self) -> WsdParams:
        params = self.schedule_params
        assert isinstance(params, WsdParams)
        return params

    def learning_rate_factor(self, num_training_steps: int) -> Callable[[int], float]:
        """What the learning rates are multiplied by, as a function of the step, without reductions on a plateau.

        Args:
            num_training_steps: Steps of the training.

        Raises:
            ConfigError: An argument of the schedule is missing, or does not fit the number of steps.
        """
        name, start = self._schedule_name, self.warmup_start_factor
        end = self.lr_decay_steps or num_training_steps
        own = SCHEDULES.get(name)
        num_warmup = self.get_warmup_steps(end) if own is None or own.has_warmup else 0
        span = Span(self.learning_rate or 1.0, num_warmup, end)
        if own is None:
            factor = of_huggingface(name, mapping_of(self, "lr_scheduler_kwargs"), span)
        else:
            factor, start = delayed(own.make(self.schedule_params, span), num_warmup), start or 0.0
        if start is not None:
            factor = with_warmup(factor, num_warmup=num_warmup, start_factor=start)
        scale = distributed.world_size() ** _SCALINGS[self.learning_rate_scaling]
        return lambda step: scale * factor(min(step, end))

    def weight_decay_factor(self, num_training_steps: int) -> Callable[[int], float] | None:
        """What the weight decays are multiplied by, as a function of the step; None: they stay as they are."""
        kind = self.weight_decay_schedule
        if kind == "constant":
            return None
        return weight_decay_factor(self.weight_decay_params, kind, self.lr_decay_steps or num_training_steps)

    def validate_schedule(self) -> None:
        """Reject options of the schedule that are missing, contradict each other or have no effect.

        Raises:
            ConfigError: Names the option, its value and what to do.
        """
        apply(self, SCHEDULE_RULES)
        if self._schedule_name not in SCHEDULES:
            self._check_arguments()
        if self.has_own_schedule:
            self._check_own()
        apply(self, WARMUP_RULES)
        if self.reduces_on_plateau:
            apply(self, PLATEAU_RULES)

    def _check_arguments(self) -> None:
        """Check the arguments of a schedule of transformers."""
        name, arguments = self._schedule_name, mapping_of(self, "lr_scheduler_kwargs")
        try:
            check_arguments(name, arguments)
        except (TypeError, ValueError) as error:
            remedy = "the arguments of this schedule in transformers.optimization"
            if name == "warmup_stable_decay":
                remedy += "; lr_scheduler_type='wsd' takes fractions of all steps instead"
            raise ConfigError(
                f"lr_scheduler_type={name!r} with lr_scheduler_kwargs={arguments!r}: {error}. Set lr_scheduler_kwargs "
                f"to {remedy}."
            ) from error

    def _check_own(self) -> None:
        """Check what only prefrl's scheduler can do."""
        optim = str(plain_value(self.optim))
        apply(self, METRIC_SCHEDULE_RULES)
        if "layerwise" in optim:
            raise ConfigError(
                f"optim={optim!r} updates in the backward pass and supports only schedules of transformers. Leave "
                f"{', '.join(own_options(self)) or 'lr_scheduler_type'} at the default, or choose another optimizer."
            )
        self.learning_rate_factor(self.max_steps if self.max_steps > 0 else _SOME_STEPS)
