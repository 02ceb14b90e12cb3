"""The interface of all generators, and sampling parameters.

`Generator` is at the end. Only episodes need `TurnSampler` and what belongs to it: conversations of many turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, get_args

from prefrl.errors import ConfigError

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    import torch
    from torch import Tensor

    from prefrl.distributed import Differences
    from prefrl.types import Completion, Images

Sampled = TypeVar("Sampled")

# "sampled": log-probs of the distribution that was sampled from; "raw": untruncated, at temperature 1.
LogprobsMode = Literal["sampled", "raw"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are sampled. `temperature=0` is greedy decoding, whose "sampled" log-probs are all 0.

    Raises:
        ConfigError: A value is outside its range.
    """

    num_samples: int  # completions of each prompt
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0  # 1 switches it off
    top_k: int | None = None  # None and 0 switch it off
    min_p: float | None = None  # None and 0 switch it off
    repetition_penalty: float = 1.0
    # In addition to those of the generation config and the tokenizer.
    stop_token_ids: tuple[int, ...] = ()
    # The token that completes one of these strings in a completion's text ends it, and belongs to it as a whole.
    stop: tuple[str, ...] = ()
    ignores_eos: bool = False  # only `stop_token_ids`, `stop` and `max_tokens` end a completion
    logprobs: LogprobsMode = "sampled"

    def __post_init__(self) -> None:
        """Check every value."""
        _check("num_samples", self.num_samples, self.num_samples >= 1, "must be at least 1")
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "must be at least 1")
        is_temperature = self.temperature >= 0 and math.isfinite(self.temperature)
        _check("temperature", self.temperature, is_temperature, "must be at least 0; 0 is greedy decoding")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "must be in (0, 1]; 1 switches it off")
        _check("top_k", self.top_k, self.top_k is None or self.top_k >= 0, "must be at least 1; None switches it off")
        _check("min_p", self.min_p, self.min_p is None or 0 <= self.min_p <= 1, "must be in [0, 1] or None")
        is_penalty = self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)
        _check("repetition_penalty", self.repetition_penalty, is_penalty, "must be above 0; 1 switches it off")
        _check("stop", self.stop, "" not in self.stop, "must be strings that are not empty")
        modes = get_args(LogprobsMode)
        _check("logprobs", self.logprobs, self.logprobs in modes, f"must be one of {modes}")


def _check(field: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ConfigError(f"{field}={value!r}: {allowed}")


class WeightSource(Protocol):
    """The policy's full weights under their checkpoint names. Each iteration reads them again, in the same order.

    An iteration may stop after any weight.
    """

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, with adapters merged into their layers; tied duplicates are left out."""
        ...

    def changes(
        self, rounded: Callable[[torch.dtype, int], torch.dtype], *, is_first: bool
    ) -> Iterator[tuple[str, Tensor | Differences]]:
        """Like `__iter__`; of a partitioned weight, perhaps only what differs from the last call.

        Args:
            rounded: The dtype to compare in, by a weight's dtype and its number of dimensions. Whole weights are not
                rounded.
            is_first: Whole weights are needed; the next call compares with them.
        """
        ...

    @property
    def has_adapter(self) -> bool:
        """Whether only an adapter is trained, on frozen weights."""
        ...

    @property
    def is_quantized(self) -> bool:
        """Whether the model is quantized, so that only the adapter can be read."""
        ...

    def base(self) -> Iterable[tuple[str, Tensor]]:
        """Like `__iter__`, but without the adapter."""
        ...

    def save_adapter(self, folder: Path) -> None:
        """Write only the adapter, in peft's format."""
        ...

    def lead(self, task: Callable[[], None]) -> None:
        """Run `task`, which may read the weights, on the main process; the other processes help to gather them.

        Weights may be partitioned over processes, so all of them must call it. Exceptions of the task are raised only
        on the main process.
        """
        ...


class Pending(Protocol[Sampled]):
    """Completions, or rollouts of them, that were requested."""

    def as_completed(self) -> Iterator[tuple[int, list[Sampled]]]:
        """The number and samples of each prompt, once for every prompt, as they become ready."""
        ...

    def cancel(self) -> None:
        """Cancel the request: the completions are no longer needed."""
        ...


class Polled(Pending[Sampled], Protocol[Sampled]):
    """A `Pending` that can be asked what has arrived, instead of `as_completed`."""

    @property
    def longest_silence(self) -> float:
        """The longest wait for the next arrival, in seconds."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Whether nothing more arrives before `repeat_lost`."""
        ...

    def arrived(self) -> Iterator[tuple[int, list[Sampled]]]:
        """The number and samples of the prompts that became ready since the last call, without waiting.

        Raises:
            GenerationError: The samples of a prompt could not be generated.
        """
        ...

    def repeat_lost(self) -> None:
        """Request again, with the same seeds, what was lost with a server: all servers have the weights again.

        Raises:
            GenerationError: It was lost too often.
        """
        ...


@dataclass(frozen=True, slots=True)
class OnDemand:
    """A `Pending` whose completions are generated when they are read."""

    generate: Callable[[], list[list[Completion]]]  # [P][G]

    def as_completed(self) -> Iterator[tuple[int, list[Completion]]]:
        """Generate all completions, and yield them in order."""
        yield from enumerate(self.generate())

    def cancel(self) -> None:
        """No-op: nothing is running."""


@dataclass(slots=True)
class Home:
    """Where the turns of a conversation are sampled: its server has the history in its cache."""

    url: str | None = None  # None: no server has answered yet


class Conversations(Protocol):
    """Conversations that go on by themselves, and ask a `TurnSampler` for their next turns."""

    def has_news(self) -> bool:
        """Whether some have ended that the caller of `serve` wants to know of."""
        ...

    def is_over(self) -> bool:
        """Whether all have ended."""
        ...

    def is_waiting(self) -> bool:
        """Whether all that go on are waiting for an answer, or for one of these to end."""
        ...

    def attend(self) -> None:
        """Do what only the thread that serves can do."""
        ...


class TurnSampler(Protocol):
    """Samples turns of conversations, each as soon as it is asked for."""

    def ask(self, prompt: Sequence[int], *, max_tokens: int, seed: int, home: Home) -> Future[Completion]:
        """Request one completion. May be called from any thread.

        Args:
            prompt: The ids to continue.
            max_tokens: The most tokens of the completion.
            seed: It depends only on the weights, the prompt, the sampling parameters and this.
            home: Of the conversation.
        """
        ...

    def notify(self) -> None:
        """Say that a conversation has ended or failed, or needs attention. May be called from any thread."""
        ...

    def serve(self, conversations: Conversations) -> None:
        """Answer requests until the conversations have news or are over; called by the main thread.

        If weights are partitioned, or on servers, the end of the conversations is collective: all processes must serve
        until they are over.

        Raises:
            GenerationError: A completion could not be generated.
        """
        ...


class PolledTurns(TurnSampler, Protocol):
    """A `TurnSampler` that answers by itself, so that one can look at the conversations instead of `serve`."""

    @property
    def failure(self) -> Exception | None:
        """Why a completion could not be generated; None: all could be so far."""
        ...

    def is_stuck(self, conversations: Conversations) -> bool:
        """Whether no conversation goes on before `repeat_lost`, or before one that is not among these ends."""
        ...

    def repeat_lost(self) -> None:
        """See `Polled`."""
        ...


class Generator(Protocol):
    """Samples completions of prompts, in this process or on a server."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int],
        images: Sequence[Images | None] | None = None,
    ) -> list[list[Completion]]:
        """Sample `sampling.num_samples` completions of each prompt.

        Sample g of prompt p depends only on (weights, prompts[p], its images, sampling, seeds[p], g). Placeholders of
        images are never sampled.

        Args:
            prompts: [P] token ids.
            sampling: The sampling parameters.
            seeds: [P] random seeds, one for each prompt.
            images: [P] the images of each prompt; None: there are none.

        Returns:
            [P][G] completions; a stop token is the last token of its completion.
        """
        ...

    @property
    def context_limit(self) -> int | None:
        """The most tokens of a prompt and its completion together; None: no limit."""
        ...

    def turns(self, sampling: SamplingParams) -> TurnSampler:
        """Sample the turns of conversations with these parameters and the current weights.

        `num_samples` and `max_tokens` are those of each request.
        """
        ...

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int],
        images: Sequence[Images | None] | None = None,
    ) -> Pending[Completion]:
        """Like `generate`, but without waiting for the completions."""
        ...

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """Generate with these weights from now on; no-op if `version` is already in use."""
        ...

    def invalidate(self) -> None:
        """Make the next `sync` send the weights, because they may have changed although the version has not."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...
