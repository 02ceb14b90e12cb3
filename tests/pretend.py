"""A pretend accelerator: its tensors say `pretend:0`, hold a tensor of the CPU, and obey the rules of a GPU.

An operator that is given tensors of both devices raises, as on CUDA, and what makes the host wait for a GPU is
recorded. So whatever runs on it keeps its data on one device, and shows where it would drain the queue of a real one.
It has no streams, no kernels and no memory of its own, and branches behind `device.type == "cuda"` do not see it.

The device is registered with torch once this module is imported, and counts as an accelerator for the rest of the
process: import it in a process of its own only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

DEVICE = "pretend:0"
OURS = str(Path(__file__).parents[1] / "prefrl") + os.sep
_LIBRARIES = str(Path(torch.__file__).parents[1]) + os.sep
_PASSED = (__file__, str(Path(torch.__file__).parent) + os.sep)  # frames that only pass an operator on

_aten = torch.ops.aten
_MOVES = {_aten._to_copy.default, _aten.copy_.default}
# The host needs the values, or the size of the result depends on them.
_WAITS = {
    _aten._local_scalar_dense.default,
    _aten._unique2.default,
    _aten.bincount.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
    _aten.repeat_interleave.Tensor,
    _aten.unique_consecutive.default,
    _aten.unique_dim.default,
}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}


class Wait(NamedTuple):
    """One wait of the host for the device: what was asked for, and who asked."""

    operator: str
    place: str  # module:function of prefrl, the innermost on the stack; "" if there is none
    line: int
    library: str  # package.module:function of what it calls, if that asked


waits: list[Wait] = []


class PretendTensor(torch.Tensor):
    """A tensor on the pretend device."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> PretendTensor:
        with torch.inference_mode(False):  # views of parameters cannot be inference tensors
            made = torch.Tensor._make_wrapper_subclass(
                cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=DEVICE, requires_grad=False
            )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {})

    def tolist(self) -> Any:
        _record("tolist")
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert a tensor on {DEVICE} to numpy: use Tensor.cpu() first")

    @property
    def data(self) -> PretendTensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: PretendTensor) -> None:
        torch.Tensor.data.__set__(self, value)
        self.raw = value.raw

    def untyped_storage(self) -> torch.UntypedStorage:  # who shares memory with whom, when weights are saved
        return self.raw.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:  # a file holds the values
        return self.detach().raw.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        return f"PretendTensor({self.raw})"


@contextmanager
def device() -> Iterator[list[Wait]]:
    """HuggingFace's Trainer uses the pretend device in this context. Yields the waits since its beginning."""
    before = os.environ.get("ACCELERATE_TORCH_DEVICE")
    os.environ["ACCELERATE_TORCH_DEVICE"] = DEVICE
    waits.clear()
    # `Module.to` would make new parameters otherwise, and those that were one would be two.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with _Mode():
            yield waits
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        os.environ.pop("ACCELERATE_TORCH_DEVICE")
        if before is not None:
            os.environ["ACCELERATE_TORCH_DEVICE"] = before


class _Mode(TorchDispatchMode):
    """Sees what makes tensors, too, and operators on tensors of the CPU that are sent to the device."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {})


def _run(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if torch.is_inference_mode_enabled():  # in which operators arrive that consist of others
        result = operator.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    tensors: list[torch.Tensor] = []
    raw_args = _noted(args, tensors)
    raw_kwargs = {name: _noted(value, tensors) for name, value in kwargs.items()}
    far = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
    target = kwargs.get("device")
    if operator is _aten.copy_.default:
        goes_far = isinstance(args[0], PretendTensor)
    else:
        goes_far = bool(far) if target is None else torch.device(target).type == "pretend"
    if far:
        _check_devices(operator, args, tensors)
        _check_wait(operator, args, kwargs, goes_far=goes_far)
    if operator in _MOVES:
        _check_copy(operator, args, kwargs, goes_far=goes_far)
    if goes_far and target is not None:
        raw_kwargs["device"] = torch.device("cpu")
    raw_kwargs.pop("pin_memory", None)
    result = operator(*raw_args, **raw_kwargs)
    if not goes_far:
        return result
    if operator._schema.is_mutable and isinstance(result, torch.Tensor):
        return kwargs.get("out", args[0])
    return _wrapped(result)


def _noted(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with tensors of the CPU; notes those that it had."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.raw if isinstance(value, PretendTensor) else value
    return type(value)(_noted(each, tensors) for each in value) if type(value) in (list, tuple) else value


def _wrapped(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, PretendTensor) else PretendTensor(value)
    return type(value)(_wrapped(each) for each in value) if type(value) in (list, tuple) else value


def _check_devices(operator: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """CUDA takes scalars of the CPU, and indices of the CPU, for which it waits."""
    near = [tensor for tensor in tensors if not isinstance(tensor, PretendTensor) and tensor.dim() > 0]
    if not near or operator in _MOVES:
        return
    if operator in _INDEXED and isinstance(args[0], PretendTensor):
        _record(f"{operator} with indices of the CPU")
        return
    raise RuntimeError(f"{operator}: expected all tensors to be on the same device, but found {DEVICE} and cpu")


def _check_wait(operator: Any, args: Any, kwargs: dict[str, Any], *, goes_far: bool) -> None:
    to_host = operator in _MOVES and not goes_far and not _is_non_blocking(operator, args, kwargs)
    by_mask = operator in _INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1])
    if operator in _WAITS or to_host or by_mask:
        _record(str(operator))


def _check_copy(operator: Any, args: Any, kwargs: dict[str, Any], *, goes_far: bool) -> None:
    """A copy from the host waits, too, unless it is told not to."""
    source = args[1] if operator is _aten.copy_.default else args[0]
    from_host = goes_far and not isinstance(source, PretendTensor) and source.numel() > 0
    if from_host and not _is_non_blocking(operator, args, kwargs):
        _record(f"{operator} from the host")


def _is_non_blocking(operator: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(args[2] if operator is _aten.copy_.default and len(args) > 2 else kwargs.get("non_blocking", False))


def _record(operator: str) -> None:
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None and not frame.f_code.co_filename.startswith(OURS):
        if not library and not frame.f_code.co_filename.startswith(_PASSED):
            library = _name(frame, _LIBRARIES)
        frame = frame.f_back
    waits.append(
        Wait(operator, "", 0, library)
        if frame is None
        else Wait(operator, _name(frame, OURS), frame.f_lineno, library)
    )


def _name(frame: FrameType, root: str) -> str:
    path = frame.f_code.co_filename.removeprefix(root).removesuffix(".py")
    return f"{path.replace(os.sep, '.')}:{frame.f_code.co_name}"


class _Backend(_DummyBackendModule):
    """What `torch.pretend` is: as much of `torch.cuda` as transformers and accelerate ask of any device."""

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, *_: Any) -> None:
        """The CPU's generator, which the CPU's owner sets."""

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    return PretendTensor(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    return PretendTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    near, far = (tensor.raw if isinstance(tensor, PretendTensor) else tensor for tensor in (source, target))
    if isinstance(source, PretendTensor) != isinstance(target, PretendTensor) and source.numel() and not non_blocking:
        _record("copy to the host" if isinstance(source, PretendTensor) else "copy from the host")
    far.copy_(near)
    return target


def _local_scalar_dense(tensor: PretendTensor) -> Any:
    _record("aten._local_scalar_dense.default")
    return tensor.raw.item()


_setup_privateuseone_for_python_backend("pretend", backend_module=_Backend())
# Kept, or torch forgets them.
_library = torch.library.Library("aten", "IMPL")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
_library.impl("_local_scalar_dense", _local_scalar_dense, "PrivateUse1")  # torch.tensor([scalar of the device])
