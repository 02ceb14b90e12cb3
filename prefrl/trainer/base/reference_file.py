"""Saves a moving reference model in checkpoints, and loads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file

from prefrl import distributed

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.models.reference import Reference

__all__ = ["load_reference", "save_reference"]

_REFERENCE_FILE = "reference.safetensors"


def save_reference(reference: Reference, folder: Path, *, writes: bool) -> None:
    """Write the weights that `mix` moves. All ranks must call it; others than the writer hold one weight at a time."""
    state = distributed.whole_on_host(reference.state_dict(), keep=writes)
    if writes:
        save_file(state, folder / _REFERENCE_FILE)


def load_reference(reference: Reference, folder: Path) -> None:
    """Read what `save_reference` wrote, one weight at a time. All ranks must call it."""
    with safe_open(folder / _REFERENCE_FILE, framework="pt") as file:
        reference.load_state_dict(_Tensors(file))


class _Tensors(Mapping[str, "Tensor"]):
    """The tensors of a file, each read on access."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())
