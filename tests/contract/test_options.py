"""Every option of an online config changes what is learned, or is refused, or is one that must not change it."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl.errors import ConfigError
from prefrl.registry import REGISTRY
from prefrl.trainer.base.config import BaseConfig
from tests.contract.cases import ONLINE, make_trainer, weights_of

# A second pass over a generation, far enough from the first for ratios to be clipped.
BASE: dict[str, Any] = {"num_iterations": 2, "max_steps": 4, "learning_rate": 1.0}
ADAPTIVE_ENTROPY = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0}
RAGGED = {"rows": 40}


def two_rewards(completions: list[str], **_: Any) -> list[float]:
    """0 or 1, equal in some groups."""
    return [float(len(completion) % 3 == 0) for completion in completions]


def rare_reward(completions: list[str], **_: Any) -> list[float]:
    """Equal in most groups."""
    return [float(len(completion) % 7 == 6) for completion in completions]


TWO = {"reward": [two_rewards, lambda completions, **_: [len(text) / 10 for text in completions]]}
BINARY = {"reward": two_rewards}
# Every prompt is met three times.
EPOCHS = {**BINARY, "rows": 8, "max_steps": 12, "num_iterations": 1, "learning_rate": 0.01}

# Option -> a value, and the options that it needs to act.
ACTING: dict[str, tuple[Any, dict[str, Any]]] = {
    # The rollout loop.
    "max_prompt_length": (2, {}),
    "truncation_mode": ("keep_start", {"max_prompt_length": 2}),
    "num_generations": (2, {}),
    "max_completion_length": (3, {}),
    "temperature": (0.7, {}),
    "top_p": (0.5, {}),
    "top_k": (3, {}),
    "min_p": (0.2, {}),
    "repetition_penalty": (2.0, {}),
    "generation_batch_size": (16, {}),
    "steps_per_generation": (2, {}),
    "num_iterations": (3, {}),
    "shuffle_dataset": (False, {}),
    # Rewards.
    "reward_weights": ([2.0, 1.0], TWO),
    "mask_truncated_completions": (True, {}),
    "stop_properly_penalty_coef": (0.1, {}),
    "missing_eos_penalty": (5.0, {}),
    "normalize_rewards": (True, {"scale_rewards": "none"}),
    "reward_clip_range": ([-0.1, 0.5], {}),
    "dynamic_sampling": (True, BINARY),
    "dynamic_sampling_max_tries": (1, {**RAGGED, "reward": rare_reward, "dynamic_sampling": True}),
    "filter_reward_metric": ("two_rewards", {**TWO, **RAGGED, "dynamic_sampling": True}),
    "curriculum": ("band", EPOCHS),
    "curriculum_band": ([0.45, 0.55], {**EPOCHS, "curriculum": "band"}),
    "curriculum_reward_bounds": ([-1.0, 3.0], {**EPOCHS, "curriculum": "band"}),
    "curriculum_floor": (5.0, {**EPOCHS, "curriculum": "variance"}),
    "curriculum_momentum": (0.99, {**EPOCHS, "max_steps": 24, "curriculum": "band", "curriculum_band": [0.3, 0.6]}),
    "reward_balance": ("nash", TWO),
    "uncertainty_rate": (0.9, {**TWO, "reward_balance": "uncertainty"}),
    "gradnorm_alpha": (0.1, {**TWO, "reward_balance": "gradnorm", "max_steps": 8}),
    "gradnorm_rate": (0.9, {**TWO, "reward_balance": "gradnorm"}),
    "famo_rate": (0.1, {**TWO, "reward_balance": "famo", "max_steps": 6}),
    "famo_decay": (0.5, {**TWO, "reward_balance": "famo", "max_steps": 8}),
    "pareto_smoothing": (0.1, {**TWO, "reward_balance": "pareto"}),
    # Losses.
    "loss_type": ("grpo", {}),
    "importance_sampling_level": ("sequence", {}),
    "epsilon": (0.01, {}),
    "epsilon_high": (0.01, {}),
    "delta": (1.3, {}),
    "aipo_rho": (1.1, {"loss_type": "aipo"}),
    "sapo_temperature_pos": (2.0, {"loss_type": "sapo"}),
    "sapo_temperature_neg": (2.0, {"loss_type": "sapo"}),
    "vespo_k_pos": (1.0, {"loss_type": "vespo"}),
    "vespo_lambda_pos": (1.0, {"loss_type": "vespo"}),
    "vespo_k_neg": (1.0, {"loss_type": "vespo"}),
    "vespo_lambda_neg": (1.0, {"loss_type": "vespo"}),
    "clip_cov_ratio": (0.5, {"loss_type": "clip_cov", "clip_cov_lb": -5.0}),
    "clip_cov_lb": (-5.0, {"loss_type": "clip_cov", "clip_cov_ratio": 0.3}),
    "clip_cov_ub": (0.5, {"loss_type": "clip_cov", "clip_cov_ratio": 0.3, "clip_cov_lb": -5.0}),
    "kl_cov_ratio": (0.5, {"loss_type": "kl_cov"}),
    "kl_cov_coef": (5.0, {"loss_type": "kl_cov", "kl_cov_ratio": 0.3}),
    "off_policy_mask_threshold": (1e-4, {}),
    "positive_nll_coef": (0.5, {}),
    "entropy_coef": (0.1, {}),
    "use_adaptive_entropy": (True, {"entropy_coef": 0.01}),
    "entropy_coef_min": (0.009, {**ADAPTIVE_ENTROPY, "entropy_target": 0.1}),
    "entropy_coef_max": (0.012, ADAPTIVE_ENTROPY),
    "entropy_coef_delta": (0.05, ADAPTIVE_ENTROPY),
    "entropy_target": (5.0, {"use_adaptive_entropy": True, "entropy_coef": 0.01}),
    "top_entropy_quantile": (0.3, {}),
    "beta": (0.5, {}),
    "kl_estimator": ("k1", {}),
    "kl_in": ("reward", {"kl_estimator": "k1", "beta": 1.0}),
    "use_bias_correction_kl": (True, {}),
    "kl_weight_cap": (1.0, {"kl_estimator": "sequence"}),
    "kl_controller": ("adaptive", {"kl_horizon": 10_000}),
    "kl_target": (100.0, {"kl_controller": "adaptive", "kl_horizon": 10}),
    "kl_horizon": (10, {"kl_controller": "adaptive"}),
    "sync_ref_model": (True, {"ref_model_sync_steps": 1}),
    "ref_model_mixup_alpha": (0.1, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "ref_model_sync_steps": (1, {"sync_ref_model": True}),
    # Advantages.
    "advantage_estimator": ("rloo", {}),
    "scale_rewards": ("none", {}),
    "multi_objective_aggregation": ("normalize_then_sum", TWO),
    "f_norm": (2.0, {"advantage_estimator": "gpg"}),
    "zero_tail": (False, {"advantage_estimator": "optimal_token_baseline"}),
    "normalize_advantages": (True, {}),
    "advantage_clip_range": ([-0.1, 0.1], {}),
    "gamma": (0.5, {}),
    "lam": (0.1, {"num_iterations": 1}),
    "rollout_selection": ("best", {"num_selected": 2}),
    "num_selected": (3, {"rollout_selection": "best", "num_selected": 2}),
    "rollout_resampling": ("pow", {}),
    "rollout_resampling_power": (4.0, {"rollout_resampling": "pow"}),
    "min_filter_prefix_tokens": (1, {}),
    # The critic.
    "critic": ("model", {}),
    "critic_learning_rate": (0.5, {}),
    "critic_warmup": (1, {}),
    "vf_coef": (1.0, {}),
    "cliprange_value": (1e-5, {}),
    "detach_trunk": (True, {}),
}
# What is learned must not depend on these, or they belong to evaluation, logs or a server.
NEUTRAL = {
    "filter_overlong_prompts",  # test_tokenize
    "num_generations_eval",  # test_one_step
    "temperature_eval",  # test_one_step
    "reward_timeout",  # test_runner
    "chat_template_kwargs",  # test_tokenize
    "ds3_gather_for_generation",  # tests/distributed
    "cache_implementation",  # test_gpu
    "log_completions",  # test_summary
    "num_completions_to_print",  # test_summary
}
# Where an algorithm has another default.
_IN_REWARD = {"kl_estimator": ("k3", {}), "kl_in": ("loss", {})}
_BASELINE = ("reinforce_plus_plus_baseline", {"num_generations": 4})
OTHERS: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "grpo": {},
    "rloo": {**_IN_REWARD, "loss_type": ("sapo", {})},
    "reinforce_plus_plus": {
        **_IN_REWARD,
        "advantage_estimator": _BASELINE,
        "normalize_advantages": (False, {}),
    },
    "ppo": {**_IN_REWARD, "normalize_advantages": (False, {}), "num_generations": (4, {})},
    "online_dpo": {"loss_type": ("ipo", {}), "num_generations": (4, {})},
}
VLLM = {"use_vllm", "generation_mode", "max_staleness", "weight_sync", "weight_sync_folder", "weight_sync_timeout"}


def own_options(algorithm: str) -> list[str]:
    """Options that a config of prefrl adds to those of every trainer."""
    base = {field.name for field in dataclasses.fields(BaseConfig)}
    names = [field.name for field in dataclasses.fields(REGISTRY[algorithm].load_config())]
    return [name for name in names if name not in base and not name.startswith("vllm_") and name not in VLLM]


def shown_here(algorithm: str) -> list[str]:
    """GRPO shows what all share; the others what their config says itself."""
    if algorithm == "grpo":
        return own_options("grpo")
    own = inspect.get_annotations(REGISTRY[algorithm].load_config())
    shared = set(own_options("grpo"))
    return [name for name in own_options(algorithm) if name in own or name not in shared]


CASES = [(algorithm, name) for algorithm in ONLINE for name in shown_here(algorithm) if name not in NEUTRAL]


def trace(algorithm: str, folder: Path, options: dict[str, Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """The weights at the end, and everything that was logged but times."""
    trainer = make_trainer(algorithm, folder, **{**BASE, **options})
    trainer.train()
    logs = [
        {key: value for key, value in entry.items() if not key.startswith(("time/", "step_time", "train_", "total"))}
        for entry in trainer.state.log_history
    ]
    return list(weights_of(trainer.model).values()), [str(entry) for entry in logs]


@pytest.mark.parametrize("algorithm", ONLINE)
def test_every_option_is_listed(algorithm: str) -> None:
    assert not {*own_options(algorithm)} - {*ACTING} - NEUTRAL


@pytest.mark.parametrize(("algorithm", "name"), CASES, ids=lambda value: value)
def test_an_option_acts(algorithm: str, name: str, tmp_path: Path) -> None:
    value, companions = OTHERS[algorithm].get(name, ACTING[name])
    options = {**companions, name: value}
    if name in ("rollout_selection", "sync_ref_model"):  # their companions mean nothing without them
        companions = {}
    weights, logs = trace(algorithm, tmp_path / "with", options)
    plain_weights, plain_logs = trace(algorithm, tmp_path / "without", companions)
    same = all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=False))
    assert not (same and len(weights) == len(plain_weights) and logs == plain_logs)


# What other options belong to.
SWITCHES = {
    "advantage_estimator",
    "curriculum",
    "dynamic_sampling",
    "kl_controller",
    "kl_estimator",
    "reward_balance",
    "loss_type",
    "rollout_resampling",
    "rollout_selection",
    "sync_ref_model",
    "use_adaptive_entropy",
}
DEPENDENT = [name for name, (_, needs) in ACTING.items() if SWITCHES & needs.keys() and name != "kl_in"]


@pytest.mark.parametrize("name", DEPENDENT)
def test_an_option_whose_switch_is_off_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=name):
        make_trainer("grpo", tmp_path, **{name: ACTING[name][0]})
