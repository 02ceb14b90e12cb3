"""The shape contract that every loss checks first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_same_shape"]


def check_same_shape(**tensors: Tensor) -> None:
    """Reject tensors of different shapes, which might broadcast silently.

    Raises:
        ValueError: Shapes differ.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        named = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"shapes differ: {named}; all of them need to be equal")
