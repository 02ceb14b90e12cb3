"""The trainer's side of a weight sync: it sends the same weights to several servers at once, or raises an error."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from prefrl.errors import ConfigError, WeightSyncError
from prefrl.generation.base import WeightSource
from prefrl.generation.server import ServerInfo
from prefrl.generation.weights.delta import DeltaSync
from prefrl.generation.weights.process_group import GroupKind
from prefrl.generation.weights.store import Store, StoreSync
from prefrl.generation.weights.transfer import (
    AdapterSync,
    FileSync,
    GroupSync,
    PrivateFolder,
    Receiver,
    Transfer,
    Transport,
)
from prefrl.http import Http, HttpError, Refused, Unreachable

SyncMethod = Literal["nccl", "gloo", "ipc", "shm", "adapter", "delta"]
Carrier = Literal["nccl", "gloo", "shm", "store"]
# The server's weight version during an update, so that an incomplete update is never mistaken for a complete one.
UPDATING = "updating"


class WeightSync:
    """Sends the policy's weights to vLLM servers.

    Args:
        http: HTTP client, with the servers' key.
        method: "nccl", "gloo": all weights through one process group for each server. "ipc": all weights through
            memory of the device that trainer and server share. "shm": all weights as files that the server reads.
            "adapter": like "shm", but only the adapter once the server has the base weights. "delta": only what has
            changed, by the way that `over` names; "store" keeps the messages in a folder or an object store, from
            which servers read what they lack.
        folder: Where to create private folders for the files. Trainer and servers must see it under the same path; a
            file system in memory is fastest. For "store", also a URL of fsspec. Only where files are written.
        timeout: Time limit of one `send`, in seconds; also how long a server waits for the trainer. A server that
            failed gets a few seconds more to send its error message.
        over: How changes are sent. Only for "delta".
        shares_device: Whether servers share the trainer's device. They go on when they are woken and not after a sync,
            when they have no memory for a cache yet.

    Raises:
        ConfigError: `folder` or `over` is missing or has no effect, or fsspec does not know the folder.
    """

    def __init__(
        self,
        http: Http,
        *,
        method: SyncMethod,
        folder: Path | str | None,
        timeout: float,
        over: Carrier | None = None,
        shares_device: bool = False,
    ) -> None:
        if (method == "delta") != (over is not None):
            wanted = "'nccl', 'gloo', 'shm' or 'store'" if method == "delta" else "None"
            raise ConfigError(f"over={over!r}: weight sync by {method!r} needs {wanted}")
        carrier = over or method
        needs_folder = carrier in ("shm", "adapter", "store")
        if needs_folder != (folder is not None):
            wanted = "a folder that trainer and servers share, such as /dev/shm" if needs_folder else "None"
            raise ConfigError(f"folder={folder}: weight sync by {carrier!r} needs {wanted}")
        self._http = http
        self._method = method
        self._timeout = timeout
        self._shares_device = shares_device
        self._folder: PrivateFolder | Store | None = None
        if folder is not None:
            # Servers may have another working directory.
            place = str(folder) if "://" in str(folder) else os.path.abspath(os.path.expanduser(folder))
            self._folder = Store(place) if over == "store" else PrivateFolder(Path(place))
        self._transport = _transport(method, over, self._folder)
        self._servers: dict[str, Receiver] = {}
        self.bytes_sent = 0  # of the last `send`: bytes that each server received
        self.seconds = 0.0  # of the last `send`

    def model_name(self, info: ServerInfo) -> str:
        """The model name to use in requests to a server."""
        return self._transport.adapter_name or info.model

    def forget(self, url: str) -> None:
        """Forget what was sent to a server, because it was restarted."""
        server = self._servers.pop(url, None)
        if server is not None:
            server.leave()

    def close(self) -> None:
        """Leave all groups and remove all files."""
        for url in list(self._servers):
            self.forget(url)
        if self._folder is not None:
            self._folder.remove()

    def send(self, servers: Mapping[str, ServerInfo], weights: WeightSource, *, version: str) -> None:
        """Send weights to servers. Completions that are being generated continue with the new weights.

        `weights` is read once, in order; reading stops when all servers have failed.

        Args:
            servers: The servers, by base URL.
            weights: The weights of the policy.
            version: The servers' name for these weights.

        Raises:
            WeightSyncError: Not all servers loaded the weights in time. A server that failed keeps its old weights or,
                if it ran out of memory, has old and new ones mixed, under the version "updating". Send again.
        """
        started = time.monotonic()
        chosen = [self._register(url, info) for url, info in servers.items()]
        transfer = Transfer(self._http, known=self._servers.values(), timeout=self._timeout)
        try:
            transfer.for_each(chosen, "pausing", partial(_pause, transfer))
            self._transport.send(transfer, chosen, weights)
            transfer.for_each(chosen, "clearing the prefix cache", partial(_clear_cache, transfer))
            transfer.for_each(chosen, "naming the version", partial(_set_version, transfer, version=version))
        except BaseException as error:
            for server in chosen:
                server.fail("the transfer was interrupted", error)
            raise
        finally:
            self._resume(chosen)
            self.bytes_sent = transfer.bytes_sent
            self.seconds = time.monotonic() - started
        errors = [server.error for server in chosen if server.error is not None]
        if errors:
            reasons = "\n".join(map(str, errors))
            raise WeightSyncError(
                f"sending the weights {version!r} failed for {len(errors)} of {len(chosen)} servers "
                f"(weight_sync={self._method}, sync_timeout={self._timeout:g} s):\n{reasons}"
            ) from errors[0]

    def _register(self, url: str, info: ServerInfo) -> Receiver:
        server = self._servers.setdefault(url, Receiver(url, info))
        server.info, server.error, server.is_paused, server.answer = info, None, False, None
        return server

    def _resume(self, servers: list[Receiver]) -> None:
        """Let servers go on generating, and forget those that failed."""
        paused = [server for server in servers if server.is_paused and not self._shares_device]
        # With its own time limit: a server must not stay paused because the transfer used up the time.
        resuming = [
            self._http.submit(self._http.send("POST", server.url + "/resume", timeout=self._timeout))
            for server in paused
        ]
        for server, future in zip(paused, resuming, strict=True):
            try:
                future.result()
            except HttpError as error:
                server.fail("resuming", error)
        for server in servers:
            if server.error is not None:
                self.forget(server.url)


def _transport(method: SyncMethod, over: Carrier | None, folder: PrivateFolder | Store | None) -> Transport:
    if isinstance(folder, Store):
        return StoreSync(folder)
    if method == "adapter" and folder is not None:
        return AdapterSync(folder)
    kind: GroupKind = "ipc" if method == "ipc" else "nccl" if "nccl" in (method, over) else "gloo"
    whole = GroupSync(kind) if folder is None else FileSync(folder)
    return whole if over is None else DeltaSync(whole)


async def _pause(transfer: Transfer, server: Receiver) -> None:
    try:
        # This also clears the features of images, which /reset_prefix_cache leaves.
        await transfer.post(server, "/pause?mode=keep&clear_cache=true")
    except Unreachable:
        raise
    except HttpError:
        server.is_paused = True  # it may be
        raise
    server.is_paused = True
    await _set_version(transfer, server, version=UPDATING)


async def _clear_cache(transfer: Transfer, server: Receiver) -> None:
    path = "/reset_prefix_cache"
    answer = await transfer.post(server, path)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise Refused(
            f"POST {server.url}{path}: answered {answer}: its cache still belongs to the old weights", status=200
        )


async def _set_version(transfer: Transfer, server: Receiver, *, version: str) -> None:
    await transfer.post(server, "/update_weight_version", {"new_version": version})
