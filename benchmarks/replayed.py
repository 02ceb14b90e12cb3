"""What router replay changes in a GRPO run: a tiny mixture of experts that learns to repeat its prompt.

    python -m benchmarks.replayed [--seeds 0 1 2] [--steps 100] [--sampler bfloat16 float8] [--write-docs]

The trainer computes in float32. The sampler has a copy of its weights in bfloat16 or, as FP8 servers do, rounded to
float8 with four bits of exponent, and computes in bfloat16: so it chooses other experts. The cases of a seed start
from the same random weights. The reward is the share of the prompt's four digits that the completion repeats at their
places, and each generation batch is learned from twice. Results are written to `results/replayed.json`.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.report import replace_between_markers
from prefrl import GRPOConfig, GRPOTrainer
from prefrl.generation.base import WeightSource
from prefrl.generation.local.generator import LocalGenerator
from prefrl.models.router_replay import RouterReplay
from prefrl.scripts import demo as demo_tiny

RESULTS = Path(__file__).parent / "results" / "replayed.json"
PAGE = Path(__file__).parents[1] / "docs" / "moe.md"
LAST = 10  # generation batches whose mean reward is reported
ROUNDINGS = ("bfloat16", "float8")
REPLAYS = {"none": False, "R3": "R3", "R2": "R2"}
BEGIN, END = "<!-- replayed -->", "<!-- end of replayed -->"


@dataclass(frozen=True, slots=True)
class Learned:
    """One run."""

    sampler: str
    replay: str
    seed: int
    rewards: list[float]  # mean of each generation batch
    routes_changed: float | None  # mean of `sampling/routes_changed` in the first updates from generation batches
    largest_norm: float  # of the gradients of a step
    seconds: float


def make_mixture(seed: int) -> PreTrainedModel:
    """Two layers with eight experts, of which two run, for the demo's tokenizer."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(hidden_size=64, head_dim=16, **experts, **demo_tiny.LAYERS)
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(config)


class RoundedSampler(LocalGenerator):
    """Samples from a rounded copy of the policy, and says which experts the copy has chosen."""

    def __init__(self, policy: PreTrainedModel, rounding: str, *, records: bool, **options: Any) -> None:
        self.policy, self.rounding = policy, rounding
        twin = copy.deepcopy(policy).bfloat16()
        super().__init__(twin, replay=RouterReplay() if records else None, **options)

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """Round the policy's weights into the copy."""
        super().sync(weights, version=version)
        with torch.no_grad():
            for mine, theirs in zip(self._model.parameters(), self.policy.parameters(), strict=True):
                mine.copy_(self._rounded(theirs))

    def _rounded(self, weight: Tensor) -> Tensor:
        if self.rounding == "bfloat16" or weight.dim() < 2:
            return weight
        scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
        return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def make_trainer(*, seed: int, steps: int, replay: str, folder: Path) -> GRPOTrainer:
    """A trainer of a mixture with the random weights of a seed."""
    config = GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        use_cpu=True,
        max_steps=steps,
        logging_steps=1,
        per_device_train_batch_size=64,
        num_generations=8,
        num_iterations=2,
        max_completion_length=4,
        temperature=1.0,
        top_k=None,
        beta=0.0,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        router_replay=REPLAYS[replay],
    )
    digits = random.Random(seed)
    rows = datasets.Dataset.from_list([{"prompt": f"{digits.randrange(10**4):04}"} for _ in range(2048)])
    model, tokenizer = make_mixture(seed), demo_tiny.make_tokenizer()
    trainer = GRPOTrainer(model, repeated, config, rows, processing_class=tokenizer)
    trainer.history.shows_ending = False
    trainer.remove_callback(PrinterCallback)
    return trainer


def repeated(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of the prompt's digits that stand at the same places of the completion."""
    return [
        sum(a == b for a, b in zip(prompt, text, strict=False)) / len(prompt)
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def learn(*, sampler: str, replay: str, seed: int, steps: int, folder: Path) -> Learned:
    """Train one case."""
    trainer = make_trainer(seed=seed, steps=steps, replay=replay, folder=folder)
    trainer.generator = RoundedSampler(
        trainer.policy, sampler, tokenizer=trainer.tokenizer, max_rows=256, records=replay == "R3"
    )
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    changed = [entry["sampling/routes_changed"] for entry in logs if "sampling/routes_changed" in entry]
    return Learned(
        sampler,
        replay,
        seed,
        rewards=[round(entry["reward"], 3) for entry in logs],
        routes_changed=round(fmean(changed), 5) if changed else None,
        largest_norm=round(max(entry["grad_norm"] for entry in logs), 3),
        seconds=round(seconds, 1),
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table with a line for each sampler and kind of replay."""
    seeds = sorted({row["seed"] for row in rows})
    found = {(row["sampler"], row["replay"], row["seed"]): row for row in rows}
    heads = " | ".join(f"seed {seed}" for seed in seeds)
    lines = [f"| sampler | replay | {heads} | routes changed, first update of a batch | largest norm of a gradient |"]
    lines += [f"|---|---|{'---|' * len(seeds)}---|---|"]
    for sampler in ROUNDINGS:
        for replay in REPLAYS:
            cells = [found.get((sampler, replay, seed)) for seed in seeds]
            known = [row for row in cells if row is not None]
            if not known:
                continue
            after = ["" if row is None else f"{fmean(row['rewards'][-LAST:]):.3f}" for row in cells]
            changed = [row["routes_changed"] for row in known if row["routes_changed"] is not None]
            share = f"{100 * fmean(changed):.2g} %" if changed else ""
            norm = max(row["largest_norm"] for row in known)
            lines.append(
                f"| {sampler} | {replay} | {' | '.join(after)} | {share} | {norm:.2f} |".replace("|  |", "| |")
            )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sampler", nargs="+", choices=ROUNDINGS, default=ROUNDINGS)
    parser.add_argument("--write-docs", action="store_true", help="put the results into docs/moe.md")
    arguments = parser.parse_args(argv)
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            for sampler in arguments.sampler:
                for replay in REPLAYS:
                    case = {"sampler": sampler, "replay": replay, "seed": seed, "steps": arguments.steps}
                    row = learn(folder=Path(folder), **case)
                    print(
                        f"{sampler} {replay:4} seed {seed}: {fmean(row.rewards[-LAST:]):.3f}  {row.seconds} s",
                        flush=True,
                    )
                    rows.append(asdict(row))
                    RESULTS.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    if arguments.write_docs:
        replace_between_markers(PAGE, table(rows).rstrip(), begin=BEGIN, end=END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
