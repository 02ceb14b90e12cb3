"""One step of an online trainer against its objective, worked out again."""

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
from tests.contract.cases import (
    dataset_of,
    make_trainer,
    ragged_reward,
    relative_difference,
    stopping_model,
    update_of,
)


def grpo(tmp_path: Path, **options: Any) -> OnlineTrainer:
    trainer = make_trainer("grpo", tmp_path, **options)
    assert isinstance(trainer, OnlineTrainer)
    return trainer


def has_capital_vowel(completions: list[str], **_: Any) -> list[float]:
    """Equal in some groups, different in others."""
    return [float(any(letter in text for letter in "AEIOU")) for text in completions]


def scored(model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model, batch.replace(old_logprobs=None)).logprobs


def all_micro_batches(trainer: OnlineTrainer) -> list[TokenBatch]:
    return [batch for minibatch in trainer.buffer.minibatches for batch in minibatch.micro_batches]


def count_forwards(trainer: OnlineTrainer) -> list[int]:
    """Tokens of each pass through the model that scores; generation passes have a cache."""
    tokens: list[int] = []

    def note(_module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        if not kwargs.get("use_cache"):
            tokens.append(kwargs["input_ids"].numel())

    trainer.policy.model.register_forward_hook(note, with_kwargs=True)
    return tokens


def test_old_logprobs_are_those_of_the_policy_that_sampled(tmp_path: Path) -> None:
    model = stopping_model()
    before = copy.deepcopy(model)
    trainer = grpo(tmp_path, model=model, steps_per_generation=2, num_iterations=2, max_steps=2, beta=0.0)
    trainer.train()
    batches = all_micro_batches(trainer)
    assert len(batches) == 2
    for batch in batches:
        assert batch.old_logprobs is not None
        assert torch.allclose(batch.old_logprobs, scored(before, batch), atol=1e-5)
        assert not torch.allclose(batch.old_logprobs, scored(model, batch), atol=1e-3)


def test_later_iterations_are_clipped_against_the_old_policy(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, num_iterations=2, max_steps=2, learning_rate=1.0, beta=0.0)
    trainer.train()
    shares = [entry["clip_ratio/region_mean"] for entry in trainer.state.log_history if "loss" in entry]
    assert shares[0] == 0.0
    assert shares[1] > 0.05


def test_reference_is_the_model_as_it_was_given(tmp_path: Path) -> None:
    model = stopping_model(seed=3)
    before = copy.deepcopy(model)
    trainer = grpo(tmp_path, model=model, max_steps=3, beta=0.04)
    trainer.train()
    kls = [entry["kl"] for entry in trainer.state.log_history if "loss" in entry]
    assert kls[0] == pytest.approx(0.0, abs=1e-6)
    assert kls[2] > 1e-4
    for batch in all_micro_batches(trainer):
        assert batch.ref_logprobs is not None
        assert torch.allclose(batch.ref_logprobs, scored(before, batch), atol=1e-5)


def test_kl_term_adds_beta_times_k3_of_each_token(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, beta=0.3, loss_type="dapo")
    items, _ = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))
    batch = items[-1].micro_batches[0]
    shift = torch.linspace(-0.5, 0.5, batch.num_tokens)
    logprobs = scored(trainer.policy, batch)
    plain = trainer.loss(trainer.model, batch.replace(ref_logprobs=logprobs)).total  # no divergence
    with_kl = trainer.loss(trainer.model, batch.replace(ref_logprobs=logprobs + shift)).total
    expected = 0.3 * (shift.exp() - shift - 1).sum()
    assert float((with_kl - plain).detach()) == pytest.approx(float(expected), rel=1e-4)


def test_an_on_policy_step_scores_once(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, max_steps=3, beta=0.0)
    token_logprobs(trainer.policy, trainer._idle_batch())  # the first-use check
    tokens = count_forwards(trainer)
    trainer.train()
    assert len(tokens) == 3


def test_groups_without_signal_are_not_run_but_counted(tmp_path: Path) -> None:
    options: dict[str, Any] = {"reward": has_capital_vowel, "beta": 0.0, "per_device_train_batch_size": 16}
    lean, full = grpo(tmp_path, **options), grpo(tmp_path, **options)
    full._minibatches.objective.has_gradient = lambda batch: [True] * batch.num_rows
    lean_update, full_update = update_of(lean), update_of(full)
    lean_rows, full_rows = (sum(batch.num_rows for batch in all_micro_batches(t)) for t in (lean, full))
    assert 0 < lean_rows < full_rows == 16
    assert relative_difference(lean_update, full_update) < 1e-5


def test_a_step_without_any_signal_leaves_the_weights(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, beta=0.0, reward=lambda completions, **_: [1.0] * len(completions))
    assert update_of(trainer).abs().max() == 0.0
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_an_adaptive_weight_follows_the_divergence(place: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kl_in": place, "kl_estimator": "k3", "beta": 0.1, "max_steps": 3, "learning_rate": 0.5}
    trainer = grpo(tmp_path, kl_kwargs={"target": 1e-3, "horizon": 8}, **options)
    trainer.train()
    weights = [entry["kl_coef"] for entry in trainer.state.log_history if "loss" in entry]
    kls = [entry["kl"] for entry in trainer.state.log_history if "loss" in entry]
    assert kls[0] < 1e-3 < kls[1]
    # 8 completions are the horizon: down by a fifth while the policy is the reference, then up by a fifth.
    assert weights == pytest.approx([0.1, 0.1 * 0.8, 0.1 * 0.8 * 1.2])


def test_a_generation_is_collected_under_its_own_number(tmp_path: Path) -> None:
    """It seeds the draw of prompts that replace others."""
    trainer = grpo(tmp_path, num_iterations=2, max_steps=3, beta=0.0)
    collect, numbers = trainer.prompts.collect, []

    def noted(request: Any, number: int) -> Any:
        numbers.append(number)
        return collect(request, number)

    trainer.prompts.collect = noted  # type: ignore[method-assign]
    trainer.train()
    assert numbers == [0, 1]


def num_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def test_fixed_weights_of_rewards_are_the_weighted_sum(tmp_path: Path) -> None:
    options: dict[str, Any] = {"reward": [ragged_reward, num_letters], "reward_weights": [2.0, 0.5], "beta": 0.0}
    summed, balanced = (
        update_of(grpo(tmp_path, scale_rewards="none", reward_balance=balance, **options))
        for balance in (None, "fixed")
    )
    assert relative_difference(balanced, summed) < 1e-5


def test_a_balance_needs_several_rewards(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reward_balance='nash' has no effect with one reward"):
        grpo(tmp_path, reward_balance="nash")


def test_completions_may_fill_the_context(tmp_path: Path) -> None:
    model = stopping_model(max_position_embeddings=40)
    trainer = grpo(tmp_path, model=model, max_completion_length=None, max_prompt_length=30, loss_type="dr_grpo")
    assert trainer.args.max_completion_length == 10
    trainer.train()
    (lengths,) = [entry["completions/max_length"] for entry in trainer.state.log_history if "loss" in entry]
    assert lengths == 10


@pytest.mark.parametrize("prompt", [None, 40])
def test_a_context_without_room_for_completions_is_an_error(prompt: int | None, tmp_path: Path) -> None:
    model = stopping_model(max_position_embeddings=40)
    with pytest.raises(
        ConfigError, match=f"max_completion_length=None with max_prompt_length={prompt} and max_pos.*=40"
    ):
        grpo(tmp_path, model=model, max_completion_length=None, max_prompt_length=prompt)


def test_a_completion_longer_than_the_context_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_completion_length=41: the model has 40 positions"):
        grpo(tmp_path, model=stopping_model(max_position_embeddings=40), max_completion_length=41)


def test_evaluation_samples_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    results = []
    for size in (4, 24):
        trainer = grpo(tmp_path, per_device_eval_batch_size=size, temperature_eval=0.7, num_generations_eval=2)
        results.append(trainer.evaluate(dataset_of("grpo", 7))["eval_reward"])
    assert results[0] == pytest.approx(results[1], rel=1e-6)


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

    def of(grad_logprobs: torch.Tensor, entropy: Any, *others: Any) -> Any:
        found.append(entropy[0])
        return original(grad_logprobs, entropy, *others)

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
