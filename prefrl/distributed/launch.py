"""What a launch asks of backends: independent copies of a run and unsupported parallelism are rejected."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from prefrl.distributed.processes import form_teams, limit_waits, num_processes, team_size
from prefrl.errors import ConfigError, MissingPackageError, is_installed

# Set by `prefrl launch` for its training processes.
_NUM_PROCESSES = "PREFRL_NUM_PROCESSES"


def check_deepspeed_starts(given: Any, environment: Mapping[str, str]) -> None:
    """Reject the option `deepspeed` where DeepSpeed cannot start, before HuggingFace tries to.

    Raises:
        MissingPackageError: It is not installed.
        ConfigError: No launcher has started this process.
    """
    shown = f"deepspeed={given!r}" if isinstance(given, str) else "deepspeed"
    if not is_installed("deepspeed"):
        raise MissingPackageError(f"{shown} needs deepspeed: pip install 'prefrl[deepspeed]'")
    if "RANK" not in environment and not is_installed("mpi4py"):
        raise ConfigError(
            f"{shown}: no launcher has started this process, so DeepSpeed would not find the others. Start it with "
            "`accelerate launch` or `torchrun`, or without this option by `prefrl launch --accelerate_config zero3`."
        )


def check_processes(args: Any, environment: Mapping[str, str]) -> None:
    """Reject a process that is one of several but would train by itself, into their common output folder.

    Args:
        args: `TrainingArguments`, which hold the world size that this process sees.
        environment: Environment variables, among them those of `accelerate launch`, torchrun and `prefrl launch`.

    Raises:
        ConfigError: The message says what to change.
    """
    if _is_set(environment, "ACCELERATE_USE_MEGATRON_LM"):
        raise ConfigError(
            "distributed_type MEGATRON_LM in accelerate's config: Megatron-LM is not supported, because its models "
            "are not those of transformers. Use DeepSpeed ZeRO or FSDP2, which shard weights, and sp_size for long "
            "rows: see docs/distributed.md."
        )
    started, world_size = int(environment.get("WORLD_SIZE") or 1), args.world_size
    if started > world_size:
        remedy = (
            "There is no GPU. Set use_cpu=True (--use_cpu true) to train on CPUs."
            if args.device.type == "cpu"
            else "Start the processes with `prefrl launch` or `accelerate launch`, which also set LOCAL_RANK."
        )
        raise ConfigError(
            f"WORLD_SIZE={started}, but the process group has size {world_size}: each of the {started} processes "
            f"would train its own model and write it to the same output_dir. {remedy}"
        )
    wanted = int(environment.get(_NUM_PROCESSES) or world_size)
    if wanted != world_size:
        raise ConfigError(
            f"num_processes={wanted}, but accelerate started {world_size}: with distributed_type NO or MULTI_CPU in "
            "its config, it starts one process. Use --accelerate_config ddp, zero3 or fsdp2, or a config with "
            "distributed_type MULTI_GPU (and use_cpu: false, even on CPUs), DEEPSPEED or FSDP."
        )
    if _wants_deepspeed(args, environment) and _is_set(environment, "ACCELERATE_USE_CPU"):
        raise ConfigError(
            "ACCELERATE_USE_CPU=true with DeepSpeed: weights would be partitioned, but trained as if they were "
            "whole. Set use_cpu: false in the accelerate config, and use_cpu=True (--use_cpu true) for the run."
        )
    if _is_set(environment, "ACCELERATE_USE_CPU") and args.device.type != "cpu":
        raise ConfigError(
            f"ACCELERATE_USE_CPU=true, but this run is on {args.device}: the model would be on the CPU, its "
            "batches on the GPU. Set use_cpu=True (--use_cpu true), too, or use_cpu: false in the accelerate config."
        )


def partitions_weights(args: Any, environment: Mapping[str, str]) -> bool:
    """Whether processes may hold parts of the weights instead of copies."""
    is_sharded = args.fsdp or _is_set(environment, "ACCELERATE_USE_FSDP") or args.parallelism_config is not None
    return bool(is_sharded or _wants_deepspeed(args, environment))


def check_devices(num_gpus: int) -> None:
    """Reject one process that sees several GPUs: torch would replicate the model to all of them in threads.

    Args:
        num_gpus: Number of GPUs that this process sees.

    Raises:
        ConfigError: There is more than one.
    """
    if num_gpus > 1:
        raise ConfigError(
            f"{num_gpus} GPUs are visible to one process: start one process for each GPU with `prefrl launch` or "
            "`accelerate launch`, or set CUDA_VISIBLE_DEVICES to one GPU"
        )


def check_backend(args: Any, environment: Mapping[str, str], accelerator: Any) -> None:
    """Reject a run whose model would not be sharded as requested.

    Args:
        args: `TrainingArguments`, which may request FSDP or DeepSpeed.
        environment: Environment variables, which may request them, too.
        accelerator: The trainer's accelerator, which knows the resulting backend.

    Raises:
        ConfigError: The message says what to change.
    """
    found = accelerator.distributed_type.value
    words = {"NO": "one process", "MULTI_CPU": "plain data parallelism on CPUs"}.get(found, f"type {found}")
    if _wants_deepspeed(args, environment) and found != "DEEPSPEED":
        raise ConfigError(
            f"DeepSpeed is requested, but this run would use {words}. Start it with `prefrl launch "
            "--accelerate_config zero3`, or with an accelerate config of distributed_type DEEPSPEED."
        )
    if not (args.fsdp or _is_set(environment, "ACCELERATE_USE_FSDP")):
        return
    if found != "FSDP":
        remedy = (
            "FSDP shards only over GPUs: on CPUs, use --accelerate_config zero3 (DeepSpeed) or ddp."
            if accelerator.device.type == "cpu"
            else "Start a process for each GPU, with `prefrl launch --accelerate_config fsdp2`."
        )
        raise ConfigError(f"FSDP is requested, but this run would use {words}. {remedy}")
    if not accelerator.is_fsdp2:
        raise ConfigError(
            "fsdp_version=1 is not supported. Set fsdp_version: 2 in the accelerate config, or version: 2 in "
            "fsdp_config."
        )
    if size := accelerator.state.fsdp_plugin.min_num_params:
        raise ConfigError(
            f"min_num_params={size}: FSDP2 cannot be told by size what to shard, because a list of layers would count "
            "as a layer. Leave it out of fsdp_config and the accelerate config: each layer is sharded by itself."
        )


def check_quantized(accelerator: Any, model: Any) -> None:
    """Refuse quantized weights that the backend would leave whole, fail on, or cast as if they were numbers.

    Args:
        accelerator: The trainer's accelerator.
        model: What is trained, not yet partitioned by FSDP2.

    Raises:
        ConfigError: Says which storage to use.
    """
    if not getattr(model, "is_quantized", False) or accelerator.distributed_type.value not in ("DEEPSPEED", "FSDP"):
        return
    computed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32)
    config = model.config.quantization_config
    storage = config.bnb_4bit_quant_storage if getattr(config, "load_in_4bit", False) else None
    if accelerator.is_fsdp2 and any(not parameter.is_floating_point() for parameter in model.parameters()):
        raise ConfigError(
            f"quantization_config with {f'bnb_4bit_quant_storage={storage}' if storage else '8 bits'}: FSDP2 "
            f"partitions only floating-point tensors. Set load_in_4bit=True and bnb_4bit_quant_storage={computed}, "
            "or use DeepSpeed ZeRO-3 or DDP."
        )
    is_cast = storage is not None and storage.is_floating_point and storage != computed
    if is_cast and accelerator.mixed_precision != "no":
        raise ConfigError(
            f"bnb_4bit_quant_storage={storage} with {accelerator.mixed_precision}: the backend would cast the stored "
            f"weights. Set bnb_4bit_quant_storage={computed}, which stores the same four bits."
        )


def check_works_under(accelerator: Any, name: str, works_under: Mapping[str, bool]) -> None:
    """Refuse an optimizer that would make another update of partitioned weights than of whole ones, or fail.

    Args:
        accelerator: The trainer's accelerator.
        name: The optimizer.
        works_under: Whether it works under "ZeRO" and "FSDP2".

    Raises:
        ConfigError: It does not; says under what it does.
    """
    backend = {"DEEPSPEED": "ZeRO", "FSDP": "FSDP2"}.get(accelerator.distributed_type.value)
    if backend is None or works_under[backend]:
        return
    because = {
        "ZeRO": "ZeRO splits weights into parts of a vector, but this optimizer needs whole weights",
        "FSDP2": "its library cannot update partitioned weights",
    }[backend]
    other = next((f"{other} or DDP" for other, works in works_under.items() if works), "DDP")
    raise ConfigError(
        f"optim={name!r} under {backend}: {because}. Use {other}, or another optimizer: docs/optimizers.md has "
        "a table."
    )


def check_chooses_optimizer(accelerator: Any, options: str) -> None:
    """Refuse options of the optimizer if DeepSpeed's config has an optimizer of its own.

    Raises:
        ConfigError: It has.
    """
    if accelerator.distributed_type.value != "DEEPSPEED":
        return
    if "optimizer" in accelerator.state.deepspeed_plugin.deepspeed_config:
        raise ConfigError(f"{options} have no effect: DeepSpeed's config has an optimizer. Remove it from the config.")


def check_chooses_schedule(accelerator: Any) -> None:
    """Refuse what moves the schedule in its own way if DeepSpeed's config has a scheduler or an optimizer.

    Raises:
        ConfigError: It has.
    """
    plugin = accelerator.state.deepspeed_plugin
    found = [part for part in ("scheduler", "optimizer") if plugin is not None and part in plugin.deepspeed_config]
    if found:
        raise ConfigError(
            "lr_scheduler_type, other options of schedules, increase_batch_size_on_plateau: DeepSpeed's config has "
            f"{' and '.join(found)} of its own, so these options would have no effect. Remove it from the config."
        )


def check_state_read(accelerator: Any, name: str) -> None:
    """Refuse to save the state of an optimizer that has none, if it could not be read again.

    Raises:
        ConfigError: FSDP2 partitions the state.
    """
    if accelerator.distributed_type.value == "FSDP":
        raise ConfigError(
            f"optim={name!r} without momentum under FSDP2: torch cannot load the checkpoint of an optimizer without "
            "state. Set optim_args='momentum=0.9', or save_only_model=True, which saves no state."
        )


def check_state_whole(accelerator: Any, option: str) -> None:
    """Refuse an option that discards the optimizer's state where processes hold parts of it.

    Raises:
        ConfigError: DeepSpeed or FSDP2 partitions the state.
    """
    if accelerator.distributed_type.value in ("DEEPSPEED", "FSDP"):
        raise ConfigError(
            f"{option} under DeepSpeed or FSDP2, which partition the optimizer's state and save only one that is "
            "complete. Use DDP, or leave it False."
        )


def check_gradients_seen(accelerator: Any, option: str) -> None:
    """Refuse an option that changes gradients between the backward pass and the update.

    Raises:
        ConfigError: DeepSpeed updates within the backward pass.
    """
    if accelerator.distributed_type.value == "DEEPSPEED":
        raise ConfigError(
            f"{option} under DeepSpeed, which updates within the backward pass, so gradients cannot be changed first. "
            "Use FSDP2 or DDP, or leave it None."
        )


def check_weights_stay(accelerator: Any, option: str) -> None:
    """Refuse an option that needs the weights between the passes.

    Raises:
        ConfigError: With ZeRO-3 they are empty then.
    """
    if _is_zero3(accelerator):
        raise ConfigError(
            f"{option} with DeepSpeed ZeRO-3, whose weights are empty between the passes, so they cannot be averaged. "
            "Use ZeRO-2, DDP or FSDP2; the command prefrl soup averages checkpoints afterwards."
        )


def check_changed_layers(accelerator: Any, *, option: str | None) -> None:
    """Refuse layers that compute in another way where DeepSpeed gathers weights inside them.

    Args:
        accelerator: The trainer's accelerator.
        option: What changes layers; None: nothing does.

    Raises:
        ConfigError: The backend is ZeRO-3.
    """
    if option is not None and _is_zero3(accelerator):
        raise ConfigError(
            f"{option} with DeepSpeed ZeRO-3: it gathers weights inside the layers, which therefore cannot be "
            "changed. Use ZeRO-2, FSDP2 or DDP."
        )


def _is_zero3(accelerator: Any) -> bool:
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and bool(plugin.deepspeed_config["zero_optimization"]["stage"] == 3)


def _wants_deepspeed(args: Any, environment: Mapping[str, str]) -> bool:
    return args.deepspeed is not None or _is_set(environment, "ACCELERATE_USE_DEEPSPEED")


def _is_set(environment: Mapping[str, str], variable: str) -> bool:
    return environment.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t")


def accelerator_arguments(given: dict[str, Any], parallelism: Any) -> dict[str, Any]:
    """What HuggingFace gives to its accelerator, with our parallelism; and without compilation, which is done here."""
    plugin = given["dynamo_plugin"]
    plugin.backend = type(plugin.backend).NO
    return {**given, "parallelism_config": parallelism}


def set_up_parallelism(given: Any, *, trainer: str, longest_wait: float) -> Any:
    """Check the requested parallelism, limit waits and form the teams. All processes must call it.

    Args:
        given: `TrainingArguments.parallelism_config`; None: the one that `accelerate launch` read from a file, if any.
        trainer: Name of the trainer's class.
        longest_wait: Seconds; see `limit_waits`.

    Returns:
        The config for accelerate. accelerate would split rows in its own way, so it is only told that the processes of
        a team share weights.

    Raises:
        ConfigError: See `check_parallelism`.
    """
    limit_waits(longest_wait)
    config = given
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        from accelerate.parallelism_config import ParallelismConfig

        config = ParallelismConfig()
    if config is None:
        form_teams(1)
        return None
    check_parallelism(config, trainer=trainer, num_processes=num_processes())
    form_teams(config.sp_size)
    if config.sp_size == 1:
        return config
    shards = num_processes() // config.dp_replicate_size
    return dataclasses.replace(config, sp_size=1, sp_handler=None, dp_shard_size=shards)


def check_parallelism(config: Any, *, trainer: str, num_processes: int) -> None:
    """Reject parallelism that the trainer does not support.

    Args:
        config: Accelerate's `ParallelismConfig`.
        trainer: Name of the trainer's class.
        num_processes: Number of processes of the run.

    Raises:
        ConfigError: Context or tensor parallelism is requested, or sequence parallelism that cannot work.
    """
    if config.tp_size > 1:
        raise _no_tensor_parallelism(f"parallelism_config.tp_size={config.tp_size}", trainer)
    if config.cp_size > 1:
        raise ConfigError(
            f"parallelism_config.cp_size={config.cp_size}: {trainer} cannot use context parallelism. torch's ring "
            "attention treats a row as one sequence, but prefrl puts many sequences with shared prompts into one "
            f"row. Use sp_size={config.cp_size} instead."
        )
    if config.sp_size > 1:
        _check_sequence_parallelism(config, num_processes)


def _check_sequence_parallelism(config: Any, num_processes: int) -> None:
    found = f"parallelism_config.sp_size={config.sp_size}"
    num_ranks, rest = divmod(num_processes, config.sp_size)
    if rest:
        raise ConfigError(f"{found}: must divide the number of processes, {num_processes}. Change one of them.")
    if config.data_parallel_size not in (1, num_ranks):
        raise ConfigError(
            f"{found} with dp_replicate_size={config.dp_replicate_size} and dp_shard_size={config.dp_shard_size}: "
            f"{num_processes} processes are {num_ranks} times {config.sp_size}. Set dp_shard_size={num_ranks}."
        )
    handler = config.sp_handler
    if not handler.sp_seq_length_is_variable or handler.sp_seq_length is not None:
        raise ConfigError(
            f"{found} with sp_seq_length={handler.sp_seq_length} and "
            f"sp_seq_length_is_variable={handler.sp_seq_length_is_variable}: rows have different lengths. Set only "
            "sp_seq_length_is_variable=True."
        )
    if handler.sp_attn_implementation not in (None, "sdpa"):
        raise ConfigError(
            f'{found} with sp_attn_implementation="{handler.sp_attn_implementation}": prefrl chooses the attention '
            'kernel itself. Set "sdpa", and load the model with it.'
        )


def check_model(model: Any, *, trainer: str) -> None:
    """Reject a model that cannot be trained with the requested parallelism.

    Args:
        model: A transformers model, with or without an adapter.
        trainer: Name of the trainer's class.

    Raises:
        ConfigError: It was loaded with `tp_plan` or a `distributed_config`, or the team size does not divide its
            number of attention heads.
    """
    cut = next((name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)), None)
    if cut is not None:
        raise _no_tensor_parallelism(
            f"model was loaded with tp_plan or distributed_config ({cut} is a DTensor)", trainer
        )
    check_heads(model.config, team_size())


def check_heads(config: Any, size: int) -> None:
    """Reject teams that cannot divide the attention heads of a model.

    Args:
        config: Of a transformers model.
        size: Processes of a team.

    Raises:
        ConfigError: The size does not divide the number of heads.
    """
    num_heads = getattr(config.get_text_config(), "num_attention_heads", 0)
    if num_heads % size:
        raise ConfigError(
            f"parallelism_config.sp_size={size}: must divide the model's {num_heads} attention heads, which "
            "are divided among the processes that share a row. Choose another size."
        )


def check_deepspeed(accelerator: Any, *, trainer: str) -> None:
    """Reject a DeepSpeed config that requests more than data parallelism.

    Raises:
        ConfigError: It requests tensor or sequence parallelism.
    """
    plugin = accelerator.state.deepspeed_plugin
    config = {} if plugin is None else plugin.deepspeed_config
    tp_size = (config.get("tensor_parallel") or {}).get("autotp_size", 1)
    if tp_size > 1:
        raise _no_tensor_parallelism(f"tensor_parallel.autotp_size={tp_size} in the DeepSpeed config", trainer)
    sp_size = config.get("sequence_parallel_size", 1)
    if sp_size > 1:
        raise ConfigError(
            f"sequence_parallel_size={sp_size} in the DeepSpeed config: {trainer} does not read it. Remove it, and "
            "use sp_size in accelerate's parallelism_config."
        )


def _no_tensor_parallelism(found: str, trainer: str) -> ConfigError:
    return ConfigError(
        f"{found}: {trainer} cannot use tensor parallelism, where all processes train on the same rows: here, each "
        "process has its own rows. Load the whole model, and partition its weights with DeepSpeed ZeRO-3 or FSDP2."
    )
