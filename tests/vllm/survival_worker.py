"""Kills trainings on a server at random moments and resumes them; run as a process of its own, because it forks.

    python -m tests.vllm.survival_worker '{"url": ..., "model_dir": ..., "folder": ..., "kills": 5}'

The last line is a JSON list: the hash of an undisturbed run, those of the killed ones, and the steps that were
generated although they were in the journal.
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.contract.survival_worker import Killed, forked, sealed
from tests.vllm.client import be_patient
from tests.vllm.test_training import online

SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "rows": 40, "logging_steps": 99}


def train(server: Any, folder: Path, after: float | None) -> int:
    """Train in a fork, and write the hash of the final weights."""

    def work() -> None:
        trainer = online(folder, server, **SAVING)
        start = trainer.generator.start

        def noted(*args: Any, **kwargs: Any) -> Any:
            with (folder / "asked").open("a") as file:
                file.write(f"{trainer.state.global_step}\n")
            return start(*args, **kwargs)

        trainer.generator.start = noted  # type: ignore[method-assign]
        killed = Killed(after)
        trainer.add_callback(killed)
        trainer.train(resume_from_checkpoint=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
        digest = hashlib.sha256()
        for _, value in sorted(trainer.policy.state_dict().items()):
            digest.update(value.numpy().tobytes())
        (folder / "done").write_text(json.dumps([digest.hexdigest(), time.monotonic() - killed.started]))
        trainer.end()

    return forked(work)


def asked(folder: Path) -> list[str]:
    """The steps for which completions have been requested so far."""
    return (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []


def main(server: Any, root: Path, kills: int) -> list[Any]:
    """Kill runs until there were enough kills, and let each run end."""
    rng = random.Random(5)
    whole = root / "whole"
    whole.mkdir(parents=True)
    assert train(server, whole, None) == 0
    expected, seconds = json.loads((whole / "done").read_text())
    hashes, again, count = [], [], 0
    while count < kills:
        run = root / f"killed-{len(hashes)}"
        run.mkdir()
        status = -1
        while status != 0:
            before, known = len(asked(run)), sealed(run)
            status = train(server, run, rng.uniform(0, seconds) if count < kills else None)
            assert status in (0, -signal.SIGALRM), status
            count += status != 0
            again += [step for step in asked(run)[before:] if step in known]
        hashes.append(json.loads((run / "done").read_text())[0])
    return [expected, hashes, again]


if __name__ == "__main__":
    gc.freeze()
    be_patient()
    job = json.loads(sys.argv[1])
    given = SimpleNamespace(url=job["url"], model_dir=Path(job["model_dir"]))
    with open(os.devnull, "w") as silent:
        sys.stdout, terminal = silent, sys.stdout
        result = main(given, Path(job["folder"]), job["kills"])
    sys.stdout = terminal
    print(json.dumps(result))
