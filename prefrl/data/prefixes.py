"""The prompts of a group as a forest: what several of them begin with is one segment, which the others continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Segments", "share_equal", "share_prefixes"]

# From this many tokens on, what prompts have in common becomes a segment of its own even if none of them ends there.
# Less, like the header of a chat template's turn, saves less than a segment costs: a call of the kernel, copied keys.
_SHORTEST_SHARED = 16

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """P segments of prompts."""

    segments: list[Sequence[int]]  # ids, none empty
    parents: list[int]  # the segment that each continues, a smaller number than its own; -1: none
    ends: list[int]  # the last segment of each prompt


@dataclass(slots=True)
class _Beginning:
    """What one or several prompts begin with."""

    prompt: Tokens  # one of them
    length: int
    parent: int  # the next shorter beginning of the same prompts
    is_whole: bool  # one of them ends here
    segment: int = -1  # the one with its last tokens


def share_equal(prompts: Sequence[Sequence[int]], groups: Sequence[int]) -> Segments:
    """Every prompt as one segment; equal prompts of a group are stored once, in order of first use."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    keys = [(group, tuple(prompt)) for group, prompt in zip(groups, prompts, strict=True)]
    ends = [numbers.setdefault(key, len(numbers)) for key in keys]
    return Segments([prompt for _, prompt in numbers], [-1] * len(numbers), ends)


def share_prefixes(prompts: Sequence[Sequence[int]], groups: Sequence[int]) -> Segments:
    """Cut prompts into segments, of which those that prompts of a group have in common are stored once.

    A prompt that another one begins with is a segment that the other continues. So is a common beginning of prompts
    that part there, if it is at least `_SHORTEST_SHARED` tokens longer than the segments before it. Segments are in
    order of first use. The time is about linear in the number of tokens.

    Args:
        prompts: Lists of ids, none empty.
        groups: The group of each prompt; other groups share nothing.
    """
    arrays = [np.asarray(prompt, np.int64) for prompt in prompts]
    by_group: dict[int, dict[bytes, Tokens]] = {}
    for group, tokens in zip(groups, arrays, strict=True):
        by_group.setdefault(group, {})[tokens.tobytes()] = tokens
    tries = {group: _trie(distinct) for group, distinct in by_group.items()}
    found = Segments([], [], [])
    for group, tokens in zip(groups, arrays, strict=True):
        beginnings, wholes = tries[group]
        _add(found, beginnings, wholes[tokens.tobytes()])
    return found


def _trie(prompts: Mapping[bytes, Tokens]) -> tuple[list[_Beginning], dict[bytes, int]]:
    """The beginnings of some prompts, of which the first is that of no tokens; and the number of each whole prompt."""
    trie = [_Beginning(np.zeros(0, np.int64), 0, 0, is_whole=True)]
    wholes: dict[bytes, int] = {}
    path = [0]  # beginnings of the last prompt
    for key in sorted(prompts):  # in this order, prompts with a common beginning are neighbors
        prompt = prompts[key]
        shared = _common_length(trie[path[-1]].prompt, prompt)
        longer = 0
        while trie[path[-1]].length > shared:
            longer = path.pop()
        if trie[path[-1]].length < shared:
            trie[longer].parent = len(trie)
            trie.append(_Beginning(prompt, shared, path[-1], is_whole=False))
            path.append(len(trie) - 1)
        wholes[key] = len(trie)
        trie.append(_Beginning(prompt, len(prompt), path[-1], is_whole=True))
        path.append(len(trie) - 1)
    for beginning in sorted(trie, key=lambda beginning: beginning.length):
        parent = trie[beginning.parent]
        if not parent.is_whole and parent.length - trie[parent.parent].length < _SHORTEST_SHARED:
            beginning.parent = parent.parent
    return trie, wholes


def _add(found: Segments, trie: Sequence[_Beginning], whole: int) -> None:
    """Add the segments that a prompt needs and that are not there yet."""
    missing = []
    number = whole
    while number != 0 and trie[number].segment < 0:
        missing.append(trie[number])
        number = trie[number].parent
    for beginning in reversed(missing):
        parent = trie[beginning.parent]
        beginning.segment = len(found.segments)
        found.segments.append(beginning.prompt[parent.length : beginning.length].tolist())
        found.parents.append(parent.segment)
    found.ends.append(trie[whole].segment)


def _common_length(a: Tokens, b: Tokens) -> int:
    """The number of leading tokens that two prompts have in common."""
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    return int(differs.argmax()) if differs.any() else shortest
