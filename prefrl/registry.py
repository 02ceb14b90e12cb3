"""Every algorithm by name: read by the command line, the docs and the tests. Imports nothing heavy."""

from __future__ import annotations

import importlib
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


REGISTRY: dict[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(
            name="sft",
            options="prefrl.options.offline:SFTOptions",
            config="prefrl.trainer.configs:SFTConfig",
            trainer="prefrl.trainer.sft_trainer:SFTTrainer",
            dataset="language modeling or prompt-completion",
            docs="docs/trainers/sft.md",
        ),
        Algorithm(
            name="dpo",
            options="prefrl.options.offline:DPOOptions",
            config="prefrl.trainer.configs:DPOConfig",
            trainer="prefrl.trainer.dpo_trainer:DPOTrainer",
            dataset="preference: prompt, chosen, rejected",
            docs="docs/trainers/dpo.md",
        ),
        Algorithm(
            name="kto",
            options="prefrl.options.offline:KTOOptions",
            config="prefrl.trainer.configs:KTOConfig",
            trainer="prefrl.trainer.kto_trainer:KTOTrainer",
            dataset="unpaired preference (prompt, completion, label), or preference",
            docs="docs/trainers/kto.md",
        ),
        Algorithm(
            name="orpo",
            options="prefrl.options.offline:ORPOOptions",
            config="prefrl.trainer.configs:ORPOConfig",
            trainer="prefrl.trainer.orpo_trainer:ORPOTrainer",
            dataset="preference: prompt, chosen, rejected",
            docs="docs/trainers/orpo.md",
        ),
        Algorithm(
            name="cpo",
            options="prefrl.options.offline:CPOOptions",
            config="prefrl.trainer.configs:CPOConfig",
            trainer="prefrl.trainer.cpo_trainer:CPOTrainer",
            dataset="preference: prompt, chosen, rejected",
            docs="docs/trainers/cpo.md",
        ),
        Algorithm(
            name="bco",
            options="prefrl.options.offline:BCOOptions",
            config="prefrl.trainer.configs:BCOConfig",
            trainer="prefrl.trainer.bco_trainer:BCOTrainer",
            dataset="unpaired preference (prompt, completion, label), or preference",
            docs="docs/trainers/bco.md",
        ),
        Algorithm(
            name="reward",
            options="prefrl.options.offline:RewardModelOptions",
            config="prefrl.trainer.configs:RewardConfig",
            trainer="prefrl.trainer.reward_trainer:RewardTrainer",
            dataset="preference: chosen, rejected",
            docs="docs/trainers/reward.md",
        ),
        Algorithm(
            name="grpo",
            options="prefrl.options.algorithms:GRPOOptions",
            config="prefrl.trainer.configs:GRPOConfig",
            trainer="prefrl.trainer.grpo_trainer:GRPOTrainer",
            dataset="prompt-only, with the columns that the rewards read",
            docs="docs/trainers/grpo.md",
        ),
        Algorithm(
            name="rloo",
            options="prefrl.options.algorithms:RLOOOptions",
            config="prefrl.trainer.configs:RLOOConfig",
            trainer="prefrl.trainer.rloo_trainer:RLOOTrainer",
            dataset="prompt-only, with the columns that the rewards read",
            docs="docs/trainers/rloo.md",
        ),
        Algorithm(
            name="reinforce_plus_plus",
            options="prefrl.options.algorithms:ReinforcePlusPlusOptions",
            config="prefrl.trainer.configs:ReinforcePlusPlusConfig",
            trainer="prefrl.trainer.reinforce_plus_plus_trainer:ReinforcePlusPlusTrainer",
            dataset="prompt-only, with the columns that the rewards read",
            docs="docs/trainers/reinforce_plus_plus.md",
        ),
        Algorithm(
            name="ppo",
            options="prefrl.options.algorithms:PPOOptions",
            config="prefrl.trainer.configs:PPOConfig",
            trainer="prefrl.trainer.ppo_trainer:PPOTrainer",
            dataset="prompt-only, with the columns that the rewards read",
            docs="docs/trainers/ppo.md",
        ),
        Algorithm(
            name="online_dpo",
            options="prefrl.options.algorithms:OnlineDPOOptions",
            config="prefrl.trainer.configs:OnlineDPOConfig",
            trainer="prefrl.trainer.online_dpo_trainer:OnlineDPOTrainer",
            dataset="prompt-only, with the columns that the rewards read",
            docs="docs/trainers/online_dpo.md",
        ),
    )
}
