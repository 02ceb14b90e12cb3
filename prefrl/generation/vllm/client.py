"""Completions from vLLM servers. The caller's thread waits for the outcomes of requests; every wait has a deadline.

Requests run on the thread of `Http`, and so does the choice of a server, which therefore needs no locks. A prompt has
one of three outcomes. Done: its completions have arrived. Lost: its server is gone or has other weights, so the prompt
is requested again once servers and weights are back. Failed: repeating the request would not help.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prefrl.distributed import rank
from prefrl.errors import ConfigError, GenerationError
from prefrl.generation.vllm.fleet import Fleet, VLLMStats
from prefrl.generation.vllm.handshake import PROBE_SECONDS, check_server_url, is_healthy, weight_version
from prefrl.generation.vllm.pending import Done, Failed, Lost, Outcome, VLLMPending, VLLMTurns
from prefrl.generation.vllm.requests import (
    Aborted,
    BadAnswer,
    Expected,
    Guided,
    OtherWeights,
    PromptRequest,
    answer_limit,
    check_sampling,
    check_token_prompts,
    completions_of,
    request_body,
)
from prefrl.http import HttpError, Overdue, Refused, Unreachable

if TYPE_CHECKING:
    from prefrl.generation.base import SamplingParams, WeightSource
    from prefrl.generation.vllm.handshake import Requirements
    from prefrl.generation.weights.sync import WeightSync
    from prefrl.http import Http
    from prefrl.types import Completion, Images


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


_MAX_TRIES = 3
_BACKOFF_SECONDS = 0.5


class ServerAsker:
    """The `prefrl.generation.vllm.pending.Asker` of a fleet of servers.

    Args:
        fleet: The servers and their weights.
        balance: Chooses the server for each request.
        http: HTTP client, with the servers' key.
        vocab_size: Size of the policy's vocabulary.
        stop_ids: Tokens that end a completion, in addition to those of a prompt's sampling parameters.
        request_timeout: Time limit of one request, in seconds; a prompt is given up after about twice that.
        guided: Constraint on every completion; None: no constraint.
        never: Tokens that must not be sampled: placeholders of images.
    """

    def __init__(
        self,
        fleet: Fleet,
        balance: Balance,
        *,
        http: Http,
        vocab_size: int,
        stop_ids: Sequence[int],
        request_timeout: float,
        guided: Guided | None,
        never: Sequence[int] = (),
    ) -> None:
        self._fleet = fleet
        self._balance = balance
        self._http = http
        self._vocab_size = vocab_size
        self._stop_ids = frozenset(stop_ids)
        self._never = tuple(never)
        self._request_timeout = request_timeout
        self._guided = guided

    def submit(
        self, prompts: Sequence[PromptRequest], report: Callable[[Outcome], None], *, checks: bool = True
    ) -> Future[None]:
        """See `pending.Asker`. Each outcome is reported once, on the request thread."""
        return self._http.submit(self._ask_all(prompts, report, self._fleet.version if checks else None))

    @property
    def longest_silence(self) -> float:
        """The longest wait for the next outcome of a submitted prompt, in seconds."""
        tries = 2 * self._request_timeout + _MAX_TRIES * (_BACKOFF_SECONDS * 2.0**_MAX_TRIES + PROBE_SECONDS)
        return PROBE_SECONDS + tries + 30  # margin for a busy machine

    def recover(self) -> None:
        """Wait for all servers, send the weights to those that lost them, and use all servers again."""
        self._fleet.recover()
        self._balance.trust_all()

    async def _ask_all(
        self, prompts: Sequence[PromptRequest], report: Callable[[Outcome], None], version: str | None
    ) -> None:
        if version is not None:
            await asyncio.gather(*(self._check_version(server, version) for server in self._balance.servers))
        await asyncio.gather(*(self._ask_and_report(prompt, report) for prompt in prompts))

    async def _check_version(self, server: Server, version: str) -> None:
        """Stop using a server whose weights are not this run's: it was restarted, or its last update failed."""
        try:
            found = await weight_version(self._http, server.url)
        except HttpError:
            server.num_failures += 1
            return
        if found != version and not self._fleet.is_sending:
            self._balance.distrust(server, f"{server.url} has the weights {found!r}, not {version!r}")

    async def _ask_and_report(self, prompt: PromptRequest, report: Callable[[Outcome], None]) -> None:
        try:
            outcome = await self._ask(prompt)
        except Exception as error:
            outcome = Failed(prompt, error)
        report(outcome)

    async def _ask(self, prompt: PromptRequest) -> Outcome:
        """Request a prompt's completions until a server returns them, in at most `_MAX_TRIES` tries."""
        clock = asyncio.get_running_loop().time
        deadline = None
        tried: set[str] = set()
        outcome: Outcome = Lost(prompt, "not requested")
        for attempt in range(_MAX_TRIES):
            server = await self._balance.take(avoid=tried, home=prompt.home.url if prompt.home else None)
            if server is None:
                return Lost(prompt, self._balance.reasons)
            deadline = deadline or clock() + 2 * (self._request_timeout + _BACKOFF_SECONDS)
            timeout = min(self._request_timeout, deadline - clock())
            if attempt > 0 and timeout <= 0:  # its turn came too late: a request would end at once
                self._balance.give_back(server)
                break
            self._fleet.stats.requests += 1
            self._fleet.stats.retries += attempt > 0
            try:
                completions = await self._ask_once(server, prompt, timeout)
                if prompt.home is not None:
                    prompt.home.url = server.url
                return Done(prompt, completions)
            except OtherWeights as error:
                self._balance.distrust(server, f"{server.url}: {error}")
                outcome = Lost(prompt, self._balance.reasons)
            except (HttpError, Aborted) as error:
                tried.add(server.url)
                outcome = await self._outcome_of(error, server, prompt)
            finally:
                self._balance.give_back(server)
            backoff = 0.0 if server.distrust else _BACKOFF_SECONDS * 2**attempt
            if attempt + 1 == _MAX_TRIES or deadline - clock() < backoff:
                break
            await asyncio.sleep(backoff)
        return outcome

    async def _outcome_of(self, problem: Exception, server: Server, prompt: PromptRequest) -> Outcome:
        """The outcome if this failed request is the last try. `Lost` if the server may recover."""
        server.num_failures += 1
        if not await is_healthy(self._http, server.url):
            self._balance.distrust(server, f"{server.url} is gone: {problem}")
        if server.distrust or isinstance(problem, Unreachable | Refused):
            return Lost(prompt, f"{server.url}: {problem}")
        is_late = isinstance(problem, Overdue)
        hint = " If completions take that long, raise request_timeout in vllm_kwargs." if is_late else ""
        message = f"is healthy but failed several requests for the completions. Last error: {problem}.{hint}"
        return Failed(prompt, _error(server, prompt, message))

    async def _ask_once(self, server: Server, prompt: PromptRequest, timeout: float) -> list[Completion]:
        """Request the completions of a prompt once.

        Raises:
            HttpError: The request failed; another try may succeed.
            Aborted: The server aborted the request; another try may succeed.
            OtherWeights: The server does not have this run's weights; a try may succeed once it has them.
            GenerationError: Repeating the request would not help.
        """
        try:
            return await self._completions(server, prompt, timeout)
        except Refused as error:
            if error.status >= 500:
                raise
            # A restarted server does not know our adapter and may have a smaller length limit.
            found = await weight_version(self._http, server.url)
            if not found.startswith(f"{self._fleet.run}:"):
                raise OtherWeights(f"refuses the request and has other weights ({found!r}): {error}") from error
            raise _error(server, prompt, f"refuses: {error}") from error

    async def _completions(self, server: Server, prompt: PromptRequest, timeout: float) -> list[Completion]:
        own_ids = frozenset() if prompt.sampling.ignores_eos else self._stop_ids
        expected = Expected(
            request_id=secrets.token_hex(8),
            run=self._fleet.run,
            vocab_size=self._vocab_size,
            stop_ids=own_ids.union(prompt.sampling.stop_token_ids),
            is_guided=self._guided is not None,
            never=self._never,
        )
        body = request_body(
            prompt,
            expected,
            model=self._fleet.model_name(server.url),
            salt=self._fleet.version,
            guided=self._guided,
        )
        url = f"{server.url}/inference/v1/generate"
        answer = await self._http.send("POST", url, timeout=timeout, json=body, max_bytes=answer_limit(prompt))
        try:
            completions = completions_of(answer, prompt, expected, newest_step=self._fleet.step)
        except BadAnswer as error:
            raise _error(server, prompt, f"answers request {expected.request_id} wrongly: {error}") from error
        server.num_failures = 0
        return completions


def _error(server: Server, prompt: PromptRequest, reason: str) -> GenerationError:
    return GenerationError(f"prompt {prompt.number} of process {rank()}: the vLLM server at {server.url} {reason}")


class VLLMGenerator:
    """A `prefrl.generation.base.Generator` that uses vLLM servers started with `prefrl vllm-serve`.

    Every training process requests the completions of its own prompts, and process 0 sends the weights. Construction,
    `sync`, `invalidate` and the end of `as_completed` are therefore collective: all processes must reach them. The
    first `sync` contacts the servers and checks what they serve.

    Args:
        urls: Base URLs of servers that serve the same model; a prompt goes to the one with the fewest requests.
        http: HTTP client, with the servers' key. `close` closes it, and also `weight_sync`.
        weight_sync: Sends weights to servers.
        requirements: What the servers must serve.
        stop_ids: Tokens that end a completion, in addition to those of a call's sampling parameters.
        server_timeout: How long to wait for a server that does not answer, in seconds.
        request_timeout: Time limit of one request, in seconds. One request is for all completions of one prompt. It is
            tried at most three times, and a prompt is given up after about twice this time.
        guided: Constraint on every completion; None: no constraint.
        max_concurrency: The most requests that this process has running at each server.
        never: Tokens that must not be sampled: placeholders of images.

    Raises:
        ConfigError: A value is outside its range, or `urls` is empty, or contains an invalid or a repeated URL.
    """

    def __init__(  # noqa: PLR0913 - one argument for each option of the user
        self,
        urls: Sequence[str],
        *,
        http: Http,
        weight_sync: WeightSync,
        requirements: Requirements,
        stop_ids: Sequence[int],
        server_timeout: float,
        request_timeout: float,
        guided: Guided | None = None,
        max_concurrency: int = 64,
        never: Sequence[int] = (),
    ) -> None:
        positive = {
            "server_timeout": server_timeout,
            "request_timeout": request_timeout,
            "max_concurrency": max_concurrency,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"{name}={value}: must be above 0")
        if not urls or len({*map(check_server_url, urls)}) < len(urls):
            raise ConfigError(f"vLLM servers {list(urls)}: must be at least one URL, without duplicates")
        first = rank() % len(urls)  # among equally busy servers, each process prefers a different one
        bases = [check_server_url(url) for url in [*urls[first:], *urls[:first]]]
        self.weight_sync = weight_sync
        self._http = http
        self._guided = guided
        self._balance = Balance(bases, max_concurrency)
        self.fleet = Fleet(
            bases, http=http, weight_sync=weight_sync, requirements=requirements, server_timeout=server_timeout
        )
        self._asker = ServerAsker(
            self.fleet,
            self._balance,
            http=http,
            vocab_size=requirements.vocab_size,
            stop_ids=stop_ids,
            request_timeout=request_timeout,
            guided=guided,
            never=never,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int],
        images: Sequence[Images | None] | None = None,
    ) -> list[list[Completion]]:
        """Sample `sampling.num_samples` completions of each prompt; see `start`.

        Returns:
            [P][G] completions; a stop token is the last token of its completion.
        """
        completions = dict(self.start(prompts, sampling, seeds=seeds, images=images).as_completed())
        return [completions[number] for number in range(len(prompts))]

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int],
        images: Sequence[Images | None] | None = None,
    ) -> VLLMPending:
        """See `Generator`; sample g of a prompt uses the seed `seed + g`.

        Raises:
            ValueError: The numbers of prompts and seeds differ.
            ConfigError: The servers cannot sample with these parameters.
            GenerationError: No weights have been sent yet, or a prompt is empty or too long for the servers.
        """
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts: must be one seed for each prompt")
        self._check(sampling)
        check_token_prompts(prompts, sampling.max_tokens, self.context_limit)
        asked = [
            PromptRequest(number, prompt, seed, sampling, self.fleet.step, images=of_prompt)
            for number, (prompt, seed, of_prompt) in enumerate(
                zip(prompts, seeds, images or [None] * len(prompts), strict=True)
            )
        ]
        return VLLMPending(self._asker, asked)

    @property
    def context_limit(self) -> int:
        """See `prefrl.generation.base.Generator`; known after the first `sync`."""
        return min(info.max_model_len for info in self.fleet.infos.values())

    def turns(self, sampling: SamplingParams) -> VLLMTurns:
        """See `prefrl.generation.base.Generator`.

        Raises:
            ConfigError: The servers cannot sample with these parameters.
            GenerationError: No weights have been sent yet.
        """
        self._check(sampling)
        return VLLMTurns(self._asker, sampling, step=lambda: self.fleet.step)

    def _check(self, sampling: SamplingParams) -> None:
        if not self.fleet.has_weights:
            raise GenerationError("the vLLM servers do not have weights of this run yet: call sync before generating")
        check_sampling(sampling, self._guided)

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """Make all servers generate with these weights from now on. Servers that have this version are left alone.

        Collective.

        Raises:
            GenerationError: A server does not answer in time, or is not the required one.
            WeightSyncError: A server is running, but did not load the weights.
        """
        self.fleet.sync(weights, version=version)
        self._balance.trust_all()

    def invalidate(self) -> None:
        """Make the next `sync` send the weights, whatever their version: the same number may stand for other weights.

        Collective.
        """
        self.fleet.invalidate()

    def stats(self) -> VLLMStats:
        """Counts since the last call, on this process."""
        stats, self.fleet.stats = self.fleet.stats, VLLMStats()
        return stats

    def close(self) -> None:
        """Cancel running requests and disconnect from the servers."""
        self.weight_sync.close()
        self._http.close()
