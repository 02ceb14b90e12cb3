"""The sum of a policy loss and its further terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl import GRPOConfig
from prefrl.losses.per_token import TokenScores
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.trainer.online.policy_objective import PolicyObjective
from prefrl.trainer.online.policy_terms import PolicyBatch


def batch_of(lengths: list[int], **fields: Any) -> PolicyBatch:
    """Rows of these lengths that answer the same prompt, all with advantage 2."""
    num_tokens = sum(lengths)
    values: dict[str, Any] = {
        "trainable": torch.ones(num_tokens, dtype=torch.bool),
        "sampling_logprobs": torch.full((num_tokens,), -1.0),
        "advantages": torch.full((num_tokens,), 2.0),
        "loss_scale": torch.ones(num_tokens),
        "cov_tokens": torch.zeros(num_tokens, dtype=torch.bool),
        "nll_weights": torch.zeros(num_tokens),
        "entropy_weights": torch.ones(num_tokens),
    }
    return PolicyBatch(
        prompt_ids=torch.tensor([5]),
        prompt_lengths=(1,),
        prompt_index=(0,) * len(lengths),
        response_ids=torch.arange(num_tokens),
        response_lengths=tuple(lengths),
        group_index=(0,) * len(lengths),
        **(values | fields),
    )


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_the_entropy_bonus_is_the_mean_over_tokens_for_every_loss(loss: str, tmp_path: Path) -> None:
    """Three micro-batches with 8 tokens, of which 2 have no loss: the others have a weight of 0.3 / 6 each."""
    level = "token" if "token" in POLICY_LOSSES[loss].levels else "sequence"
    options: dict[str, Any] = {"loss_type": loss, "importance_sampling_level": level, "entropy_coef": 0.3, "beta": 0.0}
    objective = PolicyObjective(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options))
    trainable = torch.tensor([True, True, True, True, False, True, False, True])
    batch = batch_of([1, 2, 5], trainable=trainable, entropy_weights=trainable.float())
    num_items = float(objective.row_items(batch).sum())
    batch = objective.prepared(batch, num_items=num_items)
    entropy = torch.linspace(0.1, 0.8, 8, requires_grad=True)
    for row, place in enumerate((slice(0, 1), slice(1, 3), slice(3, 8))):
        scores = TokenScores.of(batch.sampling_logprobs[place], entropy=entropy[place])
        (objective(batch.select([row]), scores).total / num_items).backward()
    torch.testing.assert_close(entropy.grad, -0.3 / 6 * trainable)


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
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, beta=0.0, loss_type="aipo")
    logprobs, ratios = torch.tensor([-1.0, -2.0]), torch.tensor([1.5, 0.5])
    batch = batch_of([2], sampling_logprobs=logprobs - ratios.log())
    output = PolicyObjective(args)(batch, TokenScores.of(logprobs, entropy=torch.zeros(2)))
    assert output.total.item() == pytest.approx(1.5 * 2 * 1 + 0.5 * 2 * 2)
