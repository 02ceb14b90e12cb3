"""What every online trainer and preset learns in the demo's task: sums, starting from a model that gets some right.

    python -m benchmarks.learning [--seeds 3] [NAME ...]

Each case starts from the same supervised weights and takes `STEPS` optimizer steps. The reward before and after is the
expected reward of a completion on the held-out questions: the probability of the right answer, which needs no
sampling. Results are written to `results/learning.json`, and as a table to `learning.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PrinterCallback

from prefrl.options.algorithms import PRESETS
from prefrl.registry import REGISTRY
from prefrl.scripts import demo as demo_tiny
from prefrl.trainer.online.trainer import OnlineTrainer

RESULTS = Path(__file__).parent / "results" / "learning.json"
STEPS = 60
WINDOW = 5

# Trainer and options that differ from its defaults. Presets are those of GRPO.
CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "rloo": ("rloo", {"num_generations": 8}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {}),
    "reinforce_plus_plus_baseline": (
        "reinforce_plus_plus",
        {"advantage_estimator": "reinforce_plus_plus_baseline", "num_generations": 8},
    ),
    "ppo": ("ppo", {"num_iterations": 2, "critic_learning_rate": 3e-3}),
    "ppo_model": ("ppo", {"num_iterations": 2, "critic": "model", "critic_learning_rate": 1e-3}),
    "online_dpo": ("online_dpo", {"num_generations": 8, "beta": 0.1}),
    "optimal_token_baseline": ("grpo", {"advantage_estimator": "optimal_token_baseline", "beta": 0.0}),
    "grpo_passk": ("grpo", {"advantage_estimator": "grpo_passk", "beta": 0.0}),
    **{f"loss {name}": ("grpo", {"loss_type": name, "beta": 0.0}) for name in ("aipo", "dppo", "reinforce")},
    **{f"preset {name}": ("grpo", preset.options) for name, preset in PRESETS.items()},
}
# The same settings for all cases. Losses differ in the size of their gradients, but Adam compensates for that.
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "max_steps": STEPS,
    "logging_steps": 1,
    "per_device_train_batch_size": 256,
    "num_generations": 8,
    "max_completion_length": 4,
    "temperature": 1.0,
    "top_k": None,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


@dataclass(frozen=True, slots=True)
class Learned:
    """One case with one seed."""

    name: str
    seed: int
    before: float  # expected reward
    after: float
    seconds: float
    explained_variance: tuple[float, float] | None = None  # of the critic, in the first and in the last `WINDOW` steps


def start(seed: int, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the model after the demo's supervised training."""
    train, _ = demo_tiny.make_questions(seed)
    model = demo_tiny.make_model(seed)
    demo_tiny.sft(model, demo_tiny.make_tokenizer(), train, seed, folder, [demo_tiny.StopAtTokenAccuracy()])
    return {name: value.clone() for name, value in model.state_dict().items()}


def expected_reward(model: PreTrainedModel, questions: datasets.Dataset) -> torch.Tensor:
    """Mean over questions of the probability that a completion sampled at temperature 1 is the right answer."""
    tokenizer = demo_tiny.make_tokenizer()
    prompts = [tokenizer(prompt).input_ids for prompt in questions["prompt"]]
    answers = [[*tokenizer(answer).input_ids, tokenizer.eos_token_id] for answer in questions["answer"]]
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = pad_sequence(rows, batch_first=True)
    chosen = model(tokens[:, :-1]).logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    logprobs = [
        row[len(prompt) - 1 : len(prompt) + len(answer) - 1].sum()
        for row, prompt, answer in zip(chosen, prompts, answers, strict=True)
    ]
    return torch.stack(logprobs).exp().mean()


@cache
def _prompts(seed: int) -> datasets.Dataset:
    """The questions, tokenized once for all cases: ten thousand take longer than two steps."""
    rows = demo_tiny.make_questions(seed)[0].remove_columns("completion")
    return rows.add_column("prompt_ids", demo_tiny.make_tokenizer()(list(rows["prompt"])).input_ids)


def make_trainer(
    name: str, seed: int, weights: Mapping[str, torch.Tensor], folder: Path, **options: Any
) -> OnlineTrainer:
    """The trainer of a case, which starts from these weights. `options` override all others."""
    algorithm, own = CASES[name]
    row = REGISTRY[algorithm]
    defaults = COMMON if algorithm in ("grpo", "rloo", "online_dpo") else COMMON | {"num_generations": 1}
    config = row.load_config()(output_dir=str(folder), seed=seed, **{**defaults, **own, **options})
    model: PreTrainedModel = demo_tiny.make_model(seed)
    model.load_state_dict(weights)
    trainer: OnlineTrainer = row.load_trainer()(
        model,
        reward_funcs=demo_tiny.right_sum,
        args=config,
        train_dataset=_prompts(seed),
        processing_class=demo_tiny.make_tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def learn(name: str, seed: int, weights: Mapping[str, torch.Tensor], folder: Path) -> Learned:
    """Train one case from these weights."""
    trainer = make_trainer(name, seed, weights, folder)
    held_out = demo_tiny.make_questions(seed)[1]
    before = float(expected_reward(trainer.policy, held_out))
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    explained = [
        each["val/explained_variance"] for each in trainer.state.log_history if "val/explained_variance" in each
    ]
    return Learned(
        name,
        seed,
        before=round(before, 4),
        after=round(float(expected_reward(trainer.policy, held_out)), 4),
        seconds=round(seconds, 1),
        explained_variance=(fmean(explained[:WINDOW]), fmean(explained[-WINDOW:])) if explained else None,
    )


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table with a line for each case and a column for each seed."""
    seeds = sorted({row["seed"] for row in rows})
    before = {row["seed"]: row["before"] for row in rows}
    by_case = {(row["name"], row["seed"]): row for row in rows}
    lines = [
        f"Probability of the right answer to held-out questions of the demo after {STEPS} steps (`python -m "
        "benchmarks.learning`).",
        "",
        f"| case | {' | '.join(f'seed {seed}' for seed in seeds)} | explained variance |",
        f"|---|{'---|' * len(seeds)}---|",
        f"| before | {' | '.join(f'{before[seed]:.3f}' for seed in seeds)} | |",
    ]
    for name in CASES:
        found = [by_case.get((name, seed)) for seed in seeds]
        cells = ["" if row is None else f"{row['after']:.3f}" for row in found]
        ends = [row["explained_variance"] for row in found if row is not None and row["explained_variance"]]
        cells.append(", ".join(f"{first:.3f} to {last:.3f}" for first, last in ends))
        lines.append(f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases; nothing: all")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args(argv)
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    stored = {(row["name"], row["seed"]): row for row in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            weights = start(seed, Path(folder))
            for name in arguments.names or CASES:
                row = learn(name, seed, weights, Path(folder))
                print(f"{name:32} seed {seed}: {row.before:.3f} -> {row.after:.3f}  {row.seconds} s", flush=True)
                stored[name, seed] = asdict(row)
                RESULTS.write_text(json.dumps(list(stored.values()), indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(table(list(stored.values())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
