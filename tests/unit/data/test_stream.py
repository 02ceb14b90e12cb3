"""A stream is cut in the same way as a dataset with the same rows."""

from __future__ import annotations

from itertools import islice

import datasets
import pytest
import torch
from accelerate import skip_first_batches
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import has_length

from prefrl.data.samplers import StepBatchSampler, StreamLoader, StreamRows
from prefrl.errors import DataError


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
