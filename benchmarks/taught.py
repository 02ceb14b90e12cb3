"""GRPO on the demo's sums with rewards, and with rewards and a teacher, at two learning rates.

    python -m benchmarks.taught [--seeds 3] [--steps 100]
    python -m benchmarks.taught --seeds 0

The student is the demo's model after its supervised training, which ends early. The teacher is the same model after
1,500 steps of it. Neither has seen the held-out sums. The accuracy is the share of these whose likeliest answer is
right, after every 10 steps. With `--seeds 0`, figure and table are made again from `results/taught.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from benchmarks.curves import FIGURES, curves
from benchmarks.learning import COMMON
from prefrl import GRPOConfig, GRPOTrainer
from prefrl.scripts import demo

__all__ = ["CASES", "Taught", "figure", "main", "steps_to", "table"]

RESULTS = Path(__file__).parent / "results" / "taught.json"
EVERY = 10
GAINS = (0.05, 0.1)
CASES = {"rewards": 0.0, "rewards and teacher": 0.5}  # and teacher_kl_coef
LEARNING_RATES = (3e-4, 1e-3)


@dataclass(frozen=True, slots=True)
class Taught:
    """One run. Accuracies are shares of the held-out sums."""

    case: str
    learning_rate: float
    seed: int
    teacher: float  # its accuracy
    cpu_s: float  # of training, without the measurements
    accuracy: list[tuple[int, float]]  # by step


class Measure(TrainerCallback):
    """Measures the accuracy, and how long that takes."""

    def __init__(self, model: PreTrainedModel, questions: datasets.Dataset) -> None:
        self.model, self.questions = model, questions
        self.cpu_s = 0.0
        self.found = [(0, accuracy(model, questions))]

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step % EVERY == 0:
            start = time.process_time()
            self.found.append((state.global_step, accuracy(self.model, self.questions)))
            self.cpu_s += time.process_time() - start


def accuracy(model: PreTrainedModel, questions: datasets.Dataset) -> float:
    """The share of questions whose likeliest answer is right."""
    return demo.share_right(demo.greedy_answers(model, demo.make_tokenizer(), questions), questions)


class KeepStudent(demo.StopAtTokenAccuracy):
    """Keeps the weights with which the demo's supervised training ends, and lets it go on."""

    weights: Mapping[str, torch.Tensor] | None = None

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_log(args, state, control, **kwargs)
        if control.should_training_stop and state.global_step < state.max_steps:
            control.should_training_stop = False
            if self.weights is None:
                self.weights = {name: value.clone() for name, value in kwargs["model"].state_dict().items()}


def fine_tuned(seed: int) -> tuple[Mapping[str, torch.Tensor], PreTrainedModel]:
    """The student's weights, and the teacher."""
    teacher, student = demo.make_model(seed), KeepStudent()
    with tempfile.TemporaryDirectory() as folder:
        train = demo.make_questions(seed)[0]
        demo.sft(teacher, demo.make_tokenizer(), train, seed, Path(folder), [student])
    assert student.weights is not None
    return student.weights, teacher


def learn(
    case: str, rate: float, seed: int, weights: Mapping[str, torch.Tensor], teacher: PreTrainedModel, steps: int
) -> Taught:
    """One run from these weights."""
    coefficient = CASES[case]
    train, held_out = demo.make_questions(seed)
    model = demo.make_model(seed)
    model.load_state_dict(weights)
    measure = Measure(model, held_out)
    own = {"max_steps": steps, "beta": 0.0, "teacher_kl_coef": coefficient, "learning_rate": rate}
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            demo.right_sum,
            GRPOConfig(**{**COMMON, "output_dir": folder, "seed": seed, **own}),
            train.remove_columns("completion"),
            processing_class=demo.make_tokenizer(),
            callbacks=[measure],
            teacher_model=deepcopy(teacher) if coefficient else None,
        )
        trainer.remove_callback(PrinterCallback)
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start - measure.cpu_s
    return Taught(case, rate, seed, accuracy(teacher, held_out), round(seconds, 1), measure.found)


def steps_to(level: float, found: Sequence[Sequence[float]]) -> int | None:
    """The first step at which this accuracy was measured; None: never."""
    return next((int(step) for step, value in found if value >= level), None)


def figure(runs: Sequence[Mapping[str, Any]], folder: Path = FIGURES) -> None:
    """Draw the accuracy of all runs."""
    lines = [(f"{run['learning_rate']:g}{', teacher' if CASES[run['case']] else ''}", run["accuracy"]) for run in runs]
    (folder / "taught.svg").write_text(curves(lines, "accuracy, by learning rate:"), encoding="utf-8")


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table with a line for each run."""
    heads = [
        "learned from",
        "learning rate",
        "seed",
        "accuracy at step 0",
        *(f"steps to {gain} more" for gain in GAINS),
    ]
    heads += ["at the end", "teacher", "CPU s"]
    lines = [heads, ["---"] * len(heads)]
    for run in runs:
        found = run["accuracy"]
        needed = [steps_to(found[0][1] + gain, found) for gain in GAINS]
        cells = [run["case"], f"{run['learning_rate']:g}", str(run["seed"]), f"{found[0][1]:.2f}"]
        cells += ["never" if step is None else str(step) for step in needed]
        lines.append([*cells, f"{found[-1][1]:.2f}", f"{run['teacher']:.2f}", f"{run['cpu_s']:.0f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Measure, or draw again what was measured; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args(argv)
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        weights, teacher = fine_tuned(seed)
        for rate, case in product(LEARNING_RATES, CASES):
            runs.append(asdict(learn(case, rate, seed, weights, teacher, arguments.steps)))
            print(table(runs).splitlines()[-1], flush=True)
    if runs:
        runs.sort(key=lambda run: (run["learning_rate"], [*CASES].index(run["case"])))
        RESULTS.write_text(json.dumps(runs) + "\n", encoding="utf-8")
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))
    figure(runs)
    RESULTS.with_suffix(".md").write_text(table(runs), encoding="utf-8")
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
