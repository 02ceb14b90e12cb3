"""Sequence scores: a reward model reads a flat batch like a policy, and its head reads the last token of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefrl.errors import ConfigError
from prefrl.models.forward import inputs_of, verdict_of, with_idle_image
from prefrl.models.scoring import inner_model, prepare_for_scoring, score_sequences

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prefrl.models.plans import Plan
    from prefrl.models.routers import RouterRecord
    from prefrl.types import TokenBatch

__all__ = ["sequence_scores"]


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
