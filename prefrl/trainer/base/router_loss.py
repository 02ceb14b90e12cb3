"""Adds the load-balancing loss of the routers of a mixture of experts to the loss of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from prefrl.errors import ConfigError
from prefrl.metrics import Mean
from prefrl.models.routers import RouterRecord, router_loss_coef
from prefrl.types import LossOutput

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from prefrl.trainer.base.config import BaseConfig
    from prefrl.trainer.base.scorer import Scorer
    from prefrl.types import TokenBatch

__all__ = ["router_coef_of", "with_router_loss"]


def router_coef_of(model: PreTrainedModel, args: BaseConfig) -> float:
    """The weight of the routers' loss in a training run; 0: there is no such loss. See `router_loss_coef`.

    Raises:
        ConfigError: The option has no effect, or reentrant checkpoints would cut the gradient of the loss.
    """
    coef = router_loss_coef(model, args.router_aux_loss_coef)
    checkpointing = cast("dict[str, Any]", args.activation_checkpointing_kwargs or {})
    if coef > 0 and args.activation_checkpointing and checkpointing.get("use_reentrant"):
        raise ConfigError(
            f"router_aux_loss_coef={coef} with use_reentrant=True in "
            "activation_checkpointing_kwargs: no gradient of the routers' loss leaves a reentrant checkpoint. Set "
            "use_reentrant to False, or router_aux_loss_coef=0.0."
        )
    return coef


def with_router_loss(
    loss: Callable[[], LossOutput], scorer: Scorer, batch: TokenBatch, row_items: Tensor, *, coef: float
) -> LossOutput:
    """A micro-batch's loss, plus coef * sum over rows of (items of the row) * (balancing loss of the row).

    The sum is divided by the items of the whole optimizer step, as every loss is. What is added to the step's loss is
    therefore coef * the mean over its rows, each with the weight that it has in the trainer's own loss. The loss of a
    row with several responses is the mean over them; see `models.routers`.

    Args:
        loss: Computes the trainer's loss, with one pass of the policy through `scorer`.
        scorer: Records that pass.
        batch: The rows.
        row_items: [B] what each row counts among the items.
        coef: > 0.
    """
    scorer.routers = record = RouterRecord()
    try:
        output = loss()
    finally:
        scorer.routers = None
    shares = batch.on_device([1 / len(batch.responses[row]) for row in batch.response_row])
    weights = row_items[batch.on_device(batch.response_row)] * shares
    total = (weights * record.losses).sum()
    metrics = {"aux_loss": Mean(total.detach(), row_items.sum())}
    return LossOutput(output.total + coef * total, output.metrics | metrics)
