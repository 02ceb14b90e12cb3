"""Rewards for the text of a completion: tags, a letter that was asked for, length, repetition."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefrl.errors import ConfigError
from prefrl.rewards.base import completion_text

_THINK_ANSWER = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def tagged_answer(text: str) -> str:
    """What stands in the last `<answer>...</answer>` behind the reasoning; without these tags, all of that text."""
    said = text.rpartition("</think>")[2]
    marked: list[str] = _ANSWER.findall(said)
    return (marked[-1] if marked else said).strip()


def single_choice_reward(
    completions: Sequence[str | list[dict[str, Any]]], answer: Sequence[str | None], **_: Any
) -> list[float | None]:
    """1 if a completion chooses the right option of a multiple-choice question, such as "B"; 0 otherwise. None where
    `answer` is None.

    The completion's answer is the content of its last `<answer>...</answer>` after the reasoning, or without these
    tags all of that text. It has to be equal to the column `answer`, which may have these tags too, except for case
    and for white space around it.

    Source: the reward `single_choice` of cosmos-rl
    """
    return [
        None if right is None else float(_choice(completion_text(completion)) == _choice(str(right)))
        for completion, right in zip(completions, answer, strict=True)
    ]


def _choice(text: str) -> str:
    return tagged_answer(text).casefold()


def format_reward(completions: Sequence[str | list[dict[str, Any]]], **_: Any) -> list[float]:
    """1 for a completion of the form `<think>...</think><answer>...</answer>`, 0 otherwise.

    Each tag must occur exactly once, neither part may be empty, and only white space may be outside.
    """
    return [float(_is_think_answer(completion_text(completion))) for completion in completions]


def _is_think_answer(text: str) -> bool:
    match = _THINK_ANSWER.fullmatch(text)
    if match is None or len(_TAG.findall(text)) != 4:
        return False
    return all(part.strip() for part in match.groups())


def think_format_reward(completions: Sequence[str | list[dict[str, Any]]], **_: Any) -> list[float]:
    """1 for a completion that starts with its only `<think>` and closes it with `</think>`; 0 otherwise."""
    return [float(_is_think(completion_text(completion))) for completion in completions]


def _is_think(text: str) -> bool:
    return text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text


@dataclass(frozen=True, slots=True)
class _LengthReward:
    target_len: int

    @property
    def __name__(self) -> str:
        return "length_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [max(0.0, 1.0 - abs(len(ids) - self.target_len) / self.target_len) for ids in completion_ids]


def get_length_reward(target_len: int) -> _LengthReward:
    """A reward for a length close to a target: `max(0, 1 - |L - target_len| / target_len)`.

    Args:
        target_len: Target length in tokens.
    Raises:
        ConfigError: The target is not positive.
    Source: after the length term of LCPO-Exact, Aggarwal and Welleck 2025, arXiv 2503.04697; scaled to 0 .. 1
    """
    if target_len < 1:
        raise ConfigError(f"target_len={target_len}: needs to be >= 1, in tokens")
    return _LengthReward(target_len)


@dataclass(frozen=True, slots=True)
class _SoftOverlongPunishment:
    max_completion_len: int
    soft_punish_cache: int

    @property
    def __name__(self) -> str:
        return "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._punishment(len(ids)) for ids in completion_ids]

    def _punishment(self, length: int) -> float:
        expected = self.max_completion_len - self.soft_punish_cache
        if length <= expected:
            return 0.0
        if length > self.max_completion_len:
            return -1.0
        return (expected - length) / self.soft_punish_cache


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> _SoftOverlongPunishment:
    """A penalty that grows from 0 to -1 over the last `soft_punish_cache` tokens before `max_completion_len`.

    Args:
        max_completion_len: Number of tokens beyond which the penalty is -1. Set it to the config's
            `max_completion_length`.
        soft_punish_cache: Length of the ramp in tokens. At 0 there is no penalty up to the maximum.
    Raises:
        ConfigError: A length is out of range.
    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13
    """
    if max_completion_len < 1:
        raise ConfigError(f"max_completion_len={max_completion_len}: needs to be >= 1, in tokens")
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ConfigError(
            f"soft_punish_cache={soft_punish_cache}: needs to be in 0..{max_completion_len}, the max_completion_len"
        )
    return _SoftOverlongPunishment(max_completion_len, soft_punish_cache)


@dataclass(frozen=True, slots=True)
class _RepetitionPenalty:
    ngram_size: int
    max_penalty: float

    @property
    def __name__(self) -> str:
        return "repetition_penalty_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        ngrams = [tuple(ids[i : i + self.ngram_size]) for i in range(len(ids) - self.ngram_size + 1)]
        repeated = len(ngrams) - len(set(ngrams))
        return self.max_penalty * repeated / len(ngrams) if repeated else 0.0


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> _RepetitionPenalty:
    """A penalty for repeated n-grams of tokens: `max_penalty * (1 - distinct / all)`.

    Args:
        ngram_size: Number of tokens in an n-gram. Shorter completions are not penalized.
        max_penalty: The penalty that endless repetition approaches, at most 0.
    Raises:
        ConfigError: The size is not positive, or the penalty is not a finite number <= 0.
    Source: after Yeo et al. 2025, arXiv 2502.03373, appendix C.2
    """
    if ngram_size < 1:
        raise ConfigError(f"ngram_size={ngram_size}: needs to be >= 1")
    if not -math.inf < max_penalty <= 0:
        raise ConfigError(
            f"max_penalty={max_penalty}: must be a finite number <= 0, because a penalty is a negative reward"
        )
    return _RepetitionPenalty(ngram_size, max_penalty)
