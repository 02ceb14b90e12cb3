"""Rewards made of what was written for something else: judges that rank pairs, and scoring functions for verl."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from prefrl.errors import ConfigError, RewardError
from prefrl.rewards.base import RewardFunction, completion_text

__all__ = ["PairwiseJudge", "get_judge_reward", "ComputeScore", "is_compute_score"]


class PairwiseJudge(Protocol):
    """Says which of two completions of a prompt is better."""

    def __call__(self, prompts: Sequence[Any], pairs: Sequence[tuple[Any, Any]]) -> Sequence[int | None]:
        """For each prompt and its two completions: the index of the better one, 0 or 1, or None for neither."""
        ...


def get_judge_reward(judge: PairwiseJudge, *, num_generations: int) -> RewardFunction:
    """A reward: of the comparisons with the other completions of its prompt, the share that a completion wins.

    A comparison without a winner counts as half a win for both. All pairs of a prompt are judged in one call.

    Args:
        judge: Compares two completions.
        num_generations: Completions of each prompt, as in the config; at least 2.

    Raises:
        ConfigError: `num_generations` is below 2.
    """
    if num_generations < 2:
        raise ConfigError(f"num_generations={num_generations}: a judge compares at least 2 completions of a prompt")

    def judge_reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        if len(completions) % num_generations:
            raise RewardError(
                f"judge_reward got {len(completions)} completions: needs a multiple of num_generations="
                f"{num_generations}. Give it the config's num_generations, also for evaluation."
            )
        rows = [
            (start + first, start + second)
            for start in range(0, len(completions), num_generations)
            for first, second in itertools.combinations(range(num_generations), 2)
        ]
        verdicts = judge(
            [prompts[first] for first, _ in rows],
            [(completions[first], completions[second]) for first, second in rows],
        )
        if len(verdicts) != len(rows):
            raise RewardError(f"the judge gave {len(verdicts)} verdicts on {len(rows)} pairs: needs one for each")
        wins = [0.0] * len(completions)
        for (first, second), verdict in zip(rows, verdicts, strict=True):
            if verdict not in (0, 1, None):
                raise RewardError(
                    f"the judge's verdict on rows {first} and {second} is {verdict!r}: needs 0, 1 or None"
                )
            share = 0.5 if verdict is None else 1.0 - verdict
            wins[first] += share
            wins[second] += 1.0 - share
        return [won / (num_generations - 1) for won in wins]

    return judge_reward


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
