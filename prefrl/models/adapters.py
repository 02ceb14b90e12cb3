"""Adapters from peft configs, and quantized models, which can only be trained through adapters."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import BitsAndBytesConfig

from prefrl.errors import ConfigError, require
from prefrl.models.modes import seeded

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftConfig, PeftModel
    from torch import nn
    from transformers import PreTrainedModel

TaskType = Literal["CAUSAL_LM", "SEQ_CLS"]
_LAYER_NAME = re.compile(r"[\w.]+")  # neither "all-linear" nor a regular expression


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is a `peft.PeftModel`; imports nothing."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def lora_config(*, target_modules: Sequence[str] | None = None, **options: Any) -> PeftConfig:
    """A `peft.LoraConfig`. Without a `task_type`, the model's loader sets it.

    Args:
        target_modules: Names of the layers that get adapters; None: peft's choice. A single entry may be "all-linear",
            for all linear layers, or a regular expression for names.
        options: Other arguments of `peft.LoraConfig`, under peft's names.

    Raises:
        ConfigError: peft refuses the options.
        ImportError: peft is not installed.
    """
    peft = require("peft", extra="peft", feature="use_peft=True")
    if target_modules is not None and len(target_modules) == 1 and not _LAYER_NAME.fullmatch(target_modules[0]):
        target_modules = target_modules[0]
    try:
        config: PeftConfig = peft.LoraConfig(target_modules=target_modules, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"peft refuses the LoRA options: {error}") from error
    return config


def saved_config(folder: Path) -> PeftConfig:
    """The config of an adapter that was saved in a folder, to train such an adapter."""
    peft = require("peft", extra="peft", feature="an adapter")
    config: PeftConfig = peft.PeftConfig.from_pretrained(folder)
    config.inference_mode = False
    return config


def add_adapter(
    model: PreTrainedModel, peft_config: PeftConfig, *, task_type: TaskType, seed: int | None
) -> PreTrainedModel:
    """Put a new adapter around the model and freeze the model's own weights.

    Args:
        model: Changed in place.
        peft_config: Not changed; a `task_type` of None means `task_type`.
        task_type: peft's name for what the model does.
        seed: For the adapter's initial weights.

    Raises:
        ConfigError: peft cannot put the adapter around this model, or a part of `peft_config` has no effect.
        ImportError: peft is not installed.
    """
    peft = require("peft", extra="peft", feature="peft_config")
    if is_peft_model(model):
        raise ConfigError(
            "peft_config is given, but the model already has an adapter. Remove peft_config to train that adapter, or "
            "pass model.merge_and_unload() to train a new one on top."
        )
    if peft_config.task_type not in (None, task_type):
        raise ConfigError(
            f"peft_config.task_type={peft_config.task_type}: must be {task_type} for a {type(model).__name__}. Set "
            "it, or leave it None."
        )
    _check_init(peft_config)
    own_config = copy.deepcopy(peft_config)
    own_config.task_type = task_type
    try:
        with seeded(seed):
            adapted: PreTrainedModel = peft.get_peft_model(model, own_config)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"peft_config cannot be used with a {type(model).__name__}: {error}") from error
    _check_every_name_is_found(peft_config, adapted)
    return adapted


def _check_init(peft_config: PeftConfig) -> None:
    init = peft_config.to_dict().get("init_lora_weights", True)
    if init in ("eva", "corda", "lora_ga"):
        raise ConfigError(
            f"peft_config.init_lora_weights={init!r} needs data to initialize the adapter, which a trainer does not "
            "provide. Initialize the adapter with peft, and pass the PeftModel instead of peft_config."
        )
    if init == "loftq" and not torch.accelerator.is_available():
        raise ConfigError(
            "peft_config.init_lora_weights='loftq': peft quantizes weights for LoftQ on a GPU, and there is none. Use "
            "another initialization, such as 'pissa'."
        )
    if isinstance(init, str) and init.startswith("pissa_niter"):
        raise ConfigError(
            f"peft_config.init_lora_weights={init!r}: this decomposition of the weights is random, and peft would "
            "compute a different one when it loads the saved adapter. Use 'pissa', which is exact."
        )


def _check_every_name_is_found(peft_config: PeftConfig, model: PeftModel) -> None:
    """Reject names that match nothing: peft ignores them silently as long as another name matches."""
    # In its copy, peft has replaced names of experts by those of the parameters that transformers makes of them, and
    # has added its own names to modules_to_save.
    made = model.peft_config["default"].to_dict()
    given = made | {"modules_to_save": peft_config.to_dict().get("modules_to_save")}
    for field in ("target_modules", "rank_pattern", "alpha_pattern", "modules_to_save"):
        names = given.get(field) or ()
        if isinstance(names, str):  # a regular expression: peft itself raises if it matches nothing
            continue
        prefix = ".*" if field == "modules_to_save" else r"(.*\.)?"
        for name in names:
            places = _places(field, model)
            pattern = name if field.endswith("_pattern") else re.escape(name)
            if not any(re.fullmatch(f"{prefix}({pattern})", place) for place in places):
                raise ConfigError(_not_found(field, name, places, model))


def _places(field: str, model: PeftModel) -> list[str]:
    """Names of the layers, and for patterns of the parameters, that a field of a config may name."""
    layers = dict(model.get_base_model().named_modules())
    if field == "modules_to_save":
        return list(layers)
    tuner: Any = model.base_model
    if field == "target_modules":  # layers that peft trains as a whole can be named, too
        return [*tuner.targeted_module_names, *(name for name in layers if hasattr(layers[name], "modules_to_save"))]
    return [*tuner.targeted_module_names, *tuner.targeted_parameter_names]


def _not_found(field: str, name: str, layers: Sequence[str], model: PeftModel) -> str:
    message = f"peft_config.{field} contains {name!r}, but there is no such layer."
    parameters = [place for place, _ in model.get_base_model().named_parameters() if place.endswith(f".{name}")]
    if parameters:
        return f"{message} {parameters[0]} is a parameter: name it in target_parameters."
    names = layers or [place for place, _ in model.get_base_model().named_modules()]
    return f"{message} Correct or remove it. Layer names look like {', '.join(names[-3:])}."


def prepare_quantized(model: PreTrainedModel) -> None:
    """Prepare a quantized model for training an adapter; an adapter that is already there is left unchanged.

    Nothing else in the model is trained. Weights that are not quantized become float32, because norms in half
    precision would lose what the adapter learns through them. Gradient checkpointing needs no preparation here: when
    it is switched on, transformers makes the output of the embeddings require a gradient.
    """
    if not is_peft_model(model):
        peft = require("peft", extra="peft", feature="a quantized model")
        peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    for module in model.modules():
        # On some CPUs bitsandbytes packs weights at the first pass in eval mode and keeps them packed. No gradients
        # flow through packed weights.
        if "support_avx512bf16_for_cpu" in vars(module):
            module.support_avx512bf16_for_cpu = False


def bitsandbytes_config(
    *,
    bits: Literal[4, 8],
    quant_type: Literal["nf4", "fp4"],
    nested: bool,
    compute_dtype: torch.dtype | str,
    storage_dtype: torch.dtype | str | None = None,
) -> BitsAndBytesConfig:
    """The bitsandbytes config for quantizing a model when it is loaded.

    Args:
        bits: 4 or 8. The other options are for 4.
        quant_type: Which 16 values a weight of 4 bits can have.
        nested: Quantize the scales, too.
        compute_dtype: Weights become this for each matrix product.
        storage_dtype: Type of the tensors that hold four-bit weights; None: `compute_dtype`. FSDP2 shares out no
            others, and a backend that casts weights leaves these alone.

    Raises:
        ImportError: bitsandbytes is not installed.

    Source: Dettmers et al. 2023 (QLoRA), arXiv 2305.14314, section 3.
    """
    require("bitsandbytes", extra="quantization", feature=f"load_in_{bits}bit=True")
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=compute_dtype if storage_dtype is None else storage_dtype,
    )
