"""Reads the checkpoints of DeepSpeed and of `torch.distributed.checkpoint` without executing what is in them.

Both unpickle whatever is in a file. A pickle names the functions that are called with its data, so it can call any.
"""

from __future__ import annotations

import inspect
import os
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from prefrl.errors import CheckpointError

__all__ = ["only_data"]

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
