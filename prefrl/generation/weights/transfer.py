"""The ways of weights to servers: process groups, files and adapters; one transfer, with its deadline and requests."""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from safetensors.torch import save_file
from torch import Tensor

from prefrl.errors import ConfigError, WeightSyncError
from prefrl.generation.base import WeightSource
from prefrl.generation.server import ServerInfo
from prefrl.generation.weights import process_group, wire
from prefrl.http import Http, HttpError, Refused


@dataclass(eq=False)
class Receiver:
    """A server, and what is known about its weights."""

    url: str
    info: ServerInfo
    group: process_group.Group | None = None
    has_base: bool = False  # it has the base weights that the adapter belongs to
    adapter: Path | None = None  # the adapter's files that it loaded last
    copy: str | None = None  # the fingerprint of the weights that changes can be sent of
    # The state of one transfer:
    error: WeightSyncError | None = None
    is_paused: bool = False
    answer: Future[Any] | None = None  # to the running request

    def fail(self, doing: str, error: BaseException) -> None:
        """Record an error, and leave the server out of the rest of this transfer."""
        if self.error is None:
            self.error = WeightSyncError(f"{self.url}: {doing}: {error}")
            self.error.__cause__ = error
        self.leave()

    def leave(self) -> None:
        """Leave the process group."""
        group, self.group = self.group, None
        if group is not None:
            group.close()


@dataclass
class Transfer:
    """One transfer of weights. A server that fails is left out of the rest of it."""

    http: Http
    known: Collection[Receiver]  # all servers, including those that do not get these weights
    timeout: float  # seconds for the whole transfer
    bytes_sent: int = 0  # to each server
    _deadline: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._deadline = time.monotonic() + self.timeout

    def check_deadline(self) -> None:
        """Raise TimeoutError if the deadline has passed."""
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"not finished within {self.timeout:g} s")

    async def post(self, server: Receiver, path: str, json: Any = None, *, grace: float = 0.0) -> Any:
        """The answer to a POST request, which may come `grace` seconds after the deadline."""
        # Never 0, so that the error of a late request names the request.
        left = max(self._deadline - time.monotonic(), 0.001)
        return await self.http.send("POST", server.url + path, timeout=left + grace, json=json)

    async def start_update(self, server: Receiver) -> None:
        """Tell a server that weights will follow."""
        try:
            await self.post(server, "/start_weight_update")
        except Refused as error:
            if "already active" not in str(error):
                raise
            # A trainer died in the middle of an update.
            await self.finish_update(server)
            await self.post(server, "/start_weight_update")

    async def finish_update(self, server: Receiver) -> None:
        """Tell a server that all weights have been sent."""
        await self.post(server, "/finish_weight_update")

    def for_each(
        self, servers: Sequence[Receiver], doing: str, action: Callable[[Receiver], Coroutine[Any, Any, None]]
    ) -> None:
        """Run an action for all servers that have not failed, at the same time."""
        live = [server for server in servers if server.error is None]
        futures = [self.http.submit(action(server)) for server in live]
        for server, future in zip(live, futures, strict=True):
            try:
                future.result()
            except HttpError as error:
                server.fail(doing, error)


class Transport(Protocol):
    """A way to send weights to servers."""

    adapter_name: str | None  # the model name in requests; None: the server's own model

    def send(self, transfer: Transfer, servers: Sequence[Receiver], weights: WeightSource) -> None:
        """Send the weights to all servers that have not failed, and call `Server.fail` on those that fail now."""
        ...


# Extra seconds to wait for the server's error message after a failure.
_MESSAGE_SECONDS = 10.0


class GroupSync:
    """A `Transport` that sends all weights through process groups, which stay open between transfers.

    Args:
        backend: The communication backend of the groups.
    """

    adapter_name: str | None = None

    def __init__(self, backend: process_group.GroupKind) -> None:
        self._backend = backend

    def send(self, transfer: Transfer, servers: Sequence[Receiver], weights: Iterable[wire.Named]) -> None:
        """Broadcast all weights. They are read once; reading stops when all servers have failed."""
        self._join(transfer, [server for server in servers if server.error is None and server.group is None])
        transfer.for_each(servers, "starting", transfer.start_update)
        live = {server: server.group for server in servers if server.error is None and server.group is not None}
        key = wire.new_key()
        for server in live:
            _begin_request(transfer, server, "/update_weights", {"update_info": {"key": key.hex()}})
        device = next((group.device for group in live.values()), process_group.HOST_DEVICE)
        messages: Iterator[Tensor | process_group.Turn] = (
            wire.messages_through_window(weights, key=key)
            if self._backend == "ipc"
            else wire.messages(weights, device=device, key=key)
        )
        while any(server.error is None for server in live) and (message := next(messages, None)) is not None:
            transfer.bytes_sent += message.nbytes
            _broadcast(transfer, live, message)
        for server in live:
            if server.error is None:
                with _failures(server, "loading weights"):
                    _finish_request(server)
        transfer.for_each(servers, "finishing", transfer.finish_update)

    def _join(self, transfer: Transfer, servers: Sequence[Receiver]) -> None:
        """Form new groups with servers."""
        joining: dict[Receiver, tuple[process_group.Host, Future[process_group.Group]]] = {}
        for server in servers:
            if self._backend == "ipc" and server.info.num_workers > 1:
                message = f"it has {server.info.num_workers} workers, but weight_sync='ipc' is for one, on one GPU"
                server.fail("forming the process group", ConfigError(f"{message}. Set weight_sync='shm'"))
                continue
            try:
                host = self._invite(transfer, server)
            except (OSError, RuntimeError) as error:
                server.fail("opening a port for the process group", error)
                continue
            joining[server] = (host, host.join())
            _begin_request(transfer, server, "/init_weight_transfer_engine", {"init_info": host.invitation.as_json()})
        for server, (host, future) in joining.items():
            with _failures(server, "forming the process group"):
                server.group = _await_group(transfer, server, future)
                _finish_request(server)
            host.cancel()

    def _invite(self, transfer: Transfer, server: Receiver) -> process_group.Host:
        parts = urlsplit(server.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return process_group.Host(
            self._backend,
            parts.hostname or "",
            port,
            num_workers=server.info.num_workers,
            tag=secrets.token_hex(8),
            timeout=transfer.timeout,
        )


def _broadcast(
    transfer: Transfer, groups: Mapping[Receiver, process_group.Group], message: Tensor | process_group.Turn
) -> None:
    """Send one message to all servers that have not failed."""
    for server, group in groups.items():
        if server.error is None:
            with _failures(server, "sending weights"):
                _check(transfer, server)  # `wait` does not check if the message arrives at once
                group.start(message)
    for server, group in groups.items():
        if server.error is None:
            with _failures(server, "sending weights"):
                group.wait(check=partial(_check, transfer, server))


def _await_group(transfer: Transfer, server: Receiver, joining: Future[process_group.Group]) -> process_group.Group:
    while not wait([joining], timeout=0.01).done:
        _check(transfer, server)
    return joining.result()


def _check(transfer: Transfer, server: Receiver) -> None:
    """Raise if a wait for the server must end: it answered with an error, or the deadline has passed."""
    if server.answer is not None and server.answer.done():
        server.answer.result()
    transfer.check_deadline()


def _begin_request(transfer: Transfer, server: Receiver, path: str, json: Any) -> None:
    """Begin a request that the server answers only when its part of the work is done."""
    server.answer = transfer.http.submit(transfer.post(server, path, json, grace=_MESSAGE_SECONDS))


def _finish_request(server: Receiver, *, timeout: float | None = None) -> None:
    """Wait for the answer to the running request."""
    answer, server.answer = server.answer, None
    if answer is not None:
        answer.result(timeout)


@contextmanager
def _failures(server: Receiver, doing: str) -> Iterator[None]:
    """Leave out a server that fails, and record its own error message: a broken connection says little."""
    try:
        yield
    except HttpError as error:
        server.fail(doing, error)
    except (RuntimeError, TimeoutError) as error:
        reason: Exception = error
        try:
            _finish_request(server, timeout=_MESSAGE_SECONDS)
        except HttpError as answered:
            reason = answered
        except TimeoutError:
            pass
        server.fail(doing, reason)


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

    def send(self, transfer: Transfer, servers: Sequence[Receiver], weights: Iterable[wire.Named]) -> None:
        """Write the weights' files, have the servers load them, and remove the files."""
        if all(server.error is not None for server in servers):
            return
        folder = self._folder.make("weights-")
        try:
            repeated = _save(transfer, folder, weights)

            async def load(server: Receiver) -> None:
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


logger = logging.getLogger(__name__)

# The model name in requests if the policy is an adapter.
ADAPTER = "prefrl-policy"


class AdapterSync:
    """A `Transport` that sends an adapter as files, and the base weights in the same way.

    Args:
        folder: Where to write the files.
    """

    adapter_name: str | None = ADAPTER

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._base = FileSync(folder)

    def send(self, transfer: Transfer, servers: Sequence[Receiver], weights: WeightSource) -> None:
        """Write the adapter's files. They are kept for as long as a server may read them."""
        for server in servers:
            if server.info.max_lora_rank is None:
                message = "the server takes no adapters. Start it with --max_lora_rank, or send all weights"
                server.fail("loading the adapter", ConfigError(message))
        self._send_base(transfer, [server for server in servers if not server.has_base], weights)
        folder = self._folder.make("adapter-")
        weights.save_adapter(folder)
        transfer.bytes_sent += sum(file.stat().st_size for file in folder.glob("*.safetensors"))

        async def load(server: Receiver) -> None:
            adapter = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
            try:
                await transfer.post(server, "/v1/load_lora_adapter", adapter)
            except Refused as error:
                if error.status != 200:  # on success the answer is text, not JSON
                    raise
            server.adapter = folder

        transfer.for_each(servers, "loading the adapter", load)
        self._remove_unused(transfer)

    def _send_base(self, transfer: Transfer, servers: Sequence[Receiver], weights: WeightSource) -> None:
        if not servers:
            return
        if weights.is_quantized:
            logger.warning("The policy is quantized: servers apply its adapter to the base weights that they loaded.")
        else:
            self._base.send(transfer, servers, weights.base())
        for server in servers:
            server.has_base = server.error is None

    def _remove_unused(self, transfer: Transfer) -> None:
        """Keep only folders that a server may still read: it drops its copy when its base weights change."""
        used = {server.adapter for server in transfer.known}
        for folder in self._folder.path.glob("adapter-*"):
            if folder not in used:
                shutil.rmtree(folder, ignore_errors=True)
