import math

import pytest
import torch

from prefrl.losses.policy import POLICY_LOSSES, clipped_surrogate, sequence_log_ratio
from prefrl.losses.reduce import item_count, token_weights

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28, "delta": None}


def surrogate(ratio, advantage, **changes):
    """Loss, its gradient with respect to the log-ratio, and stats, of one token."""
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    result = clipped_surrogate(log_ratio, torch.tensor([advantage]), **(BOUNDS | changes))
    result.loss.sum().backward()
    return result.loss.item(), log_ratio.grad.item(), {name: stat.item() for name, stat in result.stats.items()}


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
def test_clip_limits_only_the_favourable_side(ratio, advantage, loss, gradient):
    found_loss, found_gradient, _ = surrogate(ratio, advantage)
    assert (found_loss, found_gradient) == pytest.approx((loss, gradient), abs=1e-6)


def test_gradient_at_ratio_one_is_minus_advantage():
    log_ratio = torch.zeros(3, requires_grad=True)
    advantages = torch.tensor([1.5, -2.0, 0.0])
    clipped_surrogate(log_ratio, advantages, clip_low=0.0, clip_high=0.0, delta=None).loss.sum().backward()
    torch.testing.assert_close(log_ratio.grad, -advantages)


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
    found_loss, found_gradient, _ = surrogate(ratio, advantage, delta=4.0)
    assert (found_loss, found_gradient) == pytest.approx((loss, gradient), abs=1e-6)


@pytest.mark.parametrize("delta", [None, 1.5, 4.0])
def test_equals_the_minimum_form_of_the_papers(delta):
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(400, generator=generator, dtype=torch.float64).requires_grad_()
    advantages = torch.randn(400, generator=generator, dtype=torch.float64)
    result = clipped_surrogate(log_ratio, advantages, **(BOUNDS | {"delta": delta}))
    ratio = log_ratio.exp()
    capped = ratio if delta is None else ratio.clamp(max=delta)
    expected = -torch.minimum(capped * advantages, ratio.clamp(0.8, 1.28) * advantages)
    torch.testing.assert_close(result.loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(result.loss.sum(), log_ratio), torch.autograd.grad(expected.sum(), log_ratio), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_clipped_ratio_that_overflows_leaves_a_finite_gradient():
    for advantage, delta in ((1.0, None), (0.0, None), (-1.0, 4.0)):
        log_ratio = torch.tensor([200.0], requires_grad=True)
        result = clipped_surrogate(log_ratio, torch.tensor([advantage]), **(BOUNDS | {"delta": delta}))
        result.loss.sum().backward()
        assert result.loss.isfinite().all()
        assert log_ratio.grad.tolist() == [0.0]


def test_clip_low_of_one_leaves_no_lower_bound():
    assert surrogate(0.01, -1.0, clip_low=1.0)[:2] == pytest.approx((0.01, 0.01))


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
    stats = surrogate(ratio, advantage)[2]
    assert stats == {"clip_ratio/low": low, "clip_ratio/high": high, "clip_ratio/region": max(low, high)}


def test_advantages_are_constants():
    advantages = torch.ones(2, requires_grad=True)
    result = clipped_surrogate(torch.zeros(2, requires_grad=True), advantages, **BOUNDS)
    result.loss.sum().backward()
    assert advantages.grad is None
    assert not any(stat.requires_grad for stat in result.stats.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_low": 1.1}, "clip_low=1.1"),
        ({"clip_low": -0.1}, "clip_low=-0.1"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"delta": 1.28}, "delta=1.28: needs to be above 1 [+] clip_high = 1.28"),
    ],
)
def test_bounds_that_exclude_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        surrogate(1.0, 1.0, **changes)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"shapes differ: log_ratio \(3,\), advantages \(1,\)"):
        clipped_surrogate(torch.zeros(3), torch.zeros(1), **BOUNDS)


ROW_INDEX = torch.tensor([0, 0, 0, 1, 2])
TRAINABLE = torch.tensor([True, False, True, True, False])


def test_sequence_log_ratio_is_the_mean_over_trainable_tokens_of_the_row():
    log_ratio = torch.tensor([0.1, math.nan, 0.3, -0.5, 9.0])  # not trainable: not read
    result = sequence_log_ratio(log_ratio, TRAINABLE, ROW_INDEX, 3)
    torch.testing.assert_close(result, torch.tensor([0.2, 0.2, 0.2, -0.5, 0.0]))


def test_gradient_of_the_sequence_level_loss_by_hand():
    # GSPO, eq. 10: grad of s_i A_i = s_i A_i * (1 / |y_i|) * sum_t grad log pi_t, then the mean over rows.
    log_ratio = torch.tensor([0.05, 7.0, 0.15, -0.1, 7.0], requires_grad=True)
    advantages = torch.tensor([2.0, 2.0, 2.0, -1.0, 5.0])
    ratios = sequence_log_ratio(log_ratio, TRAINABLE, ROW_INDEX, 3)
    weights = token_weights(TRAINABLE, ROW_INDEX, 3, reduction="sequence_mean")
    count = item_count(TRAINABLE, ROW_INDEX, 3, reduction="sequence_mean", constant=None)
    loss = (weights * clipped_surrogate(ratios, advantages, **BOUNDS).loss).sum() / count
    loss.backward()
    first, second = math.exp(0.1), math.exp(-0.1)
    assert loss.item() == pytest.approx((-2 * first + second) / 3)
    expected = torch.tensor([-2 * first / 2 / 3, 0.0, -2 * first / 2 / 3, second / 3, 0.0])
    torch.testing.assert_close(log_ratio.grad, expected)


def test_sequence_clip_takes_all_tokens_of_a_row_or_none():
    log_ratio = torch.tensor([0.9, 0.0, -0.1, 0.0, 0.0], requires_grad=True)  # row 0: mean 0.4 > log 1.28
    ratios = sequence_log_ratio(log_ratio, TRAINABLE, ROW_INDEX, 3)
    result = clipped_surrogate(ratios, torch.ones(5), **BOUNDS)
    (result.loss * TRAINABLE).sum().backward()
    assert log_ratio.grad.tolist() == [0.0, 0.0, 0.0, -1.0, 0.0]
    assert result.stats["clip_ratio/high"].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_table_of_policy_losses():
    reductions = {name: row.reduction for name, row in POLICY_LOSSES.items()}
    assert reductions == {"grpo": "sequence_mean", "bnpo": "token", "dr_grpo": "constant", "dapo": "token"}
    for row in POLICY_LOSSES.values():
        assert row.hyperparameters == {"clip_low", "clip_high", "delta"}
        assert row.source
        with pytest.raises(AttributeError):
            row.reduction = "token"
