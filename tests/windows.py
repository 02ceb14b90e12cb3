"""A stand-in for memory that two processes on one CUDA device share: files that are mapped into memory of the host.

Only the step that shares is replaced: the protocol around it is the library's.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prefrl.generation.weights import device_memory


class Windows:
    """Which windows there are, and who sees them.

    Args:
        folder: For the files.
    """

    def __init__(self, folder: Path) -> None:
        self.made: list[weakref.ref[Any]] = []
        self.attached: list[weakref.ref[Any]] = []
        self.seen_at_the_end: list[int] = []  # windows that a worker still saw when the trainer dropped its own
        self._folder = folder

    def plug_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace what needs CUDA."""
        for name in ("allocate", "describe", "attach", "collect"):
            monkeypatch.setattr(device_memory, name, getattr(self, name))

    def allocate(self, num_bytes: int) -> Tensor:
        """A file of its own."""
        path = self._folder / f"window-{len(self.made)}"
        path.write_bytes(b"\xff" * num_bytes)
        window = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        self.made.append(weakref.ref(window))
        return window

    def describe(self, window: Tensor) -> dict[str, Any]:
        """The file."""
        number = next(number for number, made in enumerate(self.made) if made() is window)
        return {"path": str(self._folder / f"window-{number}"), "num_bytes": window.numel()}

    def attach(self, description: dict[str, Any]) -> Tensor:
        """The same bytes, elsewhere in memory."""
        size = description["num_bytes"]
        window = torch.from_file(description["path"], shared=True, size=size, dtype=torch.uint8)
        self.attached.append(weakref.ref(window))
        return window

    def collect(self) -> None:
        """Look who still sees a window."""
        self.seen_at_the_end.append(sum(attached() is not None for attached in self.attached))
