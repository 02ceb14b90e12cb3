"""The scores that passes without gradients found out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prefrl import GRPOConfig
from prefrl.losses.truncation import Truncation
from prefrl.models.forward import prepare_for_scoring, token_logprobs
from prefrl.models.reference import make_reference
from prefrl.trainer.account import StepAccount
from prefrl.trainer.scorer import Scorer, Scores
from tests.assets import ragged_batch, tiny_model


def test_only_scores_that_were_needed_can_be_read() -> None:
    scores = Scores({"old_logprobs": torch.tensor([-1.0]), "values": torch.tensor([0.5])})
    assert scores.old_logprobs.item() == -1.0
    assert scores.values.item() == 0.5
    assert scores.get("ref_logprobs") is None
    with pytest.raises(ValueError, match=r"ref_logprobs was not computed, only \['old_logprobs', 'values'\]"):
        scores.ref_logprobs  # noqa: B018


def test_every_pass_scores_the_distribution_that_is_sampled_from(tmp_path: Path) -> None:
    policy, other, batch = tiny_model(), tiny_model(seed=1), ragged_batch()
    prepare_for_scoring(policy)
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, temperature=0.5, top_k=9, repetition_penalty=1.5)
    cuts = Truncation(top_k=9, repetition_penalty=1.5)
    reference = make_reference(policy, beta=0.1, given=other)
    accelerator = SimpleNamespace(autocast=nullcontext)
    scorer = Scorer(args, accelerator, StepAccount(args.device), lambda: policy, reference)
    expected = token_logprobs(policy, batch, temperature=0.5, truncation=cuts).logprobs.detach()
    for other_way in ({"truncation": cuts}, {"temperature": 0.5}):
        assert not torch.allclose(expected, token_logprobs(policy, batch, **other_way).logprobs, atol=0.1)
    torch.testing.assert_close(scorer.scores(policy, batch, want=()).logprobs.detach(), expected)
    torch.testing.assert_close(scorer.of_policy(batch).logprobs, expected)
    expected = token_logprobs(other, batch, temperature=0.5, truncation=cuts).logprobs.detach()
    torch.testing.assert_close(scorer.of_reference(batch).logprobs, expected)
