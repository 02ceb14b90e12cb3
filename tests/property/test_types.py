"""Whatever operation is applied to a TokenBatch, each row keeps its tokens and everything that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefrl.data.collate import flat_batch
from prefrl.forest import Forest
from prefrl.types import MarginBatch, TokenBatch

ids = st.lists(st.integers(0, 5), min_size=1, max_size=4)
budgets = st.integers(1, 30)
# The fields of a `FullBatch` that have an entry for each row.
PER_ROW = {"group_index", "is_preferred", "margins", "weights", "trainable_counts"}


@dataclass(frozen=True, eq=False, kw_only=True)
class FullBatch(MarginBatch):
    """A stage with values of rows, of tokens, and values that a batch may lack."""

    token_values: Tensor  # [N]
    vectors: Tensor | None = None  # [N, 2]


def with_row_values(batch, sides):
    """The batch in a stage with values that tell row from row and token from token."""
    rows = range(batch.num_rows)
    return FullBatch.of(
        batch,
        is_preferred=tuple(sides),
        margins=tuple(float(row) for row in rows),
        weights=tuple(row + 0.5 for row in rows),
        token_values=-torch.arange(batch.num_tokens, dtype=torch.float32),
        vectors=torch.arange(2 * batch.num_tokens).view(-1, 2),
    )


@st.composite
def episodes(draw):
    """Prompts, responses and rows. A context continues one of its row, with or without a response, or begins anew."""
    prompts, responses, rows = [], [], []
    for row in range(draw(st.integers(1, 4))):
        known = [draw(st.sampled_from([[1], [1, 2, 3], [4]]))]
        for _ in range(draw(st.integers(1, 4))):
            prompts.append(draw(st.sampled_from(known)))
            responses.append(draw(ids))
            rows.append(row)
            known += [prompts[-1] + draw(ids), prompts[-1] + responses[-1] + draw(ids), draw(ids)]
    return prompts, responses, rows


@st.composite
def batches_of_episodes(draw):
    prompts, responses, rows = draw(episodes())
    groups = [draw(st.integers(0, 1)) for _ in range(rows[-1] + 1)]
    flags = [draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))) for row in responses]
    batch = flat_batch(prompts, responses, trainable=flags, groups=groups, rows=rows)
    return with_row_values(batch, [True] * len(groups))


@st.composite
def batches_of_completions(draw):
    rows = draw(st.lists(st.tuples(st.integers(0, 3), ids, ids), min_size=1, max_size=8))
    groups, prompts, responses = zip(*rows, strict=True)
    sides = draw(st.lists(st.sampled_from([True, False, None]), min_size=len(rows), max_size=len(rows)))
    flags = [draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))) for row in responses]
    return with_row_values(flat_batch(prompts, responses, trainable=flags, groups=groups), sides)


batches = st.one_of(batches_of_completions(), batches_of_episodes())


@st.composite
def batches_of_pairs(draw):
    """Pairs of rows that share a prompt or do not, in any order."""
    groups = draw(st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True))
    order = draw(st.permutations([(group, side) for group in groups for side in (True, False)]))
    common = {group: draw(ids) for group in groups}
    prompts = [draw(st.sampled_from([common[group], [group]])) for group, _ in order]
    batch = flat_batch(prompts, [draw(ids) for _ in order], groups=[group for group, _ in order])
    return with_row_values(batch, [side for _, side in order])


def rows_of(batch):
    """All that each row has."""
    prompts = []
    for parent, own in zip(batch.prompt_parent, batch.prompt_ids.split(list(batch.prompt_lengths)), strict=True):
        prompts.append((prompts[parent] if parent >= 0 else []) + own.tolist())
    per_token = [
        tensor.split(list(batch.response_lengths)) for name, tensor in batch.tensors().items() if name != "prompt_ids"
    ]
    found = []
    for row in range(batch.num_rows):
        responses = [i for i, number in enumerate(batch.response_row) if number == row]
        found.append(
            {
                "prompts": [prompts[batch.prompt_index[i]] for i in responses],
                "tokens": [[parts[i].tolist() for i in responses] for parts in per_token],
                **{name: values[row] for name, values in batch.given().items() if name in PER_ROW},
            }
        )
    return found


def by_number(rows):
    return sorted(rows, key=lambda row: row["margins"])


@given(batches)
def test_every_field_of_a_row_is_a_row_or_a_token_value(batch):
    (first, *_) = rows_of(batch)
    layout = {f.name for f in fields(Forest)} - {"group_index"}
    tuples = {name for name, value in batch.given().items() if isinstance(value, tuple)}
    assert first.keys() - {"prompts", "tokens"} == tuples - layout - {"images"} == PER_ROW
    assert len(first["tokens"]) == 4  # ids, flags, values, vectors


@given(batches)
def test_trainable_tokens_are_counted_and_found(batch):
    flags = [row.tolist() for row in batch.trainable.split(list(batch.row_lengths))]
    assert batch.trainable_counts == tuple(map(sum, flags))
    assert batch.trainable_positions.tolist() == [i for i, flag in enumerate(batch.trainable.tolist()) if flag]
    turned = batch.replace(trainable=~batch.trainable)
    assert turned.num_trainable == batch.num_tokens - batch.num_trainable
    assert batch.to("cpu").replace(vectors=None).trainable_counts == batch.trainable_counts


@given(episodes(), st.data())
def test_every_response_follows_the_context_that_was_given(given, data):
    prompts, responses, rows = given
    groups = data.draw(st.lists(st.integers(0, 1), min_size=rows[-1] + 1, max_size=rows[-1] + 1))
    batch = flat_batch(prompts, responses, groups=groups, rows=rows)
    found = rows_of(batch)
    assert [prompt for row in found for prompt in row["prompts"]] == prompts
    assert [row["group_index"] for row in found] == groups
    assert batch.row_lengths == tuple(sum(map(len, row["tokens"][0])) for row in found)
    assert batch.row_index.tolist() == [row for row, ids in zip(rows, responses, strict=True) for _ in ids]
    assert batch.context_lengths == list(map(len, prompts))
    assert batch.shares_prompts == (sum(map(len, prompts)) > sum(batch.prompt_lengths))
    # A context that begins with another one of its group continues it.
    for i, j in product(range(len(rows)), repeat=2):
        if groups[rows[i]] == groups[rows[j]] and prompts[j][: len(prompts[i])] == prompts[i]:
            assert batch.prompt_index[i] in batch.contexts[j]


@given(batches, st.data())
def test_selected_rows_keep_all_their_values(batch, data):
    chosen = data.draw(st.lists(st.integers(0, batch.num_rows - 1), min_size=1, max_size=10))
    rows = rows_of(batch)
    part = batch.select(chosen)
    assert rows_of(part) == [rows[row] for row in chosen]
    assert part.num_rows == len(chosen)
    assert part.num_forward_tokens == batch.forward_tokens(chosen)
    assert all(parent < number for number, parent in enumerate(part.prompt_parent))
    used = {prompt for i in range(part.num_responses) for prompt in part.contexts[i]}
    assert used == set(range(part.num_prompts))


@given(batches)
def test_all_rows_in_order_are_the_batch_itself(batch):
    same = batch.select(range(batch.num_rows))
    for field in fields(batch):
        before, after = getattr(batch, field.name), getattr(same, field.name)
        assert torch.equal(before, after) if isinstance(before, Tensor) else before == after


@given(batches, budgets, st.booleans())
def test_split_keeps_every_row_once_with_all_its_values(batch, budget, whole_groups):
    parts = batch.split(budget, whole_groups=whole_groups)
    assert by_number(row for part in parts for row in rows_of(part)) == rows_of(batch)
    assert all(part.num_rows > 0 for part in parts)


@given(batches, budgets)
def test_whole_groups_are_never_parted_and_exceed_the_budget_only_alone(batch, budget):
    parts = batch.split(budget, whole_groups=True)
    groups = [group for part in parts for group in set(part.group_index)]
    assert len(groups) == len(set(groups))
    assert all(part.num_forward_tokens <= budget or len(set(part.group_index)) == 1 for part in parts)


@given(batches, st.booleans())
def test_a_budget_for_all_tokens_gives_the_batch_itself(batch, whole_groups):
    (part,) = batch.split(batch.num_forward_tokens, whole_groups=whole_groups)
    assert rows_of(part) == rows_of(batch)
    assert part.num_prompts == batch.num_prompts


@given(batches, st.integers(1, 4))
def test_chunks_concatenate_to_the_batch_with_all_values(batch, size):
    joined = FullBatch.concat(batch.chunks(size))
    assert type(joined) is FullBatch
    assert rows_of(joined) == rows_of(batch)


@given(batches, st.integers(1, 4))
def test_the_largest_chunk_is_known_before_chunks_are_made(batch, size):
    assert batch.largest_chunk(size) == max(chunk.num_forward_tokens for chunk in batch.chunks(size))
    assert batch.select([]).largest_chunk(size) == 1


@given(batches)
def test_batches_with_and_without_a_field_are_not_joined(batch):
    without = batch.replace(vectors=None)
    with pytest.raises(ValueError, match="carry different tensors"):
        FullBatch.concat([batch, without])
    joined = FullBatch.concat([without, without])
    assert joined.vectors is None
    assert rows_of(joined) == rows_of(without) * 2


@given(batches)
def test_a_stage_keeps_what_both_have_and_is_not_joined_with_another(batch):
    plain = TokenBatch.of(batch)
    assert type(plain) is TokenBatch
    assert plain.trainable_counts == batch.trainable_counts
    assert [row.keys() for row in rows_of(plain)] == [{"prompts", "tokens", "group_index", "trainable_counts"}] * (
        batch.num_rows
    )
    with pytest.raises(ValueError, match="different stages: \\['FullBatch', 'TokenBatch'\\]"):
        TokenBatch.concat([plain, batch])
    with pytest.raises(TypeError, match="token_values"):
        FullBatch.of(plain, is_preferred=batch.is_preferred, weights=batch.weights, margins=batch.margins)


def check_pairs(batch):
    chosen, rejected = batch.pairs()
    assert sorted(chosen + rejected) == list(range(batch.num_rows))
    assert [batch.group_index[row] for row in chosen] == [batch.group_index[row] for row in rejected]
    assert {batch.is_preferred[row] for row in chosen} == {True}
    assert {batch.is_preferred[row] for row in rejected} == {False}


@given(batches_of_pairs())
def test_pairs_name_both_sides_of_every_group_in_one_order(batch):
    check_pairs(batch)


@given(batches_of_pairs(), budgets)
def test_every_part_of_whole_groups_is_made_of_pairs(batch, budget):
    parts = batch.split(budget, whole_groups=True)
    for part in parts:
        check_pairs(part)
    assert by_number(row for part in parts for row in rows_of(part)) == rows_of(batch)


@given(batches_of_pairs(), st.data())
def test_a_batch_with_an_odd_side_has_no_pairs(batch, data):
    row = data.draw(st.integers(0, batch.num_rows - 1))
    others = [other for other in range(batch.num_rows) if other != row]
    turned = list(batch.is_preferred)
    turned[row] = data.draw(st.sampled_from([not turned[row], None]))
    wrong = [batch.select(others), batch.replace(is_preferred=tuple(turned)), FullBatch.concat([batch, batch])]
    for case in wrong:
        with pytest.raises(ValueError, match="are not pairs"):
            case.pairs()
