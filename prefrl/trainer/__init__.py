"""Configs and trainers of the registry, imported on first use."""

from __future__ import annotations

from typing import Any

from prefrl.registry import REGISTRY, load

_PATHS = {path.partition(":")[2]: path for row in REGISTRY.values() for path in (row.config, row.trainer)}

__all__ = [*_PATHS]


def __getattr__(name: str) -> Any:
    if name not in _PATHS:
        raise AttributeError(f"module 'prefrl.trainer' has no attribute {name!r}")
    return load(_PATHS[name])
