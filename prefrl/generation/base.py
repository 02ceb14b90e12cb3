"""What every generator offers, and how a sample is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.types import Completion

__all__ = ["Generator", "SamplingParams", "WeightSource"]

# Names as in the checkpoint, full (unsharded) tensors; read lazily, in order.
WeightSource = Iterable[tuple[str, "Tensor"]]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn. `temperature=0` is greedy decoding."""

    num_samples: int  # completions of each prompt
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    # Besides those of the generation config and the tokenizer.
    stop_token_ids: tuple[int, ...] = ()
    # "sampled": of the distribution really sampled from; "raw": untruncated, at temperature 1.
    logprobs: Literal["sampled", "raw"] = "sampled"


class Generator(Protocol):
    """Prompts in, completions out; in this process or on a server."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """[P][G] completions. Sample g of prompt p depends on (weights, prompts[p], sampling, seeds[p], g) alone."""
        ...

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """Generate with these weights from now on; no-op if `version` is the one in use."""
        ...

    def close(self) -> None:
        """Let go of what is held."""
        ...
