"""Options that every trainer has in addition to HuggingFace's."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SchedulerType

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.models.kernels import liger_options
from prefrl.models.tokenizer_changes import TokenizerChanges
from prefrl.optional import require
from prefrl.options.base import BaseOptions
from prefrl.options.fields import (
    mapping_of,
    plain_value,
    read_json,
)
from prefrl.options.foreign import advice
from prefrl.options.schedule import WsdParams
from prefrl.options.schedule_rules import own_options
from prefrl.options.suggest import check_known, nearest
from prefrl.printable import masked, plain
from prefrl.trainer.base.options.optimizer import check_optimizer, named_for_huggingface
from prefrl.trainer.base.options.precision import check_precision
from prefrl.trainer.features.profile import check_profile
from prefrl.trainer.optimizers import check_installed
from prefrl.trainer.scheduler import (
    SCHEDULE_NAMES,
    SCHEDULES,
    Span,
    check_arguments,
    delayed,
    of_huggingface,
    weight_decay_factor,
    with_warmup,
)

if TYPE_CHECKING:
    from prefrl.losses.truncation import Truncation
    from prefrl.models.plans import PositionLimit

_SOME_STEPS = 1009  # to try a schedule out before the number of steps is known
# Exponent of the number of ranks.
_SCALINGS = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}
__all__ = [
    "BaseConfig",
]

# The packages of trackers that transformers looks for.
_TRACKERS = {
    **{name: name for name in ("clearml", "codecarbon", "dagshub", "mlflow", "neptune", "swanlab", "tensorboard")},
    **{"trackio": "trackio", "wandb": "wandb", "comet_ml": "comet-ml"},
}
_DOCS = "docs/trainers lists the options."


@dataclass
class BaseConfig(BaseOptions, TrainingArguments):
    """`transformers.TrainingArguments` with the options that all trainers of prefrl share."""

    hints: ClassVar[Mapping[str, Any]] = {
        "accelerator_config": AcceleratorConfig | dict[str, Any] | str | None,
    }

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse unknown names with what they are here, or the nearest known one; Python's error has neither."""
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        unknown = [] if takes_any else [name for name in kwargs if name not in known]
        if unknown:
            name = unknown[0]
            remedy = advice(name, known) or nearest(name, known, otherwise=_DOCS)
            raise ConfigError(f"{cls.__name__} has no option {name!r}. {remedy}")
        config: Self = super().__new__(cls)
        return config

    def _complete(self) -> None:
        """Let HuggingFace check its options, under the names of optimizers and schedules that it knows."""
        name = self._schedule_name
        check_known("lr_scheduler_type", name, SCHEDULE_NAMES, "schedule")
        if name in SCHEDULES:
            self.lr_scheduler_type = SchedulerType.CONSTANT
        try:
            with named_for_huggingface(self):
                TrainingArguments.__post_init__(self)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if name in SCHEDULES:
            self.lr_scheduler_type = name
        self._count_evaluations()

    def __init_subclass__(cls) -> None:
        """Keep `__repr__`: `dataclass` would write one that shows secrets into each subclass."""
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = BaseConfig.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = ", ".join(f"{name}={value!r}" for name, value in masked(values).items())
        return f"{type(self).__name__}({shown})"

    __str__ = __repr__

    def to_dict(self) -> dict[str, Any]:
        """HuggingFace's method, whose result goes to trackers: all options, with secrets masked at any depth."""
        tokens = {
            name: getattr(self, name) for name in ("eos_token", "pad_token")
        }  # which HuggingFace takes for secrets
        values = {name: plain(value) for name, value in {**super().to_dict(), **tokens}.items()}
        return cast("dict[str, Any]", masked(values))

    def _check_json(self) -> None:
        """See `BaseOptions._check_json`."""
        super()._check_json()
        for key in read_json(self, "accelerator_config"):
            check_known("accelerator_config", key, [field.name for field in fields(AcceleratorConfig)], "key")

    def _check_trackers(self) -> None:
        """See `BaseOptions._check_trackers`."""
        known = [*INTEGRATION_TO_CALLBACK, "none", "all"]
        for name in self.report_to:
            if name not in INTEGRATION_TO_CALLBACK:
                raise ConfigError(f"report_to={name!r}: unknown tracker. {nearest(str(name), known)}")

    def check_packages_installed(self) -> None:
        """Refuse trackers and optimizers whose packages are missing.

        Commands and trainers ask for it: a config may be read on another machine.

        Raises:
            ConfigError: See above.
        """
        for name in self.report_to:
            if name in _TRACKERS and name not in get_available_reporting_integrations():
                raise ConfigError(
                    f"report_to={name!r}: its package is not installed. Run `pip install {_TRACKERS[name]}`, or set "
                    "report_to='none'."
                )
        check_installed(str(getattr(self.optim, "value", self.optim)))

    @property
    def rows_in_words(self) -> str:
        """The rows of an optimizer step, for people."""
        rows, steps = self.rows_per_micro_batch, int(self.gradient_accumulation_steps)
        processes = int(self.world_size)
        where = f" on each of {processes} processes" if processes > 1 else ""
        return f"{rows * steps * processes:,} rows" + (f": {rows} x {steps}{where}" if steps * processes > 1 else "")

    @property
    def scoring_truncation(self) -> Truncation | None:
        """What cuts that distribution; None: nothing does."""
        return None

    def fit_context(self, limit: PositionLimit | None) -> None:
        """Set what depends on the model's context; called when the model is loaded.

        Args:
            limit: Of the model; None: not known.

        Raises:
            ConfigError: The context is too short, or not known.
        """

    @property
    def tokenizer_changes(self) -> TokenizerChanges:
        """What to change in the tokenizer."""
        return TokenizerChanges(
            self.chat_template_path,
            self.eos_token,
            self.pad_token,
            adds_tokens=self.adds_tokens,
            seed=self.seed,
        )

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

    def _check_processes(self) -> None:
        """See `BaseOptions._check_processes`."""
        distributed.check_processes(self, os.environ)

    def _check_precision(self) -> None:
        """See `BaseOptions._check_precision`."""
        check_precision(self, fp8=self.fp8)

    def _set_kernels(self) -> None:
        """See `BaseOptions._set_kernels`."""
        if not self.use_liger_kernel:
            return
        require("liger_kernel", extra="liger", feature="use_liger_kernel=True")
        # HuggingFace passes them to Liger, too.
        self.liger_kernel_config = liger_options(cast("dict[str, bool] | None", self.liger_kernel_config))

    def _check_schedule(self) -> None:
        """See `BaseOptions._check_schedule`."""
        if self._schedule_name not in SCHEDULES:
            self._check_arguments()
        super()._check_schedule()
        if self.has_own_schedule:
            self._check_own()

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
        if "layerwise" in optim:
            raise ConfigError(
                f"optim={optim!r} updates in the backward pass and supports only schedules of transformers. Leave "
                f"{', '.join(own_options(self)) or 'lr_scheduler_type'} at the default, or choose another optimizer."
            )
        self.learning_rate_factor(self.max_steps if self.max_steps > 0 else _SOME_STEPS)

    def _check_optimizer(self) -> None:
        """See `BaseOptions._check_optimizer`."""
        check_optimizer(self)

    def _check_profile(self) -> None:
        """See `BaseOptions._check_profile`."""
        check_profile(self)
