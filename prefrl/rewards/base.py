"""What rewards stand on: the protocol, the text that they read, what graders share, threads for many questions.

What reward functions return and what they log is checked here, too.
"""

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
from numbers import Real
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from prefrl.errors import ConfigError, RewardError


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
# One, several, or several with their weights.
RewardSources = RewardSource | list[RewardSource] | Mapping[RewardSource, float]


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
    if value is not None and not (is_number(value) and math.isfinite(value)):
        raise ConfigError(f"grader {who!r}: {parameter}={value!r}: must be a finite number or None")


def is_number(value: object) -> bool:
    """Whether a value is a number, which True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


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


# Rewards become float32 tensors.
_LARGEST = float(np.finfo(np.float32).max)
_ALLOWED = "allowed is a finite number (in float32) for each completion, or None if the reward does not apply to it"
_EXCERPT = 60


def checked_values(
    name: str, result: object, prompts: Sequence[Any], completions: Sequence[str | list[dict[str, Any]]]
) -> list[float | None]:
    """Convert the values that a reward function returned for B completions to floats.

    Lists, tuples, other sequences, and one-dimensional arrays and tensors are accepted. Values may be any real
    numbers, including those of NumPy, and zero-dimensional tensors. True is 1 and False is 0.

    Raises:
        RewardError: The result has another type or length, or a value is NaN, infinite or not a number.
    """
    values = _as_list(name, result)
    if len(values) != len(completions):
        raise RewardError(
            f"reward {name!r} returned {len(values)} values for {len(completions)} completions; {_ALLOWED}"
        )
    return [_as_float(name, row, v, prompts[row], completions[row]) for row, v in enumerate(values)]


def _as_list(name: str, result: object) -> list[Any]:
    if isinstance(result, torch.Tensor | np.ndarray):
        if result.ndim != 1:
            raise RewardError(
                f"reward {name!r} returned an array of shape {tuple(result.shape)}; {_ALLOWED}: shape [B]"
            )
        values: list[Any] = result.tolist()
        return values
    if isinstance(result, Sequence) and not isinstance(result, str | bytes | bytearray):
        return list(result)
    remedy = ""
    if inspect.iscoroutine(result):
        result.close()
        remedy = ". It was not awaited, because the function is not an `async def`: make it one"
    elif result is None:
        remedy = ". Is a `return` missing?"
    raise RewardError(f"reward {name!r} returned {_shown(result)}; {_ALLOWED}, in a list{remedy}")


def _as_float(name: str, row: int, value: object, prompt: Any, completion: str | list[dict[str, Any]]) -> float | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    if isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 308 digits
            number = math.inf
        if abs(number) <= _LARGEST:  # False for NaN
            return number
    raise RewardError(
        f"reward {name!r}, row {row}: returned {_shown(value)}; {_ALLOWED}. The completion is {excerpt(completion)}, "
        f"the prompt {excerpt(prompt)}"
    )


def excerpt(text: Any) -> str:
    """The beginning of a text, or of the last message, in quotes and with control characters escaped."""
    is_chat = isinstance(text, list) and bool(text) and isinstance(text[-1], Mapping)
    shown = str(text[-1].get("content") if is_chat else text or "")
    return repr(shown if len(shown) <= _EXCERPT else f"{shown[:_EXCERPT]}...")


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= _EXCERPT else text[:_EXCERPT] + '...'} ({type(value).__name__})"


# Metrics that online trainers log, by their name or by what stands before the first slash.
_METRICS = frozenset(
    {
        *("balance", "clip_cov", "clip_ratio", "completions", "divergence", "dynamic_sampling"),
        *("entropy", "entropy_coef", "epoch"),
        *(
            "frac_reward_zero_std",
            "frac_unscored",
            "grad_norm",
            "health",
            "kl",
            "kl_coef",
            "kl_cov",
            "learning_rate",
            "logits",
            "logps",
        ),
        *("loss", "mean_token_accuracy", "num_tokens", "perf", "policy_loss"),
        *("reward", "reward_balance", "reward_group_std", "reward_std", "rewards"),
        *("sample", "sampling", "server", "step", "step_time", "teacher_kl", "time", "val", "vespo"),
    }
)
# Columns of the table of completions.
_COLUMNS = frozenset(
    {
        *("step", "group", "rollout", "turn", "prompt", "completion", "prompt_ids", "completion_ids", "logprobs"),
        *("trainable", "finish_reason", "policy_version", "policy_versions", "reward", "greedy_reward", "advantage"),
    }
)


@dataclasses.dataclass(eq=False)
class RewardLog:
    """What reward functions log for B completions.

    Args:
        size: B.
        rewards: Names of the rewards.
    """

    size: int
    rewards: Collection[str]
    columns: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    values: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        """Log a number; several under one name are averaged.

        Raises:
            ConfigError: The trainer logs something under this name.
        """
        if name.partition("/")[0] in _METRICS:
            raise ConfigError(
                f"log_metric({name!r}): this name belongs to the trainer, as do all that start with "
                f"{name.partition('/')[0]}/. Choose another, such as {'my_' + name!r}"
            )
        self.values.setdefault(name, []).append(float(value))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column for the table of completions; a later one of the same name replaces it.

        Values that a column of one type cannot hold are logged as text.

        Raises:
            ConfigError: The table has such a column.
            RewardError: There are not B values.
        """
        if column in _COLUMNS or column in self.rewards:
            raise ConfigError(f"log_extra({column!r}): the table of completions has this column. Choose another name")
        if len(values) != self.size:
            raise RewardError(
                f"log_extra({column!r}): {len(values)} values for {self.size} completions; there must be one for each"
            )
        self.columns[column] = _of_one_type(list(values))


def _of_one_type(values: list[Any]) -> list[Any]:
    try:
        pa.array(values)
    except (pa.ArrowException, UnicodeError, OverflowError):  # UnicodeError: half of a surrogate pair
        return [None if v is None else str(v).encode("utf-8", "backslashreplace").decode() for v in values]
    return values
