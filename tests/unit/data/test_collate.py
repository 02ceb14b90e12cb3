"""The forest of prompts: by hand, and against the definition."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from prefrl.data import collate
from prefrl.data.collate import flat_batch, preference_batch, reward_batch, sft_batch, share_prefixes, unpaired_batch
from prefrl.errors import DataError
from prefrl.types import LabeledBatch


def test_rows_of_a_group_share_their_prompt_wherever_they_stand():
    batch = flat_batch([[5, 6], [7], [5, 6]], [[1], [2, 3], [4]], groups=[10, 11, 10])
    assert batch.prompt_ids.tolist() == [5, 6, 7]
    assert batch.prompt_lengths == (2, 1)
    assert batch.prompt_index == (0, 1, 0)
    assert batch.response_ids.tolist() == [1, 2, 3, 4]
    assert batch.response_lengths == (1, 2, 1)
    assert batch.trainable.tolist() == [True] * 4
    assert batch.group_index == (10, 11, 10)


def test_other_groups_and_other_prompts_are_not_shared():
    assert flat_batch([[5], [5]], [[1], [2]], groups=[0, 1]).prompt_index == (0, 1)
    assert flat_batch([[5], [6]], [[1], [2]], groups=[0, 0]).prompt_index == (0, 1)
    assert flat_batch([[5], [5]], [[1], [2]]).group_index == (0, 1)


def test_trainable_flags_follow_the_response_tokens():
    batch = flat_batch([[5], [6]], [[1, 2], [3]], trainable=[[True, False], [True]])
    assert batch.trainable.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("prompts", "responses", "options", "part"),
    [
        ([[5]], [[1], [2]], {}, "'prompts': 1, 'responses': 2"),
        ([[5], []], [[1], [2]], {}, "row 1: prompt of 0"),
        ([[5]], [[]], {}, "response of 0"),
        ([[5]], [[1]], {"trainable": [[True, True]]}, "row 0: 2 trainable flags for 1"),
        ([[5]], [[1]], {"groups": [0, 0]}, "'groups': 2"),
        ([[5], [5]], [[1], [2]], {"groups": [0, 1], "rows": [0, 0]}, "{'rows': 1, 'groups': 2}"),
        ([[5], [5]], [[1], [2]], {"rows": [0]}, "'responses': 2, 'trainable': 2, 'rows': 1"),
        ([[5], [5]], [[1], [2]], {"rows": [0, 2]}, "rows=[0, 2]: must be numbered"),
        ([[5], [5]], [[1], [2]], {"rows": [1, 0]}, "rows=[1, 0]: must be numbered"),
        ([[5], [5]], [[1], [2]], {"rows": [-1, 0]}, "rows=[-1, 0]: must be numbered"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(prompts, responses, options, part):
    with pytest.raises(DataError) as error:
        flat_batch(prompts, responses, **options)
    assert part in str(error.value)


def test_with_one_response_each_and_equal_prompts_rows_change_nothing():
    prompts, responses, groups = [[5, 6], [7], [5, 6], [7]], [[1], [2, 3], [4], [5]], [10, 11, 10, 10]
    plain = flat_batch(prompts, responses, groups=groups)
    numbered = flat_batch(prompts, responses, groups=groups, rows=range(4))
    for field in dataclasses.fields(plain):
        before, after = getattr(plain, field.name), getattr(numbered, field.name)
        assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
    assert plain.response_row == (0, 1, 2, 3)
    assert plain.prompt_parent == (-1, -1, -1)


def test_contexts_of_a_group_share_what_they_begin_with():
    batch = flat_batch(
        [[5, 6], [5, 6, 7], [5, 6, 7, 8], [5, 6]], [[1], [2, 3], [4], [9]], groups=[3, 3], rows=[0, 0, 1, 1]
    )
    assert batch.prompt_ids.tolist() == [5, 6, 7, 8]
    assert batch.prompt_lengths == (2, 1, 1)
    assert batch.prompt_parent == (-1, 0, 1)
    assert batch.prompt_index == (0, 1, 2, 0)
    assert batch.response_row == (0, 0, 1, 1)
    assert batch.group_index == (3, 3)
    assert batch.row_lengths == (3, 2)
    assert batch.trainable_counts == (3, 2)
    assert batch.row_index.tolist() == [0, 0, 0, 1, 1]


def test_without_rows_a_prompt_is_never_cut():
    batch = flat_batch([[5, 6], [5, 6, 7]], [[1], [2]], groups=[0, 0])
    assert (batch.prompt_lengths, batch.prompt_parent) == ((2, 3), (-1, -1))


def test_sft_prompt_ends_before_the_first_loss_and_the_tail_without_loss_is_cut():
    rows = [
        {"input_ids": [1, 2, 3, 4, 5, 6], "trainable": [False, False, True, False, True, False]},
        {"input_ids": [7, 8], "trainable": [False, True]},
    ]
    batch = sft_batch(rows)
    assert batch.prompt_ids.tolist() == [1, 2, 7]
    assert batch.prompt_lengths == (2, 1)
    assert batch.response_ids.tolist() == [3, 4, 5, 8]
    assert batch.response_lengths == (3, 1)
    assert batch.trainable.tolist() == [True, False, True, True]
    assert batch.group_index == (0, 1)


def test_each_packed_sequence_is_a_row_and_those_without_loss_are_left_out():
    row = {
        "input_ids": [1, 2, 3, 4, 5, 6, 7],
        "trainable": [False, True, False, False, False, False, True],
        "seq_lengths": [2, 2, 3],
    }
    batch = sft_batch([row])
    assert batch.prompt_ids.tolist() == [1, 5, 6]
    assert batch.prompt_index == (0, 1)
    assert batch.response_ids.tolist() == [2, 7]


def test_no_rows_give_an_empty_batch():
    assert (sft_batch([]).num_rows, flat_batch([], []).num_tokens) == (0, 0)
    assert [preference_batch([]).is_preferred, unpaired_batch([]).is_preferred] == [(), ()]
    assert reward_batch([], padding_id=1).is_preferred == ()


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"input_ids": [1, 2], "trainable": [True, True]}, "position 0"),
        ({"input_ids": [1, 2, 3, 4], "trainable": [False, True, True, True], "seq_lengths": [2, 2]}, "position 2"),
        ({"input_ids": [1, 2], "trainable": [False, False]}, "no trainable token"),
        ({"input_ids": [1, 2], "trainable": [False]}, "2 input_ids, 1 trainable"),
        ({"input_ids": [1, 2], "trainable": [False, True], "seq_lengths": [3]}, "3 tokens"),
    ],
)
def test_bad_sft_rows_are_refused(row, part):
    with pytest.raises(DataError) as error:
        sft_batch([{"input_ids": [8, 9], "trainable": [False, True]}, row])
    assert "row 1" in str(error.value)
    assert part in str(error.value)


# --- preferences ---

PAIRS = [
    {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]},
    {"prompt_ids": [1, 2], "chosen_ids": [6, 7], "rejected_ids": [8]},
]
PAIRS_WITH_REF = [
    PAIRS[0] | {"ref_chosen_logprobs": [-1.0], "ref_rejected_logprobs": [-2.0, -3.0]},
    PAIRS[1] | {"ref_chosen_logprobs": [-4.0, -5.0], "ref_rejected_logprobs": [-6.0]},
]


def test_a_pair_is_two_rows_behind_one_prompt_chosen_first():
    batch = preference_batch(PAIRS)
    assert batch.prompt_ids.tolist() == [1, 2, 1, 2]
    assert batch.prompt_index == (0, 0, 1, 1)
    assert batch.response_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.response_lengths == (1, 2, 2, 1)
    assert batch.group_index == (0, 0, 1, 1)
    assert batch.is_preferred == (True, False, True, False)
    assert batch.pairs() == ([0, 2], [1, 3])
    assert batch.trainable.all()
    assert batch.weights == (1.0,) * 4
    assert type(batch) is LabeledBatch


def test_reference_log_probs_of_pairs_follow_the_response_tokens():
    batch = preference_batch(PAIRS_WITH_REF)
    assert batch.ref_logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    assert batch.ref_logprobs.dtype == torch.float32


RATED = [
    {"prompt_ids": [1], "completion_ids": [2, 3], "label": True, "KL_completion_ids": [5]},
    {"prompt_ids": [4], "completion_ids": [5], "label": False, "KL_completion_ids": []},
    {"prompt_ids": [6], "completion_ids": [7], "label": False, "KL_completion_ids": [2, 3]},
]


def test_a_rated_completion_is_followed_by_its_kl_completion_behind_the_same_prompt():
    batch = unpaired_batch(RATED)
    assert batch.prompt_ids.tolist() == [1, 4, 6]
    assert batch.prompt_index == (0, 0, 1, 2, 2)
    assert batch.response_ids.tolist() == [2, 3, 5, 5, 7, 2, 3]
    assert batch.response_lengths == (2, 1, 1, 1, 2)
    assert batch.group_index == (0, 0, 1, 2, 2)
    assert batch.is_preferred == (True, None, False, False, None)
    assert batch.trainable.all()
    assert batch.weights == (1.0, 0.0, 1.0, 1.0, 0.0)
    assert type(batch) is LabeledBatch


def test_without_kl_completions_each_rated_completion_is_one_row():
    rows = [{key: row[key] for key in ("prompt_ids", "completion_ids", "label")} for row in RATED]
    assert unpaired_batch(rows).is_preferred == (True, False, False)


def test_kl_completions_have_weight_zero():
    rows = [row | {"weight": weight} for row, weight in zip(RATED, (0.5, 2, 1.5), strict=True)]
    assert unpaired_batch(rows).weights == (0.5, 0.0, 2.0, 1.5, 0.0)


def test_reference_log_probs_of_rated_rows_follow_the_response_tokens():
    refs = [([-1.0, -2.0], [-3.0]), ([-4.0], []), ([-5.0], [-6.0, -7.0])]
    rows = [row | {"ref_logprobs": a, "ref_KL_logprobs": b} for row, (a, b) in zip(RATED, refs, strict=True)]
    assert unpaired_batch(rows).ref_logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]


def scored_tokens(batch):
    """What a forward pass feeds for each row: the prompt and the response without its last token."""
    prompts = batch.prompt_ids.split(list(batch.prompt_lengths))
    responses = batch.response_ids.split(list(batch.response_lengths))
    rows = zip(batch.prompt_index, responses, strict=True)
    return [[*prompts[index].tolist(), *response[:-1].tolist()] for index, response in rows]


def test_a_reward_pair_shares_its_common_start_and_only_the_extra_token_is_trainable():
    batch = reward_batch([{"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, 5]}], padding_id=9)
    assert batch.prompt_ids.tolist() == [1, 2]
    assert batch.prompt_index == (0, 0)
    assert batch.response_ids.tolist() == [3, 4, 9, 5, 9]
    assert batch.trainable.tolist() == [False, False, True, False, True]
    assert (batch.group_index, batch.is_preferred, batch.margins) == ((0, 0), (True, False), (0.0, 0.0))


@pytest.mark.parametrize(
    ("chosen", "rejected"), [([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 2]), ([1, 2], [1, 2]), ([1, 2], [3]), ([1], [2])]
)
def test_a_reward_is_read_behind_all_tokens_of_its_sequence(chosen, rejected):
    batch = reward_batch(
        [{"chosen_ids": [7], "rejected_ids": [8]}, {"chosen_ids": chosen, "rejected_ids": rejected}], padding_id=9
    )
    assert scored_tokens(batch)[2:] == [chosen, rejected]
    ends = torch.tensor(batch.response_lengths).cumsum(0) - 1
    assert batch.trainable.nonzero().flatten().tolist() == ends.tolist()
    assert batch.response_ids[ends].tolist() == [9] * 4


def test_both_rows_of_a_reward_pair_have_its_margin():
    rows = [{"chosen_ids": [1, 2], "rejected_ids": [1], "margin": margin} for margin in (0.5, -2)]
    assert reward_batch(rows, padding_id=9).margins == (0.5, 0.5, -2.0, -2.0)


def reward_rows(rows):
    return reward_batch(rows, padding_id=9)


REWARD = {"chosen_ids": [1], "rejected_ids": [2]}


@pytest.mark.parametrize(
    ("collate", "good", "change", "part"),
    [
        (preference_batch, PAIRS[0], {"prompt_ids": []}, "prompt_ids is []"),
        (preference_batch, PAIRS[0], {"chosen_ids": None}, "chosen_ids is None"),
        (preference_batch, PAIRS[0], {"rejected_ids": []}, "rejected_ids is []"),
        (preference_batch, PAIRS_WITH_REF[0], {"ref_chosen_logprobs": None}, "no ref_chosen_logprobs"),
        (preference_batch, PAIRS_WITH_REF[0], {"ref_rejected_logprobs": [1.0]}, "has 1 log-probs for 2 tokens"),
        (unpaired_batch, RATED[0], {"completion_ids": []}, "completion_ids is []"),
        (unpaired_batch, RATED[0], {"label": None}, "label is None"),
        (unpaired_batch, RATED[0], {"label": 1}, "label is 1"),
        (unpaired_batch, RATED[0] | {"weight": 1.0}, {"weight": None}, "no weight"),
        (unpaired_batch, RATED[0] | {"weight": 1.0}, {"weight": float("nan")}, "weight is nan"),
        (unpaired_batch, RATED[1] | {"ref_logprobs": [1.0]}, RATED[0], "ref_logprobs has 1 log-probs for 2"),
        (
            unpaired_batch,
            RATED[1] | {"ref_logprobs": [1.0]},
            RATED[0] | {"ref_logprobs": [1.0, 1.0]},
            "ref_KL_logprobs has 0 log-probs for 1",
        ),
        (reward_rows, REWARD, {"chosen_ids": []}, "chosen_ids is []"),
        (reward_rows, REWARD, {"rejected_ids": None}, "rejected_ids is None"),
        (reward_rows, REWARD | {"margin": 1}, {"margin": None}, "no margin"),
        (reward_rows, REWARD | {"margin": 1}, {"margin": float("inf")}, "margin is inf"),
        (reward_rows, REWARD | {"margin": 1}, {"margin": "1"}, "margin is '1'"),
    ],
)
def test_bad_preference_rows_are_refused(collate, good, change, part):
    with pytest.raises(DataError) as error:
        collate([good, good | change])
    assert "row 1 of the batch" in str(error.value)
    assert part in str(error.value)


def test_a_reward_sequence_ends_at_its_last_token_that_is_not_padding() -> None:
    """As transformers' classifiers find it, where the end token is the padding token."""
    batch = reward_batch([{"chosen_ids": [5, 6, 0, 7, 0, 0], "rejected_ids": [5, 0]}], padding_id=0)
    assert batch.prompt_ids.tolist() == [5]
    assert [part.tolist() for part in batch.response_ids.split(batch.response_lengths)] == [[6, 0, 7, 0], [0]]


SHORTEST = collate._SHORTEST_SHARED
LONG = list(range(100, 100 + SHORTEST))


def contexts(forest):
    """All tokens up to the end of each prompt."""
    paths = []
    for parent, segment in zip(forest.parents, forest.segments, strict=True):
        paths.append((paths[parent] if parent >= 0 else []) + list(segment))
    return [paths[end] for end in forest.ends]


def shape(prompts, groups=None):
    """The length and the parent of each segment, after a check that every prompt is there."""
    forest = share_prefixes(prompts, groups or [0] * len(prompts))
    assert contexts(forest) == prompts
    return list(zip(map(len, forest.segments), forest.parents, strict=True))


def test_a_prompt_that_another_begins_with_is_continued_however_short():
    assert shape([[1], [1, 2], [1, 2, 3, 4], [1, 9]]) == [(1, -1), (1, 0), (2, 1), (1, 0)]
    assert shape([[1, 2, 3, 4], [1, 2]]) == [(2, -1), (2, 0)]


def test_prompts_that_part_share_their_beginning_if_it_is_long_enough():
    assert shape([[*LONG, 1], [*LONG, 2, 3]]) == [(SHORTEST, -1), (1, 0), (2, 0)]
    assert shape([[*LONG[1:], 1], [*LONG[1:], 2, 3]]) == [(SHORTEST, -1), (SHORTEST + 1, -1)]


def test_length_counts_from_the_segment_before():
    """Behind a whole prompt, behind another beginning, and where shorter beginnings follow each other."""
    base = [7] * 50
    assert shape([base, [*base, *LONG[1:], 1], [*base, *LONG[1:], 2]]) == [(50, -1), (SHORTEST, 0), (SHORTEST, 0)]
    assert shape([[*LONG, 1], [*LONG, *LONG, 2], [*LONG, *LONG, 3]]) == [
        *((SHORTEST, -1), (1, 0)),
        *((SHORTEST, 0), (1, 2), (1, 2)),
    ]
    # 8 tokens that three share are too few for a segment, but the 16 that two of them share are enough.
    half, rest = LONG[: SHORTEST // 2], LONG[SHORTEST // 2 :]
    assert shape([[*half, 1], [*half, *rest, 2], [*half, *rest, 3]]) == [
        (SHORTEST // 2 + 1, -1),
        *((SHORTEST, -1), (1, 1), (1, 1)),
    ]


def test_groups_share_nothing():
    assert shape([[1, 2], [1, 2, 3], [1, 2]], [0, 1, 0]) == [(2, -1), (3, -1)]


def test_a_token_that_begins_with_the_same_bytes_is_another_token():
    assert shape([[1], [1 + 256], [1 + 2**32], [1 + 256, 5]]) == [(1, -1), (1, -1), (1, -1), (1, 1)]


def worth_a_segment(prompts):
    """The beginnings that become segments, by the definition."""
    wholes = {tuple(prompt) for prompt in prompts}
    following = {}
    for prompt in wholes:
        for length in range(len(prompt)):
            following.setdefault(prompt[:length], set()).add(prompt[length])
    found = set()
    for beginning in sorted(wholes | {b for b, after in following.items() if len(after) > 1}, key=len):
        before = max((len(b) for b in found if beginning[: len(b)] == b), default=0)
        if beginning in wholes or len(beginning) - before >= 3:
            found.add(beginning)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_segments_end_where_the_definition_says(seed, monkeypatch):
    monkeypatch.setattr(collate, "_SHORTEST_SHARED", 3)
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(2) for _ in range(numbers.randrange(1, 12))] for _ in range(12)]
    forest = share_prefixes(prompts, [0] * 12)
    assert contexts(forest) == prompts
    assert all(parent < number for number, parent in enumerate(forest.parents))
    ends = contexts(collate.Segments(forest.segments, forest.parents, list(range(len(forest.segments)))))
    assert sorted(map(tuple, ends)) == sorted(worth_a_segment(prompts))
