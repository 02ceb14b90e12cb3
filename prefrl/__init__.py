"""prefrl: supervised fine-tuning and reinforcement learning of language models, as transformers Trainers.

Public names are imported on first use, so that `import prefrl` is quick.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "GRPOConfig": "prefrl.trainer.grpo_config",
    "GRPOTrainer": "prefrl.trainer.grpo_trainer",
    "SFTConfig": "prefrl.trainer.sft_config",
    "SFTTrainer": "prefrl.trainer.sft_trainer",
    "ConfigError": "prefrl.errors",
    "DataError": "prefrl.errors",
    "GenerationError": "prefrl.errors",
    "PrefrlError": "prefrl.errors",
    "RewardError": "prefrl.errors",
    "WeightSyncError": "prefrl.errors",
}

__all__ = [*_HOME]  # strings, all of them
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'prefrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
