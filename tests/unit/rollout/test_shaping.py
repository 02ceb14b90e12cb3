"""Shaping of total rewards before advantages are computed."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
import torch

from prefrl.options.rollout import ShapingParams
from prefrl.rewards import get_soft_overlong_punishment
from prefrl.rollout.reward_shaping import RunningMoments, clipped, minus_missing_eos, shaped, stop_properly
from prefrl.types import FinishReason

NAN = math.nan
REASONS: list[FinishReason] = ["stop", "length", "abort", "length", "length"]
TOTALS = torch.tensor([2.0, 4.0, 6.0, -8.0, NAN], dtype=torch.float64)


def same(values: torch.Tensor, expected: list[float]) -> bool:
    return torch.equal(values.nan_to_num(nan=1e9), torch.tensor(expected, dtype=values.dtype).nan_to_num(nan=1e9))


def test_only_truncated_completions_are_scaled() -> None:
    assert same(stop_properly(TOTALS, REASONS, coefficient=0.25), [2.0, 1.0, 6.0, -2.0, NAN])
    assert same(stop_properly(TOTALS, REASONS, coefficient=0.0), [2.0, 0.0, 6.0, 0.0, NAN])


def test_a_negative_coefficient_is_the_reward_of_truncated_completions() -> None:
    assert same(stop_properly(TOTALS, REASONS, coefficient=-0.5), [2.0, -0.5, 6.0, -0.5, NAN])


def test_completions_that_did_not_end_pay() -> None:
    assert same(minus_missing_eos(TOTALS, REASONS, penalty=1.5), [2.0, 2.5, 4.5, -9.5, NAN])


def test_rewards_are_clipped_on_both_sides() -> None:
    assert same(clipped(TOTALS, low=-1.0, high=3.0), [2.0, 3.0, 3.0, -1.0, NAN])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_come_in_the_documented_order(dtype: torch.dtype) -> None:
    totals = torch.tensor([2.0, 4.0, 9.0, NAN], dtype=dtype)
    moments = RunningMoments()
    result = shaped(
        totals,
        ["stop", "length", "stop", "stop"],
        ShapingParams(stop_properly_penalty_coef=0.5, missing_eos_penalty=1.0, normalize=True, clip_range=[-0.5, 0.5]),
        moments=moments,
        subtract_mean=True,
    )
    # 2, 4 * 0.5 - 1 = 1, 9: mean 4, std sqrt(19); over it -0.459, -0.688, 1.147; then the bounds.
    assert (moments.count, moments.mean) == (3, 4.0)
    assert moments.std == pytest.approx(math.sqrt(19))
    assert result.dtype == dtype
    assert result[:3].tolist() == pytest.approx([-2 / math.sqrt(19), -0.5, 0.5])
    assert math.isnan(result[3])
    assert totals[:3].tolist() == [2.0, 4.0, 9.0]


def test_without_an_option_totals_stay_as_they_are() -> None:
    result = shaped(TOTALS, REASONS, ShapingParams(), moments=None, subtract_mean=False)
    assert same(result, TOTALS.tolist())


def test_the_mean_is_subtracted_on_request_alone() -> None:
    moments = RunningMoments.of([1.0, 3.0, 5.0])
    values = torch.tensor([1.0, 5.0], dtype=torch.float64)
    assert moments.normalized(values, subtract_mean=False).tolist() == [0.5, 2.5]
    assert moments.normalized(values, subtract_mean=True).tolist() == [-1.0, 1.0]


def test_moments_of_batches_are_those_of_all_values() -> None:
    generator = np.random.default_rng(0)
    batches = [(generator.normal(size=size) * 3 + 100 * i).tolist() for i, size in enumerate((1, 7, 4, 30))]
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.tensor([*batch, NAN], dtype=torch.float64))
    everything = [value for batch in batches for value in batch]
    assert moments.count == 42
    assert moments.mean == pytest.approx(statistics.mean(everything), rel=1e-14)
    assert moments.std == pytest.approx(statistics.stdev(everything), rel=1e-14)


def test_rows_in_another_order_give_the_same_bits() -> None:
    generator = np.random.default_rng(1)
    first, second = RunningMoments(), RunningMoments()
    for _ in range(5):
        values = generator.normal(size=33) * 10.0 ** generator.integers(-6, 6, size=33)
        first.update(torch.from_numpy(values))
        second.update(torch.from_numpy(generator.permutation(values)))
    assert first == second


def test_a_small_spread_on_a_large_reward_is_not_lost() -> None:
    moments = RunningMoments()
    for start in (0, 10):
        moments.update(torch.arange(start, start + 10, dtype=torch.float64) + 1e9)
    assert moments.std == pytest.approx(statistics.stdev(range(20)), rel=1e-12)


@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, -3.0])
def test_equal_rewards_are_divided_by_one(value: float) -> None:
    moments = RunningMoments()
    for size in (3, 7):
        moments.update(torch.full((size,), value, dtype=torch.float64))
    assert moments.std == 0.0
    values = torch.tensor([value], dtype=torch.float64)
    assert moments.normalized(values, subtract_mean=True).tolist() == [0.0]
    assert moments.normalized(values, subtract_mean=False).tolist() == [value]


def test_the_first_value_and_a_batch_without_rewards_are_no_trouble() -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([NAN]))
    assert moments == RunningMoments()
    moments.update(torch.tensor([5.0]))
    assert (moments.count, moments.mean, moments.std) == (1, 5.0, 0.0)


def test_moments_survive_json_bit_by_bit_and_go_on_as_before() -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([0.1, 1 / 3, 1e-30, 7e7], dtype=torch.float64))
    restored = RunningMoments()
    restored.load_state_dict(json.loads(json.dumps(moments.state_dict())))
    assert restored == moments
    for either in (moments, restored):
        either.update(torch.tensor([0.3, 0.7], dtype=torch.float64))
    assert restored == moments
    assert restored.count == 6


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_reward_function_for_overlong_completions_is_the_formula_of_cosmos(factor: float) -> None:
    longest, buffer = 20, 8
    penalties = get_soft_overlong_punishment(longest, buffer)([[0] * length for length in range(longest + 1)])
    for length, penalty in enumerate(penalties):
        assert factor * penalty == pytest.approx(min(-(length - (longest - buffer)) / buffer * factor, 0.0))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"coefficient=1\.5"):
        stop_properly(TOTALS, REASONS, coefficient=1.5)
    with pytest.raises(ValueError, match=r"penalty=0\.0: needs to be > 0"):
        minus_missing_eos(TOTALS, REASONS, penalty=0.0)
    with pytest.raises(ValueError, match=r"low=1\.0, high=1\.0"):
        clipped(TOTALS, low=1.0, high=1.0)
    with pytest.raises(ValueError, match=r"totals \(5,\), 1 finish reasons"):
        stop_properly(TOTALS, ["stop"], coefficient=0.5)
    with pytest.raises(ValueError, match="infinite"):
        RunningMoments().update(torch.tensor([1.0, math.inf]))
