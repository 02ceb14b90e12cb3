"""How a run would be started, as far as the state of its processes depends on it. Nothing is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefrl.distributed import Partition, partition_of
from prefrl.errors import ConfigError
from prefrl.scripts.arguments.launch import LaunchArguments, config_file
from prefrl.scripts.parsing.yaml_file import load_yaml

__all__ = ["Plan", "plan_of"]

_GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """How a run would be started.

    Args:
        partition: How its processes share the state of the training.
        num_machines: Machines on which they run.
        device_memory: Bytes of memory of each device; None: those of the devices of this machine.
    """

    partition: Partition
    num_machines: int = 1
    device_memory: int | None = None

    @property
    def num_ranks(self) -> int:
        """Processes, or teams of them, with rows of their own."""
        return self.partition.num_processes // self.partition.team_size


def plan_of(config: Any, launch: LaunchArguments | None, *, device_memory: float | None = None) -> Plan:
    """The plan that options describe.

    Args:
        config: Options of the trainer; it knows the number of processes.
        launch: How the run is started; None: in one process.
        device_memory: GiB; see `Plan`.

    Raises:
        ConfigError: The accelerate config cannot be read, or the processes do not form whole teams.
    """
    count, launch = int(config.world_size), launch or LaunchArguments()
    option, content = "accelerate_config", _accelerate_config(launch, config)
    partition = partition_of(content, count, option=option)
    if config.parallelism_config is not None:
        partition = replace(partition, team_size=int(config.parallelism_config.sp_size))
    if count % partition.team_size:
        raise ConfigError(
            f"parallelism_config.sp_size={partition.team_size}: must divide the number of processes, {count}. Change "
            "one of them."
        )
    memory = None if device_memory is None else int(device_memory * _GIB)
    return Plan(partition, launch.num_machines or 1, memory)


def _accelerate_config(launch: LaunchArguments, config: Any) -> Mapping[str, Any]:
    """What accelerate's config says, or options of transformers that say the same."""
    if config.deepspeed is not None:
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": config.deepspeed}}
    if config.fsdp:
        return {"distributed_type": "FSDP"}
    path: Path | None = config_file(launch.accelerate_config)
    if path is None:
        return {}
    where = f"accelerate_config={launch.accelerate_config!r}"
    content = load_yaml(path, where)
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise ConfigError(f"{where}: has no distributed_type, as accelerate configs have")
    return content
