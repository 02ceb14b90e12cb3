"""`prefrl doctor` and `prefrl env`, and what a training looks at before it loads the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError, DataError
from prefrl.models import load
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.launch import launch_options
from prefrl.scripts.checkup import doctor, resources
from prefrl.scripts.checkup.findings import Section
from prefrl.scripts.checkup.resources import MicroBatch, footprint_of
from prefrl.scripts.checkup.run import checkup_of
from prefrl.scripts.checkup.subject import Subject
from prefrl.scripts.inputs import options_of, read
from prefrl.scripts.main import main
from tests.cli.conftest import write_jsonl


def checked(name: str, model: Path, *options: str) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """The entries of each section, and the rows that are shown."""
    argv = ["--model_name_or_path", str(model), "--use_cpu", "--output_dir", "out", *options]
    given = read(REGISTRY[name], argv)
    checkup = checkup_of(REGISTRY[name], given, launch_options(given, {}))
    texts = [str(shown) for section in checkup.sections for shown in section.shown]
    return {section.title: list(section.entries) for section in checkup.sections}, texts


def test_a_run_in_order_has_no_problem_and_the_mask_of_its_rows_is_shown(
    workspace: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "two"}]
    write_jsonl(workspace / "turns.jsonl", [{"messages": turns}])
    (workspace / "run.yaml").write_text(
        f"# prefrl sft run.yaml\nmodel_name_or_path: {model_folder}\ndataset_name: turns.jsonl\nuse_cpu: true\n"
        "assistant_only_loss: true\n",
        encoding="utf-8",
    )
    assert main(["doctor", "run.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "<|assistant|>[+two<|end|>+]" in printed
    assert "[+1+1" not in printed
    assert "0 problems, 0 warnings" in printed


def test_a_server_that_the_run_starts_need_not_answer_yet(workspace: Path, model_folder: Path) -> None:
    prompts = workspace / "prompts.jsonl"
    write_jsonl(prompts, [{"prompt": "1+1=", "answer": "2"}] * 8)
    words = ["--dataset_name", str(prompts), "--reward_funcs", "numeric_reward", "--vllm", "auto"]
    found, _ = checked("grpo", model_folder, *words, "--num_processes", "2")
    assert found["Server"] == [("ok", "the run starts it (vllm='auto')")]


def test_batches_are_those_of_all_processes_that_the_run_starts(workspace: Path, model_folder: Path) -> None:
    write_jsonl(workspace / "prompts.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 24)
    words = ["--dataset_name", "prompts.jsonl", "--reward_funcs", "numeric_reward", "--num_processes", "3"]
    words += ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--num_train_epochs", "1"]
    found, _ = checked("grpo", model_folder, *words, "--num_generations", "6")  # one process has 8 completions
    assert found["Batches"] == [
        ("ok", "4 completions in a micro-batch * 2 micro-batches * 3 processes = 24 completions a step"),
        ("ok", "4 prompts * 6 completions = 24 completions a generation batch, for 1 steps"),
        ("ok", "6 steps an epoch, 6 steps in all"),
    ]
    assert "are needed by each of 3 processes" in found["Memory and time"][0][1]
    words = ["--dataset_name", "texts.jsonl", "--num_processes", "2", "--per_device_train_batch_size", "1"]
    found, _ = checked("sft", model_folder, *words, "--num_train_epochs", "2")
    assert [text for _, text in found["Batches"]] == [
        "1 rows in a micro-batch * 1 micro-batches * 2 processes = 2 rows a step",
        "2 steps an epoch, 4 steps in all",
    ]


def test_mapped_columns_are_what_the_rows_show_and_a_mistake_has_its_line(
    workspace: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(workspace / "raw.jsonl", [{"question": "1+1?", "answer": "####2"}])
    text = (
        f"# prefrl sft run.yaml\nmodel_name_or_path: {model_folder}\ndataset_name: raw.jsonl\nuse_cpu: true\n"
        "columns:\n  completion: answer\nprompt_template: 'Q:{question}A:'\nsystem_prompt: Add.\n"
    )
    (workspace / "run.yaml").write_text(text, encoding="utf-8")
    _, shown = checked("sft", model_folder, "--config", "run.yaml")
    assert "<|system|>Add.<|end|><|user|>Q:1+1?A:<|end|><|assistant|>[+####2<|end|>+]" in "".join(shown)
    (workspace / "run.yaml").write_text(text.replace(": answer", ": anser"), encoding="utf-8")
    assert main(["doctor", "run.yaml"]) == 2
    expected = "run.yaml:5: columns: the dataset has no column 'anser'. Did you mean 'answer'?"
    assert f"problem  {expected}" in capsys.readouterr().out
    assert main(["sft", "run.yaml"]) == 2
    assert capsys.readouterr().err.endswith(f"prefrl sft: DataError: {expected}\n")


def test_pairs_with_equal_sides_duplicates_overlap_and_truncation_are_found(
    workspace: Path, model_folder: Path
) -> None:
    row = {"prompt": "1+1=", "chosen": "2, of course", "rejected": "3"}
    rows = [row, row, {**row, "chosen": "3"}]
    write_jsonl(workspace / "train.jsonl", rows)
    write_jsonl(workspace / "test.jsonl", [row])
    data = '{"path": "json", "data_files": {"train": "train.jsonl", "test": "test.jsonl"}}'
    found, _ = checked("dpo", model_folder, "--datasets", data, "--eval_strategy", "epoch", "--max_length", "8")
    texts = "\n".join(f"{level}: {text}" for entries in found.values() for level, text in entries)
    assert "warning: 1 of 3 pairs have chosen = rejected; the first is row 2" in texts
    refused = [line for line in texts.splitlines() if "1 of 3 rows cannot be used: row 2: " in line]
    assert [line.partition(":")[0] for line in refused] == ["problem"]
    assert "warning: 1 of 2 rows repeat an earlier row" in texts
    assert "warning: 2 of 2 rows have more than max_length=8 tokens" in texts
    assert "warning: 1 of 1 rows of eval_dataset are also in train_dataset" in texts


def test_rewards_are_tried_with_the_answers_of_the_rows(workspace: Path, model_folder: Path) -> None:
    options = ["--dataset_name", "prompts.jsonl", "--per_device_train_batch_size", "4", "--num_generations", "4"]
    found, _ = checked("grpo", model_folder, *options, "--reward_funcs", "numeric_reward", "my_rewards:short")
    assert found["Rewards"][0][1].startswith("numeric_reward, short: ")
    assert not [entry for entry in found["Rewards"] if entry[0] != "ok"]
    assert ("ok", "4 completions in a micro-batch * 1 micro-batches * 1 processes = 4 completions a step") in found[
        "Batches"
    ]
    (workspace / "my_rewards.py").write_text(
        "def flat(completions, **_):\n    return [0.5] * len(completions)\n", encoding="utf-8"
    )
    found, _ = checked("grpo", model_folder, *options, "--reward_funcs", "my_rewards.py:flat")
    assert "warning" in [level for level, _ in found["Rewards"]]


def test_a_prompt_of_another_type_is_a_problem_once(workspace: Path, model_folder: Path) -> None:
    write_jsonl(workspace / "numbers.jsonl", [{"prompt": 1, "solution": "2"}] * 8)
    found, _ = checked("grpo", model_folder, "--dataset_name", "numbers.jsonl", "--reward_funcs", "my_rewards:short")
    assert [level for level, _ in found["Rows"]] == ["problem"]
    assert "row 0, column 'prompt' is 1: needs a non-empty str" in found["Rows"][0][1]
    assert found["Rewards"][0][0] == "ok"


def test_an_adapter_needs_less_memory_for_gradients_and_optimizer(workspace: Path, model_folder: Path) -> None:
    parts = {}
    for name, options in {"all": [], "adapter": ["--use_peft", "--lora_r", "2"]}.items():
        argv = ["--model_name_or_path", str(model_folder), "--use_cpu", "--dataset_name", "pairs.jsonl", *options]
        subject = Subject(
            REGISTRY["dpo"], *options_of(REGISTRY["dpo"], read(REGISTRY["dpo"], [*argv, "--output_dir", "out"]))
        )
        parts[name] = footprint_of(subject, MicroBatch(num_rows=2, num_fed=20, num_scored=10, prompt=0))
    everything, adapter = parts["all"], parts["adapter"]
    assert everything.gradients == everything.weights
    assert everything.optimizer == 2 * everything.gradients
    assert 0 < adapter.gradients < everything.gradients / 4
    assert adapter.optimizer == 2 * adapter.gradients
    assert (everything.reference, adapter.reference) == (everything.weights, 0)
    assert adapter.activations > 0


SFT = ["sft", "--dataset_name", "texts.jsonl"]
GRPO = ["grpo", "--dataset_name", "prompts.jsonl", "--reward_funcs", "my_rewards:short", "--num_generations", "2"]
GRPO += ["--per_device_train_batch_size", "2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*GRPO, "--max_completion_length", "400"], r"MiB, but only 0.2 MiB are free here. Set max_tokens_per_micro"),
        ([*GRPO, "--max_completion_length", "4000"], r"max_completion_length=4000: the model has 512 positions"),
        ([*SFT, "--max_tokens_per_micro_batch", "1"], r"needed, of which optimizer 0.2 MiB, .*Train an adapter"),
    ],
)
def test_an_impossible_plan_is_a_problem_and_does_not_begin(
    words: list[str], message: str, workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "_free", lambda _: (200_000, "here"))
    found, _ = checked(words[0], model_folder, *words[1:])
    problems = [text for entries in found.values() for level, text in entries if level == "problem"]
    argv = [*words, "--model_name_or_path", str(model_folder), "--use_cpu", "--output_dir", "out"]
    with pytest.raises(ConfigError, match=message) as raised:
        main(["--debug", *argv])
    assert problems == [str(raised.value)]


@pytest.mark.parametrize("words", [["--max_tokens_per_micro_batch", "auto"], ["--accelerate_config", "zero3"]])
def test_memory_that_is_found_by_trial_or_shared_is_no_problem(
    words: list[str], workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "_free", lambda _: (0, "here"))
    found, _ = checked(*SFT[:1], model_folder, *SFT[1:], *words)
    assert found["Memory and time"][0][0] == "warning"


def test_a_batch_larger_than_the_dataset_needs_the_memory_of_its_rows(workspace: Path, model_folder: Path) -> None:
    needed = []
    for size in ("4", "10000000"):
        words = ["--dataset_name", "texts.jsonl", "--per_device_train_batch_size", size]
        found, _ = checked("sft", model_folder, *words)
        needed.append(found["Memory and time"][0][1].partition(" are needed")[0])
    assert needed[0] == needed[1]
    assert found["Batches"][-1] == ("note", "a micro-batch of 10,000,000 rows is never full: the dataset has 3")


def test_a_reward_that_fails_is_a_problem(workspace: Path, model_folder: Path) -> None:
    (workspace / "my_rewards.py").write_text("def f(completions, **_):\n    return [0.5]\n", encoding="utf-8")
    options = ["--dataset_name", "prompts.jsonl", "--reward_funcs", "my_rewards.py:f", "--num_generations", "2"]
    found, _ = checked("grpo", model_folder, *options)
    assert found["Rewards"][-1][0] == "problem"
    assert "returned 1 values for 2 completions" in found["Rewards"][-1][1]


def test_a_server_that_does_not_answer_is_named_with_the_command_that_starts_it(
    workspace: Path, model_folder: Path
) -> None:
    url = "http://127.0.0.1:9"  # the discard port, where nothing listens
    options = ["--dataset_name", "prompts.jsonl", "--reward_funcs", "numeric_reward", "--num_generations", "2"]
    found, _ = checked("grpo", model_folder, *options, "--use_vllm", "--vllm_server_base_url", url)
    ((level, text),) = found["Server"]
    assert level == "warning"
    assert text.startswith(f"{url} does not answer. ")
    assert f"prefrl vllm-serve --model {model_folder} --port 9" in text


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dpo", ["--dataset_name", "texts.jsonl"], "chosen"),
        ("grpo", ["--dataset_name", "prompts.jsonl", "--reward_funcs", "my_rewards.py:needy"], "solution"),
    ],
)
def test_a_missing_column_is_found_before_the_model_is_loaded(
    name: str,
    options: list[str],
    message: str,
    workspace: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (workspace / "my_rewards.py").write_text("def needy(completions, solution):\n    return []\n", encoding="utf-8")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(load, "_from_pretrained", refuse)
    argv = [name, "--model_name_or_path", str(model_folder), "--use_cpu", "--output_dir", "out", *options]
    with pytest.raises((ConfigError, DataError), match=message):
        main(["--debug", *argv])


def test_doctor_says_what_it_needs_to_know_the_algorithm(workspace: Path) -> None:
    (workspace / "run.yaml").write_text("dataset_name: x.jsonl\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no algorithm is given"):
        doctor.main(["run.yaml"])
    with pytest.raises(ConfigError, match="Did you mean 'grpo'"):
        doctor.main(["grpoo", "run.yaml"])


def test_env_prints_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert "- torch: 2." in printed
    assert "- CPU: " in printed


@pytest.mark.parametrize("level", ["ok", "note", "warn", "problem"])
def test_control_characters_in_a_finding_are_shown_as_text(level: str) -> None:
    section = Section("Data")
    getattr(section, level)("the column \x1b[2J\u202e")
    assert section.entries[0][1] == r"the column \x1b[2J\u202e"
