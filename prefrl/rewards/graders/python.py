"""A grader that calls a function for each completion."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prefrl.errors import ConfigError
from prefrl.rewards.base import completion_text
from prefrl.rewards.call import is_async
from prefrl.rewards.grader import Grader
from prefrl.rewards.graders.template import check_column, prompt_text

__all__ = ["PythonGrader"]


@dataclass(eq=False)
class PythonGrader(Grader):
    """The value that a function returns for one completion: a number, a bool, or None if it does not apply.

    A function of whole batches is a reward already and needs no grader.

    Args:
        function: `f(completion, ...)`. It is given by name what its signature names: `prompt` and `completion`, as
            texts, and columns of the dataset. A parameter with a default is left alone if there is no such column.
        name: The grader's name in logs; None: the function's.
    Raises:
        ConfigError: The function cannot be called like this.
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
            values["prompt"] = prompt_text(prompts[i])
        return values
