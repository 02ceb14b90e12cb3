"""Every algorithm by name, and how heavy modules are imported: for the command line, the docs and the tests."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Algorithm:
    """Where an algorithm's config and trainer live, and what it learns from."""

    name: str
    options: str  # "module:class"; imports without torch
    config: str  # "module:class"
    trainer: str  # "module:class"
    dataset: str
    docs: str

    def load_options(self) -> Any:
        """The class of its options, without those of HuggingFace."""
        return load(self.options)

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


@contextmanager
def uncollected() -> Iterator[None]:
    """Import transformers and what needs it inside this context.

    The imports make a million objects that live as long as the process. The collector would go through them again and
    again while they are made, and at the end of the process. Here it waits, and never looks at them later on.

    If transformers is imported already, objects of someone else may be garbage by now, so nothing changes.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_PREFERENCES = "preference pairs, with the columns prompt, chosen and rejected"
_UNPAIRED = "rows with the columns prompt, completion and label, or preference pairs"
_PROMPTS = "prompts, with the columns that the rewards read"
# An algorithm's name, and what the names of its classes begin with, say where all of it stands.
REGISTRY: dict[str, Algorithm] = {
    name: Algorithm(
        name=name,
        options=f"prefrl.options.{options}Options",
        config=f"prefrl.trainer.configs:{title}Config",
        trainer=f"prefrl.trainer.{name}_trainer:{title}Trainer",
        dataset=dataset,
        docs=f"docs/trainers/{name}.md",
    )
    for name, title, options, dataset in (
        ("sft", "SFT", "offline:SFT", "language-modeling or prompt-completion data"),
        ("dpo", "DPO", "offline:DPO", _PREFERENCES),
        ("kto", "KTO", "offline:KTO", _UNPAIRED),
        ("orpo", "ORPO", "offline:ORPO", _PREFERENCES),
        ("cpo", "CPO", "offline:CPO", _PREFERENCES),
        ("bco", "BCO", "offline:BCO", _UNPAIRED),
        ("reward", "Reward", "offline:RewardModel", "preference pairs, with the columns chosen and rejected"),
        ("grpo", "GRPO", "algorithms:GRPO", _PROMPTS),
        ("rloo", "RLOO", "algorithms:RLOO", _PROMPTS),
        ("reinforce_plus_plus", "ReinforcePlusPlus", "algorithms:ReinforcePlusPlus", _PROMPTS),
        ("ppo", "PPO", "algorithms:PPO", _PROMPTS),
        ("online_dpo", "OnlineDPO", "algorithms:OnlineDPO", _PROMPTS),
        ("distillation", "Distillation", "distillation:Distillation", "prompts, and completions of them if you like"),
    )
}
