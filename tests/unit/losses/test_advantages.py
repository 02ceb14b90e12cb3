import math

import pytest
import torch

from prefrl.losses.advantages import group_advantages

NAN = math.nan
SUM, NORMALIZE = "sum_then_normalize", "normalize_then_sum"


def advantages(rewards, groups, *, weights=(1.0,), scale="group", aggregation=SUM, epsilon=1e-4):
    rewards = torch.tensor(rewards)
    rewards = rewards[:, None] if rewards.dim() == 1 else rewards
    return group_advantages(
        rewards, torch.tensor(weights), torch.tensor(groups), scale=scale, aggregation=aggregation, epsilon=epsilon
    )


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
    check(result.group_std, GROUP_STD)
    check(result.totals, REWARDS)


def test_no_scale_by_hand():
    result = advantages(REWARDS, GROUPS, scale="none")
    check(result.values, CENTRED)
    check(result.group_std, GROUP_STD)


def test_batch_scale_divides_by_the_spread_of_all_totals():
    # Mean 2.4: squares 5.76 + .16 + 1.96 + 2.56 + 6.76 = 17.2; / 4 = 4.3.
    result = advantages(REWARDS, GROUPS, scale="batch", epsilon=0.5)
    check(result.values, [c / (math.sqrt(4.3) + 0.5) for c in CENTRED])
    check(result.group_std, GROUP_STD)


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
    assert torch.equal(holed.group_std[kept], full.group_std)
    assert holed.totals[[1, 4]].isnan().all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_row_alone_in_its_group_has_advantage_zero(scale):
    result = advantages([5.0, 1.0, 3.0, 9.0, NAN, NAN], [0, 1, 1, 2, 2, 3], scale=scale)
    assert result.values[[0, 3, 4, 5]].tolist() == [0.0] * 4
    assert result.group_std[[0, 3, 4, 5]].tolist() == [0.0] * 4
    assert result.values[1] < 0 < result.values[2]


@pytest.mark.parametrize("aggregation", [SUM, NORMALIZE])
def test_equal_rewards_give_exactly_zero(aggregation):
    result = advantages([[0.1, 0.7]] * 7 + [[0.0, 1.0], [1.0, 0.0]], [0] * 7 + [1] * 2, weights=(0.3, 0.9),
                        aggregation=aggregation)  # fmt: skip
    assert result.values[:7].tolist() == [0.0] * 7
    assert result.group_std[:7].tolist() == [0.0] * 7


def test_one_row_in_all_has_advantage_zero():
    for scale in ("group", "batch", "none"):
        assert advantages([3.0], [0], scale=scale).values.tolist() == [0.0]
    assert advantages([3.0], [0], aggregation=NORMALIZE).values.tolist() == [0.0]


def test_no_rows_have_no_advantages():
    result = group_advantages(
        torch.zeros(0, 2),
        torch.ones(2),
        torch.zeros(0, dtype=torch.long),
        scale="batch",
        aggregation=SUM,
        epsilon=1e-4,
    )
    assert result.values.shape == result.group_std.shape == result.totals.shape == (0,)


def test_normalize_then_sum_by_hand():
    # One group of (0, 0), (1, 10), (2, 20): each reward becomes (-1, 0, 1) whatever its size.
    # Weights 1 and 3: S = (-4, 0, 4), n-1 std 4, A = (-1, 0, 1).
    result = advantages(
        [[0.0, 0.0], [1.0, 10.0], [2.0, 20.0]], [0, 0, 0], weights=(1.0, 3.0), aggregation=NORMALIZE, epsilon=0.0
    )
    check(result.values, [-1.0, 0.0, 1.0])
    check(result.totals, [0.0, 31.0, 62.0])
    check(result.group_std, [31.0, 31.0, 31.0])


def test_normalize_then_sum_divides_by_the_spread_of_the_batch():
    # Groups (0, 2) and (5, 5): normalised (-1, 1) / sqrt(2) and (0, 0). n-1 std of those four: sqrt(1 / 3).
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
    # GDPO, fig. 2: totals (1, 1, 0, 2) cannot tell (1, 0) from (0, 1); normalised rewards of different spread can.
    rewards = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 2.0]]
    summed = advantages(rewards, [0] * 4, weights=(1.0, 1.0)).values
    normalised = advantages(rewards, [0] * 4, weights=(1.0, 1.0), aggregation=NORMALIZE).values
    assert summed[0] == summed[1]
    assert normalised[0] - normalised[1] > 0.1


def test_constant_offset_is_ignored_even_if_large():
    small = advantages([0.0, 1.0, 0.0, 3.0], [0, 0, 1, 1])
    large = advantages([1e6, 1e6 + 1, -1e6, -1e6 + 3], [0, 0, 1, 1])
    check(large.values, small.values.tolist())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": [1.0, math.inf], "groups": [0, 0]}, "infinite"),
        ({"rewards": [1.0, 2.0], "groups": [0]}, r"rewards \(2, 1\), weights \(1,\), group_index \(1,\)"),
        ({"rewards": [1.0, 2.0], "groups": [0, 0], "weights": (1.0, 2.0)}, r"weights \(2,\)"),
        (
            {"rewards": [1.0, 2.0], "groups": [0, 0], "scale": "none", "aggregation": NORMALIZE},
            "scale='none' has no effect with aggregation='normalize_then_sum': use scale='group'",
        ),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        advantages(**arguments)
