"""Options that exclude each other are refused before torch is imported, in the words of the config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.options.presets import PRESETS
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.command import Given
from prefrl.scripts.inputs import read
from prefrl.scripts.schema.parser import SchemaParser

SERVER = {"use_vllm": True}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"upload_to": "~/runs/${trainer.experiment_name}"}),
    ("sft", {"adam_beta1": 1.0}),
    ("sft", {"max_steps": -2}),
    ("sft", {"optim": "adamw_torc"}),
    ("sft", {"lr_scheduler_type": "cosin"}),
    ("sft", {"early_stopping_kwargs": {"threshold": 0.1}}),
    ("sft", {"on_spike": "rollback", "spike_kwargs": {"treshold": 1.0}}),
    ("sft", {"effective_batch_size": 3, "per_device_train_batch_size": 2}),
    ("sft", {"gradient_accumulation_steps": "auto"}),
    ("dpo", {"loss_type": ["hinge"], "label_smoothing": 0.1}),
    ("grpo", {"loss_kwargs": {"rho": 4.0}}),
    ("grpo", {"loss_type": "aipo", "loss_kwargs": {"rho": 0.5}}),
    ("grpo", {"sapo_temperature_pos": 1.0}),
    ("grpo", {"beta": 0.0, "kl_kwargs": {"target": 0.1}}),
    ("ppo", {"critic_optim_kwargs": {"lr": 1.0}}),
    # Hyperparameters among each other.
    # Hyperparameters and options.
    ("grpo", {"reward_balance": "nash", "reward_shaping_kwargs": {"normalize": True}}),
    ("grpo", {"turn_discount": 0.5}),
    ("grpo", {"generation_mode": "overlap", "scale_rewards": "batch", **SERVER}),
    ("grpo", {"generation_mode": "overlap", "loss_kwargs": {"positive_nll_coef": 0.1}, **SERVER}),
    ("grpo", {"generation_mode": "overlap", "reward_shaping_kwargs": {"normalize": True}, **SERVER}),
    ("grpo", {"chat_template_kwargs": "{a"}),
    # Optimizers and schedules.
    ("sft", {"optim": "lbfgs"}),
    ("sft", {"optim": "adam", "optim_args": "amsgrad"}),
    ("sft", {"learning_rates": {"(": 1.0}}),
    ("sft", {"reduce_on_plateau_kwargs": {"patience": 2}}),
    # What the CPU cannot do.
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
