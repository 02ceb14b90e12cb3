"""The head of a model: the module that maps hidden states to logits, or to a row's scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefrl.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["is_classifier", "logit_transform", "needed_head", "output_head", "pad_token_id"]


def is_classifier(model: PreTrainedModel) -> bool:
    """Whether the model returns one vector of scores per sequence."""
    return any(parent.__name__.endswith("ForSequenceClassification") for parent in type(model).__mro__)


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """The module that maps hidden states to logits: the language-model head or, in a sequence classifier, `score`."""
    head: nn.Module | None = model._modules.get("score") if is_classifier(model) else model.get_output_embeddings()
    return head


def needed_head(model: PreTrainedModel) -> nn.Module:
    """`output_head` of a model that needs one.

    Raises:
        ConfigError: The model has none.
    """
    head = output_head(model)
    if head is None:
        raise ConfigError(f"model is a {type(model).__name__}, whose scores do not come from a separate head.")
    return head


def pad_token_id(model: PreTrainedModel) -> int | None:
    """The token that a classifier's own forward treats as padding when it looks for a row's last token."""
    token: int | None = model.config.get_text_config().pad_token_id
    return token


def logit_transform(model: PreTrainedModel) -> tuple[float, float | None]:
    """(scale, softcap) that the model's own forward applies to the head's output, according to its config.

    Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, Gemma caps at `final_logit_softcapping`.
    """
    config = model.config.get_text_config()
    scale: float = getattr(config, "logit_scale", None) or 1.0
    divisor: float = getattr(config, "logits_scaling", None) or 1.0
    softcap: float | None = getattr(config, "final_logit_softcapping", None)
    return scale / divisor, softcap
