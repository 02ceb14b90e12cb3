"""Rows of a step are the same however they are cut, also those of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import datasets
import pytest
import torch
from accelerate import skip_first_batches
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import has_length

from prefrl.data.samplers import (
    EpochDataLoader,
    GenerationBatchSampler,
    StepBatchSampler,
    StreamLoader,
    StreamRows,
    positions_of_rank,
)
from prefrl.errors import DataError


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


def stream_of(num_rows):
    return datasets.IterableDataset.from_generator(lambda: ({"row": row} for row in range(num_rows)))


def numbers(rows):
    return [row["row"] for row in rows]


def loader_of(stream, **options):
    defaults = {"micro_batch_size": 2, "micro_batches_per_step": 1, "rank": 0, "world_size": 1, "drop_last": False}
    return StreamLoader(stream, collate_fn=numbers, **defaults | options)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 12, 13, 17, 24, 31])
@pytest.mark.parametrize("micro_batches_per_step", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_is_cut_like_a_dataset(num_rows, micro_batches_per_step, world_size, drop_last):
    cut = {"micro_batches_per_step": micro_batches_per_step, "world_size": world_size, "drop_last": drop_last}
    for rank in range(world_size):
        expected = list(StepBatchSampler(num_rows, micro_batch_size=2, rank=rank, **cut))
        loader = loader_of(stream_of(num_rows), rank=rank, **cut)
        if expected:
            assert list(loader) == expected
        else:
            with pytest.raises(DataError, match="no full step"):
                list(loader)


def test_the_shorter_last_step_is_shared_by_the_ranks_and_filled_up_with_empty_micro_batches():
    cut = {"micro_batches_per_step": 3, "world_size": 2}
    assert list(loader_of(stream_of(15), rank=0, **cut))[3:] == [[12], [], []]
    assert list(loader_of(stream_of(15), rank=1, **cut))[3:] == [[13, 14], [], []]


def test_rows_of_other_ranks_are_not_collated():
    seen = []
    loader = loader_of(stream_of(9), rank=1, world_size=2, drop_last=True)
    loader.collate_fn = seen.extend
    list(loader)
    assert numbers(seen) == [2, 3, 6, 7]


def test_no_row_beyond_the_step_is_read():
    read = []

    def generate():
        for row in range(100):
            read.append(row)
            yield {"row": row}

    loader = loader_of(datasets.IterableDataset.from_generator(generate), micro_batches_per_step=3)
    list(islice(loader, 3))
    assert len(read) <= 7


def test_a_stream_has_no_length_and_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    loader = loader_of(stream_of(5))
    list(loader)
    assert not has_length(loader)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("skipped", [0, 3, 6, 9])
def test_a_resumed_run_goes_on_where_the_items_of_its_steps_end(skipped):
    options = {"micro_batches_per_step": 3, "rank": 1, "world_size": 2}
    whole = list(loader_of(stream_of(25), **options))
    assert len(whole) == 9
    assert list(skip_first_batches(loader_of(stream_of(25), **options), skipped)) == whole[skipped:]


def test_each_epoch_of_a_shuffled_stream_has_its_own_order():
    loader = loader_of(stream_of(20).shuffle(seed=1, buffer_size=20), micro_batch_size=20)
    first = list(loader)
    assert list(loader) == first
    loader.set_epoch(1)
    second = list(loader)
    assert second != first
    assert sorted(second[0]) == list(range(20))
    loader.set_epoch(0)
    assert list(loader) == first


def test_a_repeated_stream_goes_on_with_its_next_epoch_after_the_shorter_step():
    def loader(**options):
        stream = stream_of(7).shuffle(seed=1, buffer_size=7)
        return loader_of(stream, micro_batches_per_step=2, **options)

    epochs = loader()
    passes = []
    for epoch in range(3):
        epochs.set_epoch(epoch)
        passes.append(list(epochs))
    assert [len(items) for items in passes] == [4, 4, 4]
    assert passes[0] != passes[1]
    endless = loader(repeat=True)
    assert list(islice(endless, 12)) == [*passes[0], *passes[1], *passes[2]]
    assert list(islice(endless, 4)) == passes[0]
    endless.set_epoch(1)
    assert list(islice(endless, 4)) == passes[1]


def test_a_repeated_stream_is_resumed_in_its_second_pass():
    whole = list(islice(loader_of(stream_of(7), repeat=True), 12))
    resumed = skip_first_batches(loader_of(stream_of(7), repeat=True), 6)
    assert list(islice(resumed, 6)) == whole[6:]


@pytest.mark.parametrize("repeat", [False, True])
def test_a_stream_without_rows_is_refused(repeat):
    with pytest.raises(DataError, match="the stream has no rows"):
        next(iter(loader_of(stream_of(0), repeat=repeat)))


class StreamTrainer(Trainer):
    """HuggingFace's own loop over a shuffled stream of 7 rows; notes the rows of each optimizer step."""

    def __init__(self, folder):
        args = TrainingArguments(
            str(folder),
            max_steps=5,
            gradient_accumulation_steps=3,
            save_steps=1,
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        super().__init__(nn.Linear(1, 1), args, train_dataset=stream_of(7).shuffle(seed=3, buffer_size=7))
        self.rows = []
        self.steps = []
        self.add_callback(EndOfStep(self))

    def get_train_dataloader(self):
        cut = {"micro_batch_size": 2, "micro_batches_per_step": 3, "rank": 0, "world_size": 1, "drop_last": False}
        return StreamLoader(self.train_dataset, collate_fn=column, repeat=True, **cut)

    def compute_loss(self, model, inputs, **_):
        self.rows += inputs["rows"].flatten().tolist()
        return model(inputs["rows"]).sum()


class EndOfStep(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, *_, **__):
        self.trainer.steps.append(self.trainer.rows)
        self.trainer.rows = []


def column(rows):
    return {"rows": torch.tensor(numbers(rows), dtype=torch.float).reshape(-1, 1)}


def test_huggingface_updates_once_for_each_step_and_resumes_in_the_second_pass(tmp_path):
    whole = StreamTrainer(tmp_path)
    whole.train()
    assert [len(rows) for rows in whole.steps] == [6, 1, 6, 1, 6]
    resumed = StreamTrainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.steps == whole.steps[3:]


def test_rows_by_position_go_on_with_the_next_epoch_and_can_be_read_again():
    stream = stream_of(5).shuffle(seed=1, buffer_size=5)
    epochs = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        epochs += [row["row"] for row in stream]
    assert epochs[:5] != epochs[5:10]
    rows = StreamRows(stream)
    for position in (0, 1, 4, 7, 12, 3, 3, 14):
        assert rows[position]["row"] == epochs[position]


def test_rows_before_a_position_are_read_once():
    read = []

    def generate():
        for row in range(100):
            read.append(row)
            yield {"row": row}

    rows = StreamRows(datasets.IterableDataset.from_generator(generate))
    assert [rows[position]["row"] for position in (3, 4, 9)] == [3, 4, 9]
    assert len(read) <= 11


def test_rows_of_a_stream_without_rows_are_refused():
    with pytest.raises(DataError, match="the stream has no rows"):
        StreamRows(stream_of(0))[0]
