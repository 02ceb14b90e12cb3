"""The trainer's side of a weight sync: the same weights to several servers at once, all of them or an error."""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from safetensors.torch import save_file

from prefrl.errors import ConfigError, WeightSyncError
from prefrl.generation.http import Http, HttpError, Refused, Unreachable
from prefrl.generation.weights import wire

if TYPE_CHECKING:
    from prefrl.generation.base import WeightSource
    from prefrl.generation.server_info import ServerInfo

__all__ = ["ADAPTER", "UPDATING", "SyncMethod", "WeightSync"]

logger = logging.getLogger(__name__)

SyncMethod = Literal["nccl", "gloo", "shm", "adapter"]
# The server's version while weights are on their way, so that half of an update is never taken for one.
UPDATING = "updating"
# What requests name as their model where the policy is an adapter.
ADAPTER = "prefrl-policy"
# How much longer a server's own words are waited for, when its connection broke or the time is over.
_WORDS_SECONDS = 10.0


@dataclass(eq=False)
class _Server:
    """A server, and what is known of its weights."""

    url: str
    info: ServerInfo
    group: wire.Group | None = None
    has_base: bool = False  # all weights were sent to it: by "adapter", those below the adapter
    adapter: Path | None = None  # what its requests read
    # Of one `send`:
    error: WeightSyncError | None = None
    is_paused: bool = False
    answer: Future[Any] | None = None

    def fail(self, doing: str, error: BaseException) -> None:
        """Leave the rest of this `send` to the other servers."""
        if self.error is None:
            self.error = WeightSyncError(f"{self.url}: {doing}: {error}")
            self.error.__cause__ = error
        self.leave()

    def leave(self) -> None:
        """Break the group off."""
        group, self.group = self.group, None
        if group is not None:
            group.close()


@dataclass
class _Deadline:
    seconds: float
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds; never 0, so that a late request fails with its own name."""
        return max(self._end - time.monotonic(), 0.001)

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise TimeoutError(f"not done within {self.seconds:g} s")


class WeightSync:
    """Gives the policy's weights to vLLM servers.

    Args:
        http: Requests, with the servers' key.
        method: "nccl", "gloo": all weights in one process group for each server. "shm": all weights as files that the
            server reads. "adapter": as "shm", and only the adapter once the server has the weights that it is on.
        folder: Where files go, seen by trainer and servers under the same name, best in memory; private ones are made
            in it. Only for "shm" and "adapter".
        timeout: Seconds that one `send` may take, and that a server waits for the trainer. A server that failed has a
            few more to say why.

    Raises:
        ConfigError: `folder` is missing, or has no effect.
    """

    def __init__(self, http: Http, *, method: SyncMethod, folder: Path | None, timeout: float) -> None:
        needs_folder = method in ("shm", "adapter")
        if needs_folder != (folder is not None):
            wanted = "a folder that trainer and servers share, like /dev/shm" if needs_folder else "None"
            raise ConfigError(f"folder={folder}: weight sync by {method!r} needs {wanted}")
        self._http = http
        self._method = method
        self._folder = folder
        self._timeout = timeout
        self._files: weakref.finalize[..., Any] | None = None
        self._private: Path | None = None
        self._servers: dict[str, _Server] = {}
        self._deadline = _Deadline(timeout)
        self.bytes_sent = 0  # of the last `send`: bytes that each server received
        self.seconds = 0.0  # of the last `send`

    def model_name(self, info: ServerInfo) -> str:
        """What requests to a server must name as their model."""
        return ADAPTER if self._method == "adapter" else info.model

    def forget(self, url: str) -> None:
        """The server was restarted: what it was sent counts for nothing."""
        server = self._servers.pop(url, None)
        if server is not None:
            server.leave()

    def close(self) -> None:
        """Leave all groups and remove all files."""
        for url in list(self._servers):
            self.forget(url)
        self._private = None
        if self._files is not None:
            self._files()

    def send(self, servers: Mapping[str, ServerInfo], weights: WeightSource, *, version: str) -> None:
        """Give servers these weights. What they are generating goes on with them.

        `weights` is read once, in order, and no further when all servers have failed.

        Args:
            servers: By base URL.
            weights: Of the policy.
            version: The servers' name for them.

        Raises:
            WeightSyncError: Not all servers took them in time. A server that failed has its old weights, or (after a
                lack of memory) a mixture that runs, under the version "updating"; send again.
        """
        started = time.monotonic()
        self._deadline = _Deadline(self._timeout)
        self.bytes_sent = 0
        chosen = [self._known(url, info) for url, info in servers.items()]
        try:
            self._each(chosen, "pausing", self._pause)
            if self._method == "adapter":
                self._send_adapter(chosen, weights)
            else:
                self._send_all(chosen, weights)
            self._each(chosen, "clearing the prefix cache", self._clear_cache)
            self._each(chosen, "naming the version", partial(self._name, version=version))
        except BaseException as error:
            for server in chosen:
                server.fail("broken off", error)
            raise
        finally:
            self._end(chosen)
            self.seconds = time.monotonic() - started
        errors = [server.error for server in chosen if server.error is not None]
        if errors:
            words = "\n".join(map(str, errors))
            raise WeightSyncError(
                f"weights {version!r} were not taken by {len(errors)} of {len(chosen)} servers "
                f"(by {self._method}, timeout {self._timeout:g} s):\n{words}"
            ) from errors[0]

    def _known(self, url: str, info: ServerInfo) -> _Server:
        server = self._servers.setdefault(url, _Server(url, info))
        server.info, server.error, server.is_paused, server.answer = info, None, False, None
        return server

    def _end(self, servers: list[_Server]) -> None:
        """Let servers go on, and forget what failed."""
        paused = [server for server in servers if server.is_paused]
        resuming = [self._http.submit(self._resume(server)) for server in paused]
        for server, future in zip(paused, resuming, strict=True):
            try:
                future.result()
            except HttpError as error:
                server.fail("resuming", error)
        for server in servers:
            if server.error is not None:
                self.forget(server.url)

    # Requests.

    async def _post(self, server: _Server, path: str, json: Any = None, *, grace: float = 0.0) -> Any:
        timeout = self._deadline.left() + grace
        return await self._http.send("POST", server.url + path, timeout=timeout, json=json)

    async def _pause(self, server: _Server) -> None:
        try:
            await self._post(server, "/pause?mode=keep&clear_cache=true")
        except Unreachable:
            raise
        except HttpError:
            server.is_paused = True  # perhaps
            raise
        server.is_paused = True
        await self._name(server, version=UPDATING)

    async def _resume(self, server: _Server) -> None:
        # With seconds of its own: a server must not stay paused because the weights took all.
        await self._http.send("POST", server.url + "/resume", timeout=self._timeout)

    async def _start(self, server: _Server) -> None:
        try:
            await self._post(server, "/start_weight_update")
        except Refused as error:
            if "already active" not in str(error):
                raise
            # A trainer died between its requests.
            await self._post(server, "/finish_weight_update")
            await self._post(server, "/start_weight_update")

    async def _finish(self, server: _Server) -> None:
        await self._post(server, "/finish_weight_update")
        server.has_base = True

    async def _name(self, server: _Server, *, version: str) -> None:
        await self._post(server, "/update_weight_version", {"new_version": version})

    async def _clear_cache(self, server: _Server) -> None:
        path = "/reset_prefix_cache"
        answer = await self._post(server, path)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise Refused(f"POST {server.url}{path}: answered {answer}: prompts computed with old weights", status=200)

    def _each(
        self, servers: list[_Server], doing: str, action: Callable[[_Server], Coroutine[Any, Any, None]]
    ) -> None:
        """Do the same for all servers that have not failed, at once."""
        live = [server for server in servers if server.error is None]
        futures = [self._http.submit(action(server)) for server in live]
        for server, future in zip(live, futures, strict=True):
            try:
                future.result()
            except HttpError as error:
                server.fail(doing, error)

    # All weights.

    def _send_all(self, servers: list[_Server], weights: Iterable[wire.Named]) -> None:
        if self._method in ("shm", "adapter"):
            self._send_files(servers, weights)
        else:
            self._send_through_groups(servers, weights)
        self._each(servers, "finishing", self._finish)

    def _send_files(self, servers: list[_Server], weights: Iterable[wire.Named]) -> None:
        if all(server.error is not None for server in servers):
            return
        folder = Path(tempfile.mkdtemp(prefix="weights-", dir=self._private_folder()))
        names: Counter[str] = Counter()
        try:
            for number, bucket in enumerate(wire.buckets(weights, bucket_bytes=wire.BUCKET_BYTES)):
                names.update(name for name, _ in bucket)
                tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
                save_file(tensors, folder / f"{number:06d}.safetensors")
                self.bytes_sent += sum(tensor.nbytes for tensor in tensors.values())

            twice = sorted(name for name, count in names.items() if count > 1)

            async def read(server: _Server) -> None:
                if twice:  # a file has each name once
                    raise HttpError(f"sent more than once: {', '.join(twice)}")
                await self._start(server)
                await self._post(server, "/update_weights", {"update_info": {"path": str(folder)}})

            self._each(servers, "loading weights", read)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _send_through_groups(self, servers: list[_Server], weights: Iterable[wire.Named]) -> None:
        self._meet([server for server in servers if server.error is None and server.group is None])
        self._each(servers, "starting", self._start)
        live = {server: server.group for server in servers if server.error is None and server.group is not None}
        for server in live:
            update = self._post(server, "/update_weights", {"update_info": {}}, grace=_WORDS_SECONDS)
            server.answer = self._http.submit(update)
        device = next((group.device for group in live.values()), wire.HOST_DEVICE)
        messages = wire.messages(weights, device=device)
        while any(server.error is None for server in live) and (message := next(messages, None)) is not None:
            self.bytes_sent += message.nbytes
            self._broadcast(live, message)
        for server in live:
            if server.error is None:
                self._finish_answer(server, "loading weights")

    def _broadcast(self, groups: Mapping[_Server, wire.Group], message: Any) -> None:
        """One message to all servers that have not failed."""
        for server, group in groups.items():
            if server.error is None:
                with self._failures(server, "sending weights"):
                    self._check(server)  # messages that arrive at once are not waited for
                    group.start(message)
        for server, group in groups.items():
            if server.error is None:
                with self._failures(server, "sending weights"):
                    group.wait(check=partial(self._check, server))

    def _meet(self, servers: list[_Server]) -> None:
        """New groups with servers."""
        joining: dict[_Server, tuple[wire.Host, Future[wire.Group]]] = {}
        for server in servers:
            try:
                host = self._invite(server)
            except (OSError, RuntimeError) as error:
                server.fail("opening a port for it", error)
                continue
            joining[server] = (host, host.join())
            init_info = host.invitation.as_json()
            meet = self._post(server, "/init_weight_transfer_engine", {"init_info": init_info}, grace=_WORDS_SECONDS)
            server.answer = self._http.submit(meet)
        for server, (host, future) in joining.items():
            with self._failures(server, "meeting it"):
                server.group = self._await_group(server, future)
                self._finish_answer(server, "meeting it")
            host.cancel()

    def _invite(self, server: _Server) -> wire.Host:
        parts = urlsplit(server.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return wire.Host(
            "nccl" if self._method == "nccl" else "gloo",
            parts.hostname or "",
            port,
            num_workers=server.info.num_workers,
            tag=secrets.token_hex(8),
            timeout=self._timeout,
        )

    def _await_group(self, server: _Server, joining: Future[wire.Group]) -> wire.Group:
        while True:
            try:
                return joining.result(timeout=0.01)
            except FutureTimeout:
                if joining.done():
                    raise
            self._check(server)

    def _check(self, server: _Server) -> None:
        """Raise what ends a wait for the server: its words, or the deadline."""
        if server.answer is not None and server.answer.done():
            server.answer.result()
        self._deadline.check()

    def _finish_answer(self, server: _Server, doing: str) -> None:
        """Wait for the answer to the request that is under way."""
        answer, server.answer = server.answer, None
        try:
            if answer is not None:
                answer.result()
        except HttpError as error:
            server.fail(doing, error)

    @contextmanager
    def _failures(self, server: _Server, doing: str) -> Iterator[None]:
        """Take a server that fails out of this `send`, with its own words: a broken connection says little."""
        try:
            yield
        except HttpError as error:
            server.fail(doing, error)
        except (RuntimeError, TimeoutError) as error:
            answer, server.answer = server.answer, None
            words: Exception = error
            try:
                if answer is not None:
                    answer.result(timeout=_WORDS_SECONDS)
            except HttpError as said:
                words = said
            except FutureTimeout:
                pass
            server.fail(doing, words)

    # Adapters.

    def _send_adapter(self, servers: list[_Server], weights: WeightSource) -> None:
        for server in servers:
            if server.info.max_lora_rank is None:
                message = "the server takes no adapters; start it with a maximum LoRA rank, or send all weights"
                server.fail("loading the adapter", ConfigError(message))
        new = [server for server in servers if not server.has_base]
        if weights.is_quantized:
            if new:
                logger.warning("the policy is quantised: its adapter is put on the weights that the servers loaded")
            for server in new:
                server.has_base = True
        elif new:
            self._send_all(new, weights.base())
        folder = Path(tempfile.mkdtemp(prefix="adapter-", dir=self._private_folder()))
        weights.save_adapter(folder)
        self.bytes_sent += sum(file.stat().st_size for file in folder.iterdir() if file.suffix == ".safetensors")

        async def load(server: _Server) -> None:
            adapter = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
            try:
                await self._post(server, "/v1/load_lora_adapter", adapter)
            except Refused as error:
                if error.status != 200:  # it says in words, not in JSON, that it did
                    raise
            server.adapter = folder

        self._each(servers, "loading the adapter", load)
        self._remove_adapters()

    def _remove_adapters(self) -> None:
        """Keep only those that a server may still read: it drops its copy when its base weights change."""
        used = {server.adapter for server in self._servers.values()}
        for folder in self._private_folder().glob("adapter-*"):
            if folder not in used:
                shutil.rmtree(folder, ignore_errors=True)

    def _private_folder(self) -> Path:
        if self._private is None:
            assert self._folder is not None
            self._folder.mkdir(parents=True, exist_ok=True)
            self._private = Path(tempfile.mkdtemp(prefix="prefrl-", dir=self._folder))  # 0700
            self._files = weakref.finalize(self, shutil.rmtree, self._private, ignore_errors=True)
        return self._private
