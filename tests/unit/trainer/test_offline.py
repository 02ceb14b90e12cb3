"""The batches of an offline step."""

from __future__ import annotations

from prefrl.trainer.offline.trainer import numbered_apart
from tests.assets import ragged_batch


def test_the_batches_of_a_step_share_no_group() -> None:
    batch = ragged_batch()
    assert batch.group_index == (1, 0, 1, 2, 0)
    numbered = numbered_apart([batch, batch.select([3]), batch])
    assert [each.group_index for each in numbered] == [(0, 1, 0, 2, 1), (3,), (4, 5, 4, 6, 5)]
