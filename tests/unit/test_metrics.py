"""Metrics merge like one big sample."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from prefrl.metrics import Difference, Max, Mean, Metric, Min, Std, Sum, host, merge


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
    with pytest.raises(TypeError, match="'x' is Mean and Sum"):
        merge({"x": Mean(1, 1)}, {"x": Sum(1)})


def test_a_difference_is_that_of_two_means_each_with_its_own_count():
    assert Difference(6.0, 2, 1.0, 4).value() == 3.0 - 0.25
    assert Difference(6.0, 2, 0.0, 0).merge(Difference(3.0, 1, 1.0, 4)).value() == 3.0 - 0.25
    assert math.isnan(Difference(6.0, 2, 0.0, 0).value())
