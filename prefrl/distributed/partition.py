"""What a backend divides among processes, and which files of a checkpoint each process writes.

Everything follows from names, shapes and the number of processes; no process group is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from prefrl.distributed.processes import rank_in_names
from prefrl.errors import ConfigError

__all__ = ["Partition", "largest_share", "names_in_checkpoint", "partition_of", "rollouts_file"]


@dataclass(frozen=True)
class Partition:
    """How a backend divides the state of a training.

    Args:
        backend: Its name.
        num_processes: On all machines together.
        num_parts: Processes among which a tensor is divided; fewer than there are if groups of them hold copies.
        stage: 0: each process holds everything; 1: the optimizer's state is divided; 2: and gradients; 3: and weights.
        is_deepspeed: Whether DeepSpeed divides flat vectors; otherwise FSDP2 divides the rows of each tensor.
        is_offloaded: Whether the divided state is in the host's memory.
        saves_parts: Whether the weights of a checkpoint are divided, too.
        team_size: Consecutive processes that share their rows.
    """

    backend: str
    num_processes: int
    num_parts: int
    stage: int = 0
    is_deepspeed: bool = False
    is_offloaded: bool = False
    saves_parts: bool = False
    team_size: int = 1

    def share(self, shapes: Iterable[Sequence[int]]) -> float:
        """The fraction of divided tensors that the process with the largest part holds; 1 if there are no tensors."""
        given = [tuple(shape) for shape in shapes]
        total = sum(map(prod, given))
        if not total:
            return 1.0
        if not self.is_deepspeed:
            parts = given
        elif self.stage == 3:
            parts = [(prod(shape),) for shape in given]
        else:  # all tensors form one vector
            parts = [(total,)]
        return sum(largest_share(part, self.num_parts) for part in parts) / total


def largest_share(shape: Sequence[int], num_parts: int) -> int:
    """Numbers in the first of the parts into which the first dimension is cut. No other part has more.

    All parts but the last ones have equally many rows; with few rows, the last parts are empty.
    """
    rows, *rest = shape or (1,)
    return -(-rows // num_parts) * prod(rest)


def partition_of(config: Mapping[str, Any], num_processes: int, *, option: str) -> Partition:
    """What accelerate's config asks for.

    Args:
        config: The content of the file.
        num_processes: On all machines together.
        option: The option that names the file, for errors.

    Raises:
        ConfigError: DeepSpeed's own config, which it names, cannot be read.
    """
    kind = str(config.get("distributed_type", "NO"))
    parallelism = config.get("parallelism_config") or {}
    team_size = int(parallelism.get("parallelism_config_sp_size") or 1)
    if kind == "FSDP":
        copies = int(parallelism.get("parallelism_config_dp_replicate_size") or 1)
        saved = (config.get("fsdp_config") or {}).get("fsdp_state_dict_type", "SHARDED_STATE_DICT")
        saves_parts = saved != "FULL_STATE_DICT"
        parts = max(num_processes // copies, 1)
        return Partition("FSDP2", num_processes, parts, 3, saves_parts=saves_parts, team_size=team_size)
    if kind == "DEEPSPEED":
        stage, is_offloaded, saves_parts = _zero(config.get("deepspeed_config") or {}, option)
        return Partition(
            f"ZeRO-{stage}", num_processes, num_processes, stage, True, is_offloaded, saves_parts, team_size
        )
    return Partition("DDP", num_processes, 1, team_size=team_size)


def _zero(settings: Mapping[str, Any], option: str) -> tuple[int, bool, bool]:
    """The stage, whether state is offloaded, and whether checkpoints lack whole weights."""
    path = settings.get("deepspeed_config_file")
    if path is None:
        stage, device = int(settings.get("zero_stage", 2)), settings.get("offload_optimizer_device", "none")
        return stage, device != "none", stage == 3 and not settings.get("zero3_save_16bit_model", False)
    try:
        zero = json.loads(Path(path).read_text(encoding="utf-8"))["zero_optimization"]
        stage, device = int(zero["stage"]), (zero.get("offload_optimizer") or {}).get("device", "none")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{option}: its deepspeed_config_file={str(path)!r} has no zero_optimization with a stage that can be "
            f"read ({type(error).__name__}: {error})"
        ) from error
    return stage, device != "none", stage == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is not True


def rollouts_file(rank: int, world_size: int) -> str:
    """The name of the file with the rollouts that a rank has not used up."""
    return f"rollouts_{rank_in_names(rank, world_size)}_of_{world_size}.safetensors"


def names_in_checkpoint(
    partition: Partition, process: int, *, step: int, has_rollouts: bool, is_bf16: bool
) -> list[str]:
    """The files of a checkpoint that each process writes for itself, relative to its folder.

    Args:
        partition: How state is divided.
        process: The number of the process.
        step: Optimizer steps before the checkpoint.
        has_rollouts: Whether the trainer samples.
        is_bf16: Whether it trains in bf16.
    """
    count = partition.num_processes
    names = ["rng_state.pth" if count == 1 else f"rng_state_{process}.pth"]
    if has_rollouts:
        names.append(rollouts_file(process, count))
    if partition.is_deepspeed:
        place = f"zero_pp_rank_{process}_mp_rank_00"
        names.append(f"global_step{step}/{'bf16_' * is_bf16}{place}_optim_states.pt")
        if partition.stage == 3:
            names.append(f"global_step{step}/{place}_model_states.pt")
    elif partition.stage == 3 and partition.saves_parts:
        names += [f"{folder}/__{process}_0.distcp" for folder in ("pytorch_model_fsdp_0", "optimizer_0")]
    return names
