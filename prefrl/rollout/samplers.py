"""From rows of a dataset to rollouts: one completion for each, or episodes (see `prefrl.rollout.episodes`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from prefrl.data.tokenize import completion_text
from prefrl.types import Rollout, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prefrl.data.images import ImageReader
    from prefrl.generation.base import Generator, Pending, SamplingParams
    from prefrl.types import Completion, Images

__all__ = ["CompletionSampler", "RolloutSampler"]


class RolloutSampler(Protocol):
    """Samples rollouts without rewards."""

    def start(
        self, rows: Sequence[Mapping[str, Any]], groups: Sequence[int], sampling: SamplingParams, seeds: Sequence[int]
    ) -> Pending[Rollout]:
        """Request rollouts.

        Args:
            rows: [P] rows of the dataset with `prompt` and `prompt_ids`.
            groups: [P] group number of each prompt.
            sampling: The sampling parameters; `num_samples` is G.
            seeds: [P] random seed of each prompt's samples.
        """
        ...

    def release(self, rollouts: Sequence[Rollout]) -> None:
        """Say that these rollouts are scored, so that what they hold can be used for others."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionSampler:
    """Samples one completion for each rollout.

    Args:
        generator: Returns the current generator, which may change.
        tokenizer: Decodes the completions for the rewards.
        reader: Reads the images of prompts; None: there are none.
    """

    generator: Callable[[], Generator]
    tokenizer: PreTrainedTokenizerBase
    reader: ImageReader | None = None

    def start(
        self, rows: Sequence[Mapping[str, Any]], groups: Sequence[int], sampling: SamplingParams, seeds: Sequence[int]
    ) -> Pending[Rollout]:
        """See `RolloutSampler`."""
        prompts = [row["prompt_ids"] for row in rows]
        if self.reader is None or not any(row.get("images") for row in rows):
            pending = self.generator().start(prompts, sampling, seeds=seeds)
            return _Decoded(pending, rows, groups, self.tokenizer, [None] * len(rows))
        images = [self.reader.of_prompt(row) for row in rows]
        pending = self.generator().start(prompts, sampling, seeds=seeds, images=images)
        return _Decoded(pending, rows, groups, self.tokenizer, images)

    def release(self, rollouts: Sequence[Rollout]) -> None:
        """No-op: they hold nothing."""

    def close(self) -> None:
        """No-op: the generator is the trainer's."""


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Requested completions, as rollouts."""

    pending: Pending[Completion]
    rows: Sequence[Mapping[str, Any]]
    groups: Sequence[int]
    tokenizer: PreTrainedTokenizerBase
    images: Sequence[Images | None]

    def as_completed(self) -> Iterator[tuple[int, list[Rollout]]]:
        for number, completions in self.pending.as_completed():
            row, group, images = self.rows[number], self.groups[number], self.images[number]
            is_conversational = not isinstance(row["prompt"], str)
            found = []
            for completion in completions:
                text = completion_text(self.tokenizer, completion.token_ids, conversational=is_conversational)
                turn = Turn(row["prompt_ids"], completion)
                found.append(Rollout([turn], row, group, prompt=row["prompt"], text=text, images=images))
            yield number, found

    def cancel(self) -> None:
        self.pending.cancel()
