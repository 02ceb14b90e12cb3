"""Lay out the rows of a TokenBatch for one forward pass: with shared prefixes, packed, or padded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import torch

from prefrl.distributed import place_in_team, team_size
from prefrl.models.attention.interface import Layout, Tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from prefrl.types import TokenBatch

__all__ = ["ForwardPlan", "ModelInputs", "Plan", "Verdict", "lay_out", "own_part", "part_of"]

ForwardPlan = Literal["shared_prefix", "packed", "padded"]
Plan = Literal["auto", "shared_prefix", "packed", "padded"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a plan does not work, by plan. Plans that are not listed reproduce the model's own log-probs or scores."""

    reasons: Mapping[ForwardPlan, str]
    own_logits: bool  # the padded plan needs the model's own forward, head included
    fingerprint: tuple[object, ...]  # of the model that was checked


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """The model's inputs, and where in its output each response token is predicted."""

    input_ids: Tensor  # [1, T] int64 of a flat row; padded: [B, width]
    position_ids: Tensor | None  # [1, T] int64; padded: None, the model numbers positions itself
    attention_mask: Tensor | None  # padded: [B, width] int64, 1 on tokens
    predictors: Tensor  # [N] int64: position in the flattened input_ids whose output predicts each response token
    layout: Layout | None  # of a flat row
    start: int = 0  # offset of `input_ids` in the flat row; `predictors` are positions in the whole row


def lay_out(batch: TokenBatch, plan: ForwardPlan) -> ModelInputs:
    """The model's inputs for the batch, on its device. Indices are computed on the host and never wait for the device.

    The last token of a response is not fed to the model, because its prediction is not needed.

    Raises:
        ValueError: The batch has no rows.
    """
    if batch.num_rows == 0:
        raise ValueError(
            "TokenBatch has 0 rows: must have at least one for a forward pass. On a process without rows, use an "
            "idle row."
        )
    if plan == "padded":
        return _padded(batch)
    groups = _rows_by_prompt(batch) if plan == "shared_prefix" else [[row] for row in range(batch.num_rows)]
    return _flat(batch, groups)


def own_part(inputs: ModelInputs) -> ModelInputs:
    """The part that this process computes of inputs that all processes of its team have."""
    if team_size() == 1 or inputs.layout is None:
        return inputs
    return part_of(inputs, place_in_team(), team_size())


def part_of(inputs: ModelInputs, place: int, num_parts: int) -> ModelInputs:
    """The part of a flat row for one of `num_parts` processes. All parts have equally many tokens, in order.

    A padding sequence, which nothing reads, makes the number of tokens divisible.
    """
    assert inputs.layout is not None
    assert inputs.position_ids is not None
    padding = -inputs.input_ids.size(1) % num_parts
    width = (inputs.input_ids.size(1) + padding) // num_parts
    start = place * width

    def part(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, padding))[:, start : start + width]

    return replace(
        inputs,
        input_ids=part(inputs.input_ids),
        position_ids=part(inputs.position_ids),
        layout=Layout((*inputs.layout.trees, *([Tree(padding)] if padding else [])), num_parts),
        start=start,
    )


def _rows_by_prompt(batch: TokenBatch) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(batch.prompt_index):
        groups.setdefault(prompt, []).append(row)
    return list(groups.values())


def _starts(lengths: Sequence[int], first: int = 0) -> list[int]:
    return list(accumulate(lengths, initial=first))[:-1]


class _Source:
    """Positions of prompts and responses in `cat([prompt_ids, response_ids])`."""

    def __init__(self, batch: TokenBatch) -> None:
        self.batch = batch
        self.prompt_starts = _starts(batch.prompt_lengths)
        self.response_starts = _starts(batch.response_lengths, sum(batch.prompt_lengths))

    def prompt(self, row: int) -> Tensor:
        prompt = self.batch.prompt_index[row]
        return _range(self.prompt_starts[prompt], self.batch.prompt_lengths[prompt])

    def response(self, row: int) -> Tensor:
        """Positions of all tokens of a response but the last."""
        return _range(self.response_starts[row], self.batch.response_lengths[row] - 1)

    def take(self, index: Tensor, *, padding: bool = False) -> Tensor:
        """The tokens at `index`; with padding, the index one past the end is token 0."""
        batch = self.batch
        parts = [batch.prompt_ids, batch.response_ids]
        if padding:
            parts.append(batch.response_ids.new_zeros(1))
        return torch.cat(parts)[index.to(batch.device, non_blocking=True)]


def _range(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length)


def _flat(batch: TokenBatch, groups: list[list[int]]) -> ModelInputs:
    """One flat row: for each group of rows, its prompt once and then their responses; a single row is one sequence."""
    source = _Source(batch)
    index: list[Tensor] = []
    positions: list[Tensor] = []
    predictors: dict[int, Tensor] = {}
    trees: list[Tree] = []
    cursor = 0
    for rows in groups:
        prompt = source.prompt(rows[0])
        responses = [source.response(row) for row in rows]
        index += [prompt, *responses]
        positions += [_range(0, len(prompt)), *(_range(len(prompt), len(response)) for response in responses)]
        branches = [len(response) for response in responses]
        last_of_prompt = torch.tensor([cursor + len(prompt) - 1])
        for row, start, length in zip(rows, _starts(branches, cursor + len(prompt)), branches, strict=True):
            predictors[row] = torch.cat([last_of_prompt, _range(start, length)])
        trees.append(_tree(len(prompt), branches))
        cursor += len(prompt) + sum(branches)
    return ModelInputs(
        input_ids=source.take(torch.cat(index))[None],
        position_ids=torch.cat(positions)[None].to(batch.device, non_blocking=True),
        attention_mask=None,
        predictors=torch.cat([predictors[row] for row in range(batch.num_rows)]).to(batch.device, non_blocking=True),
        layout=Layout(tuple(trees)),
    )


def _tree(trunk: int, branches: list[int]) -> Tree:
    if len(branches) == 1:
        return Tree(trunk + branches[0])
    return Tree(trunk, tuple(length for length in branches if length > 0))


def _padded(batch: TokenBatch) -> ModelInputs:
    """[B, width]: each row's prompt and response, then token 0 up to the longest row."""
    source = _Source(batch)
    sequences = [torch.cat([source.prompt(row), source.response(row)]) for row in range(batch.num_rows)]
    padding = len(batch.prompt_ids) + len(batch.response_ids)
    index = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=padding)
    width = index.size(1)
    firsts = [row * width + batch.prompt_lengths[prompt] - 1 for row, prompt in enumerate(batch.prompt_index)]
    predictors = [_range(first, length) for first, length in zip(firsts, batch.response_lengths, strict=True)]
    return ModelInputs(
        input_ids=source.take(index, padding=True),
        position_ids=None,
        attention_mask=(index != padding).long().to(batch.device, non_blocking=True),
        predictors=torch.cat(predictors).to(batch.device, non_blocking=True),
        layout=None,
    )
