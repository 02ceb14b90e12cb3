"""Every option of an online config changes what is learned, or is refused, or is one that must not change it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from prefrl.errors import ConfigError
from prefrl.options.fields import default_of, listed_fields
from prefrl.options.params import KwargsOption, kwargs_options
from prefrl.registry import REGISTRY
from prefrl.trainer.base_config import BaseConfig
from tests.contract.cases import ONLINE, dataset_of, make_trainer, weights_of

# A second pass over a generation, far enough from the first for ratios to be clipped.
BASE: dict[str, Any] = {"num_iterations": 2, "max_steps": 4, "learning_rate": 1.0}
ADAPTIVE_ENTROPY = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_kwargs": {"target": 5.0}}
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

TALK = {"talks": "faithful"}


def answering(completions: list[str], log_extra: Callable[[str, list[Any]], None], **_: Any) -> list[float]:
    """`two_rewards`, and the answers."""
    log_extra("answer", [text[:1] for text in completions])
    return two_rewards(completions)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2, "eval_dataset": dataset_of("grpo", 2)}
AT_2 = {**EVALUATED, "reward": answering, "pass_at_k_kwargs": {"k": [2]}}

# Option -> a value, and the options that it needs to act.
ACTING: dict[str, tuple[Any, dict[str, Any]]] = {
    # The rollout loop.
    "on_policy_fraction": (0.5, {"num_generations": 1, "train_dataset": dataset_of("sft")}),
    "later_tokens": (True, {}),
    "teacher_prompt": ("hint", {}),
    "teacher_weights": ("live", {"teacher_model": None, "teacher_prompt": "hint", "num_iterations": 1}),
    "max_prompt_length": (2, {}),
    "truncation_mode": ("keep_start", {"max_prompt_length": 2}),
    "num_generations": (2, {}),
    "max_completion_length": (3, {}),
    "temperature": (0.7, {}),
    "top_p": (0.5, {}),
    "top_k": (3, {}),
    "min_p": (0.2, {}),
    "repetition_penalty": (2.0, {}),
    "stop": ([*"aeiou0123"], {}),
    "include_stop_str_in_output": (False, {"stop": [*"aeiou0123"]}),
    "ignore_eos": (True, {}),
    "truncated_logprobs": ("softmax", {"top_k": 3}),
    "generation_batch_size": (16, {}),
    "steps_per_generation": (2, {}),
    "num_iterations": (3, {}),
    "shuffle_minibatches": (True, {"steps_per_generation": 2, "num_iterations": 3, "max_steps": 12}),
    "shuffle_dataset": (False, {}),
    # Episodes.
    "max_turns": (2, TALK),
    "max_tool_calling_iterations": (0, TALK),
    "turn_credit": ("return", TALK),
    "turn_discount": (0.5, {**TALK, "turn_credit": "return"}),
    # Rewards.
    "reward_weights": ([2.0, 1.0], TWO),
    "mask_truncated_completions": (True, {}),
    "dynamic_sampling": (True, BINARY),
    "curriculum": ("band", EPOCHS),
    "reward_balance": ("nash", TWO),
    # Losses.
    "loss_type": ("grpo", {}),
    "importance_sampling_level": ("sequence", {}),
    "epsilon": (0.01, {}),
    "epsilon_high": (0.01, {}),
    "delta": (1.3, {}),
    "entropy_coef": (0.1, {}),
    "use_adaptive_entropy": (True, {"entropy_coef": 0.01}),
    "top_entropy_quantile": (0.3, {}),
    "beta": (0.5, {}),
    "kl_estimator": ("k1", {}),
    "kl_in": ("reward", {"kl_estimator": "k1", "beta": 1.0}),
    "teacher_kl_coef": (0.5, {}),
    "sync_ref_model": (True, {"ref_model_sync_steps": 1}),
    "ref_model_mixup_alpha": (0.1, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "ref_model_sync_steps": (1, {"sync_ref_model": True}),
    "reset_optimizer_with_reference": (
        True,
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "optim": "adamw_torch"},
    ),
    # Advantages.
    "advantage_estimator": ("rloo", {}),
    "scale_rewards": ("none", {}),
    "normalize_advantages": (True, {}),
    "gamma": (0.5, {}),
    "lam": (0.1, {"num_iterations": 1}),
    "rollout_selection": ("pow", {}),
    # The critic.
    "critic": ("model", {}),
    "critic_learning_rate": (0.5, {}),
    "critic_warmup": (1, {}),
    "vf_coef": (1.0, {}),
    "cliprange_value": (1e-5, {}),
    "detach_trunk": (True, {}),
}
# Option that is a mapping, the choices that have a key ("all": all have it), and the key -> a value, and the options
# that it needs to act. A key that is not here is tried with twice its default, and the choice alone.
KEYS: dict[tuple[str, str, str], tuple[Any, dict[str, Any]]] = {
    ("reward_shaping_kwargs", "all", "stop_properly_penalty_coef"): (0.1, {}),
    ("reward_shaping_kwargs", "all", "missing_eos_penalty"): (5.0, {}),
    ("reward_shaping_kwargs", "all", "normalize"): (True, {"scale_rewards": "none"}),
    ("reward_shaping_kwargs", "all", "clip_range"): ([-0.1, 0.5], {}),
    ("dynamic_sampling_kwargs", "all", "max_tries"): (
        1,
        {**RAGGED, "reward": rare_reward, "dynamic_sampling": True},
    ),
    ("dynamic_sampling_kwargs", "all", "reward_metric"): (
        "two_rewards",
        {**TWO, **RAGGED, "dynamic_sampling": True},
    ),
    ("curriculum_kwargs", "all", "band"): ([0.45, 0.55], {**EPOCHS, "curriculum": "band"}),
    ("curriculum_kwargs", "all", "reward_bounds"): ([-1.0, 3.0], {**EPOCHS, "curriculum": "band"}),
    ("curriculum_kwargs", "all", "floor"): (5.0, {**EPOCHS, "curriculum": "variance"}),
    ("curriculum_kwargs", "all", "momentum"): (
        0.99,
        {**EPOCHS, "max_steps": 24, "curriculum": "band", "curriculum_kwargs": {"band": [0.3, 0.6]}},
    ),
    ("balance_kwargs", "uncertainty", "rate"): (0.9, {**TWO, "reward_balance": "uncertainty"}),
    ("balance_kwargs", "gradnorm", "alpha"): (0.1, {**TWO, "reward_balance": "gradnorm", "max_steps": 8}),
    ("balance_kwargs", "gradnorm", "rate"): (0.9, {**TWO, "reward_balance": "gradnorm"}),
    ("balance_kwargs", "famo", "rate"): (0.1, {**TWO, "reward_balance": "famo", "max_steps": 6}),
    ("balance_kwargs", "famo", "decay"): (0.5, {**TWO, "reward_balance": "famo", "max_steps": 8}),
    ("balance_kwargs", "pareto", "smoothing"): (0.1, {**TWO, "reward_balance": "pareto"}),
    ("loss_kwargs", "aipo", "rho"): (1.1, {"loss_type": "aipo"}),
    ("loss_kwargs", "clip_cov", "ratio"): (0.5, {"loss_type": "clip_cov", "loss_kwargs": {"lb": -5.0}}),
    ("loss_kwargs", "clip_cov", "lb"): (-5.0, {"loss_type": "clip_cov", "loss_kwargs": {"ratio": 0.3}}),
    ("loss_kwargs", "clip_cov", "ub"): (0.5, {"loss_type": "clip_cov", "loss_kwargs": {"ratio": 0.3, "lb": -5.0}}),
    ("loss_kwargs", "kl_cov", "ratio"): (0.5, {"loss_type": "kl_cov"}),
    ("loss_kwargs", "kl_cov", "coef"): (5.0, {"loss_type": "kl_cov", "loss_kwargs": {"ratio": 0.3}}),
    ("loss_kwargs", "all", "off_policy_mask_threshold"): (1e-4, {}),
    ("loss_kwargs", "all", "positive_nll_coef"): (0.5, {}),
    ("loss_kwargs", "all", "min_filter_prefix_tokens"): (1, {}),
    ("entropy_kwargs", "all", "min"): (
        0.009,
        {**ADAPTIVE_ENTROPY, "entropy_kwargs": {"target": 0.1}},
    ),
    ("entropy_kwargs", "all", "max"): (0.012, ADAPTIVE_ENTROPY),
    ("entropy_kwargs", "all", "delta"): (0.05, ADAPTIVE_ENTROPY),
    ("entropy_kwargs", "all", "target"): (5.0, {"use_adaptive_entropy": True, "entropy_coef": 0.01}),
    ("kl_kwargs", "k1, abs, k2, k3, k1+, abs+, k3+", "bias_correction"): (True, {}),
    ("kl_kwargs", "sequence", "weight_cap"): (1.0, {"kl_estimator": "sequence"}),
    ("kl_kwargs", "all", "target"): (0.1, {}),
    ("kl_kwargs", "all", "horizon"): (10, {"kl_kwargs": {"target": 0.1}}),
    ("teacher_kl_kwargs", "all", "estimator"): ("sequence", {"teacher_kl_coef": 0.5}),
    ("teacher_kl_kwargs", "all", "in_reward"): (
        True,
        {"teacher_kl_coef": 0.5, "teacher_kl_kwargs": {"estimator": "k1"}},
    ),
    ("advantage_kwargs", "grpo", "multi_objective_aggregation"): ("normalize_then_sum", TWO),
    ("advantage_kwargs", "grpo", "advantage_epsilon"): (0.5, {}),
    ("advantage_kwargs", "grpo_passk", "advantage_epsilon"): (0.5, {"advantage_estimator": "grpo_passk"}),
    ("advantage_kwargs", "optimal_token_baseline", "zero_tail"): (
        False,
        {"advantage_estimator": "optimal_token_baseline"},
    ),
    ("advantage_kwargs", "all", "clip_range"): ([-0.1, 0.1], {}),
    ("selection_kwargs", "max_variance, best, random", "num_selected"): (
        3,
        {"rollout_selection": "best", "selection_kwargs": {"num_selected": 2}},
    ),
    ("selection_kwargs", "pow", "power"): (4.0, {"rollout_selection": "pow"}),
    ("eval_sampling_kwargs", "all", "top_p"): (0.3, EVALUATED),
    ("eval_sampling_kwargs", "all", "top_k"): (1, EVALUATED),
    ("eval_sampling_kwargs", "all", "min_p"): (0.5, EVALUATED),
    ("eval_sampling_kwargs", "all", "repetition_penalty"): (3.0, EVALUATED),
    ("eval_sampling_kwargs", "all", "max_completion_length"): (1, EVALUATED),
    ("pass_at_k_kwargs", "all", "k"): ([2], EVALUATED),
    ("pass_at_k_kwargs", "all", "reward"): (
        "two_rewards",
        {**AT_2, **TWO, "pass_at_k_kwargs": {"k": [2], "threshold": 1.1}},  # which that reward never reaches
    ),
    ("pass_at_k_kwargs", "all", "threshold"): (-1.0, AT_2),
    ("pass_at_k_kwargs", "all", "answer"): ("answer", AT_2),
}
# What is learned must not depend on these, or they belong to evaluation, logs or a server.
NEUTRAL = {
    "filter_overlong_prompts",  # test_tokenize
    "num_generations_eval",  # test_one_step
    "value_model_name_or_path",  # test_ppo
    "teacher_model_name_or_path",  # test_distillation
    "teacher_model_init_kwargs",  # test_distillation
    "teacher_server_base_url",  # tests/vllm/test_teacher
    "teacher_server_kwargs",  # tests/vllm/test_teacher
    "temperature_eval",  # test_one_step
    "tool_timeout",  # test_play
    "episode_timeout",  # test_play
    "max_concurrent_environments",  # test_driver
    "tool_error",  # test_play
    "environment_error",  # test_driver
    "reasoning_in_history",  # test_play
    "tool_parser",  # test_play, test_tool_calls
    "reward_timeout",  # test_runner
    "reward_num_workers",  # test_pool
    "eval_reward_weights",  # test_evaluation
    "on_reward_error",  # test_runner
    "stop_without_signal",  # test_arguments
    "chat_template_kwargs",  # test_tokenize
    "ds3_gather_for_generation",  # tests/distributed
    "cache_implementation",  # test_gpu
    "log_completions",  # test_summary
    "log_val_generations",  # test_evaluation
    "num_completions_to_print",  # test_summary
    "log_unique_prompts",  # test_summary
    "journal_keep",  # test_survival
    "journal_tokens",  # test_journal_tokens
    "router_replay",  # test_mixtures
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
    "distillation": {},
}
VLLM = {"use_vllm", "generation_mode", "max_staleness", "weight_sync"}


def own_options(algorithm: str) -> list[str]:
    """Options that a config of prefrl adds to those of every trainer."""
    base = {field.name for field in listed_fields(BaseConfig)}
    names = [field.name for field in listed_fields(REGISTRY[algorithm].load_config())]
    others = base | _mappings(algorithm) | VLLM
    return [name for name in names if name not in others and not name.startswith("vllm_")]


def keys(algorithm: str) -> dict[tuple[str, str, str], tuple[Any, dict[str, Any]]]:
    """Each key of each option that is a mapping: a value, and what it may need to act.

    Those about servers are not here. PPO's critic is in test_optimizers, reward models are in test_model, and weights
    of a teacher in test_distillation.
    """
    return {
        (option.name, choices, key.name): ((default_of(key) or 0.5) * 2, {_switch(option): choices.split(", ")[0]})
        for option in kwargs_options(REGISTRY[algorithm].load_config())
        for choices, found in option.keys().items()
        for key in found
        if not option.name.startswith(
            ("vllm_", "async_", "critic_", "reward_model_", "teacher_weights_", "teacher_server_")
        )
        and option not in kwargs_options(BaseConfig)
    }


def _switch(option: KwargsOption[Any]) -> str:
    return option.label or str(option.switch)


def _mappings(algorithm: str) -> set[str]:
    return {option.name for option in kwargs_options(REGISTRY[algorithm].load_config())}


def shown_here(algorithm: str) -> list[str]:
    """GRPO shows what all share; the others what their config says itself."""
    if algorithm == "grpo":
        return own_options("grpo")
    own = inspect.get_annotations(REGISTRY[algorithm].load_config())
    shared = set(own_options("grpo"))
    return [name for name in own_options(algorithm) if name in own or name not in shared]


CASES = [(algorithm, name) for algorithm in ONLINE for name in shown_here(algorithm) if name not in NEUTRAL]


TIMES = ("time/", "step_time", "train_", "total", "eval_time/", "eval_runtime")

Trace = list[str]
_plain: dict[str, Trace] = {}


class Traced(TrainerCallback):
    """Notes the weights after each step, and all that is logged but times; ends a training that is not as expected."""

    def __init__(self, expected: Trace | None) -> None:
        self.expected = expected
        self.trace: Trace = []

    def _note(self, text: str, control: Any) -> None:
        self.trace.append(text)
        if self.expected is not None and self.trace != self.expected[: len(self.trace)]:
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """HuggingFace's hook."""
        weights = {name: (*w.shape, sha256(w.numpy().tobytes()).hexdigest()) for name, w in weights_of(model).items()}
        self._note(str(weights), control)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """HuggingFace's hook."""
        logs = state.log_history[-1].items()
        text = {key: value for key, value in logs if not key.startswith(TIMES) and not key.endswith("_per_second")}
        self._note(str(text), control)


def plain(algorithm: str, folder: Path, options: dict[str, Any]) -> Trace:
    """`trace` of options that several tests share, computed once."""
    key = f"{algorithm}{options}"
    if key not in _plain:
        _plain[key] = trace(algorithm, folder, options)
    return _plain[key]


def trace(algorithm: str, folder: Path, options: dict[str, Any], *, expected: Trace | None = None) -> Trace:
    """What `Traced` notes of a training."""
    traced = Traced(expected)
    make_trainer(algorithm, folder, **{**BASE, **options}, callbacks=[traced]).train()
    return traced.trace


@pytest.mark.parametrize("algorithm", ONLINE)
def test_every_option_is_listed(algorithm: str) -> None:
    assert not {*own_options(algorithm)} - {*ACTING} - NEUTRAL
    assert keys(algorithm).keys() <= keys("grpo").keys()


def test_no_key_is_listed_that_there_is_not() -> None:
    assert KEYS.keys() <= keys("grpo").keys()


@pytest.mark.parametrize(("algorithm", "name"), CASES, ids=lambda value: value)
def test_an_option_acts(algorithm: str, name: str, tmp_path: Path) -> None:
    value, companions = OTHERS[algorithm].get(name, ACTING[name])
    options = {**companions, name: value}
    if name == "sync_ref_model":  # its companion means nothing without it
        companions = {}
    check_difference(algorithm, tmp_path, options, companions)


EVERY_KEY = keys("grpo") | KEYS


@pytest.mark.parametrize("place", EVERY_KEY, ids=".".join)
def test_a_key_acts(place: tuple[str, str, str], tmp_path: Path) -> None:
    (option, _, key), (value, companions) = place, EVERY_KEY[place]
    options = {**companions, option: {**companions.get(option, {}), key: value}}
    check_difference("grpo", tmp_path, options, companions)


def check_difference(algorithm: str, folder: Path, options: dict[str, Any], others: dict[str, Any]) -> None:
    expected = plain(algorithm, folder / "without", others)
    assert trace(algorithm, folder / "with", options, expected=expected) != expected


# What other options belong to.
SWITCHES = {
    "advantage_estimator",
    "curriculum",
    "dynamic_sampling",
    "kl_estimator",
    "reward_balance",
    "loss_type",
    "rollout_selection",
    "sync_ref_model",
    "use_adaptive_entropy",
}
DEPENDENT = [name for name, (_, needs) in ACTING.items() if SWITCHES & needs.keys() and name != "kl_in"]
DEPENDENT_KEYS = [
    place
    for place, (_, needs) in EVERY_KEY.items()
    if SWITCHES & needs.keys() and place != ("advantage_kwargs", "grpo_passk", "advantage_epsilon")
]


@pytest.mark.parametrize("name", DEPENDENT)
def test_an_option_whose_switch_is_off_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=name):
        make_trainer("grpo", tmp_path, strict_options=True, **{name: ACTING[name][0]})


@pytest.mark.parametrize("place", DEPENDENT_KEYS, ids=".".join)
def test_a_key_of_another_choice_is_refused(place: tuple[str, str, str], tmp_path: Path) -> None:
    option, _, key = place
    with pytest.raises(ConfigError, match=f"{option}.*{key}"):
        make_trainer("grpo", tmp_path, strict_options=True, **{option: {key: EVERY_KEY[place][0]}})
