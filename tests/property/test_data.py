"""Packing, collation and the batch's own cutting lose no token and invent none."""

from __future__ import annotations

import datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from prefrl.data.collate import flat_batch, sft_batch
from prefrl.data.packing import pack_bfd, pack_prepared
from prefrl.types import TokenBatch

datasets.disable_progress_bars()

ids = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@st.composite
def batches(draw):
    """A batch and its rows: (group, prompt, response, flags)."""
    rows = draw(st.lists(st.tuples(st.integers(0, 2), ids, ids), min_size=1, max_size=8))
    rows = [(*row, draw(st.lists(st.booleans(), min_size=len(row[2]), max_size=len(row[2])))) for row in rows]
    groups, prompts, responses, flags = zip(*rows, strict=True)
    return flat_batch(prompts, responses, trainable=flags, groups=groups), rows


@st.composite
def sft_rows(draw):
    """Tokenized rows of distinct ids; the first flag is False and at least one is True."""
    lengths = draw(st.lists(st.integers(2, 9), min_size=1, max_size=12))
    rows, start = [], 0
    for length in lengths:
        flags = draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1).filter(any))
        rows.append({"input_ids": list(range(start, start + length)), "trainable": [False, *flags]})
        start += length
    return rows


def rows_of(batch: TokenBatch):
    prompts = [part.tolist() for part in batch.prompt_ids.split(list(batch.prompt_lengths))]
    responses = [part.tolist() for part in batch.response_ids.split(list(batch.response_lengths))]
    flags = [part.tolist() for part in batch.trainable.split(list(batch.response_lengths))]
    return [
        (group, prompts[index], response, row_flags)
        for group, index, response, row_flags in zip(
            batch.group_index, batch.prompt_index, responses, flags, strict=True
        )
    ]


@given(batches())
def test_collated_rows_read_back_as_given_with_each_prompt_once_per_group(case):
    batch, rows = case
    assert rows_of(batch) == rows
    assert batch.num_prompts == len({(group, tuple(prompt)) for group, prompt, _, _ in rows})


@given(batches(), st.data())
def test_selected_rows_are_the_rows_selected(case, data):
    batch, rows = case
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=10))
    part = batch.select(chosen)
    assert rows_of(part) == [rows[row] for row in chosen]
    assert set(part.prompt_index) == set(range(part.num_prompts))


@given(batches(), st.integers(1, 30))
def test_split_keeps_every_row_once_and_the_budget(case, budget):
    batch, rows = case
    parts = batch.split(budget)
    assert sorted(row for part in parts for row in rows_of(part)) == sorted(rows)
    assert all(part.num_forward_tokens <= budget or part.num_rows == 1 for part in parts)


@given(st.lists(batches(), min_size=1, max_size=3))
def test_concatenated_batches_keep_all_rows_in_order(cases):
    joined = TokenBatch.concat([batch for batch, _ in cases])
    assert rows_of(joined) == [row for _, rows in cases for row in rows]


@given(batches(), st.integers(1, 4))
def test_chunks_concatenate_to_the_batch(case, size):
    batch, rows = case
    assert rows_of(TokenBatch.concat(batch.chunks(size))) == rows


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_bfd_places_every_sequence_once_in_few_enough_bins(lengths, capacity):
    bins = pack_bfd(lengths, capacity)
    assert sorted(index for numbers in bins for index in numbers) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in numbers) for numbers in bins]
    assert all(0 < load <= capacity for load in loads)
    # Two bins that fit together would not both have been opened.
    assert all(a + b > capacity for i, a in enumerate(loads) for b in loads[:i])


@settings(max_examples=30, deadline=None)
@given(sft_rows(), st.integers(9, 20))
def test_bfd_packing_changes_no_row_of_the_batch(rows, max_length):
    packed = pack_prepared(datasets.Dataset.from_list(rows), max_length=max_length)
    assert all(len(row["input_ids"]) == sum(row["seq_lengths"]) <= max_length for row in packed)
    assert sorted(token for row in packed for token in row["input_ids"]) == list(range(sum(map(_length, rows))))
    assert sorted(row[1:] for row in rows_of(sft_batch(list(packed)))) == sorted(
        row[1:] for row in rows_of(sft_batch(rows))
    )


@settings(max_examples=30, deadline=None)
@given(sft_rows(), st.integers(4, 12))
def test_wrapped_packing_keeps_every_loss_that_has_a_token_before_it(rows, max_length):
    flags = [flag for row in rows for flag in row["trainable"]]
    expected = {token for token, flag in enumerate(flags) if flag and token % max_length}
    if not expected:
        return
    packed = pack_prepared(datasets.Dataset.from_list(rows), max_length=max_length, strategy="wrapped")
    trained = [token for row in packed for token, flag in zip(row["input_ids"], row["trainable"], strict=True) if flag]
    assert trained == sorted(expected)
    assert all(row["seq_lengths"] == [len(row["input_ids"])] for row in packed)
    assert all(row["input_ids"] == list(range(row["input_ids"][0], row["input_ids"][-1] + 1)) for row in packed)


def _length(row):
    return len(row["input_ids"])
