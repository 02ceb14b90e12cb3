"""Every algorithm by name: read by the command line, the docs and the tests. Imports nothing heavy."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

__all__ = ["REGISTRY", "Algorithm", "load"]


@dataclass(frozen=True)
class Algorithm:
    """Where an algorithm's config and trainer live, and what it learns from."""

    name: str
    config: str  # "module:class"
    trainer: str  # "module:class"
    dataset: str
    docs: str

    def load_config(self) -> Any:
        """The config class; imports no trainer."""
        return load(self.config)

    def load_trainer(self) -> Any:
        """The trainer class."""
        return load(self.trainer)


def load(path: str) -> Any:
    """What a "module:name" path names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


REGISTRY: dict[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(
            name="sft",
            config="prefrl.trainer.sft_config:SFTConfig",
            trainer="prefrl.trainer.sft_trainer:SFTTrainer",
            dataset="language modelling or prompt-completion",
            docs="docs/trainers/sft.md",
        ),
        Algorithm(
            name="grpo",
            config="prefrl.trainer.grpo_config:GRPOConfig",
            trainer="prefrl.trainer.grpo_trainer:GRPOTrainer",
            dataset="prompt-only, with the columns that the rewards read",
            docs="docs/trainers/grpo.md",
        ),
    )
}
