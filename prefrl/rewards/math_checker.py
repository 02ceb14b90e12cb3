"""Compares answers with math-verify in other processes, with deadlines that are always kept."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefrl.errors import RewardError, require
from prefrl.rewards.base import answer_all

logger = logging.getLogger(__name__)

# Seconds in which a worker has to start.
_START_S = 120.0
# A worker ends itself at its deadline. One that is stopped cannot, and is killed so many seconds later.
_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known about one completion. None means that it could not be parsed, or that nobody tried."""

    gold: str | None
    answer: str | None = None
    is_correct: bool = False
    is_checked: bool = True  # False: a deadline passed, or the checker died


class MathChecker:
    """Worker processes that compare expressions; one that hangs is ended at the deadline and replaced.

    Args:
        timeout: Seconds for each completion.
        budget: Seconds for all completions of a call. A completion that has not been begun by then is not checked.
        num_workers: The most processes.
    """

    def __init__(self, *, timeout: float, budget: float, num_workers: int) -> None:
        self.timeout = timeout
        self.budget = budget
        self.num_workers = num_workers
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()

    def check(self, questions: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Whether the answer in each pair of text and gold answer equals the gold answer.

        Raises:
            RewardError: A worker does not start.
            ImportError: math-verify is not installed.
        """
        answers = answer_all(
            questions, self._worker, budget=self.budget, num_threads=self.num_workers, name="math checker"
        )
        num_left = sum(answer is None for answer in answers)
        if num_left:
            logger.warning(
                "accuracy_reward: %d of %d completions were not checked within %s s and have no score",
                num_left,
                len(questions),
                self.budget,
            )
        return [Verdict(None, is_checked=False) if answer is None else answer for answer in answers]

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()

    @contextmanager
    def _worker(self) -> Iterator[Callable[[tuple[str, str]], Verdict]]:
        worker = self._take()
        try:
            worker.running()
            yield lambda question: worker.check(*question)
        finally:
            self._idle.append(worker)

    def _take(self) -> _Worker:
        with self._lock:
            if not self._idle:
                self._idle.append(_Worker(timeout=self.timeout))
                self._workers.append(self._idle[-1])
            return self._idle.pop()


class _Worker:
    """A process that answers one question at a time.

    Args:
        timeout: Seconds for each question.
    """

    def __init__(self, *, timeout: float) -> None:
        self.timeout = timeout
        self.process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()

    def check(self, text: str, gold: str) -> Verdict:
        """See `MathChecker.check`."""
        process = self.running()
        read_gold = result = None
        with _killed_after(self.timeout + _GRACE_S, process):
            if _write(process, {"text": text, "gold": gold}):
                read_gold = _read(process)
                result = _read(process) if read_gold else None
        if read_gold is None:
            return self._died(process, Verdict(None, is_checked=False))
        if result is None:
            return self._died(process, Verdict(read_gold["gold"], is_checked=False))
        return Verdict(read_gold["gold"], result["answer"], result["is_correct"])

    def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def running(self) -> subprocess.Popen[str]:
        """The process, which is started if it does not run.

        Raises:
            RewardError: It does not start.
            ImportError: math-verify is not installed.
        """
        is_ours = self._owner == os.getpid()  # a forked process must not talk to its parent's worker
        if self.process is not None and is_ours and self.process.poll() is None:
            return self.process
        require("math_verify", extra="math", feature="accuracy_reward")
        worker = Path(__file__).with_name("math_worker.py")
        # -P: this folder's modules must not hide others of the same name.
        command = [sys.executable, "-P", str(worker), str(self.timeout)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # it imports what we can import
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
        )
        with _killed_after(_START_S, process):
            is_ready = _read(process) is not None
        if not is_ready:
            raise RewardError(
                f"accuracy_reward: the worker process ended with code {process.wait()} before its first task; its "
                f"error output is above. To reproduce the error, run: {' '.join(command)}"
            )
        self.process, self._owner = process, os.getpid()
        return process

    def _died(self, process: subprocess.Popen[str], verdict: Verdict) -> Verdict:
        process.kill()
        process.communicate()
        self.process = None
        logger.warning(
            "accuracy_reward: %s was not parsed within %s s, or ended its worker process (code %s); the completion %s",
            "the solution" if verdict.gold is None else "an answer",
            self.timeout,
            process.returncode,
            "has no score" if verdict.gold is None else "scores 0",
        )
        return verdict


@contextmanager
def _killed_after(seconds: float, process: subprocess.Popen[str]) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write(process: subprocess.Popen[str], message: dict[str, str]) -> bool:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return False
    return True


def _read(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    assert process.stdout is not None
    line = process.stdout.readline()
    message: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
    return message
