"""The vLLM servers of a run: waiting for them, checking what they serve, and sending them the weights."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefrl.distributed import from_main
from prefrl.errors import GenerationError, WeightSyncError
from prefrl.generation.vllm.handshake import handshake, is_healthy, weight_version
from prefrl.generation.vllm.pending import error_of, raise_shared
from prefrl.generation.vllm.requests import version_name
from prefrl.http import HttpError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefrl.generation.base import WeightSource
    from prefrl.generation.server import ServerInfo
    from prefrl.generation.vllm.handshake import Requirements
    from prefrl.generation.vllm.sleep import Sleep
    from prefrl.generation.weights.sync import WeightSync
    from prefrl.http import Http

_MAX_SENDS = 3
# How long to watch for the death of a server after a failed send.
_DEATH_SECONDS = 2.0
FRESH = "default"  # the weight version of a server that has just started


@dataclass(slots=True)
class VLLMStats:
    """Counts since the last call of `VLLMGenerator.stats`, on this process."""

    requests: int = 0
    retries: int = 0
    restarts: int = 0  # of servers; only the process that sends the weights counts them
    wait_s: float = 0.0  # seconds spent waiting for servers to answer
    bytes_sent: int = 0  # of weights, to each server; only the process that sends them counts


class Fleet:
    """Servers that serve the same model, and the weights that they should have.

    Construction, `sync`, `recover` and `invalidate` are collective: all training processes must call them. They run on
    the caller's thread.

    Args:
        urls: Base URLs of the servers.
        http: HTTP client, with the servers' key.
        weight_sync: Sends weights to servers.
        requirements: What the servers must serve.
        server_timeout: How long to wait for a server that does not answer, in seconds.
        sleep: Of servers that share the trainer's device; None: they have devices of their own.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        http: Http,
        weight_sync: WeightSync,
        requirements: Requirements,
        server_timeout: float,
        sleep: Sleep | None = None,
    ) -> None:
        self._urls = urls
        self._sleep = sleep
        self._http = http
        self._weight_sync = weight_sync
        self._requirements = requirements
        self._with_our_weights: set[str] = set()
        self._weights: WeightSource | None = None
        self.step = 0  # optimizer step of the weights that servers should have
        self.server_timeout = server_timeout
        self.run: str = from_main(secrets.token_hex(4))
        self.infos: dict[str, ServerInfo] = {}  # by URL; empty before the first connection
        self.is_sending = False
        self.stats = VLLMStats()

    @property
    def version(self) -> str:
        """The name that servers with the current weights have for them."""
        return version_name(self.run, self.step)

    @property
    def has_weights(self) -> bool:
        """Whether the servers are connected and weights were given to `sync`."""
        return bool(self.infos) and self._weights is not None

    @property
    def addresses(self) -> Sequence[str]:
        """Base URLs to send requests to."""
        return self._urls

    def engines(self, address: str) -> Sequence[str]:
        """Base URLs of the servers that answer requests to one of `addresses`."""
        return [address]

    def model_name(self, url: str) -> str:
        """The model name to use in requests to a server."""
        return self._weight_sync.model_name(self.infos[url])

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """Make all servers generate with these weights; see `VLLMGenerator.sync`."""
        self._weights, self.step = weights, version
        self._align(weights, reconnect=False)

    def recover(self) -> None:
        """Wait for all servers, and send the weights to those that lost them.

        Raises:
            GenerationError: There are no weights yet.
        """
        if self._weights is None:
            raise GenerationError("the servers cannot be recovered before they have weights: call sync first")
        self._align(self._weights, reconnect=True)

    def rest(self) -> None:
        """Put the servers, which share the trainer's device, to sleep until the next `sync`. For a single process.

        Raises:
            GenerationError: A server does not answer in time, or does not sleep.
        """
        if not self.infos:
            self._connect()
        self._at_each(lambda sleep, url: sleep.begin(url))

    def _at_each(self, act: Callable[[Sleep, str], None]) -> None:
        """Let each server sleep or wake; one that is gone is waited for. With a device of its own, it does neither."""
        if (sleep := self._sleep) is None:
            return
        for url in self._urls:
            try:
                act(sleep, url)
            except HttpError:
                self._connect()
                try:
                    act(sleep, url)
                except HttpError as error:
                    raise GenerationError(
                        f"the vLLM server at {url} is running, but does not answer: {error}"
                    ) from error

    def invalidate(self) -> None:
        """Make the next `sync` send the weights to all servers."""
        # With a new run name, no server has a current version any more.
        self.run = from_main(secrets.token_hex(4))
        self._with_our_weights.clear()
        for url in self._urls:
            self._weight_sync.forget(url)

    def _align(self, weights: WeightSource, *, reconnect: bool) -> None:
        """Connect to all servers and bring their weights up to date. An error on one process is raised on all.

        All processes take each step together: while process 0 reads the weights, the others help to gather them.
        """
        raise_shared(error_of(self._connect) if reconnect or not self.infos else None)
        errors: list[Exception | None] = []
        weights.lead(lambda: errors.append(error_of(lambda: self._send_awake(weights))))
        raise_shared(errors[0] if errors else None)

    def _send_awake(self, weights: WeightSource) -> None:
        self._at_each(lambda sleep, url: sleep.wake(url, "weights"))
        self._send(weights)
        self._at_each(lambda sleep, url: sleep.wake(url, "kv_cache"))

    def _connect(self) -> None:
        """Wait for all servers at the same time, and check each of them."""
        started = time.monotonic()
        try:
            calls = {
                url: self._http.submit(handshake(self._http, url, self._requirements, timeout=self.server_timeout))
                for url in self._urls
            }
            self.infos = {url: call.result() for url, call in calls.items()}
        finally:
            self.stats.wait_s += time.monotonic() - started

    def _send(self, weights: WeightSource) -> None:
        """Send this version to the servers that lack it. If a server dies meanwhile, wait for it and send again."""
        self.is_sending = True
        try:
            for attempt in range(_MAX_SENDS):
                lacking = self._lacking()
                if not lacking:
                    return
                try:
                    self._weight_sync.send(lacking, weights, version=self.version)
                except WeightSyncError:
                    if attempt + 1 == _MAX_SENDS or not self._has_died(lacking):
                        raise
                    self._connect()
                else:
                    self._with_our_weights |= lacking.keys()
                finally:
                    self.stats.bytes_sent += self._weight_sync.bytes_sent
        finally:
            self.is_sending = False
        found = self._lacking()
        if found:
            raise WeightSyncError(
                f"{', '.join(found)}: the weights {self.version!r} were sent {_MAX_SENDS} times, but the server does "
                "not have them. Check whether another training run uses the same server."
            )

    def _lacking(self) -> dict[str, ServerInfo]:
        """The servers that do not have this version."""
        try:
            versions = self._versions()
        except HttpError:
            self._connect()
            try:
                versions = self._versions(timeout=self.server_timeout)
            except HttpError as error:
                raise GenerationError(
                    f"a vLLM server is running, but does not report its weight version: {error}"
                ) from error
        self._note_restarts(versions)
        return {url: self.infos[url] for url, found in versions.items() if found != self.version}

    def _note_restarts(self, versions: Mapping[str, str]) -> None:
        """Count the servers that have no weights any more, and forget what was sent to them."""
        for url in self._with_our_weights & {url for url, found in versions.items() if found == FRESH}:
            self.stats.restarts += 1
            self._with_our_weights.discard(url)
            self._weight_sync.forget(url)

    def _versions(self, *, timeout: float | None = None) -> dict[str, str]:
        calls = {url: self._http.submit(weight_version(self._http, url, timeout=timeout)) for url in self._urls}
        return {url: call.result() for url, call in calls.items()}

    def _has_died(self, servers: Mapping[str, ServerInfo]) -> bool:
        """Whether a server is gone or was restarted; watches for a while, because a dying server may still answer."""
        deadline = time.monotonic() + _DEATH_SECONDS
        while True:
            try:
                versions = self._versions()
                is_alive = [self._http.submit(is_healthy(self._http, url)).result() for url in servers]
            except HttpError:
                return True
            if not all(is_alive) or any(versions[url] == FRESH for url in self._with_our_weights):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_DEATH_SECONDS / 5)
