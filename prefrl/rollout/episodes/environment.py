"""What a user writes so that a model acts: tools, and environments, whose methods are tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prefrl.data.tools import Schema, tool_schemas
from prefrl.errors import ConfigError
from prefrl.printable import reason_of
from prefrl.rollout.episodes.threads import Worker

if TYPE_CHECKING:
    from prefrl.data.formats import Message

__all__ = ["EMPTY_PROMPT", "Environment", "EnvironmentKind", "Observation", "environment_kinds"]

# The prompt of a dataset without prompts, which `reset` fills.
EMPTY_PROMPT = [{"role": "user", "content": ""}]


@dataclass(frozen=True, slots=True)
class Observation:
    """What a tool or `Environment.respond` may return instead of a text."""

    content: str | None = None  # what the model sees; None: nothing, which only makes sense with `done`
    reward: float = 0.0  # for the turn that led here; the environment's reward is the sum over the turns
    done: bool = False  # the episode is over


class Environment:
    """A world in which a model acts for one episode at a time. All methods may be `async def`.

    Public methods that a subclass adds are tools: they need types and a docstring, from which the model learns what
    they do. What is a method here is not a tool, and may be left as it is. An instance serves many episodes, one after
    another; calls of one instance that are not async are made on one thread of their own.

    A class that does not derive from this one can be an environment, too: with `reset`, perhaps `get_reward`, and
    tools.
    """

    # Of the episode that begins; it depends on the run's seed, the prompt and the number of the completion. Random
    # generators that are seeded with it make a run repeatable.
    seed: int = 0

    def reset(self, **row: Any) -> Any:
        """Begin an episode.

        Args:
            **row: The columns of the dataset's row.
        Returns:
            Text that is added to the last message of the prompt, or messages that follow it; None: nothing.
        """
        return None

    def respond(self, message: Message) -> Any:
        """The other side's answer to a turn in which the model called no tool.

        Args:
            message: What the model said: role "assistant", "content", and perhaps "reasoning_content".
        Returns:
            The text of the next message with role "user", or an `Observation`; None: the episode is over.
        """
        return None

    def edit(self, messages: list[Message]) -> Any:
        """What the next turn sees of the conversation: a list of messages, for example without old tool results."""
        return messages

    def get_reward(self) -> Any:
        """The reward of the episode, beside those of its observations; called once, at its end.

        Returns:
            A number; a mapping of names to numbers, which are added and logged by name; None: no reward, unless an
            observation had one.
        """
        return 0.0

    def close(self) -> Any:
        """Release what the instance holds; called once, when it is not needed any more."""
        return None


@dataclass(frozen=True)
class EnvironmentKind:
    """A class of environments, and what the model can call in its episodes."""

    name: str  # of the class
    make: Callable[[], Any] | None  # None: there is no environment, only tools
    tools: Mapping[str, Callable[..., Any]]  # functions that belong to no environment, by name
    methods: frozenset[str]  # tools that are methods of the instance
    schemas: Mapping[str, Schema]
    cls: type | None = None
    is_full: bool = False  # an `Environment`
    is_one_of_several: bool = False  # chosen by the dataset's column `environment`
    has_reward: bool = False
    edits: bool = False  # it overrides `edit`
    # Instances that no episode has had yet, each with the thread that made it: they may belong to that thread.
    unused: list[tuple[Any, Worker]] = field(default_factory=list)


def environment_kinds(
    tools: Sequence[Callable[..., Any]] | None,
    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
) -> dict[str | None, EnvironmentKind]:
    """The kinds of episodes, by the value of the dataset's column `environment`; None: the only one.

    Each factory is called once, to find out what its instances are; the first episode gets this instance.

    Raises:
        ConfigError: A tool has no schema, an environment has no `reset`, or two tools have one name.
    """
    functions = _named(tools)
    if factory is None:
        schemas = tool_schemas(list(functions.values()))
        return {None: EnvironmentKind("tools", None, functions, frozenset(), schemas)}
    factories: Mapping[Any, Callable[[], Any]] = factory if isinstance(factory, Mapping) else {None: factory}
    if not factories:
        raise ConfigError("environment_factory={}: needs at least one environment")
    return {name: _kind(name, make, functions) for name, make in factories.items()}


def _named(tools: Sequence[Callable[..., Any]] | None) -> dict[str, Callable[..., Any]]:
    if tools is not None and not isinstance(tools, list | tuple):
        raise ConfigError(f"tools={tools!r}: must be a list of functions, such as [search]")
    return dict(zip(tool_schemas(tools or ()), tools or (), strict=True))


def _kind(name: str | None, make: Callable[[], Any], functions: Mapping[str, Callable[..., Any]]) -> EnvironmentKind:
    where = "environment_factory" if name is None else f"environment_factory[{name!r}]"
    if not callable(make):
        raise ConfigError(f"{where}={make!r}: must be a class, or a function that returns a new environment")
    worker = Worker()
    instance = _made(worker, make, where)
    cls = type(instance)
    members = {key for key, _ in inspect.getmembers(cls, inspect.isfunction) if not key.startswith("_")}
    is_full = isinstance(instance, Environment)
    if "reset" not in members:
        raise ConfigError(
            f"{where}: {cls.__name__} has no method reset, which begins an episode. Add reset(self, **row)"
        )
    own = {"reset", "get_reward"} | (set(vars(Environment)) if is_full else set())
    methods = sorted(members - own)
    schemas = tool_schemas([*functions.values(), *(getattr(instance, method) for method in methods)])
    return EnvironmentKind(
        cls.__name__,
        make,
        functions,
        frozenset(methods),
        schemas,
        cls=cls,
        is_full=is_full,
        is_one_of_several=name is not None,
        has_reward=is_full or "get_reward" in members,
        edits=is_full and cls.edit is not Environment.edit,
        unused=[(instance, worker)],
    )


def _made(worker: Worker, make: Callable[[], Any], where: str) -> Any:
    try:
        return worker.submit(make).result()
    except Exception as error:  # user code
        raise ConfigError(
            f"{where}() raised {reason_of(error)}: must create an environment without arguments"
        ) from error
