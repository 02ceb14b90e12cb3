import math
from itertools import product

import pytest
import torch

from prefrl.errors import ConfigError
from prefrl.losses.per_token import row_sums
from prefrl.losses.preference.pairwise import PAIR_LOSSES, Pairs, box_cox, divergence_score, rpo_nll, smoothed_logistic
from prefrl.losses.preference.unpaired import length_desensitized, wpo_weights
from prefrl.options.preference import PairParams

LN2 = math.log(2)
LN3 = math.log(3)
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
# Valid values, one for each name that occurs.
VALUES = {"beta": 0.1, "label_smoothing": 0.1, "discopop_tau": 0.5}


def logistic(x):
    return math.log1p(math.exp(-x))


def make_pairs(chosen, rejected, *, ref_chosen=-7.0, ref_rejected=-5.0, lengths=(4.0, 2.0), **settings):
    """Pairs with these log-ratios."""
    chosen, rejected = torch.atleast_1d(torch.tensor(chosen)), torch.atleast_1d(torch.tensor(rejected))
    ref_chosen, ref_rejected = torch.full_like(chosen, ref_chosen), torch.full_like(rejected, ref_rejected)
    return Pairs(
        chosen_logps=(chosen + ref_chosen).requires_grad_(),
        rejected_logps=(rejected + ref_rejected).requires_grad_(),
        ref_chosen_logps=ref_chosen,
        ref_rejected_logps=ref_rejected,
        chosen_lengths=torch.full_like(chosen, lengths[0]),
        rejected_lengths=torch.full_like(rejected, lengths[1]),
        **settings,
    )


def evaluate(name, pairs, **hyperparameters):
    """Losses, and the gradients of their sum with respect to the two log-probs."""
    row = PAIR_LOSSES[name]
    loss = row.function(pairs, row.params(**hyperparameters))
    loss.sum().backward()
    gradients = (pairs.chosen_logps.grad, pairs.rejected_logps.grad)
    return loss.detach(), *(torch.zeros_like(loss) if g is None else g for g in gradients)


def valid_values(name):
    return {key: VALUES[key] for key in PAIR_LOSSES[name].params.names()}


@pytest.mark.parametrize(
    ("name", "values", "loss", "chosen_gradient", "rejected_gradient"),
    [
        # -(1 - e) ln(1/2) - e ln(1/2) = ln 2; slope b (1 - 2 e) / 2
        ("sigmoid", {"label_smoothing": 0.0}, LN2, -0.05, 0.05),
        ("sigmoid", {"label_smoothing": 0.1}, LN2, -0.04, 0.04),
        ("hinge", {}, 1.0, -0.1, 0.1),
        # (1 / (2 b))^2 = 25; slope 2 * 5 / length
        ("ipo", {}, 25.0, -2.5, 5.0),
        # KL([1/2, 1/2] || [0.9, 0.1]) = ln(5/9) / 2 + ln(5) / 2; slope b / 4 * ln(e / (1 - e))
        ("exo_pair", {"label_smoothing": 0.1}, math.log(5 / 3), -0.025 * math.log(9), 0.025 * math.log(9)),
        # Without smoothing, e = 0.001: -ln(4 * 0.999 * 0.001) / 2
        ("exo_pair", {"label_smoothing": 0.0}, -math.log(0.003996) / 2, -0.025 * math.log(999), 0.025 * math.log(999)),
        ("nca_pair", {}, 2 * LN2, -0.025, 0.025),
        # slope b / 2 / (1 - 2 e): what label smoothing takes away is given back
        ("robust", {"label_smoothing": 0.1}, LN2, -0.0625, 0.0625),
        ("bco_pair", {}, 2 * LN2, -0.05, 0.05),
        # 2 * 5^2; slope 2 * 5
        ("sppo_hard", {}, 50.0, -10.0, 10.0),
        ("aot", {"label_smoothing": 0.0}, LN2, -0.05, 0.05),
        ("aot_unpaired", {"label_smoothing": 0.0}, LN2, -0.05, 0.05),
        ("apo_zero", {}, 1.0, -0.025, 0.025),
        # 1/2 + 1/2; the two slopes of the chosen side cancel
        ("apo_down", {}, 1.0, 0.0, 0.025),
        # (ln 2 + 1) / 2; slope b * ((1 - ln 2) / (4 tau) - (1/2 + 1) / 2), tau = 1/2
        ("discopop", {"discopop_tau": 0.5}, (LN2 + 1) / 2, -0.1 * (0.25 + LN2 / 2), 0.1 * (0.25 + LN2 / 2)),
        ("sft", {}, 7.0, -1.0, 0.0),
        # b / (2 length)
        ("sigmoid_norm", {}, LN2, -0.0125, 0.025),
    ],
)
def test_start_of_training_by_hand(name, values, loss, chosen_gradient, rejected_gradient):
    found = evaluate(name, make_pairs(0.0, 0.0), beta=0.1, **values)
    assert [x.item() for x in found] == pytest.approx([loss, chosen_gradient, rejected_gradient], rel=1e-5, abs=1e-7)


# b u_w = ln 3 and b u_l = -ln 3: sigmoid(b u_w) = 3/4, sigmoid(b u_l) = 1/4, b m = ln 9, sigmoid(b m) = 9/10.
@pytest.mark.parametrize(
    ("name", "values", "loss", "chosen_gradient", "rejected_gradient"),
    [
        ("sigmoid", {"label_smoothing": 0.0}, -math.log(0.9), -0.05, 0.05),
        # -0.9 ln 0.9 - 0.1 ln 0.1; b (0.9 - 0.9) = 0: the margin that the label is worth
        ("sigmoid", {"label_smoothing": 0.1}, -0.9 * math.log(0.9) - 0.1 * math.log(0.1), 0.0, 0.0),
        ("hinge", {}, 0.0, 0.0, 0.0),
        # 2 ln 3 / 4 + 2 ln 3 / 2 = 1.5 ln 3, target 1; slope 2 (1.5 ln 3 - 1) / length
        ("ipo", {}, (1.5 * LN3 - 1) ** 2, (1.5 * LN3 - 1) / 2, 1 - 1.5 * LN3),
        ("exo_pair", {"label_smoothing": 0.1}, 0.0, 0.0, 0.0),
        # -ln 3/4 - ln(1/4) / 2 - ln(3/4) / 2; b (-1/4 + 3/4 / 2), b / 4 / 2
        ("nca_pair", {}, -1.5 * math.log(0.75) + LN2, 0.0625, 0.0625),
        # (-0.75 ln 0.9 + 0.25 ln 0.1) / 0.5; b (-0.75 / 10 - 0.25 * 9 / 10) / 0.5 = -0.6 b
        ("robust", {"label_smoothing": 0.25}, (-0.75 * math.log(0.9) + 0.25 * math.log(0.1)) / 0.5, -0.3, 0.3),
        # -ln(3/4) twice
        ("bco_pair", {}, -2 * math.log(0.75), -0.125, 0.125),
        ("sppo_hard", {}, 2 * (2 * LN3 - 1) ** 2, 2 * (2 * LN3 - 1), -2 * (2 * LN3 - 1)),
        ("aot", {"label_smoothing": 0.0}, -math.log(0.9), -0.05, 0.05),
        ("aot_unpaired", {"label_smoothing": 0.0}, -math.log(0.9), -0.05, 0.05),
        # 1/4 + 1/4; slope b * 3/4 * 1/4
        ("apo_zero", {}, 0.5, -0.09375, 0.09375),
        # 3/4 + 1/10; slopes b (3/16 - 9/100) and b * 9/100
        ("apo_down", {}, 0.85, 0.5 * (0.1875 - 0.09), 0.045),
        # g = sigmoid(2 ln 9) = 81/82, exp(-b m) = 1/9; g' = 2 * 81/82 * 1/82
        (
            "discopop",
            {"discopop_tau": 0.5},
            (-math.log(0.9) + 9) / 82,
            0.5 * (2 * 81 / 82**2 * (1 / 9 + math.log(0.9)) - 0.1 / 82 - 9 / 82),
            -0.5 * (2 * 81 / 82**2 * (1 / 9 + math.log(0.9)) - 0.1 / 82 - 9 / 82),
        ),
        ("sft", {}, 7 - 2 * LN3, -1.0, 0.0),
        # b (2 ln 3 / 4 + 2 ln 3 / 2) = 0.75 ln 3
        (
            "sigmoid_norm",
            {},
            logistic(0.75 * LN3),
            -0.5 / 4 / (1 + 3**0.75),
            0.5 / 2 / (1 + 3**0.75),
        ),
    ],
)
def test_separated_pair_by_hand(name, values, loss, chosen_gradient, rejected_gradient):
    found = evaluate(name, make_pairs(2 * LN3, -2 * LN3), beta=0.5, **values)
    assert [x.item() for x in found] == pytest.approx([loss, chosen_gradient, rejected_gradient], rel=1e-5, abs=1e-6)


def test_bco_compares_rewards_with_their_running_mean():
    # b u_w = t = ln 3, b u_l = -ln 3: -ln(1/2) - ln(9/10)
    found = evaluate("bco_pair", make_pairs(2 * LN3, -2 * LN3, reward_shift=LN3), beta=0.5)
    assert [x.item() for x in found] == pytest.approx([LN2 - math.log(0.9), -0.25, 0.05], rel=1e-5)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_large_log_ratios_leave_finite_losses_and_gradients(name, beta):
    values = valid_values(name) | {"beta": beta}
    divergences = ("reverse_kl",) if PAIR_LOSSES[name].uses_log_ratios else DIVERGENCES
    for chosen, rejected, divergence in product((-200.0, 0.0, 200.0), (-200.0, 0.0, 200.0), divergences):
        found = evaluate(name, make_pairs(chosen, rejected, divergence=divergence, alpha=0.5), **values)
        assert all(x.isfinite().all() for x in found), (chosen, rejected, divergence)


def test_a_pair_that_is_ranked_wrong_by_far_has_the_loss_and_gradient_of_the_limit():
    # -log sigmoid(-400 b) = 400 b; DiscoPOP: g = 0 there, the logistic part remains
    for name, values in (("sigmoid", {"label_smoothing": 0.0}), ("discopop", {"discopop_tau": 0.05})):
        loss, chosen, rejected = evaluate(name, make_pairs(-200.0, 200.0), beta=1.0, **values)
        assert (loss.item(), chosen.item(), rejected.item()) == pytest.approx((400.0, -1.0, 1.0))


@pytest.mark.parametrize("name", [name for name, row in PAIR_LOSSES.items() if not row.is_batch_loss])
def test_pairs_do_not_see_each_other(name):
    chosen, rejected = [0.5, -1.0, 2.0], [0.25, 1.0, -3.0]
    together = evaluate(name, make_pairs(chosen, rejected), **valid_values(name))
    alone = [evaluate(name, make_pairs(c, r), **valid_values(name)) for c, r in zip(chosen, rejected, strict=True)]
    for found, parts in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(parts))


def test_aot_compares_margins_of_equal_rank():
    pairs = Pairs(
        chosen_logps=torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
        rejected_logps=torch.tensor([-2.0, -5.0, -2.0], requires_grad=True),  # margins 1, 3, -1
        ref_chosen_logps=torch.tensor([-4.0, -4.0, -4.0]),
        ref_rejected_logps=torch.tensor([-6.0, -4.5, -4.0]),  # margins 2, 0.5, 0
        chosen_lengths=torch.ones(3),
        rejected_lengths=torch.ones(3),
    )
    loss, chosen, rejected = evaluate("aot", pairs, beta=1.0, label_smoothing=0.0)
    # sorted: -1, 1, 3 against 0, 0.5, 2
    differences = [-1.0, 0.5, 1.0]
    assert loss.tolist() == pytest.approx([logistic(d) for d in differences])
    of_pair = torch.tensor([differences[rank] for rank in (1, 2, 0)])
    torch.testing.assert_close(chosen, -torch.sigmoid(-of_pair))
    torch.testing.assert_close(rejected, torch.sigmoid(-of_pair))


def test_aot_unpaired_compares_rewards_of_equal_rank():
    pairs = make_pairs([1.0, 3.0, -1.0], [2.0, 0.5, 0.0])
    loss, chosen, rejected = evaluate("aot_unpaired", pairs, beta=1.0, label_smoothing=0.25)
    differences = [-1.0, 0.5, 1.0]
    assert loss.tolist() == pytest.approx([0.75 * logistic(d) + 0.25 * logistic(-d) for d in differences])
    slopes = [-0.75 / (1 + math.exp(d)) + 0.25 / (1 + math.exp(-d)) for d in differences]
    torch.testing.assert_close(chosen, torch.tensor([slopes[rank] for rank in (1, 2, 0)]))
    torch.testing.assert_close(rejected, -torch.tensor([slopes[rank] for rank in (2, 1, 0)]))


def test_exo_is_least_at_the_margin_of_the_smoothed_label():
    # ln(0.99 / 0.01) = ln 99
    margins = (4.0, math.log(99), 5.0)
    below, at, above = (evaluate("exo_pair", make_pairs(m, 0.0), beta=1.0, label_smoothing=0.01) for m in margins)
    assert at[0].item() == pytest.approx(0.0, abs=1e-6)
    assert below[1].item() < -1e-3
    assert above[1].item() > 1e-3


def test_robust_is_unbiased_under_flipped_labels():
    # 0.8 robust(m) + 0.2 robust(-m) = -log sigmoid(m)
    right = evaluate("robust", make_pairs(1.5, 0.0), beta=1.0, label_smoothing=0.2)[0].item()
    flipped = evaluate("robust", make_pairs(-1.5, 0.0), beta=1.0, label_smoothing=0.2)[0].item()
    assert 0.8 * right + 0.2 * flipped == pytest.approx(logistic(1.5))


@pytest.mark.parametrize(
    ("name", "label_smoothing", "message"),
    [
        ("sigmoid", -0.1, "label_smoothing=-0.1: must be a number >= 0 and <= 0.5"),
        ("sigmoid", 0.6, "label_smoothing=0.6: must be a number >= 0 and <= 0.5"),
        ("aot", 0.6, "label_smoothing=0.6: must be a number >= 0 and <= 0.5"),
        ("aot_unpaired", 0.6, "label_smoothing=0.6: must be a number >= 0 and <= 0.5"),
        ("exo_pair", 0.5, "label_smoothing=0.5: exo_pair needs it below 0.5"),
        ("robust", 0.5, "label_smoothing=0.5: robust needs it below 0.5"),
        ("robust", -0.1, "label_smoothing=-0.1: must be a number >= 0 and <= 0.5"),
    ],
)
def test_label_smoothing_out_of_bounds_is_refused(name, label_smoothing, message):
    with pytest.raises(ConfigError, match=message):
        PAIR_LOSSES[name].params(label_smoothing=label_smoothing)


def test_label_smoothing_of_a_half_knows_no_direction():
    margin = torch.tensor([1.5, -1.5], requires_grad=True)
    loss = smoothed_logistic(margin, label_smoothing=0.5)
    assert loss[0].item() == pytest.approx(loss[1].item())
    assert loss[0].item() == pytest.approx(logistic(1.5) / 2 + logistic(-1.5) / 2)


# u = ln 2, a response that is twice as likely as under the reference
@pytest.mark.parametrize(
    ("divergence", "alpha", "score", "slope"),
    [
        ("reverse_kl", 0.5, LN2, 1.0),
        ("forward_kl", 0.5, 0.5, 0.5),
        ("js_divergence", 0.5, math.log(4 / 3), 1 / 3),
        ("alpha_divergence", 0.5, 2 - math.sqrt(2), 1 / math.sqrt(2)),
        ("alpha_divergence", 0.0, 0.5, 0.5),  # forward_kl
        ("alpha_divergence", 2.0, 1.0, 2.0),
        ("alpha_divergence", 1.0, LN2, 1.0),  # reverse_kl
        ("alpha_divergence", 1 - 1e-7, LN2, 1.0),
    ],
)
def test_divergence_scores_by_hand(divergence, alpha, score, slope):
    log_ratio = torch.tensor(LN2, requires_grad=True)
    found = divergence_score(log_ratio, divergence=divergence, alpha=alpha)
    found.backward()
    assert (found.item(), log_ratio.grad.item()) == pytest.approx((score, slope), rel=1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_scores_are_zero_where_policy_and_reference_agree(divergence):
    # math.log(2) is rounded to float32 in the log-sigmoid
    assert divergence_score(torch.zeros(()), divergence=divergence, alpha=0.5).item() == pytest.approx(0, abs=1e-7)


def test_scores_come_near_those_of_alpha_one():
    log_ratio = torch.tensor([-3.0, 0.01, 3.0])
    found = divergence_score(log_ratio, divergence="alpha_divergence", alpha=1 + 1e-5)
    torch.testing.assert_close(found, log_ratio + 1e-5 * log_ratio.square() / 2, rtol=1e-6, atol=0)


def test_box_cox_limits_the_exponent_and_not_the_other_side():
    value = torch.tensor([-200.0, -30.0, 30.0, 200.0], requires_grad=True)
    found = box_cox(value, power=-2.0)
    found.sum().backward()
    limit = -math.expm1(40) / 2
    assert found.tolist() == pytest.approx([limit, limit, 0.5, 0.5])
    assert found.square().isfinite().all()
    assert value.grad.tolist() == pytest.approx([0.0, 0.0, math.exp(-60), 0.0])


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_divergence_changes_exactly_the_losses_of_scores(name):
    plain = evaluate(name, make_pairs(1.0, -0.5), **valid_values(name))[0]
    other = evaluate(name, make_pairs(1.0, -0.5, divergence="forward_kl"), **valid_values(name))[0]
    assert (plain == other).item() == (PAIR_LOSSES[name].uses_log_ratios or name == "sft")


def test_loss_and_gradient_go_through_the_divergence():
    # forward KL at u_w = ln 2, u_l = -ln 2: m = (1 - 1/2) - (1 - 2) = 1.5; slopes exp(-u) = 1/2 and 2
    loss, chosen, rejected = evaluate(
        "sigmoid", make_pairs(LN2, -LN2, divergence="forward_kl"), beta=2.0, label_smoothing=0.0
    )
    slope = 2 / (1 + math.exp(3))
    assert (loss.item(), chosen.item(), rejected.item()) == pytest.approx((logistic(3), -slope / 2, slope * 2))


def test_alpha_of_the_pairs_reaches_the_scores():
    pairs = make_pairs(LN2, 0.0, divergence="alpha_divergence", alpha=2.0)
    assert pairs.chosen_score.item() == pytest.approx(1.0)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_the_reference_is_constant(name):
    pairs = make_pairs([1.0, 2.0], [0.5, -1.0])
    pairs.ref_chosen_logps.requires_grad_()
    pairs.ref_rejected_logps.requires_grad_()
    row = PAIR_LOSSES[name]
    row.function(pairs, row.params(**valid_values(name))).sum().backward()
    assert pairs.ref_chosen_logps.grad is None
    assert pairs.ref_rejected_logps.grad is None


def test_pairs_whose_shapes_would_broadcast_are_refused():
    values = {name: torch.zeros(3) for name in ("chosen_logps", "rejected_logps", "ref_chosen_logps")}
    with pytest.raises(ValueError, match=r"rejected_lengths \(1,\); all of them need to be equal"):
        Pairs(
            **values, ref_rejected_logps=torch.zeros(3), chosen_lengths=torch.ones(3), rejected_lengths=torch.ones(1)
        )


def test_rpo_adds_the_mean_nll_of_the_chosen_tokens():
    pairs = make_pairs(1.0, 5.0)  # log-prob 1 - 7, 4 tokens
    loss = rpo_nll(pairs)
    loss.sum().backward()
    assert (loss.item(), pairs.chosen_logps.grad.item()) == (1.5, -0.25)
    assert pairs.rejected_logps.grad is None


# Rows of 3, 1 and 2 tokens; token 1 is not trainable, nor is any of row 2.
ROW_INDEX = torch.tensor([0, 0, 0, 1, 2, 2])
TRAINABLE = torch.tensor([True, False, True, True, False, False])


def test_row_sums_add_trainable_tokens_alone():
    values = torch.tensor([1.0, math.nan, 3.0, 10.0, math.inf, 5.0], requires_grad=True)
    sums = row_sums(values, TRAINABLE, ROW_INDEX, 4)
    assert sums.tolist() == [4.0, 10.0, 0.0, 0.0]
    (sums * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert values.grad.tolist() == [1.0, 0.0, 1.0, 2.0, 0.0, 0.0]


def test_tokens_past_the_shared_length_weigh_ld_alpha():
    # Row 0 has 3 trainable tokens of 4, row 1 has 2 of 3; the shared length is 2 trainable tokens.
    logprobs = torch.tensor([-1.0, -50.0, -2.0, -4.0, -50.0, -8.0, -16.0], requires_grad=True)
    trainable = torch.tensor([True, False, True, True, False, True, True])
    row_index = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    sums = length_desensitized(logprobs, trainable, row_index, torch.tensor([2.0, 2.0]), 2, ld_alpha=0.25)
    sums.sum().backward()
    assert sums.tolist() == [-1 - 2 - 0.25 * 4, -8 - 16]
    assert logprobs.grad.tolist() == [1.0, 0.0, 1.0, 0.25, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(("ld_alpha", "expected"), [(1.0, [-7.0, -8.0]), (0.0, [-1.0, -8.0])])
def test_ld_alpha_of_one_is_the_sum_and_of_zero_cuts(ld_alpha, expected):
    logprobs = torch.tensor([-1.0, -2.0, -4.0, -8.0])
    row_index = torch.tensor([0, 0, 0, 1])
    trainable = torch.ones(4, dtype=torch.bool)
    shared = torch.tensor([1.0, 1.0])
    assert length_desensitized(logprobs, trainable, row_index, shared, 2, ld_alpha=ld_alpha).tolist() == expected


@pytest.mark.parametrize(
    ("num_shared", "ld_alpha", "message"),
    [
        (1, 0.5, r"shared_lengths has shape \(1,\): needs to be \(3,\)"),
        (3, 1.5, "ld_alpha=1.5: needs to be in 0 .. 1"),
        (3, -0.5, "ld_alpha=-0.5: needs to be in 0 .. 1"),
    ],
)
def test_length_desensitization_refuses(num_shared, ld_alpha, message):
    with pytest.raises(ValueError, match=message):
        length_desensitized(torch.zeros(6), TRAINABLE, ROW_INDEX, torch.ones(num_shared), 3, ld_alpha=ld_alpha)


def test_wpo_weight_is_the_mean_likelihood_relative_to_a_sampled_token():
    # Two tokens of row 0: p = 1/2 of (1/2, 1/2), whose sum of squares is 1/2: ratio 1;
    # p = 1/4 of (3/4, 1/4), whose sum of squares is 10/16: ratio 0.4. Geometric mean sqrt(0.4).
    # Row 1: p = 3/4 of the same: ratio 1.2. Row 2 has no trainable token.
    logprobs = torch.tensor([0.5, 0.9, 0.25, 0.75, 0.1, 0.1]).log().requires_grad_()
    log_collision = torch.tensor([0.5, 0.1, 0.625, 0.625, 0.5, 0.5]).log()
    weights = wpo_weights(logprobs, log_collision, TRAINABLE, ROW_INDEX, 3)
    assert weights.tolist() == pytest.approx([math.sqrt(0.4), 1.2, 1.0])
    assert not weights.requires_grad


def test_table_of_pair_losses():
    assert list(PAIR_LOSSES) == [
        "sigmoid",
        "hinge",
        "ipo",
        "exo_pair",
        "nca_pair",
        "robust",
        "bco_pair",
        "sppo_hard",
        "aot",
        "aot_unpaired",
        "apo_zero",
        "apo_down",
        "discopop",
        "sft",
        "sigmoid_norm",
    ]
    assert {name: row.params.names()[1:] for name, row in PAIR_LOSSES.items() if row.params is not PairParams} == {
        "sigmoid": ["label_smoothing"],
        "exo_pair": ["label_smoothing"],
        "robust": ["label_smoothing"],
        "aot": ["label_smoothing"],
        "aot_unpaired": ["label_smoothing"],
        "discopop": ["discopop_tau"],
    }
    assert [name for name, row in PAIR_LOSSES.items() if row.is_batch_loss] == ["aot", "aot_unpaired"]
    assert all(row.source and row.function.__name__ == name for name, row in PAIR_LOSSES.items())
