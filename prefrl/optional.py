"""The only place that imports optional packages."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from prefrl.errors import ConfigError


class MissingPackageError(ConfigError, ImportError):
    """An option needs a package that is not installed."""


def is_installed(package: str) -> bool:
    """Whether `package` can be imported. It is not imported."""
    return importlib.util.find_spec(package) is not None


def require(package: str, *, extra: str, feature: str) -> ModuleType:
    """Import an optional package, or raise an error that names the extra to install.

    Args:
        package: Import name; dotted for a submodule.
        extra: The extra of prefrl that installs it.
        feature: What the user asked for; the error message starts with it, as in `GRPO with generation="vllm"`.
    Raises:
        MissingPackageError: The package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackageError(f"{feature} needs {package}: pip install 'prefrl[{extra}]'") from error
