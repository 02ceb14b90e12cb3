"""Environments and tools as options name them: what their files say without being run, and what is made of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.options.names import CodeName
from prefrl.scripts.arguments.command import EpisodeArguments

CODE = '''\
import os
from elsewhere import Base

raise_if_run = os.environ["NOT_SET"] if False else None


class Game:
    def __init__(self, size, depth=2, *, level="easy"):
        self.size, self.level = size, level

    def reset(self, **row):
        return "hi"

    async def move(self, where: int) -> str:
        """Move.

        Args:
            where: To.
        """


class Child(Game):
    def jump(self, high):
        """Jump."""


class Foreign(Base):
    def move(self):
        """Move."""


class Endless:
    def move(self):
        """Move."""


def make(size=3):
    return Game(size)


def search(query: str, *, limit: int = 3) -> str:
    """Search.

    Args:
        query: What.
        limit: How many.
    """
    return query * limit


def untyped(query):
    """Search."""


def silent(query: str): ...


def undescribed(query: str):
    """Search."""


def sunk(*queries: str):
    """Search."""


class Box:
    def __init__(self):
        self.count = 0

    def add(self, number: int) -> int:
        """Add.

        Args:
            number: How much.
        """
        self.count += number
        return self.count

    def _hidden(self): ...


def solve(row, client, *, size=3):
    return size


number = 3
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_code.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "broken.py").write_text("def f(:\n", encoding="utf-8")
    runs = CODE.replace("from elsewhere import Base", "Base = object").replace(
        'os.environ["NOT_SET"] if False else ', ""
    )
    (tmp_path / "runs.py").write_text(runs, encoding="utf-8")
    (tmp_path / "raises.py").write_text("\n\n1 / 0\nGame = None\n", encoding="utf-8")
    for name in ("prefrl_code_of_runs", "prefrl_code_of_raises", "runs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def checked(environment: Any = None, tools: Any = None, agent: Any = None) -> EpisodeArguments:
    arguments = EpisodeArguments(environment, tools, agent)
    arguments.check_names()
    arguments.check_code()
    return arguments


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "name",
    [
        "my_code.py:Game(size=3)",
        "my_code.Game(3)".replace("(3)", "(size=3, level='hard')"),
        "my_code:make",
        "./my_code.py:Foreign(any=1)",  # what its base takes is not known
        "json.JSONDecoder",  # not in the working directory
        '{"a": "my_code.py:make", "b": "my_code:Game(size=1)"}',
    ],
)
def test_environments_are_found_without_running_their_files(name: str) -> None:
    checked(name)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (3, r"environment=3: must be the name of your code"),
        ("my_code.py", r"does not say what the file or the module contains. Write file\.py:Name"),
        ("Game", "does not say what"),
        ("my_code.py:Gme", r"environment='my_code\.py:Gme': my_code\.py has no 'Gme'\. Did you mean 'Game'\?"),
        ("my_cod.py:Game", r"there is no file 'my_cod\.py'\. Did you mean 'my_code\.py'\?"),
        ("broken.py:f", r"broken\.py:1: invalid syntax"),
        (
            "my_code.py:Game",
            r"cannot be called like this: missing a required argument: 'size'.*\(size, depth=2, \*, level='ea",
        ),
        (
            "my_code.py:make(sise=3)",
            r"unexpected keyword argument 'sise'.*\(size=3\); write them as my_code\.py:make\(",
        ),
        ("my_code.py:make(3)", "the parameters cannot be read: each needs its name"),
        ("my_code.py:make(size=f())", "the parameters cannot be read"),
        ("my_code.py:Endless", r"my_code\.py:32: Endless has no method reset"),
        ("my_code.py:Child(size=1)", r"my_code\.py:23: tool 'jump': argument 'high' has no type"),
        (
            {"a": "my_code.py:make", "b": "my_code.py:mak"},
            r"environment\.b='my_code\.py:mak': my_code\.py has no 'mak'",
        ),
        ({}, "needs at least one environment"),
        ("{", "is no JSON"),
    ],
)
def test_what_is_wrong_with_an_environment_is_named_without_running_its_file(name: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(name)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_code.py:serch", r"tools\[1\]='my_code\.py:serch': my_code\.py has no 'serch'\. Did you mean 'search'"),
        ("my_code.py:untyped", r"my_code\.py:51: tool 'untyped': argument 'query' has no type"),
        ("my_code.py:silent", r"tool 'silent': the docstring is missing"),
        ("my_code.py:undescribed", r"tool 'undescribed': the docstring does not describe the argument 'query'"),
        ("my_code.py:sunk", r"tool 'sunk': argument '\*queries' cannot be given by name"),
        ("my_code.py:search(limit=3)", "the arguments of a tool come from the model"),
    ],
)
def test_what_is_wrong_with_a_tool_is_what_the_trainer_would_say(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(tools=["my_code.py:search", name])


@pytest.mark.usefixtures("folder")
def test_the_trainer_gets_functions_methods_and_factories() -> None:
    arguments = checked({"a": "runs.py:Game(size=3)", "b": "runs.py:make"}, ["runs.py:search", "runs.py:Box"])
    loaded = arguments.loaded()
    search, add = loaded["tools"]
    assert search("a", limit=2) == "aa"
    assert (add(2), add(3)) == (2, 5)  # one instance
    factories = loaded["environment_factory"]
    assert [factories[key]().size for key in "ab"] == [3, 3]
    assert factories["a"]() is not factories["a"]()
    assert checked("runs.py:make").loaded()["environment_factory"] is factories["b"]  # a file is run once
    assert checked(tools=["runs:search"]).loaded()["environment_factory"] is None


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises.py:Game", r"cannot be imported: ZeroDivisionError: division by zero \(raises\.py:3\)"),
        ("runs.py:number", "is a int; an environment is a class"),
        ("json.JSONDecoder(a=1)", "JSONDecoder cannot be called like this"),
    ],
)
def test_what_only_shows_when_a_file_is_run_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(name).loaded()


def test_parameters_are_read_and_never_run() -> None:
    name = CodeName.read("a/b.py:Game(size=3, words=['x'], more={'y': None})", "environment")
    assert (name.place, name.name) == ("a/b.py", "Game")
    assert name.parameters == {"size": 3, "words": ["x"], "more": {"y": None}}


@pytest.mark.usefixtures("folder")
def test_an_agent_is_a_function_or_a_command() -> None:
    arguments = checked({"game": "runs.py:make"}, agent={"a": "runs.py:solve(size=5)", "b": "env -p {question}"})
    made = arguments.loaded()["environment_factory"]
    assert made["game"]().size == 3
    assert (made["a"].name, made["a"].solve({}, None)) == ("solve", 5)
    assert (made["b"].name, made["b"].solve.columns) == ("env", {"question"})
    alone = checked(agent={"command": "sh a.sh", "files": "files", "tests": "sh {test}"})
    assert alone.loaded()["environment_factory"].solve.columns == {"files", "test"}
    rewards = [checked(agent=one).agents_have_rewards for one in ("runs.py:solve", "env {a}", alone.agent)]
    assert rewards == [True, False, True]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (3, r"agent=3: must be a function, such as my_agent\.py:solve, or a command"),
        ({}, r"agent=\{\}: needs at least one agent"),
        ("{game: x}", r"agent='\{game: x\}': is no JSON"),
        ("my_code.py", r"agent='my_code\.py': does not say what the file"),
        ("my_code.py:slve", r"agent='my_code\.py:slve': my_code\.py has no 'slve'\. Did you mean 'solve'\?"),
        ("my_code.py:solve(bg=3)", r"solve cannot be called like this"),
        ("my_code.py:untyped", r"untyped cannot be called like this"),  # it takes a row alone
        ("not-here {a}", r"agent='not-here \{a\}': the program 'not-here' is not found"),
        ({"x": "not-here"}, r"agent\.x='not-here': the program 'not-here' is not found"),
        ({"command": "env", "tests": "not-here"}, r"agent\.tests='not-here': the program"),
        ({"command": "env", "test": "env"}, r"agent='test': unknown key\. Did you mean 'tests'\?"),
        ({"command": "env", "test_files": "a"}, r"agent\.test_files='a' has no effect without tests"),
    ],
)
def test_what_is_wrong_with_an_agent_is_named_before_training(agent: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(agent=agent)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("environment", "agent", "message"),
    [
        ("my_code.py:Game", "env", "each must be a mapping"),
        ({"a": "my_code.py:Game"}, "env", "each must be a mapping"),
        ({"a": "my_code.py:Game"}, {"command": "env"}, "each must be a mapping"),
        ({"a": "my_code.py:Game"}, {"a": "env"}, "'a' is in both"),
    ],
)
def test_environments_and_agents_are_told_apart_by_the_column(environment: Any, agent: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(environment, agent=agent)
