"""The routers' loss of a micro-batch against a number worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from prefrl.metrics import Mean
from prefrl.trainer.features.router import with_router_loss
from prefrl.types import LossOutput, TokenBatch


@dataclass
class Recording:
    """A scorer whose next pass gives these losses."""

    losses: list[float]
    routers: object = None

    def run(self) -> LossOutput:
        self.routers.losses = torch.tensor(self.losses, requires_grad=True)
        return LossOutput(torch.tensor(10.0), {"entropy": Mean(1.0, 1)})


def batch_of(*response_row: int) -> TokenBatch:
    """Rows of responses of one token each, after one prompt."""
    count = len(response_row)
    return TokenBatch(
        prompt_ids=torch.tensor([1]),
        prompt_lengths=(1,),
        prompt_index=(0,) * count,
        response_ids=torch.ones(count, dtype=torch.long),
        response_lengths=(1,) * count,
        response_row=response_row,
        trainable=torch.ones(count, dtype=torch.bool),
        group_index=(0,) * (max(response_row) + 1),
    )


@pytest.fixture(autouse=True)
def settable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefrl.models.routers.RouterRecord.losses", None)


def test_rows_count_by_their_items_and_responses_share_that_of_their_row():
    scorer, items = Recording([2.0, 4.0, 8.0, 5.0]), torch.tensor([3.0, 1.0])
    output = with_router_loss(scorer.run, scorer, batch_of(0, 0, 0, 1), items, coef=0.5)
    # 3 * (2 + 4 + 8) / 3 + 1 * 5 = 19
    assert output.total.item() == pytest.approx(10 + 0.5 * 19)
    assert set(output.metrics) == {"entropy", "aux_loss"}
    assert output.metrics["aux_loss"].value() == pytest.approx(19 / 4)


def test_a_pass_that_fails_is_the_last_that_is_recorded():
    scorer = Recording([1.0])
    with pytest.raises(ZeroDivisionError):
        with_router_loss(lambda: 1 / 0, scorer, batch_of(0), torch.ones(1), coef=1.0)
    assert scorer.routers is None
