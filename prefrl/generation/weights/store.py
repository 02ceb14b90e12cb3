"""Weights in a folder or an object store: all of them once, then what has changed. Servers read what they lack.

Messages of a `HostCopy` are written below `prefrl-ID`, whose ID is new for each trainer: message 7 has the files
`000007/000000.safetensors`, `000007/000001.safetensors` and so on. A request for an update names the messages from the
last one with all weights on, each with the fingerprint that it leads to. A server reads on from the weights that it
has; one that is new, was restarted or lost a message begins with all weights. No file is named before it is whole, or
written a second time.

Servers import this, too.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors.torch import load, save
from torch import Tensor

from prefrl.errors import ConfigError, WeightSyncError, reason_of, without_secrets
from prefrl.generation.weights import wire
from prefrl.generation.weights.delta import HostCopy, dtype_of
from prefrl.http import Refused

if TYPE_CHECKING:
    from prefrl.generation.base import WeightSource
    from prefrl.generation.weights.transfer import Receiver, Transfer
    from prefrl.generation.weights.wire import Named

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Link:
    """A message, as a request names it."""

    number: int
    num_files: int
    result: str  # fingerprint of the weights that it leads to


def files_of(url: str) -> tuple[Any, str]:
    """What reads and writes the files of a place, and the place's path there.

    Args:
        url: A folder, or a URL that fsspec knows; its options come from fsspec's own config and from the environment.

    Raises:
        ConfigError: fsspec does not know it, or the package that it needs is missing.
    """
    import fsspec  # only servers and trainers that have a store need it

    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"sync_folder={without_secrets(url)!r}: {error}. Allowed are a folder and the URLs of fsspec, such as "
            "'s3://bucket/run', whose package (s3fs, gcsfs, adlfs, ...) must be installed for trainer and servers."
        ) from error
    return files, str(path).rstrip("/")


def follow(copy: HostCopy, url: str, chain: Sequence[Link]) -> list[str]:
    """Bring a copy to the result of the last message; returns the names of the weights that have changed.

    Args:
        copy: It may have the weights of any message, or none.
        url: Where the messages are.
        chain: The messages, of which the first has all weights.

    Raises:
        ValueError: The messages are not those that the trainer named.
        OSError: A file cannot be read.
    """
    files, folder = files_of(url)
    known = [number for number, link in enumerate(chain) if link.result == copy.fingerprint]
    left = chain[known[-1] + 1 :] if known else chain
    wrong = f"{without_secrets(url)}: the weights there are not those of the trainer"
    try:
        changed = copy.apply(_message(files, folder, link) for link in left)
    except OSError:
        raise
    except Exception as error:  # damaged files are read as anything
        raise ValueError(f"{wrong}: {reason_of(error)}") from error
    if copy.fingerprint != chain[-1].result:
        raise ValueError(wrong)
    return changed


def _message(files: Any, folder: str, link: Link) -> Mapping[str, Tensor]:
    contents = (_read(files, _path(folder, link.number, file)) for file in range(link.num_files))
    return {name: tensor for content in contents for name, tensor in load(content).items()}


def _read(files: Any, path: str) -> bytes:
    try:
        return bytes(files.cat_file(path))
    except Exception as error:  # see `Store.write`
        raise OSError(
            f"{path}: the server cannot read it: {reason_of(error)}. Check whether it is there, and whether the "
            "environment in which the server was started has a login that may read it"
        ) from error


def _path(folder: str, message: int, file: int) -> str:
    return f"{folder}/{message:06d}/{file:06d}.safetensors"


class Store:
    """A folder of this trainer below a place. It is created when it is first written to.

    Args:
        place: A folder, or a URL that fsspec knows.
    """

    def __init__(self, place: str) -> None:
        self.url = f"{place.rstrip('/')}/prefrl-{secrets.token_hex(8)}"
        self._files, self._folder = files_of(self.url)
        self._finalizer = weakref.finalize(self, _remove, self._files, self._folder)
        self._place = without_secrets(place)

    def write(self, number: int, message: Iterable[Named], transfer: Transfer) -> int:
        """Write a message; returns the number of its files.

        Raises:
            TimeoutError: The deadline of the transfer has passed.
            WeightSyncError: A file cannot be written.
        """
        num_files = 0
        for bucket in wire.buckets(message, bucket_bytes=wire.BUCKET_BYTES):
            content = save({name: tensor.contiguous() for name, tensor in bucket})
            path = _path(self._folder, number, num_files)
            try:
                self._put(path, content)
            except Exception as error:  # a library that talks to a server may raise anything
                raise WeightSyncError(
                    f"sync_folder={self._place!r}: the weights cannot be written there: {reason_of(error)}. Check "
                    "whether the place is there, and whether the environment of this process, or fsspec's own config, "
                    "has a login that may write to it, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3."
                ) from error
            transfer.bytes_sent += len(content)
            transfer.check_deadline()
            num_files += 1
        return num_files

    def _put(self, path: str, content: bytes) -> None:
        try:
            self._files.pipe_file(path, content)
        except Exception:
            if not self._files.exists(path.partition("/")[0] or "/"):
                raise  # instead of making a bucket, which may have a wrong name
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, content)

    def delete(self, number: int) -> None:
        """Delete a message. If that is not possible, it is left to `remove`."""
        _remove(self._files, f"{self._folder}/{number:06d}")

    def remove(self) -> None:
        """Delete all messages. If that is not possible, a warning says so."""
        self._finalizer()


def _remove(files: Any, folder: str) -> None:
    try:
        files.rm(folder, recursive=True)
    except FileNotFoundError:  # nothing was written
        pass
    except Exception as error:  # see `Store.write`
        logger.warning("%s: weights were not deleted: %s", folder, reason_of(error))


class StoreSync:
    """A `Transport` by messages in a store, which are read by the servers and written once for all of them.

    All weights are written again when the changes since then have as many bytes, so that a server that comes later
    reads at most twice the bytes of all weights.

    Args:
        store: Where the messages are written.
    """

    adapter_name: str | None = None

    def __init__(self, store: Store) -> None:
        self._store = store
        self._copy = HostCopy()
        self._chain: list[Link] = []
        self._bytes: list[int] = []  # of each message of the chain
        self._next = 0

    def send(self, transfer: Transfer, servers: Sequence[Receiver], weights: WeightSource) -> None:
        """Write the changes, and have the servers read what they lack. One that cannot is asked once more."""
        live = [server for server in servers if server.error is None]
        if not live:
            return
        old = self._write(transfer, live, weights)
        self._have_read(transfer, live)
        failed = [server for server in live if server.error is not None]
        for server in failed:  # if it is alive, it has forgotten its weights, and begins with all of them
            logger.warning("%s. It is asked again.", server.error)
            server.error = None
        self._have_read(transfer, failed)
        for link in old:
            self._store.delete(link.number)
        if any(server.error is not None and isinstance(server.error.__cause__, Refused) for server in live):
            self._copy.clear()  # what is stored may be damaged
        transfer.for_each(live, "finishing", transfer.finish_update)

    def _write(self, transfer: Transfer, live: Sequence[Receiver], weights: WeightSource) -> list[Link]:
        """Write a message; returns those that are needed no more."""
        if sum(self._bytes[1:]) >= sum(self._bytes[:1]):
            self._copy.clear()  # then the message has all weights
        is_base, before = self._copy.fingerprint is None, transfer.bytes_sent
        number, self._next = self._next, self._next + 1
        try:
            message = self._copy.changes_of(weights, dtype=dtype_of(live))
            num_files = self._store.write(number, message, transfer)
        except BaseException:
            self._copy.clear()
            raise
        assert self._copy.fingerprint is not None
        old = self._chain if is_base else []
        link, size = Link(number, num_files, self._copy.fingerprint), transfer.bytes_sent - before
        self._chain = [link] if is_base else [*self._chain, link]
        self._bytes = [size] if is_base else [*self._bytes, size]
        return old

    def _have_read(self, transfer: Transfer, servers: Sequence[Receiver]) -> None:
        chain = [[link.number, link.num_files, link.result] for link in self._chain]

        async def read(server: Receiver) -> None:
            await transfer.start_update(server)
            await transfer.post(server, "/update_weights", {"update_info": {"path": self._store.url, "chain": chain}})

        transfer.for_each(servers, "loading weights", read)
