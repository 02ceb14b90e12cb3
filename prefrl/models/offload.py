"""Offload activations to host memory until the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OffloadActivations"]

# For smaller tensors, starting a copy costs more than the freed memory is worth.
_SMALLEST_BYTES = 2**16


class OffloadActivations(saved_tensors_hooks):
    """Moves tensors that a forward pass inside saves for backward to pinned host memory, and back when needed.

    The copies are those of `torch.autograd.graph.save_on_cpu`, which moves every saved tensor. Here, tensors that are
    not worth moving stay on the device: weights and their autocast copies, which are on the device anyway; tensors
    without a gradient, such as rotary tables and attention masks, which all layers share and each layer would copy
    again; and small tensors. Checkpointed layers save only their input, so only that is moved.

    Args:
        device_type: Type of the accelerator that the forward pass runs on.
        smallest_bytes: Tensors below this size stay on the device.
    """

    def __init__(self, device_type: str, *, smallest_bytes: int = _SMALLEST_BYTES) -> None:
        library = save_on_cpu(pin_memory=True, device_type=device_type)

        def pack(tensor: Tensor) -> Tensor | tuple[object, Tensor]:
            if tensor.requires_grad and tensor.nbytes >= smallest_bytes and not _is_weight(tensor):
                return library.pack_hook(tensor)  # type: ignore[no-any-return]  # untyped
            # Detached, because a graph that holds its own output is a reference cycle, and would never be freed.
            return tensor.detach()

        def unpack(packed: Tensor | tuple[object, Tensor]) -> Tensor:
            return library.unpack_hook(packed) if isinstance(packed, tuple) else packed

        super().__init__(pack, unpack)


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter, an autocast copy of one, or a view of either."""
    source = tensor if tensor._base is None else tensor._base
    maker = source.grad_fn
    if maker is None or maker.name() != "ToCopyBackward0":
        return isinstance(source, nn.Parameter)
    origin = maker.next_functions[0][0]
    return origin is not None and origin.name() == "torch::autograd::AccumulateGrad"
