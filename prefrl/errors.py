"""Every error that prefrl raises on purpose, what may be shown of texts, and packages that may be missing."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EpisodeError",
    "GenerationError",
    "HubError",
    "MissingPackageError",
    "NonFiniteError",
    "OutOfMemoryError",
    "PrefrlError",
    "RewardError",
    "WeightSyncError",
]


class PrefrlError(Exception):
    """Base class of all errors that prefrl raises on purpose, which users can catch.

    Messages quote options, data and servers, so secrets in them are masked and control characters are escaped.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(without_secrets(message)))


class ConfigError(PrefrlError, ValueError):
    """An option, or a combination of options, cannot work."""


class DataError(PrefrlError, ValueError):
    """A dataset, a row of it or a chat template cannot be used."""


class RewardError(PrefrlError, RuntimeError):
    """A reward function failed, timed out or returned something that is not a reward."""


class GenerationError(PrefrlError, RuntimeError):
    """No completions could be generated."""


class AbsentServerError(GenerationError, ConnectionError):
    """A vLLM server does not answer within `vllm_server_timeout`."""


class EpisodeError(PrefrlError, RuntimeError):
    """A tool or an environment failed, or returned something that cannot be shown to the model."""


class WeightSyncError(PrefrlError, RuntimeError):
    """The weights of the policy could not be sent to the generator."""


class NonFiniteError(PrefrlError, RuntimeError):
    """The loss, the gradients or the weights of a training are NaN or infinite."""


class CheckpointError(PrefrlError, RuntimeError):
    """A checkpoint or a model could not be written where it belongs, or may not be read."""


class HubError(PrefrlError, RuntimeError):
    """The model could not be pushed to the Hub."""


class OutOfMemoryError(PrefrlError, RuntimeError):
    """The device or the host has too little memory for a pass, for generation or for a checkpoint."""


class MissingPackageError(ConfigError, ImportError):
    """An option needs a package that is not installed."""


def is_installed(package: str) -> bool:
    """Whether `package` can be imported. It is not imported."""
    return importlib.util.find_spec(package) is not None


def require(package: str, *, extra: str | None, feature: str) -> ModuleType:
    """Import an optional package, or raise an error that says what to install.

    Args:
        package: Import name; dotted for a submodule.
        extra: The extra of prefrl that installs it; None: there is none, the package is installed by its own name.
        feature: What the user asked for; the error message starts with it, as in `GRPO with generation="vllm"`.
    Raises:
        MissingPackageError: The package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = f"'prefrl[{extra}]'" if extra else package.partition(".")[0]
        raise MissingPackageError(f"{feature} needs {package}: pip install {name}") from error


def not_on_windows(feature: str) -> ConfigError:
    """The error for Windows, which cannot lock a run's folder or end processes with all that they have started.

    Args:
        feature: What the user asked for; the message starts with it.
    """
    return ConfigError(
        f"{feature} needs Linux or macOS, not Windows. Run it in the Windows Subsystem for Linux: `wsl --install`."
    )


def only_on_linux(feature: str, remedy: str) -> ConfigError:
    """The error for systems that have neither packages of vLLM nor the walls of a sandbox.

    Args:
        feature: What the user asked for; the message starts with it.
        remedy: What the user can do instead.
    """
    system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
    return ConfigError(f"{feature} needs Linux, not {system}. {remedy}")


MASK = "***"
# The `token` of a Hub is a secret, `pad_token` is not.
_SECRET = (
    r"(?:[a-z]+_)*(?:api_?key|authorization|passw(?:or)?d|secret)"
    r"|(?:(?:hub|push_to_hub|hf|(?:use_)?auth|access)_)?token"
)
_SECRET_NAME = re.compile(_SECRET, re.IGNORECASE)
# The user and password of a URL; tokens by their form; quoted values behind a secret's name, as in a printed mapping.
_LOGIN = re.compile(r"(?<=://)[^\s/'\"]+(?=@)")
_TOKEN = re.compile(r"\b(?:hf_|sk-)[\w-]{16,}|(?<=Bearer )[\w.~+/=-]{16,}")
_NAMED = re.compile(rf"(?<![\w-])({_SECRET})(['\"]?\s*[:=]\s*)(['\"])(?:(?!\3).)+\3", re.IGNORECASE)


def printable(text: str, *, max_characters: int | None = None, max_lines: int | None = None) -> str:
    r"""Text with control characters, invisible ones and those that change the direction of writing as `\x1b`.

    Line breaks and tabs are kept. The cost is that of the part that is kept, not that of the whole text.

    Args:
        text: Any text, such as a completion.
        max_characters: Characters after which it is cut off. None means no limit.
        max_lines: Lines after which it is cut off. None means no limit.

    Returns:
        The text; if it is cut off, the last line says so.
    """
    kept = text[:max_characters]
    if max_lines is not None:
        kept = "\n".join(kept.split("\n", max_lines)[:max_lines])
    shown = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in kept)
    return shown if len(kept) == len(text) else f"{shown}\n... ({len(text) - len(kept):,} more characters)"


def without_secrets(text: str) -> str:
    """Text with `***` for logins in URLs, tokens of a known form, and quoted values of names such as `password`."""
    text = _NAMED.sub(rf"\1\2\3{MASK}\3", text)
    return _TOKEN.sub(MASK, _LOGIN.sub(MASK, text))


def reason_of(error: BaseException) -> str:
    """An error of other code, for a message: its type and text in one line, without a full stop and secrets."""
    return printable(without_secrets(" ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")))


def cause_of(error: Exception) -> Exception | None:
    """What to raise an error `from` that quotes another one: nothing, if a file is not there, which says all."""
    return None if isinstance(error, OSError) else error


def masked(value: Any, name: str = "") -> Any:
    """An option's value as it may be logged: a copy, at any depth, with `***` for secrets.

    Args:
        value: The value. Only texts are changed.
        name: Its name, or the key under which a mapping has it. A text named `token` is a secret as a whole.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(masked(item, name) for item in value)
    if not isinstance(value, str):
        return value
    return MASK if value and _SECRET_NAME.fullmatch(name) else without_secrets(value)


def plain(value: Any) -> Any:
    """The value; a function, or another object that can be called, by its name, because its text has an address."""
    if not callable(value):
        return value
    while isinstance(value, functools.partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
