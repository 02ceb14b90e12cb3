"""Options of what a run writes besides its model, and what the options must be that all trainers share."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.errors import ConfigError, without_secrets
from prefrl.options.fields import Example, Rule, apply, example, opt, plain_value, unset, when
from prefrl.options.params import Params, hyperparameters
from prefrl.options.types import LARGEST_INTEGER, BatchSize, Seconds, check_value


@hyperparameters
class CheckpointParams(Params):
    """What checkpoints hold besides the model, and what is read of them."""

    save_optimizer: bool = opt(
        True,
        "Save the optimizer's state, which with Adam is two thirds of a checkpoint; resuming is not exact without it.",
    )
    load_optimizer: bool = opt(
        True,
        "Resume with the optimizer's state. Without it, moments begin at 0, while schedule, data and steps continue.",
    )
    export_weights: bool = opt(
        False,
        "Also write complete weights, which from_pretrained can load, if ZeRO-3 or FSDP2 saves partitioned ones. "
        "Other backends always write complete weights.",
    )


@hyperparameters
class UploadParams(Params):
    """Settings of uploads to `upload_to`."""

    checkpoints: Literal["all", "final"] = opt(
        "all",
        "Upload every checkpoint, beginning with the last ('all'), or only the last one when training is complete "
        "('final').",
    )
    timeout: Seconds = opt(
        600.0,
        "Maximum time to wait for uploads at the end of training, in seconds. Other processes wait at most "
        "ddp_timeout.",
    )


CHECKPOINTS_RULES = (
    when(
        lambda o: o.on_spike == "rollback" and not o.checkpoint_params.save_optimizer,
        "checkpoint_kwargs: save_optimizer=False with on_spike='rollback': training cannot go back to a checkpoint "
        "without the optimizer's state. Change one of them.",
        example("sft", on_spike="rollback", checkpoint_kwargs={"save_optimizer": False}),
    ),
)
# With upload_to.
UPLOADS_RULES = (
    when(
        lambda o: o.save_strategy == "no",
        "upload_to={place!r} has no effect because save_strategy='no': there are no checkpoints. Set "
        "save_strategy='steps', or leave upload_to out.",
        example("sft", upload_to="copies", save_strategy="no"),
        place=lambda o: without_secrets(o.upload_to),
    ),
    when(
        lambda o: Path(o.upload_to.removeprefix("file://")).resolve() == Path(o.output_dir).resolve(),
        "upload_to={upload_to!r} is output_dir itself. Name another folder.",
        example("sft", upload_to="runs", output_dir="runs"),
    ),
)


def check_checkpoints(config: Any) -> None:
    """Reject options of checkpoints that cannot be combined.

    Raises:
        ConfigError: Names the field, its value and what to do.
    """
    apply(config, CHECKPOINTS_RULES)
    if config.upload_to is None:
        return
    if isinstance(config.upload_to, os.PathLike):
        config.upload_to = os.fspath(config.upload_to)
    from prefrl.run.uploads import check_place  # needs fsspec, which the other checks do not

    check_place("upload_to", config.upload_to)
    apply(config, UPLOADS_RULES)


@hyperparameters
class ProfileParams(Params):
    """Which steps of which processes are traced, counted from where training starts or resumes, and what of them.

    After `skip_first` steps, `wait` + `warmup` + `active` steps follow each other `repeat` times; the active ones are
    traced. Source: `torch.profiler.schedule`.
    """

    wait: Annotated[int, Ge(0)] = opt(1, "Number of steps without profiling at the start of each cycle.")
    warmup: Annotated[int, Ge(0)] = opt(
        1, "Steps that are profiled but not kept, because starting the profiler distorts them."
    )
    active: Annotated[int, Ge(1)] = opt(3, "Number of steps in a trace.")
    repeat: Annotated[int, Ge(0)] = opt(
        1, "Number of cycles, each with its own trace. At 0 they go on until training ends."
    )
    skip_first: Annotated[int, Ge(0)] = opt(0, "Number of steps before the first cycle.")
    ranks: list[int] | None = opt([0], "Processes that write traces. None means all.")
    record_shapes: bool = opt(False, "Record the shapes of the inputs of operations.")
    profile_memory: bool = opt(False, "Record the memory that operations allocate and free.")
    with_stack: bool = opt(False, "Record the lines of Python that called operations.")
    memory_snapshot: bool = opt(False, "Also write the history of the GPU's memory in these steps.")


def _lacks_history(o: Any) -> bool:
    known = ("cuda", "unknown")  # unknown: the command's early checks
    return bool(o.profile and o.profile_params.memory_snapshot and o.device.type not in known)


def _names_no_process(o: Any) -> bool:
    ranks = o.profile_params.ranks if o.profile else None
    return ranks is not None and (not ranks or not all(0 <= rank < o.world_size for rank in ranks))


PROFILE_RULES = (
    when(
        _lacks_history,
        "profile_kwargs: memory_snapshot=True: only the memory of CUDA devices has a history, and this run is on the "
        "{where}. Set profile_memory=True, which traces allocations on every device.",
        example("sft", profile=True, profile_kwargs={"memory_snapshot": True}),
        where=lambda o: o.device.type.upper(),
    ),
)
# Where the number of processes is known.
PROFILED_PROCESSES_RULES = (
    when(
        _names_no_process,
        "profile_kwargs: ranks={ranks}: must be numbers of processes from 0 to {last}, or None for all",
        example("sft", profile=True, profile_kwargs={"ranks": [1]}),
        ranks=lambda o: o.profile_params.ranks,
        last=lambda o: o.world_size - 1,
    ),
)


_LogLevel = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]
# HuggingFace's options whose annotations say less, or other than what they take: bounds that it does not check, and
# None for what is optional in TRL.
HUGGINGFACE: dict[str, Any] = {
    "resume_from_checkpoint": str | bool | None,
    "fsdp": bool | str | list[str] | None,
    "debug": str | list[str] | None,
    "bf16": bool | None,
    "fp16": bool | None,
    "remove_unused_columns": bool | None,
    "log_level": _LogLevel,
    "log_level_replica": _LogLevel,
    "num_train_epochs": Annotated[float, Ge(1e-6), Le(10**9)],
    "max_steps": Annotated[int, Ge(-1)],
    "per_device_train_batch_size": BatchSize,
    "per_device_eval_batch_size": BatchSize,
    "gradient_accumulation_steps": Annotated[int, Ge(1), Le(10**5)],
    "learning_rate": Annotated[float, Ge(0)],
    "weight_decay": Annotated[float, Ge(0), Le(1000)],
    "max_grad_norm": Annotated[float, Ge(0), Le(math.inf)],
    "adam_beta1": Annotated[float, Ge(0), Lt(1)],
    "adam_beta2": Annotated[float, Ge(0), Lt(1)],
    "adam_epsilon": Annotated[float, Ge(0), Le(1)],
    "warmup_steps": Annotated[float, Ge(0), Le(10**9)],
    "seed": Annotated[int, Ge(0), Lt(2**32)],
    "data_seed": Annotated[int, Ge(0), Lt(2**32)] | None,
    "dataloader_num_workers": Annotated[int, Ge(0), Le(256)],
    "dataloader_prefetch_factor": Annotated[int, Ge(1), Le(10**6)] | None,
    "eval_delay": Annotated[float, Ge(0), Le(LARGEST_INTEGER)],
    "save_total_limit": Annotated[int, Ge(1)] | None,
    "ddp_timeout": Annotated[int, Ge(1), Le(10**9)],
    "torch_empty_cache_steps": Annotated[int, Ge(1)] | None,
}
# What intervals must be with logging_strategy="steps" and so on. People write large numbers for "never".
_INTERVAL = Annotated[float, Gt(0), Le(LARGEST_INTEGER)]
# Files and folders, on this machine or another, and what names folders of trackers.
PATHS = (
    *("output_dir", "resume_from_checkpoint", "upload_to", "chat_template_path"),
    *("tokenizer_name_or_path", "value_model_name_or_path", "teacher_model_name_or_path"),
    *("hub_model_id", "run_name", "project"),
)
# Of torch.compile: they replay recorded kernels on fixed memory, which rows of other lengths do not fit into.
_RECORDING = ("reduce-overhead", "max-autotune")
# Of HuggingFace's options: what they are where they have no effect, and why.
_PRECISION = "evaluation runs in the precision of training"
_NO_LOGITS = "evaluation computes metrics as it goes and keeps no logits or labels"
_OWN_BATCHES = "prefrl, not accelerate, lays out and distributes batches"
_OWN_COLUMNS = "the data layer chooses the columns"
_SEED = "the order of rows depends on the seed alone"


def check_intervals(config: Any) -> None:
    """Check the numbers of steps, before HuggingFace's __post_init__ and ours calculate with them.

    Raises:
        ConfigError: One is out of bounds.
    """
    for what in ("logging", "eval", "save"):
        interval = getattr(config, f"{what}_steps")
        if plain_value(getattr(config, f"{what}_strategy")) == "steps" and interval is not None:
            check_value(f"{what}_steps", interval, _INTERVAL)
    apply(config, STEPS_RULES)


def check_device(config: Any) -> None:
    """Reject what has no effect on the CPU, and trials on a device whose memory is not measured.

    Raises:
        ConfigError: Names the option and what to do.
    """
    sought = config.sought | (config.automatic & {"per_device_eval_batch_size"})
    if sought and config.device.type not in ("cpu", "cuda", "unknown"):  # unknown: the command's early checks
        raise ConfigError(
            f"{min(sought)}='auto' on {config.device.type.upper()}: sizes are found by trial on CUDA devices "
            "and CPUs only. Set a number."
        )
    apply(config, CPU_RULES)


def _lacks_gpu(o: Any) -> bool:
    return o.device.type in ("cpu", "mps")


def _ignored(name: str, value: Any, *, unset: Any, because: str, remedy: str, is_idle: bool = False) -> Rule:
    """An option of HuggingFace that has no effect here; its default depends on the release, so `unset` says it.

    It is refused; or, if it is idle because there is nothing to act on, warned of and set back to `unset`.
    """
    return when(
        lambda o: getattr(o, name) != unset,
        f"{name}={{{name}!r}} has no effect because {because}. {remedy}",
        example("sft", **{name: value}),
        hint=is_idle,
        resets={name: unset} if is_idle else {},
    )


def _part(o: Any, name: str) -> Any:
    """A key of `accelerator_config`, which is a mapping until HuggingFace's __post_init__; None: not given."""
    parts = o.accelerator_config
    return parts.get(name) if isinstance(parts, dict) else getattr(parts, name, None)


def _idle_part(name: str, value: Any, *, because: str, remedy: str) -> Rule:
    """A key of `accelerator_config` that has nothing to act on here."""
    return when(
        lambda o: _part(o, name) == value,
        f"accelerator_config.{name}={{given!r}} has no effect because {because}. {remedy}",
        example("sft", accelerator_config={name: value}),
        hint=True,
        given=lambda o: _part(o, name),
    )


STEPS_RULES = (
    when(
        lambda o: o.max_steps < 1 and o.max_steps != -1,
        "max_steps={max_steps}: must be at least 1, or -1, which trains for num_train_epochs. To train nothing, do "
        "not call train().",
        example("sft", max_steps=0),
    ),
)
COMMON_RULES = (
    when(
        lambda o: o.train_sampling_strategy not in ("random", "sequential"),
        "train_sampling_strategy={train_sampling_strategy!r}: must be 'random' or 'sequential'. Batches are not "
        "padded, so grouping by length has no use; max_tokens_per_micro_batch balances tokens.",
        example("sft", train_sampling_strategy="group_by_length"),
    ),
    when(
        lambda o: o.log_flops and o.torch_compile,
        "log_flops=True with torch_compile=True: operations inside compiled code are not counted. Set one of them to "
        "False.",
        example("sft", log_flops=True, torch_compile=True),
    ),
    when(
        lambda o: o.auto_find_batch_size,
        "auto_find_batch_size=True is not supported: it finds out what fits by running out of memory. Set "
        "max_tokens_per_micro_batch='auto'.",
        example("sft", auto_find_batch_size=True),
    ),
    when(
        lambda o: o.neftune_noise_alpha is not None,
        "neftune_noise_alpha={neftune_noise_alpha} is not supported: its noise is scaled by the length of a padded "
        "row, and there are none here. Leave it None.",
        example("sft", neftune_noise_alpha=5.0),
    ),
    *unset(
        {"nan_patience": 2},
        lambda o: o.on_nan == "stop",
        "on_nan='stop': the first step ends training. Set on_nan='skip'.",
        example("sft"),
        hint=True,
    ),
    *unset(
        {"activation_checkpointing_kwargs": {"use_reentrant": True}},
        lambda o: not o.activation_checkpointing,
        "activation_checkpointing=False. Set activation_checkpointing=True; its old name is gradient_checkpointing.",
        example("sft"),
        hint=True,
    ),
    *unset(
        {"liger_kernel_config": {"rope": True}},
        lambda o: not o.use_liger_kernel,
        "use_liger_kernel=False. Set use_liger_kernel=True.",
        example("sft"),
        hint=True,
    ),
)
CPU_RULES = (
    when(
        lambda o: o.fp16 and o.device.type == "cpu",
        "fp16=True on the CPU: float16 is for GPUs, and has no effect here. Set bf16=True, or neither.",
        example("sft", fp16=True),
    ),
    when(
        lambda o: o.activation_offloading and o.device.type == "cpu",
        "activation_offloading=True has no effect because this run is on the CPU, where activations are already in "
        "host memory. Leave it False; activation_checkpointing and max_tokens_per_micro_batch save memory here.",
        example("sft", activation_offloading=True),
        hint=True,
        resets={"activation_offloading": False},
    ),
)
LIGER_RULES = (
    when(
        lambda o: o.use_liger_kernel and _lacks_gpu(o),
        "use_liger_kernel=True: Liger's kernels are Triton programs for GPUs, and this run is on the {where}. Leave "
        "it False, or run on a GPU.",
        example("sft", use_liger_kernel=True),
        where=lambda o: o.device.type.upper(),
    ),
)
COMPILATION_RULES = (
    when(
        lambda o: o.torch_compile_mode in _RECORDING,
        "torch_compile_mode={torch_compile_mode!r}: records CUDA graphs, each for fixed lengths of rows, but the "
        "lengths differ in every step. Leave it out, or set 'max-autotune-no-cudagraphs'.",
        example("sft", torch_compile_mode="reduce-overhead"),
    ),
)
IGNORED_RULES = (
    when(
        lambda o: not o.average_tokens_across_devices and o.world_size > 1,
        "average_tokens_across_devices=False with {world_size} processes: losses are always divided by the count over "
        "all of them. Leave it True.",
        example("sft", average_tokens_across_devices=False, processes=2),
    ),
    _ignored(
        "label_smoothing_factor",
        0.1,
        unset=0.0,
        because="the losses here are computed from token log-probs",
        remedy="Leave it at 0.",
    ),
    _ignored(
        "include_num_input_tokens_seen",
        "all",
        unset="no",
        because="the metric num_tokens counts every token that was processed",
        remedy="Read num_tokens.",
        is_idle=True,
    ),
    _ignored(
        "bf16_full_eval",
        True,
        unset=False,
        because=_PRECISION,
        remedy="Set bf16=True, or load the model with a dtype of bfloat16.",
        is_idle=True,
    ),
    _ignored(
        "fp16_full_eval",
        True,
        unset=False,
        because=_PRECISION,
        remedy="Set fp16=True, or load the model with a dtype of float16.",
        is_idle=True,
    ),
    _ignored(
        "prediction_loss_only",
        True,
        unset=False,
        because=_NO_LOGITS,
        remedy="Leave it False: evaluate() returns only metrics.",
        is_idle=True,
    ),
    _ignored(
        "eval_accumulation_steps",
        2,
        unset=None,
        because=_NO_LOGITS,
        remedy="Leave it None; per_device_eval_batch_size decides the memory of evaluation.",
        is_idle=True,
    ),
    _ignored("eval_do_concat_batches", False, unset=True, because=_NO_LOGITS, remedy="Leave it True."),
    _ignored(
        "eval_use_gather_object",
        True,
        unset=False,
        because=_NO_LOGITS,
        remedy="Leave it False; metrics are over all processes.",
        is_idle=True,
    ),
    _ignored(
        "include_for_metrics",
        ["loss"],
        unset=[],
        because=_NO_LOGITS,
        remedy="Leave it empty; a TrainerCallback reads the metrics.",
    ),
    _ignored("batch_eval_metrics", True, unset=False, because=_NO_LOGITS, remedy="Leave it False."),
    when(
        lambda o: o.label_names not in (None, ["labels"]),
        f"label_names={{label_names!r}} has no effect because {_OWN_COLUMNS}. Leave it None.",
        example("sft", label_names=["label"]),
        hint=True,
        resets={"label_names": None},
    ),
    _ignored(
        "length_column_name",
        "n",
        unset="length",
        because=_OWN_COLUMNS,
        remedy="Leave it out; rows are not grouped by length.",
        is_idle=True,
    ),
    _ignored("dataloader_in_order", False, unset=True, because=_SEED, remedy="Leave it True.", is_idle=True),
)
# `even_batches=False` is silent: no row is repeated to fill a step.
IGNORED_PARTS_RULES = (
    when(
        lambda o: _part(o, "split_batches"),
        "accelerator_config.split_batches=True: per_device_train_batch_size is the number of rows of each process. "
        "Divide it by the number of processes, and leave split_batches out.",
        example("sft", accelerator_config={"split_batches": True}),
    ),
    when(
        lambda o: (
            isinstance(found := _part(o, "gradient_accumulation_kwargs"), dict) and found.get("num_steps", 1) != 1
        ),
        "accelerator_config.gradient_accumulation_kwargs={given!r}: num_steps is an option of its own. Set "
        "gradient_accumulation_steps.",
        example("sft", accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 2}}),
        given=lambda o: _part(o, "gradient_accumulation_kwargs"),
    ),
    _idle_part(
        "gradient_accumulation_kwargs",
        {"sync_each_batch": True},
        because="gradients are exchanged in the last micro-batch of a step, as the backend requires",
        remedy="Leave it out.",
    ),
    _idle_part("dispatch_batches", True, because=_OWN_BATCHES, remedy="Leave it out."),
    _idle_part("use_seedable_sampler", False, because=_SEED, remedy="Set data_seed."),
)


def _interval(what: str, example: Example) -> tuple[Rule, ...]:
    return unset(
        {f"{what}_epochs": 2.0},
        lambda o: plain_value(getattr(o, f"{what}_strategy")) != "epoch",
        f"{what}_strategy={{{what}_strategy!r}}. Set {what}_strategy='epoch'.",
        example,
        hint=True,
    )


def _lacks_evaluations(o: Any) -> bool:
    ratio = o.save_epochs / o.eval_epochs
    return bool(o.load_best_model_at_end) and o.save_strategy == "epoch" and abs(ratio - round(ratio)) > 1e-6


EVALUATION_RULES = (
    *_interval("eval", example("sft")),
    *_interval("save", example("sft")),
    when(
        _lacks_evaluations,
        "load_best_model_at_end=True with save_epochs={save_epochs} and eval_epochs={eval_epochs}: each checkpoint "
        "needs an evaluation. Make save_epochs a multiple of eval_epochs.",
        example("sft", load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch", save_epochs=1.5),
    ),
)
