"""Shared by all transports: the servers, and one transfer of weights to them with its deadline and its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prefrl.errors import WeightSyncError
from prefrl.http import HttpError, Refused

if TYPE_CHECKING:
    from prefrl.generation.base import WeightSource
    from prefrl.generation.server_info import ServerInfo
    from prefrl.generation.weights import process_group
    from prefrl.http import Http

__all__ = ["Server", "Transfer", "Transport"]


@dataclass(eq=False)
class Server:
    """A server, and what is known about its weights."""

    url: str
    info: ServerInfo
    group: process_group.Group | None = None
    has_base: bool = False  # it has the base weights that the adapter belongs to
    adapter: Path | None = None  # the adapter's files that it loaded last
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
    known: Collection[Server]  # all servers, including those that do not get these weights
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

    async def post(self, server: Server, path: str, json: Any = None, *, grace: float = 0.0) -> Any:
        """The answer to a POST request, which may come `grace` seconds after the deadline."""
        # Never 0, so that the error of a late request names the request.
        left = max(self._deadline - time.monotonic(), 0.001)
        return await self.http.send("POST", server.url + path, timeout=left + grace, json=json)

    async def start_update(self, server: Server) -> None:
        """Tell a server that weights will follow."""
        try:
            await self.post(server, "/start_weight_update")
        except Refused as error:
            if "already active" not in str(error):
                raise
            # A trainer died in the middle of an update.
            await self.finish_update(server)
            await self.post(server, "/start_weight_update")

    async def finish_update(self, server: Server) -> None:
        """Tell a server that all weights have been sent."""
        await self.post(server, "/finish_weight_update")

    def for_each(
        self, servers: Sequence[Server], doing: str, action: Callable[[Server], Coroutine[Any, Any, None]]
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

    def send(self, transfer: Transfer, servers: Sequence[Server], weights: WeightSource) -> None:
        """Send the weights to all servers that have not failed, and call `Server.fail` on those that fail now."""
        ...
