"""Run a workload with prefrl's trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.inputs import (
    POLICY_SEED,
    REFERENCE_SEED,
    Completions,
    build_policy,
    build_processor,
    completions_of,
    prompts_of,
    rows_of,
)
from benchmarks.job import Job, Setup, job_of, offline_arguments, taught_arguments
from prefrl.generation.base import OnDemand, Pending, SamplingParams, WeightSource
from prefrl.generation.local import generator as local
from prefrl.generation.local.decoding import uniform_numbers
from prefrl.registry import REGISTRY
from prefrl.trainer.base_config import BaseConfig
from prefrl.types import Completion, Images

__all__ = ["ScriptedGenerator", "build", "config_of", "force_lengths"]


def build(setup: Setup) -> Job:
    """Prepare everything up to the first step."""
    if setup.workload.task in ("distillation", "gkd"):
        return _build_distillation(setup)
    if setup.workload.is_online:
        return _build_grpo(setup)
    trainer = REGISTRY[setup.workload.task].load_trainer()(args=config_of(setup), **offline_arguments(setup))
    return job_of(setup, trainer)


def config_of(setup: Setup) -> BaseConfig:
    """The workload's options."""
    workload = setup.workload
    if workload.is_online:
        own = {
            "num_generations": len(workload.lengths),
            "max_completion_length": max(workload.lengths),
            "max_prompt_length": None,
            "temperature": 1.0,
            "top_k": None,
        }
        if workload.task == "gkd":
            own |= {"num_generations": 1}
        name = "distillation" if workload.task in ("distillation", "gkd") else "grpo"
        return REGISTRY[name].load_config()(**(own | setup.arguments()))
    return REGISTRY[workload.task].load_config()(**setup.arguments(), max_length=None)


def _build_grpo(setup: Setup) -> Job:
    workload = setup.workload
    model = build_policy(workload, seed=REFERENCE_SEED, device=setup.device)
    trainer = REGISTRY["grpo"].load_trainer()(
        model,
        reward_funcs=setup.counter.reward(),
        args=config_of(setup),
        train_dataset=rows_of(workload),
        processing_class=build_processor(workload),
        callbacks=[setup.callback()],
    )
    # The reference was built from the weights that the model had before.
    model.load_state_dict(build_policy(workload, seed=POLICY_SEED, device=setup.device).state_dict())
    if workload.task == "grpo_loss":
        trainer.generator = ScriptedGenerator(completions_of(workload), workload.prompt_length)
        return job_of(setup, trainer)
    force_lengths(workload.lengths)
    if workload.task == "grpo":
        return job_of(setup, trainer)
    return _generation_job(setup, trainer)


def _build_distillation(setup: Setup) -> Job:
    workload = setup.workload
    trainer = REGISTRY["distillation"].load_trainer()(
        args=config_of(setup),
        train_dataset=rows_of(workload),
        reward_funcs=setup.counter.reward(),  # which only counts tokens
        **taught_arguments(setup),
    )
    if workload.task == "distillation":
        trainer.generator = ScriptedGenerator(completions_of(workload), workload.prompt_length)
    return job_of(setup, trainer)


def _generation_job(setup: Setup, trainer: Any) -> Job:
    prompts, sampling = prompts_of(setup.workload), trainer.args.sampling_params()

    def generate() -> int:
        with trainer.accelerator.autocast():
            groups = trainer.generator.generate(prompts, sampling, seeds=range(len(prompts)))
        return sum(len(completion.token_ids) for group in groups for completion in group)

    return setup.generation_job(generate)


class ScriptedGenerator:
    """A `prefrl.generation.base.Generator` that returns the completions of the last `length` tokens of each prompt."""

    def __init__(self, completions: Completions, length: int) -> None:
        self._completions = completions
        self._length = length

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int],
        images: Sequence[Images | None] | None = None,
    ) -> list[list[Completion]]:
        """The completions of each prompt, whatever the seeds and images."""
        return [[_completion(ids) for ids in self._completions[tuple(prompt[-self._length :])]] for prompt in prompts]

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int],
        images: Sequence[Images | None] | None = None,
    ) -> Pending:
        """See `generate`."""
        return OnDemand(lambda: self.generate(prompts, sampling, seeds=seeds, images=images))

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """No-op: completions do not depend on weights."""

    def invalidate(self) -> None:
        """As `sync`."""

    def close(self) -> None:
        """No-op."""


def _completion(ids: list[int]) -> Completion:
    return Completion(
        token_ids=ids,
        finish_reason="stop",
        logprobs=[0.0] * len(ids),
        trainable=[True] * len(ids),
        policy_versions=[0] * len(ids),
    )


def force_lengths(lengths: Sequence[int]) -> None:
    """From now on, sample g of a prompt in this process has `lengths[g]` tokens.

    Sampling inverts the cumulative distribution. The random number 0 therefore draws the first token of the
    vocabulary, which is the end token, and numbers above its probability never draw it. The work of sampling does not
    change.
    """

    def numbers(seed: int, sample: int, count: int) -> torch.Tensor:
        uniforms = 0.01 + 0.989 * uniform_numbers(seed, sample, count)
        uniforms[lengths[sample] - 1] = 0.0
        return uniforms

    local.uniform_numbers = numbers
