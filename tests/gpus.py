"""GPUs without hardware: stand-ins for the functions of `torch.cuda` that prefrl calls, and tensors on these GPUs.

Code behind `device.type == "cuda"` runs on them as it is. Each GPU has memory, a queue of work and random numbers of
its own, and each thread has its own current GPU, at its start the first one, as in CUDA: whoever asks the wrong GPU
gets another answer. Tensors are the CPU's, autograd included, but say `cuda:3`; an operation on tensors of two devices
raises. What torch does with the type of a device in C++ (autocast, kernels, streams) is not there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

COUNT = 8


class Gpu:
    """One device. Times are seconds of its own clock."""

    def __init__(self, number: int) -> None:
        self.total = 80 * 2**30
        self.free = self.total - (number + 1) * 2**30  # what other processes and this one have left
        self.allocated = self.reserved = self.peak = 0
        self.queued = 0.0  # when all work that was launched will be done
        self.done = 0.0  # up to where the host knows that it is done
        self.waits = 0  # of the host

    def work(self, seconds: float, num_bytes: int = 0) -> None:
        """Launch work that takes so long, and so much memory meanwhile."""
        self.queued += seconds
        self.peak = max(self.peak, self.allocated + num_bytes)

    def wait(self, until: float) -> None:
        """The host waits."""
        self.waits += self.done < until
        self.done = max(self.done, until)


class _Event:
    """`torch.cuda.Event`; only what has come can be read."""

    def __init__(self, gpus: Gpus, *, enable_timing: bool = False) -> None:
        self.gpus, self.has_time = gpus, enable_timing
        self.gpu: Gpu | None = None
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.gpu = self.gpus[self.gpus.current if stream is None else stream.number]
        self.time = self.gpu.queued

    def query(self) -> bool:
        assert self.gpu is not None, "not recorded"
        return self.time <= self.gpu.done

    def synchronize(self) -> None:
        assert self.gpu is not None, "not recorded"
        self.gpu.wait(self.time)

    def elapsed_time(self, end: _Event) -> float:
        assert self.gpu is end.gpu, "events of two GPUs"
        assert self.has_time
        assert end.has_time
        assert self.query(), "read before it has come"
        assert end.query(), "read before it has come"
        return (end.time - self.time) * 1000


class Gpus:
    """Eight devices. `calls` are the functions without another effect that were called, with their arguments."""

    def __init__(self) -> None:
        self._gpus = [Gpu(number) for number in range(COUNT)]
        self._thread = threading.local()
        self.generators = tuple(torch.Generator().manual_seed(100 + number) for number in range(COUNT))
        self.capability = dict.fromkeys(range(COUNT), (9, 0))
        self.calls: list[tuple[Any, ...]] = []
        self.is_initialized = True
        self.mode = _Mode(self)

    def __getitem__(self, number: int) -> Gpu:
        return self._gpus[number]

    @property
    def current(self) -> int:
        """That of this thread."""
        return getattr(self._thread, "number", 0)

    @current.setter
    def current(self, number: int) -> None:
        self._thread.number = number

    def number_of(self, device: Any) -> int:
        """The number of a device as functions of `torch.cuda` take it."""
        if isinstance(device, str):
            device = torch.device(device)
        number = device.index if isinstance(device, torch.device) else device
        return self.current if number is None else int(number)

    def of(self, device: Any = None) -> Gpu:
        """A device by what functions of `torch.cuda` take."""
        return self._gpus[self.number_of(device)]

    def name(self, device: Any = None) -> str:
        """Each has its own, to be told apart."""
        return f"Pretend H{self.number_of(device)}00"

    def note(self, *call: Any) -> None:
        """Remember a call."""
        self.calls.append(call)

    @contextmanager
    def as_current(self, device: Any) -> Iterator[None]:
        """`torch.cuda.device`."""
        before, self.current = self.current, self.number_of(device)
        try:
            yield
        finally:
            self.current = before

    def _functions(self) -> dict[str, Any]:
        def set_current(device: Any) -> None:
            self.current, self.is_initialized = self.number_of(device), True

        def stream(device: Any = None) -> Any:
            gpu = self.of(device)
            return SimpleNamespace(number=self.number_of(device), synchronize=lambda: gpu.wait(gpu.queued))

        def reset_peak(device: Any = None) -> None:
            self.of(device).peak = self.of(device).allocated

        def properties(device: Any = None) -> Any:
            major, minor = self.capability[self.number_of(device)]
            total = self.of(device).total
            uuid = f"GPU-{self.number_of(device)}"
            return SimpleNamespace(name=self.name(device), total_memory=total, major=major, minor=minor, uuid=uuid)

        return {
            "Event": lambda **options: _Event(self, **options),
            "_lazy_init": lambda: setattr(self, "is_initialized", True),
            "current_device": lambda: self.current,
            "current_stream": stream,
            "default_generators": self.generators,
            "device": self.as_current,
            "device_count": lambda: COUNT,
            "empty_cache": lambda: self.note("empty_cache", self.current),
            "get_device_capability": lambda device=None: self.capability[self.number_of(device)],
            "get_device_name": self.name,
            "get_device_properties": properties,
            "ipc_collect": lambda: self.note("ipc_collect", self.current),
            "is_available": lambda: True,
            "is_initialized": lambda: self.is_initialized,
            "max_memory_allocated": lambda device=None: self.of(device).peak,
            "mem_get_info": lambda device=None: (self.of(device).free, self.of(device).total),
            "memory_allocated": lambda device=None: self.of(device).allocated,
            "memory_reserved": lambda device=None: self.of(device).reserved,
            "reset_peak_memory_stats": reset_peak,
            "set_device": set_current,
            "synchronize": lambda device=None: self.of(device).wait(self.of(device).queued),
        }

    def plug_in(self, patch: pytest.MonkeyPatch) -> None:
        """Put them into `torch.cuda`, and let all threads make tensors on them."""
        functions = self._functions()
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch.cuda.memory, "_record_memory_history", lambda *given: self.note("history", *given))
        patch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text(f"GPU {self.current}"))
        patch.setattr(torch.accelerator, "synchronize", functions["synchronize"])
        patch.setattr(torch.accelerator, "is_available", functions["is_available"])
        patch.setattr(torch.accelerator, "device_count", functions["device_count"])
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        patch.setattr(torch.distributed, "ProcessGroupNCCL", type("Nccl", (_Nccl,), {"gpus": self}), raising=False)
        run = threading.Thread.run

        def run_in_mode(thread: threading.Thread) -> None:
            with _Mode(self):
                run(thread)

        patch.setattr(threading.Thread, "run", run_in_mode)


class _OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    gpus: Gpus
    number: int
    is_cuda = True  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.number)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpus = next(value.gpus for value in tree_flatten((args, kwargs))[0] if isinstance(value, _OnGpu))
        return _run(gpus, function, args, kwargs or {})


class _Mode(TorchFunctionMode):
    """Sees what makes tensors, and sends tensors of the CPU to a GPU."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self.gpus = gpus

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(self.gpus, function, args, kwargs or {})


_MOVES = {torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.cpu}


def _run(gpus: Gpus, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    values = tree_flatten((args, kwargs))[0]
    if function is torch.Tensor.to:  # which also takes names
        args, kwargs = tree_map_only(str, torch.device, (args, kwargs))
    devices = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.device)]
    numbers = {value.number for value in values if isinstance(value, _OnGpu)}
    near = [value for value in values if type(value) is torch.Tensor and value.dim() > 0]
    if (len(numbers) > 1 or (numbers and near)) and function not in _MOVES:
        raise RuntimeError(f"{function}: tensors of GPUs {sorted(numbers)} and {len(near)} of the CPU")
    if devices:
        numbers = {gpus.number_of(device) for device in devices if device.type == "cuda"}
    elif function is torch.Tensor.cpu or (function is torch.Tensor.copy_ and type(args[0]) is torch.Tensor):
        numbers = set()
    args, kwargs = tree_map_only(torch.device, lambda device: torch.device("cpu"), (args, kwargs))
    if any(isinstance(value, CausalBias) for value in values):  # whose own function must be called
        args, kwargs = tree_map_only(_OnGpu, lambda tensor: tensor.as_subclass(torch.Tensor), (args, kwargs))
        return tree_map_only(torch.Tensor, lambda tensor: _put(gpus, min(numbers), tensor), function(*args, **kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        result = function(*args, **kwargs)
        if not numbers:
            return result.as_subclass(torch.Tensor) if type(result) is _OnGpu else result
        return tree_map_only(torch.Tensor, lambda tensor: _put(gpus, min(numbers), tensor), result)


def _put(gpus: Gpus, number: int, tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor:  # it is there, or is a mask of a class of its own
        return tensor
    put = tensor.as_subclass(_OnGpu)
    put.gpus, put.number = gpus, number
    return put


class _Nccl:
    """`torch.distributed.ProcessGroupNCCL`: messages go through the store."""

    gpus: Gpus

    class Options:
        """What prefrl sets."""

        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: _Nccl.Options) -> None:
        self.store, self.rank, self.size, self.num_messages = store, rank, size, 0
        quiet = [os.environ.get(f"TORCH_NCCL_{name}") for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING")]
        self.gpus.note("nccl", rank, size, options._timeout.days, quiet)

    def abort(self) -> None:
        self.gpus.note("abort", self.rank)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        (message,) = tensors
        assert message.is_cuda, "NCCL sends from GPUs only"
        assert options.rootRank == options.rootTensor == 0
        self.num_messages += 1
        key = f"message/{self.num_messages}"
        self.gpus.note("broadcast", self.rank, message.device.index)
        if self.rank == 0:
            self.store.set(key, message.cpu().numpy().tobytes())

        is_here = False

        def is_completed() -> bool:
            nonlocal is_here
            is_here = is_here or self.store.check([key])  # the store may be gone later
            return is_here

        def wait() -> None:
            received = self.store.get(key)
            if len(received) > 0:
                message.copy_(torch.frombuffer(bytearray(received), dtype=torch.uint8))

        return SimpleNamespace(is_completed=is_completed, wait=wait)
