"""Completions from vLLM servers. The caller's thread waits for the outcomes of requests, always with a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefrl.distributed import rank
from prefrl.errors import ConfigError, GenerationError
from prefrl.generation.vllm.asker import ServerAsker
from prefrl.generation.vllm.balance import Balance
from prefrl.generation.vllm.fleet import Fleet, VLLMStats
from prefrl.generation.vllm.handshake import check_url
from prefrl.generation.vllm.pending import VLLMPending
from prefrl.generation.vllm.requests import Guided, Prompt, check_prompts, check_sampling

if TYPE_CHECKING:
    from prefrl.generation.base import SamplingParams, WeightSource
    from prefrl.generation.http import Http
    from prefrl.generation.vllm.handshake import Requirements
    from prefrl.generation.weights.sync import WeightSync
    from prefrl.types import Completion

__all__ = ["VLLMGenerator"]


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
        first = rank() % len(urls)  # of equally busy servers, each process has another first
        bases = [check_url(url) for url in [*urls[first:], *urls[:first]]]
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
        )

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
        if not self.fleet.has_weights:
            raise GenerationError("the vLLM servers have no weights of this run yet: call sync before generating")
        check_sampling(sampling, self._guided)
        check_prompts(prompts, sampling.max_tokens, min(info.max_model_len for info in self.fleet.infos.values()))
        asked = [
            Prompt(number, prompt, seed, sampling)
            for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        return VLLMPending(self._asker, asked)

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """Have all servers generate with these weights from now on; those that have this version are left alone.

        Raises:
            GenerationError: A server does not answer in time, or is another one than it should be.
            WeightSyncError: A server lives and still did not take the weights.
        """
        self.fleet.sync(weights, version=version)
        self._balance.trust_all()

    def invalidate(self) -> None:
        """Have the next `sync` send the weights, whatever their version: it may be that of other weights now.

        Collective, as `sync` is.
        """
        self.fleet.invalidate()

    def stats(self) -> VLLMStats:
        """What happened since the last call."""
        stats, self.fleet.stats = self.fleet.stats, VLLMStats()
        return stats

    def close(self) -> None:
        """Break off what is under way and let go of the servers."""
        self.weight_sync.close()
        self._http.close()
