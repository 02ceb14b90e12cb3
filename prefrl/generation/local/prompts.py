"""The prompts of a call, the rows that continue them, and where their tokens are. Legend: R rows, W tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from prefrl.models.images import RowPositions
    from prefrl.types import Images

__all__ = ["DistinctPrompt", "SampleRow", "batches_of", "in_space"]


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
    columns = []
    for row, place in zip(positions, places, strict=True):
        if place is None:
            columns.append(row.expand(3, -1))
        else:
            columns.append(place.of(0, length).to(row.device, non_blocking=True)[:, row.clamp(min=0)])
    return torch.cat([positions[:, None], torch.stack(columns)], 1)
