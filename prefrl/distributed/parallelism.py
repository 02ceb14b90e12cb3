"""Parallelism beyond data parallelism in accelerate's `parallelism_config`: rejected, or implemented by prefrl."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from torch.distributed.tensor import DTensor

from prefrl.distributed.processes import form_teams, limit_waits, num_processes, team_size
from prefrl.errors import ConfigError

_SAVE_MEMORY = (
    "Other ways to save memory for long sequences: max_tokens_per_micro_batch, activation_checkpointing=True and "
    "activation_offloading=True."
)


def accelerator_arguments(given: dict[str, Any], parallelism: Any) -> dict[str, Any]:
    """What HuggingFace gives to its accelerator, with our parallelism; and without compilation, which is done here."""
    plugin = given["dynamo_plugin"]
    plugin.backend = type(plugin.backend).NO
    return {**given, "parallelism_config": parallelism}


def set_up_parallelism(given: Any, *, trainer: str, splits_rows: bool, longest_wait: float) -> Any:
    """Check the requested parallelism, limit waits and form the teams. All processes must call it.

    Args:
        given: `TrainingArguments.parallelism_config`; None: the one that `accelerate launch` read from a file, if any.
        trainer: Name of the trainer's class.
        splits_rows: Whether the trainer's processes can share rows.
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
    check_parallelism(config, trainer=trainer, splits_rows=splits_rows, num_processes=num_processes())
    form_teams(config.sp_size)
    if config.sp_size == 1:
        return config
    shards = num_processes() // config.dp_replicate_size
    return dataclasses.replace(config, sp_size=1, sp_handler=None, dp_shard_size=shards)


def check_parallelism(config: Any, *, trainer: str, splits_rows: bool, num_processes: int) -> None:
    """Reject parallelism that the trainer does not support.

    Args:
        config: Accelerate's `ParallelismConfig`.
        trainer: Name of the trainer's class.
        splits_rows: Whether the trainer's processes can share rows.
        num_processes: Number of processes of the run.

    Raises:
        ConfigError: Context or tensor parallelism is requested, or sequence parallelism that cannot work.
    """
    if config.tp_size > 1:
        raise _no_tensor_parallelism(f"parallelism_config.tp_size={config.tp_size}", trainer)
    if config.cp_size > 1:
        remedy = f"Use sp_size={config.cp_size} instead." if splits_rows else f"Set cp_size=1. {_SAVE_MEMORY}"
        raise ConfigError(
            f"parallelism_config.cp_size={config.cp_size}: {trainer} cannot use context parallelism. torch's ring "
            "attention treats a row as one sequence, but prefrl puts many sequences with shared prompts into one "
            f"row. {remedy}"
        )
    if config.sp_size > 1:
        if not splits_rows:
            raise ConfigError(
                f"parallelism_config.sp_size={config.sp_size}: {trainer} cannot split sequences over processes, "
                f"because each process samples its own completions. Set sp_size=1. {_SAVE_MEMORY}"
            )
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
