"""prefrl: supervised fine-tuning and reinforcement learning of language models, as transformers Trainers.

Public names are imported on first use, so that `import prefrl` is quick.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from prefrl import errors
from prefrl.registry import REGISTRY, load

if TYPE_CHECKING:  # what `_PATHS` says, for those who read without running: type checkers and editors
    from prefrl.data.chat import common_prefix_length as common_prefix_length
    from prefrl.data.chat_templates import add_response_schema as add_response_schema
    from prefrl.data.chat_templates import apply_chat_template as apply_chat_template
    from prefrl.data.chat_templates import clone_chat_template as clone_chat_template
    from prefrl.data.chat_templates import get_training_chat_template as get_training_chat_template
    from prefrl.data.chat_templates import has_generation_markers as has_generation_markers
    from prefrl.data.chat_templates import is_chat_template_prefix_preserving as is_chat_template_prefix_preserving
    from prefrl.data.chat_templates import is_chat_template_stop_token_trained as is_chat_template_stop_token_trained
    from prefrl.data.chat_templates import is_conversational as is_conversational
    from prefrl.data.chat_templates import is_conversational_from_value as is_conversational_from_value
    from prefrl.data.chat_templates import maybe_apply_chat_template as maybe_apply_chat_template
    from prefrl.data.chat_templates import maybe_convert_to_chatml as maybe_convert_to_chatml
    from prefrl.data.chat_templates import parse_response as parse_response
    from prefrl.data.chat_templates import prepare_multimodal_messages as prepare_multimodal_messages
    from prefrl.data.chat_templates import supports_tool_calling as supports_tool_calling
    from prefrl.data.formats import get_dataset_column_names as get_dataset_column_names
    from prefrl.data.packing import pack_dataset as pack_dataset
    from prefrl.data.sources import extract_prompt as extract_prompt
    from prefrl.data.sources import maybe_extract_prompt as maybe_extract_prompt
    from prefrl.data.sources import maybe_unpair_preference_dataset as maybe_unpair_preference_dataset
    from prefrl.data.sources import mix_datasets as mix_datasets
    from prefrl.data.sources import unpair_preference_dataset as unpair_preference_dataset
    from prefrl.errors import CheckpointError as CheckpointError
    from prefrl.errors import ConfigError as ConfigError
    from prefrl.errors import DataError as DataError
    from prefrl.errors import EpisodeError as EpisodeError
    from prefrl.errors import GenerationError as GenerationError
    from prefrl.errors import HubError as HubError
    from prefrl.errors import MissingPackageError as MissingPackageError
    from prefrl.errors import NonFiniteError as NonFiniteError
    from prefrl.errors import OutOfMemoryError as OutOfMemoryError
    from prefrl.errors import PrefrlError as PrefrlError
    from prefrl.errors import RewardError as RewardError
    from prefrl.errors import WeightSyncError as WeightSyncError
    from prefrl.models.reference import create_reference_model as create_reference_model
    from prefrl.rollout.episodes.command import CommandAgent as CommandAgent
    from prefrl.rollout.episodes.environment import Agent as Agent
    from prefrl.rollout.episodes.environment import Environment as Environment
    from prefrl.rollout.episodes.environment import Observation as Observation
    from prefrl.rollout.episodes.harbor import HarborBashEnv as HarborBashEnv
    from prefrl.rollout.episodes.harbor import HarborEnv as HarborEnv
    from prefrl.rollout.episodes.harbor import HarborSpec as HarborSpec
    from prefrl.rollout.episodes.openreward import OpenRewardSpec as OpenRewardSpec
    from prefrl.rollout.gateway.formats import Client as Client
    from prefrl.scripts.arguments.datasets import DatasetConfig as DatasetConfig
    from prefrl.scripts.arguments.datasets import DatasetMixtureConfig as DatasetMixtureConfig
    from prefrl.scripts.arguments.datasets import ScriptArguments as ScriptArguments
    from prefrl.scripts.arguments.datasets import get_dataset as get_dataset
    from prefrl.scripts.arguments.model_config import ModelConfig as ModelConfig
    from prefrl.scripts.arguments.model_config import get_kbit_device_map as get_kbit_device_map
    from prefrl.scripts.arguments.model_config import get_peft_config as get_peft_config
    from prefrl.scripts.arguments.model_config import get_quantization_config as get_quantization_config
    from prefrl.scripts.declaration import init_zero_verbose as init_zero_verbose
    from prefrl.scripts.parsing.argument_parser import ArgumentParser as ArgumentParser
    from prefrl.scripts.parsing.argument_parser import TrlParser as TrlParser
    from prefrl.trainer.bco_trainer import BCOTrainer as BCOTrainer
    from prefrl.trainer.callbacks import BEMACallback as BEMACallback
    from prefrl.trainer.callbacks import LogCompletionsCallback as LogCompletionsCallback
    from prefrl.trainer.callbacks import WeaveCallback as WeaveCallback
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
    from prefrl.trainer.progress.views import RichProgressCallback as RichProgressCallback
    from prefrl.trainer.reinforce_plus_plus_trainer import ReinforcePlusPlusTrainer as ReinforcePlusPlusTrainer
    from prefrl.trainer.reward_trainer import RewardTrainer as RewardTrainer
    from prefrl.trainer.rloo_trainer import RLOOTrainer as RLOOTrainer
    from prefrl.trainer.sft_trainer import SFTTrainer as SFTTrainer

_PATHS = {path.partition(":")[2]: path for row in REGISTRY.values() for path in (row.config, row.trainer)}
_PATHS |= {
    "Agent": "prefrl.rollout.episodes.environment:Agent",
    "ArgumentParser": "prefrl.scripts.parsing.argument_parser:ArgumentParser",
    "Client": "prefrl.rollout.gateway.formats:Client",
    "CommandAgent": "prefrl.rollout.episodes.command:CommandAgent",
    "DatasetConfig": "prefrl.scripts.arguments.datasets:DatasetConfig",
    "DatasetMixtureConfig": "prefrl.scripts.arguments.datasets:DatasetMixtureConfig",
    "Environment": "prefrl.rollout.episodes.environment:Environment",
    "HarborBashEnv": "prefrl.rollout.episodes.harbor:HarborBashEnv",
    "HarborEnv": "prefrl.rollout.episodes.harbor:HarborEnv",
    "HarborSpec": "prefrl.rollout.episodes.harbor:HarborSpec",
    "OpenRewardSpec": "prefrl.rollout.episodes.openreward:OpenRewardSpec",
    "ModelConfig": "prefrl.scripts.arguments.model_config:ModelConfig",
    "Observation": "prefrl.rollout.episodes.environment:Observation",
    "ScriptArguments": "prefrl.scripts.arguments.datasets:ScriptArguments",
    "BEMACallback": "prefrl.trainer.callbacks:BEMACallback",
    "LogCompletionsCallback": "prefrl.trainer.callbacks:LogCompletionsCallback",
    "WeaveCallback": "prefrl.trainer.callbacks:WeaveCallback",
    "RichProgressCallback": "prefrl.trainer.progress.views:RichProgressCallback",
    "TrlParser": "prefrl.scripts.parsing.argument_parser:TrlParser",
    "add_response_schema": "prefrl.data.chat_templates:add_response_schema",
    "apply_chat_template": "prefrl.data.chat_templates:apply_chat_template",
    "clone_chat_template": "prefrl.data.chat_templates:clone_chat_template",
    "create_reference_model": "prefrl.models.reference:create_reference_model",
    "extract_prompt": "prefrl.data.sources:extract_prompt",
    "get_dataset": "prefrl.scripts.arguments.datasets:get_dataset",
    "get_kbit_device_map": "prefrl.scripts.arguments.model_config:get_kbit_device_map",
    "get_peft_config": "prefrl.scripts.arguments.model_config:get_peft_config",
    "get_quantization_config": "prefrl.scripts.arguments.model_config:get_quantization_config",
    "get_training_chat_template": "prefrl.data.chat_templates:get_training_chat_template",
    "init_zero_verbose": "prefrl.scripts.declaration:init_zero_verbose",
    "is_conversational": "prefrl.data.chat_templates:is_conversational",
    "is_conversational_from_value": "prefrl.data.chat_templates:is_conversational_from_value",
    "maybe_apply_chat_template": "prefrl.data.chat_templates:maybe_apply_chat_template",
    "maybe_convert_to_chatml": "prefrl.data.chat_templates:maybe_convert_to_chatml",
    "maybe_extract_prompt": "prefrl.data.sources:maybe_extract_prompt",
    "maybe_unpair_preference_dataset": "prefrl.data.sources:maybe_unpair_preference_dataset",
    "mix_datasets": "prefrl.data.sources:mix_datasets",
    "pack_dataset": "prefrl.data.packing:pack_dataset",
    "prepare_multimodal_messages": "prefrl.data.chat_templates:prepare_multimodal_messages",
    "supports_tool_calling": "prefrl.data.chat_templates:supports_tool_calling",
    "common_prefix_length": "prefrl.data.chat:common_prefix_length",
    "get_dataset_column_names": "prefrl.data.formats:get_dataset_column_names",
    "has_generation_markers": "prefrl.data.chat_templates:has_generation_markers",
    "is_chat_template_prefix_preserving": "prefrl.data.chat_templates:is_chat_template_prefix_preserving",
    "is_chat_template_stop_token_trained": "prefrl.data.chat_templates:is_chat_template_stop_token_trained",
    "parse_response": "prefrl.data.chat_templates:parse_response",
    "unpair_preference_dataset": "prefrl.data.sources:unpair_preference_dataset",
}
_PATHS |= {name: f"prefrl.errors:{name}" for name in errors.__all__}

# What libraries say of themselves, which no user of prefrl can change: logger and start of the text. The first three
# are imported by transformers, whether a training uses them or not.
_NOISE = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU",
    "torchao": "Failed to load",
    "torch.utils._pytree": "%s is an Enum subclass",
    "DeepSpeed": "Setting accelerator to CPU",
}
for _name in _NOISE:
    logging.getLogger(_name).addFilter(lambda record: not str(record.msg).startswith(_NOISE[record.name]))
# peft 0.21 reads the old name.
warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)

__all__ = [*_PATHS]  # strings, all of them
__version__ = "0.1.0"

if not TYPE_CHECKING:  # it would make every name a right one

    def __getattr__(name: str) -> Any:
        if name in _PATHS:
            return load(_PATHS[name])
        missing = f"module 'prefrl' has no attribute {name!r}"
        if name.startswith("_") or find_spec(f"prefrl.{name}"):  # a module that is not imported yet
            raise AttributeError(missing)
        from prefrl.options.names import nearest
        from prefrl.scripts.migrate.names import NAMES

        remedy = f"prefrl has no {name}: {NAMES[name]}" if name in NAMES else None
        text = remedy or f"{missing}. {nearest(name, __all__, otherwise='See dir(prefrl).')}"
        # Python replaces the text of an AttributeError in `from prefrl import ...`.
        is_import = inspect.currentframe().f_back.f_globals.get("__name__") == "importlib._bootstrap"
        raise ImportError(text, name="prefrl") if is_import else AttributeError(text)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PATHS])
