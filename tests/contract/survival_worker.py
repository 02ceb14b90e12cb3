"""Kills trainings at random moments and resumes them; run as a process of its own, because it forks.

    python -m tests.contract.survival_worker FOLDER NAME KILLS [NAME KILLS ...]

The last line is a JSON list: for each algorithm its kills, the hash of the weights of an undisturbed run, those of the
killed ones, and the steps that were scored or played although they were in the journal.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from prefrl.rollout.episodes.environment import Agent
from tests.contract import episodes
from tests.contract.cases import make_trainer, ragged_reward

STEPS = 7
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 3,
    "rows": 40,
    "logging_steps": 99,
}
SETTINGS |= {"optim": "adamw_torch", "learning_rate": 1e-2}
OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"steps_per_generation": 2, "num_iterations": 2, "beta": 0.1, "curriculum": "variance"},
    "ppo": {"steps_per_generation": 2},
    "rloo": {"talks": "agent", "turn_credit": "return", "max_steps": 4, "save_steps": 2},
}


class Killed(TrainerCallback):
    """Lets the kernel end this process some seconds after training has begun."""

    def __init__(self, after: float | None) -> None:
        self.after = after
        self.started = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        self.started = time.monotonic()
        if self.after is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self.after)


def start(work: Callable[[], None]) -> int:
    """Fork a process that does some work; its id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def forked(work: Callable[[], None]) -> int:
    """The exit status of a fork that does some work; negative: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(start(work), 0)[1])


def train(name: str, folder: Path, after: float | None) -> int:
    """Train in a fork, and write the hash of the final weights."""

    def work() -> None:
        options = dict(OPTIONS.get(name, {}))
        if name in OPTIONS:

            def note(state: Any) -> None:
                with (folder / "scored").open("a") as file:
                    file.write(f"{state.global_step}\n")

            def reward(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
                note(trainer_state)
                return ragged_reward(completions, **columns)

            async def agent(row: Any, client: Any) -> float:
                note(trainer.state)
                return await episodes.stray(row, client)

            options |= {"environment": Agent(agent)} if "talks" in options else {"reward": reward}
        trainer = make_trainer(name, folder, **SETTINGS | options)
        killed = Killed(after)
        trainer.add_callback(killed)
        trainer.train(resume_from_checkpoint=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
        (folder / "seconds").write_text(str(time.monotonic() - killed.started))
        digest = hashlib.sha256()
        for _, value in sorted(trainer.model.state_dict().items()):
            digest.update(value.numpy().tobytes())
        (folder / "hash").write_text(digest.hexdigest())

    return forked(work)


def scored(folder: Path) -> list[str]:
    """The steps whose completions have been scored, or whose agents have been run, so far."""
    return (folder / "scored").read_text().splitlines() if (folder / "scored").exists() else []


def sealed(folder: Path) -> set[str]:
    """The steps whose completions are in the journal."""
    return {str(int(path.stem.split("_")[1])) for path in (folder / "completions").glob("*.parquet")}


def survive(name: str, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill runs until there were enough kills, and let each run end."""
    rng = random.Random(seed)
    whole = folder / f"{name}-whole"
    whole.mkdir(parents=True)
    assert train(name, whole, None) == 0
    seconds = float((whole / "seconds").read_text())
    hashes, again, count, number = [], [], 0, 0
    while count < kills:
        run = folder / f"{name}-{number}"
        run.mkdir()
        number += 1
        status = -1
        while status != 0:
            before, known = len(scored(run)), sealed(run)
            status = train(name, run, rng.uniform(0, seconds) if count < kills else None)
            assert status in (0, -signal.SIGALRM), status
            count += status != 0
            again += [step for step in scored(run)[before:] if step in known]
        hashes.append((run / "hash").read_text())
    return {
        "name": name,
        "kills": count,
        "whole": (whole / "hash").read_text(),
        "killed": hashes,
        "scored_again": again,
    }


if __name__ == "__main__":
    gc.freeze()
    root = Path(sys.argv[1])
    pairs = list(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    with open(os.devnull, "w") as silent:
        sys.stdout, terminal = silent, sys.stdout
        results = [survive(name, root, int(kills), seed=i) for i, (name, kills) in enumerate(pairs)]
    sys.stdout = terminal
    print(json.dumps(results))
