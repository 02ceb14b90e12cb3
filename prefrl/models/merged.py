"""A trained model as one checkpoint: an adapter is merged into its base model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer
from transformers.utils.peft_utils import find_adapter_config_file

from prefrl.errors import ConfigError
from prefrl.models.load import load_model, load_reward_model, load_tokenizer
from prefrl.optional import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["is_adapter", "load_merged", "saved_tokenizer", "tokenizer_of_checkpoint"]

logger = logging.getLogger(__name__)


def is_adapter(name: str) -> bool:
    """Whether a folder, or a repository on the Hub, holds an adapter and not a model."""
    try:
        return find_adapter_config_file(name) is not None
    except (OSError, ValueError):  # the model's own error is better
        return False


def load_merged(name: str, *, dtype: str = "auto") -> PreTrainedModel:
    """The model in a folder or on the Hub; an adapter is merged into its base model: W + scale * B A.

    The sum is computed in float32 and rounded once.

    Args:
        name: Of a language model, a reward model's adapter, or an adapter.
        dtype: Type of the weights; auto: that of the files, and of the base model's for an adapter.

    Raises:
        ConfigError: It cannot be loaded or merged.
        ImportError: It is an adapter, and peft is not installed.
    """
    if not is_adapter(name):
        return load_model(name, model_init_kwargs={"dtype": dtype})
    peft: Any = require("peft", extra="peft", feature="an adapter")
    config = peft.PeftConfig.from_pretrained(name)
    base_name = config.base_model_name_or_path
    if not base_name:
        raise ConfigError(f"adapter {name!r}: base_model_name_or_path in its adapter_config.json is empty. Set it.")
    load = load_reward_model if config.task_type == "SEQ_CLS" else load_model
    try:
        base = load(base_name, model_init_kwargs={"dtype": "float32"})
    except ConfigError as error:
        raise ConfigError(
            f"adapter {name!r}: its base model {base_name!r} cannot be loaded. If it was moved, correct "
            f"base_model_name_or_path in adapter_config.json: {error}"
        ) from error
    target = base.config.dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        merged = peft.PeftModel.from_pretrained(base, name).merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, AttributeError) as error:  # what peft says of adapters that have no sum
        raise ConfigError(f"adapter {name!r} cannot be merged into {base_name!r}: {error}") from error
    model: PreTrainedModel = merged.to(target or torch.float32)
    return model


def tokenizer_of_checkpoint(name: str, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved with a model or adapter; without one, that of the base model."""
    saved = saved_tokenizer(name)
    if saved is None and Path(name).is_dir():
        logger.warning("%s has no tokenizer: the base model's tokenizer is used", name)
    return load_tokenizer(model, saved)


def saved_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer that was saved with a model or adapter; None: there is none."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None
    return tokenizer
