"""Sequence classifiers of vision-language models, of which transformers itself has few."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from transformers import AutoModel, AutoModelForImageTextToText, AutoModelForSequenceClassification, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification

from prefrl.errors import ConfigError

__all__ = ["add_classifier", "check_has_body"]


def add_classifier(config: Any) -> None:
    """Let `AutoModelForSequenceClassification` load a family of vision-language models, in this process.

    The class is made as transformers makes those of other families: the body, and a linear layer `score` that reads
    the last token. Its files are those of the body, so a language model's weights become a reward model's. Where
    transformers has a class, and for models of text, nothing changes.

    Args:
        config: Of the model.

    Raises:
        ConfigError: The family has no body that returns hidden states.
    """
    kind = type(config)
    generative = AutoModelForImageTextToText._model_mapping.get(kind, None)
    is_known = kind in AutoModelForSequenceClassification._model_mapping
    if is_known or generative is None or getattr(config, "vision_config", None) is None:
        return
    body = AutoModel._model_mapping.get(kind, None)
    if body is None or body is generative or body.base_model_prefix != "model":
        raise ConfigError(
            f"model is a {generative.__name__}, from which no reward model can be made: its class has no separate "
            "body that returns hidden states. Use another family of models, see docs/images.md, or a text model."
        )
    family = next(parent for parent in body.__mro__ if PreTrainedModel in parent.__bases__)
    name = f"{body.__name__.removesuffix('Model')}ForSequenceClassification"
    # In the family's module, like a class of transformers: names of weights in files are converted for these only.
    attributes = {"__module__": body.__module__, "config_class": kind}
    conversion = get_checkpoint_conversion_mapping(generative.__name__)
    if conversion is not None:
        register_checkpoint_conversion_mapping(name, conversion, overwrite=True)
    classifier = type(name, (GenericForSequenceClassification, family), attributes)
    AutoModelForSequenceClassification.register(kind, classifier, exist_ok=True)


def check_has_body(model: PreTrainedModel, name: str | os.PathLike[str], missing: Collection[str]) -> None:
    """Refuse a classifier of which files lack more than the layer `score`: what they lack would be random.

    Args:
        model: Loaded.
        name: What it was loaded from.
        missing: Names of the weights that were not there.

    Raises:
        ConfigError: See above.
    """
    lost = sorted(set(missing) - {"score.weight"})
    if lost:
        raise ConfigError(
            f"model={os.fspath(name)!r} lacks weights of a {type(model).__name__}: {', '.join(lost[:3])}. Give a "
            "vision-language model of the same family, or a reward model that was made from one."
        )
