"""Adds the load-balancing loss of the routers of a mixture of experts to the loss of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from transformers import PreTrainedModel

from prefrl.errors import ConfigError
from prefrl.metrics import Mean
from prefrl.models.routers import RouterRecord, router_loss_coef
from prefrl.options.fields import warn_of_hint
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.parts import Part, Run
from prefrl.types import LossOutput, TokenBatch


def router_loss(args: BaseConfig, model: PreTrainedModel) -> RouterLoss | None:
    """The routers' loss that the options or the config of a mixture of experts ask for; see `router_loss_coef`.

    Raises:
        ConfigError: Reentrant checkpoints would cut the gradient of the loss.
    """
    coef = router_loss_coef(model, args.router_aux_loss_coef)
    if args.router_aux_loss_coef and not coef:
        warn_of_hint(
            args,
            f"router_aux_loss_coef={args.router_aux_loss_coef} has no effect because a {type(model).__name__} is not "
            "a mixture of experts, or one whose config has no router_aux_loss_coef. Leave it None.",
        )
    checkpointing = cast("dict[str, Any]", args.activation_checkpointing_kwargs or {})
    if coef > 0 and args.activation_checkpointing and checkpointing.get("use_reentrant"):
        raise ConfigError(
            f"router_aux_loss_coef={coef} with use_reentrant=True in "
            "activation_checkpointing_kwargs: no gradient of the routers' loss leaves a reentrant checkpoint. Set "
            "use_reentrant to False, or router_aux_loss_coef=0.0."
        )
    return None if coef == 0 else RouterLoss(coef)


class RouterLoss(Part):
    """Adds coef * sum over rows of (items of the row) * (balancing loss of the row) to a micro-batch's loss.

    The sum is divided by the items of the whole optimizer step, as every loss is. What is added to the step's loss is
    therefore coef * the mean over its rows, each with the weight that it has in the trainer's own loss. The loss of a
    row with several responses is the mean over them; see `models.routers`.
    """

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def around_loss(self, run: Run, batch: TokenBatch, compute: Callable[[], LossOutput]) -> LossOutput:
        """See `Part`; the loss comes from one pass of the policy through the scorer, which records it."""
        if not run.policy_learns:
            return compute()
        run.scorer.routers = record = RouterRecord()
        try:
            output = compute()
        finally:
            run.scorer.routers = None
        shares = batch.on_device([1 / len(batch.responses[row]) for row in batch.response_row])
        row_items = run.row_items(batch)
        total = (row_items[batch.on_device(batch.response_row)] * shares * record.losses).sum()
        metrics = {"aux_loss": Mean(total.detach(), row_items.sum())}
        return replace(output, total=output.total + self.coef * total, metrics=output.metrics | metrics)
