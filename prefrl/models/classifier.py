"""Sequence scores: a reward model reads a flat batch like a policy, and its head reads the last token of each row."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from transformers import AutoModel, AutoModelForImageTextToText, AutoModelForSequenceClassification, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification

from prefrl.errors import ConfigError
from prefrl.models.forward import inputs_of, verdict_of, with_idle_image
from prefrl.models.plans import Plan
from prefrl.models.routers import RouterRecord
from prefrl.models.scoring import inner_model, prepare_for_scoring, score_sequences
from prefrl.types import TokenBatch


def sequence_scores(
    model: nn.Module, batch: TokenBatch, *, plan: Plan = "auto", routers: RouterRecord | None = None
) -> Tensor:
    """The scores that a sequence classifier, such as a reward model, gives to each row, with gradients.

    The last response token of each row is an end marker: it is not read, whatever its id, and the row ends before it.
    A row that consists of a prompt only has the marker as its response. Rows that share a prompt, such as the two
    sides of a pair, share its computation, and plans are chosen and checked, as in `token_logprobs`. A model whose
    pooling we cannot reproduce (an encoder, a head with dropout) runs its own forward on padded rows.

    Args:
        model: A `*ForSequenceClassification` model with L labels, optionally wrapped in PEFT or DDP; see
            `prepare_for_scoring`.
        batch: On the model's device, B rows, at least one. `trainable` is not read.
        plan: How the rows are laid out.
        routers: See `token_logprobs`.
    Returns:
        [B, L] float32, as the model's own forward returns them for each row without its marker.
    Raises:
        ConfigError: The requested plan does not work for this model, or the model is not a sequence classifier.
        ValueError: The batch has no rows.
    """
    if not prepare_for_scoring(model).is_classifier:
        raise ConfigError(
            f"model is a {type(inner_model(model)).__name__}, which does not classify sequences. Load it with "
            "AutoModelForSequenceClassification."
        )
    verdict, rows = verdict_of(model), with_idle_image(model, batch)
    inputs = inputs_of(model, rows, plan, verdict)
    scores = score_sequences(model, rows, inputs, own_logits=verdict.own_logits, routers=routers)
    if routers is not None:
        routers.keep(batch.num_responses)
    return scores[: batch.num_rows]


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
