"""A model without its weights: shapes, config and tokenizer can be read in a fraction of a second."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, GenerationConfig

from prefrl.models.load import CAUSAL, REWARD, auto_class_of, check_dtype, load_error, repository_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["outline_of", "outline_with_layers"]


def outline_of(
    name: str | os.PathLike[str], *, model_init_kwargs: Mapping[str, Any] | None = None, is_classifier: bool = False
) -> PreTrainedModel:
    """The model on the meta device, as the trainer would load it. Its weights are not read.

    Args:
        name: Name on the Hub or path.
        model_init_kwargs: For `from_pretrained`.
        is_classifier: Whether it is a reward model; otherwise it is a language model.

    Raises:
        ConfigError: The config cannot be read, no class is known for it, or torch has no such dtype.
    """
    kind, given = REWARD if is_classifier else CAUSAL, {**(model_init_kwargs or {})}
    check_dtype(given)
    places = repository_arguments(given) | {key: given[key] for key in ("subfolder",) if key in given}
    try:
        config = AutoConfig.from_pretrained(name, **places)
        dtype = given.get("dtype", kind.arguments["dtype"])
        dtype = getattr(config, "dtype", None) if dtype == "auto" else dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        if is_classifier:
            config.num_labels = 1
        with torch.device("meta"):
            model: PreTrainedModel = auto_class_of(kind, name, given).from_config(
                config, dtype=dtype or torch.float32, **_of_class(given)
            )
    except (OSError, ValueError, AttributeError, ImportError) as error:
        raise load_error(kind, name, given, error) from error
    if not is_classifier:
        with suppress(OSError):  # not every repository has the file
            model.generation_config = GenerationConfig.from_pretrained(name, **places)
    return model


def outline_with_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The same kind of model with another number of layers, on the current device. It has no image tower.

    Raises:
        ValueError: The class cannot be made from the text config alone.
    """
    config = copy.deepcopy(model.config.get_text_config())
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    return type(model)._from_config(config, dtype=model.dtype)


def _of_class(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: given[key] for key in ("trust_remote_code", "attn_implementation") if key in given}
