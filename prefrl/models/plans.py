"""Lay out the rows of a TokenBatch for one forward pass: with shared prefixes, packed, or padded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import torch

from prefrl.distributed import place_in_team, team_size
from prefrl.models.attention.interface import Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from prefrl.models.images import ImageRules
    from prefrl.types import Images, TokenBatch

__all__ = [
    "FlatInputs",
    "ForwardPlan",
    "ModelInputs",
    "PaddedInputs",
    "Plan",
    "Verdict",
    "lay_out",
    "own_part",
    "padded_with",
    "part_of",
]

ForwardPlan = Literal["shared_prefix", "packed", "padded"]
Plan = Literal["auto", "shared_prefix", "packed", "padded"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a plan does not work, by plan. Plans that are not listed reproduce the model's own log-probs or scores."""

    reasons: Mapping[ForwardPlan, str]
    image_reasons: Mapping[ForwardPlan, str]  # the same for rows with images
    own_logits: bool  # the padded plan needs the model's own forward, head included
    fingerprint: tuple[object, ...]  # of the model that was checked


@dataclass(frozen=True, eq=False, kw_only=True)
class FlatInputs:
    """One flat row, and where in the model's output each response token is predicted."""

    input_ids: Tensor  # [1, T] int64
    # [1, T] int64; with positions in time, height and width [4, 1, T]: the number of tokens before each, then these.
    position_ids: Tensor
    layout: Layout
    predictors: Tensor  # [N] int64: position in the whole row whose output predicts each response token
    ends: tuple[int, ...]  # R entries: the segment of the layout in which each response ends, its last token left out
    images: Mapping[str, Tensor] = field(default_factory=dict)  # what the model reads besides, if there are images
    start: int = 0  # offset of `input_ids` in the whole row

    @property
    def keywords(self) -> dict[str, Tensor]:
        """The keyword arguments of the model's forward."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, **self.images}


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddedInputs:
    """Padded sequences, whose positions the model numbers itself, and where each response token is predicted."""

    input_ids: Tensor  # [R, width] int64
    attention_mask: Tensor  # [R, width] int64, 1 on tokens
    predictors: Tensor  # [N] int64: position in the flattened `input_ids` whose output predicts each response token
    images: Mapping[str, Tensor] = field(default_factory=dict)  # what the model reads besides, if there are images

    @property
    def keywords(self) -> dict[str, Tensor]:
        """The keyword arguments of the model's forward."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, **self.images}


ModelInputs = FlatInputs | PaddedInputs


def lay_out(batch: TokenBatch, plan: ForwardPlan, rules: ImageRules | None = None) -> ModelInputs:
    """The model's inputs for the batch, on its device. Indices are computed on the host and never wait for the device.

    The last token of a response is not fed to the model, because its prediction is not needed.

    Args:
        batch: At least one row.
        plan: How the rows are laid out.
        rules: How the model reads images; needed if the batch has some.

    Raises:
        ValueError: The batch has no rows, or images that the model cannot read.
    """
    if batch.num_rows == 0:
        raise ValueError(
            "TokenBatch has 0 rows: must have at least one for a forward pass. On a process without rows, use an "
            "idle row."
        )
    if batch.has_images and rules is None:
        raise ValueError("TokenBatch has images: the model has no vision tower. Prepare the dataset without images.")
    if plan == "padded":
        return _padded(batch, rules)
    source = _Source(batch, rules)
    responses = [source.response(i) for i in range(batch.num_responses)]
    if plan == "shared_prefix":
        prompts = [source.prompt(prompt) for prompt in range(batch.num_prompts)]
        return _flat(source, [*prompts, *responses], [*batch.prompt_parent, *batch.prompt_index], batch.images)
    contexts = [source.context(i) for i in range(batch.num_responses)]
    images = [batch.images_of(i) for i in range(batch.num_responses)]
    return _flat(source, [*contexts, *responses], [*[-1] * len(contexts), *range(len(contexts))], images)


def padded_with(inputs: ModelInputs, token: int | None) -> ModelInputs:
    """Padded sequences with another token in the place of padding; flat inputs, and those for None, unchanged."""
    if token is None or not isinstance(inputs, PaddedInputs):
        return inputs
    return replace(inputs, input_ids=inputs.input_ids.masked_fill(inputs.attention_mask == 0, token))


def own_part(inputs: ModelInputs) -> ModelInputs:
    """The part that this process computes of inputs that all processes of its team have."""
    if team_size() == 1 or not isinstance(inputs, FlatInputs):
        return inputs
    return part_of(inputs, place_in_team(), team_size())


def part_of(inputs: FlatInputs, place: int, num_parts: int) -> FlatInputs:
    """The part of a flat row for one of `num_parts` processes. All parts have equally many tokens, in order.

    A padding sequence, which nothing reads, makes the number of tokens divisible.
    """
    padding = -inputs.input_ids.size(1) % num_parts
    width = (inputs.input_ids.size(1) + padding) // num_parts
    start = place * width

    def part(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, padding))[:, start : start + width]

    return replace(
        inputs,
        input_ids=part(inputs.input_ids),
        position_ids=part(inputs.position_ids),
        layout=Layout((*inputs.layout.forest, *([(padding, -1)] if padding else [])), num_parts),
        start=start,
    )


def _starts(lengths: Sequence[int], first: int = 0) -> list[int]:
    return list(accumulate(lengths, initial=first))[:-1]


class _Source:
    """Positions of prompts and responses in `cat([prompt_ids, response_ids])`."""

    def __init__(self, batch: TokenBatch, rules: ImageRules | None) -> None:
        self.batch, self.rules = batch, rules
        self.prompt_starts = _starts(batch.prompt_lengths)
        self.response_starts = _starts(batch.response_lengths, sum(batch.prompt_lengths))

    def prompt(self, prompt: int) -> Tensor:
        """Positions of a prompt's own tokens."""
        return _range(self.prompt_starts[prompt], self.batch.prompt_lengths[prompt])

    def context(self, response: int) -> Tensor:
        """Positions of all tokens before a response."""
        return torch.cat([self.prompt(prompt) for prompt in self.batch.contexts[response]])

    def response(self, response: int) -> Tensor:
        """Positions of all tokens of a response but the last."""
        return _range(self.response_starts[response], self.batch.response_lengths[response] - 1)

    def take(self, index: Tensor, *, padding: bool = False) -> Tensor:
        """The tokens at `index`; with padding, the index one past the end is token 0."""
        batch = self.batch
        parts = [batch.prompt_ids, batch.response_ids]
        if padding:
            parts.append(batch.response_ids.new_zeros(1))
        return torch.cat(parts)[index.to(batch.device, non_blocking=True)]


def _range(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length)


def _flat(
    source: _Source, tokens: Sequence[Tensor], parents: Sequence[int], images: Sequence[Images | None]
) -> FlatInputs:
    """One flat row of contexts and responses, depth first; one that its parent has for an only child extends it.

    Args:
        source: The batch.
        tokens: Positions of the tokens of each context, then of each response.
        parents: Number of the context that a context or response continues, always a smaller one; -1: none.
        images: Of each context without a parent, and of what continues it; empty if there are none.
    """
    batch, device = source.batch, source.batch.device
    responses = range(len(tokens) - batch.num_responses, len(tokens))
    children = _children(parents, responses)
    order = _depth_first(children)
    segments = _Segments()
    segment, start, position, root = ([0] * len(tokens) for _ in range(4))  # by context or response
    cursor = 0
    for node in order:
        parent, length = parents[node], len(tokens[node])
        root[node] = root[parent] if parent >= 0 else node
        position[node] = position[parent] + len(tokens[parent]) if parent >= 0 else 0
        segments.add(
            _cut(position[node], length, images[root[node]] if images else None, source.rules),
            parent=segment[parent] if parent >= 0 else -1,
            extends=parent >= 0 and len(children[parent]) == 1,
        )
        # A response of one token has none that is fed: its sequence ends with its context.
        is_empty = length == 0 and parent >= 0
        segment[node], start[node] = segment[parent] if is_empty else len(segments.forest) - 1, cursor
        cursor += length
    predictors = []
    for node in responses:
        context = parents[node]
        last_of_context = start[context] + len(tokens[context]) - 1
        predictors += [torch.tensor([last_of_context]), _range(start[node], len(tokens[node]))]
    found = {node: one for node in order if images and parents[node] < 0 and (one := images[node]) is not None}
    spans = [(root[node], position[node], len(tokens[node])) for node in order]
    return FlatInputs(
        input_ids=source.take(torch.cat([tokens[node] for node in order]))[None],
        position_ids=_positions(spans, found, source.rules).to(device, non_blocking=True),
        predictors=torch.cat(predictors).to(device, non_blocking=True),
        layout=Layout(tuple(segments.forest), blocks=frozenset(segments.blocks)),
        ends=tuple(segment[node] for node in responses),
        images=source.rules.join(list(found.values()), device) if found and source.rules else {},
    )


class _Segments:
    """The segments of a flat row, added in order."""

    def __init__(self) -> None:
        self.forest: list[tuple[int, int]] = []
        self.blocks: set[int] = set()

    def add(self, pieces: Sequence[tuple[int, bool]], *, parent: int, extends: bool) -> None:
        """Add pieces that follow each other.

        Args:
            pieces: The length of each, and whether its tokens see all of it.
            parent: The segment that the first piece continues; -1: none.
            extends: Nothing else continues the parent, which is the last segment.
        """
        for length, is_block in pieces:
            if extends and not is_block and parent not in self.blocks:
                self.forest[-1] = (self.forest[-1][0] + length, self.forest[-1][1])
            elif length > 0:
                self.forest.append((length, parent))
                if is_block:
                    self.blocks.add(len(self.forest) - 1)
            parent, extends = len(self.forest) - 1, True


def _cut(start: int, length: int, images: Images | None, rules: ImageRules | None) -> list[tuple[int, bool]]:
    """The pieces of some tokens of a sequence: their lengths, and whether they are images whose tokens see each other.

    Args:
        start: Number of tokens before them.
        length: Their number.
        images: Of the sequence.
        rules: How the model reads images.
    """
    if images is None or rules is None or not rules.has_blocks:
        return [(length, False)]
    pieces, cursor = [], start
    for first, stop in images.runs:
        if start <= first and stop <= start + length:
            pieces += [(first - cursor, False), (stop - first, True)]
            cursor = stop
    return [*pieces, (start + length - cursor, False)]


def _positions(
    spans: Sequence[tuple[int, int, int]], images: Mapping[int, Images], rules: ImageRules | None
) -> Tensor:
    """[1, T] numbers of tokens before each token; if images have positions in space, [4, 1, T] with those below.

    Args:
        spans: Of consecutive tokens: the sequence that they belong to, the number of tokens before them, their number.
        images: By sequence.
        rules: How the model reads images.
    """
    plain = torch.cat([_range(start, length) for _, start, length in spans])[None]
    if not images or rules is None or rules.rope_index is None:
        return plain
    found = {sequence: rules.positions(one) for sequence, one in images.items()}
    parts = [
        found[sequence].of(start, length) if sequence in found else _range(start, length).expand(3, -1)
        for sequence, start, length in spans
    ]
    return torch.cat([plain, torch.cat(parts, 1)])[:, None]


def _children(parents: Sequence[int], leaves: Iterable[int]) -> dict[int, list[int]]:
    """The children of each node in order of first use, the roots as those of -1; what leads to no leaf is left out."""
    children: dict[int, list[int]] = {}
    used = {-1}
    for node in leaves:
        while node not in used:
            used.add(node)
            children.setdefault(parents[node], []).append(node)
            node = parents[node]
    return children


def _depth_first(children: Mapping[int, Sequence[int]]) -> list[int]:
    """All nodes below -1, each directly before its descendants."""
    order: list[int] = []
    waiting = [-1]
    while waiting:
        order.append(waiting.pop())
        waiting += reversed(children.get(order[-1], ()))
    return order[1:]


def _padded(batch: TokenBatch, rules: ImageRules | None) -> PaddedInputs:
    """[R, width]: each response after its context, then token 0 up to the longest sequence."""
    source = _Source(batch, rules)
    responses = range(batch.num_responses)
    sequences = [torch.cat([source.context(i), source.response(i)]) for i in responses]
    padding = len(batch.prompt_ids) + len(batch.response_ids)
    index = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=padding)
    width = index.size(1)
    firsts = [i * width + batch.context_lengths[i] - 1 for i in responses]
    predictors = [_range(first, length) for first, length in zip(firsts, batch.response_lengths, strict=True)]
    return PaddedInputs(
        input_ids=source.take(index, padding=True),
        attention_mask=(index != padding).long().to(batch.device, non_blocking=True),
        predictors=torch.cat(predictors).to(batch.device, non_blocking=True),
        images=_padded_images([batch.images_of(i) for i in responses], width, rules, batch.device),
    )


def _padded_images(
    images: Sequence[Images | None], width: int, rules: ImageRules | None, device: torch.device
) -> dict[str, Tensor]:
    """What the model reads besides padded sequences, of which some have images."""
    found = [one for one in images if one is not None]
    if not found or rules is None:
        return {}
    types = rules.types(images, width).to(device, non_blocking=True)
    return {**rules.join(found, device), **dict.fromkeys(rules.type_names, types)}
