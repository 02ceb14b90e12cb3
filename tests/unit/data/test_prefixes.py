"""The forest of prompts: by hand, and against the definition."""

from __future__ import annotations

import random

import pytest

from prefrl.data import collate
from prefrl.data.collate import share_prefixes

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
