"""Graders that ask a model: for a label, for a score, or which of two completions is better."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prefrl.errors import ConfigError
from prefrl.rewards.base import Grader, check_threshold, completion_text, passed
from prefrl.rewards.graders.endpoint import ChatModel, Messages, Template, fill_rows, joined_prompt

T = TypeVar("T")
_LogMetric = Callable[[str, float], None]
# What models put around a label or a number.
_BEFORE, _AFTER = "*_`\"'#[({<$ ", "*_`\"'.,;!])}>$ "
_SCORE = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?))?")


class _Conversation:
    """Messages with fields.

    Args:
        given: A template of a user's message, or messages whose contents are templates.
        where: The grader and the parameter, for messages.
        ending: Added to the last message.
        fields: See `Template`.
        graded: Fields of which it must have all.
    """

    def __init__(
        self,
        given: str | Sequence[Mapping[str, str]],
        *,
        where: str,
        ending: str,
        fields: Sequence[str] | None = None,
        graded: Sequence[str] = ("completion",),
    ) -> None:
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        is_list = isinstance(messages, Sequence) and len(messages) > 0
        if not is_list or not all(isinstance(m, Mapping) and m.keys() == {"role", "content"} for m in messages):
            raise ConfigError(f"{where}={given!r:.200}: must be a text, or messages with role and content")
        self._roles = [message["role"] for message in messages]
        self.templates = [Template(message["content"], where=where, fields=fields) for message in messages]
        self._ending = ending
        self.fields = frozenset[str]().union(*(template.fields for template in self.templates))
        if missing := [name for name in graded if name not in self.fields]:
            raise ConfigError(f"{where}: {{{missing[0]}}} is missing: the model would not see what it grades")

    def messages(self, values: Mapping[str, str]) -> Messages:
        """The messages with values for their fields."""
        contents = [template.fill(values) for template in self.templates]
        contents[-1] += self._ending
        # Half of a surrogate pair, as a dataset may have, cannot be sent.
        sent = [content.encode("utf-8", "replace").decode() for content in contents]
        return [{"role": role, "content": content} for role, content in zip(self._roles, sent, strict=True)]


@dataclass(kw_only=True, eq=False)
class _ModelGrader(ChatModel, Grader):
    _operational = frozenset({"base_url", "api_key_env", "retries", "timeout", "max_concurrency"})

    input: str | Sequence[Mapping[str, str]]

    def _prepare(self, *, expected: str, ending: str) -> None:
        self._check_endpoint()
        self._expected = expected
        self._conversation = _Conversation(self.input, where=f"grader {self.name!r}: input", ending=f"\n\n{ending}")
        fields = self._conversation.fields
        columns = fields - {"prompt", "completion"}
        self._declare(
            self.name, {"completions", *columns, *(["prompts"] if "prompt" in fields else [])}, ["log_metric"]
        )

    async def __call__(
        self,
        completions: Sequence[Any],
        prompts: Sequence[Any] | None = None,
        log_metric: _LogMetric | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Grade B completions; None where a column that the grader reads is None, or an answer cannot be read."""
        rows = fill_rows(self._conversation.templates, prompts, completions, columns)
        questions = [None if row is None else self._conversation.messages(row) for row in rows]
        replies = await asyncio.wrap_future(self._ask(questions, self._read, expected=self._expected))
        if log_metric is not None and questions:
            log_metric(f"{self.name}/unread_fraction", replies.num_unread / len(questions))
        return replies.values

    def _read(self, answer: str) -> float | None:
        raise NotImplementedError


@dataclass(kw_only=True, eq=False)
class LabelModel(_ModelGrader):
    """The value of the label that a model gives to a completion.

    The model is told to end its answer with a line that holds only a label; the case of letters, and markup and
    punctuation around it, do not matter. What it says before, and reasoning up to `</think>`, is skipped.

    Args:
        base_url: URL of the API, with its version: `http://localhost:8000/v1`. Requests go to `/chat/completions`.
        model: Name of the model on that server.
        input: The question, as a template of the user's message, or as messages with `role` and `content`. Fields are
            `{prompt}`, `{completion}` and columns of the dataset.
        labels: The labels with their values; or a list, with `passing_labels`.
        passing_labels: The labels of the list with value 1; the others are 0.
        api_key_env: Environment variable with the key. None means no key is sent. The key itself is not kept.
        sampling_params: More parameters of the request, such as `temperature`, `top_p`, `max_tokens` and `seed`.
        retries: How often a question is asked again, after an error of the server or an answer that cannot be read.
        timeout: Seconds for one request.
        max_concurrency: Maximum number of requests that a process has in flight at the same time.
        name: The grader's name in logs.
    Raises:
        ConfigError: A parameter is not valid, or the environment variable is not set.
        RewardError: The endpoint failed or refused, or none of its answers in a batch can be read.
    """

    labels: Mapping[str, float] | Sequence[str]
    passing_labels: Sequence[str] | None = None
    name: str = "label_model"

    def __post_init__(self) -> None:
        values = self._label_values()
        self._values = {_plain(label): value for label, value in values.items()}
        if len(values) < 2 or len(self._values) < len(values) or "" in self._values:
            raise ConfigError(
                f"grader {self.name!r}: labels={[*values]}: must be at least 2, which differ by more than case and "
                "punctuation"
            )
        listed = ", ".join(values)
        self._prepare(
            expected=f"a last line with one of the labels {listed}",
            ending=f"End your answer with a line that holds only one of these labels: {listed}",
        )

    def _label_values(self) -> dict[str, float]:
        who = f"grader {self.name!r}: "
        if isinstance(self.labels, str) or not all(isinstance(label, str) for label in self.labels):
            raise ConfigError(f"{who}labels={self.labels!r}: must be texts with values, or a list of texts")
        if isinstance(self.labels, Mapping):
            if self.passing_labels is not None:
                raise ConfigError(f"{who}passing_labels has no effect if labels have values. Leave it out")
            for label, value in self.labels.items():
                if value is None:
                    raise ConfigError(f"{who}labels[{label!r}]=None: must be a number")
                check_threshold(self.name, f"labels[{label!r}]", value)
            return {label: float(value) for label, value in self.labels.items()}
        passing = self.passing_labels
        if not passing or isinstance(passing, str) or not set(passing) < set(self.labels):
            raise ConfigError(f"{who}passing_labels={passing!r}: must be some but not all of {[*self.labels]}")
        return {label: float(label in passing) for label in self.labels}

    def _read(self, answer: str) -> float | None:
        return _first_known(answer, self._values)


@dataclass(kw_only=True, eq=False)
class ScoreModel(_ModelGrader):
    """The score that a model gives to a completion.

    The model is told to end its answer with a line that holds only a number; `7`, `**7.5**`, `Score: 7` and `7/10` on
    a scale up to 10 are read, and a number outside of the scale is not. What it says before, and reasoning up to
    `</think>`, is skipped.

    Args:
        base_url: URL of the API, with its version: `http://localhost:8000/v1`. Requests go to `/chat/completions`.
        model: Name of the model on that server.
        input: The question, as a template of the user's message, or as messages with `role` and `content`. Fields are
            `{prompt}`, `{completion}` and columns of the dataset.
        range: Lowest and highest score of the scale.
        pass_threshold: If given, the value is 1 if the score is at least this, and 0 otherwise. None means the value
            is the score.
        api_key_env: Environment variable with the key. None means no key is sent. The key itself is not kept.
        sampling_params: More parameters of the request, such as `temperature`, `top_p`, `max_tokens` and `seed`.
        retries: How often a question is asked again, after an error of the server or an answer that cannot be read.
        timeout: Seconds for one request.
        max_concurrency: Maximum number of requests that a process has in flight at the same time.
        name: The grader's name in logs.
    Raises:
        ConfigError: A parameter is not valid, or the environment variable is not set.
        RewardError: The endpoint failed or refused, or none of its answers in a batch can be read.
    """

    range: Sequence[float] = (0, 1)
    pass_threshold: float | None = None
    name: str = "score_model"

    def __post_init__(self) -> None:
        bounds = self.range
        is_pair = isinstance(bounds, Sequence) and not isinstance(bounds, str) and len(bounds) == 2
        if not is_pair or not all(isinstance(b, int | float) and math.isfinite(b) for b in bounds):
            raise ConfigError(f"grader {self.name!r}: range={bounds!r}: must be two finite numbers")
        self._low, self._high = bounds
        check_threshold(self.name, "pass_threshold", self.pass_threshold)
        if self._low >= self._high:
            raise ConfigError(f"grader {self.name!r}: range={bounds!r}: the first number must be below the second")
        if self.pass_threshold is not None and not self._low < self.pass_threshold <= self._high:
            raise ConfigError(
                f"grader {self.name!r}: pass_threshold={self.pass_threshold}: must be above {self._low} and at most "
                f"{self._high}, or all scores or none would pass"
            )
        scale = f"a number from {self._low:g} to {self._high:g}"
        self._prepare(
            expected=f"a last line with {scale}",
            ending=f"End your answer with a line that holds only {scale}.",
        )

    def _read(self, answer: str) -> float | None:
        for text in _candidates(answer):
            match = _SCORE.fullmatch(text.casefold())
            if match is None or (match[2] is not None and float(match[2]) != self._high):
                continue
            score = float(match[1])
            return passed(score, self.pass_threshold) if self._low <= score <= self._high else None
        return None


@dataclass(kw_only=True, eq=False)
class PairwiseModel(ChatModel):
    """A judge for `get_judge_reward`: a model says which of two completions is better.

    The model is told to end its answer with a line that holds only `first`, `second` or `tie`. Models favor one of the
    two places, so by default they are asked in both orders, and completions between which the verdict changes with the
    order are a tie.

    Args:
        base_url: URL of the API, with its version: `http://localhost:8000/v1`. Requests go to `/chat/completions`.
        model: Name of the model on that server.
        input: The question, as a template of the user's message, or as messages with `role` and `content`. Fields are
            `{prompt}`, `{first}` and `{second}`.
        both_orders: Whether to ask in both orders, which takes twice as many requests.
        api_key_env: Environment variable with the key. None means no key is sent. The key itself is not kept.
        sampling_params: More parameters of the request, such as `temperature`, `top_p`, `max_tokens` and `seed`.
        retries: How often a question is asked again, after an error of the server or an answer that cannot be read.
        timeout: Seconds for one request.
        max_concurrency: Maximum number of requests that a process has in flight at the same time.
        name: The judge's name in messages.
    Raises:
        ConfigError: A parameter is not valid, or the environment variable is not set.
        RewardError: The endpoint failed or refused, or none of its answers can be read.
    """

    input: str | Sequence[Mapping[str, str]]
    both_orders: bool = True
    name: str = "pairwise_model"

    def __post_init__(self) -> None:
        self._check_endpoint()
        self._conversation = _Conversation(
            self.input,
            where=f"grader {self.name!r}: input",
            ending="\n\nEnd your answer with a line that holds only one of these words: first, second, tie",
            fields=("prompt", "first", "second"),
            graded=("first", "second"),
        )

    def __call__(self, prompts: Sequence[Any], pairs: Sequence[tuple[Any, Any]]) -> list[int | None]:
        """For each pair the index of the better completion, or None for a tie and for answers that cannot be read."""
        questions = [self._question(p, a, b) for p, (a, b) in zip(prompts, pairs, strict=True)]
        if self.both_orders:
            questions += [self._question(p, b, a) for p, (a, b) in zip(prompts, pairs, strict=True)]
        future = self._ask(questions, _verdict, expected="a last line with first, second or tie")
        try:
            verdicts = future.result().values
        finally:
            future.cancel()  # if the wait was interrupted by a deadline
        if not self.both_orders:
            return [_index(verdict) for verdict in verdicts]
        swapped = {"first": "second", "second": "first"}
        return [
            _index(one) if one is not None and other is not None and swapped.get(other) == one else None
            for one, other in zip(verdicts[: len(pairs)], verdicts[len(pairs) :], strict=True)
        ]

    def _question(self, prompt: Any, first: Any, second: Any) -> Messages:
        texts = {"prompt": joined_prompt(prompt), "first": completion_text(first), "second": completion_text(second)}
        return self._conversation.messages(texts)


def _verdict(answer: str) -> str | None:
    return _first_known(answer, {word: word for word in ("first", "second", "tie")})


def _index(verdict: str | None) -> int | None:
    return {"first": 0, "second": 1}.get(verdict or "")


def _first_known(answer: str, known: Mapping[str, T]) -> T | None:
    return next((known[text] for text in map(_plain, _candidates(answer)) if text in known), None)


def _candidates(answer: str) -> list[str]:
    """The last line without markup around it, and if it has a colon, what follows that."""
    lines = [line for line in answer.rpartition("</think>")[2].splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return [_bare(last), _bare(last.rpartition(":")[2])]


def _bare(text: str) -> str:
    return text.strip().lstrip(_BEFORE).rstrip(_AFTER)


def _plain(text: str) -> str:
    return _bare(text).casefold()
