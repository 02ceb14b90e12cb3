"""Options of the command line that are in no config: which model, which data, which rewards, LoRA."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from prefrl.errors import ConfigError
from prefrl.trainer.options import check_no_effect, opt

__all__ = ["RewardArguments", "ScriptArguments"]


@dataclass
class ScriptArguments:
    """Model, data and LoRA."""

    model_name_or_path: str = dataclasses.field(metadata={"help": "Model: a name on the Hub or a folder."})
    dataset_name: str = dataclasses.field(
        metadata={"help": "Dataset: a name on the Hub, a folder, or a .json, .jsonl or .parquet file."}
    )
    model_revision: str | None = opt(None, "Branch, tag or commit of the model on the Hub.")
    dataset_config: str | None = opt(None, "Configuration of a dataset that has several.")
    dataset_train_split: str = opt("train", "Split to train on; slices such as train[:90%] work.")
    dataset_test_split: str = opt("test", "Split to evaluate on; read only if eval_strategy is not no.")
    use_peft: bool = opt(False, "Train LoRA adapters instead of the model's own weights.")
    lora_r: int = opt(16, "LoRA: rank.")
    lora_alpha: int = opt(32, "LoRA: the update is scaled by lora_alpha / lora_r.")
    lora_dropout: float = opt(0.05, "LoRA: dropout on the adapter's input.")
    lora_target_modules: list[str] | None = opt(
        None, "LoRA: names of the layers that get adapters, or all-linear; None: peft's choice for the architecture."
    )

    def __post_init__(self) -> None:
        if self.use_peft:
            return
        for field in dataclasses.fields(self):
            if field.name.startswith("lora_"):
                check_no_effect(
                    name=field.name,
                    value=getattr(self, field.name),
                    unset=field.default,
                    because="use_peft=False",
                    remedy="Set use_peft=True.",
                )


@dataclass
class RewardArguments(ScriptArguments):
    """For algorithms that learn from rewards."""

    reward_funcs: list[str] | None = opt(
        None, "Rewards, in the order of reward_weights: built-in names, or module:function for your own."
    )
    reward_model_name_or_path: str | None = opt(
        None, "A sequence-classification model that gives one more reward, after those of reward_funcs."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reward_funcs and self.reward_model_name_or_path is None:
            raise ConfigError(
                "reward_funcs=None: at least one reward is needed. Set reward_funcs to a built-in name or to "
                "module:function, or set reward_model_name_or_path."
            )
