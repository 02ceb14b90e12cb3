"""The exact values that options add to rewards and losses."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl.errors import ConfigError
from prefrl.losses import logprobs
from prefrl.models.forward import token_logprobs
from prefrl.registry import REGISTRY
from prefrl.trainer.base_trainer import BaseTrainer
from prefrl.trainer.online.policy_objective import PolicyObjective
from prefrl.trainer.online.policy_terms import PolicyBatch
from prefrl.trainer.online.trainer import OnlineTrainer
from prefrl.trainer.scorer import ScoreNeed, Scores
from prefrl.types import TokenBatch
from tests.contract.cases import dataset_of, make_trainer, ragged_reward

BETA = 0.3


def online(algorithm: str, tmp_path: Path, **options: Any) -> OnlineTrainer[PolicyBatch]:
    trainer = make_trainer(algorithm, tmp_path, **options)
    assert isinstance(trainer, OnlineTrainer)
    return trainer


def first_step(trainer: OnlineTrainer[PolicyBatch]) -> tuple[PolicyBatch, float]:
    """The rows of the first step that have a loss, and the number of items that it is divided by."""
    items, count = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))
    return PolicyBatch.concat(items[-1].micro_batches), count


def first_batch(trainer: OnlineTrainer[PolicyBatch]) -> PolicyBatch:
    return first_step(trainer)[0]


def far_reference(trainer: OnlineTrainer[PolicyBatch]) -> None:
    """A reference that finds every token less likely, by another amount each: k1 of the n-th token is n / 10."""

    needed = trainer.scorer.needed

    def with_reference(batch: TokenBatch, needs: Collection[ScoreNeed], *, rows_per_pass: int) -> Scores:
        scores = needed(batch, {*needs, "old_logprobs"} - {"ref_logprobs"}, rows_per_pass=rows_per_pass)
        if "ref_logprobs" not in needs:
            return scores
        return Scores({**scores.found, "ref_logprobs": scores.old_logprobs - torch.arange(batch.num_tokens) / 10})

    trainer.scorer.needed = with_reference  # type: ignore[method-assign]


def rewards_of(trainer: OnlineTrainer[PolicyBatch], batch: TokenBatch) -> list[float]:
    texts = [trainer.processing_class.decode(ids, skip_special_tokens=True) for ids in rows(batch.response_ids, batch)]
    return ragged_reward(texts)


def rows(values: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, ...]:
    return torch.split(values, list(batch.response_lengths))


def divergences(batch: TokenBatch) -> list[torch.Tensor]:
    """k1 of each token, as `far_reference` makes it."""
    return list(rows(torch.arange(batch.num_tokens) / 10, batch))


def test_a_divergence_in_the_reward_lowers_it_before_completions_are_compared(tmp_path: Path) -> None:
    trainer = online("rloo", tmp_path, beta=BETA, num_generations=4)
    far_reference(trainer)
    batch = first_batch(trainer)
    pairs = zip(rewards_of(trainer, batch), divergences(batch), strict=True)
    totals = torch.tensor([reward - BETA * float(kl.sum()) for reward, kl in pairs]).view(-1, 4)
    expected = (totals - (totals.sum(1, keepdim=True) - totals) / 3).flatten()
    torch.testing.assert_close(batch.advantages, expected[batch.row_index], atol=1e-4, rtol=1e-4)


def test_a_divergence_in_the_reward_of_a_token_counts_for_those_before_it(tmp_path: Path) -> None:
    trainer = online("reinforce_plus_plus", tmp_path, beta=BETA, gamma=0.5, normalize_advantages=False)
    far_reference(trainer)
    batch = first_batch(trainer)
    expected = []
    for reward, kl in zip(rewards_of(trainer, batch), divergences(batch), strict=True):
        to_go, values = 0.0, []
        for n in reversed(range(len(kl))):
            to_go = -BETA * float(kl[n]) + (reward if n == len(kl) - 1 else 0.0) + 0.5 * to_go
            values.append(to_go)
        expected += values[::-1]
    torch.testing.assert_close(batch.advantages, torch.tensor(expected), atol=1e-4, rtol=1e-4)


def total_with(trainer: OnlineTrainer[PolicyBatch], batch: TokenBatch, **options: Any) -> float:
    """The loss of a trainer whose objective was made with other options."""
    args, before = copy.copy(trainer.args), trainer.objective
    for name, value in options.items():
        setattr(args, name, value)
    trainer.objective = PolicyObjective(args)
    total = float(trainer.loss(trainer.model, batch).total.detach())
    trainer.objective = before
    return total


@pytest.mark.parametrize("options", [{"loss_type": "dr_grpo"}, {"top_entropy_quantile": 0.25}], ids=str)
def test_the_entropy_bonus_is_a_mean_over_tokens_with_a_policy_loss(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = online("grpo", tmp_path, entropy_coef=0.2, beta=0.0, mask_truncated_completions=True, **options)
    batch, num_items = first_step(trainer)
    entropy = token_logprobs(trainer.policy, batch, want=("entropy",)).entropy
    expected = -0.2 * float(entropy[batch.trainable & (batch.loss_scale > 0)].mean())
    added = total_with(trainer, batch) - total_with(trainer, batch, entropy_coef=0.0)
    assert added / num_items == pytest.approx(expected, rel=1e-4)


def entropy_gradients(trainer: BaseTrainer, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """The gradients of the entropy that reach the output head in training."""
    found: list[torch.Tensor | None] = []
    original = logprobs._RowGrads.of

    def of(grad_logprobs: torch.Tensor, entropy: Any, full_kl: Any) -> Any:
        found.append(entropy[0])
        return original(grad_logprobs, entropy, full_kl)

    monkeypatch.setattr(logprobs._RowGrads, "of", of)
    trainer.train()
    return found


@pytest.mark.parametrize("algorithm", sorted(set(REGISTRY) - {"reward"}))
def test_an_entropy_that_is_only_logged_has_no_gradient(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(algorithm, tmp_path)
    found = entropy_gradients(trainer, monkeypatch)
    assert found
    assert all(gradient is None for gradient in found)
    assert trainer.state.log_history[0]["entropy"] > 0


def test_an_adaptive_entropy_has_a_gradient_in_the_steps_with_a_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_kwargs": {"target": 100.0}, "max_steps": 2}
    first, second = entropy_gradients(online("grpo", tmp_path, **options), monkeypatch)
    assert first is None  # the entropy is not known before the first step
    assert second is not None
    assert (second < 0).any()


def test_likelihood_of_good_completions_is_a_mean_over_their_own_tokens(tmp_path: Path) -> None:
    def good_if_even(completions: list[str], **_: Any) -> list[float]:
        return [1.0 if len(completion) % 2 == 0 else 0.0 for completion in completions]

    trainer = online("grpo", tmp_path, loss_kwargs={"positive_nll_coef": 0.5}, beta=0.0, reward=good_if_even)
    batch = first_batch(trainer)
    texts = [trainer.processing_class.decode(ids, skip_special_tokens=True) for ids in rows(batch.response_ids, batch)]
    is_good = (torch.tensor(good_if_even(texts)) > 0)[batch.row_index]
    assert 0 < is_good.sum() < len(is_good)
    mean = -token_logprobs(trainer.policy, batch).logprobs[is_good].mean()
    # At ratio one the policy loss of a token is minus its advantage.
    added = total_with(trainer, batch) + float(batch.advantages[batch.trainable].sum())
    assert added / batch.num_trainable == pytest.approx(0.5 * float(mean.detach()), rel=1e-4)


def test_tokens_that_are_not_selected_have_no_policy_loss(tmp_path: Path) -> None:
    trainer = online("grpo", tmp_path, top_entropy_quantile=0.25, beta=0.0)
    batch = first_batch(trainer)
    entropy = token_logprobs(trainer.policy, batch, want=("entropy",)).entropy
    assert batch.loss_scale.sum() == round(0.25 * batch.num_trainable)
    assert entropy[batch.loss_scale == 1].min() >= entropy[batch.loss_scale == 0].max() - 1e-3
    # At ratio one the loss of a token is minus its advantage.
    expected = -(batch.advantages * batch.loss_scale).sum()
    assert total_with(trainer, batch) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def test_dynamic_sampling_fills_the_batch_with_prompts_that_have_a_signal(tmp_path: Path) -> None:
    def is_long(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion) % 5 == 0) for completion in completions]

    options: dict[str, Any] = {"reward": is_long, "rows": 64, "per_device_train_batch_size": 32, "beta": 0.0}
    plain, filled = (online("grpo", tmp_path, dynamic_sampling=choice, **options) for choice in (False, True))
    assert first_batch(plain).num_rows < 32  # groups without a signal are left out
    assert first_batch(filled).num_rows == 32


def test_a_curriculum_does_not_stand_in_the_way_of_an_evaluation_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_dataset": None, "eval_dataset": dataset_of("grpo", 4), "curriculum": "variance"}
    trainer = online("grpo", tmp_path, **options)
    assert "eval_reward" in trainer.evaluate()
    with pytest.raises(ConfigError, match="train_dataset=None: training needs a dataset"):
        trainer.train()
