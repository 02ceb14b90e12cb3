"""Options that exclude each other are refused before torch is imported, in the words of the config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.options.presets import PRESETS
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.given import Given
from prefrl.scripts.inputs import read
from prefrl.scripts.schema.parser import SchemaParser

SERVER = {"use_vllm": True}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"upload_to": "~/runs/${trainer.experiment_name}"}),
    ("sft", {"packing_strategy": "wrapped"}),
    ("sft", {"packing": True, "max_length": None}),
    ("sft", {"dataset_kwargs": {"a": True}}),
    ("sft", {"adam_beta1": 1.0}),
    ("sft", {"max_steps": -2}),
    ("sft", {"optim": "adamw_torc"}),
    ("sft", {"lr_scheduler_type": "cosin"}),
    ("sft", {"lr_scheduler_type": "constant", "lr_decay_steps": 3}),
    ("sft", {"lr_scheduler_type": "one_cycle", "warmup_steps": 3}),
    ("sft", {"warmup_evaluations": 2}),
    ("sft", {"weight_decay_schedule": "linear"}),
    ("sft", {"regularization_type": "l1"}),
    ("sft", {"neftune_noise_alpha": 1.0}),
    ("sft", {"label_smoothing_factor": 0.1}),
    ("sft", {"eval_epochs": 2.0}),
    ("sft", {"nan_patience": 2}),
    ("sft", {"model_soup": "uniform"}),
    ("sft", {"early_stopping_kwargs": {"threshold": 0.1}}),
    ("sft", {"on_spike": "rollback", "spike_kwargs": {"treshold": 1.0}}),
    ("sft", {"on_spike": "rollback", "checkpoint_kwargs": {"save_optimizer": False}}),
    ("sft", {"effective_batch_size": 3, "per_device_train_batch_size": 2}),
    ("sft", {"gradient_accumulation_steps": "auto"}),
    ("sft", {"learning_rate": "auto", "optim": "sgd"}),
    ("sft", {"dataloader_persistent_workers": True}),
    ("sft", {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "forkserver"}),
    ("dpo", {"loss_type": ["sigmo"]}),
    ("dpo", {"loss_type": ["hinge"], "label_smoothing": 0.1}),
    ("dpo", {"loss_type": ["sigmoid", "sigmoid"]}),
    ("dpo", {"loss_type": ["nca_pair"], "f_divergence_type": "js_divergence"}),
    ("dpo", {"f_alpha_divergence_coef": 0.1}),
    ("dpo", {"precompute_ref_log_probs": True, "sync_ref_model": True}),
    ("kto", {"desirable_weight": 0.0, "undesirable_weight": 0.0}),
    ("bco", {"min_density_ratio": 11.0}),
    ("cpo", {"loss_type": "alphapo"}),
    ("grpo", {"num_generations": 3}),
    ("grpo", {"num_generations": 1}),
    ("grpo", {"generation_batch_size": 12}),
    ("grpo", {"steps_per_generation": 3, "gradient_accumulation_steps": 2}),
    ("grpo", {"loss_kwargs": {"rho": 4.0}}),
    ("grpo", {"loss_type": "aipo", "loss_kwargs": {"rho": 0.5}}),
    ("grpo", {"sapo_temperature_pos": 1.0}),
    ("grpo", {"beta": 0.0, "kl_kwargs": {"target": 0.1}}),
    ("grpo", {"kl_in": "reward", "kl_estimator": "full"}),
    ("grpo", {"importance_sampling_level": "sequence", "loss_type": "dppo"}),
    ("grpo", {"truncated_logprobs": "softmax"}),
    ("grpo", {"filter_overlong_prompts": True, "max_prompt_length": None}),
    ("grpo", {"advantage_estimator": "remax", "generation_mode": "overlap", **SERVER}),
    ("grpo", {"generation_mode": "overlap", "num_iterations": 2, **SERVER}),
    ("grpo", {"generation_mode": "overlap", "dynamic_sampling": True, **SERVER}),
    ("grpo", {"generation_mode": "async", "max_staleness": 1, "num_iterations": 2, **SERVER}),
    ("grpo", {"cache_implementation": "dynamic", **SERVER}),
    ("grpo", {"vllm_server_base_url": ["ftp://host"], **SERVER}),
    ("grpo", {"vllm_kwargs": {"sync_folder": "a"}, "weight_sync": "gloo", **SERVER}),
    ("rloo", {"num_generations": 1}),
    ("reinforce_plus_plus", {"advantage_estimator": "reinforce_plus_plus_baseline"}),
    ("reinforce_plus_plus", {"loss_type": "gmpo"}),
    ("ppo", {"critic_warmup": 3, "max_steps": 2}),
    ("ppo", {"critic_optim_kwargs": {"lr": 1.0}}),
    ("online_dpo", {"num_generations": 1}),
    # Hyperparameters among each other.
    ("grpo", {"delta": 1.1}),
    ("grpo", {"loss_type": "clip_cov", "loss_kwargs": {"lb": 6.0}}),
    ("grpo", {"kl_kwargs": {"horizon": 20}}),
    ("grpo", {"advantage_kwargs": {"clip_range": [1.0, 2.0]}}),
    ("grpo", {"reward_shaping_kwargs": {"clip_range": [2.0, 1.0]}}),
    ("grpo", {"curriculum": "band", "curriculum_kwargs": {"band": [0.5, 1.5]}}),
    ("grpo", {"reward_balance": "famo", "balance_kwargs": {"decay": 1.0}}),
    ("grpo", {"scale_rewards": "none", "advantage_kwargs": {"multi_objective_aggregation": "normalize_then_sum"}}),
    ("dpo", {"loss_type": ["sft", "exo_pair"], "label_smoothing": 0.5}),
    ("dpo", {"loss_type": ["robust"], "label_smoothing": 0.5}),
    ("sft", {"on_spike": "rollback", "spike_kwargs": {"metrics": ["los"]}}),
    # Hyperparameters and options.
    ("grpo", {"use_adaptive_entropy": True, "entropy_coef": 2.0}),
    ("grpo", {"kl_in": "reward", "kl_estimator": "k1", "kl_kwargs": {"bias_correction": True}}),
    ("grpo", {"kl_estimator": "sequence", "loss_type": "grpo"}),
    ("grpo", {"rollout_selection": "best"}),
    ("grpo", {"reward_balance": "nash", "reward_weights": [1.0, -1.0]}),
    ("grpo", {"reward_balance": "nash", "reward_shaping_kwargs": {"normalize": True}}),
    ("grpo", {"reward_balance": "nash", "advantage_estimator": "remax"}),
    ("reinforce_plus_plus", {"reward_balance": "nash"}),
    ("grpo", {"turn_discount": 0.5}),
    ("grpo", {"turn_credit": "return", "normalize_advantages": True}),
    ("grpo", {"turn_credit": "return", "advantage_estimator": "opo"}),
    ("grpo", {"generation_mode": "overlap", "scale_rewards": "batch", **SERVER}),
    ("grpo", {"generation_mode": "overlap", "loss_kwargs": {"positive_nll_coef": 0.1}, **SERVER}),
    ("grpo", {"generation_mode": "overlap", "reward_shaping_kwargs": {"normalize": True}, **SERVER}),
    ("grpo", {"chat_template_kwargs": "{a"}),
    # Optimizers and schedules.
    ("sft", {"optim": "lbfgs"}),
    ("sft", {"optim": "adam", "optim_args": "momentum=1"}),
    ("sft", {"optim": "adam", "optim_args": "amsgrad"}),
    ("sft", {"optim": "adadelta", "adam_epsilon": 1e-6}),
    ("sft", {"optim": "rprop", "weight_decay": 0.1}),
    ("sft", {"learning_rates": {"(": 1.0}}),
    ("sft", {"learning_rates": {"a": 1.0}, "optim": "lomo"}),
    ("ppo", {"critic_optim_kwargs": {"max_grad_norm": 1.0}, "max_grad_norm": 0.0}),
    ("ppo", {"critic_optim_kwargs": {"warmup_steps": 2}, "lr_scheduler_type": "constant"}),
    ("ppo", {"critic_warmup": 2, "optim": "asgd"}),
    ("sft", {"reduce_on_plateau_kwargs": {"patience": 2}}),
    ("sft", {"reduce_on_plateau": 1}),
    ("sft", {"reduce_on_plateau": 1, "reduce_on_plateau_kwargs": {"metric": "reward"}}),
    ("sft", {"reduce_on_plateau": 1, "logging_steps": 2, "reduce_on_plateau_kwargs": {"metric": "loss"}}),
    ("sft", {"lr_decay_steps": 3, "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}),
    ("sft", {"lr_scheduler_type": "wsd", "warmup_steps": 5, "lr_scheduler_kwargs": {"warmup_fraction": 0.2}}),
    ("sft", {"warmup_start_factor": 0.5}),
    # What the CPU cannot do.
    ("sft", {"activation_offloading": True}),
    ("sft", {"fp16": True}),
    ("sft", {"use_liger_kernel": True}),
    ("sft", {"torch_compile_mode": "reduce-overhead"}),
    ("grpo", {"cache_implementation": "offloaded"}),
    ("grpo", {"weight_sync": "nccl", **SERVER}),
]


def check(name: str, options: dict[str, Any]) -> Any:
    return SchemaParser(name).check(Given(options, places={}, takes_rewards=False))


@pytest.mark.parametrize(("name", "options"), REFUSED, ids=lambda value: json.dumps(value).replace('"', ""))
def test_the_command_refuses_what_the_config_refuses_in_the_same_words(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as by_config:
        REGISTRY[name].load_config()(output_dir=str(tmp_path), use_cpu=True, **options)
    with pytest.raises(ConfigError) as by_command:
        check(name, {"use_cpu": True, **options})
    assert str(by_command.value) == str(by_config.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("output_dir", "checkpoints/${trainer.project_name}"),
        ("model_name_or_path", "${oc.env:HOME}/model"),
        ("dataset_name", "${data"),
        ("reward_model_name_or_path", "models/${name}"),
        ("datasets", ['{"path": "json", "data_files": {"train": "${data}/a.json"}}']),
    ],
)
def test_a_path_with_a_reference_is_refused(option: str, value: Any) -> None:
    options: dict[str, Any] = {"model_name_or_path": "m", "output_dir": "o", "reward_funcs": "format_reward"}
    options |= {"dataset_name": "d"} if option != "datasets" else {}
    words = [word for name, given in (options | {option: value}).items() for word in (f"--{name}", given)]
    argv = [part for word in words for part in (word if isinstance(word, list) else [word])]
    with pytest.raises(ConfigError, match=rf"^{option}.*the reference \$\{{.* is not replaced .* Write out the path"):
        read(REGISTRY["grpo"], argv)


@pytest.mark.parametrize("name", REGISTRY)
def test_defaults_exclude_nothing(name: str) -> None:
    check(name, {})


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_exclude_nothing(preset: str) -> None:
    check("grpo", {"preset": preset})


def test_a_warmup_that_is_counted_in_evaluations_is_one() -> None:
    options = {"warmup_evaluations": 2, "eval_strategy": "steps", "eval_steps": 3, "warmup_start_factor": 0.5}
    assert check("sft", options).warmup_steps == 6


def test_what_a_gpu_can_do_is_not_refused_before_the_device_is_known() -> None:
    check("sft", {"activation_offloading": True, "fp16": True, "use_liger_kernel": True})


def test_own_options_take_precedence_over_a_preset() -> None:
    config = check("grpo", {"preset": "pods", "selection_kwargs": {}, "num_generations": 8})
    assert (config.num_generations, config.selection_kwargs) == (8, {"num_selected": 4})
    with pytest.raises(ConfigError, match=r"vespo_k_pos=2.0 and loss_kwargs=.*: given both ways"):
        check("grpo", {"vespo_k_pos": 2.0, "loss_kwargs": {"k_pos": 4.0}, "loss_type": "vespo"})


def test_every_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be a multiple of num_generations=16"):
        check("grpo", {"num_generations": 16})
    monkeypatch.setenv("WORLD_SIZE", "2")
    check("grpo", {"num_generations": 16})


def test_sizes_are_left_to_the_processes_that_train() -> None:
    words = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "r", "--num_generations", "16"]
    with pytest.raises(ConfigError, match="must be a multiple of num_generations=16"):
        read(REGISTRY["grpo"], words)
    read(REGISTRY["grpo"], [*words, "--num_processes", "2"])
    read(REGISTRY["grpo"], words, is_launched=True)
