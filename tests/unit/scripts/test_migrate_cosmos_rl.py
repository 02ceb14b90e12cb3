"""cosmos-rl's TOML: what the keys mean that only make sense together."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from prefrl import ConfigError
from prefrl.scripts.migrate.cosmos_rl import migrate_cosmos_rl

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
    options, left = migrated("[train.train_policy.reward_function]\nsingle_choice = 0.5\nformat = 0.25\n")
    assert (options["reward_funcs"], options["reward_weights"]) == (["format_reward"], [0.25])
    assert "single_choice: write a function" in left


def test_dapo_selects_prompts_by_the_reward_under_its_name_here() -> None:
    filtered = 'reward_function = "boxed_math"\nfilter_reward_metric = "boxed_math"\nmax_retry_for_on_policy = 3\n'
    options, left = migrated(f'variant = "dapo"\n{filtered}')
    assert options["dynamic_sampling_kwargs"] == {"max_tries": 3, "reward_metric": "accuracy_reward"}
    assert (options["dynamic_sampling"], left) == (True, "")
    plain = migrated(f'variant = "grpo"\n{filtered}')[0]  # reads neither key
    assert not {"dynamic_sampling", "dynamic_sampling_kwargs"} & plain.keys()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('filter_reward_metric = ["boxed_math", "format"]', "set the key reward_metric"),
        ('filter_reward_metric = "gsm8k"', "set the key reward_metric"),
        ("max_retry_for_on_policy = -1", "the tries are bounded here"),
    ],
)
def test_a_selection_that_is_not_there_is_to_do(given: str, words: str) -> None:
    options, left = migrated(f'variant = "dapo"\nreward_function = ["boxed_math", "format"]\n{given}\n')
    assert "dynamic_sampling_kwargs" not in options
    assert words in left


def test_held_out_rows_are_those_of_the_dataset() -> None:
    size = 'reward_function = "boxed_math"\ndataset.split = ["a", "b"]\ndataset.test_size = 4\n'
    options, left = migrated(f"{size}[validation]\nenable = true\nfreq = 2\n")
    entry = {"path": "d", "split": "a+b", "columns": {"prompt": "question", "solution": "answer"}}
    assert (options["datasets"], options["test_split_size"], left) == ([entry], 4, "")
    assert not {"dataset_name", "dataset_train_split", "columns"} & options.keys()
    off = migrated(size)[0]
    assert (off["dataset_name"], "test_split_size" in off) == ("d", False)


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
def test_a_value_of_another_type_is_refused(given: str, words: str) -> None:
    text = HEAD.format(train="").replace('response_column_name = "answer"\n', "")
    with pytest.raises(ConfigError) as caught:
        migrate_cosmos_rl(text + given)
    assert words in str(caught.value)
