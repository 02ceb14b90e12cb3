import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from prefrl.losses.per_token import item_count, token_weights
from prefrl.losses.policy.losses import NEEDS_RATIO, POLICY_LOSSES
from prefrl.losses.policy.tokens import PolicyTokens, select_clip_cov, select_kl_cov
from prefrl.options.policy import CovarianceBand, HighestCovariance, PolicyLossParams

CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
# Values under which every loss is bounded, by the name of the hyperparameter.
VALUES = {
    **CLIP,
    "delta": 4.0,
    "rho": 2.0,
    "temperature_pos": 1.0,
    "temperature_neg": 2.0,
    "k_pos": 2.0,
    "lambda_pos": 3.0,
    "k_neg": 3.0,
    "lambda_neg": 2.0,
    "coef": 0.5,
}
CASES = [(name, level) for name, row in POLICY_LOSSES.items() for level in row.levels]


def rows_of(*log_ratios, advantages, logprob=-2.0, dtype=torch.float32, **changes):
    """One row for each argument: the log-ratios of its tokens; all have a loss and none is selected."""
    lengths = torch.tensor([len(row) for row in log_ratios])
    log_ratio = torch.tensor([d for row in log_ratios for d in row], dtype=dtype)
    logprobs = torch.full_like(log_ratio, logprob).requires_grad_()
    fields = {
        "logprobs": logprobs,
        "old_logprobs": logprobs.detach() - log_ratio,
        "advantages": torch.tensor(advantages, dtype=dtype).repeat_interleave(lengths),
        "trainable": torch.ones(len(log_ratio), dtype=torch.bool),
        "row_index": torch.arange(len(log_ratios)).repeat_interleave(lengths),
        "num_rows": len(log_ratios),
        "cov_tokens": torch.zeros(len(log_ratio), dtype=torch.bool),
    }
    return PolicyTokens(**(fields | changes))


def result_of(name, tokens, **changes):
    row = POLICY_LOSSES[name]
    names = row.params.names()
    return row.function(
        tokens, row.params(**{key: value for key, value in (VALUES | changes).items() if key in names})
    )


def reduced(name, tokens, **changes):
    """Loss of a step of these rows."""
    layout, reduction = (tokens.trainable, tokens.row_index, tokens.num_rows), POLICY_LOSSES[name].reduction
    weights = token_weights(*layout, reduction=reduction)
    return (weights * result_of(name, tokens, **changes).loss).sum() / item_count(
        *layout, reduction=reduction, constant=4.0 if reduction == "constant" else None
    )


def one_token(name, ratio, advantage, **changes):
    """Loss, its gradient with respect to log pi, which is -2, and stats, of one token."""
    tokens = rows_of([math.log(ratio)], advantages=[advantage], dtype=torch.float64)
    result = result_of(name, tokens, **changes)
    result.loss.sum().backward()
    stats = {key: stat.item() for key, stat in result.stats.items()}
    return result.loss.item(), tokens.logprobs.grad.item(), stats


# What holds of all of them.


@pytest.mark.parametrize(("name", "level"), CASES)
def test_what_is_said_of_tokens_without_an_advantage_does_not_depend_on_the_ratio(name, level):
    far, near = (
        result_of(name, rows_of([a, b], [-a, c], advantages=[0.0, 0.0], level=level))
        for a, b, c in ((-3.0, 2.0, 5.0), (0.0, 0.0, 0.0))
    )
    for key in far.stats.keys() - NEEDS_RATIO:
        assert far.stats[key].equal(near.stats[key]), key


@pytest.mark.parametrize(("name", "level"), CASES)
@pytest.mark.parametrize("advantage", [1.5, -2.0, 0.0])
def test_gradient_at_ratio_one_is_the_policy_gradient(name, level, advantage):
    tokens = rows_of([0.0, 0.0, 0.0], [0.0], advantages=[advantage, -1.0], level=level)
    result_of(name, tokens).loss.sum().backward()
    # From each of its tokens, the sum of a row reaches all of them.
    factor = (
        3 if level == "sequence_sum" and POLICY_LOSSES[name].function.__name__ in ("clipped_surrogate", "sapo") else 1
    )
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor([-advantage * factor] * 3 + [1.0]))


@pytest.mark.parametrize(("name", "level"), CASES)
def test_a_bound_of_zero_width_leaves_the_gradient_at_ratio_one(name, level):
    tokens = rows_of([0.0], advantages=[1.5], level=level)
    result_of(name, tokens, epsilon=0.0, epsilon_high=0.0, delta=1.1, rho=1.0).loss.sum().backward()
    assert tokens.logprobs.grad.tolist() == [-1.5]


@pytest.mark.parametrize(("name", "level"), CASES)
def test_extreme_log_ratios_leave_loss_gradient_and_stats_finite(name, level):
    for first, second, advantage, is_selected in product((200.0, -200.0), (200.0, -200.0, 0.0), (1.0, -1.0), (0, 1)):
        selected = torch.full((2,), bool(is_selected))
        tokens = rows_of([first, second], advantages=[advantage], level=level, cov_tokens=selected)
        result = result_of(name, tokens)
        result.loss.sum().backward()
        for values in (result.loss, tokens.logprobs.grad, *result.stats.values()):
            assert values.isfinite().all()


@pytest.mark.parametrize(("name", "level"), CASES)
def test_the_dtype_of_the_log_probs_stays(name, level):
    tokens = rows_of([0.1, -0.3], advantages=[1.0], level=level, dtype=torch.float64)
    assert result_of(name, tokens).loss.dtype == torch.float64
    assert result_of(name, rows_of([0.1], advantages=[1.0], level=level)).loss.dtype == torch.float32


@pytest.mark.parametrize(("name", "level"), CASES)
@pytest.mark.parametrize("unread", [math.nan, 7.0])
def test_tokens_that_are_not_trainable_are_not_read_and_have_no_loss(name, level, unread):
    tokens = rows_of([0.1, 0.0, -0.2], [0.0], advantages=[1.0, -1.0], level=level, dtype=torch.float64)
    trainable = torch.tensor([True, False, True, False])
    others = {
        key: getattr(tokens, key).detach().masked_fill(~trainable, value)
        for key, value in (("logprobs", unread), ("old_logprobs", -unread), ("advantages", unread))
    }
    others["logprobs"].requires_grad_()
    result = result_of(name, replace(tokens, **others, trainable=trainable)).loss
    result.sum().backward()
    assert result[~trainable].tolist() == others["logprobs"].grad[~trainable].tolist() == [0.0, 0.0]
    torch.testing.assert_close(result, result_of(name, replace(tokens, trainable=trainable)).loss)


@pytest.mark.parametrize(("name", "level"), CASES)
def test_advantages_old_log_probs_and_stats_are_constants(name, level):
    constants = {key: torch.full((2,), -1.9, requires_grad=True) for key in ("advantages", "old_logprobs")}
    tokens = replace(rows_of([0.1, 0.1], advantages=[1.0], level=level), **constants)
    result = result_of(name, tokens)
    result.loss.sum().backward()
    assert all(constant.grad is None for constant in constants.values())
    assert not any(stat.requires_grad for stat in result.stats.values())


# The clipped surrogate: grpo, bnpo, dr_grpo, dapo, luspo.


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),
        (1.1, -2.0, 2.2, 2.2),
        (1.5, 1.0, -1.28, 0.0),  # clipped above
        (1.5, -1.0, 1.5, 1.5),  # the pessimistic side is not
        (0.5, 1.0, -0.5, -0.5),  # nor is it below
        (0.5, -1.0, 0.8, 0.0),  # clipped below
        (0.5, 0.0, 0.0, 0.0),
    ],
)
def test_clip_limits_only_the_favorable_side(ratio, advantage, loss, gradient):
    assert one_token("grpo", ratio, advantage, delta=None)[:2] == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (5.0, -1.0, 4.0, 0.0),  # capped
        (3.0, -1.0, 3.0, 3.0),  # below the cap
        (5.0, 1.0, -1.28, 0.0),  # the clip is stricter
        (0.5, -1.0, 0.8, 0.0),
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_delta_caps_ratios_of_bad_tokens_alone(ratio, advantage, loss, gradient):
    assert one_token("grpo", ratio, advantage, delta=4.0)[:2] == pytest.approx((loss, gradient))


def random_tokens():
    generator = torch.Generator().manual_seed(0)
    log_ratio, advantages = torch.randn(2, 400, generator=generator, dtype=torch.float64).unbind()
    return replace(rows_of(log_ratio.tolist(), advantages=[1.0], dtype=torch.float64), advantages=advantages)


@pytest.mark.parametrize("delta", [None, 1.5, 4.0])
def test_equals_the_minimum_form_of_the_papers(delta):
    tokens = random_tokens()
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    capped = ratio if delta is None else ratio.clamp(max=delta)
    expected = -torch.minimum(capped * tokens.advantages, ratio.clamp(0.8, 1.28) * tokens.advantages)
    assert_same_loss_and_gradient(result_of("grpo", tokens, delta=delta).loss, expected, tokens)


@pytest.mark.parametrize("bound", [1.5, 3.0])
def test_delta_is_the_dual_clip_of_ppo(bound):
    """verl's clip_ratio_c and cosmos-rl's lower_bound_ratio: a floor of the objective where A < 0."""
    tokens = random_tokens()
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    plain = torch.maximum(-ratio * tokens.advantages, -ratio.clamp(0.8, 1.28) * tokens.advantages)
    expected = torch.where(tokens.advantages < 0, plain.minimum(-bound * tokens.advantages), plain)
    assert (expected < plain).any()
    assert_same_loss_and_gradient(result_of("grpo", tokens, delta=bound).loss, expected, tokens)


def assert_same_loss_and_gradient(found, expected, tokens):
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(loss.sum(), tokens.logprobs)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("epsilon", [1.0, 10.0])
def test_from_one_on_epsilon_leaves_no_lower_bound(epsilon):
    """Loss and gradient of an unclipped token: -r A and -r A; -r A log pi and -r A."""
    assert one_token("grpo", 0.01, -1.0, epsilon=epsilon)[:2] == pytest.approx((0.01, 0.01))
    assert one_token("clip_cov", 0.01, -1.0, epsilon=epsilon)[:2] == pytest.approx((0.01, 0.01))
    assert one_token("cispo", 0.01, -1.0, epsilon=epsilon)[:2] == pytest.approx((-0.02, 0.01))
    assert one_token("dppo", 0.2, -1.0, epsilon=epsilon)[:2] == pytest.approx((-0.4, 0.2))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(10.5, 1.0, -10.5, -10.5), (11.5, 1.0, -11.0, 0.0), (11.5, -1.0, 11.5, 11.5), (13.0, -1.0, 12.0, 0.0)],
)
def test_an_epsilon_of_ten_bounds_ratios_by_eleven(ratio, advantage, loss, gradient):
    found = one_token("grpo", ratio, advantage, epsilon=10.0, epsilon_high=None, delta=12.0)
    assert found[:2] == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [
        (0.79, -1.0, 1, 0),
        (0.79, 1.0, 0, 0),
        (0.81, -1.0, 0, 0),
        (1.29, 1.0, 0, 1),
        (1.29, -1.0, 0, 0),
        (1.27, 1.0, 0, 0),
        (1.29, 0.0, 0, 0),
        (0.79, 0.0, 0, 0),
    ],
)
def test_stats_mark_ratios_beyond_the_bound_that_limits(ratio, advantage, low, high):
    stats = one_token("grpo", ratio, advantage)[2]
    assert stats == {"clip_ratio/low": low, "clip_ratio/high": high, "clip_ratio/region": max(low, high)}


def test_gspo_by_hand():
    # Eq. 10: grad of s_i A_i = s_i A_i * (1 / |y_i|) * sum_t grad log pi_t, then the mean over rows.
    tokens = rows_of([0.05, 0.15], [-0.1], [0.0], advantages=[2.0, -1.0, 5.0], level="sequence")
    loss = reduced("grpo", replace(tokens, trainable=torch.tensor([True, True, True, False])))
    loss.backward()
    first, second = math.exp(0.1), math.exp(-0.1)
    assert loss.item() == pytest.approx((-2 * first + second) / 3)
    expected = torch.tensor([-2 * first / 2 / 3, -2 * first / 2 / 3, second / 3, 0.0])
    torch.testing.assert_close(tokens.logprobs.grad, expected)


def test_gspo_token_weighs_each_token_by_its_own_advantage():
    tokens = rows_of([0.05, 0.15], advantages=[2.0], level="sequence_token")
    tokens = replace(tokens, advantages=torch.tensor([2.0, -4.0]))
    reduced("grpo", tokens).backward()
    ratio = math.exp(0.1)
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor([-ratio, 2 * ratio]))


def test_sequence_and_sequence_token_agree_on_equal_advantages():
    rows = ([0.05, 0.15, -0.3], [-0.1, 0.7], [0.4])
    gradients = []
    for level in ("sequence", "sequence_token"):
        tokens = rows_of(*rows, advantages=[2.0, -1.0, 1.0], level=level)
        reduced("grpo", tokens).backward()
        gradients.append(tokens.logprobs.grad)
    torch.testing.assert_close(*gradients)


def test_sequence_clip_takes_all_tokens_of_a_row_or_none():
    tokens = rows_of([0.9, -0.1], [-0.1], advantages=[1.0, 1.0], level="sequence")  # row 0: mean 0.4 > log 1.28
    result = result_of("grpo", tokens)
    result.loss.sum().backward()
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor([0.0, 0.0, -math.exp(-0.1)]))
    assert result.stats["clip_ratio/high"].tolist() == [1.0, 1.0, 0.0]


def test_a_rows_summed_ratio_counts_once():
    tokens = rows_of([0.05, 0.1], [-0.1], advantages=[2.0, -1.0], level="sequence_sum")
    loss = reduced("grpo", tokens)
    loss.backward()
    first, second = math.exp(0.15), math.exp(-0.1)
    assert loss.item() == pytest.approx((-2 * first + second) / 2)
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor([-first, -first, second / 2]))


def test_luspo_weighs_the_loss_of_gspo_by_the_length_of_the_row():
    tokens = rows_of([0.05, 0.15], [-0.1], advantages=[2.0, -1.0], level="sequence")
    loss = reduced("luspo", tokens)
    loss.backward()
    first, second = math.exp(0.1), math.exp(-0.1)
    assert loss.item() == pytest.approx((2 * -2 * first + second) / 2)
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor([-first, -first, second / 2]))


# Losses with a constant weight; log pi is -2.


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "is_clipped"),
    [
        (1.1, 2.0, 1.1, 0),
        (1.5, 1.0, 1.28, 1),
        (1.5, -1.0, 1.28, 1),  # both sides, whatever the sign
        (0.5, 1.0, 0.8, 1),
        (0.5, -1.0, 0.8, 1),
    ],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio, advantage, weight, is_clipped):
    loss, gradient, stats = one_token("cispo", ratio, advantage)
    assert (loss, gradient) == pytest.approx((2 * weight * advantage, -weight * advantage))
    assert stats == {"cispo_clip_ratio": is_clipped}


@pytest.mark.parametrize(("ratio", "weight", "is_clipped"), [(0.1, 0.1, 0), (1.5, 1.5, 0), (3.0, 2.0, 1)])
@pytest.mark.parametrize("advantage", [3.0, -1.0])
def test_aipo_bounds_the_weight_above_and_keeps_the_gradient(ratio, weight, is_clipped, advantage):
    loss, gradient, stats = one_token("aipo", ratio, advantage)
    assert (loss, gradient) == pytest.approx((2 * weight * advantage, -weight * advantage))
    assert stats == {"aipo_clip_ratio": is_clipped}


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "side"),
    [
        (1.5, 1.0, 1.5, None),  # log pi = -2: from 0.09 to 0.135
        (3.0, 1.0, 3.0, None),  # from 0.045
        (0.5, -1.0, 0.5, None),  # from 0.27
        (0.25, -1.0, 0.0, "low"),  # from 0.54: by 0.41
        (0.25, 1.0, 0.25, None),
        (9.0, -1.0, 4.0, None),  # the largest ratio
    ],
)
def test_dppo_drops_tokens_whose_probability_moved_too_far(ratio, advantage, weight, side):
    loss, gradient, stats = one_token("dppo", ratio, advantage)
    assert (loss, gradient) == pytest.approx((2 * weight * advantage, -weight * advantage))
    assert stats == {f"clip_ratio/{key}": float(key in (side, side and "region")) for key in ("low", "high", "region")}
    # 0.12 of the probability of 0.135 is new where the ratio is 9.
    assert one_token("dppo", 9.0, 1.0, epsilon_high=0.11)[2]["clip_ratio/high"] == 1.0


@pytest.mark.parametrize("name", ["gpg", "reinforce"])
def test_reinforce_has_no_ratio(name):
    assert one_token(name, 3.0, 1.5) == (3.0, -1.5, {})


def test_gpg_is_a_mean_over_tokens_and_reinforce_a_mean_over_rows():
    tokens = rows_of([0.0, 0.0], [0.0], advantages=[1.0, -2.0])  # per token 2, 2, -4
    assert reduced("gpg", tokens).item() == pytest.approx(0.0)
    assert reduced("reinforce", tokens).item() == pytest.approx(0.0)
    tokens = rows_of([0.0, 0.0], [0.0], advantages=[1.0, -1.0])  # per token 2, 2, -2
    assert reduced("gpg", tokens).item() == pytest.approx(2 / 3)
    assert reduced("reinforce", tokens).item() == pytest.approx(2 / 2)


@pytest.mark.parametrize(
    ("advantage", "phi"),
    [
        (1.0, 2**2 * math.exp(-3)),  # W = 2, k = 2, lambda = 3
        (-1.0, 2**3 * math.exp(-2)),
    ],
)
def test_vespo_weighs_all_tokens_of_a_row_by_the_rows_ratio(advantage, phi):
    tokens = rows_of([math.log(4), math.log(0.5)], [0.0], advantages=[advantage, 1.0])
    result = result_of("vespo", tokens)
    result.loss.sum().backward()
    torch.testing.assert_close(result.loss, torch.tensor([2 * phi * advantage, 2 * phi * advantage, 2.0]))
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor([-phi * advantage, -phi * advantage, -1.0]))
    torch.testing.assert_close(result.stats["vespo/phi_seq_mean"], torch.tensor([phi, phi, 1.0]))


def test_phi_is_largest_where_the_ratio_is_k_over_lambda():
    at = {ratio: one_token("vespo", ratio, 1.0)[2]["vespo/phi_seq_mean"] for ratio in (0.6, 2 / 3, 0.73)}
    assert at[2 / 3] > max(at[0.6], at[0.73])
    assert one_token("vespo", 2 / 3, 0.0)[2]["vespo/phi_seq_mean"] == at[2 / 3]  # A = 0 counts as positive


# Losses with another shape.


@pytest.mark.parametrize(
    ("ratio", "advantage", "tau"),
    [(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (0.5, 3.0, 1.0), (2.0, -1.0, 2.0), (0.5, -3.0, 2.0)],
)
def test_sapo_by_hand(ratio, advantage, tau):
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    loss, gradient, stats = one_token("sapo", ratio, advantage)
    assert loss == pytest.approx(-4 / tau * gate * advantage)
    assert gradient == pytest.approx(-4 * gate * (1 - gate) * ratio * advantage)
    assert stats == {}


def test_sapo_of_a_ratio_of_two_in_numbers():
    assert one_token("sapo", 2.0, 1.0)[:2] == pytest.approx((-2.9242343, -1.5728954))


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "mean", "gradient"),
    [
        ([0.5, -0.1], 2.0, 0.15, [0, 1]),  # 0.5 is clipped to 0.4
        ([-0.5, 0.1], 2.0, -0.2, [1, 1]),  # the pessimistic side is not
        ([-0.5, 0.1], -1.0, -0.1, [0, 1]),  # -0.5 is clipped to -0.3
        ([0.5, -0.1], -1.0, 0.2, [1, 1]),
        ([0.5, 0.6], 1.0, 0.4, [0, 0]),
    ],
)
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(log_ratio, advantage, mean, gradient):
    tokens = rows_of(log_ratio, [0.0], advantages=[advantage, 0.0])
    loss = reduced("gmpo", tokens, epsilon=0.3, epsilon_high=0.4)
    loss.backward()
    expected = -advantage * math.exp(mean)
    assert loss.item() == pytest.approx(expected / 2)  # two rows, each counts once
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor([*gradient, 0]) * expected / 2 / 2)


def test_gmpo_marks_the_tokens_that_it_clips():
    tokens = rows_of([0.5, 0.35, -0.5], [0.5, -0.35, -0.25], advantages=[1.0, -1.0])
    stats = result_of("gmpo", tokens, epsilon=0.3, epsilon_high=0.4).stats
    assert stats["clip_ratio/high"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert stats["clip_ratio/low"].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert stats["clip_ratio/region"].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_gmpo_follows_the_sign_of_each_tokens_advantage():
    tokens = replace(rows_of([0.5, -0.5, 0.3], advantages=[1.0]), advantages=torch.tensor([1.0, -1.0, 0.0]))
    loss = reduced("gmpo", tokens, epsilon=0.4, epsilon_high=0.4)  # clipped to 0.4, -0.4 and, where A = 0, 0
    torch.testing.assert_close(loss, torch.tensor(0.0))
    tokens = replace(tokens, advantages=torch.tensor([3.0, -1.5, 0.0]))
    torch.testing.assert_close(reduced("gmpo", tokens, epsilon=0.4, epsilon_high=0.4), torch.tensor(-0.5))


def test_clip_cov_drops_selected_tokens_that_are_not_clipped():
    log_ratio = [math.log(1.1), math.log(1.5), math.log(1.1)]
    tokens = rows_of(log_ratio, advantages=[1.0], cov_tokens=torch.tensor([True, True, False]))
    result = result_of("clip_cov", tokens)
    result.loss.sum().backward()
    torch.testing.assert_close(result.loss, torch.tensor([0.0, -1.28, -1.1]))
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor([0.0, 0.0, -1.1]))
    assert result.stats["clip_cov/selected"].tolist() == [1.0, 0.0, 0.0]
    assert result.stats["clip_ratio/region"].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("log_ratio", "is_selected", "loss", "gradient"),
    [
        (0.2, True, -math.exp(0.2) + 0.1, -math.exp(0.2) + 0.5),
        (-0.2, True, -math.exp(-0.2) + 0.1, -math.exp(-0.2) - 0.5),
        (0.0, True, -1.0, -1.0),
        (0.7, False, -math.exp(0.7), -math.exp(0.7)),  # no clip
    ],
)
def test_kl_cov_adds_a_penalty_to_selected_tokens(log_ratio, is_selected, loss, gradient):
    tokens = rows_of([log_ratio], advantages=[1.0], cov_tokens=torch.tensor([is_selected]))
    result = result_of("kl_cov", tokens)
    result.loss.sum().backward()
    assert (result.loss.item(), tokens.logprobs.grad.item()) == pytest.approx((loss, gradient))
    assert result.stats["kl_cov/selected"].tolist() == [is_selected]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_missing_selection_is_an_error(name):
    with pytest.raises(ValueError, match="cov_tokens=None: clip_cov and kl_cov need the selection"):
        result_of(name, rows_of([0.0], advantages=[1.0], cov_tokens=None))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        *((name, {"epsilon": -0.1}, "epsilon=-0.1") for name in ("grpo", "cispo", "clip_cov", "dppo", "gmpo")),
        *(
            (name, {"epsilon_high": -0.1}, "epsilon_high=-0.1")
            for name in ("grpo", "cispo", "clip_cov", "dppo", "gmpo")
        ),
        ("grpo", {"delta": 1.28}, "delta=1.28: must be above 1 [+] epsilon_high = 1.28"),
        ("grpo", {"epsilon": 10.0, "epsilon_high": None, "delta": 11.0}, "must be above 1 [+] epsilon_high = 11.0"),
        ("dppo", {"delta": 0.0}, "delta=0.0: must be a number > 0"),
        ("aipo", {"rho": 0.9}, "rho=0.9"),
        ("aipo", {"rho": math.inf}, "rho=inf"),
        ("sapo", {"temperature_pos": 0.0}, "temperature_pos=0.0: must be a number > 0"),
        ("sapo", {"temperature_neg": -1.0}, "temperature_neg=-1.0"),
        ("vespo", {"k_pos": -1.0}, "k_pos=-1.0"),
        ("vespo", {"k_neg": -1.0}, "k_neg=-1.0"),
        ("vespo", {"lambda_pos": 0.0}, "lambda_pos=0.0"),
        ("vespo", {"lambda_neg": 0.0}, "lambda_neg=0.0"),
        ("kl_cov", {"coef": -0.1}, "coef=-0.1"),
    ],
)
def test_hyperparameters_without_sense_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        one_token(name, 1.0, 1.0, **changes)


def test_gmpo_bounds_are_nats_and_may_be_above_one():
    tokens = rows_of([1.4], advantages=[1.0])
    assert reduced("gmpo", tokens, epsilon=1.5, epsilon_high=1.5).item() == pytest.approx(-math.exp(1.4))


def test_table_of_policy_losses():
    assert {name: row.reduction for name, row in POLICY_LOSSES.items()} == {
        "grpo": "sequence_mean",
        "bnpo": "token",
        "dr_grpo": "constant",
        "dapo": "token",
        "luspo": "sequence_sum",
        "cispo": "token",
        "sapo": "sequence_mean",
        "gmpo": "sequence_mean",
        "gpg": "token",
        "reinforce": "sequence_sum",
        "aipo": "token",
        "dppo": "token",
        "vespo": "token",
        "clip_cov": "token",
        "kl_cov": "token",
    }
    common = {*PolicyLossParams.names()}
    own = {name: {*row.params.names()} - common for name, row in POLICY_LOSSES.items()}
    selecting = {name: row.selection for name, row in POLICY_LOSSES.items() if row.selection}
    assert selecting == {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov}
    assert set().union(*own.values()) == VALUES.keys() | {*CovarianceBand.names()} | {*HighestCovariance.names()}
    for row in POLICY_LOSSES.values():
        assert row.source
        assert issubclass(row.params, PolicyLossParams)
        with pytest.raises(AttributeError):
            row.reduction = "token"
