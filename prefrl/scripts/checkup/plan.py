"""How a run would be started, as far as the memory of a process depends on it. Nothing is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefrl.distributed import Partition, partition_of
from prefrl.errors import ConfigError
from prefrl.scripts.arguments.launch import LaunchArguments, config_file
from prefrl.scripts.parsing.yaml_file import load_yaml

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from prefrl.models.footprint import Footprint
    from prefrl.scripts.checkup.subject import Subject

__all__ = ["GIB", "Plan", "footprint_of_process", "plan_of"]

GIB = 2**30
_MASTER_BYTES = 4  # of a number of DeepSpeed's copy of the weights and of its optimizer's state


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
    memory = None if device_memory is None else int(device_memory * GIB)
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


def footprint_of_process(subject: Subject, plan: Plan, whole: Footprint) -> Footprint:
    """The memory of the process that holds the largest part, from that of one that holds everything.

    DeepSpeed keeps a copy of the trained weights in float32, and two bytes of each weight with bf16 or fp16. DDP keeps
    gradients a second time, in buckets. Of the largest layer, a process may hold the whole gradient, a buffer that
    reduces it, and the gathered weights. Activations are not divided.
    """
    partition, config = plan.partition, subject.config
    parameters = list(subject.trained.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    num_trained = sum(parameter.numel() for parameter in trained)
    all_share, share = (partition.share(p.shape for p in some) for some in (parameters, trained))
    is_half = partition.is_deepspeed and (config.bf16 or config.fp16)
    narrow = 2 / subject.model.dtype.itemsize if is_half else 1.0
    of_weights = all_share if partition.stage == 3 else 1.0
    of_gradients, of_state = (share if partition.stage >= stage else 1.0 for stage in (2, 1))
    state, copies = float(whole.optimizer), 0.0
    if partition.is_deepspeed:
        state *= _MASTER_BYTES / subject.model.dtype.itemsize
        copies = float(_MASTER_BYTES * num_trained)
    elif partition.stage == 0 and partition.num_processes > 1:
        copies = float(whole.gradients)
    on_device = 0.0 if partition.is_offloaded and config.device.type != "cpu" else 1.0
    weights = whole.weights * narrow
    return replace(
        whole,
        weights=int(weights * of_weights * on_device),
        gradients=int(whole.gradients * narrow * of_gradients),
        optimizer=int(state * of_state * on_device),
        reference=int(whole.reference * narrow * of_weights),
        first_gradients=int(whole.first_gradients * narrow * of_gradients),
        copies=int(copies * of_state * on_device),
        gathered=int(_gathered(subject, partition) * narrow),
        cache=whole.cache + int(weights * (partition.stage == 3 and whole.cache > 0)),
    )


def _gathered(subject: Subject, partition: Partition) -> int:
    """Bytes of the largest layer that a process of several may hold as a whole, in the dtype of the weights."""
    if partition.num_processes == 1:
        return 0
    kinds = set(subject.model._no_split_modules or ())
    layers = [module for module in subject.trained.modules() if type(module).__name__ in kinds]
    groups = [list(layer.parameters()) for layer in layers] + [[p] for p in subject.trained.parameters()]
    copies = 1 + (partition.stage >= 2)
    trained = max(_bytes(p for p in group if p.requires_grad) for group in groups)
    return copies * trained + (partition.stage == 3) * max(map(_bytes, groups))


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
