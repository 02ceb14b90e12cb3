"""The adapter between our options and HuggingFace's: what needs a device, a model or a package is checked here."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch.optim import Optimizer
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from prefrl import distributed
from prefrl.errors import ConfigError, MissingPackageError, is_installed, masked, not_on_windows, plain, require
from prefrl.losses.truncation import Truncation
from prefrl.models.kernels import liger_options
from prefrl.models.plans import PositionLimit
from prefrl.models.tokenizer_changes import TokenizerChanges
from prefrl.options.base import BaseOptions
from prefrl.options.fields import hints_of, listed_fields, mapping_of, read_json
from prefrl.options.names import advice, check_known, nearest
from prefrl.options.optimizers import OPTIMIZERS, REFUSED, check_not_refused, optimizer_of
from prefrl.options.schedule import WsdParams, own_options, schedule_of
from prefrl.options.types import check_value
from prefrl.trainer.optimizers import added_keys, check_installed, check_made
from prefrl.trainer.scheduler import (
    SCHEDULE_NAMES,
    SCHEDULES,
    RatePlateau,
    Scheduler,
    Span,
    check_arguments,
    delayed,
    of_huggingface,
    weight_decay_factor,
    with_warmup,
)

_SOME_STEPS = 1009  # to try a schedule out before the number of steps is known
# Exponent of the number of ranks.
_SCALINGS = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}
# The packages of trackers that transformers looks for.
_TRACKERS = {
    **{name: name for name in ("clearml", "codecarbon", "dagshub", "mlflow", "neptune", "swanlab", "tensorboard")},
    **{"trackio": "trackio", "wandb": "wandb", "comet_ml": "comet-ml"},
}
_DOCS = "docs/trainers lists the options."
_NAMES = (*OPTIMIZERS, *(row.value for row in OptimizerNames))
KNOWN_OPTIMIZERS = (*_NAMES, *REFUSED)  # with those whose refusal says why


# What HuggingFace says of options that this machine cannot follow, and what is said instead.
_HUGGINGFACES = {
    "Your setup doesn't support bf16": (
        "bf16=True on a machine without a GPU that computes in bfloat16. Set use_cpu=True to train on the CPU, which "
        "can, or leave bf16 out; older GPUs have fp16=True."
    ),
    "--tf32 requires": (
        "tf32=True on a machine without a GPU that has TF32: it needs an NVIDIA GPU of compute capability 8.0 "
        "(Ampere) or higher. Leave tf32 out."
    ),
}


@dataclass
class BaseConfig(BaseOptions, TrainingArguments):
    """`transformers.TrainingArguments` with the options that all trainers of prefrl share."""

    hints: ClassVar[Mapping[str, Any]] = {
        "accelerator_config": AcceleratorConfig | dict[str, Any] | str | None,
    }
    _num_processes: ClassVar[int | None] = None

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

    @classmethod
    def for_processes(cls, number: int | None, **options: Any) -> Self:
        """A config for a run on this many processes. None means those that this process is one of."""
        config = cls.__new__(cls, **options)
        if number is not None:
            config.__dict__["_num_processes"] = number
        config.__init__(**options)  # type: ignore[misc]
        return config

    @property
    def world_size(self) -> int:
        """HuggingFace's property, unless the config is for other processes."""
        return self._num_processes or int(super().world_size)

    def _complete(self) -> None:
        """Let HuggingFace check its options, under the names of optimizers and schedules that it knows."""
        hints = hints_of(AcceleratorConfig)
        for key, value in read_json(self, "accelerator_config").items():
            check_known("accelerator_config", key, hints, "key")
            check_value(f"accelerator_config.{key}", value, hints[key])
        schedule, optim = schedule_of(self), self.optim
        check_known("lr_scheduler_type", schedule, SCHEDULE_NAMES, "schedule")
        if schedule in SCHEDULES:
            self.lr_scheduler_type = SchedulerType.CONSTANT
        if optim in OPTIMIZERS:
            self.optim = OptimizerNames.ADAMW_TORCH
        else:
            check_not_refused(optimizer_of(self))
            check_known("optim", optimizer_of(self), _NAMES, "optimizer")
        if self.deepspeed is not None:
            distributed.check_deepspeed_starts(self.deepspeed, os.environ)
        try:
            TrainingArguments.__post_init__(self)
        except ValueError as error:
            ours = (text for start, text in _HUGGINGFACES.items() if str(error).startswith(start))
            raise ConfigError(next(ours, str(error))) from None
        finally:
            if optim in OPTIMIZERS:
                self.optim = optim
        if schedule in SCHEDULES:
            self.lr_scheduler_type = schedule
        distributed.check_processes(self, os.environ)
        self._count_evaluations()

    def __init_subclass__(cls) -> None:
        """Keep `__repr__`: `dataclass` would write one that shows secrets into each subclass."""
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = BaseConfig.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in listed_fields(type(self))}
        shown = ", ".join(f"{name}={value!r}" for name, value in masked(values).items())
        return f"{type(self).__name__}({shown})"

    __str__ = __repr__

    def to_dict(self) -> dict[str, Any]:
        """HuggingFace's method, whose result goes to trackers: the options once, with secrets masked at any depth."""
        tokens = {
            name: getattr(self, name) for name in ("eos_token", "pad_token")
        }  # which HuggingFace takes for secrets
        values = {name: plain(value) for name, value in {**super().to_dict(), **tokens}.items()}
        listed = {field.name for field in listed_fields(type(self))}
        return cast("dict[str, Any]", masked({name: value for name, value in values.items() if name in listed}))

    def __post_init__(self) -> None:
        """Check the options, and then what they ask of this machine."""
        super().__post_init__()
        self.check_machine()

    def check_machine(self) -> None:
        """Refuse what the device, torch or an installed package cannot do, and trackers that do not exist.

        Raises:
            ConfigError: Names the option, its value and what to do.
            ImportError: A package is missing.
        """
        known = [*INTEGRATION_TO_CALLBACK, "none", "all"]
        for name in self.report_to:
            if name not in INTEGRATION_TO_CALLBACK:
                raise ConfigError(f"report_to={name!r}: unknown tracker. {nearest(str(name), known)}")
        check_precision(self)
        if self.use_liger_kernel:
            require("liger_kernel", extra="liger", feature="use_liger_kernel=True")
            # HuggingFace passes them to Liger, too.
            self.liger_kernel_config = liger_options(cast("dict[str, bool] | None", self.liger_kernel_config))
        self._check_schedule()
        name = optimizer_of(self)
        if name not in OPTIMIZERS:
            _check_ignored(self, name)
        check_made(name, self)

    def check_packages_installed(self) -> None:
        """Refuse Windows, and trackers and optimizers whose packages are missing.

        Commands and trainers call this, because a config may be read on another machine.

        Raises:
            ConfigError: See above.
        """
        if sys.platform == "win32":
            raise not_on_windows("a training")
        for name in self.report_to:
            if name in _TRACKERS and name not in get_available_reporting_integrations():
                raise ConfigError(
                    f"report_to={name!r}: its package is not installed. Run `pip install {_TRACKERS[name]}`, or set "
                    "report_to='none'."
                )
        check_installed(optimizer_of(self))

    @property
    def rows_in_words(self) -> str:
        """The rows of an optimizer step in words, for messages."""
        rows, steps = self.rows_per_micro_batch, int(self.gradient_accumulation_steps)
        processes = int(self.num_ranks)
        where = f" on each of {processes} processes" if processes > 1 else ""
        return f"{rows * steps * processes:,} rows" + (f": {rows} x {steps}{where}" if steps * processes > 1 else "")

    @property
    def scoring_truncation(self) -> Truncation | None:
        """What cuts that distribution. None means nothing does."""
        return None

    def fit_context(self, limit: PositionLimit | None) -> None:
        """Set what depends on the model's context. This is called when the model is loaded.

        Args:
            limit: The model's maximum number of positions. None means that it is not known.

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
            name_or_path=self.tokenizer_name_or_path,
        )

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """HuggingFace's method: the steps of the warm-up in a schedule of this length."""
        if schedule_of(self) == "wsd" and self.warmup_steps == 0:
            params = self.schedule_params
            assert isinstance(params, WsdParams)
            fraction = params.warmup_fraction
            return round((0.1 if fraction is None else fraction) * num_training_steps)
        return int(super().get_warmup_steps(num_training_steps))

    def own_scheduler(self, given: Any, optimizer: Optimizer, num_training_steps: int) -> Scheduler | None:
        """The scheduler that these options ask for. None means HuggingFace's.

        Args:
            given: A scheduler that exists already, if any.
            optimizer: The optimizer, new or before its state is loaded.
            num_training_steps: Steps of the training.

        Raises:
            ConfigError: An argument of the schedule does not fit the number of steps, or another scheduler is given.
        """
        if not self.has_own_schedule or isinstance(given, Scheduler):
            return None
        if given is not None:
            raise ConfigError(
                f"lr_scheduler_type={str(self.lr_scheduler_type)!r} and the options of schedules have no effect "
                "because the trainer was given a scheduler in optimizers. Remove it, or these options."
            )
        plateau = RatePlateau(self.plateau_params, self.reduce_on_plateau) if self.reduces_on_plateau else None
        return Scheduler(
            optimizer,
            self.learning_rate_factor(num_training_steps),
            weight_decay_factor=self.weight_decay_factor(num_training_steps),
            plateau=plateau,
        )

    def learning_rate_factor(self, num_training_steps: int) -> Callable[[int], float]:
        """What the learning rates are multiplied by, as a function of the step, without reductions on a plateau.

        Args:
            num_training_steps: Steps of the training.

        Raises:
            ConfigError: An argument of the schedule is missing, or does not fit the number of steps.
        """
        name, start = schedule_of(self), self.warmup_start_factor
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
        """What the weight decays are multiplied by, as a function of the step. None means they stay as they are."""
        kind = self.weight_decay_schedule
        if kind == "constant":
            return None
        return weight_decay_factor(self.weight_decay_params, kind, self.lr_decay_steps or num_training_steps)

    def _check_schedule(self) -> None:
        """Check the arguments of a schedule of transformers, and what only prefrl's scheduler can do."""
        name, arguments = schedule_of(self), mapping_of(self, "lr_scheduler_kwargs")
        try:
            if name not in SCHEDULES:
                check_arguments(name, arguments)
        except (TypeError, ValueError) as error:
            remedy = "the arguments of this schedule in transformers.optimization"
            if name == "warmup_stable_decay":
                remedy += "; lr_scheduler_type='wsd' takes fractions of all steps instead"
            raise ConfigError(
                f"lr_scheduler_type={name!r} with lr_scheduler_kwargs={arguments!r}: {error}. Set lr_scheduler_kwargs "
                f"to {remedy}."
            ) from error
        if not self.has_own_schedule:
            return
        optim = optimizer_of(self)
        if "layerwise" in optim:
            raise ConfigError(
                f"optim={optim!r} updates in the backward pass and supports only schedules of transformers. Leave "
                f"{', '.join(own_options(self)) or 'lr_scheduler_type'} at the default, or choose another optimizer."
            )
        self.learning_rate_factor(self.max_steps if self.max_steps > 0 else _SOME_STEPS)


def _check_ignored(config: Any, name: str) -> None:
    """Reject arguments that transformers would not pass on to its optimizer."""
    parts = config.optim_args.replace(" ", "").split(",") if config.optim_args else []
    parts = [part for part in parts if part.partition("=")[0] not in added_keys(name)]
    read = _arguments_of(config, parts) if parts else None
    for part in parts:
        if read is not None and _arguments_of(config, [other for other in parts if other != part]) == read:
            key = part.partition("=")[0]
            known = f" It passes on {', '.join(added_keys(name))}." if added_keys(name) else ""
            raise ConfigError(
                f"optim_args={config.optim_args!r}: {key!r} has no effect because transformers does not pass it to "
                f"optim={name!r}.{known} {_REMEDIES.get(key, _REMEDY)}"
            )


_REMEDY = "Remove it, or give the trainer your own optimizer: optimizers=(optimizer, None)."
_SCHEDULE = (
    "It replaces learning_rate and its schedule: set these, such as lr_scheduler_type='inverse_sqrt' with "
    "optim_args='scale_parameter=True'."
)
_REMEDIES = {"relative_step": _SCHEDULE, "warmup_init": _SCHEDULE}


def _arguments_of(config: TrainingArguments, parts: list[str]) -> Any:
    """What HuggingFace passes to the optimizer; None if that cannot be known before the model or package is there."""
    from transformers import Trainer  # takes seconds

    other = copy.copy(config)
    other.optim_args = ",".join(parts) or None
    try:
        return Trainer.get_optimizer_cls_and_kwargs(other)
    except (ImportError, ValueError):
        return None


logger = logging.getLogger(__name__)

_BF16_SINCE, _FP8_SINCE = (8, 0), (8, 9)  # compute capability


def check_precision(config: Any) -> None:
    """Reject precisions that the device does not have, and backends of torch.compile that do not exist.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    if config.mixed_precision == "fp8":
        raise ConfigError(
            "mixed_precision: fp8 in accelerate's config, or ACCELERATE_MIXED_PRECISION=fp8: in prefrl, fp8 is an "
            "option of the run. Remove it, and set fp8=True with bf16=True."
        )
    if config.bf16 and config.device.type == "cuda":
        _warn_of_emulation(config.device)
    if config.fp8:
        _check_fp8(config)
    if config.torch_compile:
        known = torch.compiler.list_backends(())
        if config.torch_compile_backend not in known:
            raise ConfigError(
                f"torch_compile_backend={config.torch_compile_backend!r}: unknown. "
                f"{nearest(str(config.torch_compile_backend), known)}"
            )


def _warn_of_emulation(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) < _BF16_SINCE and distributed.is_main():
        logger.warning(
            "bf16=True on %s: it has no arithmetic in bfloat16, which is therefore emulated and slow. Set fp16=True, "
            "or neither",
            torch.cuda.get_device_name(device),
        )


def _check_fp8(config: TrainingArguments) -> None:
    device = config.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FP8_SINCE:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        raise ConfigError(
            f"fp8=True on {name}: 8-bit products need a GPU of compute capability 8.9 or higher (Ada, Hopper, "
            "Blackwell). Set bf16=True alone."
        )
    if not config.bf16:
        raise ConfigError(
            "fp8=True with bf16=False: everything that is not computed in 8 bits is computed in bfloat16. Set "
            "bf16=True."
        )
    if not is_installed("torchao"):
        raise MissingPackageError("fp8=True needs torchao: pip install 'prefrl[fp8]'")
