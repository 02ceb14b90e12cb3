"""Losses without a reference, and that of reward models: numbers and gradients worked out by hand."""

import math

import pytest
import torch

from prefrl.errors import ConfigError
from prefrl.losses.preference.pairwise import CPO_LOSSES, Pairs, bradley_terry, centering, odds_ratio
from prefrl.losses.preference.unpaired import bco, density_ratio_weights, kto

LN2 = math.log(2)
LN3 = math.log(3)


def evaluate(name, chosen, rejected, *, lengths=(4.0, 2.0), **hyperparameters):
    """Loss of a pair with these summed log-probs, and its gradients."""
    chosen = torch.tensor([chosen], requires_grad=True)
    rejected = torch.tensor([rejected], requires_grad=True)
    num_chosen, num_rejected = (torch.tensor([length]) for length in lengths)
    row, zero = CPO_LOSSES[name], torch.zeros(1)
    loss = row.function(Pairs(chosen, rejected, zero, zero, num_chosen, num_rejected), row.params(**hyperparameters))
    loss.sum().backward()
    return loss.item(), chosen.grad.item(), rejected.grad.item()


PLAIN = {"label_smoothing": 0.0}


@pytest.mark.parametrize(
    ("name", "values", "logps", "expected"),
    [
        # equal sums: ln 2; slope b / 2
        ("sigmoid", PLAIN, (-8.0, -8.0), (LN2, -0.25, 0.25)),
        # b (l_w - l_l) = ln 3
        ("sigmoid", PLAIN, (-8.0 + 2 * LN3, -8.0), (-math.log(0.75), -0.125, 0.125)),
        # 1/4 is what the label is worth there: no slope
        ("sigmoid", {"label_smoothing": 0.25}, (-8.0 + 2 * LN3, -8.0), (0.75 * math.log(4 / 3) + LN2 / 2, 0.0, 0.0)),
        ("hinge", {}, (-8.0, -9.0), (0.5, -0.5, 0.5)),
        ("hinge", {}, (-8.0, -10.5), (0.0, 0.0, 0.0)),
        # means -2 and -2, target 1 / (2 b) = 1; slope 2 / length
        ("ipo", {}, (-8.0, -4.0), (1.0, -0.5, 1.0)),
        # means -2 and -3
        ("ipo", {}, (-8.0, -6.0), (0.0, 0.0, 0.0)),
        # means -2 and -2: -log sigmoid(-g), g = ln 3; slope b * 3/4 / length
        ("simpo", PLAIN | {"simpo_gamma": LN3}, (-8.0, -4.0), (math.log(4), -0.09375, 0.1875)),
        # b (a_w - a_l) = ln 3 = g
        ("simpo", PLAIN | {"simpo_gamma": LN3}, (-8.0 + 8 * LN3, -4.0), (LN2, -0.0625, 0.125)),
        # b (a_w - a_l) - g = ln 3 where smoothing by 1/4 takes the slope away
        (
            "simpo",
            {"label_smoothing": 0.25, "simpo_gamma": LN3},
            (-8.0 + 16 * LN3, -4.0),
            (0.75 * math.log(4 / 3) + LN2 / 2, 0.0, 0.0),
        ),
        # alpha 1: r = 1 - 1/p; p_w = 1/2, p_l = 1/4: r = -1 and -3, m = b * 2 - g = 0; slopes b / 2 / p / length
        (
            "alphapo",
            PLAIN | {"simpo_gamma": 1.0, "alpha": 1.0},
            (-4 * LN2, -4 * LN2),
            (LN2, -0.25 * 2 / 4, 0.25 * 4 / 2),
        ),
        # alpha -1: r = p - 1 = -1/2 and -3/4, m = b / 4 - g = 0; slopes b / 2 * p / length
        (
            "alphapo",
            PLAIN | {"simpo_gamma": 0.125, "alpha": -1.0},
            (-4 * LN2, -4 * LN2),
            (LN2, -0.25 / 2 / 4, 0.25 / 4 / 2),
        ),
        # the same, smoothed: slopes by (1 - 2 e)
        (
            "alphapo",
            {"label_smoothing": 0.25, "simpo_gamma": 0.125, "alpha": -1.0},
            (-4 * LN2, -4 * LN2),
            (LN2, -0.25 / 2 / 4 / 2, 0.25 / 4 / 2 / 2),
        ),
    ],
)
def test_losses_by_hand(name, values, logps, expected):
    assert evaluate(name, *logps, beta=0.5, **values) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 1e-9, -1e-9])
def test_alphapo_without_alpha_is_simpo(alpha):
    values = {"beta": 2.0, "label_smoothing": 0.1, "simpo_gamma": 0.5}
    simpo = evaluate("simpo", -8.0, -5.0, **values)
    assert evaluate("alphapo", -8.0, -5.0, alpha=alpha, **values) == pytest.approx(simpo, rel=1e-6)


@pytest.mark.parametrize("alpha", [1e-5, -1e-5])
def test_alphapo_comes_near_simpo_without_losing_digits(alpha):
    values = {"beta": 2.0, "label_smoothing": 0.1, "simpo_gamma": 0.5}
    simpo = evaluate("simpo", -8.0, -5.0, **values)
    assert evaluate("alphapo", -8.0, -5.0, alpha=alpha, **values) == pytest.approx(simpo, rel=1e-4)


@pytest.mark.parametrize("name", CPO_LOSSES)
@pytest.mark.parametrize("logps", [(-200.0, -1.0), (-1.0, -200.0), (-0.0, -200.0), (-200.0, -0.0)])
@pytest.mark.parametrize("alpha", [2.0, 0.25, -2.0])
def test_unlikely_responses_leave_finite_losses_and_gradients(name, logps, alpha):
    all_values = {"beta": 2.5, "label_smoothing": 0.1, "simpo_gamma": 0.5, "alpha": alpha}
    values = {key: all_values[key] for key in CPO_LOSSES[name].params.names()}
    assert all(math.isfinite(x) for x in evaluate(name, *logps, lengths=(1.0, 1.0), **values))


def test_long_responses_keep_their_reward():
    # 32768 tokens of ln 2 each: p = exp(-22713) is 0 in any float, its geometric mean is 1/2.
    values = {"beta": 0.5, "label_smoothing": 0.0, "simpo_gamma": 1.0, "alpha": 1.0}
    found = evaluate("alphapo", -32768 * LN2, -65536 * LN2, lengths=(32768.0, 32768.0), **values)
    assert found == pytest.approx((LN2, -0.25 * 2 / 32768, 0.25 * 4 / 32768), rel=1e-4)


@pytest.mark.parametrize("name", ["sigmoid", "simpo", "alphapo"])
def test_label_smoothing_out_of_bounds_is_refused(name):
    with pytest.raises(ConfigError, match=r"label_smoothing=0\.6: must be a number >= 0 and <= 0\.5"):
        CPO_LOSSES[name].params(label_smoothing=0.6)


def test_table_of_cpo_losses():
    assert {name: row.params.names() for name, row in CPO_LOSSES.items()} == {
        "sigmoid": ["beta", "label_smoothing"],
        "hinge": ["beta"],
        "ipo": ["beta"],
        "simpo": ["beta", "label_smoothing", "simpo_gamma"],
        "alphapo": ["beta", "label_smoothing", "simpo_gamma", "alpha"],
    }
    assert all(row.source and row.function.__name__ == name for name, row in CPO_LOSSES.items())


def evaluate_odds(chosen, rejected, dtype=torch.float32):
    """ORPO's loss, log odds ratio and gradients at these mean log-probs."""
    chosen = torch.tensor([chosen], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([rejected], dtype=dtype, requires_grad=True)
    result = odds_ratio(chosen, rejected)
    result.loss.sum().backward()
    assert not result.log_odds_ratio.requires_grad
    return result.loss.item(), result.log_odds_ratio.item(), chosen.grad.item(), rejected.grad.item()


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        # odds 1 and 1: -log sigmoid(0); d log odds / d log p = 1 / (1 - p) = 2, times -1/2
        (0.5, 0.5, (LN2, 0.0, -1.0, 1.0)),
        # odds 3 and 1: sigmoid(ln 3) = 3/4; slopes -1/4 * 4 and 1/4 * 2
        (0.75, 0.5, (-math.log(0.75), LN3, -1.0, 0.5)),
        # odds 1/3 and 3: sigmoid(-ln 9) = 1/10; slopes -9/10 * 4/3 and 9/10 * 4
        (0.25, 0.75, (math.log(10), -2 * LN3, -1.2, 3.6)),
    ],
)
def test_odds_ratio_by_hand(chosen, rejected, expected):
    assert evaluate_odds(math.log(chosen), math.log(rejected)) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_odds_of_a_nearly_certain_response_keep_their_digits():
    # p = 1 - 1e-6: odds 1e6 - 1; slope -1 / (1 + 1e6) * 1e6 = -1 and 1e-6 * 2
    found = evaluate_odds(math.log1p(-1e-6), -LN2)
    assert found == pytest.approx((1e-6, math.log(1e6), -1.0, 2e-6), rel=1e-4)


def test_odds_of_an_unlikely_response_are_its_probability():
    found = evaluate_odds(-200.0, -LN2)
    assert found == pytest.approx((200.0, -200.0, -1.0, 2.0))


@pytest.mark.parametrize(("chosen", "rejected"), [(0.0, 0.0), (0.0, -200.0), (-200.0, 0.0), (-1e-12, -1e-12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_responses_leave_finite_losses_and_gradients(chosen, rejected, dtype):
    assert all(math.isfinite(x) for x in evaluate_odds(chosen, rejected, dtype))


def test_mean_log_probs_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"chosen_mean_logps \(2,\), rejected_mean_logps \(1,\)"):
        odds_ratio(torch.zeros(2), torch.zeros(1))


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


SIDES = torch.tensor([True, False])


def evaluate_rows(function, log_ratio, **values):
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
    found = evaluate_rows(kto, log_ratio, beta=0.5, kl=torch.tensor(kl))
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
    found = evaluate_rows(bco, log_ratio, beta=0.5, reward_shift=reward_shift)
    assert found[0] == pytest.approx(loss)
    assert found[1] == pytest.approx(gradient)


def test_large_log_ratios_have_the_values_of_the_limit():
    for log_ratio in (200.0, -200.0):
        is_large = float(log_ratio > 0)
        found = evaluate_rows(kto, log_ratio, beta=1.0, kl=torch.tensor(0.0))
        assert found[0] == pytest.approx([1 - is_large, is_large])
        assert found[1] == pytest.approx([0.0, 0.0])
        found = evaluate_rows(bco, log_ratio, beta=1.0, reward_shift=0.0)
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
def test_rows_of_other_shapes_are_refused(function):
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
