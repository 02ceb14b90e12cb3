"""Flat batches as what a safetensors file holds: tensors, and host values that fit into JSON. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from prefrl.types import Images

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.types import TokenBatch

__all__ = ["batch_of", "parts_of"]

_IMAGES = "images."  # what the names of tensors that belong to images begin with

Stage = TypeVar("Stage", bound="TokenBatch")


def parts_of(batch: TokenBatch, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a batch, by name after the prefix, and its fields that are tuples, by name."""
    tensors = {f"{prefix}{name}": tensor.contiguous() for name, tensor in batch.tensors().items()}
    host = {name: value for name, value in batch.given().items() if isinstance(value, tuple)}
    host["images"] = tuple(None if images is None else images.runs for images in batch.images)
    for prompt, images in enumerate(batch.images):
        inputs = {} if images is None else images.inputs
        tensors |= {f"{prefix}{_IMAGES}{prompt}.{name}": tensor.contiguous() for name, tensor in inputs.items()}
    return tensors, host


def batch_of(stage: type[Stage], host: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> Stage:
    """The batch that `parts_of` took apart.

    Args:
        stage: Its class.
        host: Its fields that are tuples.
        tensors: Those with other prefixes are ignored.
        prefix: Of its tensors.
    """
    values: dict[str, Any] = {name: tuple(value) for name, value in host.items()}
    own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    values |= {name: tensor for name, tensor in own.items() if not name.startswith(_IMAGES)}
    values["images"] = tuple(
        None if runs is None else _images(own, f"{_IMAGES}{prompt}.", runs)
        for prompt, runs in enumerate(host.get("images", ()))
    )
    return stage(**values)


def _images(tensors: Mapping[str, Tensor], prefix: str, runs: Sequence[Sequence[int]]) -> Images:
    inputs = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return Images(inputs, tuple((start, stop) for start, stop in runs))
