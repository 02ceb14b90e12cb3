"""prefrl: supervised fine-tuning and reinforcement learning of language models, as transformers Trainers.

Public names are imported on first use, so that `import prefrl` is quick.
"""

from __future__ import annotations

from typing import Any

from prefrl import errors
from prefrl.registry import REGISTRY, load

_PATHS = {path.partition(":")[2]: path for row in REGISTRY.values() for path in (row.config, row.trainer)}
_PATHS |= {
    "extract_prompt": "prefrl.data.convert:extract_prompt",
    "mix_datasets": "prefrl.data.mixture:mix_datasets",
    "unpair_preference_dataset": "prefrl.data.convert:unpair_preference_dataset",
}
_PATHS |= {name: f"prefrl.errors:{name}" for name in errors.__all__}

__all__ = [*_PATHS]  # strings, all of them
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _PATHS:
        raise AttributeError(f"module 'prefrl' has no attribute {name!r}")
    return load(_PATHS[name])


def __dir__() -> list[str]:
    return sorted([*globals(), *_PATHS])
