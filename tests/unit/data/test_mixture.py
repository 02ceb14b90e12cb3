from __future__ import annotations

import datasets
import pytest

from prefrl.data.sources import mix_datasets
from prefrl.errors import ConfigError, DataError

OPTIONS = {"weights": None, "seed": 0, "stopping": "first_exhausted"}


def numbers(*values):
    return datasets.Dataset.from_dict({"x": list(values)})


def as_map(dataset):
    return dataset


def as_stream(dataset):
    return dataset.to_iterable_dataset()


BOTH = pytest.mark.parametrize("kind", [as_map, as_stream])


def values(dataset):
    return [row["x"] for row in dataset]


@BOTH
def test_without_weights_the_datasets_follow_one_another(kind):
    assert values(mix_datasets({"a": kind(numbers(1, 2)), "b": kind(numbers(3))}, **OPTIONS)) == [1, 2, 3]


@BOTH
def test_rows_are_drawn_in_proportion_to_weights_of_any_sum(kind):
    parts = {"a": kind(numbers(*range(4000))), "b": kind(numbers(*range(10_000, 14_000)))}
    mixed = values(mix_datasets(parts, **OPTIONS | {"weights": {"b": 1, "a": 3}}))
    from_a = [value for value in mixed if value < 10_000]
    assert from_a == list(range(4000))
    # 4000 of a are drawn with probability 3/4: of b come 4000/3 with a deviation of 42.
    assert len(mixed) - len(from_a) == pytest.approx(4000 / 3, abs=3 * 42)


@BOTH
def test_the_seed_decides_the_order(kind):
    parts = {"a": kind(numbers(*range(20))), "b": kind(numbers(*range(100, 120)))}

    def mixed(seed):
        return values(mix_datasets(parts, **OPTIONS | {"weights": {"a": 1, "b": 1}, "seed": seed}))

    assert mixed(0) == mixed(0) != mixed(1)


@BOTH
def test_stopping_at_the_first_end_repeats_nothing_and_at_the_last_leaves_nothing_out(kind):
    parts = {"a": kind(numbers(0, 1)), "b": kind(numbers(*range(10, 20)))}
    first = values(mix_datasets(parts, **OPTIONS | {"weights": {"a": 1, "b": 1}}))
    assert len(first) == len(set(first)) < 12
    last = values(mix_datasets(parts, **OPTIONS | {"weights": {"a": 1, "b": 1}, "stopping": "all_exhausted"}))
    assert set(last) == {0, 1, *range(10, 20)}
    assert len(last) > 12


@BOTH
def test_columns_may_stand_in_another_order(kind):
    parts = {
        "a": kind(datasets.Dataset.from_dict({"x": [1], "y": ["a"]})),
        "b": kind(datasets.Dataset.from_dict({"y": ["b"], "x": [2]})),
    }
    assert [(row["x"], row["y"]) for row in mix_datasets(parts, **OPTIONS)] == [(1, "a"), (2, "b")]


def no_rows():
    yield from ()


@pytest.mark.parametrize(
    ("parts", "options", "error", "part"),
    [
        ({}, {}, ConfigError, "0 datasets"),
        ({"a": numbers(1)}, {"weights": {"b": 1.0}}, ConfigError, "weights for ['b'], but the datasets are ['a']"),
        ({"a": numbers(1)}, {"weights": {"a": 1.0, "b": 1.0}}, ConfigError, "weights for ['a', 'b']"),
        ({"a": numbers(1)}, {"weights": {"a": 0.0}}, ConfigError, "dataset 'a' is 0.0"),
        ({"a": numbers(1)}, {"weights": {"a": float("nan")}}, ConfigError, "dataset 'a' is nan"),
        ({"a": numbers(1)}, {"weights": {"a": float("inf")}}, ConfigError, "dataset 'a' is inf"),
        ({"a": numbers(1), "b": numbers()}, {}, DataError, "dataset 'b' has 0 rows"),
        ({"b": datasets.IterableDataset.from_generator(no_rows)}, {}, DataError, "dataset 'b' has 0 rows"),
        ({"a": numbers(1), "b": [1]}, {}, DataError, "dataset 'b' is a list"),
        (
            {"a": numbers(1), "b": as_stream(numbers(2))},
            {},
            DataError,
            "'a' is a Dataset, but 'b' is a IterableDataset",
        ),
        (
            {"a": numbers(1), "b": datasets.Dataset.from_dict({"y": [1]})},
            {},
            DataError,
            "dataset 'b' does not have the columns of 'a': ['x'] missing, ['y'] extra",
        ),
        (
            {"a": numbers(1), "b": datasets.Dataset.from_dict({"x": [1], "y": [1]})},
            {},
            DataError,
            "[] missing, ['y'] extra",
        ),
        (
            {"a": numbers(1), "b": numbers("1")},
            {},
            DataError,
            "column 'x' of dataset 'b' has type Value('string'), but in 'a' it has type Value('int64')",
        ),
    ],
)
def test_datasets_that_cannot_be_mixed_are_refused_and_named(parts, options, error, part):
    with pytest.raises(error) as raised:
        mix_datasets(parts, **OPTIONS | options)
    assert part in str(raised.value)
