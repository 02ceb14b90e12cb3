"""Metrics merge like one big sample."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from prefrl.metrics import Difference, ExplainedVariance, Max, Mean, Metric, Min, Std, Sum, host, merge, token_mean


def test_mean_weighs_by_count_not_by_part() -> None:
    metrics: dict[str, Metric] = {"x": Mean(1.0, 1)}
    merge(metrics, {"x": Mean(torch.tensor(9.0), torch.tensor(3))})
    assert metrics["x"].value() == 2.5


def test_mean_of_nothing_is_nan() -> None:
    assert math.isnan(Mean(0.0, 0).value())


def test_extremes_and_sums() -> None:
    assert Max(1.0).merge(Max(torch.tensor(3.0))).value() == 3.0
    assert Min(1.0).merge(Min(torch.tensor(3.0))).value() == 1.0
    assert Sum(1.0).merge(Sum(2.5)).value() == 3.5


def test_std_over_parts_is_that_of_the_whole() -> None:
    assert Std.of([1.0, 4.0]).merge(Std.of([2.0, 9.0])).value() == pytest.approx(statistics.stdev([1, 4, 2, 9]))
    assert math.isnan(Std.of([1.0]).value())


def test_host_numbers_are_floats() -> None:
    sent = host(Mean(torch.tensor(3.0), torch.tensor(2)))
    assert sent == Mean(3.0, 2.0)


def test_kinds_do_not_mix() -> None:
    with pytest.raises(TypeError, match="'x' is a Mean in one place and a Sum in another"):
        merge({"x": Mean(1, 1)}, {"x": Sum(1)})


def test_a_difference_is_that_of_two_means_each_with_its_own_count():
    assert Difference(6.0, 2, 1.0, 4).value() == 3.0 - 0.25
    assert Difference(6.0, 2, 0.0, 0).merge(Difference(3.0, 1, 1.0, 4)).value() == 3.0 - 0.25
    assert math.isnan(Difference(6.0, 2, 0.0, 0).value())


ALL = torch.ones(4, dtype=torch.bool)
RETURNS = torch.tensor([1.0, 2.0, 3.0, 6.0])  # squares about the mean of 3: 4 + 1 + 0 + 9 = 14


def test_explained_variance_is_the_share_of_the_squares_about_the_mean_by_hand():
    def explained(values: list[float]) -> float:
        return ExplainedVariance.of(RETURNS, torch.tensor(values), ALL).value()

    assert explained([1.0, 2.0, 3.0, 6.0]) == 1.0
    assert explained([11.0, 12.0, 13.0, 16.0]) == pytest.approx(1.0)  # a constant error is not unexplained
    assert explained([5.0] * 4) == pytest.approx(0.0)
    assert explained([1.0, 2.0, 5.0, 6.0]) == pytest.approx(1 - 3 / 14)  # errors 0 0 -2 0: 4 * (1 - 1/4)
    assert explained([-1.0, -2.0, -3.0, -6.0]) == pytest.approx(1 - 4)


def test_explained_variance_over_parts_is_that_of_the_whole_and_reads_trainable_tokens_alone():
    generator = torch.Generator().manual_seed(0)
    returns, values = torch.randn(2, 20, generator=generator)
    values = values + returns + 7
    trainable = torch.rand(20, generator=generator) < 0.7
    kept = returns[trainable], (returns - values)[trainable]
    expected = 1 - kept[1].var().item() / kept[0].var().item()
    metrics: dict[str, Metric] = {}
    for part in (slice(0, 3), slice(3, 14), slice(14, 20)):
        merge(metrics, {"x": host(ExplainedVariance.of(returns[part], values[part], trainable[part]))})
    assert metrics["x"].value() == pytest.approx(expected, abs=1e-6)
    garbage = float("nan")
    whole = ExplainedVariance.of(returns.where(trainable, garbage), values.where(trainable, garbage), trainable)
    assert whole.value() == pytest.approx(expected, abs=1e-6)


def test_explained_variance_of_returns_that_do_not_vary_is_zero():
    rounded = torch.tensor([0.3, 0.1 + 0.2, 0.3, 0.3]).nextafter(torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert len(set(rounded.tolist())) == 2
    for returns in (torch.full((4,), 0.1), torch.zeros(4), torch.full((13,), 1.1), rounded):
        values = torch.arange(float(len(returns)))
        assert ExplainedVariance.of(returns, values, torch.ones_like(values).bool()).value() == 0.0
    nothing = ExplainedVariance.of(RETURNS, RETURNS, ~ALL)
    assert nothing.value() == 0.0
    assert ExplainedVariance.of(RETURNS, RETURNS, torch.tensor([True, False, False, False])).value() == 0.0
    assert math.isnan(ExplainedVariance.of(RETURNS * math.nan, RETURNS, ALL).value())  # a fault is not hidden
    assert nothing.merge(ExplainedVariance.of(RETURNS, RETURNS, ALL)).value() == 1.0


def test_explained_variance_survives_returns_that_are_large_beside_their_spread():
    # In float32 the squares would lose the spread altogether.
    large = RETURNS / 16 + 4096
    values = torch.tensor([1.0, 2.0, 5.0, 6.0]) / 16 + 4096
    assert ExplainedVariance.of(large, values, ALL).value() == pytest.approx(1 - 3 / 14, abs=1e-6)


def test_a_mean_over_tokens_leaves_out_those_that_are_not_trainable() -> None:
    mean = token_mean(torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True]))
    assert mean.value() == 2.0
