"""What checkpoints hold of the reference model: its weights if it moves, otherwise their fingerprint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file

from prefrl import distributed
from prefrl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.models.reference import Reference

__all__ = ["check_fingerprint", "load_reference", "save_fingerprint", "save_reference"]

_REFERENCE_FILE = "reference.safetensors"
_FINGERPRINT_FILE = "reference.json"


def save_reference(reference: Reference, folder: Path, *, writes: bool) -> None:
    """Write the weights that `mix` moves. All ranks must call it; others than the writer hold one weight at a time."""
    state = distributed.whole_on_host(reference.state_dict(), keep=writes)
    if writes:
        save_file(state, folder / _REFERENCE_FILE)


def load_reference(reference: Reference, folder: Path) -> None:
    """Read what `save_reference` wrote, one weight at a time. All ranks must call it."""
    with safe_open(folder / _REFERENCE_FILE, framework="pt") as file:
        reference.load_state_dict(_Tensors(file))


def save_fingerprint(fingerprint: str, folder: Path) -> None:
    """Write the fingerprint of the weights of a reference that does not move."""
    (folder / _FINGERPRINT_FILE).write_text(json.dumps({"weights": fingerprint}), encoding="utf-8")


def check_fingerprint(now: str, folder: Path) -> None:
    """Reject a resume with another reference than the one that the checkpoint was trained with.

    Args:
        now: Fingerprint of the weights of this run's reference.
        folder: The checkpoint.

    Raises:
        ConfigError: The checkpoint has another fingerprint.
    """
    path = folder / _FINGERPRINT_FILE
    saved = json.loads(path.read_text(encoding="utf-8"))["weights"] if path.exists() else now
    if saved != now:
        raise ConfigError(
            f"the checkpoint was trained against another reference: the fingerprint of its weights is {saved}, this "
            f"run's is {now}. Construct the trainer with the model (and ref_model, if there was one) that the run "
            "started from, not with the checkpoint's."
        )


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
