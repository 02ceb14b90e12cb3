"""What an online step computes, and what it does not compute twice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl.errors import ConfigError
from prefrl.models.forward import token_logprobs
from prefrl.trainer.online.trainer import OnlineTrainer
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
