"""The model that a script trains: where it is loaded from, its adapter and its quantization."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.options.fields import check_fields, check_unset, opt, parse_json

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig

__all__ = [
    "DType",
    "ModelConfig",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
    "lora_options",
    "quantization_config",
]

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
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}


# What Python takes besides, and a command line does not.
_HINTS: dict[str, Any] = {
    "model_name_or_path": str | os.PathLike[str] | None,
    "lora_target_modules": str | list[str] | None,
}


@dataclass
class ModelConfig:
    """Options of the model. An option that would have no effect is refused.

    Raises:
        ConfigError: A value is not allowed, or an option of adapters or quantization has no effect.
    """

    model_name_or_path: str | None = opt(None, "Model: a name on the Hub or a folder.")
    model_revision: str = opt("main", "Branch, tag or commit of the model on the Hub.")
    dtype: DType = opt("float32", "Type of the weights; auto: that of the files.")
    attn_implementation: str | None = opt(
        None,
        "Attention implementation of transformers, such as sdpa or flash_attention_2; None: transformers chooses.",
    )
    use_peft: bool = opt(False, "Train LoRA adapters instead of the model's own weights.")
    lora_r: Annotated[int, Ge(1)] = opt(16, "LoRA: rank.", needs=["use_peft"])
    lora_alpha: Annotated[int, Gt(0)] = opt(
        32, "LoRA: the update is scaled by lora_alpha / lora_r.", needs=["use_peft"]
    )
    lora_dropout: Annotated[float, Ge(0), Le(1)] = opt(
        0.05, "LoRA: dropout on the adapter's input.", needs=["use_peft"]
    )
    lora_target_modules: list[str] | None = opt(
        None,
        "LoRA: names of the layers that get adapters, or all-linear; None: peft's default for the architecture.",
        needs=["use_peft"],
    )
    lora_target_parameters: list[str] | None = opt(
        None,
        "LoRA: names of parameters that get adapters, for experts that are stored as parameters instead of "
        "layers. Needs lora_dropout=0.",
        needs=["use_peft"],
    )
    lora_modules_to_save: list[str] | None = opt(
        None, "LoRA: names of layers that are trained in full.", needs=["use_peft"]
    )
    lora_task_type: Literal["CAUSAL_LM", "SEQ_CLS"] = opt(
        "CAUSAL_LM",
        "LoRA: type of the task; SEQ_CLS for reward models. prefrl reward sets it automatically.",
        needs=["use_peft"],
    )
    use_rslora: bool = opt(False, "LoRA: scale the update by lora_alpha / sqrt(lora_r).", needs=["use_peft"])
    use_dora: bool = opt(False, "LoRA: also train the magnitude of each weight vector (DoRA).", needs=["use_peft"])
    load_in_8bit: bool = opt(
        False, "Quantize the model to 8 bits when it is loaded. Needs use_peft.", needs=["use_peft"]
    )
    load_in_4bit: bool = opt(
        False, "Quantize the model to 4 bits when it is loaded. Needs use_peft.", needs=["use_peft"]
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = opt(
        "nf4", "load_in_4bit: data type of the weights.", needs=["load_in_4bit"]
    )
    use_bnb_nested_quant: bool = opt(
        False, "load_in_4bit: also quantize the scales of the weights.", needs=["load_in_4bit"]
    )
    bnb_4bit_quant_storage: Literal["uint8", "float16", "bfloat16", "float32"] | None = opt(
        None,
        "load_in_4bit: type of the tensors that store the weights; None: the type of the matrix products, which "
        "FSDP2 needs.",
        needs=["load_in_4bit"],
    )
    lora_rank_pattern: dict[str, int] | str | None = opt(
        None,
        "LoRA: ranks of individual layers, by regular expressions for their names; JSON on the command line.",
        needs=["use_peft"],
    )
    lora_alpha_pattern: dict[str, int] | str | None = opt(
        None,
        "LoRA: lora_alpha of individual layers, by regular expressions for their names; JSON on the command line.",
        needs=["use_peft"],
    )
    lora_init: Literal["gaussian", "pissa", "olora", "orthogonal"] | None = opt(
        None,
        "LoRA: initialization, see init_lora_weights of peft.LoraConfig. None: as in the LoRA paper.",
        needs=["use_peft"],
    )

    def __post_init__(self) -> None:
        check_fields(self, _HINTS, of=ModelConfig)
        parse_json(self, "lora_rank_pattern", "lora_alpha_pattern")
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
