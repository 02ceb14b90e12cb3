"""The launcher reports which process failed first, and a process that failed ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from prefrl.distributed.launcher import first_failure, words_of
from tests.patience import before_a_deadline

ROOT = Path(__file__).parents[3]


def failure(folder: Path, rank: int, exitcode: int, said: str | None = None, age: float = 0.0) -> ProcessFailure:
    """As torchrun makes it: with the error file of the process if it wrote one, `age` seconds ago."""
    path = folder / f"{rank}.json"
    if said is not None:
        information = {"py_callstack": "", "timestamp": "1"}
        path.write_text(json.dumps({"message": {"message": said, "extraInfo": information}}), encoding="utf-8")
        os.utime(path, (time.time() - age, time.time() - age))
    return ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file=str(path))


def test_of_two_errors_in_one_second_the_earlier_is_told(tmp_path: Path) -> None:
    failures = {
        0: failure(tmp_path, 0, 1, "RuntimeError: Connection closed by peer", age=0.1),
        1: failure(tmp_path, 1, 1, "ValueError: the cause", age=0.2),
        2: failure(tmp_path, 2, 1, "RuntimeError: Connection reset by peer", age=0.0),
    }
    rank, first = first_failure(failures)
    assert rank == 1
    assert words_of(first) == "ended with exit code 1; the others were ended, too. ValueError: the cause"


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (-signal.SIGKILL, "was ended by SIGKILL (often because memory ran out)"),
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (3, "ended with exit code 3"),
    ],
)
def test_a_process_that_could_not_say_why_comes_before_those_that_miss_it(
    tmp_path: Path, exitcode: int, words: str
) -> None:
    failures = {
        0: failure(tmp_path, 0, 1, "RuntimeError: Connection closed by peer"),
        1: failure(tmp_path, 1, -signal.SIGTERM),
        2: failure(tmp_path, 2, exitcode),
        3: failure(tmp_path, 3, -signal.SIGABRT),
    }
    rank, first = first_failure(failures)
    assert rank == 2
    assert words_of(first) == f"{words}; the others were ended, too."


def test_an_error_comes_before_a_process_group_that_gave_up(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 0, -signal.SIGABRT), 1: failure(tmp_path, 1, 1, "ValueError: the cause")}
    assert first_failure(failures)[0] == 1


WORKER = """
import os, sys, threading, time
from prefrl.distributed import launcher
launcher._LAST_SECONDS = float(sys.argv[1])
def fail():
    threading.Thread(target=time.sleep, args=(600,)).start()  # the interpreter would wait for it
    raise ValueError("the cause")
launcher.as_worker(fail)
"""


def test_a_worker_that_failed_leaves_its_error_and_ends_whatever_it_waits_for(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCHELASTIC_ERROR_FILE": str(path)}

    def attempt(seconds: float) -> str | None:
        command = [sys.executable, "-c", WORKER, str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 1
        error, timeout, _ = done.stderr.partition("Timeout (0:00:")
        assert timeout
        return error if error.rstrip().endswith("ValueError: the cause") else None  # it had no time to say so

    assert before_a_deadline(attempt).startswith("Traceback")
    assert json.loads(path.read_text(encoding="utf-8"))["message"]["message"] == "ValueError: the cause"
