"""Configs and trainers of the registry, imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefrl.registry import REGISTRY, load

if TYPE_CHECKING:  # the names in `_PATHS` again, for type checkers and editors, which do not run the code
    from prefrl.trainer.bco_trainer import BCOTrainer as BCOTrainer
    from prefrl.trainer.configs import BCOConfig as BCOConfig
    from prefrl.trainer.configs import CPOConfig as CPOConfig
    from prefrl.trainer.configs import DistillationConfig as DistillationConfig
    from prefrl.trainer.configs import DPOConfig as DPOConfig
    from prefrl.trainer.configs import GRPOConfig as GRPOConfig
    from prefrl.trainer.configs import KTOConfig as KTOConfig
    from prefrl.trainer.configs import OnlineDPOConfig as OnlineDPOConfig
    from prefrl.trainer.configs import ORPOConfig as ORPOConfig
    from prefrl.trainer.configs import PPOConfig as PPOConfig
    from prefrl.trainer.configs import ReinforcePlusPlusConfig as ReinforcePlusPlusConfig
    from prefrl.trainer.configs import RewardConfig as RewardConfig
    from prefrl.trainer.configs import RLOOConfig as RLOOConfig
    from prefrl.trainer.configs import SFTConfig as SFTConfig
    from prefrl.trainer.cpo_trainer import CPOTrainer as CPOTrainer
    from prefrl.trainer.distillation_trainer import DistillationTrainer as DistillationTrainer
    from prefrl.trainer.dpo_trainer import DPOTrainer as DPOTrainer
    from prefrl.trainer.grpo_trainer import GRPOTrainer as GRPOTrainer
    from prefrl.trainer.kto_trainer import KTOTrainer as KTOTrainer
    from prefrl.trainer.online_dpo_trainer import OnlineDPOTrainer as OnlineDPOTrainer
    from prefrl.trainer.orpo_trainer import ORPOTrainer as ORPOTrainer
    from prefrl.trainer.ppo_trainer import PPOTrainer as PPOTrainer
    from prefrl.trainer.reinforce_plus_plus_trainer import ReinforcePlusPlusTrainer as ReinforcePlusPlusTrainer
    from prefrl.trainer.reward_trainer import RewardTrainer as RewardTrainer
    from prefrl.trainer.rloo_trainer import RLOOTrainer as RLOOTrainer
    from prefrl.trainer.sft_trainer import SFTTrainer as SFTTrainer

_PATHS = {path.partition(":")[2]: path for row in REGISTRY.values() for path in (row.config, row.trainer)}

__all__ = [*_PATHS]

if not TYPE_CHECKING:  # type checkers would take any attribute of the module as valid

    def __getattr__(name: str) -> Any:
        if name not in _PATHS:
            raise AttributeError(f"module 'prefrl.trainer' has no attribute {name!r}")
        return load(_PATHS[name])
