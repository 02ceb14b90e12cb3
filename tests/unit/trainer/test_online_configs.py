"""One parameter for each rule of the policy-gradient configs, and the presets."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from prefrl import ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig, ReinforcePlusPlusConfig, RLOOConfig
from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS
from prefrl.options.algorithms import PRESETS
from prefrl.options.fields import about
from prefrl.options.online import OnlineOptions
from prefrl.options.params import kwargs_options
from prefrl.options.policy import ClipCovParams, VespoParams
from prefrl.options.rollout import RolloutOptions
from prefrl.registry import REGISTRY
from prefrl.trainer.online.generators import sync_method
from prefrl.trainer.online.policy_objective import PolicyObjective
from prefrl.trainer.online.sampling import Episodes

RULES = [
    (GRPOConfig, {"top_entropy_quantile": 0.0}, "top_entropy_quantile=0.0: must be a number > 0"),
    (
        GRPOConfig,
        {"kl_estimator": "full", "kl_kwargs": {"bias_correction": True}},
        "not known with kl_estimator='full'. It goes",
    ),
    (GRPOConfig, {"advantage_estimator": "opo", "scale_rewards": "none"}, "scale_rewards='none' has no effect"),
    (GRPOConfig, {"reward_shaping_kwargs": {"stop_properly_penalty_coef": 2.0}}, "coef=2.0: must be a number <= 1"),
    (
        GRPOConfig,
        {"reward_balance": "nash", "reward_shaping_kwargs": {"missing_eos_penalty": 1.0}},
        "apply to the total reward",
    ),
    (
        GRPOConfig,
        {"advantage_estimator": "optimal_token_baseline", "loss_type": "vespo"},
        "ratio of whole sequences",
    ),
    (
        ReinforcePlusPlusConfig,
        {"advantage_estimator": "reinforce_plus_plus_baseline", "num_generations": 2, "gamma": 0.9},
        "gamma=0.9 has no effect",
    ),
    (PPOConfig, {"lam": 1.5}, "lam=1.5: must be a number >= 0 and <= 1"),
    (OnlineDPOConfig, {"loss_type": "hinge"}, "loss_type='hinge': must be one of 'sigmoid', 'ipo'"),
    (OnlineDPOConfig, {"beta": 0.0}, "beta=0.0: must be a number > 0"),
    (OnlineDPOConfig, {"beta": [0.1, 0.05]}, r"beta=\[0.1, 0.05\]: must be one number for all epochs"),
]
# What cannot be learned from group by group, or asked for ahead.
SERVER = {"use_vllm": True, "use_cpu": True}
BY_GROUP = [
    {"normalize_advantages": True},
    {"top_entropy_quantile": 0.5},
    {"loss_type": "kl_cov"},
    {"reward_shaping_kwargs": {"normalize": True}},
    {"dynamic_sampling": True},
    {"curriculum": "band"},
    {"rollout_selection": "pow"},
    {"loss_kwargs": {"positive_nll_coef": 0.1}},
    {"entropy_coef": 0.1, "loss_type": "grpo"},
    {"use_adaptive_entropy": True, "loss_type": "dr_grpo"},
    {"entropy_coef": 0.1, "loss_kwargs": {"min_filter_prefix_tokens": 1}},
    {"reward_balance": "nash"},
    {"advantage_estimator": "gpg"},
    {"scale_rewards": "batch"},
]


@pytest.mark.parametrize(
    ("config", "overrides", "message"), RULES, ids=lambda value: str(getattr(value, "__name__", ""))
)
def test_what_cannot_work_is_refused(config: Any, overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config(output_dir=str(tmp_path), **overrides)


@pytest.mark.parametrize("overrides", BY_GROUP, ids=str)
def test_what_needs_the_whole_batch_does_not_overlap(overrides: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"generation_mode='overlap' with {next(iter(overrides))}[=:]"):
        GRPOConfig(output_dir=str(tmp_path), generation_mode="overlap", **SERVER, **overrides)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_config_with_its_options(name: str, tmp_path: Path) -> None:
    options = PRESETS[name].options
    config = GRPOConfig.preset(name, output_dir=str(tmp_path), per_device_train_batch_size=64)
    assert {key: getattr(config, key) for key in options} == dict(options)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_needs_no_further_option(name: str, tmp_path: Path) -> None:
    config = GRPOConfig.preset(name, output_dir=str(tmp_path))
    group = config.num_generations
    assert config.completions_of_generation == max(group, 8)
    own = GRPOConfig.preset(name, output_dir=str(tmp_path), per_device_train_batch_size=2 * group)
    assert own.completions_of_generation == 2 * group
    if group > 1:
        with pytest.raises(ConfigError, match=f"multiple of num_generations={group}. The nearest that works is"):
            GRPOConfig.preset(name, output_dir=str(tmp_path), per_device_train_batch_size=group - 1)


def test_options_of_the_user_win_over_a_preset(tmp_path: Path) -> None:
    config = GRPOConfig.preset("dapo", output_dir=str(tmp_path), num_generations=4, epsilon_high=0.3)
    assert (config.loss_type, config.num_generations, config.epsilon_high) == ("dapo", 4, 0.3)


def test_an_unknown_preset_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preset 'dapoo': must be one of 'deepseekmath', 'dr_grpo', 'dapo'"):
        GRPOConfig.preset("dapoo", output_dir=str(tmp_path))


EPISODES = {
    "max_turns": 3,
    "max_tool_calling_iterations": 0,
    "tool_timeout": 1.0,
    "episode_timeout": 9.0,
    "max_concurrent_environments": 2,
    "tool_error": "raise",
    "environment_error": "drop",
    "reasoning_in_history": "keep",
    "tool_parser": "qwen2",
}


def test_every_option_of_episodes_is_listed_here() -> None:
    assert set(EPISODES) == {
        field.name for field in dataclasses.fields(OnlineOptions) if "episodes" in about(field).needs
    }


@pytest.mark.parametrize(("prompts", "samples"), [(1, 2), (4, 2), (2, 5)])
def test_batches_of_online_dpo_count_prompts(prompts: int, samples: int, tmp_path: Path) -> None:
    args = OnlineDPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=prompts,
        per_device_eval_batch_size=prompts,
        gradient_accumulation_steps=3,
        num_generations=samples,
    )
    assert args.completions_per_rank == 3 * prompts * samples
    assert args.prompts_per_evaluation_batch == prompts


@pytest.mark.parametrize("name", EPISODES)
def test_options_of_episodes_need_tools_or_environments(name: str, tmp_path: Path) -> None:
    for config in (GRPOConfig, PPOConfig, OnlineDPOConfig):
        args = config(output_dir=str(tmp_path), use_cpu=True, strict_options=True, **{name: EPISODES[name]})
        with pytest.raises(
            ConfigError, match=f"{name}=.* has no effect because there are no episodes. Set environment"
        ):
            Episodes(args, None, None)


def test_a_response_template_may_be_given_as_json(tmp_path: Path) -> None:
    def tool() -> str:
        """Say hello."""
        return "hello"

    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, tool_parser='{"fields": {}}')
    Episodes(args, [tool], None)
    assert args.tool_parser == {"fields": {}}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tool_timeout": 0}, "tool_timeout=0: must be a number > 0"),
        ({"episode_timeout": -1.0}, "episode_timeout=-1.0: must be"),
        ({"max_turns": 0}, "max_turns=0: must be"),
        ({"max_concurrent_environments": 0}, "max_concurrent_environments=0: must be"),
        ({"max_tool_calling_iterations": -1}, "max_tool_calling_iterations=-1: must be"),
        ({"tool_error": "ignore"}, "tool_error='ignore': must be one of 'tell', 'raise'"),
        ({"turn_credit": "return", "turn_discount": 1.5}, "turn_discount=1.5: must be"),
        (
            {"turn_credit": "return", "reward_balance": "nash"},
            "turn_credit='return' with reward_balance='nash': that applies to the total reward.* Remove one",
        ),
        (
            {"turn_credit": "return", "reward_shaping_kwargs": {"missing_eos_penalty": 1.0}},
            "turn_credit='return' with reward_shaping_kwargs",
        ),
        (
            {
                "turn_credit": "return",
                "advantage_kwargs": {"multi_objective_aggregation": "normalize_then_sum"},
            },
            "turn_credit='return' with multi_objective_aggregation='normalize_then_sum'",
        ),
    ],
    ids=str,
)
def test_what_episodes_refuse(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(output_dir=str(tmp_path), **overrides)


def test_the_discount_of_turns_is_not_that_of_tokens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"turn_discount=0.5 has no effect.* set gamma in advantage_kwargs"):
        ReinforcePlusPlusConfig(output_dir=str(tmp_path), turn_credit="return", turn_discount=0.5)
    args = RLOOConfig(output_dir=str(tmp_path), use_cpu=True, turn_credit="return", turn_discount=0.5)
    assert (args.turn_credit, args.turn_discount) == ("return", 0.5)


def test_a_filter_of_common_prefixes_is_refused_with_episodes(tmp_path: Path) -> None:
    def look() -> str:
        """Look."""
        return ""

    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, loss_kwargs={"min_filter_prefix_tokens": 1})
    Episodes(args, None, None)
    with pytest.raises(ConfigError, match="min_filter_prefix_tokens=1 with tools or environment_factory"):
        Episodes(args, [look], None)


def made(tmp_path: Path, cls: Any = GRPOConfig, **options: Any) -> Any:
    return cls(output_dir=str(tmp_path), report_to="none", **options)


def test_hyperparameters_are_those_of_the_choice_with_the_options_of_their_own(tmp_path: Path) -> None:
    vespo = made(tmp_path, loss_type="vespo", loss_kwargs={"k_pos": 1.5})
    assert vespo.loss_params == VespoParams(k_pos=1.5)
    cov = made(tmp_path, loss_type="clip_cov", epsilon_high=0.3, delta=1.5, loss_kwargs='{"ub": 9.0}')
    assert cov.loss_params == ClipCovParams(epsilon_high=0.3, delta=1.5, ub=9.0)
    assert made(tmp_path, PPOConfig, lam=0.5).advantage_params.lam == 0.5


def test_what_is_changed_before_the_trainer_reads_it_counts(tmp_path: Path) -> None:
    config = made(tmp_path)
    config.epsilon = 0.1
    assert config.loss_params.epsilon == PolicyObjective(config).loss_params.epsilon == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"loss_type": "aipo", "loss_kwargs": {"roh": 2.0}},
            "loss_kwargs: roh=2.0 is not known with loss_type='aipo'. Did you mean 'rho'?",
            id="misspelled",
        ),
        pytest.param(
            {"loss_kwargs": {"rho": 2.0}},
            "loss_kwargs: rho=2.0 is not known with loss_type='dapo'. It goes with loss_type='aipo'.",
            id="key of another choice",
        ),
        pytest.param(
            {"loss_type": "aipo", "loss_kwargs": {"rho": "1e1"}},
            "loss_kwargs: rho='1e1': must be a number >= 1. Write 10.0 without quotation marks",
            id="text",
        ),
        pytest.param(
            {"loss_type": "aipo", "loss_kwargs": {"rho": 0.5}},
            "loss_kwargs: rho=0.5: must be a number >= 1",
            id="range",
        ),
        pytest.param(
            {"dynamic_sampling": True, "dynamic_sampling_kwargs": {"reward_metric": 3}},
            "dynamic_sampling_kwargs: reward_metric=3: must be a string",
            id="no text",
        ),
        pytest.param(
            {"advantage_kwargs": {"multi_objective_aggregation": "sum"}},
            "advantage_kwargs: multi_objective_aggregation='sum': must be one of 'sum_then_normalize', 'norm",
            id="closed set",
        ),
        pytest.param(
            {"advantage_kwargs": {"multi_objective_aggregation": None}},
            "multi_objective_aggregation=None: must be one of",
            id="None in a closed set",
        ),
        pytest.param(
            {"loss_kwargs": {"epsilon": 0.1}},
            "loss_kwargs: epsilon=0.1 is a separate option. Set epsilon=0.1.",
            id="is a separate option",
        ),
        pytest.param(
            {"loss_type": "aipo", "epsilon": 0.1},
            "epsilon=0.1 has no effect because loss_type='aipo'. It goes with loss_type='grpo' or 'bnpo' or",
            id="option that the choice does not read",
        ),
        pytest.param({"delta": 1.1}, "delta=1.1: must be above 1 + epsilon_high", id="together, no key"),
        pytest.param(
            {"balance_kwargs": {"alpha": 0.1}},
            "balance_kwargs={'alpha': 0.1} has no effect because reward_balance=None. It goes with "
            "reward_balance='gradnorm'.",
            id="part that is off",
        ),
        pytest.param(
            {"beta": 0.0, "kl_kwargs": {"target": 0.1}},
            "kl_kwargs={'target': 0.1} has no effect because beta=0.0: there is no KL term. Set beta > 0.",
            id="no KL term",
        ),
        pytest.param(
            {"vllm_importance_sampling_kwargs": {"clip_max": 2.0}},
            "has no effect because sampling is not corrected. Leave vllm_importance_sampling_correction None",
            id="no correction",
        ),
        pytest.param(
            {"rollout_selection": "max_min", "selection_kwargs": {"x": 1}},
            "selection_kwargs: x=1 is not known with rollout_selection='max_min'. It has no keys.",
            id="no keys",
        ),
        pytest.param({"loss_kwargs": {1: 2}}, "loss_kwargs={1: 2}: must be a mapping such as", id="number"),
        pytest.param({"loss_kwargs": [1]}, 'loss_kwargs=[1]: must be a mapping such as {"key": 1}', id="list"),
        pytest.param({"loss_kwargs": "{rho"}, "loss_kwargs='{rho': must be a JSON object", id="JSON"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        made(tmp_path, strict_options=True, **options)


def test_an_estimator_that_the_config_does_not_choose_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"f_norm=2\.0 is not known with advantage_estimator='rloo'"):
        made(tmp_path, RLOOConfig, advantage_kwargs={"f_norm": 2.0})


@pytest.mark.parametrize("name", REGISTRY)
def test_defaults_are_allowed_and_options_of_their_own_have_the_same(name: str) -> None:
    config = REGISTRY[name].load_config()
    for option in kwargs_options(config):
        for params in option.choices.values():
            values = params()
            for own in option.own_options:
                if own in params.names() and hasattr(config, own):
                    assert getattr(values, own) == getattr(config, own)


UNCUT = {"use_vllm": True}
SOFTMAX = {**UNCUT, "truncated_logprobs": "softmax"}


def config(tmp_path: Path, **options: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**UNCUT, "vllm_server_port": 70000}, "vllm_server_port=70000: must be a number >= 1 and <= 65535"),
        ({**UNCUT, "vllm_server_timeout": 0}, "vllm_server_timeout=0: must be a number > 0"),
        ({**UNCUT, "vllm_server_base_url": "host:8000"}, "vllm_server_base_url='host:8000': must be like http"),
        ({**UNCUT, "weight_sync": "udp"}, "weight_sync='udp': must be one of 'nccl', 'gloo', 'ipc', 'shm', 'adapter'"),
        ({**UNCUT, "vllm_kwargs": "[1]"}, "vllm_kwargs='[1]': must be a JSON object"),
        (
            {
                **UNCUT,
                "generation_mode": "overlap",
                "advantage_kwargs": {"multi_objective_aggregation": "normalize_then_sum"},
            },
            "with multi_objective_aggregation='normalize_then_sum'",
        ),
        (
            {**SOFTMAX, "vllm_importance_sampling_correction": True, "min_p": 0.1, "top_p": 0.9},
            "with top_p=0.9, min_p=0.1",
        ),
        (
            {**UNCUT, "vllm_importance_sampling_correction": True, "vllm_guided_decoding_regex": "a"},
            "with vllm_guided_decoding_regex='a'",
        ),
        ({**SOFTMAX, "generation_mode": "async", "top_k": 50}, "generation_mode='async' with top_k=50"),
        (
            {**SOFTMAX, "top_k": 50, "vllm_importance_sampling_mode": "token_mask"},
            "vllm_importance_sampling_mode='token_mask' has no effect because sampling is not corrected",
        ),
        (
            {**UNCUT, "vllm_importance_sampling_kwargs": {"clip_min": 2.0}},
            "vllm_importance_sampling_kwargs: clip_min=2.0: must be a number > 0 and <= 1",
        ),
    ],
)
def test_what_servers_cannot_do_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(tmp_path, strict_options=True, **options)


def test_sampling_is_corrected_where_both_sides_score_the_same_distribution(tmp_path: Path) -> None:
    assert config(tmp_path, **UNCUT, temperature=0.7).corrects_sampling
    assert config(tmp_path, **UNCUT, top_k=None).corrects_sampling
    for cuts in ({"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}):
        assert config(tmp_path, **UNCUT, **cuts).corrects_sampling
        assert not config(tmp_path, **SOFTMAX, **cuts).corrects_sampling
    assert not config(tmp_path, **UNCUT, vllm_guided_decoding_regex="a+").corrects_sampling
    assert not config(tmp_path, **UNCUT, vllm_kwargs={"guided_json": {"type": "object"}}).corrects_sampling
    assert not config(tmp_path, **UNCUT, vllm_importance_sampling_correction=False).corrects_sampling
    assert not config(tmp_path).corrects_sampling  # no server


@pytest.mark.parametrize("config_class", [GRPOConfig, RLOOConfig, ReinforcePlusPlusConfig, PPOConfig])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_default_switches_the_correction_off(config_class: Any, mode: str, tmp_path: Path) -> None:
    assert config_class(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, generation_mode=mode).corrects_sampling


@pytest.mark.parametrize(
    ("bounds", "prompt"),
    [
        ({"max_length": 512}, 256),
        ({"max_length": 512, "max_new_tokens": 64}, 448),
        ({"max_length": 512, "max_prompt_length": 100}, 100),
        ({"max_length": 512, "max_prompt_length": None}, 256),
        ({"max_length": 4096}, 512),
    ],
    ids=str,
)
def test_a_bound_of_prompt_and_completion_together_bounds_prompts(
    bounds: dict[str, Any], prompt: int, tmp_path: Path
) -> None:
    config = OnlineDPOConfig(output_dir=str(tmp_path), use_cpu=True, **bounds)
    assert (config.max_prompt_length, config.max_length) == (prompt, None)
    assert dataclasses.replace(config, max_completion_length=600).max_prompt_length == prompt


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_online_dpo_takes_a_server_by_defaults_and_corrects_nothing(mode: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "use_vllm": True}
    assert not OnlineDPOConfig(**options, generation_mode=mode).corrects_sampling


def test_a_server_is_named_by_host_and_port_or_by_urls(tmp_path: Path) -> None:
    assert config(tmp_path, use_vllm=True).server_urls == ["http://127.0.0.1:8000"]
    assert config(tmp_path, use_vllm=True, vllm_server_host="n5", vllm_server_port=1).server_urls == ["http://n5:1"]
    assert config(tmp_path, use_vllm=True, vllm_server_base_url="https://n5/").server_urls == ["https://n5"]


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("http://127.0.0.1:1", "/dev/shm"),
        ("http://localhost:1", "/dev/shm"),
        ("http://[::1]:1", "/dev/shm"),
        ("http://10.0.0.1:1", None),
        ("http://node5:1", None),
    ],
)
def test_a_folder_is_shared_with_servers_on_this_host(tmp_path: Path, url: str, folder: str | None) -> None:
    assert config(tmp_path, use_vllm=True, vllm_server_base_url=[url]).shared_folder == folder
    both = ["http://127.0.0.1:2", url]
    assert config(tmp_path, use_vllm=True, vllm_server_base_url=both).shared_folder == folder


def test_weights_go_the_way_that_fits(tmp_path: Path) -> None:
    here = config(tmp_path, use_vllm=True)
    elsewhere = config(tmp_path, use_vllm=True, vllm_server_host="node5")
    assert sync_method(here, has_adapter=False) == "gloo"
    assert sync_method(here, has_adapter=True) == "adapter"
    assert sync_method(elsewhere, has_adapter=True) == "gloo"
    assert sync_method(config(tmp_path, use_vllm=True, weight_sync="shm"), has_adapter=True) == "shm"
    with pytest.raises(ConfigError, match="weight_sync='adapter': the model has no adapter"):
        sync_method(config(tmp_path, use_vllm=True, weight_sync="adapter"), has_adapter=False)


def test_an_adapter_that_servers_would_cut_is_merged(tmp_path: Path) -> None:
    assert sync_method(config(tmp_path, use_vllm=True), has_adapter=True, reads_images=True) == "gloo"
    with pytest.raises(ConfigError, match=r"vision tower, where vLLM ignores it\. Restrict"):
        sync_method(config(tmp_path, use_vllm=True, weight_sync="adapter"), has_adapter=True, reads_images=True)


def test_modes_of_the_correction_are_the_keys_of_its_table() -> None:
    hints = get_type_hints(RolloutOptions)
    assert set(get_args(hints["vllm_importance_sampling_mode"])) == set(OFF_POLICY_CORRECTIONS)
