"""Lay out the rows of a TokenBatch for one forward pass: with shared prefixes, packed, or padded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from prefrl.distributed import shape_of
from prefrl.models.attention.segments import Layout
from prefrl.types import unknown_routes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from prefrl.models.images import ImageRules
    from prefrl.types import Images, TokenBatch

ForwardPlan = Literal["shared_prefix", "packed", "padded"]
Plan = Literal["auto", "shared_prefix", "packed", "padded"]


@dataclass(frozen=True, slots=True)
class PlanVerdict:
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
    routes: Tensor | None = None  # [T, L, k] the experts of each token, see `TokenBatch`; None: routers choose

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
    routes: Tensor | None = None  # [R * width, L, k] as in `FlatInputs`; those of padding are unknown

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
    # Positions in `cat([prompt_ids, response_ids])`.
    every = torch.arange(len(batch.prompt_ids) + len(batch.response_ids))
    own = torch.split(every, [*batch.prompt_lengths, *batch.response_lengths])
    prompts, responses = own[: batch.num_prompts], [tokens[:-1] for tokens in own[batch.num_prompts :]]
    if plan == "shared_prefix":
        return _flat(batch, [*prompts, *responses], [*batch.prompt_parent, *batch.prompt_index], batch.images, rules)
    numbers = range(batch.num_responses)
    contexts = [torch.cat([prompts[prompt] for prompt in batch.contexts[i]]) for i in numbers]
    images = [batch.images_of(i) for i in numbers] if batch.has_images else []
    if plan == "padded":
        return _padded(batch, contexts, responses, images, rules)
    return _flat(batch, [*contexts, *responses], [*[-1] * len(contexts), *numbers], images, rules)


def padded_with(inputs: ModelInputs, token: int | None) -> ModelInputs:
    """Padded sequences with another token in the place of padding; flat inputs, and those for None, unchanged."""
    if token is None or not isinstance(inputs, PaddedInputs):
        return inputs
    return replace(inputs, input_ids=inputs.input_ids.masked_fill(inputs.attention_mask == 0, token))


def part_of(inputs: FlatInputs, place: int, num_parts: int) -> FlatInputs:
    """The part of a flat row for one of `num_parts` processes. All parts have equally many tokens, in order.

    A padding sequence, which nothing reads, makes the number of tokens divisible.
    """
    padding = -inputs.input_ids.size(1) % num_parts
    width = (inputs.input_ids.size(1) + padding) // num_parts
    start = place * width

    def part(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, padding))[:, start : start + width]

    routes = inputs.routes
    if routes is not None:
        routes = torch.cat([routes, unknown_routes(routes, padding)])[start : start + width]
    return replace(
        inputs,
        routes=routes,
        input_ids=part(inputs.input_ids),
        position_ids=part(inputs.position_ids),
        layout=Layout((*inputs.layout.forest, *([(padding, -1)] if padding else [])), num_parts),
        start=start,
    )


def _flat(
    batch: TokenBatch,
    tokens: Sequence[Tensor],
    parents: Sequence[int],
    images: Sequence[Images | None],
    rules: ImageRules | None,
) -> FlatInputs:
    """One flat row of contexts and responses, depth first; one that its parent has for an only child extends it.

    Args:
        batch: What is laid out.
        tokens: Positions of the tokens of each context, then of each response.
        parents: Number of the context that a context or response continues, always a smaller one; -1: none.
        images: Of each context without a parent, and of what continues it; empty if there are none.
        rules: How the model reads images.
    """
    responses = range(len(tokens) - batch.num_responses, len(tokens))
    lengths = [len(each) for each in tokens]
    children, order = _depth_first(parents, responses)
    forest: list[tuple[int, int]] = []
    blocks: set[int] = set()
    segment, start, position, root = ([0] * len(tokens) for _ in range(4))  # by context or response
    cursor = 0
    for node in order:
        parent, length = parents[node], lengths[node]
        root[node] = root[parent] if parent >= 0 else node
        position[node] = position[parent] + lengths[parent] if parent >= 0 else 0
        one = images[root[node]] if images and rules is not None and rules.has_blocks else None
        _add_segments(
            forest,
            blocks,
            [(length, False)] if one is None else _cut(position[node], length, one),
            parent=segment[parent] if parent >= 0 else -1,
            extends=parent >= 0 and len(children[parent]) == 1,
        )
        # A response of one token has none that is fed: its sequence ends with its context.
        is_empty = length == 0 and parent >= 0
        segment[node], start[node] = segment[parent] if is_empty else len(forest) - 1, cursor
        cursor += length
    predictors = []
    for node in responses:
        last_of_context = start[parents[node]] + lengths[parents[node]] - 1
        predictors += [torch.tensor([last_of_context]), torch.arange(start[node], start[node] + lengths[node])]
    found = {node: one for node in order if images and parents[node] < 0 and (one := images[node]) is not None}
    ids = torch.cat([batch.prompt_ids, batch.response_ids])
    index = torch.cat([tokens[node] for node in order]).to(batch.device, non_blocking=True)
    position_ids = torch.cat([torch.arange(position[node], position[node] + lengths[node]) for node in order])[None]
    if found and rules is not None and rules.rope_index is not None:
        spans = [(root[node], position[node], lengths[node]) for node in order]
        position_ids = torch.cat([position_ids, _positions_in_space(spans, found, rules)])[:, None]
    return FlatInputs(
        input_ids=ids[index][None],
        position_ids=position_ids.to(batch.device, non_blocking=True),
        predictors=torch.cat(predictors).to(batch.device, non_blocking=True),
        layout=Layout(tuple(forest), blocks=frozenset(blocks)),
        ends=tuple(segment[node] for node in responses),
        images=rules.join(list(found.values()), batch.device) if found and rules else {},
        routes=None if batch.prompt_routes is None else _all_routes(batch)[index],
    )


def _all_routes(batch: TokenBatch) -> Tensor:
    """The routes of all tokens of prompts, then of responses, and unknown ones for padding."""
    assert batch.prompt_routes is not None
    assert batch.response_routes is not None
    return torch.cat([batch.prompt_routes, batch.response_routes, unknown_routes(batch.prompt_routes, 1)])


def _add_segments(
    forest: list[tuple[int, int]],
    blocks: set[int],
    pieces: Sequence[tuple[int, bool]],
    *,
    parent: int,
    extends: bool,
) -> None:
    """Add pieces that follow each other to a layout's forest and blocks.

    Args:
        forest: See `Layout`; its last segment may grow.
        blocks: See `Layout`.
        pieces: The length of each, and whether its tokens see all of it.
        parent: The segment that the first piece continues; -1: none.
        extends: Nothing else continues the parent, which is the last segment.
    """
    for length, is_block in pieces:
        if extends and not is_block and parent not in blocks:
            forest[-1] = (forest[-1][0] + length, forest[-1][1])
        elif length > 0:
            forest.append((length, parent))
            if is_block:
                blocks.add(len(forest) - 1)
        parent, extends = len(forest) - 1, True


def _cut(start: int, length: int, images: Images) -> list[tuple[int, bool]]:
    """The pieces of some tokens of a sequence: their lengths, and whether they are images whose tokens see each other.

    Args:
        start: Number of tokens before them.
        length: Their number.
        images: Of the sequence.
    """
    pieces, cursor = [], start
    for first, stop in images.runs:
        if start <= first and stop <= start + length:
            pieces += [(first - cursor, False), (stop - first, True)]
            cursor = stop
    return [*pieces, (start + length - cursor, False)]


def _positions_in_space(
    spans: Sequence[tuple[int, int, int]], images: Mapping[int, Images], rules: ImageRules
) -> Tensor:
    """[3, T] positions of tokens in time, height and width.

    Args:
        spans: Of consecutive tokens: the sequence that they belong to, the number of tokens before them, their number.
        images: By sequence.
        rules: How the model reads images.
    """
    found = {sequence: rules.positions(one) for sequence, one in images.items()}
    parts = [
        found[sequence].of(start, length) if sequence in found else torch.arange(start, start + length).expand(3, -1)
        for sequence, start, length in spans
    ]
    return torch.cat(parts, 1)


def _depth_first(parents: Sequence[int], leaves: Iterable[int]) -> tuple[dict[int, list[int]], list[int]]:
    """The children of each node, and all nodes that lead to a leaf, each directly before its descendants.

    Children stand in order of first use, the roots as those of -1.
    """
    children: dict[int, list[int]] = {}
    used = {-1}
    for node in leaves:
        while node not in used:
            used.add(node)
            children.setdefault(parents[node], []).append(node)
            node = parents[node]
    order: list[int] = []
    waiting = [-1]
    while waiting:
        order.append(waiting.pop())
        waiting += reversed(children.get(order[-1], ()))
    return children, order[1:]


def _padded(
    batch: TokenBatch,
    contexts: Sequence[Tensor],
    responses: Sequence[Tensor],
    images: Sequence[Images | None],
    rules: ImageRules | None,
) -> PaddedInputs:
    """[R, width]: each response after its context, then token 0 up to the longest sequence."""
    sequences = [torch.cat(parts) for parts in zip(contexts, responses, strict=True)]
    padding = len(batch.prompt_ids) + len(batch.response_ids)
    index = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=padding)
    is_token, width = index != padding, index.size(1)
    index = index.to(batch.device, non_blocking=True)
    firsts = [row * width + len(context) - 1 for row, context in enumerate(contexts)]
    predictors = [
        torch.arange(first, first + length) for first, length in zip(firsts, batch.response_lengths, strict=True)
    ]
    ids = torch.cat([batch.prompt_ids, batch.response_ids, batch.response_ids.new_zeros(1)])
    return PaddedInputs(
        input_ids=ids[index],
        attention_mask=is_token.long().to(batch.device, non_blocking=True),
        predictors=torch.cat(predictors).to(batch.device, non_blocking=True),
        images=_padded_images(images, width, rules, batch.device),
        routes=None if batch.prompt_routes is None else _all_routes(batch)[index.flatten()],
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


@dataclass(frozen=True)
class PositionLimit:
    """The most tokens of a row, `max_position_embeddings` in the model's config.

    Args:
        count: Number of positions.
        is_table: The model looks positions up in a table, which has no more of them. Otherwise it computes them, and
            the limit is what its config says that it was trained for.
        is_scaled: It stretches the positions that it computes, which its limit may not tell.
    """

    count: int
    is_table: bool
    is_scaled: bool = False


def position_limit(model: PreTrainedModel) -> PositionLimit | None:
    """The limit of a model; None if its config names none."""
    config = model.config.get_text_config()
    count = getattr(config, "max_position_embeddings", None)
    if not isinstance(count, int) or count < 1:
        return None
    tokens = model.get_input_embeddings().weight
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is not tokens]
    tables += [buffer for buffer in model.buffers() if buffer.dim() == 2]
    # OPT and similar models have two more rows, for padding.
    is_table = any(count <= shape_of(table)[0] <= count + 2 for table in tables)
    # Rotary embeddings, in all layers or in those of one type.
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    is_scaled = any(kind.get("rope_type", "default") != "default" for kind in kinds)
    return PositionLimit(count, is_table, is_scaled)
