"""What the demos share: greedy answers, a line for each log, and the reward curve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.optional import require

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import (
        PreTrainedModel,
        PreTrainedTokenizerFast,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )

__all__ = ["ReportProgress", "greedy_texts", "plot_rewards"]


def greedy_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Sequence[int]], *, max_tokens: int
) -> list[str]:
    """The model's most likely continuation of each prompt, given as token ids."""
    sampling = SamplingParams(num_samples=1, max_tokens=max_tokens, temperature=0.0)
    completions = LocalGenerator(model, tokenizer=tokenizer).generate(prompts, sampling, seeds=[0] * len(prompts))
    return [tokenizer.decode(samples[0].token_ids, skip_special_tokens=True) for samples in completions]


class ReportProgress(TrainerCallback):
    """Appends every log to the metrics file, and shows those of every `interval`-th step."""

    def __init__(self, stage: str, path: Path, console: Console, *, interval: int = 10) -> None:
        self.stage = stage
        self.path = path
        self.console = console
        self.interval = interval

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write and show the latest log."""
        logs = kwargs["logs"]
        with self.path.open("a") as file:
            file.write(json.dumps({"stage": self.stage, "step": state.global_step, **logs}) + "\n")
        shown = [name for name in ("loss", "mean_token_accuracy", "reward", "reward_std", "entropy") if name in logs]
        if shown and state.global_step % self.interval == 0:
            values = "  ".join(f"{name} {logs[name]:.3f}" for name in shown)
            self.console.print(f"{self.stage} step {state.global_step}  {values}")


def plot_rewards(rewards: list[float], path: Path) -> None:
    """Plot the mean reward of each GRPO step as a PNG file."""
    figure = require("matplotlib.figure", extra="plot", feature="prefrl demo").Figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards)
    axes.set(xlabel="GRPO step", ylabel="mean reward", ylim=(0, 1), title="prefrl demo")
    figure.savefig(path, dpi=120)
