"""Requests to servers that share them: whose turn it is, what is tried again, and when a request is given up.

Requests run on the thread of `Http`, and so does the choice of a server, which therefore needs no locks. A request has
one of three outcomes. Done: its result has arrived. Lost: its server is gone or has other weights, so it is repeated
once servers and weights are back. Failed: repeating it would not help.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from prefrl.distributed import rank
from prefrl.errors import GenerationError
from prefrl.generation.vllm.handshake import PROBE_SECONDS, is_healthy
from prefrl.generation.vllm.requests import Aborted, OtherWeights
from prefrl.http import HttpError, Overdue, Refused, Unreachable

if TYPE_CHECKING:
    from prefrl.generation.base import Home
    from prefrl.http import Http


class Request(Protocol):
    """What is asked of servers."""

    @property
    def number(self) -> int:
        """Its index in the call."""
        ...

    @property
    def home(self) -> Home | None:
        """Of the conversation that it belongs to; None: of none."""
        ...


Q = TypeVar("Q", bound=Request)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Done(Generic[Q, R]):
    """The result of a request."""

    request: Q
    result: R


@dataclass(frozen=True, slots=True)
class Lost(Generic[Q]):
    """A request that is repeated once servers and weights are back."""

    request: Q
    reason: str


@dataclass(frozen=True, slots=True)
class Failed(Generic[Q]):
    """A request that has no result: repeating it would not help."""

    request: Q
    error: Exception


Outcome: TypeAlias = Done[Q, R] | Lost[Q] | Failed[Q]


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

    def trust_all(self, urls: Sequence[str] | None = None) -> None:
        """Use all servers again. May be called from any thread while nobody waits for a turn.

        Args:
            urls: Base URLs of the servers from now on; None: those that there were.
        """
        if urls is not None:
            known = {server.url: server for server in self.servers}
            self.servers = [known.get(url) or Server(url) for url in urls]
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


_MAX_TRIES = 3
_BACKOFF_SECONDS = 0.5


class Asker(ABC, Generic[Q, R]):
    """Sends requests to servers, and waits for servers that are gone.

    Args:
        balance: Chooses the server for each request.
        http: HTTP client, with the servers' key.
        request_timeout: Time limit of one request, in seconds; a request is given up after about twice that.
    """

    # Words of messages: what a request is for, what it asks for, its server, and the option with its time limit.
    item: ClassVar[str]
    wanted: ClassVar[str]
    server: ClassVar[str]
    timeout_option: ClassVar[str]

    def __init__(self, balance: Balance, *, http: Http, request_timeout: float) -> None:
        self._balance = balance
        self._http = http
        self._request_timeout = request_timeout

    def submit(
        self, requests: Sequence[Q], report: Callable[[Outcome[Q, R]], None], *, checks: bool = True
    ) -> Future[None]:
        """Send requests.

        Args:
            requests: The requests.
            report: Gets one outcome for each request, on the request thread.
            checks: Whether to look at the servers first, so that none with other weights is asked at all.
        """
        return self._http.submit(self._ask_all(requests, report, self.check() if checks else None))

    @property
    def longest_silence(self) -> float:
        """The longest wait for the next outcome of a submitted request, in seconds."""
        tries = 2 * self._request_timeout + _MAX_TRIES * (_BACKOFF_SECONDS * 2.0**_MAX_TRIES + PROBE_SECONDS)
        return PROBE_SECONDS + tries + 30  # margin for a busy machine

    @abstractmethod
    def recover(self) -> None:
        """Wait for all servers, and use all of them again. All processes must call it."""

    @abstractmethod
    async def ask_once(self, server: Server, request: Q, timeout: float) -> R:
        """Send a request once.

        Raises:
            HttpError: The request failed; another try may succeed.
            Aborted: The server aborted the request; another try may succeed.
            OtherWeights: The server does not have this run's weights; a try may succeed once it has them.
            GenerationError: Repeating the request would not help.
        """

    def check(self) -> Coroutine[Any, Any, None] | None:
        """What finds, on the request thread, the servers that must not be asked; None: there are none."""
        return None

    def count(self, *, is_retry: bool) -> None:
        """Hear that a request is sent."""

    def error(self, server: Server, request: Q, reason: str) -> GenerationError:
        """An error that names the request and the server."""
        who = f"{self.item} {request.number} of process {rank()}"
        return GenerationError(f"{who}: {self.server} at {server.url} {reason}")

    async def _ask_all(
        self,
        requests: Sequence[Q],
        report: Callable[[Outcome[Q, R]], None],
        check: Coroutine[Any, Any, None] | None,
    ) -> None:
        if check is not None:
            await check
        await asyncio.gather(*(self._ask_and_report(request, report) for request in requests))

    async def _ask_and_report(self, request: Q, report: Callable[[Outcome[Q, R]], None]) -> None:
        outcome: Outcome[Q, R]
        try:
            outcome = await self._ask(request)
        except Exception as error:
            outcome = Failed(request, error)
        report(outcome)

    async def _ask(self, request: Q) -> Outcome[Q, R]:
        """Send a request until a server answers it, in at most `_MAX_TRIES` tries."""
        clock = asyncio.get_running_loop().time
        deadline = None
        tried: set[str] = set()
        outcome: Lost[Q] | Failed[Q] = Lost(request, "not requested")
        for attempt in range(_MAX_TRIES):
            server = await self._balance.take(avoid=tried, home=request.home.url if request.home else None)
            if server is None:
                return Lost(request, self._balance.reasons)
            deadline = deadline or clock() + 2 * (self._request_timeout + _BACKOFF_SECONDS)
            timeout = min(self._request_timeout, deadline - clock())
            if attempt > 0 and timeout <= 0:  # its turn came too late: a request would end at once
                self._balance.give_back(server)
                break
            self.count(is_retry=attempt > 0)
            try:
                result = await self.ask_once(server, request, timeout)
                server.num_failures = 0
                if request.home is not None:
                    request.home.url = server.url
                return Done(request, result)
            except OtherWeights as error:
                self._balance.distrust(server, f"{server.url}: {error}")
                outcome = Lost(request, self._balance.reasons)
            except (HttpError, Aborted) as error:
                tried.add(server.url)
                outcome = await self._outcome_of(error, server, request)
            finally:
                self._balance.give_back(server)
            backoff = 0.0 if server.distrust else _BACKOFF_SECONDS * 2**attempt
            if attempt + 1 == _MAX_TRIES or deadline - clock() < backoff:
                break
            await asyncio.sleep(backoff)
        return outcome

    async def _outcome_of(self, problem: Exception, server: Server, request: Q) -> Lost[Q] | Failed[Q]:
        """The outcome if this failed request is the last try. `Lost` if the server may recover."""
        server.num_failures += 1
        if not await is_healthy(self._http, server.url):
            self._balance.distrust(server, f"{server.url} is gone: {problem}")
        if server.distrust or isinstance(problem, Unreachable | Refused):
            return Lost(request, f"{server.url}: {problem}")
        is_late = isinstance(problem, Overdue)
        hint = f" If {self.wanted} take that long, raise {self.timeout_option}." if is_late else ""
        message = f"is healthy but failed several requests for the {self.wanted}. Last error: {problem}.{hint}"
        return Failed(request, self.error(server, request, message))
