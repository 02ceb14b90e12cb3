"""A window in the memory of one CUDA device that two processes see: the trainer writes into it, the server reads it.

The trainer exports the window once for each transfer, and the server maps it once: torch counts those who map it, and
gives the memory back when the trainer has dropped its tensor and the server its own. CUDA orders nothing between two
processes: each side must wait for its own work before it says that it has written or read.

Source: torch.multiprocessing.reductions, and "CUDA IPC" in the CUDA C++ programming guide.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

reduce_tensor: Any = reductions.reduce_tensor
rebuild_cuda_tensor: Any = reductions.rebuild_cuda_tensor
# Device memory that a server leaves free beside the weights that it receives, in bytes: what loading them needs.
_SPARE = 2 * 2**30
# What the receiver knows itself: a window is a flat tensor of bytes, on its own device.
_KNOWN = ("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device")


def allocate(num_bytes: int) -> Tensor:
    """A window of this size on the current device."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))


def describe(window: Tensor) -> dict[str, Any]:
    """What another process needs to see a window: values for JSON. One process may map what is described once."""
    rebuild, values = reduce_tensor(window)
    handles = dict(zip(inspect.signature(rebuild).parameters, values, strict=True))
    found = {name: value for name, value in handles.items() if name not in _KNOWN}
    texts = {name: {"hex": value.hex()} for name, value in found.items() if isinstance(value, bytes)}
    return {"uuid": _uuid(window.device), "num_bytes": window.numel(), "handles": found | texts}


def attach(description: dict[str, Any]) -> Tensor:
    """The window that another process has described. It is released with the last tensor that views it.

    Raises:
        ValueError: It is in the memory of another device.
        RuntimeError: CUDA refuses to map it.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    if description["uuid"] != (own := _uuid(device)):
        raise ValueError(
            f"weight_sync='ipc': the trainer is on the GPU {description['uuid']}, and this worker on {own}. Start "
            "both on one GPU, with the same CUDA_VISIBLE_DEVICES, or set weight_sync='shm'"
        )
    size = description["num_bytes"]
    handles = {
        name: bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
        for name, value in description["handles"].items()
    }
    known = (Tensor, (size,), (1,), 0, torch.UntypedStorage, torch.uint8, device.index)
    try:
        window: Tensor = rebuild_cuda_tensor(**dict(zip(_KNOWN, known, strict=True)), **handles)
    except RuntimeError as error:
        raise RuntimeError(
            f"weight_sync='ipc': CUDA does not share memory between the trainer and this worker: {error}. In "
            "containers, both need the same /dev/shm and process ids. Otherwise set weight_sync='shm'"
        ) from error
    return window


def place_for(num_bytes: int, *, near: Tensor) -> torch.device:
    """Where to keep this many bytes that were read: on the device if they leave enough of it free, or on the host."""
    if not near.is_cuda:
        return near.device
    free, _ = torch.cuda.mem_get_info(near.device)
    return near.device if free - num_bytes >= _SPARE else torch.device("cpu")


def collect() -> None:
    """Give back what nobody maps any more."""
    cuda: Any = torch.cuda  # torch leaves these functions without types
    if cuda.is_initialized():
        cuda.ipc_collect()


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
