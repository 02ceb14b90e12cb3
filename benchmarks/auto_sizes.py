"""Automatic sizes against a sweep by hand: how fast is training with the budget that a search finds.

    python -m benchmarks.auto_sizes                                    tiny models of widths 32, 128 and 512
    python -m benchmarks.auto_sizes FOLDER --rows 8 --steps 1          a model in a folder

For each model, SFT and GRPO train on rows of different lengths. Some trainings search with
`max_tokens_per_micro_batch="auto"`; then others train with every budget of the sweep and every one that was found, in
turns. All times, those of the search too, are CPU seconds of one thread, so that they are those of a machine that does
nothing else. That of a step is of its forward and backward passes, the least of all rounds; a budget's speed is the
tokens of all steps by their time. If searches have found several budgets, "auto" is the slowest of them. The weights
before the first step are compared bit by bit with those before the search.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import random
import string
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from prefrl.trainer.base_trainer import BaseTrainer
from prefrl.trainer.features.sizes import AutomaticSizes
from tests.assets import tiny_model, tiny_tokenizer
from tests.contract.cases import make_trainer, weights_of

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


@dataclass(frozen=True)
class Workload:
    """What is trained, by which algorithm, on how much.

    Args:
        name: For the table.
        model: Is copied for each training.
        tokenizer: The model's.
        algorithm: A key of `ALGORITHMS`.
        rows: Rows of a step.
        steps: Steps of a training.
    """

    name: str
    model: Any
    tokenizer: Any
    algorithm: str
    rows: int
    steps: int

    def dataset(self) -> Dataset:
        """Rows of random characters, whose lengths differ."""
        draw = random.Random(0)

        def text(most: int) -> str:
            return "".join(draw.choices(string.ascii_lowercase + " ", k=draw.randint(4, most)))

        rows = [{"prompt": text(60), "completion": text(120)} for _ in range(self.rows * self.steps)]
        return Dataset.from_list(rows if self.algorithm == "sft" else [{"prompt": row["prompt"]} for row in rows])

    def train(self, budget: int | str, folder: str) -> tuple[BaseTrainer, list[float]]:
        """Train; the CPU seconds of each step's passes."""
        trainer = make_trainer(
            self.algorithm,
            Path(folder),
            model=copy.deepcopy(self.model),
            processing_class=self.tokenizer,
            train_dataset=self.dataset(),
            per_device_train_batch_size=self.rows,
            max_steps=self.steps,
            max_tokens_per_micro_batch=budget,
            learning_rate=1e-6,
            callbacks=[Weights()],
            **ALGORITHMS[self.algorithm],
        )
        seconds = timed_steps(trainer)
        trainer.parts[AutomaticSizes].clock = time.process_time
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            trainer.train()
        (seen,) = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Weights)]
        same = [torch.equal(value, seen.before[name]) for name, value in weights_of(self.model).items()]
        if not all(same):
            raise AssertionError("the search has changed weights")
        return trainer, seconds


def timed_steps(trainer: BaseTrainer) -> list[float]:
    """A list that gets the CPU seconds of every step's passes."""
    original, seconds = trainer.training_step, []

    def timed(*args: Any) -> torch.Tensor:
        start = time.process_time()
        loss = original(*args)
        seconds.append(time.process_time() - start)
        return loss

    trainer.training_step = timed  # type: ignore[method-assign]  # around the passes, without the update
    return seconds


def compared(work: Workload, budgets: Sequence[int], rounds: int) -> str:
    """A line of the table: the speeds of the sweep and of what is found, tokens per second."""
    seconds: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        searched = [work.train("auto", folder)[0].args.max_tokens_per_micro_batch for _ in range(rounds)]
        for _ in range(rounds):
            for budget in dict.fromkeys([*budgets, *searched]):
                trainer, times = work.train(budget, folder)
                seconds[budget] = [min(pair) for pair in zip(seconds.get(budget, times), times, strict=True)]
        num_tokens = trainer.state.num_input_tokens_seen
    speeds = {budget: num_tokens / sum(times) for budget, times in seconds.items()}
    best, found = max(speeds[budget] for budget in budgets), min(speeds[budget] for budget in searched)
    sweep = " | ".join(f"{speeds[budget]:,.0f}" for budget in budgets)
    shown = ", ".join(map(str, searched))
    return f"| {work.name}, {work.algorithm} | {sweep} | {found:,.0f} | {found / best:.0%} | {shown} |"


def models(folders: Sequence[str]) -> list[tuple[str, Any, Any]]:
    """Name, model and tokenizer of those in the folders; without folders, of tiny ones."""
    if not folders:
        return [
            (
                f"width {width}",
                tiny_model(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4),
                tiny_tokenizer(),
            )
            for width in WIDTHS
        ]
    return [
        (
            Path(folder).name,
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            AutoTokenizer.from_pretrained(folder),
        )
        for folder in folders
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="models; none: tiny ones of several widths")
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"| tokens/s | {' | '.join(map(str, given.budgets))} | auto | of the best | found |")
    print("|---" * (len(given.budgets) + 4) + "|")
    for name, model, tokenizer in models(given.folders):
        for algorithm in given.algorithms:
            work = Workload(name, model, tokenizer, algorithm, given.rows, given.steps)
            print(compared(work, given.budgets, given.rounds), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
