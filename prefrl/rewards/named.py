"""Rewards by name, as the command line and configs give them.

Tasks of reasoning-gym are questions made by procedures, with a score for each answer.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar, cast

from prefrl.errors import ConfigError, RewardError, require
from prefrl.options.names import imported, nearest
from prefrl.rewards.base import Grader, RewardFunction, completion_text, is_number
from prefrl.rewards.format import (
    format_reward,
    get_length_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    single_choice_reward,
    tagged_answer,
    think_format_reward,
)
from prefrl.rewards.graders.combined import BySource, Combined
from prefrl.rewards.graders.models import LabelModel, ScoreModel
from prefrl.rewards.graders.plain import PythonGrader, StringCheck, TextSimilarity
from prefrl.rewards.maths import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_numeric_reward,
    numeric_reward,
    reasoning_accuracy_reward,
)

if TYPE_CHECKING:
    import datasets

_WAYS = "module:function, module.function or folder/file.py:function"

# Rewards that the command line knows by name, because they need no arguments.
REWARD_FUNCTIONS: Mapping[str, RewardFunction] = {
    "numeric_reward": numeric_reward,
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "format_reward": format_reward,
    "think_format_reward": think_format_reward,
    "single_choice_reward": single_choice_reward,
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
    "by_source": BySource,
    "numeric_reward": get_numeric_reward,
    "length_reward": get_length_reward,
    "soft_overlong_punishment_reward": get_soft_overlong_punishment,
    "repetition_penalty_reward": get_repetition_penalty_reward,
    "cosine_scaled_reward": get_cosine_scaled_reward,
}
# What every reward is given besides the columns, so no parameter of an entry.
_GIVEN = ("prompts", "completions", "completion_ids")
# Rewards of users by name. Installed packages may have others, as entry points of this group.
_REGISTERED: dict[str, Callable[..., Any]] = {}
_ENTRY_POINTS = "prefrl.rewards"

Reward = TypeVar("Reward", bound=Callable[..., Any])


def register_reward(name: str) -> Callable[[Reward], Reward]:
    """Decorator that makes a function or a class of rewards available by name in `reward_funcs`, `combined` and
    `by_source`.

    A YAML file names it as `folder/file.py:name`, or by the name alone once its module is imported. An installed
    package needs no import if its entry points have the name in the group `prefrl.rewards`. A class is called with the
    parameters that follow the name. Logs use this name, too: it becomes the `__name__`.

    Args:
        name: An identifier that no other reward has.
    Raises:
        ConfigError: The name is not an identifier, or is taken.
    """
    if not name.isidentifier():
        raise ConfigError(f"register_reward({name!r}): a name must be an identifier, such as 'exact_match'")

    def register(reward: Reward) -> Reward:
        known = _REGISTERED.get(name)
        is_same = known is not None and (known.__module__, known.__qualname__) == (
            reward.__module__,
            reward.__qualname__,
        )
        if name in REWARD_FUNCTIONS or name in GRADERS or not (known is None or is_same):
            raise ConfigError(f"register_reward({name!r}): there is another reward of this name. Choose another one")
        reward.__name__ = name
        _REGISTERED[name] = reward
        return reward

    return register


def _registered(name: str) -> Callable[..., Any] | None:
    if name in _REGISTERED or not name.isidentifier():
        return _REGISTERED.get(name)
    for entry in entry_points(group=_ENTRY_POINTS, name=name):
        found: Callable[..., Any] = entry.load()
        return found
    return None


def named_rewards(rewards: Any) -> Any:
    """The rewards that a trainer is given, with functions in place of the names of built-in and registered ones.

    Args:
        rewards: A reward, a list of them, or a mapping whose keys are rewards and whose values are weights. Texts that
            are no such names are those of models.
    Raises:
        ConfigError: The parameters behind a name are not valid.
    """
    if isinstance(rewards, Mapping):
        return {named_rewards(key) if is_number(value) else key: value for key, value in rewards.items()}
    if isinstance(rewards, list | tuple):
        return [named_rewards(reward) for reward in rewards]
    if not isinstance(rewards, str):
        return rewards
    name = rewards.partition("(")[0]
    is_known = name in REWARD_FUNCTIONS or name in GRADERS or _registered(name) is not None
    return reward_by_name(rewards) if is_known else rewards


def reward_by_name(name: str) -> RewardFunction:
    """The reward that an entry of `reward_funcs` names.

    Args:
        name: A name of `REWARD_FUNCTIONS`, or one of `register_reward`; `module:function`, `module.function` or
            `folder/file.py:function`, where a class is called without arguments to get the function;
            `reasoning_gym:task`. All but the last may be followed by parameters, and graders are:
            `string_check(reference='{answer}')`. Their values are texts, numbers, lists, mappings, and for rewards
            such entries as this one. They are read, never run as Python.
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
    function = REWARD_FUNCTIONS.get(name) or _registered(name) or _imported(name)
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
        remedy = nearest(name, {*REWARD_FUNCTIONS, *GRADERS, *_REGISTERED})
        raise ConfigError(f"reward_funcs={name!r}: is neither a built-in reward nor {_WAYS}. {remedy}")
    module = imported(place, f"reward_funcs={name!r}", remedy=f"Write {_WAYS}")
    if not hasattr(module, function):
        if function in _REGISTERED:
            return _REGISTERED[function]
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"reward_funcs={name!r}: {place} has no {function!r}. {nearest(function, known)}")
    return getattr(module, function)


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
    if name == "by_source":
        parameters = _of_sources(parameters)
    return _called(GRADERS[name], parameters, text)


def _of_sources(parameters: dict[str, Any]) -> dict[str, Any]:
    found = {key: reward_by_name(v) if key == "default" and isinstance(v, str) else v for key, v in parameters.items()}
    if isinstance(rewards := found.get("rewards"), dict):
        found["rewards"] = {key: reward_by_name(r) if isinstance(r, str) else r for key, r in rewards.items()}
    return found


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


# A reward's name on the command line is this and the task.
PREFIX = "reasoning_gym:"
# Tasks whose score runs the answer as Python code, with `eval` or sympy's `parse_expr`.
_RUNS_ANSWERS = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
_TUPLE = "__tuple__"


@dataclass(eq=False)
class ReasoningGym(Grader):
    """Score of an answer from a reasoning-gym task, from 0 to 1.

    The answer is the content of the last `<answer>...</answer>` after the completion's reasoning, or, without these
    tags, everything after the reasoning. An answer that the task cannot read scores 0. Rows need the columns `answer`
    and `metadata` of the task's entries, as `reasoning_gym_dataset` makes them; a row of another task gets None.

    Args:
        task: Name of the task, such as "chain_sum"; also the reward's name in logs.
    Raises:
        ConfigError: There is no such task, or it runs answers as code, which a model must not write here.
        ImportError: It needs `prefrl[reasoning-gym]`, which is not installed.
    Source: https://github.com/open-thought/reasoning-gym
    """

    task: str

    def __post_init__(self) -> None:
        check_task(self.task)
        if self.task in _RUNS_ANSWERS:
            raise ConfigError(
                f"{PREFIX}{self.task}: this task runs answers as Python code in the training process. Use another "
                "task, or write a reward that checks the answers without running them"
            )
        self._score = _factory().get_score_answer_fn(self.task)
        self._declare(self.task, {"completions", "answer", "metadata"})

    def __call__(
        self, completions: Sequence[Any], answer: Sequence[Any], metadata: Sequence[Any]
    ) -> list[float | None]:
        """Score B completions."""
        return [self._value(*row) for row in zip(completions, answer, metadata, strict=True)]

    def _value(self, completion: Any, answer: Any, metadata: Any) -> float | None:
        about = json.loads(metadata, object_hook=_with_tuples) if isinstance(metadata, str) else metadata
        if not isinstance(about, dict) or "source_dataset" not in about:
            raise RewardError(
                f"{PREFIX}{self.task}: column 'metadata' has {metadata!r}: needs the metadata of an entry of the "
                "task. Make the dataset with prefrl.rewards.reasoning_gym_dataset"
            )
        if about["source_dataset"] != self.task:
            return None
        try:
            return float(
                self._score(tagged_answer(completion_text(completion)), {"answer": answer, "metadata": about})
            )
        except Exception:  # tasks differ in what they raise for an answer that is none
            return 0.0


def reasoning_gym_dataset(task: str, *, size: int, seed: int, **options: Any) -> datasets.Dataset:
    """Entries of a task, for `ReasoningGym`.

    Args:
        task: Name of the task, such as "chain_sum".
        size: Number of rows.
        seed: Seed for the choice of entries.
        **options: Options of the task, such as `max_terms=3`.
    Returns:
        Rows with `prompt` (one message of the user), `answer`, and `metadata` (JSON).
    Raises:
        ConfigError: There is no such task, or an option is not valid.
        ImportError: It needs `prefrl[reasoning-gym]`, which is not installed.
    """
    check_task(task)
    try:
        entries = _factory().create_dataset(task, size=size, seed=seed, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"{PREFIX}{task} with {options}: {error}") from error
    from datasets import Dataset  # here: processes that score have no datasets, and need not import what reads them

    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": entry["question"]}],
                "answer": entry["answer"],
                "metadata": json.dumps(_without_tuples(entry["metadata"]), default=str),
            }
            for entry in entries
        ]
    )


def check_task(task: str) -> None:
    """Check that there is such a task.

    Raises:
        ConfigError: There is none; names the nearest.
        ImportError: reasoning-gym is not installed.
    """
    known = _factory().DATASETS.keys() - {"composite"}  # made of others, so it has no default
    if task not in known:
        raise ConfigError(f"{PREFIX}{task}: is no task. {nearest(task, known)}")


def _factory() -> Any:
    return require("reasoning_gym", extra="reasoning-gym", feature="a reward of reasoning_gym").factory


def _without_tuples(value: Any) -> Any:
    """The value with marked lists in the place of tuples, which JSON does not have and some tasks compare."""
    if isinstance(value, tuple):
        return {_TUPLE: [_without_tuples(one) for one in value]}
    if isinstance(value, list):
        return [_without_tuples(one) for one in value]
    return {key: _without_tuples(one) for key, one in value.items()} if isinstance(value, dict) else value


def _with_tuples(value: dict[str, Any]) -> Any:
    return tuple(value[_TUPLE]) if value.keys() == {_TUPLE} else value
