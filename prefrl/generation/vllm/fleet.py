"""The vLLM servers of a run: waiting for them, checking what they serve, and giving them the weights."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefrl.distributed import gather_objects
from prefrl.errors import GenerationError, WeightSyncError
from prefrl.generation.http import HttpError
from prefrl.generation.vllm.handshake import handshake, is_healthy, weight_version
from prefrl.generation.vllm.pending import raise_shared
from prefrl.generation.vllm.requests import version_name

if TYPE_CHECKING:
    from prefrl.generation.base import WeightSource
    from prefrl.generation.http import Http
    from prefrl.generation.server_info import ServerInfo
    from prefrl.generation.vllm.handshake import Requirements
    from prefrl.generation.weights.sync import WeightSync

__all__ = ["Fleet", "VLLMStats"]

_MAX_SENDS = 3
# After a failed send: time in which a server that died is seen to be dead.
_DEATH_SECONDS = 2.0
_FRESH = "default"  # what a server that was just started calls its weights


@dataclass(slots=True)
class VLLMStats:
    """What happened since the last look, on this process."""

    requests: int = 0
    retries: int = 0
    restarts: int = 0  # of servers, seen by the process that sends the weights
    wait_s: float = 0.0  # seconds in which a server that was gone was waited for


class Fleet:
    """Servers that serve the same model, and the weights that they should have.

    Construction, `sync`, `recover` and `invalidate` are collective: all training processes have to get there. They run
    on the caller's thread.

    Args:
        urls: Base URLs.
        http: With the key of the servers.
        weight_sync: Sends weights to servers.
        requirements: What the servers have to serve.
        server_timeout: Seconds that a server which does not answer is waited for.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        http: Http,
        weight_sync: WeightSync,
        requirements: Requirements,
        server_timeout: float,
    ) -> None:
        self._urls = urls
        self._http = http
        self._weight_sync = weight_sync
        self._requirements = requirements
        self._with_our_weights: set[str] = set()
        self._weights: WeightSource | None = None
        self._step = 0
        self.server_timeout = server_timeout
        self.run: str = gather_objects(secrets.token_hex(4))[0]
        self.infos: dict[str, ServerInfo] = {}  # by URL; empty before the first connection
        self.is_sending = False
        self.stats = VLLMStats()

    @property
    def version(self) -> str:
        """What servers that have the weights call them."""
        return version_name(self.run, self._step)

    @property
    def has_weights(self) -> bool:
        """Whether there are servers with weights of this run."""
        return bool(self.infos) and self._weights is not None

    def model_name(self, url: str) -> str:
        """What requests to a server must name as their model."""
        return self._weight_sync.model_name(self.infos[url])

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """Have all servers generate with these weights; see `VLLMGenerator.sync`."""
        self._weights, self._step = weights, version
        self._align(weights, reconnect=False)

    def recover(self) -> None:
        """Wait for all servers, and give the weights to those that lost them.

        Raises:
            GenerationError: There are no weights yet.
        """
        if self._weights is None:
            raise GenerationError("the servers cannot be recovered before they have weights: call sync first")
        self._align(self._weights, reconnect=True)

    def invalidate(self) -> None:
        """Have the next `sync` send the weights to all servers."""
        # Versions of this run's weights so far are those of another run from now on.
        self.run = gather_objects(secrets.token_hex(4))[0]
        self._with_our_weights.clear()
        for url in self._urls:
            self._weight_sync.forget(url)

    def _align(self, weights: WeightSource, *, reconnect: bool) -> None:
        """Have all servers, and their weights; what fails on one process is raised on all.

        All processes take each step together: those that read nothing take part in what process 0 reads.
        """
        raise_shared(_error_of(self._connect) if reconnect or not self.infos else None)
        errors: list[Exception | None] = []
        weights.lead(lambda: errors.append(_error_of(lambda: self._send(weights))))
        raise_shared(errors[0] if errors else None)

    def _connect(self) -> None:
        """Wait for all servers at once, and check each of them."""
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
        """Give this version to the servers that lack it. A server that dies in it is waited for."""
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
            self.is_sending = False
        found = self._lacking()
        if found:
            raise WeightSyncError(
                f"{', '.join(found)}: the weights {self.version!r} were sent {_MAX_SENDS} times, and the server does "
                "not have them. Does another training run use it?"
            )

    def _lacking(self) -> dict[str, ServerInfo]:
        """The servers whose weights are not of this version. Those that were restarted are counted and forgotten."""
        try:
            versions = self._versions()
        except HttpError:
            self._connect()
            try:
                versions = self._versions()
            except HttpError as error:
                raise GenerationError(f"a vLLM server lives and does not name its weights: {error}") from error
        for url in self._with_our_weights & {url for url, found in versions.items() if found == _FRESH}:
            self.stats.restarts += 1
            self._with_our_weights.discard(url)
            self._weight_sync.forget(url)
        return {url: self.infos[url] for url, found in versions.items() if found != self.version}

    def _versions(self) -> dict[str, str]:
        calls = {url: self._http.submit(weight_version(self._http, url)) for url in self._urls}
        return {url: call.result() for url, call in calls.items()}

    def _has_died(self, servers: Mapping[str, ServerInfo]) -> bool:
        """Whether one of the servers is gone or was started anew; death takes a moment to show."""
        deadline = time.monotonic() + _DEATH_SECONDS
        while True:
            try:
                versions = self._versions()
                is_alive = [self._http.submit(is_healthy(self._http, url)).result() for url in servers]
            except HttpError:
                return True
            if not all(is_alive) or any(versions[url] == _FRESH for url in self._with_our_weights):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_DEATH_SECONDS / 5)


def _error_of(task: Callable[[], None]) -> Exception | None:
    """What a task raises."""
    try:
        task()
    except Exception as error:
        return error
    return None
