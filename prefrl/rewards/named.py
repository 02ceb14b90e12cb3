"""Rewards by name, as the command line and configs give them."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from prefrl.errors import ConfigError
from prefrl.options.names import nearest
from prefrl.rewards.base import RewardFunction
from prefrl.rewards.format import (
    format_reward,
    get_length_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    think_format_reward,
)
from prefrl.rewards.graders.combined import Combined
from prefrl.rewards.graders.models import LabelModel, ScoreModel
from prefrl.rewards.graders.plain import PythonGrader, StringCheck, TextSimilarity
from prefrl.rewards.maths import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_numeric_reward,
    numeric_reward,
    reasoning_accuracy_reward,
)
from prefrl.rewards.reasoning_gym import PREFIX, ReasoningGym

__all__ = ["GRADERS", "REWARD_FUNCTIONS", "reward_by_name"]

_WAYS = "module:function, module.function or folder/file.py:function"

# Rewards that the command line knows by name, because they need no arguments.
REWARD_FUNCTIONS: Mapping[str, RewardFunction] = {
    "numeric_reward": numeric_reward,
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "format_reward": format_reward,
    "think_format_reward": think_format_reward,
    "repetition_penalty_reward": get_repetition_penalty_reward(),
}
# Rewards with parameters: `string_check(reference='{answer}')`.
GRADERS: Mapping[str, Callable[..., RewardFunction]] = {
    "string_check": StringCheck,
    "text_similarity": TextSimilarity,
    "label_model": LabelModel,
    "score_model": ScoreModel,
    "python": PythonGrader,
    "combined": Combined,
    "numeric_reward": get_numeric_reward,
    "length_reward": get_length_reward,
    "soft_overlong_punishment_reward": get_soft_overlong_punishment,
    "repetition_penalty_reward": get_repetition_penalty_reward,
    "cosine_scaled_reward": get_cosine_scaled_reward,
}
# What every reward is given besides the columns, so no parameter of an entry.
_GIVEN = ("prompts", "completions", "completion_ids")


def reward_by_name(name: str) -> RewardFunction:
    """The reward that an entry of `reward_funcs` names.

    Args:
        name: A name of `REWARD_FUNCTIONS`; `module:function`, `module.function` or `folder/file.py:function`, where a
            class is called without arguments to get the function; `reasoning_gym:task`. All but the last may be
            followed by parameters, and graders are: `string_check(reference='{answer}')`. Their values are texts,
            numbers, lists, mappings, and for rewards such entries as this one. They are read, never run as Python.
    Raises:
        ConfigError: There is no such reward, or a parameter is not valid.
    """
    if name in REWARD_FUNCTIONS:
        return REWARD_FUNCTIONS[name]
    if "(" in name:
        return _from_call(name)
    if name.startswith(PREFIX):
        return ReasoningGym(name.removeprefix(PREFIX))
    if name in GRADERS:
        raise ConfigError(f"reward_funcs={name!r}: the grader {name} needs its parameters: {name}(...)")
    return _made(name, {}, name)


def _made(name: str, parameters: dict[str, Any], text: str) -> RewardFunction:
    """A reward that is no grader, with parameters besides those that every reward is given."""
    function = REWARD_FUNCTIONS.get(name) or _imported(name)
    if not callable(function):
        raise ConfigError(f"reward_funcs={text!r}: is a {type(function).__name__}; a reward is a function")
    if inspect.isclass(function):
        return _called(cast("Callable[..., RewardFunction]", function), parameters, text)
    known = [parameter for parameter in inspect.signature(function).parameters if parameter not in _GIVEN]
    for parameter in parameters:
        if parameter not in known:
            raise ConfigError(
                f"reward_funcs={text!r}: {name} has no parameter {parameter!r}. {nearest(parameter, known)}"
            )
    return functools.partial(function, **parameters) if parameters else function


def _imported(name: str) -> Any:
    separator = ":" if ":" in name else "."
    place, _, function = name.rpartition(separator)
    if not place or name.endswith(".py"):
        remedy = nearest(name, {*REWARD_FUNCTIONS, *GRADERS})
        raise ConfigError(f"reward_funcs={name!r}: is neither a built-in reward nor {_WAYS}. {remedy}")
    sys.path.insert(0, "")  # unlike python -m, the command does not search the working directory
    try:
        module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, AttributeError, ValueError, OSError, TypeError) as error:
        raise ConfigError(f"reward_funcs={name!r}: cannot be imported: {error}. Write {_WAYS}") from error
    finally:
        sys.path.remove("")
    if not hasattr(module, function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"reward_funcs={name!r}: {place} has no {function!r}. {nearest(function, known)}")
    return getattr(module, function)


def _file(path: Path) -> ModuleType:
    """The module in a file, imported once."""
    name = f"prefrl_rewards_of_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path.resolve()):
        return known
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    spec.loader.exec_module(module)
    return module


def _from_call(text: str) -> RewardFunction:
    name, _, parameters = text.strip().partition("(")
    try:  # the name may be that of a file, which is no Python
        expression = ast.parse(f"reward({parameters}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"reward_funcs={text!r}: cannot be read: {error}. {_example()}") from error
    if not name or not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name):
        raise ConfigError(f"reward_funcs={text!r}: is not a reward with parameters. {_example()}")
    return _with_parameters(name, expression, text)


def _with_parameters(name: str, call: ast.Call, text: str) -> RewardFunction:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ConfigError(f"reward_funcs={text!r}: parameters of {name} must be given by name. {_example()}")
    parameters = {str(keyword.arg): _value(keyword.value, text) for keyword in call.keywords}
    if name not in GRADERS:
        return _made(name, parameters, text)
    if name == "python" and isinstance(parameters.get("function"), str):
        parameters["function"] = reward_by_name(parameters["function"])
    if name == "combined" and isinstance(parameters.get("graders"), dict):
        graders = parameters["graders"].items()
        parameters["graders"] = {key: reward_by_name(g) if isinstance(g, str) else g for key, g in graders}
    return _called(GRADERS[name], parameters, text)


def _called(make: Callable[..., RewardFunction], parameters: dict[str, Any], text: str) -> RewardFunction:
    try:
        return make(**parameters)
    except TypeError as error:  # a parameter that it does not have, or one that is missing
        raise ConfigError(f"reward_funcs={text!r}: {error}") from error


def _value(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if type(value) in (int, float):
            return -value  # type: ignore[operator]  # a number
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_value(entry, text) for entry in entries]
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            pairs = zip(keys, values, strict=True)
            return {_value(key, text): _value(value, text) for key, value in pairs if key is not None}
        case ast.Call():
            return _with_parameters(ast.unparse(node.func), node, text)
        case ast.Name(id=name) if name in REWARD_FUNCTIONS:
            return REWARD_FUNCTIONS[name]
    raise ConfigError(
        f"reward_funcs={text!r}: {ast.unparse(node)!r} is not allowed. Values are texts in quotes, numbers, lists, "
        "mappings, built-in rewards and graders"
    )


def _example() -> str:
    return "Write string_check(reference='{answer}', operation='like')"
