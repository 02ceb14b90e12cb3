"""verl's SFT trainer, and what its configs mean that only makes sense together."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from prefrl import ConfigError
from prefrl.scripts.migrate.verl import migrate_verl

SFT = """\
data:
  train_files: a.parquet
  val_files: b.parquet
  prompt_key: question
  response_key: answer
  prompt_dict_keys: [question]
  train_batch_size: 16
  micro_batch_size_per_gpu: 2
  max_length: 256
  truncation: right
optim:
  lr: 3e-5
  betas: [0.8, 0.9]
  weight_decay: 0.05
  warmup_steps_ratio: 0.2
  clip_grad: 0.5
  lr_scheduler: cosine
model:
  partial_pretrain: org/model
  fsdp_config:
    model_dtype: bf16
  lora_rank: 8
  lora_alpha: 4
  target_modules: all-linear
  enable_gradient_checkpointing: true
trainer:
  default_local_dir: runs/${trainer.project_name}/${trainer.experiment_name}
  project_name: p
  experiment_name: e
  total_epochs: 2
  seed: 7
  logger: [console]
"""
EXPECTED = {
    "bf16": True,
    "learning_rate": 3e-5,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "weight_decay": 0.05,
    "warmup_steps": 0.2,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "truncation_mode": "keep_start",
    "max_length": 256,
    "num_train_epochs": 2,
    "seed": 7,
    "save_strategy": "no",
    "model_name_or_path": "org/model",
    "dtype": "bfloat16",
    "gradient_checkpointing": True,
    "use_peft": True,
    "lora_r": 8,
    "lora_alpha": 4,
    "lora_dropout": 0.0,
    "lora_target_modules": ["all-linear"],
    "output_dir": "runs/p/e",
    "project": "p",
    "run_name": "e",
    "report_to": "none",
    "datasets": [
        {
            "path": "parquet",
            "data_files": {"train": "a.parquet", "test": "b.parquet"},
            "columns": {"prompt": "question", "completion": "answer"},
            "conversational": True,
        }
    ],
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 8,
}


def test_every_value_of_an_sft_run_is_kept_and_nothing_is_invented() -> None:
    result = migrate_verl(SFT, is_command=False)
    assert result.text.startswith("# prefrl sft --config FILE\n")
    assert (yaml.safe_load(result.text), result.open) == (EXPECTED, [])


def test_rows_that_are_conversations_stay_so() -> None:
    text = SFT.replace("  max_length:", "  multiturn: {enable: true, messages_key: turns}\n  max_length:")
    (entry,) = yaml.safe_load(migrate_verl(text, is_command=False).text)["datasets"]
    assert entry["columns"] == {"messages": "turns"}
    assert "conversational" not in entry


@pytest.mark.parametrize(
    ("start", "processes", "left"),
    [
        ("torchrun --nnodes=1 --nproc_per_node=4", 4, ""),
        ("torchrun --nproc-per-node $N", None, "torchrun starts the processes"),
        ("python", None, ""),
    ],
)
def test_the_processes_of_a_script_are_those_that_it_starts(start: str, processes: int | None, left: str) -> None:
    words = "data.train_files=a.parquet data.train_batch_size=16 data.micro_batch_size=8 optim.lr=1e-4"
    text = f"{start} -m verl.trainer.fsdp_sft_trainer {words} model.partial_pretrain=m trainer.total_epochs=1\n"
    result = migrate_verl(text, is_command=True)
    options = yaml.safe_load(result.text)
    assert (options.get("num_processes"), options["learning_rate"]) == (processes, 1e-4)
    assert (options["per_device_train_batch_size"], options["gradient_accumulation_steps"]) == (
        8 // (processes or 1),
        2,
    )
    assert left in str(result.open)


LEFT: list[tuple[str, dict[str, Any], str]] = [
    ("data: {train_files: a, response_key: r, response_dict_keys: [x]}\noptim: {lr: 1}\n", {}, "nested texts columns"),
    ("data: {train_files: '${oc.env:D}/a'}\noptim: {lr: 1}\n", {}, "write out the value, which is not in this file"),
    ("optim: {lr: 1, lr_scheduler: wsd}\n", {"lr_scheduler_type": "cosine"}, "'wsd' cannot be converted"),
    (
        "algorithm: {adv_estimator: gae, norm_adv_by_std_in_grpo: true}\ncritic: {model: {path: c}}\n",
        {"critic": "model", "critic_learning_rate": 1e-5, "lam": 1.0},
        "value_model, in Python",
    ),
    ("defaults: [a]\nmodel: {path: m}\n", {"model_name_or_path": "m"}, "migrate the whole config"),
    ("algorithm: {adv_estimator: grpo}\ndata: {seed: 3}\n", {"data_seed": 3}, "verl scores by data_source"),
]


@pytest.mark.parametrize(("text", "options", "words"), LEFT)
def test_what_is_left_to_do_is_said(text: str, options: dict[str, Any], words: str) -> None:
    result = migrate_verl(text, is_command=False)
    assert options.items() <= yaml.safe_load(result.text).items()
    assert words in str(result.open)


def test_arguments_of_evaluations_and_of_engines_are_read_one_by_one() -> None:
    text = (
        "algorithm: {adv_estimator: grpo}\ntrainer: {test_freq: 1, n_gpus_per_node: 1}\nactor_rollout_ref:\n  model:\n"
        "    override_config: {attention_dropout: 0.1, model_config: {}, moe_config: {freeze_moe_router: false}}\n"
        "  actor:\n    optim: {num_cycles: 0.5}\n  rollout:\n    val_kwargs: {n: 3, temperature: 0.7, top_p: 0.9}\n"
        "    engine_kwargs: {vllm: {swap_space: null}, sglang: {attention_backend: null}}\n"
        "reward_model: {enable: false, micro_batch_size_per_gpu: 16, model: {path: r}}\n"
    )
    result = migrate_verl(text, is_command=False)
    options = yaml.safe_load(result.text)
    assert (options["num_generations_eval"], options["temperature_eval"]) == (3, 0.7)
    assert options["eval_sampling_kwargs"] == {"top_p": 0.9}
    assert options["model_init_kwargs"] == {"attention_dropout": 0.1}
    assert [said for _, said in result.open] == ["verl scores by data_source: set reward_funcs; see docs/rewards.md"]


def test_a_config_of_another_program_of_verl_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="use prefrl generate or prefrl eval"):
        migrate_verl("data: {path: a.parquet, prompt_key: prompt}\n", is_command=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {train_files: 3}\noptim: {lr: 1}\n", "data.train_files=3: must be a list or a text"),
        ("data: {train_batch_size: 0}\noptim: {lr: 1}\n", "data.train_batch_size=0: must be at least 1"),
        ("algorithm: {adv_estimator: [a]}\n", "algorithm.adv_estimator=['a']: must be a text"),
        ("algorithm: {adv_estimator: gae}\ntrainer: {nnodes: 1.5}\n", "trainer.nnodes=1.5: must be an integer"),
    ],
)
def test_a_value_of_another_type_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        migrate_verl(text, is_command=False)
    assert words in str(caught.value)
