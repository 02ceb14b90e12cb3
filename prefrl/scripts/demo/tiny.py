"""`prefrl demo`: a tiny model learns to add, first from examples (SFT), then from a verifiable reward (GRPO).

Tokenizer, model and data are created by the demo itself. It needs no network and no GPU. With
`--model smollm2`, a real model learns by GRPO alone.
"""

from __future__ import annotations

import json
import platform
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, disable_progress_bars
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.utils import logging as transformers_logging

from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.optional import require
from prefrl.run.records import read_metrics
from prefrl.trainer.configs import GRPOConfig, SFTConfig
from prefrl.trainer.grpo_trainer import GRPOTrainer
from prefrl.trainer.sft_trainer import SFTTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

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


NUM_HELD_OUT = 256
MAX_SFT_STEPS = 1500
SFT_TOKEN_ACCURACY = 0.79  # supervised training stops here, to leave room for GRPO
GRPO_STEPS = 400


def run(seed: int, output_dir: Path, console: Console) -> dict[str, Any]:
    """Run SFT, then GRPO; write summary, curve, metrics and model into `output_dir`; return the summary."""
    started, started_cpu = time.monotonic(), time.process_time()
    torch.set_num_threads(1)  # the matrices are too small for several threads
    be_quiet()
    output_dir.mkdir(parents=True, exist_ok=True)
    train, held_out = make_questions(seed)
    tokenizer, model = make_tokenizer(), make_model(seed)

    answers = {"base": greedy_answers(model, tokenizer, held_out)}
    console.rule("SFT: learn from worked sums, stop early")
    sft(model, tokenizer, train, seed, output_dir, [StopAtTokenAccuracy()])
    answers["sft"] = greedy_answers(model, tokenizer, held_out)
    console.rule("GRPO: learn from a reward, 1 for the right sum and 0 otherwise")
    grpo(model, tokenizer, train, seed, output_dir)
    answers["grpo"] = greedy_answers(model, tokenizer, held_out)

    accuracy = {stage: share_right(given, held_out) for stage, given in answers.items()}
    summary = {
        **{f"accuracy_{stage}": value for stage, value in accuracy.items()},
        "grpo_steps": GRPO_STEPS,
        "seconds_total": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time() - started_cpu, 1),
        "seed": seed,
    }
    keep_results(output_dir, summary, model, tokenizer)
    show_answers(held_out, answers, console)
    for stage, name in (("base", "before SFT"), ("sft", "after SFT"), ("grpo", "after GRPO")):
        console.print(f"held-out accuracy {name}: {accuracy[stage]:.3f}")
    console.print(f"{summary['seconds_total']} s, {summary['cpu_seconds']} of CPU; everything is in {output_dir}")
    console.print(f"To see more of it: prefrl report {output_dir}")
    return summary


def make_questions(seed: int) -> tuple[Dataset, Dataset]:
    """Sums of two numbers below 100; the held-out ones are never trained on."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    rows = [{"prompt": f"{a:02d}+{b:02d}=", "completion": str(a + b), "answer": str(a + b)} for a, b in pairs]
    return Dataset.from_list(rows[NUM_HELD_OUT:]), Dataset.from_list(rows[:NUM_HELD_OUT])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def make_model(seed: int) -> PreTrainedModel:
    """Half a million random parameters."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=16,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def right_sum(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right sum, 0 otherwise."""
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def _common(seed: int, output_dir: Path) -> dict[str, Any]:
    return {
        "seed": seed,
        "output_dir": str(output_dir),
        "use_cpu": True,
        "lr_scheduler_type": "constant",
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": False,  # which transformers does while it is told to log errors alone
    }


def sft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train: Dataset,
    seed: int,
    output_dir: Path,
    callbacks: list[TrainerCallback],
) -> None:
    """Train in place on worked examples of sums."""
    config = SFTConfig(
        **_common(seed, output_dir), max_steps=MAX_SFT_STEPS, per_device_train_batch_size=64, learning_rate=2e-3
    )
    examples = train.remove_columns("answer")
    trainer = SFTTrainer(model, config, train_dataset=examples, processing_class=tokenizer, callbacks=callbacks)
    trainer.train()


def grpo(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train: Dataset,
    seed: int,
    output_dir: Path,
    **options: Any,
) -> None:
    """Train in place on the reward. `options` override those of `GRPOConfig`."""
    defaults = {
        "max_steps": GRPO_STEPS,
        "per_device_train_batch_size": 512,
        "num_generations": 8,
        "max_completion_length": 4,
        "temperature": 1.0,
        "top_k": None,
        "beta": 0.0,
        "learning_rate": 5e-4,
    }
    config = GRPOConfig(**_common(seed, output_dir) | defaults | options)
    questions = train.remove_columns("completion")
    trainer = GRPOTrainer(model, right_sum, config, questions, processing_class=tokenizer)
    trainer.train()
    trainer.generator.close()


def greedy_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: Dataset) -> list[str]:
    """The model's most likely answer to each question."""
    return greedy_texts(model, tokenizer, tokenizer(list(questions["prompt"])).input_ids, max_tokens=4)


def share_right(answers: list[str], questions: Dataset) -> float:
    """The share of questions whose answer is the expected one."""
    num_right: int = sum(given == expected for given, expected in zip(answers, questions["answer"], strict=True))
    return num_right / len(answers)


class StopAtTokenAccuracy(TrainerCallback):
    """Stops supervised training when the tokens are predicted accurately enough."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the accuracy of the trained tokens since the last log."""
        if kwargs["logs"].get("mean_token_accuracy", 0.0) >= SFT_TOKEN_ACCURACY:
            control.should_training_stop = True


def show_answers(questions: Dataset, answers: dict[str, list[str]], console: Console) -> None:
    """A table of held-out questions and what the model answered at each stage."""
    table = Table(title="Held-out completions (greedy)")
    for column in ("prompt", "right", "before SFT", "after SFT", "after GRPO"):
        table.add_column(column)
    for i in range(10):
        row = questions[i]
        table.add_row(row["prompt"], row["answer"], *(answers[stage][i] for stage in ("base", "sft", "grpo")))
    console.print(table)
