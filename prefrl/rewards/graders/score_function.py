"""A grader that calls a function in the form of verl, `compute_score`, for each completion."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefrl.errors import RewardError
from prefrl.rewards.base import completion_text
from prefrl.rewards.grader import Grader

__all__ = ["ScoreFunction", "has_form_of_verl"]

_NOT_OF_ROWS = ("prompts", "completion_ids")  # what a runner passes besides columns, if a function takes all


def has_form_of_verl(function: object) -> bool:
    """Whether a reward is called with one answer and what is right, not with a batch."""
    if not inspect.isroutine(function):
        return False
    return {"solution_str", "ground_truth"} <= inspect.signature(function).parameters.keys()


@dataclass(eq=False)
class ScoreFunction(Grader):
    """The value that `compute_score(data_source, solution_str, ground_truth, extra_info)` returns for one completion.

    `solution_str` is the text of the completion. `ground_truth` is a column, or the entry of this name in the column
    `reward_model`, as in the datasets of verl. Other parameters are columns. A function may return a mapping: its
    `score` is the reward, and other numbers in it are logged.

    Args:
        function: The function; it is given by name what its signature names.
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._parameters = [p.name for p in names]
        optional = {p.name for p in names if p.default is not p.empty} | {"ground_truth", "reward_model", "extra_info"}
        required = {*self._parameters} - optional - {"solution_str"}
        needed = {*required, "completions", "log_metric"}
        self._declare(self.function.__name__, needed, sorted(optional), reads_all=self._takes_all)

    def __call__(
        self, completions: Sequence[Any], log_metric: Callable[[str, float], None], **columns: Sequence[Any] | None
    ) -> list[float | None]:
        """Score B completions.

        Raises:
            RewardError: There is no ground truth, or a mapping has no score.
        """
        given = {
            name: values for name, values in columns.items() if isinstance(values, list) and name not in _NOT_OF_ROWS
        }
        found = []
        for i, completion in enumerate(completions):
            row = {name: values[i] for name, values in given.items()}
            row["ground_truth"] = self._truth(row)
            row["solution_str"] = completion_text(completion)
            row.setdefault("extra_info", None)
            known = row if self._takes_all else {name: row[name] for name in self._parameters if name in row}
            found.append(self._value(self.function(**known), log_metric))
        return found

    def _truth(self, row: Mapping[str, Any]) -> Any:
        if "ground_truth" in row:
            return row["ground_truth"]
        wrapped = row.get("reward_model")
        if isinstance(wrapped, Mapping) and "ground_truth" in wrapped:
            return wrapped["ground_truth"]
        raise RewardError(
            f"reward {self.__name__!r} needs a column 'ground_truth', or 'reward_model' with an entry of this name; "
            f"columns: {sorted(row)}"
        )

    def _value(self, result: Any, log_metric: Callable[[str, float], None]) -> float | None:
        if not isinstance(result, Mapping):
            return result  # type: ignore[no-any-return]  # checked like the value of any reward
        if "score" not in result:
            raise RewardError(f"reward {self.__name__!r} returned {result!r:.200}: a mapping needs the entry 'score'")
        for name, value in result.items():
            if name != "score" and isinstance(value, bool | int | float):
                log_metric(f"{self.__name__}/{name}", float(value))
        return result["score"]  # type: ignore[no-any-return]  # checked like the value of any reward
