"""The sum of a policy loss and its further terms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prefrl import GRPOConfig
from prefrl.losses.scores import TokenScores
from prefrl.trainer.online.policy_batch import PolicyBatch
from prefrl.trainer.online.policy_objective import PolicyObjective


@pytest.mark.parametrize(
    ("loss", "level", "warns"),
    [
        ("dapo", "sequence", True),
        ("dr_grpo", "sequence_token", True),
        ("cispo", "sequence", True),
        ("cispo", "sequence_sum", False),  # the weight of the whole sequence, as in REINFORCE
        ("dapo", "token", False),
        ("grpo", "sequence", False),
        ("luspo", "sequence", False),
    ],
)
def test_a_ratio_of_sequences_in_a_sum_over_tokens_is_warned_of(
    loss: str, level: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, loss_type=loss, importance_sampling_level=level)
    PolicyObjective(args)
    assert ("a sequence counts as often as it has tokens" in caplog.text) is warns


def test_a_loss_of_the_ratio_to_the_sampler_is_not_corrected_again(tmp_path: Path) -> None:
    """-r A log pi of two tokens, r = policy / sampler, A = 2."""
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, loss_type="aipo")
    logprobs, ratios = torch.tensor([-1.0, -2.0]), torch.tensor([1.5, 0.5])
    batch = PolicyBatch(
        prompt_ids=torch.tensor([5]),
        prompt_lengths=(1,),
        prompt_index=(0,),
        response_ids=torch.tensor([6, 7]),
        response_lengths=(2,),
        trainable=torch.ones(2, dtype=torch.bool),
        group_index=(0,),
        sampling_logprobs=logprobs - ratios.log(),
        advantages=torch.full((2,), 2.0),
        loss_scale=torch.ones(2),
        cov_tokens=torch.zeros(2, dtype=torch.bool),
        nll_weights=torch.zeros(2),
    )
    output = PolicyObjective(args)(batch, TokenScores.of(logprobs, entropy=torch.zeros(2)))
    assert output.total.item() == pytest.approx(1.5 * 2 * 1 + 0.5 * 2 * 2)
