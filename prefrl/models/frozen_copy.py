"""A frozen copy of a model, to give to a trainer as its reference."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from prefrl import distributed
from prefrl.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["create_reference_model"]

_M = TypeVar("_M", bound="nn.Module")


def create_reference_model(model: _M, num_shared_layers: int | None = None, pattern: str | None = None) -> _M:
    """A copy of a model that is not trained, in eval mode.

    Trainers make their reference themselves: a copy is needed only to compare with other weights than those at the
    start of training.

    Args:
        model: Not changed, unless layers are shared.
        num_shared_layers: The embeddings and this many first layers are the same memory in both models, and frozen in
            both. None: the copy shares nothing.
        pattern: Part of the names of the parameters of layer `{layer}`, such as "transformer.h.{layer}.". None: found.

    Raises:
        ConfigError: No parameter has such a name, or layers of a partitioned model are to be shared.
    """
    reference = distributed.copy_of(model).requires_grad_(False).eval()
    if num_shared_layers is None:
        return reference
    if distributed.is_sharded(model):
        raise ConfigError(
            f"num_shared_layers={num_shared_layers}: the weights of the model are partitioned over processes and "
            "cannot be shared. Leave it out."
        )
    for name in _shared_names(model, num_shared_layers, pattern):
        weight = model.get_parameter(name).requires_grad_(False)
        reference.get_parameter(name).data = weight.data
    return reference


def _shared_names(model: nn.Module, num_layers: int, pattern: str | None) -> list[str]:
    """The parameters before the first of layer `num_layers`, which counts from 0."""
    usual = rf"(?:^|\.)(?:layers|h|blocks?)\.{num_layers}\."
    found = usual if pattern is None else re.escape(pattern.format(layer=num_layers))
    names = [name for name, _ in model.named_parameters()]
    first = next((i for i, name in enumerate(names) if re.search(found, name)), None)
    if first is None:
        raise ConfigError(
            f"num_shared_layers={num_layers}, pattern={pattern!r}: no parameter has a name like this. Names look like "
            f"{', '.join(names[:3])}. Set a smaller number, or pattern."
        )
    return names[:first]
