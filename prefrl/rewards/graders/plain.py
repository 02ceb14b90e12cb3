"""Graders that compute by themselves: comparisons of strings, their similarity, and functions in Python."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prefrl.errors import ConfigError, DataError, require
from prefrl.options.names import nearest
from prefrl.rewards.base import Grader, check_threshold, completion_text, passed
from prefrl.rewards.call import is_async
from prefrl.rewards.graders.endpoint import Template, check_column, fill_rows, joined_prompt

_Operation = Literal["eq", "ne", "like", "regex", "fuzzy"]
_DEFAULT_THRESHOLD = 0.9

# Name of the metric -> function in rapidfuzz.fuzz, from 0 to 100.
_SAME_NAMES = (
    *("ratio", "partial_ratio", "token_ratio", "token_sort_ratio", "token_set_ratio"),
    *("partial_token_ratio", "partial_token_sort_ratio", "partial_token_set_ratio"),
)
_METRICS = {name: name for name in _SAME_NAMES} | {"weighted_ratio": "WRatio"}


@dataclass(eq=False)
class _TextGrader(Grader):
    reference: str

    def _read_templates(self, text: str, name: str, ignore_case: bool) -> None:
        self._input = Template(text, where=f"grader {name!r}: input")
        self._reference = Template(self.reference, where=f"grader {name!r}: reference")
        if "completion" not in self._input.fields:
            raise ConfigError(f"grader {name!r}: input={text!r} does not contain {{completion}}: nothing is graded")
        self._ignores_case = ignore_case
        fields = self._input.fields | self._reference.fields
        columns = fields - {"prompt", "completion"}
        self._declare(name, {"completions", *columns, *(["prompts"] if "prompt" in fields else [])})

    def setup(self) -> None:
        """Check that what the grader needs is installed."""

    def __call__(
        self, completions: Sequence[Any], prompts: Sequence[Any] | None = None, **columns: Sequence[Any]
    ) -> list[float | None]:
        """Grade B completions; None where a column that the grader reads is None."""
        rows = fill_rows([self._input, self._reference], prompts, completions, columns)
        return [None if row is None else self._grade(row, i) for i, row in enumerate(rows)]

    def _grade(self, row: Mapping[str, str], i: int) -> float:
        raise NotImplementedError

    def _texts(self, row: Mapping[str, str]) -> tuple[str, str]:
        texts = (self._input.fill(row).strip(), self._reference.fill(row).strip())
        return (texts[0].casefold(), texts[1].casefold()) if self._ignores_case else texts


@dataclass(eq=False)
class StringCheck(_TextGrader):
    r"""1 if a text passes a check against a reference, else 0.

    `eq`: they are equal. `ne`: they differ. `like`: the text contains the reference. `regex`: the reference, a regular
    expression, is found in the text. `fuzzy`: their similarity reaches the threshold. White space around the texts is
    not compared, except by `regex`.

    Columns are inserted into a regular expression as literal text: `r"answer: {answer}\b"`. A reference that is one
    field, `"{pattern}"`, is a column of regular expressions.

    Args:
        reference: Template of the reference. Fields are `{prompt}`, `{completion}` and columns of the dataset.
        operation: The check.
        input: Template of the text that is checked.
        ignore_case: Whether to ignore case.
        threshold: Similarity threshold for `fuzzy`, as `ratio` of `TextSimilarity`. The default is 0.9.
        name: The grader's name in logs.
    Raises:
        ConfigError: A template, the operation, the regular expression or the threshold is not valid.
        DataError: A column holds a regular expression that is not valid.
        ImportError: `fuzzy` needs `prefrl[fuzzy]`, which is not installed.
    """

    operation: _Operation = "eq"
    input: str = "{completion}"
    ignore_case: bool = False
    threshold: float | None = None
    name: str = "string_check"

    def __post_init__(self) -> None:
        who = f"grader {self.name!r}: "
        if self.operation not in get_args(_Operation):
            remedy = (
                "Set operation='like' and ignore_case=True"
                if str(self.operation) == "ilike"
                else nearest(str(self.operation), get_args(_Operation))
            )
            raise ConfigError(f"{who}operation={self.operation!r}: is not one of {get_args(_Operation)}. {remedy}")
        if self.threshold is not None and self.operation != "fuzzy":
            raise ConfigError(f"{who}threshold has no effect with operation={self.operation!r}. Leave it out")
        check_threshold(self.name, "threshold", self.threshold)
        self._read_templates(self.input, self.name, self.ignore_case)
        if self.operation == "regex" and self._reference.only_field is None:
            try:
                self._pattern(dict.fromkeys(self._reference.fields, "x"))
            except re.error as error:
                raise ConfigError(
                    f"{who}reference={self.reference!r}: is not a valid regular expression: {error}"
                ) from error

    def setup(self) -> None:
        """Check that rapidfuzz is installed, if it is needed."""
        if self.operation == "fuzzy":
            _similarity("ratio", "", "", who=self.name)

    def _grade(self, row: Mapping[str, str], i: int) -> float:
        if self.operation == "regex":
            return float(self._found(row, i))
        text, reference = self._texts(row)
        if self.operation == "like":
            return float(reference in text)
        if self.operation == "fuzzy":
            threshold = _DEFAULT_THRESHOLD if self.threshold is None else self.threshold
            return passed(_similarity("ratio", text, reference, who=self.name), threshold)
        return float((text == reference) == (self.operation == "eq"))

    def _found(self, row: Mapping[str, str], i: int) -> bool:
        try:
            pattern = self._pattern(row)
        except re.error as error:
            raise DataError(
                f"grader {self.name!r}, row {i}: column {self._reference.only_field!r} is "
                f"{row[str(self._reference.only_field)]!r}, no regular expression: {error}"
            ) from error
        return pattern.search(self._input.fill(row)) is not None

    def _pattern(self, row: Mapping[str, str]) -> re.Pattern[str]:
        is_column = self._reference.only_field is not None
        values = row if is_column else {name: re.escape(value) for name, value in row.items()}
        return re.compile(self._reference.fill(values), re.IGNORECASE if self.ignore_case else 0)


@dataclass(eq=False)
class TextSimilarity(_TextGrader):
    """How similar a text is to a reference, from 0 to 1.

    The metrics are those of rapidfuzz, divided by 100: `ratio` is `1 - d / (m + n)`, where d insertions and deletions
    turn the m characters of one text into the n of the other; `partial_ratio` is that of the best matching part;
    `token_sort_ratio` and `token_set_ratio` compare sorted words and sets of words, `token_ratio` is the larger of
    them; `partial_token_*` are the same of the best matching part; `weighted_ratio` is a weighted maximum of all.
    White space around the texts is not compared.

    Args:
        reference: Template of the reference. Fields are `{prompt}`, `{completion}` and columns of the dataset.
        evaluation_metric: The metric.
        input: Template of the text that is compared.
        ignore_case: Whether to ignore case.
        pass_threshold: If given, the value is 1 if the similarity is at least this, and 0 otherwise.
        name: The grader's name in logs.
    Raises:
        ConfigError: A template, the metric or the threshold is not valid.
        ImportError: It needs `prefrl[fuzzy]`, which is not installed.
    Source: https://rapidfuzz.github.io/RapidFuzz/Usage/fuzz.html
    """

    evaluation_metric: str = "ratio"
    input: str = "{completion}"
    ignore_case: bool = False
    pass_threshold: float | None = None
    name: str = "text_similarity"

    def __post_init__(self) -> None:
        if self.evaluation_metric not in _METRICS:
            raise ConfigError(
                f"grader {self.name!r}: evaluation_metric={self.evaluation_metric!r}: is not one of {[*_METRICS]}. "
                f"{nearest(str(self.evaluation_metric), _METRICS)}"
            )
        check_threshold(self.name, "pass_threshold", self.pass_threshold)
        self._read_templates(self.input, self.name, self.ignore_case)

    def setup(self) -> None:
        """Check that rapidfuzz is installed."""
        _similarity("ratio", "", "", who=self.name)

    def _grade(self, row: Mapping[str, str], i: int) -> float:
        text, reference = self._texts(row)
        return passed(_similarity(self.evaluation_metric, text, reference, who=self.name), self.pass_threshold)


def _similarity(metric: str, text: str, reference: str, *, who: str) -> float:
    fuzz = require("rapidfuzz.fuzz", extra="fuzzy", feature=f"grader {who!r}")
    return float(getattr(fuzz, _METRICS[metric])(text, reference)) / 100.0


@dataclass(eq=False)
class PythonGrader(Grader):
    """The value that a function returns for one completion: a number, a bool, or None if it does not apply.

    A function of whole batches is a reward already and needs no grader.

    Args:
        function: `f(completion, ...)`. The function. It is called with the keyword arguments that its signature names:
            `prompt` and `completion`, as texts, and columns of the dataset. A parameter with a default is left alone
            if there is no such column.
        name: The grader's name in logs. None means the function's.
    Raises:
        ConfigError: The function cannot be called in this way.
    """

    function: Callable[..., float | None]
    name: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"function={self.function!r}: must be a function of one completion")
        name = self.name or getattr(self.function, "__name__", type(self.function).__name__)
        if is_async(self.function):
            raise ConfigError(
                f"grader {name!r}: an async function cannot be a grader. Make it a reward: async def f(completions, "
                "...)"
            )
        parameters = inspect.signature(self.function).parameters.values()
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if len(by_name) < len(parameters):
            raise ConfigError(
                f"grader {name!r}: the function must name its parameters, without *, ** and /: {list(parameters)}"
            )
        for parameter in by_name:
            check_column(parameter.name, f"grader {name!r}: the parameter {parameter.name}")
        self._parameters = [p.name for p in by_name]
        columns = [p for p in by_name if p.name not in ("prompt", "completion")]
        required = {p.name for p in columns if p.default is p.empty}
        has_prompt = "prompt" in self._parameters
        self._declare(
            str(name),
            required | {"completions"} | ({"prompts"} if has_prompt else set()),
            [p.name for p in columns if p.default is not p.empty],
        )

    def __call__(
        self, completions: Sequence[Any], prompts: Sequence[Any] | None = None, **columns: Sequence[Any]
    ) -> list[float | None]:
        """Grade B completions."""
        return [self.function(**self._arguments(i, completions, prompts, columns)) for i in range(len(completions))]

    def _arguments(
        self, i: int, completions: Sequence[Any], prompts: Sequence[Any] | None, columns: dict[str, Sequence[Any]]
    ) -> dict[str, Any]:
        values = {name: columns[name][i] for name in self._parameters if name in columns}
        if "completion" in self._parameters:
            values["completion"] = completion_text(completions[i])
        if "prompt" in self._parameters and prompts is not None:
            values["prompt"] = joined_prompt(prompts[i])
        return values
