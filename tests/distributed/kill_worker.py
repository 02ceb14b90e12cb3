"""Kills one of two processes at random moments and resumes: `kill_worker FOLDER BACKEND KILLS [BACKEND KILLS ...]`.

A process that has imported everything forks the pairs, as a launcher would start them. The last line is a JSON list:
for each backend its kills, the hash of an undisturbed run and those of the killed ones.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import transformers.integrations.deepspeed  # noqa: F401 - imported once, for all forks

from prefrl import distributed
from tests.contract.survival_worker import Killed, start
from tests.distributed.backends import enter
from tests.distributed.cases import ADAM, Case
from tests.distributed.worker import make, weights_of

REUSE = {"steps_per_generation": 2, "num_iterations": 2}
CASE = Case("grpo", {**ADAM, **REUSE, "beta": 0.04, "journal_tokens": True})
SAVING = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3, "rows": 40, "logging_steps": 99}
SECONDS_FOR_THE_OTHER = 180  # moments on a quiet machine; a process group's own time-out is 30 minutes


def train(backend: str, folder: Path, after: float | None) -> None:
    """Train on one of two processes, and write the hash of the final weights."""
    trainer = make("grpo", CASE, folder, **enter(backend, folder), **SAVING)
    killed = Killed(after)
    trainer.add_callback(killed)
    trainer.train(resume_from_checkpoint=True)
    signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.monotonic() - killed.started
    digest = hashlib.sha256()
    for _, value in sorted(weights_of(trainer).items()):
        digest.update(value.numpy().tobytes())
    if distributed.is_main():
        (folder / "done").write_text(json.dumps([digest.hexdigest(), seconds]))
    distributed.wait_for_all()


def pair(backend: str, folder: Path, victim: int | None, after: float) -> bool:
    """Run both processes. True: the victim was killed, and the other ended, too; False: both have done their work."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children, codes = {}, {}
    for rank in (0, 1):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        mine = after if rank == victim else None
        children[start(lambda mine=mine: train(backend, folder, mine))] = rank  # type: ignore[misc]
    child, status = os.wait()  # if both have ended by now, it may be the other one
    ended = time.monotonic()
    codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
    ((other, rank),) = children.items()
    while (waited := os.waitpid(other, os.WNOHANG))[0] == 0:
        if time.monotonic() - ended > SECONDS_FOR_THE_OTHER:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
            raise AssertionError(f"{backend}: process {rank} went on without the other")
        time.sleep(0.02)
    codes[rank] = os.waitstatus_to_exitcode(waited[1])
    is_killed = victim is not None and codes[victim] == -signal.SIGALRM
    assert is_killed or 0 in codes.values(), codes
    return is_killed


def survive(backend: str, root: Path, kills: int) -> dict[str, Any]:
    """Kill one process of runs until there were enough kills, and let each run end."""
    rng = random.Random(backend)
    results, count, number = [], 0, 0
    whole = root / f"{backend}-whole"
    whole.mkdir(parents=True)
    assert not pair(backend, whole, None, 0)
    expected, seconds = json.loads((whole / "done").read_text())
    while count < kills:
        folder = root / f"{backend}-{number}"
        folder.mkdir()
        number += 1
        while True:
            victim = rng.randrange(2) if count < kills else None
            if not pair(backend, folder, victim, rng.uniform(0, seconds)):
                break
            count += 1
        results.append(json.loads((folder / "done").read_text())[0])
    return {"backend": backend, "kills": kills, "whole": expected, "killed": results}


if __name__ == "__main__":
    gc.freeze()
    pairs = list(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    with open(os.devnull, "w") as silent:
        sys.stdout, terminal = silent, sys.stdout
        found = [survive(backend, Path(sys.argv[1]), int(kills)) for backend, kills in pairs]
    sys.stdout = terminal
    print(json.dumps(found))
