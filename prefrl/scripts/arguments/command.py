"""Command-line options that are not part of a config: model, data and rewards."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefrl.errors import ConfigError
from prefrl.options.fields import check_unset, opt
from prefrl.options.names import check_references
from prefrl.scripts.arguments.dataset_columns import SHAPING
from prefrl.scripts.arguments.dataset_config import DatasetMixtureConfig, ScriptArguments
from prefrl.scripts.arguments.model_config import ModelConfig
from prefrl.scripts.arguments.reward_entry import RewardEntry, reward_entries

__all__ = ["CommandArguments", "RewardArguments"]


@dataclass
class CommandArguments(ScriptArguments, ModelConfig, DatasetMixtureConfig):
    """Model and data of `prefrl <algorithm>`."""

    model_name_or_path: str = field(kw_only=True, metadata={"help": "Model: a name on the Hub or a folder."})

    def __post_init__(self) -> None:
        check_references({name: getattr(self, name) for name in ("model_name_or_path", "dataset_name")})
        for part in (ScriptArguments, ModelConfig, DatasetMixtureConfig):
            part.__post_init__(self)
        for number, data in enumerate(self.datasets):
            keys = ("path", "data_dir", "data_files")
            check_references({f"datasets[{number}].{key}": getattr(data, key) for key in keys})
        for bits in (4, 8):
            if getattr(self, f"load_in_{bits}bit") and not self.use_peft:
                raise ConfigError(
                    f"load_in_{bits}bit=True and use_peft=False: quantized weights cannot be trained. Set "
                    "use_peft=True."
                )
        self._check_data()
        self.streaming = self.streaming or (bool(self.datasets) and self.dataset_streaming)

    def _check_data(self) -> None:
        if bool(self.datasets) == (self.dataset_name is not None):
            given = "both are given" if self.datasets else "not given"
            raise ConfigError(f"dataset_name, datasets: {given}. Set one of them.")
        if self.datasets:
            names = ("dataset_config", "dataset_train_split", "dataset_revision", *SHAPING)
            remedy = "Set it for each dataset of datasets, by the names name, split, revision, columns and so on."
            check_unset(self, *names, because="datasets is set", remedy=remedy)
            return
        check_unset(self, "streaming", because="dataset_name is set", remedy="Set dataset_streaming.")
        remedy = "Set dataset_test_split; slices such as train[90%:] work."
        check_unset(self, "test_split_size", because="dataset_name is set", remedy=remedy)


@dataclass
class RewardArguments(CommandArguments):
    """Rewards, for the online algorithms."""

    reward_funcs: list[RewardEntry] | None = opt(
        None,
        "Rewards, in the order of reward_weights: built-in names, module.function or file.py:function for your own, "
        "and graders. Parameters follow in parentheses, string_check(reference='{answer}'); a YAML file may use a "
        "mapping instead, {name: string_check, reference: '{answer}'}.",
    )
    reward_model_name_or_path: str | None = opt(
        None, "A sequence-classification model as an additional reward, after those of reward_funcs."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_references({"reward_model_name_or_path": self.reward_model_name_or_path})
        self.reward_funcs = reward_entries(self.reward_funcs)
        if not self.reward_funcs and self.reward_model_name_or_path is None:
            raise ConfigError(
                "reward_funcs=None: at least one reward is needed. Set reward_funcs to a built-in name, a grader or "
                "module:function, or set reward_model_name_or_path."
            )
