"""Run a workload with TRL's trainers and their fastest settings: no gradient checkpointing, and no bf16 on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import concatenate_datasets
from transformers import LogitsProcessor, LogitsProcessorList

from benchmarks.inputs import (
    END,
    PAD,
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
from benchmarks.workloads import Workload

__all__ = ["ForcedEnd", "ForcedGenerate", "ScriptedGenerate", "build"]


def build(setup: Setup) -> Job:
    """Prepare everything up to the first step."""
    own = {"gradient_checkpointing": False, **setup.arguments(), **setup.workload.trl_options}
    if setup.workload.task == "distillation":
        return _build_distillation(setup, own)
    if setup.workload.task == "gkd":
        return _build_gkd(setup, own)
    if setup.workload.is_online:
        return _build_grpo(setup, own)
    name = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "sft": "SFT"}[setup.workload.task]
    module = import_module("trl")  # only installed in the environment of the benchmark
    args = getattr(module, f"{name}Config")(max_length=None, **own)
    trainer = getattr(module, f"{name}Trainer")(args=args, **offline_arguments(setup))
    return job_of(setup, trainer)


def _build_grpo(setup: Setup, own: dict[str, Any]) -> Job:
    from trl import GRPOConfig, GRPOTrainer

    workload = setup.workload
    model = build_policy(workload, seed=REFERENCE_SEED, device=setup.device)
    if workload.options["beta"]:  # TRL loads its reference from the place that the model came from
        folder = Path(setup.folder) / "reference"
        model.save_pretrained(folder)
        model.config._name_or_path = str(folder)
    trainer = GRPOTrainer(
        model,
        reward_funcs=setup.counter.reward(),
        args=GRPOConfig(
            num_generations=len(workload.lengths),
            max_completion_length=max(workload.lengths),
            temperature=1.0,
            use_bias_correction_kl=False,  # prefrl's KL term has no importance weight
            **own,
        ),
        train_dataset=rows_of(workload),
        processing_class=build_processor(workload),
        callbacks=[setup.callback()],
    )
    model.load_state_dict(build_policy(workload, seed=POLICY_SEED, device=setup.device).state_dict())
    if workload.task == "grpo_loss":
        model.generate = ScriptedGenerate(completions_of(workload), workload.prompt_length)
        return job_of(setup, trainer)
    model.generate = ForcedGenerate(model.generate, workload)
    if workload.task == "grpo":
        return job_of(setup, trainer)
    return _generation_job(setup, trainer)


def _build_distillation(setup: Setup, own: dict[str, Any]) -> Job:
    from trl import DistillationConfig, DistillationTrainer

    workload = setup.workload
    rows, scripted = rows_of(workload), ScriptedGenerate(completions_of(workload), workload.prompt_length)
    trainer = DistillationTrainer(
        args=DistillationConfig(max_completion_length=max(workload.lengths), **own),
        train_dataset=concatenate_datasets([rows] * len(workload.lengths)),  # it samples each row once
        **taught_arguments(setup),
    )

    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        ids = scripted(input_ids)
        setup.counter.total += int((ids[:, input_ids.shape[1] :] != PAD).sum())
        return ids

    trainer.model.generate = generate
    return job_of(setup, trainer)


def _build_gkd(setup: Setup, own: dict[str, Any]) -> Job:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    rows = rows_of(setup.workload).map(
        lambda row: {"messages": row["prompt"] + row["completion"]}, remove_columns=["prompt", "completion"]
    )
    trainer = GKDTrainer(args=GKDConfig(**own), train_dataset=rows, **taught_arguments(setup))
    divergence = trainer.generalized_jsd_loss

    def counted(*logits: torch.Tensor, labels: torch.Tensor, **arguments: Any) -> torch.Tensor:
        setup.counter.total += int((labels != -100).sum())
        return divergence(*logits, labels=labels, **arguments)

    trainer.generalized_jsd_loss = counted
    return job_of(setup, trainer)


def _generation_job(setup: Setup, trainer: Any) -> Job:
    prompts = [prompt for prompt in prompts_of(setup.workload) for _ in setup.workload.lengths]

    def generate() -> int:
        ids = torch.tensor(prompts, device=trainer.model.device)
        with torch.no_grad(), trainer.accelerator.autocast():
            output = trainer.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=trainer.generation_config,
            )
        completions = output[:, ids.shape[1] :]
        return int((completions != PAD).sum())

    return setup.generation_job(generate)


class ScriptedGenerate:
    """Replaces `model.generate`: returns each prompt followed by the completions of its last `length` tokens."""

    def __init__(self, completions: Completions, length: int, *, pad: int = PAD) -> None:
        self._completions = completions
        self._length = length
        self._pad = pad

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        samples = {prompt: itertools.cycle(group) for prompt, group in self._completions.items()}
        rows = [next(samples[tuple(prompt[-self._length :])]) for prompt in input_ids.tolist()]
        width = max(map(len, rows))
        padded = [row + [self._pad] * (width - len(row)) for row in rows]
        return torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=1)


class ForcedGenerate:
    """A `model.generate` whose samples have the workload's lengths."""

    def __init__(self, generate: Any, workload: Workload) -> None:
        self._generate = generate
        self._lengths = workload.lengths * workload.num_prompts

    def __call__(self, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        force = ForcedEnd(self._lengths, prompt_length=input_ids.shape[1])
        return self._generate(input_ids=input_ids, logits_processor=LogitsProcessorList([force]), **arguments)


class ForcedEnd(LogitsProcessor):
    """Forces the end token as the last of the `lengths` tokens of a row, and not before."""

    def __init__(self, lengths: Sequence[int], *, prompt_length: int) -> None:
        self._ending: dict[int, list[int]] = {}  # width after which a row ends -> rows
        for row, length in enumerate(lengths):
            self._ending.setdefault(prompt_length + length - 1, []).append(row)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[R, V] scores, changed in place: rows that end here have only one possible token."""
        scores[:, END] = -torch.inf
        for row in self._ending.get(input_ids.shape[1], ()):
            scores[row] = -torch.inf
            scores[row, END] = 0.0
        return scores
