"""Several graders as one reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from prefrl.errors import ConfigError, RewardError
from prefrl.options.suggest import nearest
from prefrl.rewards.base import RewardFunction
from prefrl.rewards.grader import Grader, check_threshold
from prefrl.rewards.graders.formula import Formula
from prefrl.rewards.model import ModelReward
from prefrl.rewards.runner import RewardRunner, RewardScores

__all__ = ["Combined"]

_Values = dict[str, list[float | None]]


@dataclass(eq=False)
class Combined(Grader):
    """One reward of several: a formula over their values, or a weighted sum.

    Rewards are asked in their order. A gate spares the rewards after it: a row whose value is below the gate's
    threshold is not given to them, and they count as 0 there. Async rewards between two gates run concurrently.

    None of a reward makes the value of a formula that uses it None. A weighted sum leaves it out and is None only if
    all are. A gate whose value is None is open.

    It logs the mean of each reward as `<name>/<reward>`, and after a gate the share of rows that the reward was asked
    for as `<name>/<reward>/asked_fraction`.

    Args:
        graders: Rewards by name: graders and functions, sync or async. Models are refused, because all processes must
            call them together.
        formula: See `Formula`; it must use every reward that is no gate.
        weights: Weight of each reward in the sum; None, also without a formula: 1 each.
        gates: Thresholds by reward.
        name: The grader's name in logs.
    Raises:
        ConfigError: A parameter is not valid, or a reward cannot work.
    """

    graders: Mapping[str, RewardFunction]
    formula: str | None = None
    weights: Mapping[str, float] | None = None
    gates: Mapping[str, float] | None = None
    name: str = "combined"

    def __post_init__(self) -> None:
        who = f"grader {self.name!r}: "
        if not isinstance(self.graders, Mapping) or not self.graders:
            raise ConfigError(f"{who}graders={self.graders!r}: must be rewards by name, at least one")
        for name, grader in self.graders.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigError(f"{who}graders: {name!r}: a name must be an identifier, such as 'correct'")
            if isinstance(grader, ModelReward | nn.Module) or not callable(grader):
                raise ConfigError(
                    f"{who}graders: {name!r} is {grader!r:.100}: must be a function or a grader. Pass a reward model "
                    "to the trainer as a separate reward"
                )
        self._gates = self._by_name("gates", self.gates)
        last = [*self.graders][-1]
        if last in self._gates:
            raise ConfigError(f"{who}gates: {last!r} is the last reward, so no other depends on its gate")
        if self.formula is not None and self.weights is not None:
            raise ConfigError(f"{who}formula and weights are both given. Set one of them")
        self._formula = None if self.formula is None else Formula(self.formula, self.graders)
        if self._formula is not None:
            unused = self.graders.keys() - self._formula.names - self._gates.keys()
            if unused:
                raise ConfigError(f"{who}formula={self.formula!r}: does not use {sorted(unused)}. Leave them out")
        self._weights = dict.fromkeys(self.graders, 1.0) | self._by_name("weights", self.weights)
        if self.weights is not None and self.weights.keys() != self.graders.keys():
            raise ConfigError(f"{who}weights={dict(self.weights)}: give one for each of {[*self.graders]}")
        self._stages = self._make_stages()
        required = {name for runner in self._stages for name in runner.required}
        self._declare(self.name, required | {"prompts", "completions", "completion_ids"}, reads_all=True)

    def _by_name(self, parameter: str, given: Mapping[str, float] | None) -> dict[str, float]:
        for name, value in (given or {}).items():
            if name not in self.graders:
                raise ConfigError(
                    f"grader {self.name!r}: {parameter}: {name!r} is not one of the graders. "
                    f"{nearest(str(name), self.graders)}"
                )
            if value is None:
                raise ConfigError(f"grader {self.name!r}: {parameter}[{name!r}]=None: must be a number")
            check_threshold(self.name, f"{parameter}[{name!r}]", value)
        return dict(given or {})

    def _make_stages(self) -> list[RewardRunner]:
        """Runners of the rewards that are asked together: a stage ends with a gate."""
        stages: list[dict[str, RewardFunction]] = [{}]
        for name, grader in self.graders.items():
            stages[-1][name] = grader
            if name in self._gates:
                stages.append({})
        return [RewardRunner(stage, timeout=None) for stage in stages]

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        trainer_state: object = None,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Grade B completions."""
        count = len(completions)
        values: _Values = {name: [0.0] * count for name in self.graders}
        rows = list(range(count))  # that are still asked
        for runner in self._stages:
            scores = runner.score(
                _picked(prompts, rows),
                _picked(completions, rows),
                _picked(completion_ids, rows),
                {name: _picked(column, rows) for name, column in columns.items()},
                trainer_state=trainer_state,
            )
            for name, graded in scores.by_name.items():
                for row, value in zip(rows, graded, strict=True):
                    values[name][row] = value
            if log_metric is not None:
                self._log(log_metric, scores, count)
            if log_extra is not None:
                for column, logged in scores.extra.items():
                    by_row = dict(zip(rows, logged, strict=True))
                    log_extra(column, [by_row.get(row) for row in range(count)])
            rows = [row for row in rows if self._is_open(scores.by_name, values, row)]
        return [self._total(values, row) for row in range(count)]

    def _log(self, log_metric: Callable[[str, float], None], scores: RewardScores, count: int) -> None:
        for name, graded in scores.by_name.items():
            known = [value for value in graded if value is not None]
            if known:
                log_metric(f"{self.name}/{name}", math.fsum(known) / len(known))
            if name not in self._stages[0].names:
                log_metric(f"{self.name}/{name}/asked_fraction", len(graded) / count)
        for metric, mean in scores.metrics.items():
            log_metric(metric, mean)

    def _is_open(self, asked: Mapping[str, Any], values: _Values, row: int) -> bool:
        gates = {name: self._gates[name] for name in asked if name in self._gates}
        return all((value := values[name][row]) is None or value >= gate for name, gate in gates.items())

    def _total(self, values: _Values, row: int) -> float | None:
        known = {name: value for name, column in values.items() if (value := column[row]) is not None}
        if self._formula is None:
            return math.fsum(self._weights[name] * value for name, value in known.items()) if known else None
        if not self._formula.names <= known.keys():
            return None
        try:
            return self._formula.value(known)
        except ZeroDivisionError as error:
            used = {name: known[name] for name in sorted(self._formula.names)}
            raise RewardError(
                f"grader {self.name!r}, row {row}: formula={self.formula!r} divides by 0 with {used}. Add a bound, "
                "such as max(x, 0.01)"
            ) from error


def _picked(values: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    return [values[row] for row in rows]
