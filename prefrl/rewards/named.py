"""Rewards by name, as the command line and configs give them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.suggest import nearest
from prefrl.rewards.answers import numeric_reward
from prefrl.rewards.base import RewardFunction
from prefrl.rewards.format import format_reward, get_repetition_penalty_reward, think_format_reward
from prefrl.rewards.graders.combined import Combined
from prefrl.rewards.graders.models import LabelModel, ScoreModel
from prefrl.rewards.graders.python import PythonGrader
from prefrl.rewards.graders.texts import StringCheck, TextSimilarity
from prefrl.rewards.maths import accuracy_reward, reasoning_accuracy_reward
from prefrl.rewards.reasoning_gym import PREFIX, ReasoningGym

__all__ = ["GRADERS", "REWARD_FUNCTIONS", "reward_by_name"]

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
}


def reward_by_name(name: str) -> RewardFunction:
    """The reward that an entry of `reward_funcs` names.

    Args:
        name: A name of `REWARD_FUNCTIONS`; `module:function`, `module.function` or `folder/file.py:function`;
            `reasoning_gym:task`; or a grader with its parameters, `string_check(reference='{answer}')`, whose values
            are texts, numbers, lists, mappings, and for rewards such entries as this one. It is read, never run.
    Raises:
        ConfigError: There is no such reward, or a parameter is not valid.
    """
    if name in REWARD_FUNCTIONS:
        return REWARD_FUNCTIONS[name]
    if "(" in name:
        return _from_call(name)
    if name.startswith(PREFIX):
        return ReasoningGym(name.removeprefix(PREFIX))
    if name.endswith(".py"):
        raise ConfigError(f"reward_funcs={name!r}: is a file. Name a function in it: {name}:FUNCTION")
    if ":" not in name and "." not in name:
        remedy = nearest(name, [*REWARD_FUNCTIONS, *GRADERS])
        if name in GRADERS:
            remedy = f"The grader {name} needs its parameters: {name}(...)"
        raise ConfigError(f"reward_funcs={name!r}: is neither a built-in reward nor module:function. {remedy}")
    reward = _imported(name)
    if not callable(reward):
        raise ConfigError(f"reward_funcs={name!r}: is a {type(reward).__name__}; a reward is a function")
    return reward  # type: ignore[no-any-return]  # callable, checked above


def _imported(name: str) -> Any:
    place, _, function = name.rpartition(":" if ":" in name else ".")
    sys.path.insert(0, "")  # unlike python -m, the command does not search the working directory
    try:
        module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, AttributeError, ValueError, OSError, TypeError) as error:
        raise ConfigError(
            f"reward_funcs={name!r}: cannot be imported: {error}. Write module:function or folder/file.py:function"
        ) from error
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
    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"reward_funcs={text!r}: cannot be read: {error}. {_example()}") from error
    if not isinstance(expression, ast.Call):
        raise ConfigError(f"reward_funcs={text!r}: is no grader with parameters. {_example()}")
    return _grader(expression, text)


def _grader(call: ast.Call, text: str) -> RewardFunction:
    name = ast.unparse(call.func)
    if name not in GRADERS:
        raise ConfigError(f"reward_funcs={text!r}: {name!r} is no grader. {nearest(name, GRADERS)}")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ConfigError(f"reward_funcs={text!r}: parameters of {name} are given by name. {_example()}")
    parameters = {str(keyword.arg): _value(keyword.value, text) for keyword in call.keywords}
    if name == "python" and isinstance(parameters.get("function"), str):
        parameters["function"] = reward_by_name(parameters["function"])
    if name == "combined" and isinstance(parameters.get("graders"), dict):
        graders = parameters["graders"].items()
        parameters["graders"] = {key: reward_by_name(g) if isinstance(g, str) else g for key, g in graders}
    try:
        return GRADERS[name](**parameters)
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
            return _grader(node, text)
        case ast.Name(id=name) if name in REWARD_FUNCTIONS:
            return REWARD_FUNCTIONS[name]
    raise ConfigError(
        f"reward_funcs={text!r}: {ast.unparse(node)!r} is not allowed. Values are texts in quotes, numbers, lists, "
        "mappings, built-in rewards and graders"
    )


def _example() -> str:
    return "Write string_check(reference='{answer}', operation='like')"
