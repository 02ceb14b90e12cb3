"""What each part of the autopilot does to GRPO in the demo's task: sums, from a model that gets some right.

    python -m benchmarks.autopilot [--seeds 3] [--rates usual high]

Each run starts from the same supervised weights and plans `STEPS` optimizer steps, once with a usual and once with a
high learning rate. Half of the held-out questions choose: they are what the parts look at. The reward is measured on
the other half: the probability of the right answer, which needs no sampling. The weights of the last step, of the
best checkpoint, the soup and the moving average are of the same run. Results are written to `results/autopilot.json`,
and as a table to `autopilot.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, PrinterCallback

from benchmarks.learning import COMMON, expected_reward, start
from prefrl import GRPOConfig, GRPOTrainer
from prefrl.scripts import demo as demo_tiny
from prefrl.trainer.features.guard import Guard

RESULTS = Path(__file__).parent / "results" / "autopilot.json"
STEPS, EVERY = 100, 10
RATES = {"usual": 3e-4, "high": 1e-3}
EVALUATED: dict[str, Any] = {
    **COMMON,
    "beta": 0.0,
    "max_steps": STEPS,
    "per_device_train_batch_size": 128,
    "eval_strategy": "steps",
    "eval_steps": EVERY,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 512,
    "save_strategy": "steps",
    "save_steps": EVERY,
    "save_only_model": True,
}
LAST, BEST, SOUP, EMA = "last step", "best model", "greedy soup", "moving average"
STOPPED, GROWN, BACK = "early stopping, best model", "growing batch", "rollback after spikes"
# What is trained: the parts that leave the run as it is share one.
RUNS: dict[str, dict[str, Any]] = {
    LAST: {"load_best_model_at_end": True, "model_soup": "greedy", "ema_decay": 0.95},
    STOPPED: {"early_stopping_patience": 3, "load_best_model_at_end": True},
    GROWN: {
        "increase_batch_size_on_plateau": 2,
        "increase_batch_size_kwargs": {"patience": 2, "eval_metric": "reward", "eval_split": "validation"},
    },
    BACK: {"on_spike": "rollback", "save_only_model": False},
}
CASES = (LAST, BEST, SOUP, EMA, STOPPED, GROWN, BACK)


@dataclass(frozen=True, slots=True)
class Measured:
    """One case with one seed."""

    rate: str
    name: str
    seed: int
    before: float  # expected reward
    after: float
    steps: int
    seconds: float
    note: str = ""


def make_trainer(run: str, rate: str, seed: int, weights: Mapping[str, torch.Tensor], folder: Path) -> GRPOTrainer:
    """The trainer of a run, which starts from these weights."""
    config = GRPOConfig(output_dir=str(folder), seed=seed, **{**EVALUATED, "learning_rate": RATES[rate], **RUNS[run]})
    train, held_out = demo_tiny.make_questions(seed)
    model = demo_tiny.make_model(seed)
    model.load_state_dict(weights)
    trainer = GRPOTrainer(
        model,
        demo_tiny.right_sum,
        config,
        train.remove_columns("completion"),
        held_out.select(range(demo_tiny.NUM_HELD_OUT // 2)).remove_columns("completion"),
        processing_class=demo_tiny.make_tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure(run: str, rate: str, seed: int, weights: Mapping[str, torch.Tensor]) -> list[Measured]:
    """Train a run; what its parts leave."""
    questions = demo_tiny.make_questions(seed)[1].select(range(demo_tiny.NUM_HELD_OUT // 2, demo_tiny.NUM_HELD_OUT))
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(run, rate, seed, weights, Path(folder))
        before = float(expected_reward(trainer.policy, questions))
        started = time.perf_counter()
        trainer.train()
        seconds, state = time.perf_counter() - started, trainer.state
        left = {run: trainer.policy}
        if run == LAST:
            trainer.save_model()
            folders = {
                LAST: Path(folder, f"checkpoint-{state.global_step}"),
                BEST: Path(str(state.best_model_checkpoint)),
                EMA: Path(folder, "ema"),
            }
            left = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in folders.items()}
            left[SOUP] = trainer.policy
        notes = {BEST: f"step {state.best_global_step}", SOUP: soup_of(Path(folder)), BACK: rollbacks_of(trainer)}
    return [
        Measured(
            rate,
            name,
            seed,
            before=round(before, 4),
            after=round(float(expected_reward(model, questions)), 4),
            steps=state.global_step,
            seconds=round(seconds, 1),
            note=notes.get(name, ""),
        )
        for name, model in left.items()
    ]


def soup_of(folder: Path) -> str:
    """How many checkpoints a soup is made of."""
    path = folder / "soup.json"
    if not path.exists():
        return ""
    return f"{sum(row['weight'] > 0 for row in json.loads(path.read_text())['checkpoints'])} checkpoints"


def rollbacks_of(trainer: GRPOTrainer) -> str:
    """How many times a run has gone back."""
    return f"{trainer.parts[Guard].steps.num_rollbacks} rollbacks"


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table with a line for each case."""
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        f"Probability of the right answer to held-out questions of the demo after {STEPS} planned steps of GRPO "
        "(`python -m benchmarks.autopilot`).",
    ]
    for rate, value in RATES.items():
        found = {(row["name"], row["seed"]): row for row in rows if row["rate"] == rate}
        if not found:
            continue
        heads = [*(f"seed {seed}" for seed in seeds), "mean", "steps", "notes"]
        lines += ["", f"Learning rate {value:g}:", "", f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
        before = [found[LAST, seed]["before"] for seed in seeds]
        lines.append(f"| before | {' | '.join(f'{v:.3f}' for v in before)} | {fmean(before):.3f} | 0 | |")
        for name in CASES:
            of_case = [found[name, seed] for seed in seeds]
            after = [row["after"] for row in of_case]
            steps = sorted({row["steps"] for row in of_case})
            notes = [row["note"] for row in of_case if row["note"]]
            cells = [
                *(f"{v:.3f}" for v in after),
                f"{fmean(after):.3f}",
                ", ".join(str(row["steps"]) for row in of_case),
            ]
            cells[-1] = str(steps[0]) if len(steps) == 1 else cells[-1]
            lines.append(f"| {name} | {' | '.join([*cells, '; '.join(notes)])} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="runs; nothing: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    arguments = parser.parse_args(argv)
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    stored = {(row["rate"], row["name"], row["seed"]): row for row in known}
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            weights = start(seed, Path(folder))
        for rate in arguments.rates:
            for run in arguments.names or RUNS:
                for row in measure(run, rate, seed, weights):
                    print(
                        f"{rate:6} {row.name:28} seed {seed}: {row.before:.3f} -> {row.after:.3f} {row.note}",
                        flush=True,
                    )
                    stored[rate, row.name, seed] = asdict(row)
                RESULTS.write_text(json.dumps(list(stored.values()), indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(table(list(stored.values())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
