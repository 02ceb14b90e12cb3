"""What the options must be that all trainers share.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect, check_unset, mapping_of, plain_value
from prefrl.options.references import check_references
from prefrl.options.types import LARGEST_INTEGER, BatchSize, check_value

__all__ = [
    "HUGGINGFACE",
    "check_common",
    "check_compilation",
    "check_device",
    "check_intervals",
    "check_liger_device",
    "check_schedule",
    "check_update",
    "check_warmup_evaluations",
]

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
_PATHS = (
    *("output_dir", "resume_from_checkpoint", "upload_to", "chat_template_path"),
    *("hub_model_id", "run_name", "project"),
)
# The optimizers that read optim_target_modules have one of these in their names.
_LAYERWISE = ("galore", "apollo")
# Of torch.compile: they replay recorded kernels on fixed memory, which rows of other lengths do not fit into.
_RECORDING = ("reduce-overhead", "max-autotune")
# Option that a resumed run cannot change -> why.
_FIXED = {
    "learning_rates": "its expressions determine the order of the optimizer's state in checkpoints",
    "optim_args": "checkpoints hold these arguments together with the optimizer's state",
}


def check_intervals(config: Any) -> None:
    """Check the numbers of steps, before HuggingFace's __post_init__ and ours calculate with them.

    Raises:
        ConfigError: One is out of bounds.
    """
    for what in ("logging", "eval", "save"):
        interval = getattr(config, f"{what}_steps")
        if plain_value(getattr(config, f"{what}_strategy")) == "steps" and interval is not None:
            check_value(f"{what}_steps", interval, _INTERVAL)
    if config.max_steps < 1 and config.max_steps != -1:
        raise ConfigError(
            f"max_steps={config.max_steps}: must be at least 1, or -1, which trains for num_train_epochs. To train "
            "nothing, do not call train()."
        )


def check_common(config: Any) -> None:
    """Reject options that no trainer supports, and those without effect.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    check_references({name: getattr(config, name) for name in _PATHS if hasattr(config, name)})
    if config.remove_unused_columns:
        raise ConfigError("remove_unused_columns=True: must be False, because the data layer chooses the columns")
    if config.train_sampling_strategy not in ("random", "sequential"):
        raise ConfigError(
            f"train_sampling_strategy={config.train_sampling_strategy!r}: must be 'random' or 'sequential'. Batches "
            "are not padded, so grouping by length has no use; max_tokens_per_micro_batch balances tokens."
        )
    if config.log_flops and config.torch_compile:
        raise ConfigError(
            "log_flops=True with torch_compile=True: operations inside compiled code are not counted. Set one of "
            "them to False."
        )
    if config.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=True is not supported: it finds out what fits by running out of memory. Set "
            "max_tokens_per_micro_batch='auto'."
        )
    if config.neftune_noise_alpha is not None:
        raise ConfigError(
            f"neftune_noise_alpha={config.neftune_noise_alpha} is not supported: its noise is scaled by the length "
            "of a padded row, and there are none here. Leave it None."
        )
    if config.on_nan == "stop":
        because = "on_nan='stop': the first step ends training"
        check_unset(config, "nan_patience", because=because, remedy="Set on_nan='skip'.")
    for switch, option in (
        ("activation_checkpointing", "activation_checkpointing_kwargs"),
        ("use_liger_kernel", "liger_kernel_config"),
    ):
        if not getattr(config, switch):
            check_unset(config, option, because=f"{switch}=False", remedy=f"Set {switch}=True.")


def check_warmup_evaluations(config: Any) -> None:
    """Reject a warm-up that is counted in evaluations, where there are none or its steps are given, too.

    Raises:
        ConfigError: Names the options and what to do.
    """
    if not config.warmup_evaluations:
        return
    strategy = plain_value(config.eval_strategy)
    if strategy != "steps" or config.eval_steps < 1:
        raise ConfigError(
            f"warmup_evaluations={config.warmup_evaluations} with eval_strategy={strategy!r}, "
            f"eval_steps={config.eval_steps}: needs evaluations at an interval in steps. Set eval_strategy='steps' "
            "and eval_steps of at least 1, or set warmup_steps instead."
        )
    if config.warmup_steps not in (0, config.warmup_evaluations * config.eval_steps):
        raise ConfigError(
            f"warmup_evaluations={config.warmup_evaluations} with warmup_steps={config.warmup_steps}: both set the "
            "length of the warm-up. Set only one of them."
        )


def check_schedule(config: Any) -> None:
    """Reject options of the schedule that its name alone excludes.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    name, arguments = plain_value(config.lr_scheduler_type), mapping_of(config, "lr_scheduler_kwargs")
    if name.startswith("constant"):
        check_no_effect(
            name="lr_scheduler_kwargs",
            value=arguments,
            unset={},
            because=f"lr_scheduler_type={name!r} has no arguments",
            remedy="Remove it, or choose another schedule.",
        )
    if name == "inverse_sqrt" and config.warmup_steps == 0 and not arguments.get("timescale"):
        raise ConfigError(
            "lr_scheduler_type='inverse_sqrt' with warmup_steps=0: transformers then falls back to a timescale of "
            "10000 steps, in which the learning rate hardly changes. Set warmup_steps, which is also the "
            "timescale, or lr_scheduler_kwargs={'timescale': ...}."
        )
    if name == "one_cycle" and config.warmup_steps:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps} with lr_scheduler_type='one_cycle', which has its own warm-up. Set "
            "lr_scheduler_kwargs={'pct_start': ...} instead."
        )
    if config.weight_decay_schedule != "constant" and config.weight_decay == 0:
        raise ConfigError(
            f"weight_decay_schedule={config.weight_decay_schedule!r} has no effect because weight_decay=0. Set "
            "weight_decay, which the factors of the schedule multiply."
        )
    if name in ("constant", "constant_with_warmup") and config.weight_decay_schedule == "constant":
        because = f"lr_scheduler_type={name!r} has no end"
        check_unset(config, "lr_decay_steps", because=because, remedy="Choose another schedule.")


def check_update(config: Any) -> None:
    """Reject options of the update that act only together with others.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    name = str(plain_value(config.optim))
    if not any(word in name for word in _LAYERWISE):
        because, remedy = (
            f"optim={name!r} treats all weights in the same way",
            "Leave it None; freeze leaves weights out.",
        )
        check_unset(config, "optim_target_modules", because=because, remedy=remedy)
    is_on = config.regularization_type is not None
    if is_on != (config.regularization_lambda > 0):
        raise ConfigError(
            f"regularization_type={config.regularization_type!r} with "
            f"regularization_lambda={config.regularization_lambda}: neither has an effect without the other. Set "
            "both, or neither."
        )
    for option, reason in _FIXED.items():
        if option in (config.allow_resume_changes or ()):
            raise ConfigError(
                f"allow_resume_changes: {option} cannot change, because {reason}. Start a new training from the "
                "checkpoint's weights."
            )


def check_device(config: Any) -> None:
    """Reject what has no effect on the CPU, and trials on a device whose memory is not measured.

    Raises:
        ConfigError: Names the option and what to do.
    """
    if config.sought and config.device.type not in ("cpu", "cuda", "unknown"):  # unknown: the command's early checks
        raise ConfigError(
            f"{min(config.sought)}='auto' on {config.device.type.upper()}: sizes are found by trial on CUDA devices "
            "and CPUs only. Set a number."
        )
    if config.device.type != "cpu":
        return
    if config.fp16:
        raise ConfigError(
            "fp16=True on the CPU: float16 is for GPUs, and has no effect here. Set bf16=True, or neither."
        )
    check_no_effect(
        name="activation_offloading",
        value=config.activation_offloading,
        unset=False,
        because="this run is on the CPU, where activations are already in host memory",
        remedy="Leave it False; activation_checkpointing and max_tokens_per_micro_batch save memory here.",
    )


def check_liger_device(config: Any) -> None:
    """Reject Liger's kernels where there is no GPU.

    Raises:
        ConfigError: Says what to do.
    """
    if config.use_liger_kernel and config.device.type in ("cpu", "mps"):
        raise ConfigError(
            "use_liger_kernel=True: Liger's kernels are Triton programs for GPUs, and this run is on the "
            f"{config.device.type.upper()}. Leave it False, or run on a GPU."
        )


def check_compilation(config: Any) -> None:
    """Reject modes of torch.compile that cannot work here.

    Raises:
        ConfigError: Says what to do.
    """
    if config.torch_compile_mode in _RECORDING:
        raise ConfigError(
            f"torch_compile_mode={config.torch_compile_mode!r}: records CUDA graphs, each for fixed lengths of rows, "
            "but the lengths differ in every step. Leave it out, or set 'max-autotune-no-cudagraphs'."
        )
