"""Completions from vLLM servers. The caller's thread waits for the outcomes of requests; every wait has a deadline."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from prefrl.distributed import is_main, rank
from prefrl.errors import ConfigError, GenerationError
from prefrl.generation.vllm.asking import Asker, Balance, Server
from prefrl.generation.vllm.elastic import ElasticFleet
from prefrl.generation.vllm.fleet import Fleet, VLLMStats
from prefrl.generation.vllm.handshake import check_server_url, weight_version
from prefrl.generation.vllm.pending import VLLMPending, VLLMTurns
from prefrl.generation.vllm.requests import (
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
from prefrl.http import HttpError, Refused
from prefrl.types import Completion

if TYPE_CHECKING:
    from prefrl.generation.base import SamplingParams, WeightSource
    from prefrl.generation.vllm.elastic import Members
    from prefrl.generation.vllm.handshake import Requirements
    from prefrl.generation.vllm.sleep import Sleep
    from prefrl.generation.weights.sync import WeightSync
    from prefrl.http import Http
    from prefrl.models.router_replay import RouterReplay
    from prefrl.types import Images

_log = logging.getLogger(__name__)


class ServerAsker(Asker[PromptRequest, list[Completion]]):
    """Requests completions from a fleet of servers.

    Args:
        fleet: The servers and their weights.
        balance: Chooses the server for each request.
        http: HTTP client, with the servers' key.
        vocab_size: Size of the policy's vocabulary.
        stop_ids: Tokens that end a completion, in addition to those of a prompt's sampling parameters.
        request_timeout: Time limit of one request, in seconds; a prompt is given up after about twice that.
        guided: Constraint on every completion; None: no constraint.
        never: Tokens that must not be sampled: placeholders of images.
        replay: Of routers whose choices completions get; None: they are not asked for.
    """

    item, wanted, server = "prompt", "completions", "the vLLM server"
    timeout_option = "request_timeout in vllm_kwargs"

    def __init__(  # noqa: PLR0913 - what every request needs
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
        replay: RouterReplay | None = None,
    ) -> None:
        super().__init__(balance, http=http, request_timeout=request_timeout)
        self._fleet = fleet
        self._vocab_size = vocab_size
        self._stop_ids = frozenset(stop_ids)
        self._never = tuple(never)
        self._guided = guided
        self._replay = replay
        self._has_warned = False  # of a server without routes

    def recover(self) -> None:
        """Wait for all servers, send the weights to those that lost them, and use all servers again."""
        self._fleet.recover()
        self._balance.trust_all(self._fleet.addresses)

    def count(self, *, is_retry: bool) -> None:
        """See `Asker`."""
        self._fleet.stats.requests += 1
        self._fleet.stats.retries += is_retry

    def check(self) -> Coroutine[Any, Any, None]:
        """See `Asker`; stops using servers whose weights are not those that this run has now."""
        return self._check_versions(self._fleet.version)

    async def _check_versions(self, version: str) -> None:
        await asyncio.gather(*(self._check_version(server, version) for server in self._balance.servers))

    async def _check_version(self, server: Server, version: str) -> None:
        """Stop using a server whose weights are not this run's: it was restarted, or its last update failed."""
        try:
            found = await self._versions(server)
        except HttpError:
            server.num_failures += 1
            return
        if found != {version} and not self._fleet.is_sending:
            other = ", ".join(map(repr, sorted(found - {version})))
            self._balance.distrust(server, f"{server.url} has the weights {other}, not {version!r}")

    async def _versions(self, server: Server) -> set[str]:
        """The names of the weights that answer requests to a server, or to a router."""
        engines = self._fleet.engines(server.url)
        return {*await asyncio.gather(*(weight_version(self._http, url) for url in engines))}

    async def ask_once(self, server: Server, request: PromptRequest, timeout: float) -> list[Completion]:
        """See `Asker`."""
        try:
            return await self._completions(server, request, timeout)
        except Refused as error:
            if error.status >= 500:
                raise
            # A restarted server does not know our adapter and may have a smaller length limit.
            other = sorted(name for name in await self._versions(server) if not name.startswith(f"{self._fleet.run}:"))
            if other:
                raise OtherWeights(f"refuses the request and has other weights ({other[0]!r}): {error}") from error
            raise self.error(server, request, f"refuses: {error}") from error

    def _replay_of_servers(self) -> RouterReplay | None:
        """What reads the experts in answers; None: they are not needed, or some server does not return them."""
        if self._replay is None or not self._replay.is_proven:
            return None
        lacking = [url for url, info in self._fleet.infos.items() if not info.returns_routes]
        if not lacking:
            return self._replay
        if not self._has_warned and is_main():
            _log.warning(
                "The policy is a mixture of experts, but the vLLM server at %s does not return those that it chooses: "
                "for some tokens, training will use others. Start it with --enable_return_routed_experts, which needs "
                "a build for GPUs, or set router_replay='R2' or False; see docs/moe.md.",
                lacking[0],
            )
        self._has_warned = True
        return None

    async def _completions(self, server: Server, prompt: PromptRequest, timeout: float) -> list[Completion]:
        replay = self._replay_of_servers()
        num_experts = 0
        if replay is not None:
            num_experts = next(iter(self._fleet.infos.values())).num_hidden_layers * replay.top_k
        own_ids = frozenset() if prompt.sampling.ignores_eos else self._stop_ids
        expected = Expected(
            request_id=secrets.token_hex(8),
            run=self._fleet.run,
            vocab_size=self._vocab_size,
            stop_ids=own_ids.union(prompt.sampling.stop_token_ids),
            is_guided=self._guided is not None,
            never=self._never,
            replay=replay,
        )
        body = request_body(
            prompt,
            expected,
            model=self._fleet.model_name(server.url),
            salt=self._fleet.version,
            guided=self._guided,
        )
        url, limit = f"{server.url}/inference/v1/generate", answer_limit(prompt, num_experts=num_experts)
        answer = await self._http.send("POST", url, timeout=timeout, json=body, max_bytes=limit)
        try:
            return completions_of(answer, prompt, expected, newest_step=self._fleet.step)
        except BadAnswer as error:
            raise self.error(server, prompt, f"answers request {expected.request_id} wrongly: {error}") from error


class VLLMGenerator:
    """A `prefrl.generation.base.Generator` that uses vLLM servers started with `prefrl vllm-serve`.

    Every training process requests the completions of its own prompts, and process 0 sends the weights. Construction,
    `sync`, `invalidate` and the end of `as_completed` are therefore collective: all processes must reach them. The
    first `sync` contacts the servers and checks what they serve.

    Args:
        urls: Base URLs of servers that serve the same model; a prompt goes to the one with the fewest requests. With
            `members`: that of a router in front of them, or none.
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
        members: Where servers that come and go are found; None: the servers are `urls`.
        sleep: Of a server that shares the trainer's device; None: servers have devices of their own.
        replay: Of the policy's routers, whose choices the servers return; None: they are not asked for.

    Raises:
        ConfigError: A value is outside its range, there is no server, or `urls` contains an invalid or a repeated URL.
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
        members: Members | None = None,
        sleep: Sleep | None = None,
        replay: RouterReplay | None = None,
    ) -> None:
        positive = {
            "server_timeout": server_timeout,
            "request_timeout": request_timeout,
            "max_concurrency": max_concurrency,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"{name}={value}: must be above 0")
        if not (urls or members) or len({*map(check_server_url, urls)}) < len(urls):
            raise ConfigError(f"vLLM servers {list(urls)}: must be at least one URL, without duplicates")
        first = rank() % max(len(urls), 1)  # among equally busy servers, each process prefers a different one
        bases = [check_server_url(url) for url in [*urls[first:], *urls[:first]]]
        self.weight_sync = weight_sync
        self._http = http
        self._guided = guided
        self._balance = Balance(bases, max_concurrency)
        shared: dict[str, Any] = {"http": http, "weight_sync": weight_sync, "requirements": requirements}
        shared["server_timeout"] = server_timeout
        if members is None:
            self.fleet = Fleet(bases, sleep=sleep, **shared)
        else:
            self.fleet = ElasticFleet(members, router=bases[0] if bases else None, **shared)
        self._asker = ServerAsker(
            self.fleet,
            self._balance,
            http=http,
            vocab_size=requirements.vocab_size,
            stop_ids=stop_ids,
            request_timeout=request_timeout,
            guided=guided,
            never=never,
            replay=replay,
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
    ) -> VLLMPending[PromptRequest, list[Completion]]:
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
        self._balance.trust_all(self.fleet.addresses)

    def invalidate(self) -> None:
        """Make the next `sync` send the weights, whatever their version: the same number may stand for other weights.

        Collective.
        """
        self.fleet.invalidate()

    def rest(self) -> None:
        """Free the device that the server shares with the trainer, until the next `sync`; see `Fleet.rest`."""
        self.fleet.rest()

    def stats(self) -> VLLMStats:
        """Counts since the last call, on this process."""
        stats, self.fleet.stats = self.fleet.stats, VLLMStats()
        return stats

    def close(self) -> None:
        """Cancel running requests and disconnect from the servers."""
        self.weight_sync.close()
        self._http.close()
