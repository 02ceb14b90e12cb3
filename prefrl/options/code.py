"""Code of the user's that an option names: read from the name, looked up in its file without running it, imported."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from prefrl.errors import ConfigError, reason_of
from prefrl.options.names import nearest

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class CodeName:
    """`file.py:name`, `module:name` or `module.name`, perhaps with parameters: `file.py:name(size=3)`.

    Args:
        where: The option and its value, with which messages begin.
        place: The file or the module.
        name: What it contains.
        parameters: By name.
    """

    where: str
    place: str
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, entry: object, option: str) -> CodeName:
        """Read an entry of an option. Values of parameters are literals, which are not run.

        Raises:
            ConfigError: It is not such a name, or its parameters cannot be read.
        """
        where = f"{option}={entry!r}"
        if not isinstance(entry, str):
            raise ConfigError(f"{where}: must be the name of your code, such as my_code.py:Name")
        head, bracket, rest = entry.strip().partition("(")
        place, _, name = head.rpartition(":" if ":" in head else ".")
        if not place or not name.isidentifier() or head.endswith(".py"):
            raise ConfigError(
                f"{where}: does not say what the file or the module contains. Write file.py:Name, module:Name or "
                "module.Name"
            )
        return cls(where, place, name, _parameters(f"f({rest}", where) if bracket else {})

    @property
    def file(self) -> Path | None:
        """The file, if there is one below the working directory or at the path that the name gives."""
        is_path = self.place.endswith(".py")
        path = Path(self.place if is_path else f"{self.place.replace('.', '/')}.py")
        return path if is_path or path.is_file() else None

    def look_up(self) -> tuple[ast.Module, Definition | None]:
        """The content of the file, and the class or the function in it; None: it is imported there, or made.

        A module that is not below the working directory is not looked up: then both are empty.

        Raises:
            ConfigError: There is no such file, it is not Python, or does not have the name.
        """
        if self.file is None:
            return ast.Module([], []), None
        tree = self._parsed(self.file)
        found = {name: node for node in _statements(tree.body) for name in _names(node)}
        if self.name in found:
            node = found[self.name]
            return tree, node if isinstance(node, Definition) else None
        if "*" in found or "__getattr__" in found:
            return tree, None
        raise self._missing([name for name, node in found.items() if isinstance(node, Definition)])

    def _parsed(self, path: Path) -> ast.Module:
        try:
            return ast.parse(path.read_bytes())
        except FileNotFoundError:
            others = [each.name for each in path.parent.glob("*.py")]
            remedy = nearest(path.name, others) if others else "Paths are relative to the working directory."
            raise ConfigError(f"{self.where}: there is no file {self.place!r}. {remedy}") from None
        except OSError as error:
            raise ConfigError(f"{self.where}: cannot be read: {error.strerror}") from error
        except SyntaxError as error:
            raise ConfigError(f"{self.where}: {path}:{error.lineno}: {error.msg}") from error
        except ValueError as error:  # null bytes
            raise ConfigError(f"{self.where}: is not Python: {error}") from error

    def _missing(self, known: Sequence[str]) -> ConfigError:
        known = [name for name in known if not name.startswith("_")]
        remedy = nearest(self.name, known) if known else "It defines no class and no function."
        return ConfigError(f"{self.where}: {self.place} has no {self.name!r}. {remedy}")

    def load(self) -> Any:
        """Import it. A file is run once, also if several options name it.

        Raises:
            ConfigError: It cannot be imported, or the module does not have the name.
        """
        module = imported(self.place, self.where)
        if not hasattr(module, self.name):
            raise self._missing([name for name, value in vars(module).items() if callable(value)])
        return getattr(module, self.name)


def imported(place: str, where: str, *, remedy: str = "") -> ModuleType:
    """The module in a file, or with a name, which is also looked for in the working directory.

    Args:
        place: The file or the module.
        where: The option and its value, for messages.
        remedy: What to do if it cannot be imported, for messages.

    Raises:
        ConfigError: It cannot be imported.
    """
    sys.path.insert(0, "")  # unlike python -m, the command does not search the working directory
    try:
        return _in_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # the module is the user's, and may raise anything
        reason = str(error) if isinstance(error, ImportError) else reason_of(error)
        text = f"{where}: cannot be imported: {reason}{_line_of(error, place)}"
        raise ConfigError(". ".join(filter(None, (text, remedy)))) from error
    finally:
        sys.path.remove("")


def _in_file(path: Path) -> ModuleType:
    name = f"prefrl_code_of_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path.resolve()):
        return known
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _line_of(error: Exception, place: str) -> str:
    """Where the file raised, if it did."""
    step, line = error.__traceback__, None
    while step is not None:
        if step.tb_frame.f_code.co_filename == str(Path(place).resolve()):
            line = step.tb_lineno
        step = step.tb_next
    return "" if line is None else f" ({place}:{line})"


def _parameters(call: str, where: str) -> dict[str, Any]:
    try:
        node = ast.parse(call, mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("each needs its name")
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"{where}: the parameters cannot be read: {error}. Write them as Name(size=3, level='hard'), with texts, "
            "numbers, lists and mappings as values"
        ) from error


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements that the module runs itself, also those in its branches."""
    for node in body:
        yield node
        if not isinstance(node, Definition):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _names(node: ast.stmt) -> Iterator[str]:
    """The names that a statement gives to something."""
    if isinstance(node, Definition):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    else:
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
        yield from (
            one.id for part in targets if part is not None for one in ast.walk(part) if isinstance(one, ast.Name)
        )
