"""Adds the load-balancing loss of the routers of a mixture of experts to the loss of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from prefrl.metrics import Mean
from prefrl.models.routers import RouterRecord
from prefrl.types import LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.trainer.base.scorer import Scorer
    from prefrl.types import TokenBatch

__all__ = ["with_router_loss"]


def with_router_loss(
    loss: Callable[[], LossOutput], scorer: Scorer, batch: TokenBatch, row_items: Tensor, *, coef: float
) -> LossOutput:
    """A micro-batch's loss, plus coef * sum over rows of (items of the row) * (balancing loss of the row).

    The sum is divided by the items of the whole optimizer step, as every loss is. What is added to the step's loss is
    therefore coef * the mean over its rows, each with the weight that it has in the trainer's own loss. The loss of a
    row with several responses is the mean over them; see `losses.router_balance`.

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
    row_of = torch.tensor(batch.response_row)
    share = 1 / torch.bincount(row_of, minlength=batch.num_rows)[row_of]  # of each response in its row
    weights = row_items.to(batch.device)[row_of.to(batch.device)] * share.to(batch.device)
    total = (weights * record.losses).sum()
    metrics = {"aux_loss": Mean(total.detach(), row_items.sum())}
    return LossOutput(output.total + coef * total, output.metrics | metrics)
