"""What decodes together: distinct prompts, which are computed once, and the rows that are sampled from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from prefrl.generation.local.decoding import (
    keep_rows,
    rows_of_cache,
    sent,
    uniform_numbers,
)
from prefrl.models.images import RowPositions
from prefrl.types import Completion

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache

    from prefrl.generation.local.decoding import Draw
    from prefrl.types import FinishReason, Images


@dataclass(frozen=True, slots=True)
class DistinctPrompt:
    """A prompt; equal ones, with the same images, are computed once."""

    ids: tuple[int, ...]
    images: Images | None


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Sample number `sample` of prompt number `request` in the call."""

    request: int
    sample: int


def batches_of(
    prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None, num_samples: int, max_rows: int
) -> list[dict[DistinctPrompt, list[SampleRow]]]:
    """Distinct prompts with their rows, in batches of similar lengths with at most `max_rows` rows, or one prompt."""
    rows: dict[DistinctPrompt, list[SampleRow]] = {}
    for request, prompt in enumerate(prompts):
        one = DistinctPrompt(tuple(prompt), None if images is None else images[request])
        rows.setdefault(one, []).extend(SampleRow(request, sample) for sample in range(num_samples))
    batches: list[dict[DistinctPrompt, list[SampleRow]]] = []
    num_rows = max_rows
    for one in sorted(rows, key=lambda one: len(one.ids)):
        if num_rows + len(rows[one]) > max_rows:
            batches.append({})
            num_rows = 0
        batches[-1][one] = rows[one]
        num_rows += len(rows[one])
    return batches


def in_space(positions: Tensor, places: Sequence[RowPositions | None]) -> Tensor:
    """[R, 4, W] the positions [R, W] of rows, and those in time, height and width below."""
    length = positions.size(1)
    columns = [
        row.expand(3, -1)
        if place is None
        else place.of(0, length).to(row.device, non_blocking=True)[:, row.clamp(min=0)]
        for row, place in zip(positions, places, strict=True)
    ]
    return torch.cat([positions[:, None], torch.stack(columns)], 1)


@dataclass(frozen=True, slots=True)
class Prefill:
    """The state after a batch of prompts, padded to W tokens."""

    cache: Cache
    logits: Tensor  # [P, V] float32, after the last token
    ids: Tensor  # [P, W] int64
    padding: Tensor  # [P] int64, number of padding tokens on the left
    has_padding: bool
    places: Sequence[RowPositions | None]  # [P] positions of prompts whose images have positions in space
    routes: Tensor | None = None  # [P, W, L, k] of all tokens; None: they are not recorded


class Wave:
    """Rows that decode together: the tokens drawn for all of them, and the state of the live (unfinished) ones."""

    def __init__(
        self,
        prefill: Prefill,
        rows: list[tuple[int, SampleRow]],
        seeds: Sequence[int],
        limits: Sequence[int],
        *,
        offloads_cache: bool,
    ) -> None:
        self._limits = [limits[row.request] for _, row in rows]
        self.max_tokens = max(self._limits)
        self._device, self.width = prefill.ids.device, prefill.ids.shape[1]
        self._rows = [row for _, row in rows]
        self._reasons: list[FinishReason] = ["length"] * len(rows)
        self._draws: list[Draw] = []
        self._drawn_for: list[list[int]] = []  # rows of each draw
        # State of the live rows, in the order of the cache.
        self._live = list(range(len(rows)))
        prompts = sent([number for number, _ in rows], self._device)
        # As many numbers as the row's own limit, so that they do not depend on the other rows.
        uniforms = [
            pad(uniform_numbers(seeds[row.request], row.sample, limit), (0, self.max_tokens - limit))
            for row, limit in zip(self._rows, self._limits, strict=True)
        ]
        self.uniforms = torch.stack(uniforms).to(self._device, non_blocking=True)  # [R, T] random numbers
        # [R, W + T] tokens. Padding repeats a prompt token, so the set of tokens is correct.
        self.history = pad(prefill.ids[prompts], (0, self.max_tokens))
        columns = torch.arange(self.width + self.max_tokens, device=self._device)
        padding = prefill.padding[prompts, None]
        self.positions = columns - padding  # [R, W + T], or [R, 4, W + T]
        if any(place is not None for place in prefill.places):
            self.positions = in_space(self.positions, [prefill.places[number] for number, _ in rows])
        self.mask = (columns >= padding).long() if prefill.has_padding else None  # [R, W + T]
        self.cache = rows_of_cache(prefill.cache, prompts, room=self.max_tokens, offloads=offloads_cache)
        self.first_logits = prefill.logits[prompts]
        # Of each row's prompt, and of the tokens of each step that were run; None and empty if they are not recorded.
        self._of_prompts: list[Tensor] | None = None
        self.routes: list[Tensor] = []
        if prefill.routes is not None:
            whole, left = prefill.routes.cpu(), prefill.padding.tolist()
            self._of_prompts = [whole[number, left[number] :] for number, _ in rows]

    @property
    def live_rows(self) -> list[SampleRow]:
        """The rows that are not finished."""
        return [self._rows[row] for row in self._live]

    def advance(self, step: int, draw: Draw, reasons: Sequence[FinishReason | None]) -> list[int]:
        """Store the tokens that were drawn, and remove rows that have stopped or reached their limit.

        Args:
            step: Number of tokens that each live row had before.
            draw: A token for each live row.
            reasons: Why live rows have stopped; None: they have not.
        Returns:
            The positions of the live rows that stay, in their new order.
        """
        self.history[:, self.width + step] = draw.tokens
        self._draws.append(draw)
        self._drawn_for.append(self._live)
        is_done = []
        for row, reason in zip(self._live, reasons, strict=True):
            self._reasons[row] = reason or "length"
            is_done.append(reason is not None or self._limits[row] == step + 1)
        # In an order that moves as few rows as possible: the last ones fill the gaps.
        num_kept = len(is_done) - sum(is_done)
        movers = (place for place in range(len(is_done) - 1, num_kept - 1, -1) if not is_done[place])
        kept = [next(movers) if is_done[place] else place for place in range(num_kept)]
        if kept and len(kept) < len(reasons):
            chosen = sent(kept, self._device)
            self._live = [self._live[place] for place in kept]
            self.uniforms, self.history, self.positions = (
                state[chosen] for state in (self.uniforms, self.history, self.positions)
            )
            self.mask = None if self.mask is None else self.mask[chosen]
            keep_rows(self.cache, kept, self._device)
        return kept

    def completions(self, version: int) -> dict[SampleRow, Completion]:
        """The completions of all rows, on the host."""
        tokens: list[list[int]] = [[] for _ in self._rows]
        logprobs: list[list[float]] = [[] for _ in self._rows]
        drawn = zip(
            chain.from_iterable(self._drawn_for),
            torch.cat([draw.tokens for draw in self._draws]).tolist(),
            torch.cat([draw.logprobs for draw in self._draws]).tolist(),
            strict=True,
        )
        for row, token, logprob in drawn:
            tokens[row].append(token)
            logprobs[row].append(logprob)
        routes: Sequence[Tensor | None] = [None] * len(tokens)
        if self._of_prompts is not None:
            routes = _routes_of_rows(self._of_prompts, self.routes, self._drawn_for[1:], [len(ids) for ids in tokens])
        return {
            row: Completion(
                token_ids=tokens[number],
                finish_reason=self._reasons[number],
                logprobs=logprobs[number],
                trainable=[True] * len(tokens[number]),
                policy_versions=[version] * len(tokens[number]),
                routes=routes[number],
            )
            for number, row in enumerate(self._rows)
        }


def _routes_of_rows(
    of_prompts: Sequence[Tensor],
    of_steps: Sequence[Tensor],
    rows_of_steps: Sequence[Sequence[int]],
    lengths: Sequence[int],
) -> list[Tensor]:
    """The experts of all tokens of each row that were run, on the host; see `Completion.routes`.

    Args:
        of_prompts: [R] those of each row's prompt.
        of_steps: Of each step, [rows that ran, L, k].
        rows_of_steps: Of each step, the rows that ran, in their order.
        lengths: [R] tokens that were drawn for each row, of which the last was not run.
    """
    owners = torch.tensor([row for rows in rows_of_steps for row in rows], dtype=torch.long)
    ran = torch.cat([of_prompts[0][:0], *(routes.cpu() for routes in of_steps)])
    parts = torch.split(ran[owners.argsort(stable=True)], [length - 1 for length in lengths])
    return [torch.cat(of_row) for of_row in zip(of_prompts, parts, strict=True)]
