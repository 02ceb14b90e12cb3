"""Environments of OpenReward, which a server runs: a model calls their tools, whose outputs have the reward."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import datasets

from prefrl.errors import ConfigError, require
from prefrl.rollout.episodes.environment import EMPTY_PROMPT

# What an argument of a tool is in Python, from which the model's schema of the tool is made.
_TYPES: dict[str, type] = {
    **{"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
}
_KEY = "OPENREWARD_API_KEY"


class OpenRewardEnv:
    """An episode on the server; see `OpenRewardSpec`, which derives the classes that have tools.

    Attributes:
        reward: The last reward of a tool's output; None: there has been none.
        rewards: The reward of each call.
        metadata: The metadata of each call.
        finished: Whether an output said that the episode is over.
        last_output: The text of the last output.
    """

    spec: OpenRewardSpec

    def __init__(self) -> None:
        self._context: Any = None
        self._begin()

    def _begin(self) -> None:
        self.reward: float | None = None
        self.rewards: list[float | None] = []
        self.metadata: list[Mapping[str, Any] | None] = []
        self.finished = False
        self.last_output = ""

    def reset(self, task_index: int = 0, **row: Any) -> str:
        """Begin an episode on the server, and return the text of its prompt.

        Args:
            task_index: The number of the task.
            row: Other columns.
        """
        self._end()
        self._begin()
        spec = self.spec
        self._context = spec.environment.session(split=spec.split, index=int(task_index), secrets=spec.session_secrets)
        self._session = self._context.__enter__()
        return _text_of(self._session.get_prompt())

    def _end(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)

    def __del__(self) -> None:
        self._end()

    def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """What a tool says. An error of the server is raised, and the model is told."""
        output = self._session.call_tool(tool, dict(arguments))
        reward = None if output.reward is None else float(output.reward)
        self.rewards.append(reward)
        self.metadata.append(output.metadata)
        self.reward = self.reward if reward is None else reward
        self.finished = bool(output.finished)
        self.last_output = _text_of(output.blocks or []) or "(no output)"
        return self.last_output


class OpenRewardSpec:
    """An environment of OpenReward; pass its `train_dataset`, `environment_factory` and `reward_funcs` to a trainer.

    Args:
        target: The name of an environment in the catalog, such as "Eigent/SETA", or the URL of a server.
        num_tasks: Number of tasks, from the first one on. The default is all tasks.
        split: The split that has the tasks.
        indices: The numbers of the tasks. The default is all tasks.
        api_key: The key for the catalog. The default is the environment variable OPENREWARD_API_KEY.
        secrets: What each session on the server gets. For environments of the catalog, the default is the key.
        env_name: The name of the environment on a server. It may be left out if there is only one.
        include_metadata: Whether rows have columns with what the server says about a task.
        discover_task_tools: Whether to open a session in order to find tools that only some tasks have.
        task_tools_discovery_index: The task of that session. The default is each of `indices`, or the first task.

    Raises:
        ConfigError: `num_tasks` and `indices` are both given.

    Source: https://docs.openreward.ai
    """

    def __init__(  # noqa: PLR0913 - TRL's constructor
        self,
        target: str,
        *,
        num_tasks: int | None = None,
        split: str = "train",
        indices: Sequence[int] | None = None,
        api_key: str | None = None,
        secrets: Mapping[str, str] | None = None,
        env_name: str | None = None,
        include_metadata: bool = True,
        discover_task_tools: bool = True,
        task_tools_discovery_index: int | None = None,
    ) -> None:
        if num_tasks is not None and indices is not None:
            raise ConfigError("OpenRewardSpec: num_tasks and indices are both given. Give one of them.")
        self.target = target
        self.num_tasks = num_tasks
        self.split = split
        self.indices = indices
        self.env_name = env_name
        self.include_metadata = include_metadata
        self.discover_task_tools = discover_task_tools
        self.task_tools_discovery_index = task_tools_discovery_index
        self._is_url = "://" in target
        self._key = api_key or (None if self._is_url else os.environ.get(_KEY))
        has_key = secrets is None and not self._is_url and self._key is not None
        self.session_secrets = {"api_key": self._key} if has_key else secrets

    @cached_property
    def environment(self) -> Any:
        """The package's object for the environment."""
        package: Any = require("openreward", extra=None, feature="OpenRewardSpec")
        given = {"api_key": self._key, "base_url": self.target if self._is_url else None}
        client = package.OpenReward(**{name: value for name, value in given.items() if value is not None})
        return client.environments.get((self.env_name or "env") if self._is_url else self.target)

    @cached_property
    def train_dataset(self) -> datasets.Dataset:
        """For `train_dataset` of a trainer: a row for each task."""
        environment = self.environment
        indices = self.indices
        if indices is None and self.num_tasks is not None:
            indices = range(min(self.num_tasks, environment.num_tasks(self.split)))
        if indices is None:
            tasks = environment.list_tasks(self.split)
            indices = range(len(tasks))
        else:
            tasks = [environment.get_task(self.split, i) for i in indices]
        rows: list[dict[str, Any]] = [{"prompt": EMPTY_PROMPT, "task_index": i} for i in indices]
        if self.include_metadata:
            told = [task if isinstance(task, dict) else task.task_spec for task in tasks]
            rows = [{**about, **row} for about, row in zip(told, rows, strict=True)]
        return datasets.Dataset.from_list(rows)

    @cached_property
    def environment_factory(self) -> type[OpenRewardEnv]:
        """For `environment_factory` of a trainer: a class with a method for each tool."""
        tools = {tool["name"]: tool for tool in reversed(self._tools())}
        methods = {name: _method(tool) for name, tool in tools.items()}
        return type("OpenRewardEnv", (OpenRewardEnv,), {"spec": self, **methods})

    @property
    def reward_funcs(self) -> Callable[..., list[float | None]]:
        """For `reward_funcs` of a trainer: the last reward of each episode."""
        return openreward_reward

    def _tools(self) -> list[dict[str, Any]]:
        """The tools of all tasks, then those of single tasks."""
        found = list(self.environment.list_tools())
        if self.discover_task_tools:
            chosen = [0] if self.indices is None else sorted({*self.indices})
            if self.task_tools_discovery_index is not None:
                chosen = [self.task_tools_discovery_index]
            for index in chosen:
                with self.environment.session(split=self.split, index=index, secrets=self.session_secrets) as session:
                    found += session.list_tools()
        fields = ("name", "description", "input_schema")
        return [tool if isinstance(tool, dict) else {key: getattr(tool, key) for key in fields} for tool in found]


def openreward_reward(environments: Sequence[OpenRewardEnv], **columns: Any) -> list[float | None]:
    """The last reward of each episode; None: it had none."""
    return [environment.reward for environment in environments]


def _method(tool: Mapping[str, Any]) -> Callable[..., str]:
    """A tool of the server as a method, with the types and the docstring from which the model learns what it does."""
    name = str(tool["name"])
    schema = tool.get("input_schema") or {}
    arguments: Mapping[str, Mapping[str, Any]] = schema.get("properties") or {}
    required = [argument for argument in arguments if argument in (schema.get("required") or ())]
    names = [*required, *(argument for argument in arguments if argument not in required)]
    for word in (name, *names):
        if not word.isidentifier():
            raise ConfigError(f"OpenRewardSpec: the tool {name!r} has the name {word!r}, which is no name in Python")

    def call(self: OpenRewardEnv, **given: Any) -> str:
        return self._call(name, given)

    types = {argument: _type_of(arguments[argument]) for argument in names}
    parameters = [
        inspect.Parameter(
            argument,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=types[argument],
            default=inspect.Parameter.empty if argument in required else arguments[argument].get("default"),
        )
        for argument in names
    ]
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    lines = [f"    {argument}: {_line(arguments[argument].get('description') or argument)}" for argument in names]
    method: Any = call
    method.__name__, method.__qualname__ = name, f"OpenRewardEnv.{name}"
    method.__doc__ = "\n".join([_line(tool.get("description") or f"Call {name}."), "", "Args:" * bool(lines), *lines])
    method.__annotations__ = {**types, "return": str}
    method.__signature__ = inspect.Signature([this, *parameters], return_annotation=str)
    return call


def _type_of(schema: Mapping[str, Any]) -> type:
    """The type of an argument; of several, the first one; a text if none is known."""
    options = [schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    known = [_TYPES[option["type"]] for option in options if option.get("type") in _TYPES]
    default = schema.get("default")
    return known[0] if known else str if default is None else type(default)


def _line(text: str) -> str:
    return " ".join(text.split())


def _text_of(blocks: Sequence[Any]) -> str:
    """The texts among blocks."""
    read = (block if isinstance(block, dict) else vars(block) for block in blocks)
    return "\n".join(block["text"] for block in read if block["type"] == "text" and block["text"])
