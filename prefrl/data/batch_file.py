"""Flat batches as what a safetensors file holds: tensors, and host values that fit into JSON. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.types import TokenBatch

__all__ = ["batch_of", "parts_of"]

Stage = TypeVar("Stage", bound="TokenBatch")


def parts_of(batch: TokenBatch, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a batch, by name after the prefix, and its fields that are tuples, by name."""
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    tensors = {f"{prefix}{name}": tensor.contiguous() for name, tensor in batch.tensors().items()}
    return tensors, {name: value for name, value in values.items() if isinstance(value, tuple)}


def batch_of(stage: type[Stage], host: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> Stage:
    """The batch that `parts_of` took apart.

    Args:
        stage: Its class.
        host: Its fields that are tuples.
        tensors: Those with other prefixes are ignored.
        prefix: Of its tensors.
    """
    values: dict[str, Any] = {name: tuple(value) for name, value in host.items()}
    values |= {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    return stage(**values)
