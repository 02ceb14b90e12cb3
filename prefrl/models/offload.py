"""Activations that wait for the backward pass in the memory of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OffloadActivations"]

# A smaller tensor costs more to start a copy of than it frees.
_SMALLEST_BYTES = 2**16


class OffloadActivations(saved_tensors_hooks):
    """What a forward pass inside saves for backward goes to pinned memory of the host, and back when it is needed.

    The copies are those of `torch.autograd.graph.save_on_cpu`, which moves everything that is saved. Here, what gains
    nothing stays on the device: weights and what autocast makes of them, which are there anyway; tensors without a
    gradient, such as rotary tables and attention masks, which all layers share and each would copy again; and small
    tensors. Of layers that are checkpointed, the input is all that is saved, and so all that is moved.

    Args:
        device_type: Of the accelerator that the forward pass runs on.
        smallest_bytes: Tensors below this size stay on the device.
    """

    def __init__(self, device_type: str, *, smallest_bytes: int = _SMALLEST_BYTES) -> None:
        library = save_on_cpu(pin_memory=True, device_type=device_type)

        def pack(tensor: Tensor) -> Tensor | tuple[object, Tensor]:
            if tensor.requires_grad and tensor.nbytes >= smallest_bytes and not _is_weight(tensor):
                return library.pack_hook(tensor)  # type: ignore[no-any-return]  # untyped
            # The graph must not hold the tensor that it made: neither would ever be freed.
            return tensor.detach()

        def unpack(packed: Tensor | tuple[object, Tensor]) -> Tensor:
            return library.unpack_hook(packed) if isinstance(packed, tuple) else packed

        super().__init__(pack, unpack)


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter, a cast of one as autocast makes it, or a view of either."""
    source = tensor if tensor._base is None else tensor._base
    maker = source.grad_fn
    if maker is None or maker.name() != "ToCopyBackward0":
        return isinstance(source, nn.Parameter)
    origin = maker.next_functions[0][0]
    return origin is not None and origin.name() == "torch::autograd::AccumulateGrad"
