"""What rewards stand on: the protocol, the text that they read, what graders share, threads for many questions."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, TypeVar

from torch import nn

from prefrl.errors import ConfigError

__all__ = [
    "RewardFunction",
    "RewardSource",
    "completion_text",
    "message_text",
    "Grader",
    "check_name",
    "check_threshold",
    "passed",
    "answer_all",
]


class RewardFunction(Protocol):
    """`f(prompts, completions, completion_ids, **columns)`: one number, or None, for each completion.

    All arguments are passed by name, and only those that the signature accepts. `prompts` and `completions` are B
    texts, or B lists of messages if the dataset is conversational; `completion_ids` are B lists of token ids. Any
    other name is a dataset column with B values, or one of `trainer_state`, `log_metric` and `log_extra`. None means
    that the reward does not apply to a row. An object may also have a method `setup()`, which is called once before
    training and raises if the reward cannot work.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[float | None] | Awaitable[Sequence[float | None]]:
        """Score B completions."""
        ...


# A function, or a sequence-classification model: its name, its folder or an instance.
RewardSource = RewardFunction | str | os.PathLike[str] | nn.Module


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion. If it is a list of messages, the text of the last assistant message.

    Args:
        completion: A text, or messages. If the content is a list of blocks, its text blocks are used.
    """
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return message_text(said[-1]) if said else ""


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message. If its content is a list of blocks, their texts; without content, nothing."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(block.get("text") or "" for block in content)
    return content or ""


@dataclasses.dataclass(eq=False)
class Grader:
    """A reward that is configured by parameters. `__name__` is what logs call it."""

    # Parameters that decide how values are obtained, not which.
    _operational: ClassVar[frozenset[str]] = frozenset()

    def settings(self) -> dict[str, Any]:
        """Its parameters, which decide its values."""
        names = [each.name for each in dataclasses.fields(self) if each.name not in self._operational]
        return {name: getattr(self, name) for name in names}

    def _declare(
        self, name: str, required: Collection[str], optional: Collection[str] = (), *, reads_all: bool = False
    ) -> None:
        """Set the name, and the signature by which a runner knows what to pass.

        Args:
            name: The grader's name.
            required: Arguments without default, such as columns.
            optional: Arguments with a default.
            reads_all: Whether it reads all other columns, too.
        """
        self.__name__ = check_name(name)
        parameters = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in sorted(required)]
        parameters += [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=None) for each in optional]
        if reads_all:
            parameters.append(inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD))
        self.__signature__ = inspect.Signature(parameters)


def check_name(name: str) -> str:
    """The name of a grader.

    Raises:
        ConfigError: It is empty or has a slash, which separates the parts of a metric's name.
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise ConfigError(f"name={name!r}: the name of a grader must be a text without '/'")
    return name


def check_threshold(who: str, parameter: str, value: float | None) -> None:
    """Check that a threshold is a number, or None.

    Raises:
        ConfigError: It is something else.
    """
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    ):
        raise ConfigError(f"grader {who!r}: {parameter}={value!r}: must be a finite number or None")


def passed(value: float, threshold: float | None) -> float:
    """The value; with a threshold: 1 if it is reached, else 0."""
    return value if threshold is None else float(value >= threshold)


Question = TypeVar("Question")
Answer = TypeVar("Answer")


def answer_all(
    questions: Sequence[Question],
    worker: Callable[[], AbstractContextManager[Callable[[Question], Answer]]],
    *,
    budget: float,
    num_threads: int,
    name: str,
) -> list[Answer | None]:
    """Answer questions concurrently, in their order; None for a question that nobody had begun in time.

    Args:
        questions: The questions.
        worker: Called in each thread; its context gives the function that answers. An answer has to end by itself.
        budget: Seconds for each thread, from the moment at which its worker is there.
        num_threads: The most threads.
        name: Of the threads.

    Raises:
        Exception: The first that a worker or an answer raised; no question is begun after it.
    """
    todo = deque(enumerate(questions))
    answers: list[Answer | None] = [None] * len(questions)
    errors: list[Exception] = []

    def work() -> None:
        try:
            with worker() as answer:
                ends = time.monotonic() + budget
                while time.monotonic() < ends:
                    try:
                        number, question = todo.popleft()
                    except IndexError:  # nothing to do
                        return
                    answers[number] = answer(question)
        except Exception as error:
            errors.append(error)
            todo.clear()

    threads = [threading.Thread(target=work, name=name, daemon=True) for _ in range(min(num_threads, len(questions)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        todo.clear()  # if the wait was interrupted, the workers end with what they are at
    if errors:
        raise errors[0]
    return answers
