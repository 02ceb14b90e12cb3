"""The routers' loss of a micro-batch against a number worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefrl.metrics import Mean
from prefrl.trainer.features.router import RouterLoss
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


def run_of(scorer: Recording, items: torch.Tensor, *, policy_learns: bool = True) -> Any:
    return SimpleNamespace(scorer=scorer, row_items=lambda batch: items, policy_learns=policy_learns)


@pytest.fixture(autouse=True)
def settable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefrl.models.routers.RouterRecord.losses", None)


def test_rows_count_by_their_items_and_responses_share_that_of_their_row():
    scorer, items = Recording([2.0, 4.0, 8.0, 5.0]), torch.tensor([3.0, 1.0])
    output = RouterLoss(0.5).around_loss(run_of(scorer, items), batch_of(0, 0, 0, 1), scorer.run)
    # 3 * (2 + 4 + 8) / 3 + 1 * 5 = 19
    assert output.total.item() == pytest.approx(10 + 0.5 * 19)
    assert set(output.metrics) == {"entropy", "aux_loss"}
    assert output.metrics["aux_loss"].value() == pytest.approx(19 / 4)


def test_a_pass_that_fails_is_the_last_that_is_recorded():
    scorer = Recording([1.0])
    with pytest.raises(ZeroDivisionError):
        RouterLoss(1.0).around_loss(run_of(scorer, torch.ones(1)), batch_of(0), lambda: 1 / 0)
    assert scorer.routers is None


def test_nothing_is_recorded_while_the_policy_does_not_learn():
    scorer = Recording([2.0])
    run = run_of(scorer, torch.ones(1), policy_learns=False)
    output = RouterLoss(1.0).around_loss(run, batch_of(0), lambda: LossOutput(torch.tensor(10.0), {}))
    assert output.total.item() == 10.0
    assert output.metrics == {}
    assert scorer.routers is None
