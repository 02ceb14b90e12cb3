"""The layers of a language model that are alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.modeling_layers import GradientCheckpointingLayer

from prefrl.errors import ConfigError
from prefrl.models.scoring import inner_model

if TYPE_CHECKING:
    from torch import nn

__all__ = ["layers_of"]


def layers_of(model: nn.Module, *, needed_by: str) -> list[nn.Module]:
    """The layers between the embeddings and the head, without those of a vision tower.

    Args:
        model: A causal language model or sequence classifier, PEFT included.
        needed_by: The option that changes them.

    Raises:
        ConfigError: There are none that are known.
    """
    inner = inner_model(model)
    layers = [part for part in inner.get_decoder().modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"{needed_by}: {type(inner).__name__} has no known layers. Set it to False.")
    return layers
