"""How long GRPO takes to learn with servers of different speeds: sync, async in order, and ready groups first.

    python -m benchmarks.ready_first [--seeds 3]     measure: some minutes; --seeds 0 draws again what was measured

Training is real, and so are the completions: a tiny model learns to say tokens of one half of its vocabulary. Time is
simulated, so it does not depend on this machine: an update takes `UPDATE` seconds, and a group a number of seconds
that is drawn from a distribution with a long tail, divided by the speed of its server. It does not depend on the
completions, so nothing here tells of the bias of dropping; see docs/oracle.md for that. A request starts at once, with
the weights of that time. Results are written to `results/ready_first.json`, and as a table and a figure into the docs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from benchmarks.curves import FIGURES, curves
from prefrl import GRPOConfig, GRPOTrainer
from prefrl.generation.local.generator import LocalGenerator
from prefrl.types import Completion
from tests.assets import tiny_model, tiny_tokenizer

RESULTS = Path(__file__).parent / "results" / "ready_first.json"
STEPS, TARGET = 40, 0.8
UPDATE = 1.0  # seconds of an update
SPEEDS = (1.0, 1.0, 1.0, 0.5)  # of the servers
SHAPE, LONGEST = 1.2, 60.0  # of the Pareto distribution of a group's seconds, whose smallest value is 1
RUNS: dict[str, dict[str, Any]] = {
    "sync": {"generation_mode": "sync"},
    "in order, `max_staleness` 4": {"generation_mode": "async", "max_staleness": 4},
    "in order, 8": {"generation_mode": "async", "max_staleness": 8},
    "ready, 4, wait": {"generation_mode": "async", "max_staleness": 4, "async_kwargs": {"order": "ready"}},
    "ready, 8, wait": {"generation_mode": "async", "max_staleness": 8, "async_kwargs": {"order": "ready"}},
    "ready, 8, drop": {
        "generation_mode": "async",
        "max_staleness": 8,
        "async_kwargs": {"order": "ready", "stale": "drop"},
    },
}
CURVES = ("sync", "in order, `max_staleness` 4", "ready, 8, wait", "ready, 8, drop")
PROMPTS = [f"{a}{b}" for a in "abcdefgh" for b in "12345678"]


@dataclass
class Run:
    """What became of a training."""

    name: str
    seed: int
    seconds: list[float] = field(default_factory=list)  # simulated, after each step
    rewards: list[float] = field(default_factory=list)  # expected reward of the first token, computed exactly
    staleness: list[float] = field(default_factory=list)  # mean age of the tokens of each step
    dropped: int = 0

    @property
    def time_to_target(self) -> float | None:
        """Simulated seconds until the expected reward has reached the target; None: it has not."""
        return next((s for s, reward in zip(self.seconds, self.rewards, strict=True) if reward >= TARGET), None)


class Servers:
    """A generator of simulated speed, and the clock."""

    def __init__(self, local: LocalGenerator, seed: int) -> None:
        self.local = local
        self.random = random.Random(seed)
        self.now = 0.0
        self.version = 0
        self.num_asked = 0
        self.running: list[Groups] = []

    def start(self, prompts: Any, sampling: Any, *, seeds: Any) -> Groups:
        completions = self.local.generate(prompts, sampling, seeds=seeds)
        ends = []
        for _ in prompts:
            seconds = min(self.random.paretovariate(SHAPE), LONGEST)
            ends.append(self.now + seconds / SPEEDS[self.num_asked % len(SPEEDS)])
            self.num_asked += 1
        groups = Groups(self, list(enumerate(completions)), ends)
        self.running.append(groups)
        return groups

    def wait(self) -> None:
        """Until the next group is finished."""
        ends = [groups.ends[number] for groups in self.running for number, _ in groups.left]
        self.now = max(self.now, min(ends))

    def sync(self, weights: Any, *, version: int) -> None:
        self.local.sync(weights, version=version)
        self.now += UPDATE * (version - self.version)
        self.version = version

    def invalidate(self) -> None:
        self.local.invalidate()

    def close(self) -> None:
        self.local.close()


@dataclass
class Groups:
    """Requested groups; a `Polled`."""

    servers: Servers
    left: list[tuple[int, list[Completion]]]
    ends: Sequence[float]
    longest_silence: float = 1e9
    is_stuck: bool = False

    def arrived(self) -> Iterator[tuple[int, list[Completion]]]:
        for group in [*self.left]:
            if self.ends[group[0]] <= self.servers.now:
                self.left.remove(group)
                yield group

    def as_completed(self) -> Iterator[tuple[int, list[Completion]]]:
        while self.left:
            self.servers.now = max(self.servers.now, min(self.ends[number] for number, _ in self.left))
            yield from self.arrived()

    def repeat_lost(self) -> None: ...

    def cancel(self) -> None: ...


def first_half(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """The share of tokens of the first half of the vocabulary."""
    return [fmean(float(token < 64) for token in ids) for ids in completion_ids]


class Measure(TrainerCallback):
    """Measures after each step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.trainer: GRPOTrainer | None = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        ids = torch.tensor([row["prompt_ids"] for row in self.trainer.train_dataset])
        with torch.no_grad():
            chances = self.trainer.policy(ids, use_cache=False).logits[:, -1].softmax(-1)
        self.run.rewards.append(round(float(chances[:, :64].sum(-1).mean()), 4))
        self.run.seconds.append(round(self.trainer.generator.now + UPDATE, 2))


def learn(name: str, seed: int, folder: Path) -> Run:
    """One training."""
    run = Run(name, seed)
    measure = Measure(run)
    args = GRPOConfig(
        output_dir=str(folder),
        use_vllm=True,
        seed=seed,
        max_steps=STEPS,
        per_device_train_batch_size=32,
        num_generations=4,
        max_completion_length=4,
        ignore_eos=True,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        beta=0.0,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        **RUNS[name],
    )
    rows = Dataset.from_dict({"prompt": PROMPTS})
    trainer = GRPOTrainer(
        tiny_model(seed=seed), first_half, args, rows, processing_class=tiny_tokenizer(), callbacks=[measure]
    )
    measure.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    servers = Servers(LocalGenerator(trainer.policy, tokenizer=trainer.processing_class), seed)
    trainer.generator = servers
    if trainer.prompts.pool is not None:
        trainer.prompts.pool._pause = servers.wait
    trainer.train()
    history = trainer.state.log_history
    run.staleness = [round(log["sample/staleness_mean"], 2) for log in history if "sample/staleness_mean" in log]
    run.dropped = int(sum(log.get("sample/groups_dropped", 0) for log in history))
    return run


def table(runs: Sequence[Run]) -> str:
    """A line for each mode: medians over the seeds, and ranges."""
    heads = [
        f"seconds to a reward of {TARGET}",
        f"seconds of {STEPS} steps",
        f"reward after {STEPS} steps",
        "mean staleness",
        "groups dropped",
    ]
    lines = [["mode", *heads], ["---"] * (len(heads) + 1)]
    for name in RUNS:
        own = [run for run in runs if run.name == name]
        times = [run.time_to_target for run in own]
        reached = [time for time in times if time is not None]
        cells = [
            _range(reached, 0) if len(reached) == len(own) else f"reached in {len(reached)} of {len(own)}",
            _range([run.seconds[-1] for run in own], 0),
            _range([run.rewards[-1] for run in own], 2),
            _range([fmean(run.staleness) for run in own], 1),
            _range([float(run.dropped) for run in own], 0),
        ]
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _range(values: Sequence[float], digits: int) -> str:
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def stored() -> list[Run]:
    """The measured runs."""
    return [Run(**run) for run in json.loads(RESULTS.read_text(encoding="utf-8"))]


def markdown() -> str:
    """What the docs show."""
    return table(stored())


def draw(runs: Sequence[Run]) -> None:
    """The learning curves of the first seed over simulated time."""
    shown = [run for run in runs if run.seed == 0 and run.name in CURVES]
    lines = [(run.name.replace("`", ""), list(zip(run.seconds, run.rewards, strict=True))) for run in shown]
    (FIGURES / "ready_first.svg").write_text(curves(lines, "expected reward over seconds:"), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Measure, or draw again what was measured; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    runs: list[Mapping[str, Any]] = []
    for seed in range(arguments.seeds):
        for name in RUNS:
            with tempfile.TemporaryDirectory(prefix="prefrl-bench-") as folder:
                run = learn(name, seed, Path(folder))
            print(name, seed, run.time_to_target, run.seconds[-1], run.rewards[-1], run.dropped, flush=True)
            runs.append(asdict(run))
            RESULTS.write_text(json.dumps(runs) + "\n", encoding="utf-8")
    draw(stored())
    print(markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
