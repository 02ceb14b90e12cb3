"""Checkpoints: what a backend divides, who writes which files, whole weights, and which runs can resume from them.

What a backend divides follows from names, shapes and the number of processes; no process group is needed. Partitioned
weights are read on rank 0, while the other ranks contribute their parts.

DeepSpeed and `torch.distributed.checkpoint` unpickle whatever is in a file. A pickle names the functions that are
called with its data, so it can call any: `only_data` reads their checkpoints without executing what is in them.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from math import prod
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from prefrl.distributed.processes import num_processes, rank_in_names, team_size
from prefrl.distributed.shards import unwrap, whole
from prefrl.errors import CheckpointError, ConfigError
from prefrl.run.checkpoints import WRITER, check_has_state


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
    if has_rollouts and process % partition.team_size == 0:
        names.append(rollouts_file(process // partition.team_size, count // partition.team_size))
    if partition.is_deepspeed:
        place = f"zero_pp_rank_{process}_mp_rank_00"
        names.append(f"global_step{step}/{'bf16_' * is_bf16}{place}_optim_states.pt")
        if partition.stage == 3:
            names.append(f"global_step{step}/{place}_model_states.pt")
    elif partition.stage == 3 and partition.saves_parts:
        names += [f"{folder}/__{process}_0.distcp" for folder in ("pytorch_model_fsdp_0", "optimizer_0")]
    return names


_UNSHARDED = "no sharding"


@dataclass(frozen=True)
class Writer:
    """The backend and number of processes that wrote a checkpoint."""

    backend: str  # what partitioned the optimizer state, and how
    num_processes: int
    team_size: int = field(default=1, compare=False)  # processes that shared rows; no optimizer state depends on it

    @property
    def num_ranks(self) -> int:
        """Processes, or teams of them, with rows of their own."""
        return self.num_processes // self.team_size

    def __str__(self) -> str:
        plural = "" if self.num_processes == 1 else "es"
        return f"{self.num_processes} process{plural} with {self.backend}"


def sign_checkpoint(accelerator: Any, folder: Path) -> None:
    """Record in a checkpoint which backend and how many processes wrote it."""
    (folder / WRITER).write_text(json.dumps(asdict(_this_run(accelerator))), encoding="utf-8")


def writer_of(folder: Path) -> Writer:
    """The backend and number of processes that wrote a checkpoint.

    Raises:
        ConfigError: The folder holds no training state.
    """
    check_has_state(folder)
    return Writer(**json.loads((folder / WRITER).read_text(encoding="utf-8")))


def check_resumable(accelerator: Any, folder: Path) -> None:
    """Check that this run can read the optimizer state of a checkpoint.

    The state of a single process and of DDP is whole, and FSDP2 reshards its own state. ZeRO-1 and 2 can reshard a
    checkpoint that the tool `ds_to_universal` has converted, which `load_universal` in DeepSpeed's config announces;
    with ZeRO-3 the result was seen to differ.

    Raises:
        ConfigError: It cannot be read.
    """
    saved, now = writer_of(folder), _this_run(accelerator)
    if saved == now:
        return
    if saved.backend == now.backend and (not _is_deepspeed(accelerator) or _loads_universal(accelerator)):
        return
    has_weights = any(folder.glob("model*.safetensors")) or (folder / "adapter_model.safetensors").exists()
    convert = (
        "" if has_weights else ", after converting the checkpoint's partitioned weights with the backend's own tool"
    )
    raise ConfigError(
        f"resume_from_checkpoint={str(folder)!r} was written with {saved}, but this run uses {now}, which cannot "
        f"read the optimizer state. Resume with {saved}, or start a new training from the weights, "
        f"model={str(folder)!r}{convert}."
    )


def check_first_training(accelerator: Any, model: nn.Module) -> None:
    """Reject a second `train()` of a trainer if the backend can train a model only once.

    Args:
        accelerator: The trainer's accelerator.
        model: The model, with the wrappers of the first training.

    Raises:
        ConfigError: It has already been trained with DeepSpeed.
    """
    if _is_deepspeed(accelerator) and unwrap(model) is not model:
        raise ConfigError(
            "train() was called before, but a DeepSpeed engine can train only once. Construct a new trainer, with "
            "the saved model or with resume_from_checkpoint."
        )


def keeps_checkpoints_partitioned(accelerator: Any) -> bool:
    """Whether the backend's config asks for checkpoints without whole weights."""
    if accelerator.is_fsdp2:
        return _state_dict_type(accelerator) != "FULL_STATE_DICT"
    if not _is_deepspeed(accelerator):
        return False
    zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    return bool(zero["stage"] == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is not True)


def keeps_optimizer_apart(accelerator: Any) -> bool:
    """Whether a checkpoint has the optimizer's state, whole, in a file of its own."""
    return _this_run(accelerator).backend == _UNSHARDED


def whole_on_host(tensors: Mapping[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    """Whole copies on the host of tensors that may be partitioned. All ranks must call it, with the same names.

    Only one tensor at a time is whole on every rank. A tensor with several names is gathered once and stays shared.

    Args:
        tensors: Not detached: a detached ZeRO-3 parameter does not know how it is partitioned.
        keep: False: this rank only takes part and gets {}.
    """
    kept: dict[str, torch.Tensor] = {}
    first_names: dict[int, str] = {}
    for name, tensor in tensors.items():
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            value = whole(tensor).detach()
            if keep:
                kept[name] = value.cpu()
            del value  # free it before the next tensor is gathered
        elif keep:
            kept[name] = kept[first]
    return kept


def _this_run(accelerator: Any) -> Writer:
    if _is_deepspeed(accelerator):
        stage = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"]
        return Writer(f"ZeRO-{stage}", num_processes(), team_size())
    if accelerator.is_fsdp2:
        return Writer(f"FSDP2 ({_state_dict_type(accelerator)})", num_processes(), team_size())
    return Writer(_UNSHARDED, num_processes(), team_size())


def _is_deepspeed(accelerator: Any) -> bool:
    return bool(accelerator.distributed_type == "DEEPSPEED")


def _loads_universal(accelerator: Any) -> bool:
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    return bool(config["zero_optimization"]["stage"] < 3 and config.get("checkpoint", {}).get("load_universal", False))


def _state_dict_type(accelerator: Any) -> str:
    name: str = accelerator.state.fsdp_plugin.state_dict_type.name
    return name


# torch.load obeys it even if its caller asks for the opposite.
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# What DeepSpeed's own files name beyond what torch allows: plain data.
_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler": ("DynamicLossScaler", "LossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}
# What the index of a checkpoint of torch.distributed names.
_INDEX = {
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
    "torch": ("Size",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    ),
    "torch.serialization": ("_get_layout",),
}


@contextmanager
def only_data(checkpoint: Path) -> Iterator[None]:
    """Inside, what is loaded may consist of tensors, plain values and the backends' own data classes only.

    `torch.serialization.add_safe_globals` allows more. It holds for the whole process.

    Args:
        checkpoint: The folder that is read.

    Raises:
        CheckpointError: A file names something else. Nothing of it was executed.
    """
    for index in sorted(checkpoint.rglob(".metadata")):
        _check_index(index)
    deepspeed = _DEEPSPEED if "deepspeed" in sys.modules else {}
    allowed = [getattr(import_module(module), name) for module, names in deepspeed.items() for name in names]
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(allowed):
            yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        found = _what_is_more(error)
        if found is None:
            raise
        file = _refused_file(error) or f"a file of {checkpoint}"
        raise CheckpointError(
            f"{file} holds more than data: {found}. Resume from a checkpoint that you trust. If you trust this one, "
            "allow what it names with torch.serialization.add_safe_globals before training."
        ) from error
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def _what_is_more(error: BaseException) -> str | None:
    """What torch found in a file, on any rank; None: it failed for another reason."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
    found = [str(failure) for failure, _ in failures if isinstance(failure, pickle.UnpicklingError)]
    if not found:
        return None
    named = re.search(r"unsupported(?: global:)? GLOBAL (\S+)", found[0], re.IGNORECASE)
    return f"it names {named[1]}" if named else "torch cannot read it as tensors and plain values"


def _refused_file(error: BaseException) -> str | None:
    """The file that torch was reading, which its error does not name; None: not known."""
    load = inspect.unwrap(torch.load).__code__
    read = [frame.f_locals["f"] for frame, _ in walk_tb(error.__traceback__) if frame.f_code is load]
    return str(read[0]) if read and isinstance(read[0], str | os.PathLike) else None


def _check_index(path: Path) -> None:
    """Raise unless the index of a checkpoint, which torch will unpickle, consists of data."""
    try:
        with path.open("rb") as file:
            _IndexUnpickler(file).load()
    except pickle.UnpicklingError as error:
        message = f"{path} holds more than data: {error}. Resume from a checkpoint that you trust."
        raise CheckpointError(message) from error


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name in _INDEX.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")
