"""The parts of a flat row that processes share."""

from __future__ import annotations

import pytest
import torch

from prefrl.models.plans import ForwardPlan, lay_out, part_of
from tests.assets import ragged_batch


@pytest.mark.parametrize("plan", ["shared_prefix", "packed"])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 64])  # 64: more than there are tokens
def test_parts_are_equally_long_and_make_up_the_row(plan: ForwardPlan, num_parts: int) -> None:
    row = lay_out(ragged_batch(), plan)
    assert row.position_ids is not None
    assert row.layout is not None
    parts = [part_of(row, place, num_parts) for place in range(num_parts)]
    total = row.input_ids.size(1)
    width = -(-total // num_parts)
    padding = num_parts * width - total
    assert [part.start for part in parts] == [place * width for place in range(num_parts)]
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([getattr(part, name) for part in parts], 1)
        assert joined.size(1) == num_parts * width
        assert torch.equal(joined[:, :total], getattr(row, name))
        assert not joined[:, total:].any()
    for part in parts:
        assert part.layout is not None
        assert part.layout.num_parts == num_parts
        # What fills the row up is a sequence of its own.
        assert part.layout.forest == (*row.layout.forest, *([(padding, -1)] if padding else []))
        assert torch.equal(part.predictors, row.predictors)
