"""Options of the schedules of learning rate and weight decay, and what they make of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SchedulerType

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.options.fields import check_unset, mapping_of, opt
from prefrl.options.params import Params
from prefrl.options.suggest import check_known
from prefrl.trainer.base.optimizers.schedules import (
    SCHEDULES,
    Span,
    WeightDecayParams,
    WsdParams,
    check_arguments,
    delayed,
    of_huggingface,
    weight_decay_factor,
    with_warmup,
)
from prefrl.trainer.base.options.kwargs import KwargsOption, KwargsValue
from prefrl.trainer.base.options.rules import check_schedule, check_warmup_evaluations

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SCHEDULE_KWARGS", "SCHEDULE_NAMES", "PlateauParams", "ScheduleOptions"]

SCHEDULE_NAMES = (*(name.value for name in SchedulerType), *SCHEDULES)
# Of transformers: these follow metrics instead of the step, and these have no warm-up.
_OF_METRICS = ("reduce_lr_on_plateau", "greedy")
_WITHOUT_WARMUP = ("constant", *_OF_METRICS)
# Of transformers, independent of the number of steps.
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
# Those that only prefrl's scheduler reads.
_OPTIONS = (
    "lr_decay_steps",
    "warmup_start_factor",
    "learning_rate_scaling",
    "reduce_on_plateau",
    "weight_decay_schedule",
)
_SOME_STEPS = 1009  # to try a schedule out before the number of steps is known
# Exponent of the number of ranks.
_SCALINGS = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True)
class PlateauParams(Params):
    """Of `reduce_on_plateau`."""

    metric: str = opt("eval_loss", "A logged metric; eval_... is one of evaluations, others are of training.")
    mode: Literal["min", "max"] | None = opt(
        None, "Whether the metric should fall or rise; None: fall, for a name that ends in loss."
    )
    patience: Annotated[int, Ge(0)] = opt(10, "Values in a row without improvement that change nothing.")
    factor: Annotated[float, Gt(0), Lt(1)] = opt(0.1, "Factor by which a reduction multiplies the learning rate.")
    threshold: Annotated[float, Ge(0)] = opt(1e-4, "Share of the best value by which it must be surpassed.")
    window: Annotated[int, Ge(1)] = opt(1, "Logged values whose mean is one value.")


SCHEDULE: KwargsOption[Params] = KwargsOption(
    "lr_scheduler_kwargs",
    "Hyperparameters of lr_scheduler_type, see docs/schedules.md; for schedules of transformers, their arguments.",
    switch="lr_scheduler_type",
    choices={name: schedule.params for name, schedule in SCHEDULES.items()},
    checked_elsewhere=tuple(SchedulerType),
)
PLATEAU: KwargsOption[PlateauParams] = KwargsOption(
    "reduce_on_plateau_kwargs",
    "Hyperparameters of reduce_on_plateau.",
    switch="reduces_on_plateau",
    choices={True: PlateauParams},
    label="reduce_on_plateau",
    off="reduce_on_plateau=0. Set it to how often the learning rate may be reduced.",
)
WEIGHT_DECAY: KwargsOption[WeightDecayParams] = KwargsOption(
    "weight_decay_schedule_kwargs",
    "Hyperparameters of weight_decay_schedule.",
    switch="weight_decay_schedule",
    choices={"linear": WeightDecayParams, "cosine": WeightDecayParams},
)
SCHEDULE_KWARGS: tuple[KwargsOption[Any], ...] = (SCHEDULE, PLATEAU, WEIGHT_DECAY)


@dataclass
class ScheduleOptions(TrainingArguments):
    """How the learning rate and the weight decay change during training; see docs/schedules.md."""

    lr_scheduler_type: str = opt(
        "linear",
        f"Schedule of the learning rate: one of transformers, or {', '.join(SCHEDULES)}.",
    )
    lr_scheduler_kwargs: KwargsValue = opt(None, SCHEDULE.help)
    warmup_steps: float = opt(
        0, "Steps in which the learning rate rises to its full height; below 1: a share of all steps."
    )
    lr_decay_steps: Annotated[int, Ge(1)] | None = opt(
        None, "Step at which the schedule ends; after it, the learning rate stays. None: the last step of training."
    )
    warmup_start_factor: Annotated[float, Ge(0), Le(1)] | None = opt(
        None, "Share of learning_rate with which the warm-up begins; None: 0, unless the schedule says otherwise."
    )
    warmup_evaluations: Annotated[int, Ge(0)] = opt(
        0, "Set warmup_steps to this multiple of eval_steps; needs eval_strategy='steps'. 0: off."
    )
    learning_rate_scaling: Literal["constant", "sqrt", "linear"] = opt(
        "constant", "Multiply learning rates by 1, the square root of the number of processes, or this number."
    )
    reduce_on_plateau: Annotated[int, Ge(0)] = opt(
        0, "How often the learning rate is reduced, on top of its schedule, when a metric stops improving; 0: never."
    )
    reduce_on_plateau_kwargs: KwargsValue = opt(None, PLATEAU.help)
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = opt(
        "constant", "How the weight decay changes: not at all, linearly, or along half a cosine."
    )
    weight_decay_schedule_kwargs: KwargsValue = opt(None, WEIGHT_DECAY.help)

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
        check_warmup_evaluations(self)
        self.warmup_steps = self.warmup_evaluations * self.eval_steps

    @property
    def _schedule_name(self) -> str:
        return str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))

    @property
    def reduces_on_plateau(self) -> bool:
        """Whether the learning rate is reduced when a metric stops improving."""
        return self.reduce_on_plateau > 0

    @property
    def plateau_params(self) -> PlateauParams:
        """The hyperparameters of `reduce_on_plateau`."""
        return PLATEAU.of(self)

    @property
    def has_own_schedule(self) -> bool:
        """Whether the schedule is more than one of transformers."""
        changed = any(getattr(self, option) != getattr(ScheduleOptions, option) for option in _OPTIONS)
        return changed or self._schedule_name in SCHEDULES

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
        return self._schedule_name not in (*_WITHOUT_WARMUP, "one_cycle")

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """HuggingFace's method: the steps of the warm-up in a schedule of this length."""
        if self._schedule_name == "wsd" and self.warmup_steps == 0:
            fraction = self._wsd_params.warmup_fraction
            return round((0.1 if fraction is None else fraction) * num_training_steps)
        return int(super().get_warmup_steps(num_training_steps))

    @property
    def _wsd_params(self) -> WsdParams:
        params = SCHEDULE.of(self)
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
            factor, start = delayed(own.make(SCHEDULE.of(self), span), num_warmup), start or 0.0
        if start is not None:
            factor = with_warmup(factor, num_warmup=num_warmup, start_factor=start)
        scale = distributed.world_size() ** _SCALINGS[self.learning_rate_scaling]
        return lambda step: scale * factor(min(step, end))

    def weight_decay_factor(self, num_training_steps: int) -> Callable[[int], float] | None:
        """What the weight decays are multiplied by, as a function of the step; None: they stay as they are."""
        kind = self.weight_decay_schedule
        if kind == "constant":
            return None
        return weight_decay_factor(WEIGHT_DECAY.of(self), kind, self.lr_decay_steps or num_training_steps)

    def validate_schedule(self) -> None:
        """Reject options of the schedule that are missing, contradict each other or have no effect.

        Raises:
            ConfigError: Names the option, its value and what to do.
        """
        check_schedule(self)
        if self._schedule_name not in SCHEDULES:
            self._check_arguments()
        if self.has_own_schedule:
            self._check_own()
        self._check_warmup()
        if self.reduces_on_plateau:
            self._check_plateau()

    def _check_arguments(self) -> None:
        """Check the arguments of a schedule of transformers."""
        name, arguments = self._schedule_name, mapping_of(self, "lr_scheduler_kwargs")
        try:
            check_arguments(name, arguments)
        except (TypeError, ValueError) as error:
            remedy = "what transformers.optimization says of this schedule"
            if name == "warmup_stable_decay":
                remedy += "; lr_scheduler_type='wsd' takes shares of all steps instead"
            raise ConfigError(
                f"lr_scheduler_type={name!r} with lr_scheduler_kwargs={arguments!r}: {error}. Set lr_scheduler_kwargs "
                f"to {remedy}."
            ) from error

    def _check_own(self) -> None:
        """Check what only prefrl's scheduler can do."""
        name, optim = self._schedule_name, str(getattr(self.optim, "value", self.optim))
        options = [option for option in _OPTIONS if getattr(self, option) != getattr(ScheduleOptions, option)]
        if name in _OF_METRICS:
            raise ConfigError(
                f"{options[0]}={getattr(self, options[0])!r} with lr_scheduler_type={name!r}, which follows a metric "
                "alone. Choose a schedule, such as 'constant_with_warmup', and set reduce_on_plateau."
            )
        if "layerwise" in optim:
            raise ConfigError(
                f"optim={optim!r} updates in the backward pass and takes schedules of transformers alone. Leave "
                f"{', '.join(options) or 'lr_scheduler_type'} at the default, or choose another optimizer."
            )
        self.learning_rate_factor(self.max_steps if self.max_steps > 0 else _SOME_STEPS)

    def _check_warmup(self) -> None:
        name, kwargs = self._schedule_name, mapping_of(self, "lr_scheduler_kwargs")
        if name == "wsd" and self.warmup_steps and self._wsd_params.warmup_fraction is not None:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} with lr_scheduler_kwargs={kwargs!r}: warmup_fraction sets the "
                "length of the warm-up, too. Set one of them."
            )
        has_none = not self.takes_warmup or self.get_warmup_steps(_SOME_STEPS) == 0
        if has_none:
            because = f"lr_scheduler_type={name!r} with warmup_steps={self.warmup_steps} has no such warm-up"
            remedy = "Set warmup_steps, and a schedule with a warm-up, such as 'constant_with_warmup'."
            check_unset(self, "warmup_start_factor", "warmup_evaluations", because=because, remedy=remedy)
        shape = next((key for key in ("warmup_type", "warmup_lr_rate") if key in kwargs), None)
        if shape is not None and self.warmup_start_factor is not None:
            raise ConfigError(
                f"warmup_start_factor={self.warmup_start_factor} with lr_scheduler_kwargs={kwargs!r}: {shape!r} "
                "describes another warm-up. Remove one of them."
            )

    def _check_plateau(self) -> None:
        params = self.plateau_params
        where = f"reduce_on_plateau_kwargs: metric={params.metric!r}"
        if params.mode is None and not params.metric.endswith("loss"):
            raise ConfigError(f"{where}: should it rise or fall? Set the key mode to 'max' or 'min'.")
        if not params.metric.startswith("eval_"):
            if self.logging_strategy != IntervalStrategy.STEPS or self.logging_steps != 1:
                raise ConfigError(
                    f"{where} with logging_strategy={self.logging_strategy.value!r}, "
                    f"logging_steps={self.logging_steps}: a metric of training must be logged in every step, so that "
                    "a resumed run sees the same values. Set logging_steps=1, and the key window to the number of "
                    "steps to average over; or choose a metric of evaluations, such as 'eval_loss'."
                )
        elif self.eval_strategy == IntervalStrategy.NO:
            raise ConfigError(
                f"{where} with eval_strategy='no': there are no evaluations. Set eval_strategy and eval_steps, or "
                "choose a metric of training."
            )
