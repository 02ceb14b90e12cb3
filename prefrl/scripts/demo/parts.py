"""What the demos share: what is not shown, greedy answers, and what is kept."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import disable_progress_bars
from transformers.utils import logging as transformers_logging

from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.optional import require
from prefrl.run.records import read_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["be_quiet", "greedy_texts", "keep_results"]


def be_quiet() -> None:
    """Show the run, and not the warnings and bars of the libraries."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()


def greedy_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Sequence[int]], *, max_tokens: int
) -> list[str]:
    """The model's most likely continuation of each prompt, given as token ids."""
    sampling = SamplingParams(num_samples=1, max_tokens=max_tokens, temperature=0.0)
    completions = LocalGenerator(model, tokenizer=tokenizer).generate(prompts, sampling, seeds=[0] * len(prompts))
    return [tokenizer.decode(samples[0].token_ids, skip_special_tokens=True) for samples in completions]


def keep_results(
    folder: Path, summary: Mapping[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Write the summary, the reward curve and the model of a demo into its folder."""
    # The figures differ between machines: kernels for other instructions add floats in another order.
    cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    where = {"cpu": cpu, "torch": str(torch.__version__)}
    (folder / "summary.json").write_text(json.dumps({**summary, **where}, indent=2) + "\n")
    _plot_rewards(folder)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def _plot_rewards(folder: Path) -> None:
    """Plot the mean reward of the last run in a folder, by step, as `reward_curve.png`."""
    logged = [(row["step"], row["reward"]) for row in read_metrics(folder) if "reward" in row]
    figure = require("matplotlib.figure", extra="plot", feature="prefrl demo").Figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.plot(*zip(*logged, strict=True))
    axes.set(xlabel="GRPO step", ylabel="mean reward", ylim=(0, 1), title="prefrl demo")
    figure.savefig(folder / "reward_curve.png", dpi=120)
