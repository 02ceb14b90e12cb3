"""The options that every trainer has in addition to HuggingFace's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from annotated_types import Ge, Gt, Le, Lt

from prefrl.options.fields import (
    about,
    apply,
    check_fields,
    fill_places,
    hints_of,
    json_mapping,
    opt,
    parse_json,
    read_json,
)
from prefrl.options.names import check_references
from prefrl.options.optimizers import NAMED_OPTIMIZER_RULES, UPDATE_RULES, check_rates
from prefrl.options.params import KwargsValue, ParamsOf, kwargs, kwargs_options
from prefrl.options.run import (
    COMMON_RULES,
    COMPILATION_RULES,
    EVALUATION_RULES,
    HUGGINGFACE,
    IGNORED_PARTS_RULES,
    IGNORED_RULES,
    LIGER_RULES,
    PATHS,
    PROFILE_RULES,
    PROFILED_PROCESSES_RULES,
    CheckpointParams,
    UploadParams,
    check_checkpoints,
    check_device,
    check_intervals,
)
from prefrl.options.schedule import (
    AUTOPILOT_RULES,
    METRIC_SCHEDULE_RULES,
    PLATEAU_RULES,
    SCHEDULE_RULES,
    WARMUP_RULES,
    EarlyStoppingParams,
    GrowthParams,
    SoupParams,
    SpikeParams,
    name_best_metric,
)
from prefrl.options.training import NAMES_RULES, RATE_RULES, TrainingOptions, derive_sizes, take_automatic
from prefrl.options.types import LengthBound

_WATCHED = ("loss", "grad_norm", "kl")


@dataclass(init=False, repr=False, eq=False)
class BaseOptions(TrainingOptions):
    """Options that every trainer has; see also docs/schedules.md, docs/autopilot.md and docs/checkpoints.md."""

    # Types of options that are not those of their annotations, from which command lines are made.
    hints: ClassVar[Mapping[str, Any]] = HUGGINGFACE
    # Whether tokens that a chat format needs are added. Reference models and servers would not have them.
    adds_tokens: ClassVar[bool] = False
    # The metric by which checkpoints are chosen if none is named.
    best_metric: ClassVar[str] = "loss"
    # What shows a spike if nothing is named.
    spike_metrics: ClassVar[tuple[str, ...]] = _WATCHED
    # Whether the numbers of processes and rows are those of the run.
    knows_sizes: ClassVar[bool] = True
    # Whether options without effect are told; see `warn_of_hint`.
    gives_warnings: ClassVar[bool] = True

    strict_options: bool = opt(
        False,
        "Refuse options that have no effect, such as vllm_server_port without use_vllm, instead of warning of them.",
        decides=False,
    )
    early_stopping_patience: Annotated[int, Ge(1)] | None = opt(
        None,
        "End training after this many consecutive evaluations without an improvement of metric_for_best_model. By "
        "default, training does not end early.",
        decides=False,
    )
    early_stopping_kwargs: KwargsValue = kwargs(
        "What counts as an improvement.",
        {True: EarlyStoppingParams},
        switch="early_stopping_patience",
        off="early_stopping_patience=None: training does not stop early. Set it.",
        decides=False,
    )
    increase_batch_size_on_plateau: Annotated[int, Ge(0)] = opt(
        0,
        "How many times the batch may grow after a metric has stopped improving. The learning rate schedule and the "
        "number of epochs stay the same, so there are fewer steps. At 0 the batch does not grow.",
    )
    increase_batch_size_kwargs: KwargsValue = kwargs(
        "When the batch grows, and by how much.",
        {True: GrowthParams},
        switch="increase_batch_size_on_plateau",
        off="increase_batch_size_on_plateau=0: the batch does not grow. Set the number of times that it may grow.",
    )
    model_soup: Literal["uniform", "greedy"] | None = opt(
        None,
        "Average the run's best checkpoints by metric_for_best_model when training ends, and use the average as the "
        "model. 'uniform' averages all of them; 'greedy' keeps only those that do not make the metric worse. By "
        "default, nothing is averaged.",
        decides=False,
    )
    model_soup_kwargs: KwargsValue = kwargs(
        "What goes into the soup.", {"uniform": SoupParams, "greedy": SoupParams}, switch="model_soup", decides=False
    )
    ema_decay: Annotated[float, Gt(0), Lt(1)] | None = opt(
        None,
        "Keep an exponential moving average of the weights with this decay per step. It is evaluated too, with "
        "metrics named eval_ema_..., and saved in the subfolder ema of the model's folder.",
        decides=False,
    )
    on_spike: Literal["ignore", "rollback"] = opt(
        "ignore",
        "What to do if the loss, gradient norm or KL of a step is far above its usual values. 'rollback' skips the "
        "step and continues from the last checkpoint with a smaller learning rate.",
    )
    spike_kwargs: KwargsValue = kwargs(
        "What a spike is, and what a rollback changes.", {"rollback": SpikeParams}, switch="on_spike"
    )
    checkpoint_kwargs: KwargsValue = kwargs(
        "What checkpoints hold, and which parts a resumed run reads.", CheckpointParams, decides=False
    )
    upload_to: str | None = opt(
        None,
        "Folder or fsspec URL, such as s3://bucket/run, to which checkpoints are uploaded in the background; see "
        "docs/checkpoints.md. resume_from_checkpoint=True reads it if output_dir has none.",
        decides=False,
    )
    upload_kwargs: KwargsValue = kwargs(
        "Settings of uploads.",
        {True: UploadParams},
        switch="upload_to",
        off="upload_to=None: nothing is uploaded. Set upload_to.",
        decides=False,
    )
    logging_steps: float = opt(
        10, "Log every N optimizer steps. A value below 1 is a fraction of all steps.", decides=False
    )
    logging_first_step: bool = opt(False, "Also log the first optimizer step.", decides=False)
    logging_nan_inf_filter: bool = opt(False, "Hide NaN and infinite losses in the logs.", decides=False)
    remove_unused_columns: bool = opt(
        False, "This changes nothing: rewards may read any column, and nothing else reads unknown ones.", decides=False
    )
    no_remove_unused_columns: bool = opt(
        False,
        "This changes nothing, because no columns are removed. It is accepted for commands that were written for TRL.",
        decides=False,
    )
    model_init_kwargs: dict[str, Any] | str | None = opt(
        None,
        "Arguments for from_pretrained when the model is given by name. On the command line, give it as JSON.",
        decides=False,
    )
    trust_remote_code: bool = opt(
        False, "Run code that comes with the model, like the key of the same name in model_init_kwargs.", decides=False
    )
    disable_dropout: bool = opt(False, "Set all dropout rates of the model to 0, including those of adapters.")
    freeze: list[str] | None = opt(
        None, "Regular expressions. Parameters whose names match one of them anywhere are not trained."
    )
    router_aux_loss_coef: Annotated[float, Ge(0)] | None = opt(
        None,
        "Weight of the load-balancing loss of a mixture of experts; see docs/moe.md. The default is the weight in the "
        "model's config. Other models have no such loss.",
    )
    forward_plan: Literal["auto", "shared_prefix", "packed", "padded"] = opt(
        "auto",
        "How a forward pass lays out its rows. All plans give the same results. 'auto' computes shared prompts once, "
        "packs rows that share none, and falls back to padding if the model fails the self-check of the other plans.",
        decides=False,
    )
    # transformers has these two from 5.23; before, it knows them by their old names only.
    activation_checkpointing: bool = opt(
        None,  # until __post_init__ knows whether the old name is set
        "Keep only the inputs of the layers and recompute the layers in the backward pass. This saves memory, takes "
        "about a third more time, and never changes the update.",
        decides=False,
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = opt(
        None,
        "Arguments of torch.utils.checkpoint.checkpoint, and every_n_layers and offload of transformers. On the "
        "command line, give it as JSON.",
        decides=False,
        needs=["activation_checkpointing"],
    )
    activation_offloading: bool = opt(
        False,
        "Keep the activations that the backward pass needs in host memory instead of GPU memory; with "
        "activation_checkpointing, these are the inputs of the layers. This changes memory and speed, but never the "
        "update.",
        decides=False,
    )
    use_liger_kernel: bool = opt(
        False,
        "Compute norms, rotary embeddings and MLPs with Liger's fused kernels. Needs a GPU and prefrl[liger]. This "
        "changes memory and speed; the update changes only by rounding.",
        decides=False,
    )
    liger_kernel_config: dict[str, bool] | str | None = opt(
        None,
        'Liger kernels to switch on or off, such as {"rope": false}. The others keep Liger\'s defaults for the '
        "model. Liger's losses are never used. On the command line, give it as JSON.",
        decides=False,
        needs=["use_liger_kernel"],
    )
    image_key: str | None = opt(
        None,
        "Column that holds the image of a row, or a list of images. The default is the column images or image, if "
        "there is one.",
    )
    dataset_num_proc: Annotated[int, Ge(1), Le(1024)] | None = opt(
        None,
        "Number of processes that tokenize the dataset.",
        decides=False,
    )
    log_flops: bool = opt(
        False,
        "Count the floating-point operations of every step and log them as perf/..., together with the minimum that "
        "its rows need. This costs some time, but never changes the update.",
        decides=False,
    )
    allow_resume_changes: list[str] | None = opt(
        None,
        "What may differ from the checkpoint when training resumes, although it changes the updates: names of "
        "options, or 'model', 'data' or 'rewards'. Any other difference is an error, which lists the names to give "
        "here.",
        decides=False,
    )
    save_in_background: bool = opt(
        False,
        "Continue training while the files of a checkpoint are written to disk and sealed. Copying the weights into "
        "the operating system's memory is still part of the step.",
        decides=False,
    )
    max_train_time: Annotated[float, Gt(0)] | None = opt(
        None,
        "Seconds after which training saves a checkpoint and the process ends with exit code 75, so that the next job "
        "can resume. The time is checked after each step. By default, there is no limit.",
        decides=False,
    )
    on_nan: Literal["stop", "skip"] = opt(
        "stop",
        "What to do if the loss or the gradient norm of a step is NaN or infinite. The step is never applied. With "
        "'stop', training ends with an error; with 'skip', it continues with the next step.",
        decides=False,
    )
    nan_patience: Annotated[int, Ge(1)] = opt(
        3,
        "With on_nan='skip', end training with an error after this many skipped steps in a row.",
        decides=False,
    )

    growth_params = ParamsOf("increase_batch_size_kwargs", GrowthParams)
    early_stopping_params = ParamsOf("early_stopping_kwargs", EarlyStoppingParams)
    soup_params = ParamsOf("model_soup_kwargs", SoupParams)
    spike_params = ParamsOf("spike_kwargs", SpikeParams)
    checkpoint_params = ParamsOf("checkpoint_kwargs", CheckpointParams)
    upload_params = ParamsOf("upload_kwargs", UploadParams)

    def __post_init__(self) -> None:
        fill_places(self)
        self.automatic = take_automatic(self)  # the options that are "auto"
        self.take_other_forms()
        bases = reversed(type(self).__mro__)
        hints = {name: hint for base in bases for name, hint in vars(base).get("hints", {}).items()}
        check_fields(self, hints)  # before HuggingFace's __post_init__, which already compares numbers
        check_intervals(self)
        self._check_json()
        self._set_both_names()
        name_best_metric(self)
        self._complete()
        # Those of them that need a trial.
        self.sought = derive_sizes(self, self.automatic) if self.knows_sizes else frozenset()
        self.validate()

    def take_other_forms(self) -> None:
        """Give options one form that may be given in several, in place, before their types are checked.

        Here, texts are made of paths, lists of texts for options that take these, and None of the word "None".
        """
        config_class: Any = type(self)
        hints = hints_of(config_class)
        for name in (field.name for field in fields(self)):
            hint, value = hints[name], getattr(self, name)
            word = value[0] if isinstance(value, list) and len(value) == 1 else value
            if isinstance(word, str) and word == "None" and type(None) in get_args(hint):
                setattr(self, name, None)  # as argparse gives it, where an option may be a text
            elif isinstance(value, os.PathLike) and str in (hint, *get_args(hint)):
                setattr(self, name, os.fspath(value))
            elif isinstance(value, str) and hint in (list[str], list[str] | None):
                setattr(self, name, [value])

    def _check_json(self) -> None:
        """Check what HuggingFace reads as JSON: its errors do not name the option."""
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs"):
            value = getattr(self, name)
            if isinstance(value, str) and value.startswith("{"):
                json_mapping(value, name)
        for name in ("deepspeed", "fsdp_config"):
            read_json(self, name)

    def _set_both_names(self) -> None:
        """Give activation checkpointing one value under its name and its old one: HuggingFace's loop reads either."""
        for option in ("checkpointing", "checkpointing_kwargs"):
            new, old = f"activation_{option}", f"gradient_{option}"
            if getattr(self, new) is None:
                setattr(self, new, getattr(self, old))
            setattr(self, old, getattr(self, new))

    @classmethod
    def free_options(cls) -> set[str]:
        """The options that do not decide the updates, so that a resumed run may change them."""
        return {field.name for field in fields(cls) if not about(field).decides}

    def _complete(self) -> None:
        """Let HuggingFace check its options and fill in those that follow from others."""
        raise NotImplementedError

    @property
    def watched_metrics(self) -> tuple[str, ...]:
        """What is watched for spikes; nothing if `on_spike` is off."""
        return tuple(self.spike_params.metrics or self.spike_metrics) if self.on_spike == "rollback" else ()

    @property
    def rows_per_micro_batch(self: Any) -> int:
        """Rows that a micro-batch of one process starts from: dataset rows, or completions."""
        return int(self.per_device_train_batch_size)

    @property
    def steps_of_a_generation(self) -> int:
        """Optimizer steps that learn from one generation batch; 1 if there are none."""
        return 1

    @property
    def scoring_temperature(self) -> float:
        """Temperature of the distribution whose log-probs enter the losses."""
        return 1.0

    @property
    def length_bound(self) -> LengthBound:
        """What bounds the length of prepared rows."""
        raise NotImplementedError

    def validate(self) -> None:
        """Reject invalid options before anything is loaded. `BaseConfig` checks what needs a package or this machine.

        Raises:
            ConfigError: Names the field, its value, what is allowed and what to do.
        """
        config_class: Any = type(self)
        for option in kwargs_options(config_class):
            option.check(self)
        parse_json(self, "model_init_kwargs", "activation_checkpointing_kwargs", "liger_kernel_config")
        if self.trust_remote_code:
            self.model_init_kwargs = {
                "trust_remote_code": True,
                **cast("dict[str, Any]", self.model_init_kwargs or {}),
            }
        check_references({name: getattr(self, name) for name in PATHS if hasattr(self, name)})
        apply(self, NAMES_RULES, COMMON_RULES)
        check_device(self)
        apply(self, COMPILATION_RULES, LIGER_RULES)
        check_checkpoints(self)
        apply(self, IGNORED_RULES, IGNORED_PARTS_RULES, SCHEDULE_RULES)
        if self.has_own_schedule:
            apply(self, METRIC_SCHEDULE_RULES)
        apply(self, WARMUP_RULES)
        if self.reduces_on_plateau:
            apply(self, PLATEAU_RULES)
        apply(self, UPDATE_RULES, NAMED_OPTIMIZER_RULES)
        check_rates(self)
        apply(self, RATE_RULES, EVALUATION_RULES, AUTOPILOT_RULES, PROFILE_RULES)
        if self.knows_sizes:
            apply(self, PROFILED_PROCESSES_RULES)
