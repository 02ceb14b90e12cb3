"""Every row goes to exactly one rank, costs are even, and nothing but costs decides."""

from __future__ import annotations

from itertools import chain, product
from math import fsum

import datasets
from hypothesis import given
from hypothesis import strategies as st

from prefrl.data.samplers import StepBatchSampler, deal, dealing_of, forward_cost

costs_of_rows = st.lists(st.integers(0, 9999), max_size=40)
worlds = st.integers(1, 6)


def costliest(parts, costs):
    return max(fsum(costs[item] for item in part) for part in parts)


@given(costs=costs_of_rows, num_parts=worlds, equal_counts=st.booleans())
def test_every_item_is_dealt_once_and_the_costliest_of_a_part_comes_first(costs, num_parts, equal_counts):
    parts = deal(costs, num_parts, equal_counts=equal_counts)
    assert len(parts) == num_parts
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    for part in parts:
        assert [costs[item] for item in part] == sorted((costs[item] for item in part), reverse=True)
    counts = [len(part) for part in parts]
    assert not equal_counts or max(counts) - min(counts) <= 1


@given(costs=costs_of_rows, num_parts=worlds, equal_counts=st.booleans())
def test_dealing_is_never_worse_than_consecutive_shares(costs, num_parts, equal_counts):
    count = len(costs)
    shares = [range(count * part // num_parts, count * (part + 1) // num_parts) for part in range(num_parts)]
    assert costliest(deal(costs, num_parts, equal_counts=equal_counts), costs) <= costliest(shares, costs)


@given(costs=st.lists(st.integers(0, 9999), min_size=1, max_size=7), num_parts=st.integers(1, 3))
def test_the_costliest_part_is_at_most_a_third_above_the_best(costs, num_parts):
    best = min(
        costliest([[item for item, part in enumerate(of) if part == number] for number in range(num_parts)], costs)
        for of in product(range(num_parts), repeat=len(costs))
    )
    assert costliest(deal(costs, num_parts, equal_counts=False), costs) <= 4 / 3 * best * (1 + 1e-9)


def test_equal_costs_stay_where_they_are():
    assert deal([5.0] * 6, 3, equal_counts=False) == [[0, 1], [2, 3], [4, 5]]


def test_one_long_row_is_alone_unless_counts_are_equal():
    costs = [1.0, 2.0, 9.0, 1.0, 3.0, 2.0]
    assert deal(costs, 2, equal_counts=False) == [[2], [4, 1, 5, 0, 3]]
    assert deal(costs, 2, equal_counts=True) == [[2, 0, 3], [4, 1, 5]]


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    world=st.integers(2, 4),
    equal_counts=st.booleans(),
)
def test_a_step_has_the_same_rows_however_they_are_dealt(lengths, micro, accumulation, world, equal_counts):
    dataset = datasets.Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    dealing = dealing_of(dataset, hidden_size=8, equal_counts=equal_counts)
    cut = {"micro_batch_size": micro, "micro_batches_per_step": accumulation}

    def steps(dealing):
        ranks = [
            list(StepBatchSampler(len(lengths), rank=rank, world_size=world, dealing=dealing, shuffle=True, **cut))
            for rank in range(world)
        ]
        for items in ranks:
            assert len(items) == len(ranks[0])
            assert not equal_counts or all(len(item) <= micro for item in items)
        return [
            [[row for item in items[start : start + accumulation] for row in item] for items in ranks]
            for start in range(0, len(ranks[0]), accumulation)
        ]

    for dealt, consecutive in zip(steps(dealing), steps(None), strict=True):
        assert sorted(chain(*dealt)) == sorted(chain(*consecutive))
        costs = {row: dealing.cost_of(row) for row in chain(*dealt)}
        assert costliest(dealt, costs) <= costliest(consecutive, costs)


def test_the_prompt_costs_once_and_attention_grows_with_the_square():
    # 10 + 4 + 6 tokens; 10^2 + (14^2 - 10^2) + (16^2 - 10^2) pairs.
    assert forward_cost(10.0, [4.0, 6.0], hidden_size=2) == 20 + 352 / 24


def test_a_row_costs_the_same_in_a_dataset_and_in_a_stream():
    dataset = datasets.Dataset.from_dict(
        {
            "prompt_ids": [[1, 2], [3, 4, 5]],
            "completion_ids": [[1] * 6, [1]],
            "KL_completion_ids": [[2] * 3, None],
            "ref_logprobs": [[0.0] * 6, [0.0]],
        }
    )
    known = dealing_of(dataset, hidden_size=4, equal_counts=False)
    streamed = dealing_of(dataset.to_iterable_dataset(), hidden_size=4, equal_counts=False)
    assert [known.cost_of(row) for row in (0, 1)] == [streamed.cost_of(row) for row in dataset]
    assert known.cost_of(1) == 4 + (9 + 7) / 48
