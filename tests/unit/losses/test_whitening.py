import math

import pytest
import torch

from prefrl.losses.advantage.scored import Moments, moments, whitened

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
