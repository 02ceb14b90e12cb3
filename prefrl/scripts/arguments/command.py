"""Options of commands that are not part of a config: model, data and rewards."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError, PrefrlError
from prefrl.options.fields import check_fields, check_unset, opt, parse_json
from prefrl.options.names import check_references
from prefrl.scripts.arguments.datasets import SHAPING, DatasetConfig, DatasetMixtureConfig, ScriptArguments, parts_of
from prefrl.scripts.arguments.episodes import EpisodeArguments
from prefrl.scripts.arguments.lora import checked_init, init_arguments

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig

DType = Literal["auto", "bfloat16", "float16", "float32"]

# The names of our options in peft.LoraConfig.
_PEFT_NAMES = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "lora_task_type": "task_type",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "lora_init": "init_lora_weights",
    "loftq_config": "loftq_config",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}


# What Python takes besides, and a command line does not.
_HINTS: dict[str, Any] = {
    "model_name_or_path": str | os.PathLike[str] | None,
    "lora_target_modules": str | list[str] | None,
    "lora_init": str | bool | None,
}


@dataclass
class ModelConfig:
    """Options of the model. An option that would have no effect is refused.

    Raises:
        ConfigError: A value is not allowed, or an option of adapters or quantization has no effect.
    """

    model_name_or_path: str | None = opt(None, "Name of a model on the Hub, or a folder.")
    model_revision: str = opt("main", "Branch, tag or commit of the model on the Hub.")
    dtype: DType = opt("float32", "Data type of the weights. 'auto' takes that of the files.")
    attn_implementation: str | None = opt(
        None,
        "Attention implementation of transformers, such as sdpa or flash_attention_2. By default, transformers "
        "chooses.",
    )
    use_peft: bool = opt(False, "Train LoRA adapters instead of the model's own weights.")
    lora_r: Annotated[int, Ge(1)] = opt(16, "Rank of the LoRA adapters.", needs=["use_peft"])
    lora_alpha: Annotated[int, Gt(0)] = opt(
        32, "Numerator of the scale lora_alpha / lora_r of a LoRA adapter's update.", needs=["use_peft"]
    )
    lora_dropout: Annotated[float, Ge(0), Le(1)] = opt(
        0.05, "Dropout rate on the input of LoRA adapters.", needs=["use_peft"]
    )
    lora_target_modules: list[str] | None = opt(
        None,
        "Names of the layers that get LoRA adapters, or all-linear. The default is peft's for the architecture.",
        needs=["use_peft"],
    )
    lora_target_parameters: list[str] | None = opt(
        None,
        "Names of parameters that get LoRA adapters, for experts that are stored as parameters instead of layers. "
        "Needs lora_dropout=0.",
        needs=["use_peft"],
    )
    lora_modules_to_save: list[str] | None = opt(
        None, "Names of layers that are trained in full beside the LoRA adapters.", needs=["use_peft"]
    )
    lora_task_type: Literal["CAUSAL_LM", "SEQ_CLS"] = opt(
        "CAUSAL_LM",
        "Task type of the LoRA adapters. Reward models need SEQ_CLS, which prefrl reward sets automatically.",
        needs=["use_peft"],
    )
    use_rslora: bool = opt(
        False,
        "Scale the update of LoRA adapters by lora_alpha / sqrt(lora_r) instead (rank-stabilized LoRA).",
        needs=["use_peft"],
    )
    use_dora: bool = opt(False, "Also train the magnitude of each weight vector (DoRA).", needs=["use_peft"])
    load_in_8bit: bool = opt(
        False, "Quantize the model to 8 bits when it is loaded. Needs use_peft.", needs=["use_peft"]
    )
    load_in_4bit: bool = opt(
        False, "Quantize the model to 4 bits when it is loaded. Needs use_peft.", needs=["use_peft"]
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = opt(
        "nf4", "Data type of the weights with load_in_4bit.", needs=["load_in_4bit"]
    )
    use_bnb_nested_quant: bool = opt(
        False, "With load_in_4bit, also quantize the scales of the weights.", needs=["load_in_4bit"]
    )
    bnb_4bit_quant_storage: Literal["uint8", "float16", "bfloat16", "float32"] | None = opt(
        None,
        "Data type of the tensors that store the weights with load_in_4bit. The default is the type of the matrix "
        "products, which FSDP2 needs.",
        needs=["load_in_4bit"],
    )
    lora_rank_pattern: dict[str, int] | str | None = opt(
        None,
        "LoRA ranks of some layers, by regular expressions for their names. On the command line, give it as JSON.",
        needs=["use_peft"],
    )
    lora_alpha_pattern: dict[str, int] | str | None = opt(
        None,
        "Values of lora_alpha for some layers, by regular expressions for their names. On the command line, give it "
        "as JSON.",
        needs=["use_peft"],
    )
    lora_init: str | None = opt(
        None,
        "Initialization of the LoRA adapters: gaussian, pissa, olora, orthogonal, loftq, or false, with which both "
        "factors are random; see init_lora_weights of peft.LoraConfig. The default, true, is that of the LoRA paper.",
        needs=["use_peft"],
    )
    loftq_config: dict[str, int] | str | None = opt(
        None,
        "Keys of lora_init=loftq: loftq_bits, 4 or 8, and loftq_iter, the number of iterations. The default is "
        "{loftq_bits: 4, loftq_iter: 1}; JSON on the command line.",
        needs=["use_peft"],
    )

    def __post_init__(self) -> None:
        check_fields(self, _HINTS, of=ModelConfig)
        parse_json(self, "lora_rank_pattern", "lora_alpha_pattern", "loftq_config")
        self.lora_init = checked_init(self.lora_init, self.loftq_config)
        if not self.use_peft:
            check_unset(self, *_PEFT_NAMES, because="use_peft=False", remedy="Set use_peft=True.")
        if self.lora_target_parameters and self.lora_dropout > 0:
            raise ConfigError(
                f"lora_dropout={self.lora_dropout}: must be 0 with lora_target_parameters, whose adapters have no "
                "dropout. Set lora_dropout=0."
            )
        if self.load_in_4bit and self.load_in_8bit:
            raise ConfigError("load_in_4bit=True and load_in_8bit=True: set one of them")
        if not self.load_in_4bit:
            names = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")
            check_unset(self, *names, because="load_in_4bit=False", remedy="Set load_in_4bit=True.")


def get_peft_config(model_args: ModelConfig) -> PeftConfig | None:
    """The `peft.LoraConfig` that the options describe, for `peft_config` of a trainer; None without `use_peft`.

    Raises:
        ConfigError: peft refuses the options.
        ImportError: peft is not installed.
    """
    if not model_args.use_peft:
        return None
    from prefrl.models.adapters import lora_config  # needs torch, which --help does not

    return lora_config(**lora_options(model_args))


def lora_options(model_args: ModelConfig) -> dict[str, Any]:
    """Arguments for `peft.LoraConfig`. Options that are None are left to peft."""
    values = {theirs: getattr(model_args, ours) for ours, theirs in _PEFT_NAMES.items()}
    values |= init_arguments(model_args.lora_init, values.pop("loftq_config"))
    return {name: value for name, value in values.items() if value is not None}


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """The bitsandbytes config that the options describe, for `quantization_config` of a trainer; None without any.

    Weights of 4 bits become `dtype` for each matrix product.

    Raises:
        ConfigError: dtype="auto" with `load_in_4bit`.
        ImportError: bitsandbytes is not installed.
    """
    return quantization_config(model_args, model_args.dtype)


def get_kbit_device_map() -> dict[str, int] | None:
    """A `device_map` for `from_pretrained` that loads a model on the accelerator of its process; None on a CPU."""
    import torch  # --help does not need it

    return {"": int(os.environ.get("LOCAL_RANK", "0"))} if torch.accelerator.is_available() else None


def quantization_config(model_args: ModelConfig, compute_dtype: DType) -> BitsAndBytesConfig | None:
    """`get_quantization_config` with another type for the matrix products of weights of 4 bits.

    Raises:
        ConfigError: `compute_dtype` is "auto" with `load_in_4bit`.
        ImportError: bitsandbytes is not installed.
    """
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    if model_args.load_in_4bit and compute_dtype == "auto":
        raise ConfigError(
            "dtype='auto' with load_in_4bit=True: the type of matrix products must be known. Set dtype to bfloat16, "
            "float16 or float32."
        )
    from prefrl.models.adapters import bitsandbytes_config  # needs torch, which --help does not

    return bitsandbytes_config(
        bits=4 if model_args.load_in_4bit else 8,
        quant_type=model_args.bnb_4bit_quant_type,
        nested=model_args.use_bnb_nested_quant,
        compute_dtype=compute_dtype,
        storage_dtype=model_args.bnb_4bit_quant_storage,
    )


_E = TypeVar("_E", bound=PrefrlError)


@dataclass(frozen=True)
class Given:
    """What a user asked for.

    Args:
        values: The options that the command line or the file sets.
        places: Where those of the file stand, as file:line; also their entries, such as datasets[1].path.
        script: Class of the options that are not the trainer's.
    """

    values: Mapping[str, Any]
    places: Mapping[str, str]
    script: type[CommandArguments]

    def located(self, error: _E) -> _E:
        """The error with the line of the option that its message begins with, if the file sets it."""
        name = re.match(r"[\w.\[\]]*(?=[=:])", str(error))
        parts = re.findall(r"\w+|\.\w+|\[\d+\]", name[0]) if name else []
        names = ["".join(parts[:length]) for length in range(len(parts), 0, -1)]
        where = next((self.places[name] for name in names if name in self.places), None)
        return error if where is None else type(error)(f"{where}: {error}")

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Inside this context, errors name the line of the option that their messages begin with."""
        try:
            yield
        except PrefrlError as error:
            located = self.located(error)
            if located is error:
                raise
            raise located from error


class RewardEntry(str):
    """A reward as one writes it on the command line: `name`, or `name(parameter=value)`.

    Args:
        entry: This text; or a mapping with the key `name`, whose other keys are parameters.
        where: The option that has it, for messages.

    Raises:
        ConfigError: It is neither.
    """

    __slots__ = ()

    def __new__(cls, entry: str | Mapping[str, Any], where: str = "reward_funcs") -> Self:
        """Write a mapping as text."""
        if isinstance(entry, str):
            return super().__new__(cls, entry)
        name = entry.get("name") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or "(" in name:
            raise ConfigError(f"{where}={entry!r}: must be a name, or a mapping such as {{name: f, tolerance: 0.1}}")
        parameters = {key: value for key, value in entry.items() if key != "name"}
        for key in parameters:
            if not str(key).isidentifier():
                raise ConfigError(f"{where}={entry!r}: {key!r} is not the name of a parameter")
        text = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
        return super().__new__(cls, f"{name}({text})" if parameters else name)


_WEIGHTED = re.compile(r"(.*[\w)])=([-+]?\d[\d_.]*(?:[eE][-+]?\d+)?)", re.DOTALL)


def weighted_rewards(
    rewards: Sequence[str | Mapping[str, Any]] | Mapping[str, Any] | None, weights: Sequence[float] | None
) -> tuple[list[Any] | None, Sequence[float] | None]:
    """The entries of `reward_funcs` without their weights, and the weights.

    Args:
        rewards: Entries; `entry=weight` on the command line, and a mapping from entries to weights in a file, say what
            `reward_weights` would say.
        weights: The option `reward_weights`.

    Raises:
        ConfigError: A weight is no number, or `reward_weights` is given too.
    """
    if isinstance(rewards, Mapping):
        pairs: list[tuple[Any, Any]] = [*rewards.items()]
    else:
        found = [isinstance(entry, str) and _WEIGHTED.fullmatch(entry) for entry in rewards or ()]
        if not any(found):
            return None if rewards is None else [*rewards], weights
        own = zip(rewards or (), found, strict=True)
        pairs = [(match[1], float(match[2])) if match else (entry, 1.0) for entry, match in own]
    for entry, weight in pairs:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(
                f"reward_funcs: the weight of {entry!r} is {weight!r}; it must be a number. Give parameters in an "
                "entry of a list, as in [{name: string_check, reference: '{answer}'}], or in parentheses"
            )
    if weights is not None:
        raise ConfigError(f"reward_weights={weights}: reward_funcs already gives weights. Remove one of them")
    return [entry for entry, _ in pairs], [float(weight) for _, weight in pairs]


def reward_entries(entries: Sequence[str | Mapping[str, Any]] | None) -> list[RewardEntry] | None:
    """The entries of the option `reward_funcs`.

    Raises:
        ConfigError: One is neither a name nor a mapping with a name.
    """
    if entries is None:
        return None
    return [RewardEntry(entry, f"reward_funcs[{i}]") for i, entry in enumerate(entries)]


def check_reward_files(entries: Sequence[str]) -> None:
    """Refuse rewards in files that are not there; files are not run.

    Args:
        entries: Of the option `reward_funcs`.

    Raises:
        ConfigError: A file is missing.
    """
    for number, entry in enumerate(entries):
        place = entry.partition("(")[0].rpartition(":")[0]
        if place.endswith(".py") and not Path(place).is_file():
            raise ConfigError(f"reward_funcs[{number}]={str(entry)!r}: there is no file {place!r}")


@dataclass
class CommandArguments(ScriptArguments, ModelConfig, DatasetMixtureConfig):
    """Model and data of `prefrl <algorithm>`."""

    model_name_or_path: str = field(kw_only=True, metadata={"help": "Name of a model on the Hub, or a folder."})
    eval_datasets: list[DatasetConfig] = opt(
        [],
        "Datasets to evaluate on, instead of a split of the training data. Each is a path, or a mapping with the same "
        "keys as those of datasets; JSON on the command line. With one, metrics are eval_loss and so on; with "
        "several, eval_NAME_loss. Entries without options of columns use those of the training data.",
    )

    def __post_init__(self) -> None:
        check_references({name: getattr(self, name) for name in ("model_name_or_path", "dataset_name")})
        for part in (ScriptArguments, ModelConfig, DatasetMixtureConfig):
            part.__post_init__(self)
        self.eval_datasets = parts_of("eval_datasets", self.eval_datasets, split=self.dataset_test_split)
        for option in ("datasets", "eval_datasets"):
            for number, data in enumerate(getattr(self, option)):
                keys = ("path", "data_dir", "data_files")
                check_references({f"{option}[{number}].{key}": getattr(data, key) for key in keys})
        for bits in (4, 8):
            if getattr(self, f"load_in_{bits}bit") and not self.use_peft:
                raise ConfigError(
                    f"load_in_{bits}bit=True and use_peft=False: quantized weights cannot be trained. Set "
                    "use_peft=True."
                )
        self._check_data()
        self.streaming = self.streaming or (bool(self.datasets) and self.dataset_streaming)

    @property
    def needs_dataset(self) -> bool:
        """Whether nothing else brings prompts."""
        return True

    def _check_data(self) -> None:
        is_missing = not self.datasets and self.dataset_name is None
        if (self.datasets and self.dataset_name is not None) or (is_missing and self.needs_dataset):
            given = "not given" if is_missing else "both are given"
            raise ConfigError(f"dataset_name, datasets: {given}. Set one of them.")
        if self.datasets:
            names = ("dataset_config", "dataset_train_split", "dataset_revision", *SHAPING)
            remedy = "Set it for each dataset of datasets, by the names name, split, revision, columns and so on."
            check_unset(self, *names, because="datasets is set", remedy=remedy)
        if is_missing:
            splits = ("dataset_config", "dataset_train_split", "dataset_test_split", "dataset_revision")
            streams = ("dataset_streaming", "streaming", "test_split_size", "eval_datasets")
            check_unset(self, *splits, *streams, *SHAPING, because="there is no dataset", remedy="Set dataset_name.")
            return
        if self.dataset_name is not None:
            check_unset(self, "streaming", because="dataset_name is set", remedy="Set dataset_streaming.")
        self._check_evaluated()

    def _check_evaluated(self) -> None:
        """Refuse more than one source of rows to evaluate on, and shares of what is not mixed."""
        for number, part in enumerate(self.eval_datasets):
            if part.fraction is not None or part.weight is not None:
                raise ConfigError(
                    f"eval_datasets[{number}]: fraction and weight are for mixtures, but each of these is evaluated "
                    "separately. Remove them."
                )
        if self.test_split_size is None:
            return
        if self.eval_datasets:
            raise ConfigError(
                f"test_split_size={self.test_split_size} and eval_datasets: both say what to evaluate on. Remove one "
                "of them."
            )
        if self.dataset_streaming:
            raise ConfigError(
                f"dataset_streaming=True and test_split_size={self.test_split_size}: a stream has no length, so no "
                "rows can be held out. Set eval_datasets."
            )
        because = f"test_split_size={self.test_split_size} holds out rows of the training data"
        check_unset(self, "dataset_test_split", because=because, remedy="Remove one of them.")

    @property
    def evaluated(self) -> list[DatasetConfig]:
        """The datasets of `eval_datasets`, each with options of columns: its own, or else those of the training."""
        trained: Any = self if self.dataset_name is not None else self.datasets[0]
        same = self.dataset_name is not None or len({repr(_shaping(part)) for part in self.datasets}) == 1
        plain = _shaping(DatasetConfig(""))
        return [
            replace(part, **_shaping(trained)) if same and _shaping(part) == plain else part
            for part in self.eval_datasets
        ]


def _shaping(options: Any) -> dict[str, Any]:
    return {name: getattr(options, name) for name in SHAPING}


@dataclass
class RewardArguments(CommandArguments, EpisodeArguments):
    """Rewards, for the online algorithms."""

    reward_funcs: list[RewardEntry] | None = opt(
        None,
        "Reward functions, in the order of reward_weights. Each is a built-in or registered name, a grader, or your "
        "own function as module.function or file.py:function. Parameters follow in parentheses, as in "
        "string_check(reference='{answer}'). A YAML file may use a mapping instead, such as {name: string_check, "
        "reference: '{answer}'}. Weights may follow, as in numeric_reward=1.0 format_reward=0.2, or in a YAML file "
        "{numeric_reward: 1.0, format_reward: 0.2}.",
    )
    reward_model_name_or_path: str | None = opt(
        None, "Sequence-classification model that gives one more reward, after those of reward_funcs."
    )

    def __post_init__(self) -> None:
        if self.environment or self.tools:
            self.check_names()
        super().__post_init__()
        check_references({"reward_model_name_or_path": self.reward_model_name_or_path})
        self.reward_funcs = reward_entries(self.reward_funcs)
        if not self.reward_funcs and self.reward_model_name_or_path is None and self.needs_reward:
            raise ConfigError(
                "reward_funcs=None: at least one reward is needed. Set reward_funcs to a built-in name, a grader or "
                "module:function, or set reward_model_name_or_path, or an environment that has rewards."
            )

    @property
    def needs_dataset(self) -> bool:
        """See `CommandArguments`."""
        return not isinstance(self.environment, str)  # of several, the dataset has the name of each row's

    @property
    def needs_reward(self) -> bool:
        """Whether nothing else gives rewards."""
        return not self.environment


@dataclass
class TaughtArguments(RewardArguments):
    """Rewards that are only logged, for algorithms that learn from a teacher."""

    @property
    def needs_reward(self) -> bool:
        """See `RewardArguments`; False: they are only logged."""
        return False
