"""Scoring functions that were written for verl, as rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from prefrl.errors import ConfigError, RewardError
from prefrl.rewards.base import completion_text

__all__ = ["ComputeScore", "is_compute_score"]

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def is_compute_score(function: Any) -> bool:
    """Whether a function takes the arguments of verl's `compute_score`, by their names."""
    try:
        names = inspect.signature(function).parameters
    except (ValueError, TypeError):
        return False
    return "solution_str" in names and "ground_truth" in names


class ComputeScore:
    """A reward from `compute_score(data_source, solution_str, ground_truth, extra_info)`, called for each completion.

    Args:
        function: Gets those of the four arguments that its signature names, or all with `**kwargs`: the columns
            `data_source` and `extra_info` (None if there is no such column), the text of the completion, and the
            column `ground_truth`, or the entry of this name in the column `reward_model`. It returns a number, or a
            mapping with the number as `score`, whose other entries become columns of the table of completions.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.func = function
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))
        parameters = inspect.signature(function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._names = [name for name in _ARGUMENTS if takes_all or name in parameters]

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        log_extra: Callable[[str, list[Any]], None],
        data_source: Sequence[Any] | None = None,
        extra_info: Sequence[Any] | None = None,
        ground_truth: Sequence[Any] | None = None,
        reward_model: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Score B completions.

        Raises:
            RewardError: A row has no ground truth, or a mapping that was returned has no `score`.
        """
        results = []
        truths = self._truths(reward_model) if ground_truth is None else ground_truth
        for row, (completion, truth) in enumerate(zip(completions, truths, strict=True)):
            given = {
                "data_source": None if data_source is None else data_source[row],
                "solution_str": completion_text(completion),
                "ground_truth": truth,
                "extra_info": None if extra_info is None else extra_info[row],
            }
            results.append(self.func(**{name: given[name] for name in self._names}))
        mappings = [result if isinstance(result, Mapping) else {"score": result} for result in results]
        for row, mapping in enumerate(mappings):
            if "score" not in mapping:
                raise RewardError(
                    f"reward {self.__name__!r}, row {row}: returned {dict(mapping)!r}; it needs the key 'score'"
                )
        for name in sorted({str(key) for mapping in mappings for key in mapping} - {"score"}):
            log_extra(name, [mapping.get(name) for mapping in mappings])
        return [mapping["score"] for mapping in mappings]

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that a dataset says what is right.

        Raises:
            ConfigError: It does not.
        """
        if not {"ground_truth", "reward_model"} & {*columns}:
            raise ConfigError(
                f"reward {self.__name__!r} needs the column 'ground_truth', or 'reward_model' with entries of this "
                f"name. Columns: {[*columns]}. Rename one of them"
            )

    def _truths(self, reward_model: Sequence[Any] | None) -> list[Any]:
        for row, about in enumerate(reward_model or ()):
            if not isinstance(about, Mapping) or "ground_truth" not in about:
                raise RewardError(
                    f"reward {self.__name__!r}, row {row}: reward_model is {about!r}; it must be a mapping with the "
                    "key 'ground_truth', as in verl's files"
                )
        return [about["ground_truth"] for about in reward_model or ()]
