"""What the model acts with: environments, agents and tools, which are code of the user or programs.

Their names are read before anything is imported, and programs are found before anything is started.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from inspect import Parameter
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import opt
from prefrl.options.names import CodeName, Definition, check_known
from prefrl.rollout.episodes.command import CommandAgent

# Methods that may be no tools: those of `prefrl.Environment`.
_OF_ENVIRONMENTS = ("reset", "respond", "edit", "get_reward", "close")


@dataclass
class EpisodeArguments:
    """Environments, agents and tools, for the online algorithms. See docs/environments.md and docs/agents.md."""

    environment: dict[str, Any] | str | None = opt(
        None,
        "Environment for multi-turn episodes, such as my_env.py:Game or module.Game. It is a class, or a function "
        "that returns an instance. Parameters follow in parentheses: my_env.py:Game(size=3). For several "
        "environments, give a mapping from the values of the dataset's column environment to such names, on the "
        "command line as JSON.",
    )
    tools: list[str] | None = opt(
        None,
        "Tools that the model may call, such as my_tools.py:search or module.search. Each is a function with type "
        "hints and a docstring, or a class, whose public methods are tools. A class is instantiated once for each "
        "process.",
    )
    agent: dict[str, Any] | str | None = opt(
        None,
        "Agent that asks the model over a chat API of OpenAI or Anthropic. It is a function of a row and a client, "
        "such as my_agent.py:solve, or a program that is started for each episode, such as "
        "'claude -p {question}', where {question} is a column of the dataset. There is no shell. The program reads "
        "the address of the model in OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. "
        "episode_timeout ends it, with all that it has started. For several agents, give a mapping from the values of "
        "the dataset's column environment to such names, on the command line as JSON. A program in a sandbox is a "
        "mapping with the key command, and keys such as files and tests, see docs/agents.md.",
    )

    def check_names(self) -> None:
        """Read the names of code, and find the programs of agents.

        Raises:
            ConfigError: One cannot be read or found.
        """
        self.environment = _by_column("environment", self.environment, "my_env.py:Game")
        self.agent = _by_column("agent", self.agent, "my_agent.py:solve")
        if self.environment is not None and self.agent is not None and self.has_one_kind:
            raise ConfigError(
                f"environment={self.environment!r}, agent={self.agent!r}: both are given, so each must be a mapping "
                "from values of the dataset's column environment"
            )
        if twice := {*self._environments()} & {*self._agents()}:
            raise ConfigError(f"environment, agent: {twice.pop()!r} is in both. Remove it from one of them")
        for name in self._tools():
            if name.parameters:
                raise ConfigError(
                    f"{name.where}: the arguments of a tool come from the model. Write {name.place}:{name.name}, and "
                    "set other parameters in a function or a class of your own"
                )

    def _environments(self) -> dict[str | None, CodeName]:
        given = self.environment
        if isinstance(given, Mapping):
            return {str(key): CodeName.read(name, f"environment.{key}") for key, name in given.items()}
        return {} if given is None else {None: CodeName.read(given, "environment")}

    def _agents(self) -> dict[str | None, CodeName | CommandAgent]:
        given = self.agent
        if isinstance(given, Mapping) and "command" not in given:
            return {str(key): _agent(one, f"agent.{key}") for key, one in given.items()}
        return {} if given is None else {None: _agent(given, "agent")}

    @property
    def agents_have_rewards(self) -> bool:
        """Whether an agent may give rewards: a function, or a command with tests."""
        return any(isinstance(one, CodeName) or one.has_reward for one in self._agents().values())

    @property
    def has_one_kind(self) -> bool:
        """Whether all episodes are of the same kind, so that no dataset has to name it."""
        return None in {*self._environments(), *self._agents()}

    def _tools(self) -> list[CodeName]:
        return [CodeName.read(name, f"tools[{i}]") for i, name in enumerate(self.tools or ())]

    def check_code(self) -> None:
        """Look at the files without running them, as far as they say what the model can call.

        Raises:
            ConfigError: A file or what it should contain is missing, or a tool lacks types or descriptions.
        """
        for name in self._environments().values():
            tree, node = name.look_up()
            if isinstance(node, ast.ClassDef):
                _check_environment(name, node, tree)
            elif node is not None and not node.decorator_list:
                _check_call(name, _parameters(node.args), ast.unparse(node.args))
        for agent in self._agents().values():
            if isinstance(agent, CodeName):
                node = agent.look_up()[1]
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
                    _check_call(agent, _parameters(node.args), ast.unparse(node.args), ("row", "client"))
        for name in self._tools():
            tree, node = name.look_up()
            methods = _methods(node, tree)[0].values() if isinstance(node, ast.ClassDef) else (node,)
            for method in methods:
                _check_tool(name, method)

    def loaded(self) -> dict[str, Any]:
        """The trainer's arguments `tools` and `environment_factory`.

        Raises:
            ConfigError: Code cannot be imported, or is nothing that can be called.
        """
        from prefrl.rollout.episodes.environment import Agent  # --help does not wait for it

        factories: dict[str | None, Any] = {key: _factory(name) for key, name in self._environments().items()}
        for key, agent in self._agents().items():
            factories[key] = Agent(agent if isinstance(agent, CommandAgent) else _loaded_agent(agent))
        tools = [tool for name in self._tools() for tool in _loaded_tools(name)]
        return {"tools": tools, "environment_factory": factories.get(None, factories or None)}


def _by_column(option: str, given: Any, example: str) -> Any:
    """An option, or several by the column environment, which the command line gives as JSON.

    Raises:
        ConfigError: It is no JSON, or there is none.
    """
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ConfigError(f'{option}={given!r}: is no JSON such as {{"game": "{example}"}}: {error}') from error
    if given == {}:
        raise ConfigError(f"{option}={{}}: needs at least one {option}")
    return given


# What names code, as opposed to a command line.
_CODE_NAME = re.compile(r"([\w./-]+\.py:|[A-Za-z_][\w.]*[.:])\w+(\(.*\))?", re.DOTALL)


def _agent(given: Any, where: str) -> CodeName | CommandAgent:
    """An agent: the name of a function, or a command.

    Raises:
        ConfigError: It is neither, or the program of the command is not found.
    """
    if isinstance(given, Mapping):
        known = [one.name for one in fields(CommandAgent) if one.init]
        for name in given:
            check_known(where, name, known, "key")
        with _located(f"{where}."):
            return CommandAgent(**given)
    if not isinstance(given, str):
        raise ConfigError(f"{where}={given!r}: must be a function, such as my_agent.py:solve, or a command")
    text = given.strip()
    if _CODE_NAME.fullmatch(text) and shutil.which(text) is None:
        return CodeName.read(text, where)
    with _located(where, len("command")):
        return CommandAgent(text)


@contextmanager
def _located(where: str, num_replaced: int = 0) -> Iterator[None]:
    """Inside this context, messages of errors begin with an option."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}{str(error)[num_replaced:]}") from None


def _check_environment(name: CodeName, node: ast.ClassDef, tree: ast.Module) -> None:
    methods, is_whole = _methods(node, tree)
    if is_whole and "reset" not in methods:
        raise ConfigError(
            f"{name.where}: {name.file}:{node.lineno}: {node.name} has no method reset, which begins an episode. Add "
            "reset(self, **row)"
        )
    for key, method in methods.items():
        if key not in _OF_ENVIRONMENTS:
            _check_tool(name, method)
    makers = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    if makers and not node.decorator_list and not node.keywords:
        _check_call(name, _parameters(makers[0].args)[1:], ast.unparse(makers[0].args).partition(", ")[2])


def _methods(node: ast.ClassDef, tree: ast.Module) -> tuple[dict[str, Definition], bool]:
    """The public methods of a class, and whether these are all: its bases may be in other files."""
    classes = {other.name: other for other in tree.body if isinstance(other, ast.ClassDef)}
    found: dict[str, Definition] = {}
    is_whole = not node.keywords
    for base in node.bases:
        known = classes.get(base.id) if isinstance(base, ast.Name) else None
        inherited, is_known = ({}, False) if known is None or known is node else _methods(known, tree)
        found |= inherited
        is_whole = is_whole and is_known
    functions = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    found |= {one.name: one for one in functions if not one.name.startswith("_")}
    return found, is_whole


def _check_tool(name: CodeName, node: Definition | None) -> None:
    """Check a function, unless decorators or classes decide what is called."""
    if node is None or isinstance(node, ast.ClassDef) or node.decorator_list:
        return
    from prefrl.data.tools import check_signature  # --help does not wait for it

    try:
        check_signature(node.name, _parameters(node.args), ast.get_docstring(node))
    except ConfigError as error:
        raise ConfigError(f"{name.where}: {name.file}:{node.lineno}: {error}") from None


def _parameters(arguments: ast.arguments) -> list[Parameter]:
    """Of a function; types and defaults are nodes."""
    by_place = [*arguments.posonlyargs, *arguments.args]
    values: list[Any] = [None] * (len(by_place) - len(arguments.defaults)) + arguments.defaults
    values += [None, *arguments.kw_defaults, None]
    kinds: list[Any] = [Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs)
    kinds += [Parameter.POSITIONAL_OR_KEYWORD] * len(arguments.args)
    kinds += [Parameter.VAR_POSITIONAL, *([Parameter.KEYWORD_ONLY] * len(arguments.kwonlyargs)), Parameter.VAR_KEYWORD]
    found = [*by_place, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [
        Parameter(one.arg, kind, annotation=one.annotation or Parameter.empty, default=value or Parameter.empty)
        for one, kind, value in zip(found, kinds, values, strict=True)
        if one is not None
    ]


def _check_call(name: CodeName, parameters: Sequence[Parameter], text: str, given: Sequence[str] = ()) -> None:
    """Refuse parameters that a class or a function does not take after `given`. `text` shows those that it has."""
    try:
        inspect.Signature(parameters).bind(*given, **name.parameters)
    except TypeError as error:
        raise ConfigError(
            f"{name.where}: {name.name} cannot be called like this: {error}. Its parameters are ({text}); write them "
            f"as {name.place}:{name.name}(parameter=value)"
        ) from error


def _factory(name: CodeName) -> Callable[[], Any]:
    make = name.load()
    if not callable(make):
        raise ConfigError(
            f"{name.where}: is a {type(make).__name__}; an environment is a class, or a function that returns an "
            "instance"
        )
    try:
        signature = inspect.signature(make)
    except ValueError:  # it has none that can be read
        signature = inspect.Signature([Parameter("parameters", Parameter.VAR_KEYWORD)])
    _check_call(name, [*signature.parameters.values()], str(signature).strip("()"))
    return functools.partial(make, **name.parameters) if name.parameters else make


def _loaded_agent(name: CodeName) -> Callable[..., Any]:
    """The function, with its parameters; or an instance of a class, which is called for each episode."""
    solve: Callable[..., Any] = name.load()
    if inspect.isclass(solve):
        solve = _factory(name)()
        parameters: Mapping[str, Any] = {}
    else:
        parameters = name.parameters
    if not callable(solve):
        raise ConfigError(f"{name.where}: is a {type(solve).__name__}; an agent is a function of a row and a client")
    signature = inspect.signature(solve)
    own = replace(name, parameters=parameters)
    _check_call(own, [*signature.parameters.values()], str(signature).strip("()"), ("row", "client"))
    if not parameters:
        return solve
    return functools.update_wrapper(functools.partial(solve, **parameters), solve)


def _loaded_tools(name: CodeName) -> list[Callable[..., Any]]:
    """The tool, or those that an instance of a class has."""
    tool = name.load()
    if not inspect.isclass(tool):
        return [tool]
    try:
        instance = tool()
    except Exception as error:  # user code
        raise ConfigError(f"{name.where}: {name.name}() raised {type(error).__name__}: {error}") from error
    methods = inspect.getmembers(instance, inspect.ismethod)
    found: list[Callable[..., Any]] = [method for key, method in methods if not key.startswith("_")]
    if not found:
        raise ConfigError(f"{name.where}: {name.name} has no public method, so there is nothing to call. Add one")
    return found
