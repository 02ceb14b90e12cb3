"""Rewards for answers that equal the solution as mathematics: math-verify with a deadline that is always kept."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefrl.errors import ConfigError, RewardError
from prefrl.optional import require
from prefrl.rewards.base import completion_text

__all__ = [
    "MathChecker",
    "MathReward",
    "Verdict",
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "reasoning_accuracy_reward",
]

logger = logging.getLogger(__name__)

MATH_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known about one completion. None means that it could not be parsed."""

    gold: str | None
    answer: str | None = None
    is_correct: bool = False
    is_checked: bool = True  # False: the deadline passed, or the checker died


class MathChecker:
    """A worker process that compares expressions; one that hangs is ended at the deadline and replaced.

    Args:
        timeout: Seconds for each completion.
    """

    def __init__(self, *, timeout: float) -> None:
        self.timeout = timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()

    def check(self, text: str, gold: str) -> Verdict:
        """Whether the answer in `text` equals `gold`.

        Raises:
            RewardError: The worker does not start.
            ImportError: math-verify is not installed.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            process.stdin.write(json.dumps({"text": text, "gold": gold}) + "\n")
            process.stdin.flush()
            read_gold = _read(process)
            if read_gold is None:
                return self._died(process, Verdict(None, is_checked=False))
            result = _read(process)
            if result is None:
                return self._died(process, Verdict(read_gold["gold"], is_checked=False))
            return Verdict(read_gold["gold"], result["answer"], result["is_correct"])

    def close(self) -> None:
        """End the worker."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[str]:
        is_ours = self._owner == os.getpid()  # a forked process must not talk to its parent's worker
        if self._process is not None and is_ours and self._process.poll() is None:
            return self._process
        require("math_verify", extra="math", feature="accuracy_reward")
        worker = Path(__file__).with_name("math_worker.py")
        # -P: this folder's modules must not hide others of the same name.
        command = [sys.executable, "-P", str(worker), str(self.timeout)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # it imports what we can import
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
        )
        if _read(process) is None:
            raise RewardError(
                f"accuracy_reward: the worker process ended with code {process.wait()} before its first task; its "
                f"error output is above. To reproduce the error, run: {' '.join(command)}"
            )
        self._process, self._owner = process, os.getpid()
        return process

    def _died(self, process: subprocess.Popen[str], verdict: Verdict) -> Verdict:
        process.communicate()
        self._process = None
        logger.warning(
            "accuracy_reward: %s was not parsed within %s s, or ended its worker process (code %s); the completion %s",
            "the solution" if verdict.gold is None else "an answer",
            self.timeout,
            process.returncode,
            "has no score" if verdict.gold is None else "scores 0",
        )
        return verdict


def _read(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    assert process.stdout is not None
    line = process.stdout.readline()
    message: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
    return message


_checker = MathChecker(timeout=MATH_TIMEOUT_S)
atexit.register(_checker.close)


class MathReward:
    r"""1 if a completion's answer equals the solution as mathematics, 0 if not; None if the solution is unreadable.

    The answer is inside `\boxed{}`, or in LaTeX after words such as "the final answer is". A comparison that takes
    longer than 10 seconds is abandoned and scores 0.

    Args:
        name: The name under which the reward is logged.
        after_reasoning: Read only what follows `</think>`; a completion without that tag scores 0.
    """

    def __init__(self, name: str, *, after_reasoning: bool) -> None:
        self.__name__ = name
        self.after_reasoning = after_reasoning

    def setup(self) -> None:
        """Fail before training starts rather than after the first generation.

        Raises:
            ImportError: math-verify is not installed.
        """
        require("math_verify", extra="math", feature=self.__name__)

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        solution: Sequence[str | float | None],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Score B completions.

        Args:
            completions: B texts or lists of messages.
            solution: B correct answers, in LaTeX or plain.
            log_extra: Gets the columns `gold_parsed` and `answer_parsed`.
            log_metric: Gets the share of completions that could not be checked in time.
        """
        verdicts = [self._verdict(completion_text(c), s) for c, s in zip(completions, solution, strict=True)]
        if log_extra is not None:
            log_extra("gold_parsed", [verdict.gold for verdict in verdicts])
            log_extra("answer_parsed", [verdict.answer for verdict in verdicts])
        if log_metric is not None and verdicts:
            unchecked = sum(not verdict.is_checked for verdict in verdicts)
            log_metric(f"{self.__name__}/unchecked_fraction", unchecked / len(verdicts))
        return [None if verdict.gold is None else float(verdict.is_correct) for verdict in verdicts]

    def _verdict(self, text: str, gold: str | float | None) -> Verdict:
        if gold is None:
            return Verdict(None)
        if self.after_reasoning:
            # Without the tag there is no answer to read, but the solution is still parsed.
            text = text.rpartition("</think>")[2] if "</think>" in text else ""
        return _checker.check(text, str(gold))


accuracy_reward = MathReward("accuracy_reward", after_reasoning=False)
reasoning_accuracy_reward = MathReward("reasoning_accuracy_reward", after_reasoning=True)


@dataclass(frozen=True, slots=True)
class _CosineScaledReward:
    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float

    @property
    def __name__(self) -> str:
        return "cosine_scaled_reward"

    def setup(self) -> None:
        accuracy_reward.setup()

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        solution: Sequence[str | float | None],
        completion_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[float | None]:
        correct = accuracy_reward(completions, solution)
        return [self._scaled(c, len(ids)) for c, ids in zip(correct, completion_ids, strict=True)]

    def _scaled(self, correct: float | None, length: int) -> float | None:
        if correct is None:
            return None
        shortest, longest = (
            (self.max_value_correct, self.min_value_correct)
            if correct
            else (self.min_value_wrong, self.max_value_wrong)
        )
        progress = min(length / self.max_len, 1.0)  # beyond 1, the cosine would rise again
        return longest + 0.5 * (shortest - longest) * (1.0 + math.cos(math.pi * progress))


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> _CosineScaledReward:
    """Short right answers get most, short wrong ones least: `r_L + (r_0 - r_L) (1 + cos(pi L / max_len)) / 2`.

    `accuracy_reward` decides what is right; its None stays None.

    Args:
        max_len: Number of tokens from which on the reward no longer changes.
        min_value_wrong: r_0 of a wrong answer.
        max_value_wrong: r_L of a wrong answer.
        min_value_correct: r_L of a right answer.
        max_value_correct: r_0 of a right answer.
    Raises:
        ConfigError: `max_len` is not positive, or a minimum is above its maximum.
    Source: Yeo et al. 2025, arXiv 2502.03373, appendix C.1
    """
    if max_len < 1:
        raise ConfigError(f"max_len={max_len}: needs to be >= 1, in tokens; use max_completion_length")
    for kind, low, high in (
        ("wrong", min_value_wrong, max_value_wrong),
        ("correct", min_value_correct, max_value_correct),
    ):
        if not low <= high:
            raise ConfigError(f"min_value_{kind}={low} is above max_value_{kind}={high}: swap them")
    return _CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)
