"""Options that every trainer has in addition to HuggingFace's."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from annotated_types import Ge, Gt, Le
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_pt_utils import AcceleratorConfig

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.models.kernels import liger_options
from prefrl.optional import require
from prefrl.options.fields import check_fields, json_mapping, opt, parse_json, read_json, take_other_forms
from prefrl.options.foreign import advice
from prefrl.options.kwargs import KwargsOption
from prefrl.options.length_bound import LengthBound
from prefrl.options.rules import apply
from prefrl.options.run_rules import (
    COMMON_RULES,
    HUGGINGFACE,
    IGNORED_PARTS_RULES,
    IGNORED_RULES,
    LIGER_RULES,
    check_intervals,
    check_paths,
)
from prefrl.options.suggest import check_known, nearest
from prefrl.printable import masked, plain
from prefrl.trainer.base.options.autopilot import AUTOPILOT, AUTOPILOT_RULES, AutopilotOptions, name_best_metric
from prefrl.trainer.base.options.checkpoint import CHECKPOINT_OPTIONS, CheckpointOptions, check_checkpoints
from prefrl.trainer.base.options.evaluation import EVALUATION_RULES, EvaluationOptions
from prefrl.trainer.base.options.flat_names import FlatName, fill_places, set_aside, without_flat_values
from prefrl.trainer.base.options.optimizer import OptimizerOptions, check_optimizer, named_for_huggingface
from prefrl.trainer.base.options.precision import PrecisionOptions, check_precision
from prefrl.trainer.base.options.schedule import SCHEDULE_KWARGS, ScheduleOptions
from prefrl.trainer.base.options.size import AUTO_SIZE, RATE_RULES, SizeOptions, derive_sizes, take_automatic
from prefrl.trainer.base.options.tokenizer import TokenizerOptions
from prefrl.trainer.features.profile import PROFILE, ProfileOptions, check_profile
from prefrl.trainer.optimizers import check_installed

if TYPE_CHECKING:
    from prefrl.losses.truncation import Truncation
    from prefrl.models.plans import PositionLimit

__all__ = ["TRUNCATION_SIDES", "BaseConfig", "TruncationMode"]

TruncationMode = Literal["keep_start", "keep_end", "error"]
# The side from which tokens are cut off.
TRUNCATION_SIDES: dict[TruncationMode, Literal["left", "right", "error"]] = {
    "keep_start": "right",
    "keep_end": "left",
    "error": "error",
}

# The packages of trackers that transformers looks for.
_TRACKERS = {
    **{name: name for name in ("clearml", "codecarbon", "dagshub", "mlflow", "neptune", "swanlab", "tensorboard")},
    **{"trackio": "trackio", "wandb": "wandb", "comet_ml": "comet-ml"},
}
_DOCS = "docs/trainers lists the options."


@dataclass
class BaseConfig(
    # Some of these define options of TrainingArguments anew, so they come before the classes that inherit it.
    CheckpointOptions,
    AutopilotOptions,
    OptimizerOptions,
    TokenizerOptions,
    PrecisionOptions,
    ProfileOptions,
    EvaluationOptions,
    SizeOptions,
    ScheduleOptions,
):
    """`transformers.TrainingArguments` with the options that all trainers of prefrl share."""

    # Options that map names to hyperparameters.
    kwargs_options: ClassVar[tuple[KwargsOption[Any], ...]] = (
        *SCHEDULE_KWARGS,
        AUTO_SIZE,
        *AUTOPILOT,
        *CHECKPOINT_OPTIONS,
        PROFILE,
    )
    # Types of options that are not those of their annotations, from which command lines are made.
    hints: ClassVar[Mapping[str, Any]] = {
        **HUGGINGFACE,
        "accelerator_config": AcceleratorConfig | dict[str, Any] | str | None,
    }
    flat_names: ClassVar[Mapping[str, FlatName]] = {}  # keywords that fill places in other options
    # Options that this class adds and that do not decide the updates, so that a resumed run may change them.
    changeable: ClassVar[tuple[str, ...]] = (
        "logging_steps",
        "logging_first_step",
        "logging_nan_inf_filter",
        "remove_unused_columns",
        "no_remove_unused_columns",
        "model_init_kwargs",  # what it decides is seen in the model
        "trust_remote_code",
        "max_tokens_per_micro_batch",
        "effective_batch_size",  # rows_per_step says what it decides
        "auto_size_kwargs",
        "forward_plan",
        "activation_checkpointing",
        "activation_checkpointing_kwargs",
        "activation_offloading",
        "use_liger_kernel",
        "liger_kernel_config",
        "dataset_num_proc",
        "log_flops",
        "allow_resume_changes",
        "save_in_background",
        "max_train_time",
        "on_nan",
        "nan_patience",
    )

    logging_steps: float = opt(10, "Log every N optimizer steps; a value below 1 is a fraction of all steps.")
    logging_first_step: bool = opt(True, "Log the first optimizer step, too.")
    logging_nan_inf_filter: bool = opt(False, "Hide NaN and infinite losses in the logs.")
    remove_unused_columns: bool = opt(False, "Must stay False: rewards may read any column of the dataset.")
    no_remove_unused_columns: bool = opt(
        False, "Accepted for commands written for TRL; it changes nothing, because no columns are removed."
    )
    model_init_kwargs: dict[str, Any] | str | None = opt(
        None, "Arguments for from_pretrained when the model is given by name; JSON on the command line."
    )
    trust_remote_code: bool = opt(False, "Run code that comes with the model, as the key of model_init_kwargs does.")
    disable_dropout: bool = opt(False, "Set all dropout rates of the model to 0, including those of adapters.")
    freeze: list[str] | None = opt(
        None, "Regular expressions; parameters whose names contain a match are not trained."
    )
    router_aux_loss_coef: Annotated[float, Ge(0)] | None = opt(
        None,
        "Weight of the load-balancing loss of a mixture of experts, see docs/moe.md; None: the weight in the "
        "model's config. Other models have no such loss.",
    )
    forward_plan: Literal["auto", "shared_prefix", "packed", "padded"] = opt(
        "auto",
        "How a forward pass lays out its rows. All plans give equal results. auto computes shared prompts once, packs "
        "rows that share none, and pads if the model failed the self-check of the other plans.",
    )
    # transformers has these two from 5.23; before, it knows them by their old names only.
    activation_checkpointing: bool = opt(
        None,  # until __post_init__ knows whether the old name is set
        "Keep only the inputs of the layers and recompute the layers in the backward pass. Saves memory, takes "
        "about a third more time, never changes the update.",
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = opt(
        None,
        "Arguments of torch.utils.checkpoint.checkpoint, and every_n_layers and offload of transformers; JSON on the "
        "command line.",
    )
    activation_offloading: bool = opt(
        False,
        "Keep the activations that the backward pass needs in host memory instead of GPU memory; with "
        "activation_checkpointing, these are the inputs of the layers. Changes memory and speed, never the update.",
    )
    use_liger_kernel: bool = opt(
        False,
        "Compute norms, rotary embeddings and MLPs with Liger's fused kernels. Needs a GPU and prefrl[liger]. "
        "Changes memory and speed; the update changes only by rounding.",
    )
    liger_kernel_config: dict[str, bool] | str | None = opt(
        None,
        'Liger kernels to switch on or off, such as {"rope": false}; None: Liger\'s defaults for the model. JSON on '
        "the command line. Liger's losses are never used.",
    )
    image_key: str | None = opt(
        None,
        "Column that holds the images of a row, one or a list; None: the column images or image, if there is one.",
    )
    dataset_num_proc: Annotated[int, Ge(1), Le(1024)] | None = opt(
        None, "Number of processes that tokenize the dataset."
    )
    log_flops: bool = opt(
        False,
        "Count the floating-point operations of every step and log them as perf/..., together with the minimum that "
        "its rows need. Costs some time, never changes the update.",
    )

    allow_resume_changes: list[str] | None = opt(
        None,
        "Differences from the checkpoint to allow when training resumes, although they change the updates: names of "
        "options, or model, data, rewards. Other differences raise an error that lists their names.",
    )
    save_in_background: bool = opt(
        False,
        "Continue training while the files of a checkpoint are written to disk and sealed. Copying the weights into "
        "the operating system's memory is still part of the step.",
    )

    max_train_time: Annotated[float, Gt(0)] | None = opt(
        None,
        "Seconds after which training saves a checkpoint and the process ends with exit code 75, so that the next job "
        "can resume; checked after each step. None: no limit.",
    )
    on_nan: Literal["stop", "skip"] = opt(
        "stop",
        "What to do if the loss or the gradient norm of a step is NaN or infinite. The step is never applied. stop: "
        "training ends with an error. skip: it continues with the next step.",
    )
    nan_patience: Annotated[int, Ge(1)] = opt(
        3, "With on_nan='skip': training ends with an error after this many skipped steps in a row."
    )

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

    def __post_init__(self, *values: Any) -> None:
        set_aside(self, values)
        fill_places(self, self.flat_names)
        self.automatic = take_automatic(self)  # the options that are "auto"
        self.take_other_forms()
        check_fields(self, self.hints)  # before HuggingFace's __post_init__, which already compares numbers
        check_intervals(self)
        self._check_json()
        self._set_both_names()
        name_best_metric(self)
        try:
            with named_for_huggingface(self):
                super().__post_init__()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.sought = derive_sizes(self, self.automatic)  # those of them that need a trial
        self.validate()

    def take_other_forms(self) -> None:
        """Give options one form that may be given in several, in place, before their types are checked."""
        take_other_forms(self)

    def __init_subclass__(cls) -> None:
        """Keep `__repr__`: `dataclass` would write one that shows secrets into each subclass."""
        super().__init_subclass__()
        if "__post_init__" in vars(cls):
            cls.__post_init__ = without_flat_values(cls.__post_init__)  # type: ignore[method-assign]
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
        """Check what HuggingFace reads as JSON: its errors do not name the option."""
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs"):
            value = getattr(self, name)
            if isinstance(value, str) and value.startswith("{"):
                json_mapping(value, name)
        for name in ("deepspeed", "fsdp_config"):
            read_json(self, name)
        for key in read_json(self, "accelerator_config"):
            check_known("accelerator_config", key, [field.name for field in fields(AcceleratorConfig)], "key")

    def _check_trackers(self) -> None:
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

    def _set_both_names(self) -> None:
        """Give activation checkpointing one value under its name and its old one: HuggingFace's loop reads either."""
        for option in ("checkpointing", "checkpointing_kwargs"):
            new, old = f"activation_{option}", f"gradient_{option}"
            if getattr(self, new) is None:
                setattr(self, new, getattr(self, old))
            setattr(self, old, getattr(self, new))

    @classmethod
    def free_options(cls) -> set[str]:
        """The options that do not decide the updates, of this class and its bases; see `changeable`."""
        return {name for base in cls.__mro__ for name in vars(base).get("changeable", ())}

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows that a micro-batch of one process starts from: dataset rows, or completions."""
        return int(self.per_device_train_batch_size)

    @property
    def rows_in_words(self) -> str:
        """The rows of an optimizer step, for people."""
        rows, steps = self.rows_per_micro_batch, int(self.gradient_accumulation_steps)
        processes = int(self.world_size)
        where = f" on each of {processes} processes" if processes > 1 else ""
        return f"{rows * steps * processes:,} rows" + (f": {rows} x {steps}{where}" if steps * processes > 1 else "")

    @property
    def steps_of_a_generation(self) -> int:
        """Optimizer steps that learn from one generation batch; 1 if there are none."""
        return 1

    @property
    def scoring_temperature(self) -> float:
        """Temperature of the distribution whose log-probs enter the losses."""
        return 1.0

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
    def length_bound(self) -> LengthBound:
        """What bounds the length of prepared rows."""
        raise NotImplementedError

    def validate(self) -> None:
        """Reject invalid options before anything is loaded.

        Raises:
            ConfigError: Names the field, its value, what is allowed and what to do.
        """
        for option in self.kwargs_options:
            option.check(self)
        distributed.check_processes(self, os.environ)
        parse_json(self, "model_init_kwargs", "activation_checkpointing_kwargs", "liger_kernel_config")
        if self.trust_remote_code:
            self.model_init_kwargs = {
                "trust_remote_code": True,
                **cast("dict[str, Any]", self.model_init_kwargs or {}),
            }
        check_paths(self)
        apply(self, COMMON_RULES)
        self._check_trackers()
        check_precision(self, fp8=self.fp8)
        self._validate_liger()
        check_checkpoints(self)
        apply(self, IGNORED_RULES, IGNORED_PARTS_RULES)
        self.validate_schedule()
        check_optimizer(self)
        apply(self, RATE_RULES, EVALUATION_RULES, AUTOPILOT_RULES)
        check_profile(self)

    def _validate_liger(self) -> None:
        if not self.use_liger_kernel:
            return
        apply(self, LIGER_RULES)
        require("liger_kernel", extra="liger", feature="use_liger_kernel=True")
        # HuggingFace passes them to Liger, too.
        self.liger_kernel_config = liger_options(cast("dict[str, bool] | None", self.liger_kernel_config))
