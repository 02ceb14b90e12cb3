import math

import pytest
import torch

from prefrl.losses.preference.unpaired import bco, density_ratio_weights, kto

LN2 = math.log(2)
LN3 = math.log(3)
SIDES = torch.tensor([True, False])


def evaluate(function, log_ratio, **values):
    """Losses and gradients of a desirable and an undesirable row of this log-ratio."""
    log_ratio = torch.full((2,), log_ratio, requires_grad=True)
    loss = function(log_ratio, SIDES, **values)
    loss.sum().backward()
    return loss.tolist(), log_ratio.grad.tolist()


@pytest.mark.parametrize(
    ("log_ratio", "kl", "loss", "gradient"),
    [
        # 1 - sigmoid(0); slope b / 4
        (0.0, 0.0, [0.5, 0.5], [-0.125, 0.125]),
        # b (u - z) = ln 3: 1 - 3/4 and 3/4; slope b * 3/16
        (2 * LN3, 0.0, [0.25, 0.75], [-0.09375, 0.09375]),
        (2 * LN3 + 1, 1.0, [0.25, 0.75], [-0.09375, 0.09375]),
        # a response as likely as under the reference is a loss against z = 2 ln 3
        (0.0, 2 * LN3, [0.75, 0.25], [-0.09375, 0.09375]),
        # an estimate below 0 is no reference point
        (0.0, -5.0, [0.5, 0.5], [-0.125, 0.125]),
    ],
)
def test_kto_by_hand(log_ratio, kl, loss, gradient):
    found = evaluate(kto, log_ratio, beta=0.5, kl=torch.tensor(kl))
    assert found[0] == pytest.approx(loss)
    assert found[1] == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("log_ratio", "reward_shift", "loss", "gradient"),
    [
        (0.0, 0.0, [LN2, LN2], [-0.25, 0.25]),
        # sigmoid(ln 3) = 3/4; slopes b / 4 and 3 b / 4
        (2 * LN3, 0.0, [-math.log(0.75), -math.log(0.25)], [-0.125, 0.375]),
        # the shift is in units of the reward b u
        (2 * LN3, LN3, [LN2, LN2], [-0.25, 0.25]),
        (0.0, LN3, [-math.log(0.25), -math.log(0.75)], [-0.375, 0.125]),
    ],
)
def test_bco_by_hand(log_ratio, reward_shift, loss, gradient):
    found = evaluate(bco, log_ratio, beta=0.5, reward_shift=reward_shift)
    assert found[0] == pytest.approx(loss)
    assert found[1] == pytest.approx(gradient)


def test_large_log_ratios_have_the_values_of_the_limit():
    for log_ratio in (200.0, -200.0):
        is_large = float(log_ratio > 0)
        found = evaluate(kto, log_ratio, beta=1.0, kl=torch.tensor(0.0))
        assert found[0] == pytest.approx([1 - is_large, is_large])
        assert found[1] == pytest.approx([0.0, 0.0])
        found = evaluate(bco, log_ratio, beta=1.0, reward_shift=0.0)
        assert found[0] == pytest.approx([200.0 * (1 - is_large), 200.0 * is_large])
        assert found[1] == pytest.approx([is_large - 1, is_large])


def test_the_reference_point_of_kto_is_constant():
    kl = torch.tensor(0.7, requires_grad=True)
    kto(torch.zeros(2, requires_grad=True), SIDES, beta=0.1, kl=kl).sum().backward()
    assert kl.grad is None


def test_kto_refuses_a_reference_point_for_each_row():
    with pytest.raises(ValueError, match=r"kl has shape \(2,\): needs to be one number for all rows of a step"):
        kto(torch.zeros(2), SIDES, beta=0.1, kl=torch.zeros(2))


@pytest.mark.parametrize(
    "function",
    [
        lambda *rows: kto(*rows, beta=0.1, kl=torch.tensor(0.0)),
        lambda *rows: bco(*rows, beta=0.1, reward_shift=0.0),
    ],
)
def test_shapes_that_would_broadcast_are_refused(function):
    with pytest.raises(ValueError, match=r"shapes differ: log_ratio \(3,\), is_desirable \(1,\)"):
        function(torch.zeros(3), torch.ones(1, dtype=torch.bool))


def test_weight_is_the_odds_of_a_desirable_prompt_within_bounds():
    probability = torch.tensor([0.0, 0.2, 0.5, 0.75, 0.99, 1.0], requires_grad=True)
    weights = density_ratio_weights(probability, lowest=0.5, highest=10.0)
    assert weights.tolist() == pytest.approx([0.5, 0.5, 1.0, 3.0, 10.0, 10.0])
    assert not weights.requires_grad


@pytest.mark.parametrize(("lowest", "highest"), [(2.0, 1.0), (-1.0, 1.0)])
def test_bounds_that_exclude_each_other_are_refused(lowest, highest):
    with pytest.raises(ValueError, match=f"lowest={lowest}, highest={highest}: need 0 <= lowest <= highest"):
        density_ratio_weights(torch.zeros(1), lowest=lowest, highest=highest)
