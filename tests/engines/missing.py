"""A plugin of pytest in the processes of engines: packages that these import, and of which the checks use nothing."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

# They are large, need a GPU, or start processes.
PACKAGES = ("ray", "renderers", "vllm", "monarch", "torchstore", "torch.utils.tensorboard", "wandb", "torchdata")


class Base:
    """In the place of a class that has subclasses."""


class Missing(MetaPathFinder, Loader):
    """Finds these packages, with everything in them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        is_missing = f"{name}.".startswith(tuple(f"{package}." for package in PACKAGES))
        return ModuleSpec(name, self, is_package=True) if is_missing else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __path__=[], Actor=Base)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, Missing())
