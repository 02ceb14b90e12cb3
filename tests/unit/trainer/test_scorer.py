"""The scores that passes without gradients found out."""

from __future__ import annotations

import pytest
import torch

from prefrl.trainer.base.scorer import Scores


def test_only_scores_that_were_needed_can_be_read() -> None:
    scores = Scores({"old_logprobs": torch.tensor([-1.0]), "values": torch.tensor([0.5])})
    assert scores.old_logprobs.item() == -1.0
    assert scores.values.item() == 0.5
    assert scores.get("ref_logprobs") is None
    with pytest.raises(ValueError, match=r"ref_logprobs was not computed, only \['old_logprobs', 'values'\]"):
        scores.ref_logprobs  # noqa: B018
