"""torch.compile for the layers of a model, in passes that score rows.

Rows have other lengths in every step, and compiling takes seconds. So each layer is compiled with symbolic lengths,
without the attention inside it: the layout of a flat row is a Python object, of which every step has another one. What
is compiled serves all layers of a kind, all lengths and all flat layouts. Generation, whose layers read a key/value
cache, is not compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.modeling_layers import GradientCheckpointingLayer

from prefrl.errors import ConfigError
from prefrl.models.scoring import inner_model, prepare_for_scoring

if TYPE_CHECKING:
    from torch import nn

__all__ = ["compile_layers"]


def compile_layers(model: nn.Module, *, backend: str, mode: str | None, checkpointed: bool) -> None:
    """Compile the layers of the language model inside, in place; nothing is compiled before the first pass.

    Call it before the model is wrapped. A copy of the model is not compiled.

    Args:
        model: A causal language model or sequence classifier, PEFT included.
        backend: Of torch.compile.
        mode: Of torch.compile; None: its default.
        checkpointed: Whether the backward pass computes the layers once more. torch does not compile what it
            checkpoints, so the modules of each layer are compiled instead.

    Raises:
        ConfigError: It has no layers that are known to be alike.
    """
    inner = inner_model(model)
    layers = [part for part in inner.get_decoder().modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"torch_compile=True: {type(inner).__name__} has no layers that can be compiled one by one. Set it to False."
        )
    for layer in layers:
        for part in layer.children() if checkpointed else [layer]:
            part.compile(backend=backend, mode=mode, dynamic=True)
    prepare_for_scoring(model).is_compiled = True
