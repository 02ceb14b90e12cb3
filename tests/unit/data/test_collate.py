from __future__ import annotations

import pytest

from prefrl.data.collate import flat_batch, sft_batch
from prefrl.errors import DataError


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
    ],
)
def test_rows_that_do_not_fit_together_are_refused(prompts, responses, options, part):
    with pytest.raises(DataError) as error:
        flat_batch(prompts, responses, **options)
    assert part in str(error.value)


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
