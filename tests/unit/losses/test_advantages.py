import math

import pytest
import torch

from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.advantage.estimators import (
    Moments,
    ScoredRows,
    clip_advantages,
    moments,
    normalize_rows,
    row_totals,
    whitened,
)
from prefrl.options.policy_gradient import AdvantageParams, GrpoParams

NAN = math.nan
SUM, NORMALIZE = "sum_then_normalize", "normalize_then_sum"
# Every row-level estimator, with some hyper-parameters.
ESTIMATORS = {
    "grpo": {"scale_rewards": "group", "multi_objective_aggregation": SUM, "advantage_epsilon": 1e-4},
    "rloo": {},
    "reinforce_plus_plus_baseline": {},
    "remax": {},
    "opo": {},
    "gpg": {"f_norm": 1.0},
    "grpo_passk": {"scale_rewards": "group", "advantage_epsilon": 1e-4},
    "maxrl": {},
}
each = pytest.mark.parametrize("name", ESTIMATORS)


def scored(rewards, groups, *, weights=(1.0,), lengths=None, greedy=None, dtype=torch.float32):
    rewards = torch.tensor(rewards, dtype=dtype)
    return ScoredRows(
        rewards=rewards[:, None] if rewards.dim() == 1 else rewards,
        weights=torch.tensor(weights),
        groups=torch.tensor(groups, dtype=torch.long),
        lengths=torch.ones(len(groups), dtype=torch.long) if lengths is None else torch.tensor(lengths),
        greedy=None if greedy is None else torch.tensor(greedy, dtype=dtype),
    )


def advantages(rewards, groups, *, weights=(1.0,), scale="group", aggregation=SUM, epsilon=1e-4):
    return ADVANTAGES["grpo"].function(
        scored(rewards, groups, weights=weights),
        GrpoParams(scale_rewards=scale, multi_objective_aggregation=aggregation, advantage_epsilon=epsilon),
    )


def of(name, rewards, groups, *, lengths=None, greedy=None, dtype=torch.float32, **hyperparameters):
    if name == "remax" and greedy is None:
        greedy = [0.0] * len(groups)
    rows = scored(rewards, groups, lengths=lengths, greedy=greedy, dtype=dtype)
    row = ADVANTAGES[name]
    return row.function(rows, row.params(**(ESTIMATORS[name] | hyperparameters)))


def check(tensor, expected):
    assert tensor.dtype == torch.float32
    torch.testing.assert_close(tensor, torch.tensor(expected), atol=1e-6, rtol=1e-5, equal_nan=True)


# Groups (0, 1, 5) and (2, 4), their rows interleaved. Means 2 and 3; n-1 variances (4 + 1 + 9) / 2 = 7 and 2.
REWARDS, GROUPS = [0.0, 2.0, 1.0, 4.0, 5.0], [7, -3, 7, -3, 7]
CENTRED = [-2.0, -1.0, -1.0, 1.0, 3.0]
GROUP_STD = [math.sqrt(7), math.sqrt(2), math.sqrt(7), math.sqrt(2), math.sqrt(7)]


def test_group_scale_by_hand():
    result = advantages(REWARDS, GROUPS, epsilon=0.5)
    check(result.values, [c / (s + 0.5) for c, s in zip(CENTRED, GROUP_STD, strict=True)])
    check(result.totals, REWARDS)


def test_no_scale_by_hand():
    result = advantages(REWARDS, GROUPS, scale="none")
    check(result.values, CENTRED)


def test_batch_scale_divides_by_the_spread_of_all_totals():
    # Mean 2.4: squares 5.76 + .16 + 1.96 + 2.56 + 6.76 = 17.2; / 4 = 4.3.
    result = advantages(REWARDS, GROUPS, scale="batch", epsilon=0.5)
    check(result.values, [c / (math.sqrt(4.3) + 0.5) for c in CENTRED])


def test_totals_are_weighted_sums_of_the_rewards_that_have_a_value():
    result = advantages([[1.0, 2.0], [NAN, 3.0], [4.0, NAN]], [0, 0, 0], weights=(2.0, 10.0), scale="none")
    check(result.totals, [22.0, 30.0, 8.0])
    check(result.values, [2.0, 10.0, -12.0])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_row_without_a_reward_gets_zero_and_moves_no_statistic(scale):
    full = advantages([1.0, 3.0, 4.0, 8.0], [0, 0, 1, 1], scale=scale)
    holed = advantages([1.0, NAN, 3.0, 4.0, NAN, 8.0], [0, 0, 0, 1, 1, 1], scale=scale)
    kept = [0, 2, 3, 5]
    assert torch.equal(holed.values[kept], full.values)
    assert holed.values[[1, 4]].tolist() == [0.0, 0.0]
    assert holed.totals[[1, 4]].isnan().all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_row_alone_in_its_group_has_advantage_zero(scale):
    result = advantages([5.0, 1.0, 3.0, 9.0, NAN, NAN], [0, 1, 1, 2, 2, 3], scale=scale)
    assert result.values[[0, 3, 4, 5]].tolist() == [0.0] * 4
    assert result.values[1] < 0 < result.values[2]


@pytest.mark.parametrize("aggregation", [SUM, NORMALIZE])
def test_equal_rewards_give_exactly_zero(aggregation):
    result = advantages([[0.1, 0.7]] * 7 + [[0.0, 1.0], [1.0, 0.0]], [0] * 7 + [1] * 2, weights=(0.3, 0.9),
                        aggregation=aggregation)  # fmt: skip
    assert result.values[:7].tolist() == [0.0] * 7


def test_one_row_in_all_has_advantage_zero():
    for scale in ("group", "batch", "none"):
        assert advantages([3.0], [0], scale=scale).values.tolist() == [0.0]
    assert advantages([3.0], [0], aggregation=NORMALIZE).values.tolist() == [0.0]


@each
def test_no_rows_have_no_advantages(name):
    result = of(name, [], [], greedy=[])
    assert result.values.shape == result.totals.shape == (0,)


def test_normalize_then_sum_by_hand():
    # One group of (0, 0), (1, 10), (2, 20): each reward becomes (-1, 0, 1) whatever its size.
    # Weights 1 and 3: S = (-4, 0, 4), n-1 std 4, A = (-1, 0, 1).
    result = advantages(
        [[0.0, 0.0], [1.0, 10.0], [2.0, 20.0]], [0, 0, 0], weights=(1.0, 3.0), aggregation=NORMALIZE, epsilon=0.0
    )
    check(result.values, [-1.0, 0.0, 1.0])
    check(result.totals, [0.0, 31.0, 62.0])


def test_normalize_then_sum_divides_by_the_spread_of_the_batch():
    # Groups (0, 2) and (5, 5): normalized (-1, 1) / sqrt(2) and (0, 0). n-1 std of those four: sqrt(1 / 3).
    result = advantages([0.0, 2.0, 5.0, 5.0], [0, 0, 1, 1], aggregation=NORMALIZE, epsilon=1e-12)
    check(result.values, [-math.sqrt(1.5), math.sqrt(1.5), 0.0, 0.0])


def test_normalize_then_sum_leaves_out_missing_rewards():
    # Reward 0 has one value, which is its own mean. Reward 1: (1, 3) -> (-1, 1) / sqrt(2). Row 3 has none at all.
    result = advantages(
        [[9.0, 1.0], [NAN, 3.0], [NAN, NAN]], [0, 0, 0], weights=(1.0, 1.0), aggregation=NORMALIZE, epsilon=1e-12
    )
    check(result.values, [-math.sqrt(0.5), math.sqrt(0.5), 0.0])
    check(result.totals, [10.0, 3.0, NAN])


def test_aggregations_differ_where_sums_collapse():
    # GDPO, fig. 2: totals (1, 1, 0, 2) cannot tell (1, 0) from (0, 1); normalized rewards of different spread can.
    rewards = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 2.0]]
    summed = advantages(rewards, [0] * 4, weights=(1.0, 1.0)).values
    normalized = advantages(rewards, [0] * 4, weights=(1.0, 1.0), aggregation=NORMALIZE).values
    assert summed[0] == summed[1]
    assert normalized[0] - normalized[1] > 0.1


def test_constant_offset_is_ignored_even_if_large():
    small = advantages([0.0, 1.0, 0.0, 3.0], [0, 0, 1, 1])
    large = advantages([1e6, 1e6 + 1, -1e6, -1e6 + 3], [0, 0, 1, 1])
    check(large.values, small.values.tolist())


def test_rloo_compares_with_the_mean_of_the_others():
    # Means of the others: 3, 2.5 and .5 for (0, 1, 5), 4 and 2 for (2, 4).
    check(of("rloo", REWARDS, GROUPS).values, [-3.0, -2.0, -1.5, 2.0, 4.5])


def test_reinforce_plus_plus_baseline_is_centered_and_divided_by_nothing():
    check(of("reinforce_plus_plus_baseline", REWARDS, GROUPS).values, CENTRED)


def test_remax_compares_with_the_greedy_completion():
    check(of("remax", [3.0, 1.0, 1.0], [0, 0, 1], greedy=[2.0, 2.0, -1.0]).values, [1.0, -1.0, 2.0])


def test_remax_without_a_greedy_reward_learns_nothing_from_the_row():
    result = of("remax", [3.0, 1.0], [0, 0], greedy=[NAN, 2.0])
    check(result.values, [0.0, -1.0])
    check(result.totals, [3.0, 1.0])


def test_opo_baseline_weighs_rewards_by_length():
    # (1 * 4 + 3 * 0) / 4 = 1; (2 * 1 + 2 * 2) / 4 = 1.5.
    result = of("opo", [4.0, 1.0, 0.0, 2.0], [0, 1, 0, 1], lengths=[1, 2, 3, 2])
    check(result.values, [3.0, -0.5, -1.0, 0.5])


def test_opo_baseline_leaves_out_the_length_of_a_row_without_a_reward():
    result = of("opo", [4.0, NAN, 0.0], [0, 0, 0], lengths=[1, 96, 3])
    check(result.values, [3.0, 0.0, -1.0])


def test_gpg_makes_up_for_the_rows_of_groups_that_are_all_equal():
    # 5 rows have a reward, 3 of them in a group that differs, though one of these is the mean: alpha = 5 / 3.
    result = of("gpg", [0.0, 1.0, 2.0, 7.0, 7.0, NAN], [0, 0, 0, 1, 1, 1], f_norm=0.5)
    check(result.values, [-10 / 3, 0.0, 10 / 3, 0.0, 0.0, 0.0])


def test_passk_rewards_only_the_best_and_only_by_what_it_adds():
    # Groups (0, 1, 5) and (2, 4): 5 - 1 and 4 - 2, n-1 variances 7 and 2.
    check(of("grpo_passk", REWARDS, GROUPS, scale_rewards="none").values, [0.0, 0.0, 0.0, 2.0, 4.0])
    scaled = of("grpo_passk", REWARDS, GROUPS, scale_rewards="group", advantage_epsilon=0.5).values
    check(scaled, [0.0, 0.0, 0.0, 2 / (math.sqrt(2) + 0.5), 4 / (math.sqrt(7) + 0.5)])
    over_batch = of("grpo_passk", REWARDS, GROUPS, scale_rewards="batch", advantage_epsilon=0.5).values
    check(over_batch, [0.0, 0.0, 0.0, 2 / (math.sqrt(4.3) + 0.5), 4 / (math.sqrt(4.3) + 0.5)])


def test_passk_gives_nothing_where_two_are_the_best():
    assert of("grpo_passk", [1.0, 3.0, 3.0], [0, 0, 0]).values.tolist() == [0.0] * 3


def test_passk_does_not_compare_with_a_row_without_a_reward():
    check(of("grpo_passk", [1.0, NAN, 4.0, NAN, 2.0], [0, 0, 0, 1, 1], scale_rewards="none").values,
          [0.0, 0.0, 3.0, 0.0, 0.0])  # fmt: skip


def test_maxrl_divides_by_the_mean():
    # One of four right: (1 - 1/4) / (1/4) = 3 and -1. Three of four: (1/4) / (3/4) and -1.
    result = of("maxrl", [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0] * 4 + [1] * 4)
    check(result.values, [3.0, -1.0, -1.0, -1.0, 1 / 3, 1 / 3, -1.0, 1 / 3])


def test_maxrl_learns_nothing_where_nothing_is_right():
    check(of("maxrl", [0.0, 0.0, NAN, 1.0, 0.0], [0, 0, 0, 1, 1]).values, [0.0, 0.0, 0.0, 1.0, -1.0])


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match=r"a total reward is -0\.5: all need to be >= 0"):
        of("maxrl", [1.0, -0.5, NAN], [0, 0, 0])


@each
def test_a_row_without_a_reward_gets_zero_and_moves_no_statistic_of_any_estimator(name):
    lengths = {"lengths": [3, 1, 2, 2, 1, 4]}
    full = of(name, [1.0, 3.0, 4.0, 8.0], [0, 0, 1, 1], lengths=[3, 2, 2, 4])
    holed = of(name, [1.0, NAN, 3.0, 4.0, NAN, 8.0], [0, 0, 0, 1, 1, 1], **lengths)
    kept = [0, 2, 3, 5]
    assert torch.equal(holed.values[kept], full.values)
    assert full.values.abs().max() > 0
    assert holed.values[[1, 4]].tolist() == [0.0, 0.0]
    assert holed.totals[[1, 4]].isnan().all()


@each
def test_equal_rewards_and_rows_alone_give_exactly_zero_with_any_estimator(name):
    rewards, groups = [0.1] * 7 + [0.3, 2.0, 1.0], [0] * 7 + [1, 2, 2]
    result = of(name, rewards, groups, lengths=[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], greedy=[0.1] * 7 + [0.3, 0.0, 0.0])
    assert result.values[:8].tolist() == [0.0] * 8
    assert result.values[8] > 0


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_have_the_dtype_of_the_rewards(name, dtype):
    result = of(name, [1 / 3, 2 / 3, 1.0], [0, 0, 0], dtype=dtype)
    assert {result.values.dtype, result.totals.dtype} == {dtype}
    if dtype == torch.float64:
        assert result.values.float().double().sub(result.values).abs().max() > 0


def test_row_totals_are_weighted_sums_of_the_rewards_that_have_a_value():
    totals = row_totals(torch.tensor([[1.0, 2.0], [NAN, 3.0], [NAN, NAN]]), torch.tensor([2.0, 10.0]))
    torch.testing.assert_close(totals, torch.tensor([22.0, 30.0, NAN], dtype=torch.float64), equal_nan=True)


def test_normalized_rows_have_mean_0_and_deviation_1_over_those_with_a_reward():
    # Advantages over the greedy reward 1, (0, 2, 4): mean 2, n-1 std 2.
    result = normalize_rows(of("remax", [1.0, NAN, 3.0, 5.0], [0, 0, 1, 1], greedy=[1.0] * 4), advantage_epsilon=2.0)
    check(result.values, [-0.5, 0.0, 0.0, 0.5])
    check(result.totals, [1.0, NAN, 3.0, 5.0])


def test_advantages_are_clipped_to_the_range():
    values = torch.tensor([-7.0, -0.5, 0.0, 3.0])
    assert clip_advantages(values, low=-5.0, high=2.0).tolist() == [-5.0, -0.5, 0.0, 2.0]
    assert clip_advantages(values, low=0.0, high=2.0).tolist() == [0.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (-2.0, -1.0), (0.0, 0.0)])
def test_a_clip_range_without_zero_or_without_width_is_refused(low, high):
    with pytest.raises(ValueError, match="needs low <= 0 <= high and low < high"):
        clip_advantages(torch.zeros(1), low=low, high=high)


def test_the_table_says_what_each_estimator_needs():
    rows = {name: row for name, row in ADVANTAGES.items() if row.level == "row"}
    assert rows.keys() == ESTIMATORS.keys()
    own = {name: {*row.params.names()} - {"clip_range"} for name, row in rows.items()}
    assert own == {name: values.keys() for name, values in ESTIMATORS.items()}
    assert {name for name, row in rows.items() if row.needs} == {"remax"}
    assert {name for name, row in rows.items() if row.whitened} == {"reinforce_plus_plus_baseline"}
    with pytest.raises(ValueError, match="remax needs the rewards of greedy completions"):
        ADVANTAGES["remax"].function(scored([1.0], [0]), AdvantageParams())


@pytest.mark.parametrize("f_norm", [0.0, -1.0])
def test_gpg_refuses_a_divisor_that_is_not_positive(f_norm):
    with pytest.raises(ValueError, match="f_norm="):
        of("gpg", [1.0], [0], f_norm=f_norm)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": [1.0, math.inf], "groups": [0, 0]}, "infinite"),
        (
            {"rewards": [1.0, 2.0], "groups": [0]},
            r"rewards \(2, 1\), weights \(1,\), groups \(1,\), lengths \(1,\): need to be \[B, K\], \[K\] and \[B\]",
        ),
        ({"rewards": [1.0, 2.0], "groups": [0, 0], "weights": (1.0, 2.0)}, r"weights \(2,\)"),
        ({"rewards": [1.0, 2.0], "groups": [0, 0], "lengths": [1]}, r"lengths \(1,\)"),
        ({"rewards": [1.0, 2.0], "groups": [0, 0], "greedy": [1.0]}, r"greedy \(1,\)"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        scored(**arguments)


def test_a_scale_without_effect_is_refused():
    message = "scale_rewards='none' has no effect with multi_objective_aggregation='normalize_then_sum', which norm"
    with pytest.raises(ValueError, match=message):
        advantages([1.0, 2.0], [0, 0], scale="none", aggregation=NORMALIZE)


VALUES, MASK = torch.tensor([1.0, 99.0, 3.0, 8.0]), torch.tensor([True, False, True, True])


def white(values, mask, total, *, shift_mean=True, advantage_epsilon=1.0):
    return whitened(
        values,
        mask,
        mean=total.mean,
        std=total.std,
        shift_mean=shift_mean,
        advantage_epsilon=advantage_epsilon,
    )


def test_moments_are_of_the_chosen_values():
    # Mean 4; squares 9 + 1 + 16 = 26, / 2 = 13.
    total = moments(VALUES, MASK)
    assert total == Moments(12.0, 74.0, 3.0)
    assert total.mean == 4.0
    assert total.std == pytest.approx(math.sqrt(13), rel=1e-15)


def test_moments_of_parts_add_up_to_those_of_the_whole():
    parts = moments(VALUES[:3], MASK[:3]) + moments(VALUES[3:], MASK[3:])
    assert parts == moments(VALUES, MASK)


def test_whitened_by_hand():
    scale = math.sqrt(13) + 0.5
    result = white(VALUES, MASK, moments(VALUES, MASK), advantage_epsilon=0.5)
    torch.testing.assert_close(result, torch.tensor([-3 / scale, 0.0, -1 / scale, 4 / scale]))


def test_the_mean_stays_where_it_is_not_shifted():
    scale = math.sqrt(13) + 0.5
    result = white(VALUES, MASK, moments(VALUES, MASK), shift_mean=False, advantage_epsilon=0.5)
    torch.testing.assert_close(result, torch.tensor([4 - 3 / scale, 0.0, 4 - 1 / scale, 4 + 4 / scale]))


def test_ranks_whiten_by_the_statistics_of_all():
    values = torch.tensor([0.0, 2.0, 10.0, 20.0], dtype=torch.float64)
    mask = torch.ones(4, dtype=torch.bool)
    total = moments(values[:2], mask[:2]) + moments(values[2:], mask[2:])
    parts = [white(values[half], mask[half], total, advantage_epsilon=1e-12) for half in (slice(0, 2), slice(2, 4))]
    together = torch.cat(parts)
    torch.testing.assert_close(together, (values - 8) / values.std())
    assert together.dtype == torch.float64


@pytest.mark.parametrize(("shift_mean", "expected"), [(True, 0.0), (False, 5.0)])
def test_one_value_is_its_own_mean(shift_mean, expected):
    value, mask = torch.tensor([5.0]), torch.tensor([True])
    total = moments(value, mask)
    assert total.std == 0.0
    assert white(value, mask, total, shift_mean=shift_mean).tolist() == [expected]


def test_no_value_has_no_statistics_and_no_advantage():
    total = moments(VALUES, torch.zeros_like(MASK))
    assert total == Moments(0.0, 0.0, 0.0)
    assert (total.mean, total.std) == (0.0, 0.0)
    assert white(VALUES, torch.zeros_like(MASK), total).tolist() == [0.0] * 4


def test_equal_values_become_zero_though_their_squares_round():
    values = torch.full((1000,), 0.1)
    mask = torch.ones(1000, dtype=torch.bool)
    total = moments(values, mask)
    assert total.std < 1e-8
    assert white(values, mask, total, advantage_epsilon=1e-4).abs().max() < 1e-4


@pytest.mark.parametrize(("value", "count"), [(0.1, 3), (0.7, 7), (1.1, 11)])
def test_a_variance_that_rounding_puts_below_zero_is_zero(value, count):
    total = moments(torch.full((count,), value, dtype=torch.float64), torch.ones(count, dtype=torch.bool))
    assert total.square_total < total.total * total.mean
    assert total.std == 0.0


def test_moments_of_many_float32_values_do_not_lose_the_spread():
    values = 1000.0 + torch.arange(100_000).remainder(2).float()
    assert moments(values, torch.ones(100_000, dtype=torch.bool)).std == pytest.approx(0.5, rel=1e-4)


def test_values_outside_the_mask_may_be_nan():
    values = torch.tensor([1.0, math.nan, 3.0])
    mask = torch.tensor([True, False, True])
    assert white(values, mask, moments(values, mask)).isfinite().all()


def test_epsilon_needs_to_be_positive():
    with pytest.raises(ValueError, match=r"advantage_epsilon=0\.0"):
        white(VALUES, MASK, moments(VALUES, MASK), advantage_epsilon=0.0)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="shapes differ"):
        moments(VALUES, MASK[:2])
    with pytest.raises(ValueError, match="shapes differ"):
        white(VALUES, MASK[:2], Moments(0.0, 0.0, 0.0))
