"""Choosing a server for each request. All of it runs on the request thread, so that it needs no locks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

__all__ = ["Balance", "Server"]


@dataclass(slots=True)
class Server:
    """A server, and how it is doing."""

    url: str
    under_way: int = 0  # running requests
    num_failures: int = 0  # since its last success
    distrust: str | None = None  # why the server gets no requests; None: it gets requests


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    turn: asyncio.Future[Server | None]
    avoid: Collection[str] = field(default=())
    home: str | None = None


class Balance:
    """Hands out turns at servers in order of arrival, at most `max_under_way` at a time for each server.

    A server whose last request failed is chosen last: otherwise a server that fails fast would have the fewest running
    requests and get all new ones.

    Args:
        urls: Base URLs of the servers.
        max_under_way: The most turns at one server at the same time.
    """

    def __init__(self, urls: Sequence[str], max_under_way: int) -> None:
        self.servers = [Server(url) for url in urls]
        self._max_under_way = max_under_way
        self._waiting: deque[_Waiting] = deque()

    @property
    def reasons(self) -> str:
        """Why servers get no requests."""
        return "; ".join(server.distrust for server in self.servers if server.distrust is not None)

    async def take(self, *, avoid: Collection[str], home: str | None = None) -> Server | None:
        """Wait for a turn at a server; None if no server is trusted.

        Args:
            avoid: URLs of servers to choose only if no other one is trusted. A server that fails fast is often free:
                a prompt that it cannot do waits for another one.
            home: URL of the server that has the history in its cache: waited for, unless it is avoided or not trusted.
        """
        waiting = _Waiting(asyncio.get_running_loop().create_future(), avoid, home)
        self._waiting.append(waiting)
        self._hand_out()
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled() and (server := waiting.turn.result()) is not None:
                self.give_back(server)  # the turn came just before the cancellation
            raise

    def give_back(self, server: Server) -> None:
        """End a turn."""
        server.under_way -= 1
        self._hand_out()

    def distrust(self, server: Server, reason: str) -> None:
        """Send no more requests to this server until `trust_all`."""
        server.distrust = reason
        self._hand_out()

    def trust_all(self) -> None:
        """Use all servers again. May be called from any thread while nobody waits for a turn."""
        for server in self.servers:
            server.distrust, server.num_failures = None, 0

    def _hand_out(self) -> None:
        trusted = [server for server in self.servers if server.distrust is None]
        for waiting in tuple(self._waiting):
            if trusted and not self._free(trusted):
                return
            wanted = [server for server in trusted if server.url not in waiting.avoid] or trusted
            wanted = [server for server in wanted if server.url == waiting.home] or wanted
            free = self._free(wanted)
            if wanted and not free:
                continue
            self._waiting.remove(waiting)
            if waiting.turn.done():  # cancelled
                continue
            best = min(free, key=lambda server: (server.num_failures > 0, server.under_way), default=None)
            if best is not None:
                best.under_way += 1
            waiting.turn.set_result(best)

    def _free(self, servers: Sequence[Server]) -> list[Server]:
        return [server for server in servers if server.under_way < self._max_under_way]
