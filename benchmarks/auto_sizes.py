"""Automatic sizes against a sweep by hand: how fast is training with the budget that a search finds.

    python -m benchmarks.auto_sizes                    tiny models of widths 32, 128 and 512
    python -m benchmarks.auto_sizes FOLDER --threads 1 a model in a folder

For each model, SFT and GRPO train on rows of different lengths, 32 in a step, with every budget of the sweep and with
`max_tokens_per_micro_batch="auto"`, in turns. The time of a step is that of its forward and backward passes, the least
of all rounds; a budget's speed is the tokens of all steps by their time. The weights before the first step are compared
bit by bit with those before the search.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import string
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from prefrl.trainer.base.trainer import BaseTrainer
from tests.assets import tiny_model
from tests.contract.cases import make_trainer, weights_of

ROWS, STEPS = 32, 3
BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
WIDTHS = (32, 128, 512)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sft": {},
    "grpo": {"num_generations": 8, "max_completion_length": 48, "beta": 0.0},
}


class Weights(TrainerCallback):
    """Copies the weights before the first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.before = weights_of(model)


def dataset_of(algorithm: str) -> Dataset:
    """Rows of random characters, whose lengths differ."""
    draw = random.Random(0)

    def text(most: int) -> str:
        return "".join(draw.choices(string.ascii_lowercase + " ", k=draw.randint(4, most)))

    rows = [{"prompt": text(60), "completion": text(120)} for _ in range(ROWS * STEPS)]
    return Dataset.from_list(rows if algorithm == "sft" else [{"prompt": row["prompt"]} for row in rows])


def train(model: str | int, algorithm: str, budget: int | str, folder: str) -> tuple[BaseTrainer, list[float]]:
    """Train for some steps; the seconds of each step's passes."""
    options: dict[str, Any] = {"per_device_train_batch_size": ROWS, "max_steps": STEPS, "learning_rate": 1e-6}
    options |= {"train_dataset": dataset_of(algorithm), "max_tokens_per_micro_batch": budget}
    if isinstance(model, str):
        options |= {"model": model, "processing_class": AutoTokenizer.from_pretrained(model)}
    else:
        options["model"] = tiny_model(hidden_size=model, intermediate_size=2 * model, num_hidden_layers=4)
    trainer = make_trainer(algorithm, Path(folder), callbacks=[Weights()], **options, **ALGORITHMS[algorithm])
    before = weights_of(trainer.model)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.train()
    (seen,) = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Weights)]
    assert all(torch.equal(value, seen.before[name]) for name, value in before.items()), "the search moved weights"
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return trainer, [entry["time/forward_s"] + entry["time/backward_s"] for entry in logs]


def compared(model: str | int, algorithm: str, rounds: int) -> str:
    """A line of the table: the speeds of the sweep and of what is found, tokens per second."""
    seconds: dict[int | str, list[float]] = {}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for budget in (*BUDGETS, "auto"):
                trainer, times = train(model, algorithm, budget, folder)
                seconds[budget] = [min(pair) for pair in zip(seconds.get(budget, times), times, strict=True)]
                if budget == "auto":
                    found.append(trainer.args.max_tokens_per_micro_batch)
        num_tokens = trainer.state.num_input_tokens_seen
    speeds = {budget: num_tokens / sum(times) for budget, times in seconds.items()}
    best = max(speeds[budget] for budget in BUDGETS)
    name = Path(model).name if isinstance(model, str) else f"width {model}"
    sweep = " | ".join(f"{speeds[budget] / 1000:.1f}" for budget in BUDGETS)
    budgets = ", ".join(map(str, sorted({*found})))
    return f"| {name}, {algorithm} | {sweep} | {speeds['auto'] / 1000:.1f} | {speeds['auto'] / best:.0%} | {budgets} |"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="models; none: tiny ones of several widths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    print(f"| thousand tokens/s | {' | '.join(map(str, BUDGETS))} | auto | of the best | found |")
    print("|---" * (len(BUDGETS) + 4) + "|")
    for model in given.folders or WIDTHS:
        for algorithm in ALGORITHMS:
            print(compared(model, algorithm, given.rounds), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
