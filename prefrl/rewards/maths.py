"""Rewards for answers that equal the solution as mathematics."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prefrl.errors import ConfigError
from prefrl.optional import require
from prefrl.rewards.base import completion_text
from prefrl.rewards.math_checker import MathChecker, Verdict

__all__ = [
    "MathReward",
    "ReasoningReward",
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "reasoning_accuracy_reward",
]

_checker = MathChecker(timeout=10.0, budget=60.0, num_workers=min(4, os.cpu_count() or 1))
atexit.register(_checker.close)


class MathReward:
    r"""1 if a completion's answer equals the solution as mathematics, 0 if not; None if the solution is unreadable.

    The answer is inside `\boxed{}`, or in LaTeX after words such as "the final answer is". A comparison that takes
    longer than 10 seconds is abandoned and scores 0. A batch gets 60 seconds: completions that have not been begun by
    then get None.

    Args:
        name: The name under which the reward is logged.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

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
        verdicts = self._verdicts([completion_text(completion) for completion in completions], solution)
        if log_extra is not None:
            log_extra("gold_parsed", [verdict.gold for verdict in verdicts])
            log_extra("answer_parsed", [verdict.answer for verdict in verdicts])
        if log_metric is not None and verdicts:
            unchecked = sum(not verdict.is_checked for verdict in verdicts)
            log_metric(f"{self.__name__}/unchecked_fraction", unchecked / len(verdicts))
        return [None if verdict.gold is None else float(verdict.is_correct) for verdict in verdicts]

    def _verdicts(self, texts: Sequence[str], solution: Sequence[str | float | None]) -> list[Verdict]:
        pairs = zip(texts, solution, strict=True)
        checked = iter(_checker.check([(text, str(gold)) for text, gold in pairs if gold is not None]))
        return [Verdict(None) if gold is None else next(checked) for gold in solution]


class ReasoningReward:
    """A `MathReward` for what follows the reasoning; 0 for a completion whose reasoning has no end.

    Args:
        reward: Scores the answers; its name is the name of both.
    """

    def __init__(self, reward: MathReward) -> None:
        self.__name__ = reward.__name__
        self.setup = reward.setup
        self._reward = reward

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        solution: Sequence[str | float | None],
        reasoning_delimiters: Sequence[str] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Score B completions.

        Args:
            completions: B texts or lists of messages.
            solution: B correct answers, in LaTeX or plain.
            reasoning_delimiters: Texts that end the reasoning. The answer follows the last occurrence of the first of
                them that a completion contains; None: of `</think>`.
            log_extra: See `MathReward`.
            log_metric: See `MathReward`.

        Raises:
            ConfigError: `reasoning_delimiters` is not a list of texts.
        """
        ends = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
        if isinstance(ends, str) or not ends or not all(isinstance(end, str) and end for end in ends):
            raise ConfigError(f"reasoning_delimiters={ends!r}: must be a list of texts, such as ['</think>']")
        # Without an end there is no answer to read, but the solution is still parsed.
        answers = [_after(completion_text(completion), ends) for completion in completions]
        return self._reward(answers, solution, log_extra, log_metric)


def _after(text: str, ends: Sequence[str]) -> str:
    """What follows the last occurrence of the first of some texts that is in `text`; nothing if none is."""
    return next((text.rpartition(end)[2] for end in ends if end in text), "")


accuracy_reward = MathReward("accuracy_reward")
reasoning_accuracy_reward = ReasoningReward(MathReward("reasoning_accuracy_reward"))


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
