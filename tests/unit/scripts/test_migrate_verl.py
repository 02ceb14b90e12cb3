"""Configs of verl and cosmos-rl: what the keys mean that only make sense together."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from prefrl import ConfigError
from prefrl.scripts.migrate.cosmos_rl import migrate_cosmos_rl
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
        {"critic": "model", "critic_learning_rate": 1e-5, "lam": 1.0, "value_model_name_or_path": "c"},
        "",
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


HEAD = """\
[policy]
model_name_or_path = "m"
model_max_length = 512
[rollout]
max_response_length = 64
n_generation = 4
[train]
output_dir = "o"
{train}
[train.train_policy]
type = "grpo"
dataset.name = "d"
prompt_column_name = "question"
response_column_name = "answer"
"""


def migrated(policy: str, train: str = "") -> tuple[dict[str, Any], str]:
    """The options, and what is left to do."""
    result = migrate_cosmos_rl(HEAD.format(train=train) + policy)
    return yaml.safe_load(result.text), "\n".join(text for _, text in result.open)


ANSWERS = [
    ("{boxed_math = 1.0}", ["accuracy_reward"], {"prompt": "question", "solution": "answer"}),
    ('"gsm8k"', ["numeric_reward"], {"prompt": "question"}),
    ('["format", "boxed_math"]', ["format_reward", "accuracy_reward"], {"prompt": "question", "solution": "answer"}),
]


@pytest.mark.parametrize(("rewards", "ours", "columns"), ANSWERS)
def test_the_answer_is_in_the_column_that_the_reward_reads(
    rewards: str, ours: list[str], columns: dict[str, str]
) -> None:
    options, left = migrated(f"reward_function = {rewards}\n")
    assert (options["reward_funcs"], options["columns"], left) == (ours, columns, "")


def test_an_answer_that_rewards_read_under_two_names_is_to_do() -> None:
    options, left = migrated('reward_function = ["gsm8k", "boxed_math"]\n')
    assert options["columns"] == {"prompt": "question"}
    assert "the rewards read the columns answer and solution" in left


def test_a_reward_that_is_not_there_is_to_do() -> None:
    options, left = migrated("[train.train_policy.reward_function]\nmy_own = 0.5\nsingle_choice = 0.25\n")
    assert (options["reward_funcs"], options["reward_weights"]) == (["single_choice_reward"], [0.25])
    assert "my_own: write a function" in left


def test_dapo_selects_prompts_by_the_reward_under_its_name_here() -> None:
    filtered = 'reward_function = "boxed_math"\nfilter_reward_metric = "boxed_math"\nmax_retry_for_on_policy = 3\n'
    options, left = migrated(f'variant = "dapo"\n{filtered}')
    assert options["dynamic_sampling_kwargs"] == {"max_tries": 3, "reward_metric": "accuracy_reward"}
    assert (options["dynamic_sampling"], left) == (True, "")
    both = 'reward_function = ["boxed_math", "format"]\nfilter_reward_metric = ["boxed_math", "format"]\n'
    options, left = migrated(f'variant = "dapo"\n{both}max_retry_for_on_policy = -1\n')
    assert options["dynamic_sampling_kwargs"] == {
        "max_tries": 0,
        "reward_metric": ["accuracy_reward", "format_reward"],
    }
    plain = migrated(f'variant = "grpo"\n{filtered}')[0]  # reads neither key
    assert not {"dynamic_sampling", "dynamic_sampling_kwargs"} & plain.keys()


def test_a_selection_that_is_not_there_is_to_do() -> None:
    given = 'reward_function = ["boxed_math", "format"]\nfilter_reward_metric = ["boxed_math", "gsm8k"]\n'
    options, left = migrated(f'variant = "dapo"\n{given}')
    assert "dynamic_sampling_kwargs" not in options
    assert "set the key reward_metric" in left


def test_held_out_rows_are_those_of_the_dataset() -> None:
    size = 'reward_function = "boxed_math"\ndataset.split = ["a", "b"]\ndataset.test_size = 4\n'
    options, left = migrated(f"{size}[validation]\nenable = true\nfreq = 2\n")
    entry = {"path": "d", "split": "a+b", "columns": {"prompt": "question", "solution": "answer"}}
    assert (options["datasets"], options["test_split_size"], left) == ([entry], 4, "")
    assert not {"dataset_name", "dataset_train_split", "columns"} & options.keys()
    off = migrated(size)[0]
    assert (off["dataset_name"], "test_split_size" in off) == ("d", False)


def test_evaluations_may_have_rewards_of_their_own() -> None:
    own = "[validation]\nenable = true\nreward_function = {gsm8k = 2.0, mine = 1.0}\n"
    options, left = migrated(f'reward_function = "boxed_math"\n{own}')
    assert (options["eval_reward_funcs"], options["eval_reward_weights"]) == (["numeric_reward"], [2.0])
    assert "mine: write a function, and add file.py:function to eval_reward_funcs and eval_reward_weights" in left


def test_a_penalty_of_long_completions_is_a_reward_with_its_factor() -> None:
    penalty = "[train.train_policy.overlong_reward]\nenable_overlong_penalty = true\npenalty_factor = 0.5\n"
    options, left = migrated(f'reward_function = "boxed_math"\n{penalty}buffer_length = 16\n')
    entry = "soft_overlong_punishment_reward(max_completion_len=64, soft_punish_cache=16)"
    assert (options["reward_funcs"], options["reward_weights"]) == (["accuracy_reward", entry], [1.0, 0.5])
    assert left == ""
    # Its buffer, 4096, is longer than a completion.
    longer, left = migrated(f'reward_function = "boxed_math"\n{penalty}')
    assert longer["reward_funcs"] == ["accuracy_reward"]
    assert "overlong: write a function" in left


def test_a_reference_that_is_reset_moves_all_the_way() -> None:
    reset = 'reward_function = "boxed_math"\nreference_reset_interval = 7\nreset_optimizer_with_reference = false\n'
    options, left = migrated(f"{reset}kl_beta = 0.1\n")
    assert (options["sync_ref_model"], options["ref_model_mixup_alpha"]) == (True, 1.0)
    assert (options["ref_model_sync_steps"], left) == (7, "")
    assert options["reset_optimizer_with_reference"] is False
    assert migrated(f"{reset.replace('reset_opt', '#')}kl_beta = 0.1\n")[0]["reset_optimizer_with_reference"] is True
    assert "sync_ref_model" not in migrated(reset)[0]  # there is no reference


@pytest.mark.parametrize(
    ("sizes", "accumulation", "generation"),
    [
        ("mini_batch = 4\n", 8, 8),
        ("mini_batch = 4\nbatch_size_per_optimize = 8\n", 2, 8),
        ("mini_batch = 4\nbatch_size_per_optimize = 64\n", 8, 8),
    ],
)
def test_a_batch_is_learned_from_in_one_step_or_in_several(sizes: str, accumulation: int, generation: int) -> None:
    options, left = migrated(f'reward_function = "boxed_math"\n{sizes}', train="train_batch_per_replica = 32")
    assert (options["gradient_accumulation_steps"], options["steps_per_generation"]) == (accumulation, generation)
    assert (options["per_device_train_batch_size"], left) == (4, "")


def test_prompts_have_the_room_that_completions_leave() -> None:
    options, _ = migrated('reward_function = "boxed_math"\n')
    assert (options["max_prompt_length"], options["filter_overlong_prompts"]) == (448, True)


@pytest.mark.parametrize(("tokens", "loss", "left"), [(64, "dr_grpo", ""), (32, "dapo", "dr_grpo' divides by")])
def test_a_constant_divisor_is_that_of_dr_grpo(tokens: int, loss: str, left: str) -> None:
    options, said = migrated(f'reward_function = "boxed_math"\nunbiased_loss_max_tokens = {tokens}\n')
    assert options.get("loss_type", "dapo") == loss
    assert left in said


def test_defaults_that_differ_are_written_out() -> None:
    options, _ = migrated("")
    assert (options["temperature"], options["weight_decay"], options["adam_epsilon"]) == (1.0, 0.01, 1e-6)
    assert (options["save_strategy"], options["num_train_epochs"]) == ("no", 1)
    assert "save_steps" not in options


@pytest.mark.parametrize(
    "value", ["-" * 20_000 + "1", "[" * 20_000 + "]" * 20_000, "9" * 20_000], ids=["minus", "depth", "digits"]
)
def test_toml_that_no_one_writes_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"nested too deeply|not TOML"):
        migrate_cosmos_rl(f"[train]\nepoch = {value}\n")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("mini_batch = 0", "train.train_policy.mini_batch=0: must be at least 1"),
        ('mini_batch = "a"', "train.train_policy.mini_batch='a': must be an integer"),
        ("response_column_name = 3", "response_column_name=3: must be a text"),
        ("reward_function = [1]", "must be a text, or a list of texts"),
        ('reward_function = {format = "a"}', "must have numbers as weights"),
        ("overlong_reward = {enable_overlong_penalty = true, penalty_factor = [1], buffer_length = 4}", "a number"),
    ],
)
def test_a_value_of_another_type_in_toml_is_refused(given: str, words: str) -> None:
    text = HEAD.format(train="").replace('response_column_name = "answer"\n', "")
    with pytest.raises(ConfigError) as caught:
        migrate_cosmos_rl(text + given)
    assert words in str(caught.value)
