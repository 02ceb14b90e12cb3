"""What every generator offers, and how a sample is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from prefrl.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from prefrl.types import Completion

__all__ = ["Generator", "LogprobsMode", "OnDemand", "Pending", "SamplingParams", "WeightSource"]

# "sampled": of the distribution really sampled from; "raw": untruncated, at temperature 1.
LogprobsMode = Literal["sampled", "raw"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn. `temperature=0` is greedy decoding, whose "sampled" log-probs are all 0.

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
    # Besides those of the generation config and the tokenizer.
    stop_token_ids: tuple[int, ...] = ()
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
        modes = get_args(LogprobsMode)
        _check("logprobs", self.logprobs, self.logprobs in modes, f"must be one of {modes}")


def _check(field: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ConfigError(f"{field}={value!r}: {allowed}")


class WeightSource(Protocol):
    """The policy's full weights under the names of its checkpoint, read anew and in order at each iteration.

    An iteration may be broken off after any weight.
    """

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, adapters merged into the layers that they are on; tied duplicates are left out."""
        ...

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained on weights that do not move."""
        ...

    @property
    def is_quantized(self) -> bool:
        """Whether nothing but the adapter can be read."""
        ...

    def base(self) -> Iterable[tuple[str, Tensor]]:
        """As `__iter__`, without the adapter."""
        ...

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter alone, as peft saves it."""
        ...

    def lead(self, task: Callable[[], None]) -> None:
        """Run `task` on the main process, which may read the weights in it; the others take part in that.

        Weights may be partitioned over processes, so all of them must call it. What the task raises is raised on the
        main process alone.
        """
        ...


class Pending(Protocol):
    """Completions that were asked for."""

    def as_completed(self) -> Iterator[tuple[int, list[Completion]]]:
        """Each prompt's number and its completions, as they become ready; all prompts, once."""
        ...

    def cancel(self) -> None:
        """They are not wanted any more."""
        ...


@dataclass(frozen=True, slots=True)
class OnDemand:
    """`Pending` that is generated when it is read."""

    generate: Callable[[], list[list[Completion]]]  # [P][G]

    def as_completed(self) -> Iterator[tuple[int, list[Completion]]]:
        """All together, in order."""
        yield from enumerate(self.generate())

    def cancel(self) -> None:
        """No-op: nothing is under way."""


class Generator(Protocol):
    """Prompts in, completions out; in this process or on a server."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """[P][G] completions. Sample g of prompt p depends on (weights, prompts[p], sampling, seeds[p], g) alone."""
        ...

    def start(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, seeds: Sequence[int]) -> Pending:
        """As `generate`, without waiting for the completions."""
        ...

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """Generate with these weights from now on; no-op if `version` is the one in use."""
        ...

    def invalidate(self) -> None:
        """The weights may have changed at an equal version: the next `sync` sends them."""
        ...

    def close(self) -> None:
        """Let go of what is held."""
        ...
