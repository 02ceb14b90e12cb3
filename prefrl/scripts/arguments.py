"""Command-line options that are not part of a config: model, data, rewards, LoRA and quantization."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.options.fields import check_fields, check_no_effect, opt, parse_json
from prefrl.options.suggest import nearest

__all__ = ["DatasetPart", "RewardArguments", "ScriptArguments"]

# The names of our options in peft.LoraConfig.
_PEFT_NAMES = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "lora_init": "init_lora_weights",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}


@dataclass(frozen=True)
class DatasetPart:
    """A dataset, or one part of a mixture."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    weight: float | None = None


@dataclass
class ScriptArguments:
    """Model, data, LoRA and quantization."""

    model_name_or_path: str = dataclasses.field(metadata={"help": "Model: a name on the Hub or a folder."})
    dataset_name: str | None = opt(
        None, "Dataset: a name on the Hub, a folder, or a .json, .jsonl or .parquet file. Set this or datasets."
    )
    model_revision: str | None = opt(None, "Branch, tag or commit of the model on the Hub.")
    dataset_config: str | None = opt(None, "Configuration of a dataset that has several.")
    dataset_train_split: str = opt("train", "Split to train on; slices such as train[:90%] work.")
    dataset_test_split: str = opt("test", "Split to evaluate on; read only if eval_strategy is not no.")
    dataset_streaming: bool = opt(False, "Read datasets as streams during training. Needs max_steps.")
    datasets: list[dict[str, Any]] | str | None = opt(
        None,
        "Datasets to mix: a list in the YAML file, JSON on the command line. Each has a path and may have name, "
        "data_dir, data_files, split, columns (those to keep) and weight (its share of the rows, relative to the "
        "others; without weights all rows are read).",
    )
    load_in_4bit: bool = opt(False, "Quantize the model to 4 bits when it is loaded. Needs use_peft.")
    load_in_8bit: bool = opt(False, "Quantize the model to 8 bits when it is loaded. Needs use_peft.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = opt("nf4", "load_in_4bit: data type of the weights.")
    use_bnb_nested_quant: bool = opt(False, "load_in_4bit: also quantize the scales of the weights.")
    use_peft: bool = opt(False, "Train LoRA adapters instead of the model's own weights.")
    lora_r: Annotated[int, Ge(1)] = opt(16, "LoRA: rank.")
    lora_alpha: Annotated[int, Gt(0)] = opt(32, "LoRA: the update is scaled by lora_alpha / lora_r.")
    lora_dropout: Annotated[float, Ge(0), Le(1)] = opt(0.05, "LoRA: dropout on the adapter's input.")
    lora_target_modules: list[str] | None = opt(
        None, "LoRA: names of the layers that get adapters, or all-linear; None: peft's choice for the architecture."
    )
    lora_target_parameters: list[str] | None = opt(
        None, "LoRA: names of parameters that get adapters, for experts that are not layers. Needs lora_dropout=0."
    )
    lora_modules_to_save: list[str] | None = opt(None, "LoRA: names of layers that are trained in full.")
    lora_rank_pattern: dict[str, int] | str | None = opt(
        None, "LoRA: ranks of single layers, by a regular expression for their names; JSON on the command line."
    )
    lora_alpha_pattern: dict[str, int] | str | None = opt(
        None, "LoRA: lora_alpha of single layers, by a regular expression for their names; JSON on the command line."
    )
    lora_init: Literal["gaussian", "pissa", "olora", "orthogonal"] | None = opt(
        None, "LoRA: initialization, see init_lora_weights of peft.LoraConfig. None: as in the LoRA paper."
    )
    use_rslora: bool = opt(False, "LoRA: scale the update by lora_alpha / sqrt(lora_r).")
    use_dora: bool = opt(False, "LoRA: also train the magnitude of each weight vector (DoRA).")

    def __post_init__(self) -> None:
        check_fields(self)
        parse_json(self, "lora_rank_pattern", "lora_alpha_pattern")
        self._check_peft()
        self._check_quantization()
        self._check_datasets()

    @property
    def lora_options(self) -> dict[str, Any]:
        """Arguments for `peft.LoraConfig`. Options that are None are left to peft."""
        values = {theirs: getattr(self, ours) for ours, theirs in _PEFT_NAMES.items()}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def bits(self) -> Literal[4, 8] | None:
        """The number of bits that the model's weights are quantized to; None: not quantized."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else None

    def parts(self) -> list[DatasetPart]:
        """The entries of `datasets`."""
        entries = _read_list(self.datasets) if isinstance(self.datasets, str) else self.datasets or []
        return [_part(f"datasets[{i}]", entry) for i, entry in enumerate(entries)]

    def _check_peft(self) -> None:
        if not self.use_peft:
            self._check_unset(*_PEFT_NAMES, because="use_peft=False", remedy="Set use_peft=True.")
        if self.lora_target_parameters and self.lora_dropout > 0:
            raise ConfigError(
                f"lora_dropout={self.lora_dropout}: must be 0 with lora_target_parameters, whose adapters have no "
                "dropout. Set lora_dropout=0."
            )

    def _check_quantization(self) -> None:
        if self.load_in_4bit and self.load_in_8bit:
            raise ConfigError("load_in_4bit=True and load_in_8bit=True: set one of them")
        if self.bits is not None and not self.use_peft:
            raise ConfigError(
                f"load_in_{self.bits}bit=True and use_peft=False: quantized weights cannot be trained. "
                "Set use_peft=True."
            )
        if not self.load_in_4bit:
            names = ("bnb_4bit_quant_type", "use_bnb_nested_quant")
            self._check_unset(*names, because="load_in_4bit=False", remedy="Set load_in_4bit=True.")

    def _check_datasets(self) -> None:
        is_mixture = bool(self.parts())
        if is_mixture == (self.dataset_name is not None):
            given = "both are given" if is_mixture else "not given"
            raise ConfigError(f"dataset_name, datasets: {given}. Set one of them.")
        if is_mixture:
            names = ("dataset_config", "dataset_train_split")
            self._check_unset(*names, because="datasets is set", remedy="Set name and split in datasets.")

    def _check_unset(self, *names: str, because: str, remedy: str) -> None:
        for field in dataclasses.fields(self):
            if field.name in names:
                value = getattr(self, field.name)
                check_no_effect(name=field.name, value=value, unset=field.default, because=because, remedy=remedy)


@dataclass
class RewardArguments(ScriptArguments):
    """For algorithms that learn from rewards."""

    reward_funcs: list[str] | None = opt(
        None,
        "Rewards, in the order of reward_weights: built-in names, module:function for your own, or graders with their "
        "parameters, such as string_check(reference='{answer}').",
    )
    reward_model_name_or_path: str | None = opt(
        None, "A sequence-classification model as one more reward, after those of reward_funcs."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reward_funcs and self.reward_model_name_or_path is None:
            raise ConfigError(
                "reward_funcs=None: at least one reward is needed. Set reward_funcs to a built-in name, a grader or "
                "module:function, or set reward_model_name_or_path."
            )


def _read_list(text: str) -> list[Any]:
    try:
        entries = json.loads(text)
    except json.JSONDecodeError:
        entries = None
    if not isinstance(entries, list):
        raise ConfigError(f'datasets={text!r}: must be a JSON list such as [{{"path": "a.jsonl"}}]')
    return entries


def _part(where: str, entry: Any) -> DatasetPart:
    if not isinstance(entry, dict) or "path" not in entry:
        raise ConfigError(f"{where}={entry!r}: must be a mapping with at least a path")
    known = [field.name for field in dataclasses.fields(DatasetPart)]
    for key in entry:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}. {nearest(str(key), known)}")
    part = DatasetPart(**entry)
    is_text = {key: isinstance(entry[key], str) for key in ("path", "name", "data_dir", "split") if key in entry}
    columns, weight = part.columns, part.weight
    for key, is_right, allowed in (
        *((key, right, "a string") for key, right in is_text.items()),
        ("columns", columns is None or (isinstance(columns, list) and bool(columns)), "a list of names"),
        ("weight", weight is None or (isinstance(weight, int | float) and weight > 0), "a number > 0"),
    ):
        if not is_right:
            raise ConfigError(f"{where}.{key}={entry[key]!r}: must be {allowed}")
    return part
