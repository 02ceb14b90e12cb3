"""Names that people write: the nearest known one, those of other libraries and of their own code, and unclear ones."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from prefrl.errors import ConfigError, reason_of


def nearest(name: str, known: Collection[str], *, otherwise: str | None = None) -> str:
    """A question with the known name most similar to `name`. If none is similar: `otherwise`, or all known names.

    Args:
        name: The unknown name.
        known: The possible names.
        otherwise: Text to return if the list of names is too long to print.
    """
    match = _nearest_of(name, known)
    if match is not None:
        return f"Did you mean {match!r}?"
    return otherwise or f"Known: {', '.join(sorted(known))}."


def _nearest_of(name: str, known: Collection[str]) -> str | None:
    """The name that was misspelled, or None if no name is near enough that the guess would be a good one.

    That is one that shares three quarters of its letters in their order, one with the same letters in another order,
    or the only one that has all words of the name among its own, such as `record_shapes` for `shapes`.
    """
    plain = {match.lstrip("-"): match for match in known}  # dashes in front are no similarity
    name = name.lstrip("-")
    similar = difflib.get_close_matches(name, plain, n=1, cutoff=0.75)
    swapped = [match for match in difflib.get_close_matches(name, plain) if sorted(match) == sorted(name)]
    words = {*_words_of(name)}
    longer = [match for match in plain if words and words <= {*_words_of(match)}]
    found = [*similar, *swapped, *(longer if len(longer) == 1 else ())]
    return plain[found[0]] if found else None


def _words_of(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", name.lower()) if word]


@contextmanager
def about_evaluations() -> Iterator[None]:
    """Inside this context, errors name `eval_reward_funcs` and `eval_reward_weights` for the options of training."""
    try:
        yield
    except ConfigError as error:
        text = re.sub(r"\breward_(funcs|weights)\b", r"eval_reward_\1", str(error))
        raise ConfigError(text) from error


def check_known(option: str, name: str, known: Collection[str], what: str) -> None:
    """Reject a name that an option does not know.

    Raises:
        ConfigError: Has a suggestion.
    """
    if name not in known:
        raise ConfigError(f"{option}={name!r}: unknown {what}. {nearest(name, known)}")


_OLD_METRIC = re.compile(r"(eval_(?:.*_)?)?(?:(completion_length)|reward/(.+))")


def current_metric(name: str) -> str:
    """The metric that a name means. Earlier versions of TRL have `completion_length` and `reward/NAME`."""
    found = _OLD_METRIC.fullmatch(name)
    if found is None:
        return name
    return (found[1] or "") + ("completions/mean_length" if found[2] else f"rewards/{found[3]}/mean")


FOREIGN_FILE = Path(__file__).with_name("foreign.json")

# Arguments of TRL's trainers that must be None here, and why.
ARGUMENTS: dict[str, str] = {
    "data_collator": "the trainer lays out batches itself",
    "compute_loss_func": "a trainer's loss is its algorithm. Derive from the trainer and write its method loss",
    "optimizer_cls_and_kwargs": "give optimizers=(optimizer, None), or the options optim and optim_args",
    "preprocess_logits_for_metrics": "no logits are kept; compute_metrics gets the most likely tokens, or rewards",
    "model_init": "load the model and give it as model",
    "rollout_func": "give an agent, a function that asks the policy over a chat API, or write an environment, whose "
    "methods respond and edit decide what follows a completion",
}
# Arguments of TRL's trainers by another name.
TRAINER_NAMES: dict[str, str] = {
    "tokenizer": "processing_class",
    "config": "args",
    "reward_model": "reward_funcs",
    "policy": "model",
    "ref_policy": "ref_model",
}


def advice(name: str, known: Collection[str]) -> str | None:
    """What to do about an unknown option that is another library's; None if it is no such name.

    Args:
        name: The unknown option, or only the last part of a path of keys. Dashes before it do not count.
        known: The options that there are where it was given.
    """
    name = name.lstrip("-").replace("-", "_")
    whole = [(library, [rows[name]]) for library, rows in _libraries().items() if name in rows]
    parts = [
        (library, [row for path, row in rows.items() if path.endswith(f".{name}")])
        for library, rows in _libraries().items()
    ]
    for library, found in [*whole, *parts]:
        texts = {says for option, says in found if not option or option in known}
        if len(texts) == 1:
            whose = "" if library == "others" else f", an option of {library},"
            return f"{name!r}{whose} {texts.pop()}."
    return None


@cache
def _libraries() -> Mapping[str, Mapping[str, tuple[str, str]]]:
    """For each library, by name: the option that a config must have for the advice (or ""), and the advice."""
    libraries: Mapping[str, Mapping[str, tuple[str, str]]] = json.loads(FOREIGN_FILE.read_text(encoding="utf-8"))
    return libraries


_REFERENCE = re.compile(r"\$\{[^}]*\}?")


def check_references(paths: Mapping[str, Any]) -> None:
    """Refuse paths with references: they would be names of folders.

    Args:
        paths: Options by name; None, a text, or texts in lists and mappings.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    for name, value in paths.items():
        if (found := _REFERENCE.search(str(value))) is not None:
            raise ConfigError(
                f"{name}={value!r}: the reference {found[0]} is not replaced by what it stands for. Write out the "
                "path."
            )


_COMMIT = re.compile(r"[0-9a-f]{40}")


def unpinned_code(model: str | os.PathLike[str], revision: str | None) -> str | None:
    """A warning if the code of a model on the Hub runs in whatever version the Hub has today, else None.

    Args:
        model: Name or path of a model that is loaded with `trust_remote_code=True`.
        revision: Branch, tag or commit; only a commit always means the same code.
    """
    if os.path.isdir(model) or (revision is not None and _COMMIT.fullmatch(revision)):
        return None
    return (
        f"trust_remote_code=True with revision={revision!r}: code from the repository of {os.fspath(model)!r} runs in "
        "this process, and its owner can change it at any time. Set the revision to the 40 digits of a commit."
    )


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


# How the modules of a user's files are called.
CODE_OF_FILE = "prefrl_code_of_"


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
    path = Path(place).resolve()
    name = f"{CODE_OF_FILE}{path.stem}" if place.endswith(".py") else place
    known = sys.modules.get(name)
    if known is not None and name != place and known.__file__ == str(path):
        return known
    try:
        if name == place:
            return importlib.import_module(name)
        spec: Any = importlib.util.spec_from_file_location(name, path)
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look for it there
        spec.loader.exec_module(module)
        return module
    except Exception as error:  # the module is the user's, and may raise anything
        if name != place:
            sys.modules.pop(name, None)
        reason = str(error) if isinstance(error, ImportError) else reason_of(error)
        text = f"{where}: cannot be imported: {reason}{_line_of(error, place)}"
        raise ConfigError(". ".join(filter(None, (text, remedy)))) from error
    finally:
        sys.path.remove("")


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
