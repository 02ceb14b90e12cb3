"""torch.compile for the layers of a model, in passes that score rows.

Rows have other lengths in every step, and compiling takes seconds. So the parts of each layer are compiled with
symbolic lengths, without the attention inside them: the layout of a flat row is a Python object, of which every step
has another one. What is compiled serves all layers of a kind, all lengths and all flat layouts. Parts, not whole
layers, because torch does not compile what it checkpoints. Generation, whose layers read a key/value cache, is not
compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefrl.models.layers import layers_of
from prefrl.models.scoring import prepare_for_scoring

if TYPE_CHECKING:
    from torch import nn

__all__ = ["compile_layers"]


def compile_layers(model: nn.Module, *, backend: str, mode: str | None) -> None:
    """Compile the parts of a language model's layers, in place; nothing is compiled before the first pass.

    Call it before the model is wrapped. A copy of the model is not compiled.

    Args:
        model: A causal language model or sequence classifier, PEFT included.
        backend: Of torch.compile.
        mode: Of torch.compile; None: its default.

    Raises:
        ConfigError: It has no layers that are known.
    """
    for layer in layers_of(model, needed_by="torch_compile=True"):
        for part in layer.children():
            part.compile(backend=backend, mode=mode, dynamic=True)
    prepare_for_scoring(model).is_compiled = True
