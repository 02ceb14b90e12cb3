"""Options of the model of a command: how it is loaded, its adapter, and how that begins."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.options.fields import check_fields, check_unset, opt, parse_json
from prefrl.options.names import check_known
from prefrl.options.types import check_value

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
    dtype: DType = opt("float32", "Data type of weights. 'auto' takes that of the files.")
    attn_implementation: str | None = opt(
        None,
        "Implementation of attention in transformers, such as flash_attention_2 or sdpa. By default, transformers "
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


_Init = Literal["gaussian", "pissa", "olora", "orthogonal", "loftq", "true", "false"]
_NEEDS_DATA = (
    "it needs data, which a trainer does not give to peft. Initialize the adapter with peft, save it, and give its "
    "folder as model_name_or_path"
)
# Of peft, with the reason why they are refused.
_REFUSED = {
    "eva": _NEEDS_DATA,
    "corda": _NEEDS_DATA,
    "lora_ga": _NEEDS_DATA,
    "pissa_niter": "this decomposition of the weights is random, and peft would compute a different one when it loads "
    "the saved adapter. Use pissa, which is exact",
}
_LOFTQ: dict[str, Any] = {"loftq_bits": (4, 8), "loftq_iter": range(1, 1001)}


def checked_init(lora_init: Any, loftq_config: Any) -> str | None:
    """The option `lora_init` as text: peft's values are texts and booleans.

    Raises:
        ConfigError: It is none that can be used here, or `loftq_config` does not belong to it.
    """
    init = str(lora_init).lower() if isinstance(lora_init, bool) else lora_init
    if init is not None:
        kind = re.sub(r"_\d+$", "", str(init))
        if kind in _REFUSED:
            raise ConfigError(f"lora_init={init!r}: {_REFUSED[kind]}.")
        check_value("lora_init", init, _Init)
    if loftq_config is not None and init != "loftq":
        raise ConfigError(
            f"loftq_config={loftq_config!r} has no effect because lora_init={init!r}. Set lora_init=loftq."
        )
    for key, value in (loftq_config or {}).items():
        check_known("loftq_config", key, _LOFTQ, "key of LoftQ")
        if value not in _LOFTQ[key]:
            allowed = "4 or 8" if key == "loftq_bits" else "a number of iterations from 1 to 1000"
            raise ConfigError(f"loftq_config: {key}={value!r}: must be {allowed}")
    return None if init is None else str(init)


def init_arguments(lora_init: str | None, loftq_config: dict[str, int] | None) -> dict[str, Any]:
    """Arguments of `peft.LoraConfig` for the options that `checked_init` has checked."""
    if lora_init == "loftq":
        return {
            "init_lora_weights": lora_init,
            "loftq_config": {"loftq_bits": 4, "loftq_iter": 1, **(loftq_config or {})},
        }
    return {"init_lora_weights": {"true": True, "false": False}.get(str(lora_init), lora_init)}
