import math

import pytest
import torch

from prefrl.losses.preference.reference_free import bradley_terry, centering

LN2 = math.log(2)
LN3 = math.log(3)


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "loss", "gradient"),
    [
        (2.0, 2.0, None, LN2, -0.5),
        (LN3, 0.0, None, -math.log(0.75), -0.25),  # sigmoid(ln 3) = 3/4
        (0.0, LN3, None, -math.log(0.25), -0.75),
        (LN3, 0.0, LN3, LN2, -0.5),  # the margin is what a loss of ln 2 asks for
        (0.0, 0.0, LN3, -math.log(0.25), -0.75),
        (200.0, 0.0, None, 0.0, 0.0),
        (0.0, 200.0, None, 200.0, -1.0),
    ],
)
def test_bradley_terry_by_hand(chosen, rejected, margin, loss, gradient):
    chosen = torch.tensor([chosen], requires_grad=True)
    rejected = torch.tensor([rejected], requires_grad=True)
    margin = None if margin is None else torch.tensor([margin], requires_grad=True)
    found = bradley_terry(chosen, rejected, margin)
    found.sum().backward()
    assert found.item() == pytest.approx(loss, abs=1e-7)
    assert (chosen.grad.item(), rejected.grad.item()) == pytest.approx((gradient, -gradient), abs=1e-7)
    assert margin is None or margin.grad is None


def test_each_pair_has_its_margin():
    scores = torch.zeros(2)
    found = bradley_terry(scores, scores, torch.tensor([0.0, LN3]))
    assert found.tolist() == pytest.approx([LN2, math.log(4)])


def test_centering_pulls_the_sum_of_scores_to_zero():
    chosen = torch.tensor([3.0, 1.0], requires_grad=True)
    rejected = torch.tensor([-1.0, -1.0], requires_grad=True)
    found = centering(chosen, rejected)
    found.sum().backward()
    assert found.tolist() == [4.0, 0.0]
    assert chosen.grad.tolist() == rejected.grad.tolist() == [4.0, 0.0]


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"shapes differ: chosen \(2,\), rejected \(1,\)"):
        bradley_terry(torch.zeros(2), torch.zeros(1), None)
    with pytest.raises(ValueError, match=r"margin \(1,\)"):
        bradley_terry(torch.zeros(2), torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match=r"shapes differ: chosen \(2,\), rejected \(1,\)"):
        centering(torch.zeros(2), torch.zeros(1))
