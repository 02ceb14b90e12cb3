"""Rows of a step are the same however they are cut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefrl.data.samplers import EpochDataLoader, GenerationBatchSampler, StepBatchSampler, positions_of_rank


def joined(parts: Iterable[list[int]]) -> list[int]:
    return [row for part in parts for row in part]


sizes = st.integers(1, 5)


@given(num_rows=st.integers(1, 60), micro=sizes, accumulation=sizes, world=st.integers(1, 4), epoch=st.integers(0, 3))
def test_steps_hold_the_same_rows_for_any_world_size(
    num_rows: int, micro: int, accumulation: int, world: int, epoch: int
) -> None:
    def steps(micro: int, accumulation: int, world: int) -> list[list[int]]:
        ranks = []
        for rank in range(world):
            sampler = StepBatchSampler(
                num_rows,
                micro_batch_size=micro,
                micro_batches_per_step=accumulation,
                rank=rank,
                world_size=world,
                shuffle=True,
                seed=7,
            )
            sampler.set_epoch(epoch)
            items = list(sampler)
            assert len(items) == len(sampler)
            assert len(items) % accumulation == 0
            assert all(len(item) <= micro for item in items)
            ranks.append([joined(items[i : i + accumulation]) for i in range(0, len(items), accumulation)])
        assert len({len(rank) for rank in ranks}) == 1
        return [joined(rank[i] for rank in ranks) for i in range(len(ranks[0]))]

    cut = steps(micro, accumulation, world)
    assert cut == steps(micro * accumulation * world, 1, 1)
    assert sorted(joined(cut)) == list(range(num_rows))


def test_epochs_have_different_orders() -> None:
    sampler = StepBatchSampler(50, micro_batch_size=50, shuffle=True, seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_ranks_share_a_shorter_step_and_some_micro_batches_are_empty() -> None:
    def of_rank(rank: int) -> list[list[int]]:
        return list(StepBatchSampler(15, micro_batch_size=2, micro_batches_per_step=3, rank=rank, world_size=2))

    assert of_rank(0) == [[0, 1], [2, 3], [4, 5], [12], [], []]
    assert of_rank(1) == [[6, 7], [8, 9], [10, 11], [13, 14], [], []]


def test_drop_last_leaves_the_shorter_step_out() -> None:
    sampler = StepBatchSampler(11, micro_batch_size=2, micro_batches_per_step=2, drop_last=True)
    assert list(sampler) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(sampler) == 4


def test_prompts_are_read_by_the_number_of_their_generation_and_items_are_only_counted() -> None:
    sampler = GenerationBatchSampler(9, prompts_per_window=4, items_per_window=3, shuffle=False, seed=0)
    assert list(sampler) == [[]] * 6
    assert len(sampler) == 6
    assert [sampler.rows_of_generation(number) for number in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_each_epoch_of_prompts_has_an_order_of_its_own() -> None:
    sampler = GenerationBatchSampler(40, prompts_per_window=20, items_per_window=3, shuffle=True, seed=0)
    first, second = (joined(sampler.rows_of_generation(2 * epoch + i) for i in range(2)) for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second


@given(share=sizes, updates=sizes, world=st.integers(1, 4))
def test_updates_learn_from_the_same_prompts_for_any_world_size(share: int, updates: int, world: int) -> None:
    total = share * updates * world
    ranks = [positions_of_rank(total, num_updates=updates, rank=r, world_size=world) for r in range(world)]
    assert sorted(joined(ranks)) == list(range(total))
    for update in range(updates):
        learned = joined(rank[update * share : (update + 1) * share] for rank in ranks)
        assert sorted(learned) == list(range(update * share * world, (update + 1) * share * world))


def test_groups_larger_than_an_update_stay_whole() -> None:
    assert positions_of_rank(2, num_updates=4, rank=1, world_size=2) == [1]


@pytest.mark.parametrize(("num_prompts", "world_size"), [(1, 2), (3, 2), (4, 8), (7, 3)])
def test_prompts_are_dealt_whole_where_ranks_cannot_have_the_same_number(num_prompts: int, world_size: int) -> None:
    ranks = [positions_of_rank(num_prompts, num_updates=1, rank=r, world_size=world_size) for r in range(world_size)]
    assert joined(ranks) == list(range(num_prompts))
    assert max(map(len, ranks)) - min(map(len, ranks)) == 1


def test_loader_hands_the_epoch_on() -> None:
    sampler = StepBatchSampler(10, micro_batch_size=10, shuffle=True)
    loader = EpochDataLoader(list(range(10)), sampler, collate_fn=list)
    first = list(loader)
    loader.set_epoch(1)
    assert sampler.epoch == 1
    assert list(loader) != first
