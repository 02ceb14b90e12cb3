"""Models and tokenizers, by name, path or instance."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from prefrl.errors import ConfigError
from prefrl.optional import require

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn

__all__ = ["is_peft_model", "load_model", "load_tokenizer", "lora_config"]

# What from_pretrained needs to find the same repository again.
_TOKENIZER_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token", "trust_remote_code")


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is a `peft.PeftModel`; imports nothing."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def load_model(
    model: str | os.PathLike[str] | nn.Module,
    *,
    model_init_kwargs: Mapping[str, Any] | None = None,
    peft_config: PeftConfig | None = None,
    freeze: Sequence[str] = (),
    seed: int | None = None,
) -> PreTrainedModel:
    """The causal language model to train.

    Weights are float32 unless `model_init_kwargs` has a `dtype`: an optimizer loses small updates of bfloat16 weights.

    Args:
        model: Name on the Hub, path, or an instance, which is changed in place (adapter, `requires_grad`).
        model_init_kwargs: For `from_pretrained`; not changed.
        peft_config: A new adapter of this kind is put around the model; not changed.
        freeze: Regular expressions; parameters in whose name one is found are not trained.
        seed: Of the new adapter's weights; torch's global random state stays as it is. None: drawn from that state.

    Returns:
        The model, a `peft.PeftModel` if there is an adapter.

    Raises:
        ConfigError: The model cannot be loaded, an argument has no effect, or nothing is left to train.
        ImportError: `peft_config` is given and peft is not installed.
    """
    if isinstance(model, (str, os.PathLike)):
        loaded = _from_pretrained(model, model_init_kwargs or {})
    elif is_peft_model(model) or isinstance(model, PreTrainedModel):
        loaded = model
        if model_init_kwargs:
            raise ConfigError(
                f"model_init_kwargs={dict(model_init_kwargs)} has no effect on a model that is loaded already. Remove "
                "it, or give the model by name."
            )
    else:
        raise ConfigError(f"model={model!r}: must be a name, a path, a PreTrainedModel or a PeftModel")
    if peft_config is not None:
        loaded = _with_adapter(loaded, peft_config, seed)
    _freeze(loaded, freeze)
    return loaded


def lora_config(*, rank: int, alpha: float, dropout: float, target_modules: Sequence[str] | None) -> PeftConfig:
    """A LoRA adapter for a causal language model.

    Args:
        rank: Of the adapter's matrices.
        alpha: The adapter's output is scaled by alpha / rank.
        dropout: On the adapter's input.
        target_modules: Names of the layers that get adapters; ["all-linear"]: all; None: peft's choice.

    Raises:
        ImportError: peft is not installed.
    """
    peft = require("peft", extra="peft", feature="use_peft=True")
    targets = "all-linear" if target_modules == ["all-linear"] else target_modules
    config: PeftConfig = peft.LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets
    )
    return config


def load_tokenizer(
    model: PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | None = None,
    *,
    model_init_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedTokenizerBase:
    """The model's tokenizer: the one given, or that of the repository which the model is from.

    A tokenizer without a padding token gets its end-of-sequence token for it, also if it is the caller's: prefrl pads
    nothing, but the saved tokenizer is used by code that does.

    Args:
        model: The loaded model.
        processing_class: The tokenizer, if there is one.
        model_init_kwargs: What the model was loaded with; revision, token and the like hold for the tokenizer too.

    Raises:
        ConfigError: No tokenizer can be found, it has neither a padding nor an end-of-sequence token, or it has ids
            that the model has no embedding for.
    """
    tokenizer = processing_class
    if tokenizer is None:
        tokenizer = _tokenizer_of(model, model_init_kwargs or {})
    elif not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"processing_class={type(tokenizer).__name__}: must be a tokenizer of transformers or None")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                "the tokenizer has neither pad_token nor eos_token: no text could end. Set tokenizer.eos_token."
            )
        tokenizer.pad_token = tokenizer.eos_token
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > num_embeddings:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeddings for {num_embeddings}. Use the "
            "model's own tokenizer, or call model.resize_token_embeddings(len(tokenizer))."
        )
    return tokenizer


def _from_pretrained(name: str | os.PathLike[str], arguments: Mapping[str, Any]) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(name, **({"dtype": torch.float32} | dict(arguments)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model={os.fspath(name)!r} cannot be loaded: {error}") from error


def _tokenizer_of(model: PreTrainedModel, arguments: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    name = model.config.name_or_path
    if not name:
        raise ConfigError("processing_class=None: the model was not loaded from a repository. Give its tokenizer.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, **{key: arguments[key] for key in _TOKENIZER_ARGUMENTS if key in arguments}
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"processing_class=None: no tokenizer can be loaded from {name!r}: {error}") from error
    # For some architectures AutoTokenizer makes an empty tokenizer where there are no files.
    if len(tokenizer.get_added_vocab()) == len(tokenizer):
        raise ConfigError(
            f"processing_class=None: no tokenizer can be loaded from {name!r}: it has no tokenizer files. Give the "
            "model's tokenizer."
        )
    return tokenizer


def _with_adapter(model: PreTrainedModel, peft_config: PeftConfig, seed: int | None) -> PreTrainedModel:
    peft = require("peft", extra="peft", feature="peft_config")
    if is_peft_model(model):
        raise ConfigError(
            "peft_config is given, and the model has an adapter already. Remove peft_config to train that adapter, or "
            "give model.merge_and_unload() to train a new one on top."
        )
    with _seeded(seed, model.device):
        return peft.get_peft_model(model, copy.deepcopy(peft_config))


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for pattern in patterns:
        for name in _matches(pattern, model, trainable):
            trainable[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in trainable.values()):
        raise ConfigError(
            f"freeze={list(patterns)}: no parameter is left to train"
            if patterns
            else "no parameter of the model requires a gradient: nothing can be trained"
        )


def _matches(pattern: str, model: PreTrainedModel, trainable: Mapping[str, object]) -> list[str]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"freeze={pattern!r} is not a regular expression: {error}") from error
    names = [name for name, _ in model.named_parameters() if expression.search(name)]
    if not names:
        some = [name for name, _ in model.named_parameters()][:3]
        raise ConfigError(f"freeze={pattern!r} is found in no parameter's name. Names are like {', '.join(some)}.")
    matches = [name for name in names if name in trainable]
    if not matches:
        raise ConfigError(
            f"freeze={pattern!r} has no effect: the {len(names)} parameters with it in their name are frozen already"
        )
    return matches
