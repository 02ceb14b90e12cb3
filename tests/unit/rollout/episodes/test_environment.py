"""What users write: classes, functions and their errors."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from prefrl import ConfigError, Environment, MissingPackageError
from prefrl.rollout.episodes.environment import environment_kinds, with_agents


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Plain:
    """As TRL's: no base class."""

    def reset(self, **row: Any) -> None: ...

    def look(self) -> str:
        """Look around."""
        return "a wall"

    @staticmethod
    def count(text: str) -> int:
        """Count characters.

        Args:
            text: Any.
        """
        return len(text)

    @property
    def broken(self) -> str:
        raise RuntimeError("properties are not looked at")

    def _hidden(self) -> None: ...


class Walker:
    def walk(self, steps: int) -> str:
        """Walk.

        Args:
            steps: How many.
        """
        return "ok"


class Paid(Plain, Walker):
    def get_reward(self) -> float:
        return 1.0


class Full(Environment):
    def move(self, to: str) -> str:
        """Move.

        Args:
            to: Where.
        """
        return to

    def respond(self, message: Any) -> None: ...


class Editor(Full):
    def edit(self, messages: Any) -> Any:
        return messages[-1:]


def test_public_methods_are_tools_also_static_and_inherited_ones() -> None:
    (plain,) = environment_kinds([add], Plain).values()
    assert (plain.name, plain.methods, list(plain.tools)) == ("Plain", {"look", "count"}, ["add"])
    assert set(plain.schemas) == {"add", "look", "count"}
    assert (plain.has_reward, plain.is_full, plain.edits, plain.cls) == (False, False, False, Plain)
    (paid,) = environment_kinds(None, Paid).values()
    assert paid.methods == {"look", "count", "walk"}
    assert paid.has_reward


def test_methods_of_the_base_class_are_no_tools() -> None:
    (full,) = environment_kinds(None, Full).values()
    assert full.methods == {"move"}
    assert (full.is_full, full.has_reward, full.edits) == (True, True, False)
    assert environment_kinds(None, Editor)[None].edits


def test_the_instance_that_was_looked_at_is_kept_for_an_episode_with_its_thread() -> None:
    made = []

    class Threaded(Plain):
        def __init__(self) -> None:
            made.append(threading.get_ident())

    (kind,) = environment_kinds(None, Threaded).values()
    ((instance, worker),) = kind.unused
    assert isinstance(instance, Threaded)
    assert [worker.submit(threading.get_ident).result(5)] == made


def test_environments_by_name_and_from_functions() -> None:
    kinds = environment_kinds([add], {"walk": Paid, "move": lambda: Full()})
    assert {name: (kind.name, kind.is_one_of_several) for name, kind in kinds.items()} == {
        "walk": ("Paid", True),
        "move": ("Full", True),
    }
    assert set(kinds["move"].schemas) == {"add", "move"}
    assert not environment_kinds(None, Plain)[None].is_one_of_several


def test_functions_alone_have_no_environment() -> None:
    (kind,) = environment_kinds([add], None).values()
    assert (kind.name, kind.make, kind.methods, kind.has_reward) == ("tools", None, frozenset(), False)


def other(name: str) -> Any:
    def tool() -> str:
        """Say hello."""
        return "hello"

    tool.__name__ = name
    return tool


class NoReset:
    def look(self) -> str:
        """Look."""
        return ""


class NoDocstring(Plain):
    def jump(self) -> str:
        return ""


class NoType(Plain):
    def jump(self, height) -> str:  # type: ignore[no-untyped-def]
        """Jump.

        Args:
            height: In meters.
        """
        return ""


class NeedsPort(Plain):
    def __init__(self, port: int) -> None: ...


@pytest.mark.parametrize(
    ("tools", "factory", "message"),
    [
        ([add, other("add")], None, r"two are named 'add'.*Rename"),
        ([other("look")], Plain, r"two are named 'look'.*Rename"),
        (add, None, r"tools=<function add.*must be a list of functions, such as \[search\]"),
        ({"add": add}, None, "must be a list of functions"),
        ([Plain()], None, "neither a function nor a method. Pass one"),
        (None, {}, "environment_factory={}: needs at least one"),
        (None, Plain(), "environment_factory=<.*: must be a class, or a function that returns"),
        (None, {"a": "Plain"}, r"environment_factory\['a'\]='Plain': must be a class"),
        (None, NoReset, r"environment_factory: NoReset has no method reset.*Add reset\(self, \*\*row\)"),
        (None, {"x": NoReset}, r"environment_factory\['x'\]: NoReset has no method reset"),
        (None, NoDocstring, "'jump': the docstring is missing.*Write"),
        (None, NoType, "'jump': argument 'height' has no type. Write"),
        (None, NeedsPort, r"environment_factory\(\) raised TypeError: .*'port': must create an environment without"),
    ],
)
def test_errors_say_what_to_do(tools: Any, factory: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment_kinds(tools, factory)


@pytest.mark.parametrize(
    ("factory", "agent", "message"),
    [
        (None, 3, "agent=3: must be a function of a row and a client"),
        (None, {"a": "solve"}, "agent={'a': 'solve'}: must be a function"),
        (None, {}, "agent={}: must be a function"),
        (Plain, add, "agent and environment_factory: each must be a mapping"),
        (Plain, {"a": add}, "agent and environment_factory: each must be a mapping"),
        ({"a": Plain}, add, "agent and environment_factory: each must be a mapping"),
        ({"a": Plain}, {"b": add, "a": add}, "agent, environment_factory: 'a' is in both"),
    ],
)
def test_agents_and_environments_that_cannot_be_told_apart_are_refused(factory: Any, agent: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_agents(factory, agent)


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_agents_need_a_server(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_agents(Plain, None) is Plain
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"agent needs {package}: pip install 'prefrl\[agents\]'"):
        with_agents(None, add)
