"""Completions from vLLM servers: who is asked, what is asked again, and what happens when a server dies.

Requests run on the thread of `Http`; the caller's thread waits for their outcomes, always with a deadline. A prompt
has one of three outcomes: its completions; lost, because its server is gone or has other weights, so that it is asked
for again once servers and weights are back; or failed, because asking again would not help.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefrl.distributed import gather_objects, rank
from prefrl.errors import ConfigError, GenerationError, WeightSyncError
from prefrl.generation.http import HttpError, Overdue, Refused, Unreachable
from prefrl.generation.vllm.balance import Balance, Server
from prefrl.generation.vllm.handshake import PROBE_SECONDS, check_url, handshake, is_healthy, weight_version
from prefrl.generation.vllm.pending import Done, Failed, Lost, Outcome, VLLMPending, raise_shared
from prefrl.generation.vllm.requests import (
    Aborted,
    BadAnswer,
    Expected,
    Guided,
    OtherWeights,
    Prompt,
    check_prompts,
    check_sampling,
    completions_of,
    request_body,
    version_name,
)

if TYPE_CHECKING:
    from prefrl.generation.base import SamplingParams, WeightSource
    from prefrl.generation.http import Http
    from prefrl.generation.server_info import ServerInfo
    from prefrl.generation.vllm.handshake import Requirements
    from prefrl.generation.weights.send import WeightSync
    from prefrl.types import Completion

__all__ = ["VLLMGenerator", "VLLMStats"]

_MAX_TRIES = 3
_BACKOFF_SECONDS = 0.5
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


class VLLMGenerator:
    """`prefrl.generation.base.Generator` on vLLM servers that `prefrl vllm-serve` started.

    Every training process asks for completions of its own prompts, and process 0 sends the weights, so construction,
    `sync` and the end of `as_completed` are collective: all processes have to get there. Servers are asked who they
    are when they are first needed.

    Args:
        urls: Base URLs of servers that serve the same model; a prompt goes to the one with the fewest requests.
        http: With the key of the servers. Closed by `close`, like `weight_sync`.
        weight_sync: Sends weights to servers.
        requirements: What the servers have to serve.
        stop_ids: Tokens that end a completion, besides those of a call's sampling parameters.
        server_timeout: Seconds that a server which does not answer is waited for.
        request_timeout: Seconds for one request, which is all completions of one prompt. A prompt is given up after
            twice that, in which it is asked for at most three times.
        guided: What every completion has to match.
        max_concurrency: Requests under way at each server, of this process.

    Raises:
        ConfigError: A value is outside its range, or a URL is none.
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
    ) -> None:
        positive = {
            "server_timeout": server_timeout,
            "request_timeout": request_timeout,
            "max_concurrency": max_concurrency,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"{name}={value}: must be above 0")
        if not urls or len({*map(check_url, urls)}) < len(urls):
            raise ConfigError(f"vLLM servers {list(urls)}: give one or more, each once")
        self._http = http
        self.weight_sync = weight_sync
        self._requirements = requirements
        self._stop_ids = frozenset(stop_ids)
        self._server_timeout = server_timeout
        self._request_timeout = request_timeout
        self._guided = guided
        first = rank() % len(urls)  # of equally busy servers, each process has another first
        self._balance = Balance([check_url(url) for url in [*urls[first:], *urls[:first]]], max_concurrency)
        self._run: str = gather_objects(secrets.token_hex(4))[0]
        self._infos: dict[str, ServerInfo] = {}
        self._with_our_weights: set[str] = set()
        self._weights: WeightSource | None = None
        self._step = 0
        self._is_sending = False
        self._stats = VLLMStats()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """Draw `sampling.num_samples` completions of each prompt; see `start`.

        Returns:
            [P][G] completions; a stop token is the last token of its completion.
        """
        completions = dict(self.start(prompts, sampling, seeds=seeds).as_completed())
        return [completions[number] for number in range(len(prompts))]

    def start(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, seeds: Sequence[int]
    ) -> VLLMPending:
        """Ask for completions of all prompts, without waiting for them.

        Args:
            prompts: [P] token ids.
            sampling: How to draw.
            seeds: [P], one of each prompt; sample g is drawn with the g-th seed after it.

        Raises:
            ValueError: The numbers of prompts and seeds differ.
            ConfigError: The servers cannot sample like that.
            GenerationError: No weights were sent yet, or a prompt is empty or too long for the servers.
        """
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts: one each is needed")
        if not self._infos or self._weights is None:
            raise GenerationError("the vLLM servers have no weights of this run yet: call sync before generating")
        check_sampling(sampling, self._guided)
        check_prompts(prompts, sampling.max_tokens, min(info.max_model_len for info in self._infos.values()))
        asked = [
            Prompt(number, prompt, seed, sampling)
            for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        return VLLMPending(self, asked)

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """Have all servers generate with these weights from now on; those that have this version are left alone.

        Raises:
            GenerationError: A server does not answer in time, or is another one than it should be.
            WeightSyncError: A server lives and still did not take the weights.
        """
        self._weights, self._step = weights, version
        self._align(reconnect=False)

    def invalidate(self) -> None:
        """Have the next `sync` send the weights, whatever their version: it may be that of other weights now.

        Collective, as `sync` is.
        """
        # Versions of this run's weights so far are those of another run from now on.
        self._run = gather_objects(secrets.token_hex(4))[0]
        self._with_our_weights.clear()
        for url in self._balance.urls:
            self.weight_sync.forget(url)

    def stats(self) -> VLLMStats:
        """What happened since the last call."""
        stats, self._stats = self._stats, VLLMStats()
        return stats

    def close(self) -> None:
        """Break off what is under way and let go of the servers."""
        self.weight_sync.close()
        self._http.close()

    def submit(self, prompts: Sequence[Prompt], report: Callable[[Outcome], None]) -> Future[None]:
        """Ask for prompts on the thread of the requests; each one's outcome is reported there, once."""
        return self._http.submit(self._ask_all(prompts, report, version_name(self._run, self._step)))

    @property
    def longest_silence(self) -> float:
        """Seconds within which one of the prompts that were submitted has an outcome."""
        tries = 2 * self._request_timeout + _MAX_TRIES * (_BACKOFF_SECONDS * 2.0**_MAX_TRIES + PROBE_SECONDS)
        return PROBE_SECONDS + tries + 30  # for a busy machine

    def recover(self) -> None:
        """Wait for all servers, give them the weights if they lost them, and use them again."""
        self._align(reconnect=True)

    # Servers and weights; the caller's thread.

    def _align(self, *, reconnect: bool) -> None:
        """Have all servers, and their weights; what fails on one process is raised on all.

        All processes take each step together: those that read nothing take part in what process 0 reads.
        """
        assert self._weights is not None
        raise_shared(_error_of(self._connect) if reconnect or not self._infos else None)
        errors: list[Exception | None] = []
        self._weights.lead(lambda: errors.append(_error_of(self._send_weights)))
        raise_shared(errors[0] if errors else None)
        self._balance.trust_all()

    def _connect(self) -> None:
        """Wait for all servers at once, and check each of them."""
        started = time.monotonic()
        try:
            calls = {
                url: self._http.submit(handshake(self._http, url, self._requirements, timeout=self._server_timeout))
                for url in self._balance.urls
            }
            self._infos = {url: call.result() for url, call in calls.items()}
        finally:
            self._stats.wait_s += time.monotonic() - started

    def _send_weights(self) -> None:
        """Give this version to the servers that lack it. A server that dies in it is waited for."""
        assert self._weights is not None
        version = version_name(self._run, self._step)
        self._is_sending = True
        try:
            for attempt in range(_MAX_SENDS):
                lacking = self._lacking(version)
                if not lacking:
                    return
                try:
                    self.weight_sync.send(lacking, self._weights, version=version)
                except WeightSyncError:
                    if attempt + 1 == _MAX_SENDS or not self._has_died(lacking):
                        raise
                    self._connect()
                else:
                    self._with_our_weights |= lacking.keys()
        finally:
            self._is_sending = False
        found = self._lacking(version)
        if found:
            raise WeightSyncError(
                f"{', '.join(found)}: the weights {version!r} were sent {_MAX_SENDS} times, and the server does not "
                "have them. Does another training run use it?"
            )

    def _lacking(self, version: str) -> dict[str, ServerInfo]:
        """The servers whose weights are not of this version. Those that were restarted are told apart."""
        try:
            versions = self._versions()
        except HttpError:
            self._connect()
            try:
                versions = self._versions()
            except HttpError as error:
                raise GenerationError(f"a vLLM server lives and does not name its weights: {error}") from error
        for url in self._with_our_weights & {url for url, found in versions.items() if found == _FRESH}:
            self._stats.restarts += 1
            self._with_our_weights.discard(url)
            self.weight_sync.forget(url)
        return {url: self._infos[url] for url, found in versions.items() if found != version}

    def _versions(self) -> dict[str, str]:
        calls = {url: self._http.submit(weight_version(self._http, url)) for url in self._balance.urls}
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

    # Requests; the thread of `Http`.

    async def _ask_all(self, prompts: Sequence[Prompt], report: Callable[[Outcome], None], version: str) -> None:
        await asyncio.gather(*(self._look_at(server, version) for server in self._balance.servers))
        await asyncio.gather(*(self._ask_and_report(prompt, report) for prompt in prompts))

    async def _look_at(self, server: Server, version: str) -> None:
        """Leave a server out whose weights are not ours; it was restarted or its last update failed."""
        try:
            found = await weight_version(self._http, server.url)
        except HttpError:
            server.num_failures += 1
            return
        if found != version and not self._is_sending:
            self._balance.distrust(server, f"{server.url} has the weights {found!r}, not {version!r}")

    async def _ask_and_report(self, prompt: Prompt, report: Callable[[Outcome], None]) -> None:
        try:
            outcome = await self._ask(prompt)
        except Exception as error:
            outcome = Failed(prompt, error)
        report(outcome)

    async def _ask(self, prompt: Prompt) -> Outcome:
        """Ask servers for completions of a prompt until one has them, a few times."""
        clock = asyncio.get_running_loop().time
        deadline = None
        tried: set[str] = set()
        outcome: Outcome = Lost(prompt, "not asked for")
        for attempt in range(_MAX_TRIES):
            server = await self._balance.take(avoid=tried)
            if server is None:
                return Lost(prompt, self._balance.reasons)
            deadline = deadline or clock() + 2 * (self._request_timeout + _BACKOFF_SECONDS)
            self._stats.requests += 1
            self._stats.retries += attempt > 0
            try:
                timeout = min(self._request_timeout, deadline - clock())
                return Done(prompt, await self._try(server, prompt, timeout))
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

    async def _outcome_of(self, problem: Exception, server: Server, prompt: Prompt) -> Outcome:
        """What a request that failed was, if it was the last: a server that is gone may come back."""
        server.num_failures += 1
        if not await is_healthy(self._http, server.url):
            self._balance.distrust(server, f"{server.url} is gone: {problem}")
        if server.distrust or isinstance(problem, Unreachable):
            return Lost(prompt, f"{server.url}: {problem}")
        hint = " Raise vllm_request_timeout if completions take that long." if isinstance(problem, Overdue) else ""
        message = f"is healthy and did not generate in several tries; the last one: {problem}.{hint}"
        return Failed(prompt, self._error(server, prompt, message))

    async def _try(self, server: Server, prompt: Prompt, timeout: float) -> list[Completion]:
        """Completions of a prompt, from one request.

        Raises:
            HttpError: Another request may do better.
            Aborted: Likewise.
            OtherWeights: It will do once the server has our weights.
            GenerationError: Asking again would not help.
        """
        try:
            return await self._completions(server, prompt, timeout)
        except Refused as error:
            if error.status >= 500:
                raise
            # A server that was restarted knows neither our adapter nor, perhaps, requests of this length.
            found = await weight_version(self._http, server.url)
            if not found.startswith(f"{self._run}:"):
                raise OtherWeights(f"has the weights {found!r}, not ours, and refuses: {error}") from error
            raise self._error(server, prompt, f"refuses: {error}") from error

    async def _completions(self, server: Server, prompt: Prompt, timeout: float) -> list[Completion]:
        expected = Expected(
            request_id=secrets.token_hex(8),
            run=self._run,
            vocab_size=self._requirements.vocab_size,
            stop_ids=self._stop_ids.union(prompt.sampling.stop_token_ids),
            is_guided=self._guided is not None,
        )
        body = request_body(
            prompt,
            expected,
            model=self.weight_sync.model_name(self._infos[server.url]),
            salt=version_name(self._run, self._step),
            guided=self._guided,
        )
        answer = await self._http.send("POST", f"{server.url}/inference/v1/generate", timeout=timeout, json=body)
        try:
            completions = completions_of(answer, prompt, expected)
        except BadAnswer as error:
            raise self._error(server, prompt, f"answers request {expected.request_id} wrongly: {error}") from error
        server.num_failures = 0
        return completions

    def _error(self, server: Server, prompt: Prompt, reason: str) -> GenerationError:
        return GenerationError(f"prompt {prompt.number} of process {rank()}: the vLLM server at {server.url} {reason}")


def _error_of(task: Callable[[], None]) -> Exception | None:
    """What a task raises."""
    try:
        task()
    except Exception as error:
        return error
    return None
