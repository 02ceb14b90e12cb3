"""Formulas over named values: read into a tree of known operations, never run as Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from prefrl.errors import ConfigError
from prefrl.options.suggest import nearest

__all__ = ["Formula"]

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
