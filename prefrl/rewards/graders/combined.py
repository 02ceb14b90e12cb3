"""Graders made of others: one that combines several with a formula, and one that chooses by a column of the row."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from prefrl.errors import ConfigError, DataError, RewardError
from prefrl.options.names import nearest
from prefrl.rewards.base import Grader, RewardFunction, check_threshold
from prefrl.rewards.model import ModelReward
from prefrl.rewards.runner import RewardRunner, RewardScores

_Values: TypeAlias = Mapping[str, float]
_Node: TypeAlias = Callable[[_Values], float]

_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: Mapping[str, Callable[[list[float]], float]] = {
    "min": min,
    "max": max,
    "abs": lambda numbers: abs(numbers[0]),
}
_ALLOWED = "allowed are numbers, names of graders, + - * /, comparisons, min(), max(), abs() and parentheses"
_LONGEST = 2000
_MOST_NODES = 500


class Formula:
    """A formula such as `0.7 * correct + 0.3 * max(style, 0.2)`. A comparison is 1 if it holds, else 0.

    Args:
        text: The formula.
        names: Names that it may use.
    Raises:
        ConfigError: It has something else in it, or is too long or too deep.
    """

    def __init__(self, text: str, names: Collection[str]) -> None:
        self.text = text
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise ConfigError(f"formula={text!r:.100}: must be a text of at most {_LONGEST} characters")
        self._known = names
        self.names: set[str] = set()  # that it uses
        try:
            tree = ast.parse(text.strip(), mode="eval")
            if sum(1 for _ in ast.walk(tree)) > _MOST_NODES:  # a training's stack has less room than this one
                raise ValueError(f"it has more than {_MOST_NODES} parts")
            self._value = self._node(tree.body)
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"formula={text!r}: cannot be read: {error}; {_ALLOWED}") from error

    def value(self, values: _Values) -> float:
        """The value for given values of the names.

        Raises:
            ZeroDivisionError: It divides by 0.
        """
        return self._value(values)

    def _node(self, node: ast.expr) -> _Node:
        match node:
            case ast.Constant(value=int() | float() as value) if type(value) is not bool and math.isfinite(value):
                number = float(value)
                return lambda _: number
            case ast.Name(id=name):
                return self._name(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._node(operand)
                return lambda values: -inner(values)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._node(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                operation, first, second = _OPERATIONS[type(op)], self._node(left), self._node(right)
                return lambda values: operation(first(values), second(values))
            case ast.Compare(left=left, ops=ops, comparators=others) if {
                type(op) for op in ops
            } <= _COMPARISONS.keys():
                return self._comparison([left, *others], ops)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and args:
                return self._call(name, args)
        raise ConfigError(f"formula={self.text!r}: {ast.unparse(node)!r} is not allowed; {_ALLOWED}")

    def _name(self, name: str) -> _Node:
        if name not in self._known:
            raise ConfigError(
                f"formula={self.text!r}: {name!r} is not one of the graders. {nearest(name, self._known)}"
            )
        self.names.add(name)
        return lambda values: values[name]

    def _comparison(self, operands: list[ast.expr], ops: list[ast.cmpop]) -> _Node:
        terms = [self._node(operand) for operand in operands]
        compare = [_COMPARISONS[type(op)] for op in ops]

        def holds(values: _Values) -> float:
            numbers = [term(values) for term in terms]
            return float(all(f(a, b) for f, a, b in zip(compare, numbers, numbers[1:], strict=False)))

        return holds

    def _call(self, name: str, arguments: list[ast.expr]) -> _Node:
        if name == "abs" and len(arguments) != 1:
            raise ConfigError(f"formula={self.text!r}: abs() has {len(arguments)} arguments: it takes one")
        function, terms = _FUNCTIONS[name], [self._node(argument) for argument in arguments]
        return lambda values: function([term(values) for term in terms])


_Rewards = dict[str, list[float | None]]


@dataclass(eq=False)
class Combined(Grader):
    """One reward of several: a formula over their values, or a weighted sum.

    Rewards are called in their order. A gate spares the rewards after it: a row whose value is below the gate's
    threshold is not given to them, and they count as 0 there. Async rewards between two gates run concurrently.

    If a reward is None, so is the value of a formula that uses it. A weighted sum leaves such rewards out, and is None
    only if all of them are. A gate whose value is None is open.

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
            _check_part(f"{who}graders: {name!r}", grader)
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
        values: _Rewards = {name: [0.0] * count for name in self.graders}
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

    def _is_open(self, asked: Mapping[str, Any], values: _Rewards, row: int) -> bool:
        gates = {name: self._gates[name] for name in asked if name in self._gates}
        return all((value := values[name][row]) is None or value >= gate for name, gate in gates.items())

    def _total(self, values: _Rewards, row: int) -> float | None:
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


def _check_part(where: str, reward: object) -> None:
    if isinstance(reward, ModelReward | nn.Module) or not callable(reward):
        raise ConfigError(
            f"{where} is {reward!r:.100}: must be a function or a grader. Pass a reward model to the trainer as a "
            "separate reward"
        )


@dataclass(eq=False)
class BySource(Grader):
    """Scores each row with the reward of its data source.

    It logs the mean of each source as `<name>/<source>`.

    Args:
        rewards: Rewards by source: graders and functions, sync or async. None: rows of this source get no value.
            Models are refused, because all processes must call them together.
        column: The column that names the source of a row.
        default: The reward of all other sources; None: another source is an error.
        name: The grader's name in logs.
    Raises:
        ConfigError: A parameter is not valid, or a reward cannot work.
    """

    rewards: Mapping[str, RewardFunction | None]
    column: str = "data_source"
    default: RewardFunction | None = None
    name: str = "by_source"

    def __post_init__(self) -> None:
        who = f"grader {self.name!r}: "
        if not isinstance(self.rewards, Mapping) or not self.rewards:
            raise ConfigError(f"{who}rewards={self.rewards!r}: must be rewards by data source, at least one")
        named = {f"rewards[{source!r}]": reward for source, reward in self.rewards.items()}
        for where, reward in {**named, "default": self.default}.items():
            if reward is not None:
                _check_part(f"{who}{where}", reward)
        self._runners = {source: _runner(reward) for source, reward in self.rewards.items()}
        self._default = _runner(self.default)
        runners = [runner for runner in (*self._runners.values(), self._default) if runner is not None]
        required = {name for runner in runners for name in runner.required}
        given = {self.column, "prompts", "completions", "completion_ids"}
        self._declare(self.name, required | given, reads_all=True)

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
        """Grade B completions.

        Raises:
            DataError: There is no reward for the source of a row.
        """
        values: list[float | None] = [None] * len(completions)
        extra: dict[str, list[Any]] = {}
        for source, rows in self._by_source(columns[self.column]).items():
            runner = self._runners.get(source, self._default)
            if runner is None:
                continue
            scores = runner.score(
                _picked(prompts, rows),
                _picked(completions, rows),
                _picked(completion_ids, rows),
                {name: _picked(column, rows) for name, column in columns.items()},
                trainer_state=trainer_state,
            )
            (graded,) = scores.by_name.values()
            _place(values, rows, graded)
            for name, logged in scores.extra.items():
                _place(extra.setdefault(name, [None] * len(completions)), rows, logged)
            known = [value for value in graded if value is not None]
            own = {f"{self.name}/{source}": math.fsum(known) / len(known)} if known else {}
            if log_metric is not None:
                for metric, mean in (own | scores.metrics).items():
                    log_metric(metric, mean)
        if log_extra is not None:
            for name, logged in extra.items():
                log_extra(name, logged)
        return values

    def _by_source(self, sources: Sequence[Any]) -> dict[Any, list[int]]:
        """The rows of each source, in the order of their first rows."""
        found: dict[Any, list[int]] = {}
        for row, source in enumerate(sources):
            if not isinstance(source, str) or (source not in self._runners and self._default is None):
                raise DataError(
                    f"grader {self.name!r}, row {row}: column {self.column!r} is {source!r:.100}, for which there is "
                    f"no reward; there are some for {', '.join(map(repr, self._runners))}. Add it to rewards, with "
                    "None if its rows get no value, or set default"
                )
            found.setdefault(source, []).append(row)
        return found


def _runner(reward: RewardFunction | None) -> RewardRunner | None:
    return None if reward is None else RewardRunner(reward, timeout=None)


def _place(column: list[Any], rows: Sequence[int], values: Sequence[Any]) -> None:
    for row, value in zip(rows, values, strict=True):
        column[row] = value
