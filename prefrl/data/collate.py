"""Flat batches: made of lists of tokens, with common beginnings of prompts as segments, and as what a file holds.

The functions are pure: there is no random state and no padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefrl.data.chat import common_prefix_length
from prefrl.errors import DataError
from prefrl.types import Images, LabeledBatch, MarginBatch, ReferencedBatch, TokenBatch

# From this many tokens on, what prompts have in common becomes a segment of its own even if none of them ends there.
# Less, like the header of a chat template's turn, saves less than a segment costs: a call of the kernel, copied keys.
_SHORTEST_SHARED = 16
_IMAGES = "images."  # what the names of a file's tensors that belong to images begin with

Tokens = NDArray[np.int64]
Row = Mapping[str, Any]
Stage = TypeVar("Stage", bound=TokenBatch)


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
        trie, wholes = tries[group]
        whole = number = wholes[tokens.tobytes()]
        missing = []  # segments that the prompt needs and that are not there yet, the last one first
        while number != 0 and trie[number].segment < 0:
            missing.append(trie[number])
            number = trie[number].parent
        for beginning in reversed(missing):
            parent = trie[beginning.parent]
            beginning.segment = len(found.segments)
            found.segments.append(beginning.prompt[parent.length : beginning.length].tolist())
            found.parents.append(parent.segment)
        found.ends.append(trie[whole].segment)
    return found


def _trie(prompts: Mapping[bytes, Tokens]) -> tuple[list[_Beginning], dict[bytes, int]]:
    """The beginnings of some prompts, of which the first is that of no tokens; and the number of each whole prompt."""
    trie = [_Beginning(np.zeros(0, np.int64), 0, 0, is_whole=True)]
    wholes: dict[bytes, int] = {}
    path = [0]  # beginnings of the last prompt
    for key in sorted(prompts):  # in this order, prompts with a common beginning are neighbors
        prompt = prompts[key]
        before = trie[path[-1]].prompt
        shared = min(len(before), len(prompt))  # leading tokens that both have
        if (differs := before[:shared] != prompt[:shared]).any():
            shared = int(differs.argmax())
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


@dataclass(frozen=True)
class _Sequence:
    """A row of a batch with sides."""

    prompt: list[int]
    response: list[int]
    group: int
    side: bool | None
    ref_logprobs: list[float] | None


def flat_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    trainable: Sequence[Sequence[bool]] | None = None,
    groups: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    images: Mapping[int, Images] | None = None,
) -> TokenBatch:
    """Lay rows end to end. Rows of a group with equal prompts share the prompt, wherever in the batch they are.

    With `rows`, they share what their prompts begin with, see `share_prefixes`.

    Args:
        prompts: R lists of ids, none empty.
        responses: R lists of ids, none empty.
        trainable: R lists of flags, one for each response token. None: all tokens have a loss.
        groups: B numbers. None: each row is its own group.
        rows: R numbers, the row of each response: 0, then each time the same number or the next. None: one for each.
        images: By group, those of its prompt and, if it has one response, of that.
    Raises:
        DataError: Numbers of rows differ, a prompt or response is empty, flags and tokens differ in length, or `rows`
            are not numbered in order.
    """
    of_response = range(len(responses)) if rows is None else rows
    trainable = [[True] * len(response) for response in responses] if trainable is None else trainable
    groups = range(len(set(of_response))) if groups is None else groups
    _check_rows(prompts, responses, trainable, groups, of_response)
    share = share_equal if rows is None else share_prefixes
    group_of_response = [groups[row] for row in of_response]
    shared = share(prompts, group_of_response)
    return TokenBatch(
        prompt_ids=torch.tensor(list(chain.from_iterable(shared.segments)), dtype=torch.long),
        prompt_lengths=tuple(len(segment) for segment in shared.segments),
        prompt_parent=tuple(shared.parents),
        prompt_index=tuple(shared.ends),
        response_ids=torch.tensor(list(chain.from_iterable(responses)), dtype=torch.long),
        response_lengths=tuple(len(response) for response in responses),
        response_row=tuple(of_response),
        trainable=torch.tensor(list(chain.from_iterable(trainable)), dtype=torch.bool),
        group_index=tuple(groups),
        images=_by_prompt(images, shared, group_of_response) if images else (),
    )


def _by_prompt(
    images: Mapping[int, Images], shared: Segments, group_of_response: Sequence[int]
) -> tuple[Images | None, ...]:
    """The images of each segment without a parent."""
    found: list[Images | None] = [None] * len(shared.segments)
    for segment, group in zip(shared.ends, group_of_response, strict=True):
        while shared.parents[segment] >= 0:
            segment = shared.parents[segment]
        found[segment] = images.get(group)
    return tuple(found)


def sft_batch(rows: Sequence[Row]) -> TokenBatch:
    """Make a batch of rows of a prepared SFT dataset. The tokens before the first one with a loss are the prompt.

    Tokens after the last one with a loss are dropped, because nothing depends on them. A packed row gives one row for
    each of its sequences that has a loss.

    Args:
        rows: `input_ids`, `trainable`, and for packed rows `seq_lengths`; `image_inputs`, see `ImageReader.attach`.
    Raises:
        DataError: A row's first token is marked trainable, flags and tokens differ in length, or a row that is not
            packed has no token with a loss.
    """
    prompts, responses, flags = [], [], []
    images = {}
    sequences = chain.from_iterable(_sequences(row, index) for index, row in enumerate(rows))
    for number, (token_ids, trainable, of_sequence) in enumerate(sequences):
        if of_sequence is not None:
            images[number] = of_sequence
        first = trainable.index(True)
        stop = len(trainable) - trainable[::-1].index(True)
        prompts.append(token_ids[:first])
        responses.append(token_ids[first:stop])
        flags.append(trainable[first:stop])
    return flat_batch(prompts, responses, trainable=flags, images=images)


def preference_batch(rows: Sequence[Row]) -> LabeledBatch:
    """Make a batch of pairs: its rows 2k and 2k+1 are the chosen and the rejected side of pair k.

    The two sides share their prompt and form group k.

    Args:
        rows: `prompt_ids`, `chosen_ids`, `rejected_ids`; and, in all rows or in none, `ref_chosen_logprobs` and
            `ref_rejected_logprobs`, the reference's log-prob of each token of a side, in nats.
    Raises:
        DataError: A row lacks a column, a column has no tokens, or the log-probs are not one for each token.
    """
    sides = ("chosen", "rejected")
    has_ref = any(_has_column(rows, f"ref_{side}_logprobs") for side in sides)
    sequences = [
        _read(row, index, f"{side}_ids", f"ref_{side}_logprobs" if has_ref else None, side == "chosen")
        for index, row in enumerate(rows)
        for side in sides
    ]
    return _batch_with_sides(sequences, [1.0] * len(sequences), _images(rows))


def unpaired_batch(rows: Sequence[Row]) -> LabeledBatch:
    """Make a batch of labeled completions, each followed by its KL completion, if it has one.

    A KL completion is the completion of another prompt, appended to this row's prompt. Group k is dataset row k. The
    KL completion only serves to estimate a divergence, so it has no side and weight 0: sides and weights count labeled
    completions only. Its tokens are trainable, like all tokens whose log-probs a loss sums.

    Args:
        rows: `prompt_ids`, `completion_ids`, `label` (True for desirable completions); optionally `KL_completion_ids`,
            which may be empty; and, in all rows or in none, `weight`, and `ref_logprobs`, with `ref_KL_logprobs` where
            there is a KL completion: the reference's log-prob of each token, in nats.
    Raises:
        DataError: A row lacks a column, a column has no tokens, or the log-probs are not one for each token; a label
            is not a bool, or a weight is not a finite number.
    """
    has_ref, weights = _has_column(rows, "ref_logprobs"), _numbers(rows, "weight")
    sequences = []
    for index, row in enumerate(rows):
        label = row.get("label")
        if not isinstance(label, bool):
            raise DataError(
                f"row {index} of the batch: label is {label!r}: must be True (desirable) or False (undesirable)"
            )
        sequences.append(_read(row, index, "completion_ids", "ref_logprobs" if has_ref else None, label))
        if row.get("KL_completion_ids"):
            sequences.append(_read(row, index, "KL_completion_ids", "ref_KL_logprobs" if has_ref else None, None))
    given = [1.0] * len(rows) if weights is None else weights
    weights_of_sides = [0.0 if s.side is None else given[s.group] for s in sequences]
    return _batch_with_sides(sequences, weights_of_sides, _images(rows))


def reward_batch(rows: Sequence[Row], *, padding_id: int) -> MarginBatch:
    """Make a batch of pairs of whole sequences for a model that scores a sequence at its last token.

    The rows are in the order of `preference_batch`. Padding tokens at the end of a sequence are removed, because
    transformers' classifiers score the last token that is not padding; if a tokenizer pads with its end token, that is
    the token before the end token. The common start of both sequences is their shared prompt, of at least one token;
    if they already differ in the first token, each has its own prompt. Each response ends with an extra token, which
    is the only trainable one. A forward pass never reads the last token of a response, so the position that would
    predict the extra token is the true last token of the sequence.

    Args:
        rows: `chosen_ids`, `rejected_ids`; and, in all rows or in none, `margin`.
        padding_id: The padding token, which also serves as the extra token.
    Raises:
        DataError: A row lacks a column, a column has no tokens, or a margin is not a finite number.
    """
    margins = _numbers(rows, "margin")
    prompts, responses, groups = [], [], []
    for index, row in enumerate(rows):
        pair = [
            _without_padding(_token_ids(row, index, column), padding_id) for column in ("chosen_ids", "rejected_ids")
        ]
        shared = max(1, common_prefix_length(*pair))
        prompts += [token_ids[:shared] for token_ids in pair]
        responses += [[*token_ids[shared:], padding_id] for token_ids in pair]
        groups += [index, index]
    flags = [[False] * (len(response) - 1) + [True] for response in responses]
    return MarginBatch.of(
        flat_batch(prompts, responses, trainable=flags, groups=groups, images=_images(rows)),
        is_preferred=(True, False) * len(rows),
        weights=(1.0,) * len(groups),
        margins=tuple(0.0 if margins is None else margins[group] for group in groups),
    )


def _without_padding(token_ids: list[int], padding_id: int) -> list[int]:
    """The sequence up to its last token that is not padding. If all tokens are padding, one of them is kept."""
    length = len(token_ids)
    while length > 1 and token_ids[length - 1] == padding_id:
        length -= 1
    return token_ids[:length]


def _read(row: Row, index: int, column: str, ref_column: str | None, side: bool | None) -> _Sequence:
    response = _token_ids(row, index, column)
    return _Sequence(
        prompt=_token_ids(row, index, "prompt_ids"),
        response=response,
        group=index,
        side=side,
        ref_logprobs=None if ref_column is None else _logprobs(row, index, ref_column, len(response)),
    )


def _images(rows: Sequence[Row]) -> dict[int, Images]:
    """The images of each dataset row that has some, see `ImageReader.attach`."""
    return {index: images[0] for index, row in enumerate(rows) if (images := row.get("image_inputs"))}


def _batch_with_sides(
    sequences: Sequence[_Sequence], weights: Sequence[float], images: Mapping[int, Images]
) -> LabeledBatch:
    """A `ReferencedBatch` if the sequences have the reference's log-probs."""
    rows = flat_batch(
        [s.prompt for s in sequences],
        [s.response for s in sequences],
        groups=[s.group for s in sequences],
        images=images,
    )
    batch = LabeledBatch.of(rows, is_preferred=tuple(s.side for s in sequences), weights=tuple(weights))
    scores = [s.ref_logprobs for s in sequences if s.ref_logprobs is not None]
    if not scores:
        return batch
    ref_logprobs = torch.tensor(list(chain.from_iterable(scores)), dtype=torch.float32)
    return ReferencedBatch.of(batch, ref_logprobs=ref_logprobs)


def _token_ids(row: Row, index: int, column: str) -> list[int]:
    token_ids = row.get(column)
    if not token_ids:
        raise DataError(f"row {index} of the batch: {column} is {token_ids!r}: needs at least one token")
    return list(token_ids)


def _logprobs(row: Row, index: int, column: str, num_tokens: int) -> list[float]:
    logprobs = row.get(column) or []
    if len(logprobs) != num_tokens:
        raise DataError(
            f"row {index} of the batch: {column} has {len(logprobs)} log-probs for {num_tokens} tokens: must be one "
            "for each token. Compute them again for this dataset"
        )
    return list(logprobs)


def _has_column(rows: Sequence[Row], column: str) -> bool:
    present = [row.get(column) is not None for row in rows]
    if any(present) and not all(present):
        raise DataError(
            f"row {present.index(False)} of the batch has no {column}, but other rows have it. Give it to all rows"
        )
    return any(present)


def _numbers(rows: Sequence[Row], column: str) -> list[float] | None:
    """A column's values; None if there is none."""
    if not _has_column(rows, column):
        return None
    for index, row in enumerate(rows):
        value = row[column]
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"row {index} of the batch: {column} is {value!r}: needs a finite number")
    return [float(row[column]) for row in rows]


def _sequences(row: Row, index: int) -> Iterator[tuple[list[int], list[bool], Images | None]]:
    """The ids, flags and images of each sequence of a row that has a loss."""
    token_ids, trainable = list(row["input_ids"]), list(row["trainable"])
    lengths = row.get("seq_lengths") or [len(token_ids)]
    if len(token_ids) != len(trainable) or len(token_ids) != sum(lengths):
        raise DataError(
            f"row {index} of the batch: {len(token_ids)} input_ids, {len(trainable)} trainable flags and sequences "
            f"of {sum(lengths)} tokens in total: the three numbers must be equal. Prepare the dataset with "
            "prepare_sft_dataset"
        )
    if not any(trainable):
        raise DataError(f"row {index} of the batch has no trainable token. Drop such rows before training")
    stop = 0
    images = row.get("image_inputs") or [None] * len(lengths)
    for length, of_sequence in zip(lengths, images, strict=True):
        start, stop = stop, stop + length
        if not any(trainable[start:stop]):
            continue
        if trainable[start]:
            raise DataError(
                f"row {index} of the batch: the first token of a sequence (position {start}) is marked trainable, "
                "but nothing predicts it. Set its flag to False"
            )
        yield token_ids[start:stop], trainable[start:stop], of_sequence


def _check_rows(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    trainable: Sequence[Sequence[bool]],
    groups: Sequence[int],
    rows: Sequence[int],
) -> None:
    numbers = set(rows)
    if list(rows) != sorted(rows) or numbers != set(range(len(numbers))):
        raise DataError(
            f"rows={list(rows)}: must be numbered 0, 1, ... in order. Give the responses of a row one after another"
        )
    by_response = {
        "prompts": len(prompts),
        "responses": len(responses),
        "trainable": len(trainable),
        "rows": len(rows),
    }
    for counts in (by_response, {"rows": len(numbers), "groups": len(groups)}):
        if len(set(counts.values())) > 1:
            raise DataError(
                f"the columns have different numbers of rows: {counts}. Give each of them one entry for each row"
            )
    for row, (prompt, response, flags) in enumerate(zip(prompts, responses, trainable, strict=True)):
        if not prompt or not response:
            raise DataError(
                f"row {row}: prompt of {len(prompt)} and response of {len(response)} tokens: both need at least one"
            )
        if len(flags) != len(response):
            raise DataError(
                f"row {row}: {len(flags)} trainable flags for {len(response)} response tokens: must be one for each "
                "token"
            )


def parts_of_batch(batch: TokenBatch, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a batch, by name after the prefix, and its fields that are tuples, by name."""
    tensors = {f"{prefix}{name}": tensor.contiguous() for name, tensor in batch.tensors().items()}
    host = {name: value for name, value in batch.given().items() if isinstance(value, tuple)}
    host["images"] = tuple(None if images is None else images.runs for images in batch.images)
    for prompt, images in enumerate(batch.images):
        inputs = {} if images is None else images.inputs
        tensors |= {f"{prefix}{_IMAGES}{prompt}.{name}": tensor.contiguous() for name, tensor in inputs.items()}
    return tensors, host


def batch_of(stage: type[Stage], host: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> Stage:
    """The batch that `parts_of_batch` took apart; tensors with other prefixes are ignored."""
    values: dict[str, Any] = {name: tuple(value) for name, value in host.items()}
    own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    values |= {name: tensor for name, tensor in own.items() if not name.startswith(_IMAGES)}
    values["images"] = tuple(
        None if runs is None else _images_of_file(own, f"{_IMAGES}{prompt}.", runs)
        for prompt, runs in enumerate(host.get("images", ()))
    )
    return stage(**values)


def _images_of_file(tensors: Mapping[str, Tensor], prefix: str, runs: Sequence[Sequence[int]]) -> Images:
    inputs = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return Images(inputs, tuple((start, stop) for start, stop in runs))
