"""What a user writes so that a model acts, tools and environments, whose methods are tools; and calls of that code.

A call has a deadline: one that hangs never holds up anything else.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefrl.data.formats import Message
from prefrl.data.tools import Schema, tool_schemas
from prefrl.errors import ConfigError, reason_of, require
from prefrl.rollout.episodes.threads import MainThread, Worker, reported

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
    they do. The methods of this class are not tools, and need not be overridden. An instance serves many episodes, one
    after another; its methods that are not async all run on one thread, which no other instance shares.

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
            Text that is appended to the last message of the prompt, or a list of messages that is appended to the
            prompt; or None, which adds nothing.
        """
        return None

    def respond(self, message: Message) -> Any:
        """The other side's answer to a turn in which the model called no tool.

        Args:
            message: What the model said: role "assistant", "content", and perhaps "reasoning_content".
        Returns:
            The text of the next message with role "user", or an `Observation`; or None, which ends the episode.
        """
        return None

    def edit(self, messages: list[Message]) -> Any:
        """The conversation that the next turn sees: a list of messages, for example without old tool results."""
        return messages

    def get_reward(self) -> Any:
        """The reward of the episode, beside those of its observations; called once, at its end.

        Returns:
            A number; or a mapping of names to numbers, which are added and logged by name; or None for no reward,
            unless an observation had one.
        """
        return 0.0

    def close(self) -> Any:
        """Release what the instance holds; called once, when it is not needed any more."""
        return None


@dataclass(frozen=True)
class Agent:
    """A program that acts by itself and asks the policy over a chat API. It stands where a class of environments does.

    Args:
        solve: Called for each episode with the columns of the dataset's row and a client, whose `base_url`, `api_key`
            and `model` any library for agents takes. It may be async; otherwise, it runs on a thread of its own. It
            returns a reward, rewards by name, or a result for the reward functions, which read it as `result`. A
            `CommandAgent` is a program.
    """

    solve: Callable[[Mapping[str, Any], Any], Any]

    @property
    def name(self) -> str:
        """What its rewards and metrics are called after."""
        return str(getattr(self.solve, "__name__", type(self.solve).__name__))


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
    agent: Callable[[Mapping[str, Any], Any], Any] | None = None  # called with a row and a client; see `Agent`
    # Instances that no episode has had yet, each with the thread that made it: they may belong to that thread.
    unused: list[tuple[Any, Worker]] = field(default_factory=list)


def environment_kinds(
    tools: Sequence[Callable[..., Any]] | None,
    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
    *,
    option: str = "environment_factory",
) -> dict[str | None, EnvironmentKind]:
    """The kinds of episodes, by the value of the dataset's column `environment`. None means the only one.

    Each factory is called once, to find out what its instances are; the first episode gets this instance.

    Args:
        tools: Functions that the model may call.
        factory: A class of environments, or several by the value of the dataset's column `environment`.
        option: The name of `factory` where the user has set it, for messages.

    Raises:
        ConfigError: A tool has no schema, an environment has no `reset`, or two tools have one name.
    """
    functions = _named(tools)
    if factory is None:
        schemas = tool_schemas(list(functions.values()))
        return {None: EnvironmentKind("tools", None, functions, frozenset(), schemas)}
    factories: Mapping[Any, Callable[[], Any]] = factory if isinstance(factory, Mapping) else {None: factory}
    if not factories:
        raise ConfigError(f"{option}={{}}: needs at least one environment")
    wheres = {name: option if name is None else f"{option}[{name!r}]" for name in factories}
    return {name: _kind(name, make, functions, wheres[name]) for name, make in factories.items()}


def with_agents(factory: Any, agent: Any) -> Any:
    """The environments of a trainer, with its agents among them.

    Args:
        factory: The argument `environment_factory`.
        agent: The argument `agent`: a function, or several by the value of the dataset's column `environment`.

    Raises:
        ConfigError: There are both, and not by the column, or one value names two; or an agent is no function.
        MissingPackageError: There is no server for agents.
    """
    if agent is None:
        return factory
    require("starlette", extra="agents", feature="agent")
    require("uvicorn", extra="agents", feature="agent")
    several, factories = isinstance(agent, Mapping), factory if isinstance(factory, Mapping) else {}
    if factory is not None and not (several and factories):
        raise ConfigError(
            "agent and environment_factory: each must be a mapping from values of the dataset's column environment"
        )
    given = agent if several else {None: agent}
    if not given or not all(map(callable, given.values())):
        raise ConfigError(
            f"agent={agent!r}: must be a function of a row and a client, or a mapping from values of the dataset's "
            "column environment to such functions"
        )
    if twice := [name for name in given if name in factories]:
        raise ConfigError(f"agent, environment_factory: {twice[0]!r} is in both. Remove it from one of them")
    return {**factories, **{name: Agent(solve) for name, solve in given.items()}} if several else Agent(agent)


def _named(tools: Sequence[Callable[..., Any]] | None) -> dict[str, Callable[..., Any]]:
    if tools is not None and not isinstance(tools, list | tuple):
        raise ConfigError(f"tools={tools!r}: must be a list of functions, such as [search]")
    return dict(zip(tool_schemas(tools or ()), tools or (), strict=True))


def _kind(
    name: str | None, make: Callable[[], Any], functions: Mapping[str, Callable[..., Any]], where: str
) -> EnvironmentKind:
    if isinstance(make, Agent):
        is_one = name is not None
        return EnvironmentKind(
            make.name, None, {}, frozenset(), {}, is_one_of_several=is_one, has_reward=True, agent=make.solve
        )
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


logger = logging.getLogger(__name__)


class CallTimeout(Exception):
    """A call of user code took too long."""


class Seat:
    """A place for one episode at a time: an instance of an environment, and the thread of its calls.

    Args:
        kind: The environment's; without one there are only functions to call.
        main_thread: Calls functions that handle signals.
    """

    def __init__(self, kind: EnvironmentKind, main_thread: MainThread) -> None:
        self.kind = kind
        self._main_thread = main_thread
        self.is_usable = True  # False once a call has hung or the environment has failed
        self.environment: Any = None
        if kind.unused:
            self.environment, self._worker = kind.unused.pop()
        else:
            self._worker = Worker()

    async def set_up(self, timeout: float | None) -> None:
        """Make the environment, if it does not exist yet."""
        if self.environment is None and self.kind.make is not None:
            self.environment = await self.call(self.kind.make, timeout=timeout)

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float | None, **kwargs: Any) -> Any:
        """What a function returns: an async one on this loop, another one on the seat's thread.

        A function that handles signals, as Python only allows on the main thread, is called there, without a limit.

        Raises:
            CallTimeout: It took too long. It is left alone, and the seat has a new thread.
            RuntimeError: It raised something that would end the loop, such as SystemExit.
        """
        work = asyncio.create_task(self._called(function, args, kwargs), name=_name_of(function))
        try:
            await asyncio.wait({work}, timeout=timeout)
        finally:
            is_late = not work.done()
            if is_late:  # or the episode is over, so that nobody waits for the call any more
                self._abandon(work)
        if is_late:
            raise CallTimeout(f"no result within {timeout} s")
        return work.result()

    async def _called(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            value = await self._sync(function, functools.partial(function, *args, **kwargs))
            return await value if inspect.isawaitable(value) else value
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise reported(error) from error
        except (SystemExit, KeyboardInterrupt) as error:
            raise reported(error) from error

    async def _sync(self, function: Callable[..., Any], work: Callable[[], Any]) -> Any:
        if not self._main_thread.is_needed_by(function):
            try:
                return await asyncio.wrap_future(self._worker.submit(work))
            except ValueError as error:
                if not self._main_thread.is_meant_by(error):
                    raise
        return await asyncio.wrap_future(self._main_thread.submit(function, work))

    def _abandon(self, work: asyncio.Task[Any]) -> None:
        """Leave a call alone. Nothing waits for it to notice."""
        work.cancel()
        work.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody else asks for its error
        self.is_usable = False
        self._worker.leave()
        self._worker = Worker()

    async def close(self, timeout: float | None) -> None:
        """Close the environment, if it is a `prefrl.Environment`, and end the thread."""
        environment, self.environment = self.environment, None
        try:
            if environment is not None and self.kind.is_full:
                await self.call(environment.close, timeout=timeout)
        finally:
            self._worker.leave()


class Seats:
    """The seats that are free, by kind. An instance is made when none is free, and used again afterwards.

    It is only used on the loop's thread.

    Args:
        main_thread: Calls functions that handle signals.
        timeout: Seconds for closing an environment.
    """

    def __init__(self, main_thread: MainThread, timeout: float | None) -> None:
        self._main_thread = main_thread
        self._timeout = timeout
        self._free: dict[int, list[Seat]] = {}  # by identity of the kind
        self._all: set[Seat] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, kind: EnvironmentKind) -> Seat:
        """A free seat, or a new one."""
        free = self._free.setdefault(id(kind), [])
        if free:
            return free.pop()
        seat = Seat(kind, self._main_thread)
        self._all.add(seat)
        return seat

    def give_back(self, seat: Seat) -> None:
        """Make a seat free, or close it if it cannot be used any more."""
        if seat.is_usable and seat in self._all:
            self._free[id(seat.kind)].append(seat)
        else:
            self.drop(seat)

    def drop(self, seat: Seat) -> None:
        """Begin to close a seat that is not used any more."""
        self._all.discard(seat)
        closing = asyncio.create_task(self._close(seat))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all seats, each within the time limit."""
        for seat in tuple(self._all):
            self.drop(seat)
        self._free = {}
        await asyncio.gather(*self._closing)

    async def _close(self, seat: Seat) -> None:
        try:
            await seat.close(self._timeout)
        except Exception as error:  # of the environment; nothing depends on it
            logger.warning("%s.close: %s", seat.kind.name, reason_of(error))


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))
