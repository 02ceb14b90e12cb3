"""When a run saves a checkpoint before it ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefrl.errors import DataError, GenerationError, RewardError
from prefrl.trainer.checkpointing import saved_at_errors


@pytest.mark.parametrize(("error", "num_saved"), [(RewardError, 1), (DataError, 1), (GenerationError, 0)])
def test_errors_of_rewards_and_rows_they_cannot_use_lose_no_step(
    error: type[Exception], num_saved: int, tmp_path: Path
) -> None:
    saved: list[Any] = []
    run: Any = SimpleNamespace(
        args=SimpleNamespace(save_strategy="steps"),
        state=SimpleNamespace(global_step=3),
        run_folder=SimpleNamespace(path=tmp_path, wait=lambda: saved.append("waited")),
        save_checkpoint=lambda: saved.append("the model"),
    )
    with pytest.raises(error), saved_at_errors(run):
        raise error
    assert saved == ["the model", "waited"] * num_saved
