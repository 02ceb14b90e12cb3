"""Token lists to flat batches. Pure functions: no random state, no padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from prefrl.errors import DataError
from prefrl.types import TokenBatch

__all__ = ["flat_batch", "sft_batch"]


def flat_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    trainable: Sequence[Sequence[bool]] | None = None,
    groups: Sequence[int] | None = None,
) -> TokenBatch:
    """Lay rows end to end; rows of a group that have the same prompt share it, wherever in the batch they stand.

    Args:
        prompts: B lists of ids, none empty.
        responses: B lists of ids, none empty.
        trainable: B lists of flags, one for each response token. None: all have a loss.
        groups: B numbers. None: each row is a group of its own.
    Raises:
        DataError: Numbers of rows differ, a prompt or response is empty, or flags and tokens differ in length.
    """
    groups = range(len(responses)) if groups is None else groups
    trainable = [[True] * len(response) for response in responses] if trainable is None else trainable
    _check_rows(prompts, responses, trainable, groups)
    positions: dict[tuple[int, tuple[int, ...]], int] = {}
    keys = [(group, tuple(prompt)) for group, prompt in zip(groups, prompts, strict=True)]
    prompt_index = tuple(positions.setdefault(key, len(positions)) for key in keys)
    shared = [prompt for _, prompt in positions]
    return TokenBatch(
        prompt_ids=torch.tensor(list(chain.from_iterable(shared)), dtype=torch.long),
        prompt_lengths=tuple(len(prompt) for prompt in shared),
        prompt_index=prompt_index,
        response_ids=torch.tensor(list(chain.from_iterable(responses)), dtype=torch.long),
        response_lengths=tuple(len(response) for response in responses),
        trainable=torch.tensor(list(chain.from_iterable(trainable)), dtype=torch.bool),
        group_index=tuple(groups),
    )


def sft_batch(rows: Sequence[Mapping[str, Any]]) -> TokenBatch:
    """Rows of a prepared SFT dataset as a batch: what stands before the first token with a loss is the prompt.

    Tokens after the last one with a loss are left out: nothing depends on them. A packed row gives one row for each of
    its sequences that has a loss.

    Args:
        rows: `input_ids`, `trainable`, and for packed rows `seq_lengths`.
    Raises:
        DataError: A row's first token is marked trainable, flags and tokens differ in length, or a row that is not
            packed has no token with a loss.
    """
    prompts, responses, flags = [], [], []
    for token_ids, trainable in chain.from_iterable(_sequences(row, index) for index, row in enumerate(rows)):
        first = trainable.index(True)
        stop = len(trainable) - trainable[::-1].index(True)
        prompts.append(token_ids[:first])
        responses.append(token_ids[first:stop])
        flags.append(trainable[first:stop])
    return flat_batch(prompts, responses, trainable=flags)


def _sequences(row: Mapping[str, Any], index: int) -> Iterator[tuple[list[int], list[bool]]]:
    token_ids, trainable = list(row["input_ids"]), list(row["trainable"])
    lengths = row.get("seq_lengths") or [len(token_ids)]
    if len(token_ids) != len(trainable) or len(token_ids) != sum(lengths):
        raise DataError(
            f"row {index} of the batch: {len(token_ids)} input_ids, {len(trainable)} trainable flags and sequences of "
            f"{sum(lengths)} tokens: needs equal numbers. Prepare it with prepare_sft_dataset"
        )
    if not any(trainable):
        raise DataError(f"row {index} of the batch has no trainable token. Drop such rows before training")
    stop = 0
    for length in lengths:
        start, stop = stop, stop + length
        if not any(trainable[start:stop]):
            continue
        if trainable[start]:
            raise DataError(
                f"row {index} of the batch: the first token of a sequence (position {start}) is marked trainable, "
                "but nothing predicts it. Set its flag to False"
            )
        yield token_ids[start:stop], trainable[start:stop]


def _check_rows(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    trainable: Sequence[Sequence[bool]],
    groups: Sequence[int],
) -> None:
    counts = {"prompts": len(prompts), "responses": len(responses), "trainable": len(trainable), "groups": len(groups)}
    if len(set(counts.values())) > 1:
        raise DataError(f"numbers of rows differ: {counts}. Give one entry for each row to all of them")
    for row, (prompt, response, flags) in enumerate(zip(prompts, responses, trainable, strict=True)):
        if not prompt or not response:
            raise DataError(
                f"row {row}: prompt of {len(prompt)} and response of {len(response)} tokens: both need at least one"
            )
        if len(flags) != len(response):
            raise DataError(f"row {row}: {len(flags)} trainable flags for {len(response)} response tokens")
