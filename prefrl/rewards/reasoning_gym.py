"""Tasks of reasoning-gym: questions made by procedures, with a score for each answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets

from prefrl.errors import ConfigError, RewardError
from prefrl.optional import require
from prefrl.options.names import nearest
from prefrl.rewards.base import Grader, completion_text

__all__ = ["PREFIX", "ReasoningGym", "reasoning_gym_dataset"]

# A reward's name on the command line is this and the task.
PREFIX = "reasoning_gym:"
# Tasks whose score runs the answer as Python code, with `eval` or sympy's `parse_expr`.
_RUNS_ANSWERS = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)
_TUPLE = "__tuple__"


@dataclass(eq=False)
class ReasoningGym(Grader):
    """What a task of reasoning-gym scores an answer with, from 0 to 1.

    The answer is what stands in the last `<answer>...</answer>` of the completion behind its reasoning; without these
    tags, all of that text. An answer that the task cannot read scores 0. Rows need the columns `answer` and
    `metadata` of the task's entries, as `reasoning_gym_dataset` makes them; a row of another task gets None.

    Args:
        task: Name of the task, such as "chain_sum"; also the reward's name in logs.
    Raises:
        ConfigError: There is no such task, or it runs answers as code, which a model must not write here.
        ImportError: It needs `prefrl[reasoning-gym]`, which is not installed.
    Source: https://github.com/open-thought/reasoning-gym
    """

    task: str

    def __post_init__(self) -> None:
        check_task(self.task)
        if self.task in _RUNS_ANSWERS:
            raise ConfigError(
                f"{PREFIX}{self.task}: this task runs answers as Python code in the training process. Use another "
                "task, or write a reward that checks the answers without running them"
            )
        self._score = _factory().get_score_answer_fn(self.task)
        self._declare(self.task, {"completions", "answer", "metadata"})

    def __call__(
        self, completions: Sequence[Any], answer: Sequence[Any], metadata: Sequence[Any]
    ) -> list[float | None]:
        """Score B completions."""
        return [self._value(*row) for row in zip(completions, answer, metadata, strict=True)]

    def _value(self, completion: Any, answer: Any, metadata: Any) -> float | None:
        about = json.loads(metadata, object_hook=_with_tuples) if isinstance(metadata, str) else metadata
        if not isinstance(about, dict) or "source_dataset" not in about:
            raise RewardError(
                f"{PREFIX}{self.task}: column 'metadata' has {metadata!r}: needs the metadata of an entry of the "
                "task. Make the dataset with prefrl.rewards.reasoning_gym_dataset"
            )
        if about["source_dataset"] != self.task:
            return None
        try:
            return float(self._score(_answer(completion_text(completion)), {"answer": answer, "metadata": about}))
        except Exception:  # tasks differ in what they raise for an answer that is none
            return 0.0


def reasoning_gym_dataset(task: str, *, size: int, seed: int, **options: Any) -> datasets.Dataset:
    """Entries of a task, for `ReasoningGym`.

    Args:
        task: Name of the task, such as "chain_sum".
        size: Number of rows.
        seed: Decides which entries.
        **options: Of the task, such as `max_terms=3`.
    Returns:
        Rows with `prompt` (one message of the user), `answer`, and `metadata` (JSON).
    Raises:
        ConfigError: There is no such task, or an option is not valid.
        ImportError: It needs `prefrl[reasoning-gym]`, which is not installed.
    """
    check_task(task)
    try:
        entries = _factory().create_dataset(task, size=size, seed=seed, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"{PREFIX}{task} with {options}: {error}") from error
    return datasets.Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": entry["question"]}],
                "answer": entry["answer"],
                "metadata": json.dumps(_without_tuples(entry["metadata"]), default=str),
            }
            for entry in entries
        ]
    )


def check_task(task: str) -> None:
    """Check that there is such a task.

    Raises:
        ConfigError: There is none; names the nearest.
        ImportError: reasoning-gym is not installed.
    """
    known = _factory().DATASETS.keys() - {"composite"}  # made of others, so it has no default
    if task not in known:
        raise ConfigError(f"{PREFIX}{task}: is no task. {nearest(task, known)}")


def _factory() -> Any:
    return require("reasoning_gym", extra="reasoning-gym", feature="a reward of reasoning_gym").factory


def _answer(text: str) -> str:
    said = text.rpartition("</think>")[2]
    marked: list[str] = _ANSWER.findall(said)
    return (marked[-1] if marked else said).strip()


def _without_tuples(value: Any) -> Any:
    """The value with marked lists in the place of tuples, which JSON does not have and some tasks compare."""
    if isinstance(value, tuple):
        return {_TUPLE: [_without_tuples(one) for one in value]}
    if isinstance(value, list):
        return [_without_tuples(one) for one in value]
    return {key: _without_tuples(one) for key, one in value.items()} if isinstance(value, dict) else value


def _with_tuples(value: dict[str, Any]) -> Any:
    return tuple(value[_TUPLE]) if value.keys() == {_TUPLE} else value
