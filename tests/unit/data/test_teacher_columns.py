"""A teacher's columns are refused where they were not made for these tokens, or are no log-probs."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, List, Value

from prefrl import DataError
from prefrl.data.teacher_columns import (
    FINGERPRINT,
    IDS,
    LOGPROBS,
    OTHERS,
    TeacherColumns,
    fingerprint_of,
    row_fingerprint,
    top_of,
)
from tests.assets import tiny_tokenizer

TOKENS = [[40, 41, 42, 43, 1], [50, 51, 1]]
STARTS = [2, 2]
FEATURES = Features(
    {
        "given_ids": List(Value("int32")),
        "given_trainable": List(Value("bool")),
        IDS: List(List(Value("int32"))),
        LOGPROBS: List(List(Value("float16"))),
        OTHERS: List(Value("float16")),
        FINGERPRINT: Value("string"),
    }
)


def rows() -> list[dict[str, Any]]:
    fingerprint = fingerprint_of(tiny_tokenizer(), temperature=1.0, weights="w", dtype="float32")
    return [
        {
            "given_ids": tokens,
            "given_trainable": [place >= start for place in range(len(tokens))],
            IDS: [[7, 3]] * (len(tokens) - start),
            LOGPROBS: [[math.log(0.5), math.log(0.25)]] * (len(tokens) - start),
            OTHERS: [math.log(0.25)] * (len(tokens) - start),
            FINGERPRINT: row_fingerprint(fingerprint, tokens),
        }
        for tokens, start in zip(TOKENS, STARTS, strict=True)
    ]


def check(found: list[dict[str, Any]], **options: Any) -> None:
    arguments = {"tokenizer": tiny_tokenizer(), "num_tokens": 128, "temperature": 1.0, "max_prompt_length": None}
    TeacherColumns(**{**arguments, **options}).check(Dataset.from_list(found, features=FEATURES))  # type: ignore[arg-type]


def other_vocabulary() -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["What"])
    return row_fingerprint(fingerprint_of(tokenizer, temperature=1.0), [9])


def other_template() -> str:
    return row_fingerprint(fingerprint_of(tiny_tokenizer(chat_template=None), temperature=1.0), [9])


def test_columns_of_these_tokens_are_accepted_whatever_made_them() -> None:
    check(rows())
    found = rows()
    for row in found:  # another template or vocabulary, with the same tokens
        about = json.loads(row[FINGERPRINT])
        row[FINGERPRINT] = json.dumps({**about, "vocabulary": "x", "chat_template": "y", "weights": "z"})
    check(found, max_prompt_length=2)
    check([{**row, OTHERS: [-math.inf] * len(row[OTHERS])} for row in rows()])  # all tokens are kept


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({FINGERPRINT: None}, {}, "row 1: teacher_fingerprint=None is not what prefrl teacher writes"),
    ({FINGERPRINT: "made by hand"}, {}, "row 1: teacher_fingerprint='made by hand' is not"),
    ({FINGERPRINT: "[]"}, {}, "row 1: teacher_fingerprint='[]' is not"),
    ({}, {"temperature": 0.7}, "log-probs are at temperature 1.0, and temperature=0.7. Set temperature=1.0, or make"),
    ({FINGERPRINT: other_vocabulary()}, {}, "row 1: the teacher has seen other tokens than the student's of this"),
    ({FINGERPRINT: other_vocabulary()}, {}, "its tokenizer has another vocabulary. Choose a teacher of the student's"),
    ({FINGERPRINT: other_template()}, {}, "row 1: the teacher has seen other tokens than the student's of this pro"),
    ({FINGERPRINT: other_template()}, {}, "its template is another"),
    ({"given_ids": [50, 52, 1]}, {}, "of this prompt and completion: the text has changed since, or its"),
    (
        {},
        {"max_prompt_length": 1},
        "its prompt has 2 tokens, all of which the teacher has seen, and max_prompt_length=1",
    ),
    ({IDS: []}, {}, "row 1: teacher_ids has 0, teacher_logprobs has 1, teacher_other_logprobs has 1 places, but the"),
    ({OTHERS: [-1.0, -1.0]}, {}, "teacher_other_logprobs has 2 places, but the completion has 1 tokens. Make the"),
    ({LOGPROBS: [[-1.0]]}, {}, "row 1: teacher_ids and teacher_logprobs have 1 and 2 entries at some places"),
    ({IDS: [[]], LOGPROBS: [[]]}, {}, "have 0 entries at some places. All places need equally many, from 1 to 128"),
    ({IDS: [[7, 128]]}, {}, "row 1: teacher_ids needs different ids in 0..127 at each place; they are in 7..128"),
    ({IDS: [[7, 7]]}, {}, "row 1: teacher_ids needs different ids in 0..127"),
    ({LOGPROBS: [[math.nan, -1.0]]}, {}, "row 1: teacher_logprobs or teacher_other_logprobs has numbers that are not"),
    ({LOGPROBS: [[-0.1, -0.5]]}, {}, "exp(teacher_other_logprobs) of a place sum to 1.761, which is more than 1"),
    ({IDS: [[7]], LOGPROBS: [[-1.0]]}, {}, "teacher_ids: rows have 1 and 2 tokens at each place. Join only datasets"),
]


@pytest.mark.parametrize(("changes", "options", "message"), REFUSED, ids=[message[:60] for *_, message in REFUSED])
def test_columns_that_do_not_fit_are_refused(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    first, second = rows()
    with pytest.raises(DataError, match=re.escape(message)):
        check([first, {**second, **changes}], **options)


def test_a_completion_that_is_cut_off_has_the_columns_of_its_first_tokens_and_a_longer_one_repeats_them() -> None:
    row = {IDS: [[1], [2], [3]], LOGPROBS: [[-1.0], [-2.0], [-3.0]], OTHERS: [-4.0, -5.0, -6.0]}
    found = top_of([(row, 2), (row, 1)])
    assert {name: values.tolist() for name, values in found.items()} == {
        IDS: [[1], [2], [1]],
        LOGPROBS: [[-1.0], [-2.0], [-1.0]],
        OTHERS: [-4.0, -5.0, -4.0],
    }
    assert [values.dtype for values in found.values()] == [torch.int32, torch.float16, torch.float16]
    assert top_of([(row, 5)])[IDS].tolist() == [[1], [2], [3], [1], [2]]


def test_a_rank_without_rows_has_columns_without_places() -> None:
    assert [values.shape for values in top_of([]).values()] == [(0, 1), (0, 1), (0,)]
