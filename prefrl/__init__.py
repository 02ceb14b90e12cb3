"""prefrl: supervised fine-tuning and reinforcement learning of language models, as transformers Trainers.

Public names are imported on first use, so that `import prefrl` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefrl import errors
from prefrl.registry import REGISTRY, load

if TYPE_CHECKING:  # what `_PATHS` says, for those who read without running: type checkers and editors
    from prefrl.data.convert import extract_prompt as extract_prompt
    from prefrl.data.convert import unpair_preference_dataset as unpair_preference_dataset
    from prefrl.data.mixture import mix_datasets as mix_datasets
    from prefrl.errors import CheckpointError as CheckpointError
    from prefrl.errors import ConfigError as ConfigError
    from prefrl.errors import DataError as DataError
    from prefrl.errors import EpisodeError as EpisodeError
    from prefrl.errors import GenerationError as GenerationError
    from prefrl.errors import HubError as HubError
    from prefrl.errors import NonFiniteError as NonFiniteError
    from prefrl.errors import OutOfMemoryError as OutOfMemoryError
    from prefrl.errors import PrefrlError as PrefrlError
    from prefrl.errors import RewardError as RewardError
    from prefrl.errors import WeightSyncError as WeightSyncError
    from prefrl.rollout.episodes.environment import Environment as Environment
    from prefrl.rollout.episodes.environment import Observation as Observation
    from prefrl.trainer.bco_config import BCOConfig as BCOConfig
    from prefrl.trainer.bco_trainer import BCOTrainer as BCOTrainer
    from prefrl.trainer.callbacks.bema import BEMACallback as BEMACallback
    from prefrl.trainer.callbacks.log_completions import LogCompletionsCallback as LogCompletionsCallback
    from prefrl.trainer.callbacks.rich_progress import RichProgressCallback as RichProgressCallback
    from prefrl.trainer.cpo_config import CPOConfig as CPOConfig
    from prefrl.trainer.cpo_trainer import CPOTrainer as CPOTrainer
    from prefrl.trainer.dpo_config import DPOConfig as DPOConfig
    from prefrl.trainer.dpo_trainer import DPOTrainer as DPOTrainer
    from prefrl.trainer.grpo_config import GRPOConfig as GRPOConfig
    from prefrl.trainer.grpo_trainer import GRPOTrainer as GRPOTrainer
    from prefrl.trainer.kto_config import KTOConfig as KTOConfig
    from prefrl.trainer.kto_trainer import KTOTrainer as KTOTrainer
    from prefrl.trainer.online_dpo_config import OnlineDPOConfig as OnlineDPOConfig
    from prefrl.trainer.online_dpo_trainer import OnlineDPOTrainer as OnlineDPOTrainer
    from prefrl.trainer.orpo_config import ORPOConfig as ORPOConfig
    from prefrl.trainer.orpo_trainer import ORPOTrainer as ORPOTrainer
    from prefrl.trainer.ppo_config import PPOConfig as PPOConfig
    from prefrl.trainer.ppo_trainer import PPOTrainer as PPOTrainer
    from prefrl.trainer.reinforce_plus_plus_config import ReinforcePlusPlusConfig as ReinforcePlusPlusConfig
    from prefrl.trainer.reinforce_plus_plus_trainer import ReinforcePlusPlusTrainer as ReinforcePlusPlusTrainer
    from prefrl.trainer.reward_config import RewardConfig as RewardConfig
    from prefrl.trainer.reward_trainer import RewardTrainer as RewardTrainer
    from prefrl.trainer.rloo_config import RLOOConfig as RLOOConfig
    from prefrl.trainer.rloo_trainer import RLOOTrainer as RLOOTrainer
    from prefrl.trainer.sft_config import SFTConfig as SFTConfig
    from prefrl.trainer.sft_trainer import SFTTrainer as SFTTrainer

_PATHS = {path.partition(":")[2]: path for row in REGISTRY.values() for path in (row.config, row.trainer)}
_PATHS |= {
    "BEMACallback": "prefrl.trainer.callbacks.bema:BEMACallback",
    "Environment": "prefrl.rollout.episodes.environment:Environment",
    "LogCompletionsCallback": "prefrl.trainer.callbacks.log_completions:LogCompletionsCallback",
    "Observation": "prefrl.rollout.episodes.environment:Observation",
    "RichProgressCallback": "prefrl.trainer.callbacks.rich_progress:RichProgressCallback",
    "extract_prompt": "prefrl.data.convert:extract_prompt",
    "mix_datasets": "prefrl.data.mixture:mix_datasets",
    "unpair_preference_dataset": "prefrl.data.convert:unpair_preference_dataset",
}
_PATHS |= {name: f"prefrl.errors:{name}" for name in errors.__all__}

__all__ = [*_PATHS]  # strings, all of them
__version__ = "0.1.0"

if not TYPE_CHECKING:  # it would make every name a right one

    def __getattr__(name: str) -> Any:
        if name not in _PATHS:
            raise AttributeError(f"module 'prefrl' has no attribute {name!r}")
        return load(_PATHS[name])


def __dir__() -> list[str]:
    return sorted([*globals(), *_PATHS])
