"""Sending all weights as files that servers read."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from prefrl.generation.weights import wire
from prefrl.http import HttpError

if TYPE_CHECKING:
    from prefrl.generation.weights.transfer import Server, Transfer

__all__ = ["FileSync", "PrivateFolder"]


class PrivateFolder:
    """A folder that no other user can read. It is created when it is first needed, and removed with this object.

    Args:
        parent: Where to create it.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._path: Path | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    @property
    def path(self) -> Path:
        """The folder; created if it does not exist."""
        if self._path is None:
            self._parent.mkdir(parents=True, exist_ok=True)
            self._path = Path(tempfile.mkdtemp(prefix="prefrl-", dir=self._parent))  # 0700
            self._finalizer = weakref.finalize(self, shutil.rmtree, self._path, ignore_errors=True)
        return self._path

    def make(self, prefix: str) -> Path:
        """Create a new folder in it."""
        return Path(tempfile.mkdtemp(prefix=prefix, dir=self.path))

    def remove(self) -> None:
        """Remove the folder and its contents."""
        self._path = None
        if self._finalizer is not None:
            self._finalizer()


class FileSync:
    """A `Transport` that sends all weights as files.

    Args:
        folder: Where to write the files.
    """

    adapter_name: str | None = None

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder

    def send(self, transfer: Transfer, servers: Sequence[Server], weights: Iterable[wire.Named]) -> None:
        """Write the weights' files, have the servers load them, and remove the files."""
        if all(server.error is not None for server in servers):
            return
        folder = self._folder.make("weights-")
        try:
            repeated = _save(transfer, folder, weights)

            async def load(server: Server) -> None:
                if repeated:  # a server might not see it: a file contains each name only once
                    raise HttpError(f"sent more than once: {', '.join(repeated)}")
                await transfer.start_update(server)
                await transfer.post(server, "/update_weights", {"update_info": {"path": str(folder)}})

            transfer.for_each(servers, "loading weights", load)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        transfer.for_each(servers, "finishing", transfer.finish_update)


def _save(transfer: Transfer, folder: Path, weights: Iterable[wire.Named]) -> list[str]:
    """Write weights as safetensors files, and return the names that occur more than once."""
    names: Counter[str] = Counter()
    for number, bucket in enumerate(wire.buckets(weights, bucket_bytes=wire.BUCKET_BYTES)):
        names.update(name for name, _ in bucket)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
        save_file(tensors, folder / f"{number:06d}.safetensors")
        transfer.bytes_sent += sum(tensor.nbytes for tensor in tensors.values())
    return sorted(name for name, count in names.items() if count > 1)
