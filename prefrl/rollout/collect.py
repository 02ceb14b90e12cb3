"""From prompts to scored rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prefrl.data.collate import flat_batch
from prefrl.data.tokenize import completion_text
from prefrl.errors import GenerationError
from prefrl.types import Rollout, TokenBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prefrl.generation.base import Generator, SamplingParams
    from prefrl.rewards.runner import RewardRunner

__all__ = ["Collected", "collect", "prompt_seed", "to_token_batch"]


@dataclass(frozen=True, slots=True)
class Collected:
    """The rollouts of one generation on this rank, and what reward functions logged beside their values."""

    rollouts: list[Rollout]
    logged_metrics: dict[str, float] = field(default_factory=dict)
    logged_columns: dict[str, list[Any]] = field(default_factory=dict)
    generation_s: float = 0.0
    reward_s: float = 0.0


def prompt_seed(seed: int, generation: int, group: int) -> int:
    """The random seed of a prompt's samples: a function of the run, the generation and the group, not of the rank."""
    return int(np.random.SeedSequence([seed, generation, group]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def collect(
    rows: Sequence[Mapping[str, Any]],
    *,
    generator: Generator,
    sampling: SamplingParams,
    rewards: RewardRunner,
    tokenizer: PreTrainedTokenizerBase,
    seeds: Mapping[int, int],
    trainer_state: object,
    clock: Callable[[], float],
) -> Collected:
    """Generate completions for the prompts of some dataset rows and score them.

    Args:
        rows: [P] dataset rows with `prompt` and `prompt_ids`.
        generator: Where completions come from.
        sampling: How they are drawn; `num_samples` is G.
        rewards: Scores them.
        tokenizer: Decodes completions, for the rewards alone.
        seeds: [P] number of each prompt's group -> random seed of its samples.
        trainer_state: HuggingFace's, for rewards that ask for it.
        clock: Returns seconds.
    Returns:
        P * G rollouts, a group's next to each other.
    Raises:
        GenerationError: The generator returned another number of completions than asked for.
        RewardError: A reward function failed.
    """
    started = clock()
    completions = generator.generate([row["prompt_ids"] for row in rows], sampling, seeds=list(seeds.values()))
    generated = clock()
    counts = [len(samples) for samples in completions]
    if counts != [sampling.num_samples] * len(rows):
        raise GenerationError(f"asked for {sampling.num_samples} completions of {len(rows)} prompts, got {counts}")
    rollouts = []
    for row, group, samples in zip(rows, seeds, completions, strict=True):
        is_conversational = not isinstance(row["prompt"], str)
        for sample in samples:
            text = completion_text(tokenizer, sample.token_ids, conversational=is_conversational)
            rollouts.append(Rollout(row["prompt_ids"], sample, row, group, prompt=row["prompt"], text=text))
    metrics, columns = _score(rollouts, rewards, trainer_state)
    return Collected(rollouts, metrics, columns, generation_s=generated - started, reward_s=clock() - generated)


def _score(
    rollouts: list[Rollout], rewards: RewardRunner, trainer_state: object
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    if not rollouts:
        return {}, {}
    names = [name for name in rollouts[0].row if name not in ("prompt", "prompt_ids")]
    scores = rewards.score(
        [rollout.prompt for rollout in rollouts],
        [rollout.text for rollout in rollouts],
        [rollout.completion.token_ids for rollout in rollouts],
        {name: [rollout.row[name] for rollout in rollouts] for name in names},
        trainer_state=trainer_state,
    )
    for i, rollout in enumerate(rollouts):
        rollout.rewards = {name: values[i] for name, values in scores.by_name.items()}
    return dict(scores.metrics), dict(scores.extra)


def to_token_batch(rollouts: Sequence[Rollout], *, mask_truncated: bool) -> TokenBatch:
    """The flat batch of some rollouts: each group's prompt once, advantages on every token.

    Args:
        rollouts: B rollouts with advantages.
        mask_truncated: Completions cut off by the length limit have no loss.
    """
    is_masked = [mask_truncated and rollout.completion.finish_reason == "length" for rollout in rollouts]
    batch = flat_batch(
        [rollout.prompt_ids for rollout in rollouts],
        [rollout.completion.token_ids for rollout in rollouts],
        trainable=[
            [False] * len(rollout.completion.token_ids) if masked else rollout.completion.trainable
            for rollout, masked in zip(rollouts, is_masked, strict=True)
        ],
        groups=[rollout.group for rollout in rollouts],
    )
    advantages = torch.tensor([rollout.advantage for rollout in rollouts], dtype=torch.float32)
    sampled = [rollout.completion.logprobs for rollout in rollouts]
    logprobs = None
    if all(row is not None for row in sampled):
        logprobs = torch.tensor([value for row in sampled if row is not None for value in row], dtype=torch.float32)
    return batch.replace(advantages=advantages[batch.row_index], sampling_logprobs=logprobs)
