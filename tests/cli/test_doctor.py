"""`prefrl doctor` and `prefrl env`, and what a training looks at before it loads the model."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from pyarrow import parquet
from transformers import Qwen2Config, Qwen2ForCausalLM

from prefrl.errors import ConfigError, DataError
from prefrl.generation.server import key_of_user
from prefrl.generation.vllm.members import Registration
from prefrl.models import load
from prefrl.models.footprint import Footprint, weights_of
from prefrl.registry import REGISTRY
from prefrl.scripts import commands
from prefrl.scripts.arguments.launch import LaunchArguments, launch_options
from prefrl.scripts.checkup import resources
from prefrl.scripts.checkup.checkup import check_run
from prefrl.scripts.checkup.dataset import Batches, warn_of_blank_prompts
from prefrl.scripts.checkup.findings import Checkup, Section, check_data
from prefrl.scripts.checkup.parallel import footprint_of_process
from prefrl.scripts.checkup.resources import MicroBatch, SharedMemory, footprint_of, least_seconds
from prefrl.scripts.checkup.subject import Subject, plan_of
from prefrl.scripts.inputs import options_of, read
from prefrl.scripts.main import main
from tests.assets import tiny_mixture, tiny_tokenizer
from tests.cli.conftest import write_jsonl

CPU = torch.device("cpu")


def checked(name: str, model: Path, *options: str) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """The entries of each section, and the rows that are shown."""
    argv = ["--model_name_or_path", str(model), "--use_cpu", "--output_dir", "out", *options]
    given = read(REGISTRY[name], argv)
    checkup = Checkup()
    check_run(checkup, REGISTRY[name], given, check_data(checkup, REGISTRY[name], given), launch_options(given, {}))
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


def test_routers_that_shall_replay_are_counted_and_missing_ones_are_a_problem(
    workspace: Path, model_folder: Path, tmp_path: Path
) -> None:
    write_jsonl(workspace / "prompts.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 8)
    words = ["--dataset_name", "prompts.jsonl", "--reward_funcs", "numeric_reward", "--router_replay", "true"]
    mixture = tmp_path / "mixture"
    tiny_mixture().save_pretrained(mixture)
    tiny_tokenizer().save_pretrained(mixture)
    found, _ = checked("grpo", mixture, *words)
    (text,) = [
        text for level, text in found["Model and tokenizer"] if text.startswith("router_replay") and level == "ok"
    ]
    assert text.startswith("router_replay: 2 routers (Qwen3MoeTopKRouter) choose 2 of 4 experts; whether")
    found, _ = checked("grpo", model_folder, *words)
    assert "router_replay does not work for Qwen2ForCausalLM" in words_of(found, "Model and tokenizer")


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


def test_blank_prompts_are_counted() -> None:
    section = Section("Rows")
    chats = [[{"role": "user", "content": text}] for text in ("1+1", " \n", "")]
    warn_of_blank_prompts(section, Dataset.from_list([{"prompt": prompt} for prompt in chats]))
    warn_of_blank_prompts(section, Dataset.from_list([{"prompt": " "}, {"prompt": "1+1"}]))
    warn_of_blank_prompts(section, Dataset.from_list([{"text": " "}]))
    assert [(level, text.partition(". ")[0]) for level, text in section.entries] == [
        ("warning", "2 of 3 rows have a blank prompt; the first is row 1"),
        ("warning", "1 of 2 rows have a blank prompt; the first is row 0"),
    ]


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


def test_a_teacher_is_counted_and_needs_the_same_vocabulary(workspace: Path, model_folder: Path) -> None:
    options = ["--teacher_model_name_or_path", str(model_folder), "--dataset_name", "prompts.jsonl"]
    argv = ["--model_name_or_path", str(model_folder), "--use_cpu", "--output_dir", "out", *options]
    algorithm, batch = REGISTRY["distillation"], MicroBatch(num_rows=2, num_fed=20, num_scored=10, prompt=0)
    subject = Subject(algorithm, *options_of(algorithm, read(algorithm, argv)))
    footprint, seconds = footprint_of(subject, batch), least_seconds(subject, batch, speed=1e9)["training"]
    assert footprint.reference == footprint.weights
    subject.teachers.clear()
    assert footprint_of(subject, batch).reference == 0
    assert seconds == pytest.approx(4 / 3 * least_seconds(subject, batch, speed=1e9)["training"])

    other = workspace / "other"
    shutil.copytree(model_folder, other)
    described = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps(described | {"vocab_size": 7}), encoding="utf-8")
    argv[argv.index("--teacher_model_name_or_path") + 1] = str(other)
    subject = Subject(algorithm, *options_of(algorithm, read(algorithm, argv)))
    with pytest.raises(ConfigError, match=r"^teacher_model_name_or_path='.*other' has a vocabulary of 7 tokens"):
        footprint_of(subject, batch)


def test_rows_of_a_teacher_are_checked_as_in_a_training(workspace: Path, model_folder: Path) -> None:
    write_jsonl(workspace / "rows.jsonl", [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(16)])
    assert main(["teacher", str(model_folder), "rows.jsonl", "--output", "rows.parquet", "--top_k", "4"]) == 0
    parquet.write_table(parquet.read_table("rows.parquet").drop_columns(["teacher_fingerprint"]), "less.parquet")
    of_file = {"dataset_name": "rows.parquet", "on_policy_fraction": "0", "max_completion_length": "8"}
    by_column = {"dataset_name": "named.jsonl", "teacher_model_name_or_path": json.dumps({"math": str(model_folder)})}
    write_jsonl(workspace / "named.jsonl", [{"prompt": f"{i}+1=", "teacher": "maths"} for i in range(16)])
    for options, message in (
        ({}, None),
        ({"temperature": "0.5"}, "row 0: the teacher's log-probs are at temperature 1.0, and temperature=0.5."),
        ({"dataset_name": "less.parquet"}, "train_dataset has no columns teacher_fingerprint: its columns are"),
        (
            {"eval_datasets": '[{"path": "rows.jsonl"}]', "eval_strategy": "epoch"},
            "eval_dataset has no columns teacher_ids, teacher_logprobs, teacher_ot",
        ),
        ({"teacher_model_name_or_path": str(model_folder)}, "both say what the teacher's distributions are"),
        ({**by_column, "on_policy_fraction": "1"}, "16 of 16 rows cannot be used: row 0: column 'teacher' is 'maths'"),
    ):
        words = [word for name, value in {**of_file, **options}.items() for word in (f"--{name}", value)]
        found, _ = checked("distillation", model_folder, *words)
        problems = [text for entries in found.values() for level, text in entries if level == "problem"]
        assert len(problems) == (message is not None), problems
        assert message is None or message in problems[0]


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
    monkeypatch.setattr(resources, "_available", lambda _: (200_000, "here"))
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
    monkeypatch.setattr(resources, "_available", lambda _: (0, "here"))
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


def test_the_copies_of_the_weights_that_changes_need_are_named(workspace: Path, model_folder: Path) -> None:
    options = ["--dataset_name", "prompts.jsonl", "--reward_funcs", "numeric_reward", "--num_generations", "2"]
    server = ["--use_vllm", "--vllm_server_base_url", "http://127.0.0.1:9", "--weight_sync", "delta"]
    found, _ = checked("grpo", model_folder, *options, *server)
    (text,) = (text for section in found.values() for _, text in section if "weight_sync" in text)
    assert "a copy of the weights, of up to " in text


def test_a_fleet_is_looked_for_and_who_is_not_in_it_is_told(workspace: Path, model_folder: Path) -> None:
    fleet = workspace / "fleet"
    options = ["--dataset_name", "prompts.jsonl", "--reward_funcs", "numeric_reward", "--num_generations", "2"]
    options += ["--use_vllm", "--vllm_server_base_url", f"dir:{fleet}"]
    found, _ = checked("grpo", model_folder, *options)
    assert found["Server"] == [
        ("warning", f"dir:{fleet}: there is no folder {fleet}"),
        ("warning", f"dir:{fleet} has no servers yet. A run waits for 120 s."),
    ]
    Registration(fleet, "http://127.0.0.1:9", key=key_of_user(os.environ)).renew()
    (fleet / "x.json").touch()
    found, _ = checked("grpo", model_folder, *options)
    (level, stranger), (_, silent) = found["Server"]
    assert level == "warning"
    assert stranger.startswith(f"dir:{fleet}: x.json: was not written by a server with the key of this run")
    assert silent.startswith("http://127.0.0.1:9 does not answer.")


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
        commands.doctor(["run.yaml"])
    with pytest.raises(ConfigError, match="Did you mean 'grpo'"):
        commands.doctor(["grpoo", "run.yaml"])


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


def words_of(found: dict[str, list[tuple[str, str]]], title: str) -> str:
    return "\n".join(f"{level}: {text}" for level, text in found[title])


def test_512_processes_are_checked_by_their_number(workspace: Path, model_folder: Path) -> None:
    write_jsonl(workspace / "prompts.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 1000)
    words = ["--dataset_name", "prompts.jsonl", "--reward_funcs", "numeric_reward", "--max_completion_length", "64"]
    words += ["--per_device_train_batch_size", "4", "--num_generations", "8", "--num_processes", "512"]
    found, _ = checked("grpo", model_folder, *words, "--accelerate_config", "zero3", "--bf16")
    text = words_of(found, "Processes")
    assert "ok: 512 processes with ZeRO-3; each holds its part of weights, gradients" in text
    assert "warning: a generation batch has 256 prompts for 512 processes: 256 ask for none, and wait" in text
    assert "note: 232 of 1,000 prompts do not fill a generation batch" in text
    assert "51,200 files, one for each of 100 generation batches" in text
    assert f"a checkpoint has about {4 * 512 + 20:,} files" in text
    assert "rollouts_000_of_512.safetensors, global_step1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt" in text
    assert "process 0 holds 1.20 times an equal part" in text  # 26,912 weights in small tensors
    assert "a step of all processes has up to about 133,120 tokens" in words_of(found, "Memory and time")


def test_a_step_is_forecast_from_costs(
    workspace: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two processes, with 8 completions of 10 tokens on average each, which sample themselves."""
    (workspace / "costs.yaml").write_text(
        "{flops: 1.0e+9, decode_step: 1.0, decode_token: 2.0, mean_length: 10, rest: 7}", encoding="utf-8"
    )
    words = ["grpo", "--model_name_or_path", str(model_folder), "--use_cpu", "--output_dir", "out"]
    words += ["--dataset_name", "prompts.jsonl", "--reward_funcs", "numeric_reward", "--max_completion_length", "32"]
    words += ["--per_device_train_batch_size", "8", "--num_generations", "8", "--num_processes", "2"]
    assert main(["doctor", *words, "--costs", "costs.yaml"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    generation = 32 * 1.0 + 16 * 10 * 2.0 / 2
    assert f"generation {generation / 60:.0f} min" in printed
    assert "rest 7 s" in printed
    assert main(["doctor", "sft", *words[1:6], "--dataset_name", "texts.jsonl", "--costs", "costs.yaml"]) == 2
    assert "problem  costs: are those of runs that sample completions" in capsys.readouterr().out
    assert main(["doctor", *words, "--costs", "costs.yaml", "--num_iterations", "2"]) == 2
    assert "problem  costs: this run takes 2 optimizer steps on each generation batch" in capsys.readouterr().out


def test_rows_and_evaluation_for_more_processes_than_there_are_rows(workspace: Path, model_folder: Path) -> None:
    rows = [{"text": f"text {i}"} for i in range(100)]
    write_jsonl(workspace / "train.jsonl", rows)
    write_jsonl(workspace / "test.jsonl", rows[:50])
    data = '{"path": "json", "data_files": {"train": "train.jsonl", "test": "test.jsonl"}}'
    words = ["--datasets", data, "--eval_strategy", "epoch", "--per_device_train_batch_size", "1"]
    words += ["--num_processes", "64", "--accelerate_config", "fsdp2"]
    found, _ = checked("sft", model_folder, *words)
    text = words_of(found, "Processes")
    assert "note: the last step of an epoch has 36 rows, and 28 of 64 processes have no row" in text
    assert "note: eval_dataset has 50 rows, and 14 of 64 processes have no row to evaluate" in text
    assert f"about {3 * 64 + 20} files" in text
    assert "rng_state_0.pth, pytorch_model_fsdp_0/__0_0.distcp, optimizer_0/__0_0.distcp" in text
    found, _ = checked("sft", model_folder, *words, "--gradient_accumulation_steps", "2")
    assert "warning: a step takes 128 rows, but the dataset has 100: each step is the whole" in words_of(
        found, "Processes"
    )
    found, _ = checked("sft", model_folder, *words, "--gradient_accumulation_steps", "2", "--dataloader_drop_last")
    assert "problem: a step takes 128 rows, the dataset has 100, and dataloader_drop_last=True" in words_of(
        found, "Processes"
    )


def test_a_stream_is_read_whole_by_each_process(workspace: Path, model_folder: Path) -> None:
    words = ["--dataset_name", "texts.jsonl", "--dataset_streaming", "--max_steps", "2", "--num_processes", "64"]
    found, _ = checked("sft", model_folder, *words)
    assert "warning: each process reads and tokenizes the 512 rows of all processes in each step" in words_of(
        found, "Processes"
    )


def test_processes_that_share_rows_have_to_divide_processes_and_heads(workspace: Path, model_folder: Path) -> None:
    config = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\nparallelism_config:\n"
    words = ["--dataset_name", "texts.jsonl", "--accelerate_config", "teams.yaml"]
    (workspace / "teams.yaml").write_text(f"{config}  parallelism_config_sp_size: 8\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="sp_size=8: must divide the number of processes, 60"):
        checked("sft", model_folder, *words, "--num_processes", "60")
    found, _ = checked("sft", model_folder, *words, "--num_processes", "64")
    assert "problem: parallelism_config.sp_size=8: must divide the model's 4 attention heads" in words_of(
        found, "Processes"
    )
    assert "* 8 teams of 8 processes = 64 rows a step" in words_of(found, "Batches")
    (workspace / "teams.yaml").write_text(f"{config}  parallelism_config_sp_size: 4\n", encoding="utf-8")
    found, _ = checked("sft", model_folder, *words, "--num_processes", "64")
    assert "problem" not in words_of(found, "Processes")


SHARED = SharedMemory(total=24 * 2**30, free=22 * 2**30, place="here", kept=6 * 2**30, weights=3 * 2**30, row=2**29)


def test_a_server_gets_what_training_leaves_of_the_device_that_they_share() -> None:
    assert SHARED.least == 4.5 * 2**30  # with what it computes in
    assert SHARED.share(None) == SHARED.most == 0.58  # (22 - 6 - 2 of libraries) / 24 = 0.583
    assert SHARED.share(0.19) == 0.19  # 4.5 / 24 = 0.1875
    assert replace(SHARED, free=24 * 2**30, kept=0).most == 0.9  # the largest there is
    for given in (0.18, 0.59):
        with pytest.raises(ConfigError, match=rf"vllm_gpu_memory_utilization={given}: must be from 0.19 to 0.58, bec"):
            SHARED.share(given)


def test_training_and_a_server_that_do_not_fit_are_told_with_their_figures() -> None:
    with pytest.raises(ConfigError) as caught:
        replace(SHARED, kept=16 * 2**30).share(None)
    assert str(caught.value) == (
        "vllm_mode='colocate': training keeps 16.00 GiB between its steps, the server needs at least 4.50 GiB "
        "(3.00 GiB for weights, 512.0 MiB for the cache of one completion, 1.00 GiB to compute), libraries 2.00 GiB, "
        "and 22.00 GiB are free here. Train an adapter with use_peft=True, a smaller model, or partition the weights: "
        "see docs/distributed.md; or leave vllm and use_vllm out, so that the training process samples."
    )


def shared_run(folder: Path, model: Path, *lines: str) -> list[str]:
    """The words of a run whose server shares the device."""
    write_jsonl(folder / "prompts.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 8)
    text = f"# prefrl grpo run.yaml\nmodel_name_or_path: {model}\ndataset_name: prompts.jsonl\nuse_cpu: true\n"
    text += "reward_funcs: [numeric_reward]\nuse_vllm: true\nvllm_mode: colocate\nmax_completion_length: 10\n"
    (folder / "run.yaml").write_text("\n".join([text, *lines]), encoding="utf-8")
    return ["run.yaml"]


def test_the_share_of_the_server_is_shown_and_counts_all_that_training_keeps(
    workspace: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shared_run(workspace, model_folder)
    assert main(["doctor", *words, "--device_memory", "4"]) == 0
    printed = capsys.readouterr().out
    assert "the run starts it (vllm='auto')" in printed
    count = weights_of(resources.outline_of(model_folder)).count
    kept = f"{4 * 4 * count / 2**20:.1f} MiB"  # weights, reference, and Adam's two numbers for each, in float32
    assert (
        f"the server gets 0.49 of the GPU's memory, 1.96 GiB, while it samples, and training keeps {kept}" in printed
    )
    assert main(["doctor", *words, "--device_memory", "3"]) == 2
    problem = r"problem  run\.yaml:\d+: vllm_mode='colocate': training keeps"
    assert re.search(problem, capsys.readouterr().out)
    assert main(["doctor", *words]) == 0
    assert "the server is on the CPU of training, where it keeps its memory while it sleeps" in capsys.readouterr().out
    shared_run(
        workspace, model_folder, f"reward_model_name_or_path: {model_folder}", "vllm_gpu_memory_utilization: 0.4"
    )
    assert main(["doctor", *words, "--device_memory", "4"]) == 0
    printed = capsys.readouterr().out
    assert "the server gets 0.40 of" in printed
    assert f"training keeps {kept}" not in printed, "the reward model is there, too"


def test_the_check_of_a_run_tells_the_launch_the_share(
    workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, file = shared_run(workspace, model_folder), workspace / "share"
    monkeypatch.setenv("PREFRL_NUM_PROCESSES", "1")
    monkeypatch.setenv("PREFRL_ONLY_CHECK", str(file))
    assert main(["grpo", *words]) == 0
    assert not file.exists(), "a CPU is not divided"
    monkeypatch.setattr(resources, "_shared_memory", lambda *_: SHARED)
    assert main(["grpo", *words]) == 0
    assert file.read_text() == "0.58"
    file.unlink()
    assert main(["grpo", *words, "--vllm_gpu_memory_utilization", "0.3"]) == 0
    assert not file.exists(), "the launch knows it"
    assert main(["grpo", *words, "--vllm_gpu_memory_utilization", "0.7"]) == 2


def test_memory_that_an_awake_server_has_is_not_missed(
    workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training process begins beside it. Before the server was started, both were found to fit."""
    words = shared_run(workspace, model_folder)
    script, config = options_of(REGISTRY["grpo"], read(REGISTRY["grpo"], words))
    subject = Subject(REGISTRY["grpo"], script, config)
    rows = subject.tokenized(Dataset.from_list([{"prompt": "1+1=", "answer": "2"}]))
    monkeypatch.setattr(resources, "_available", lambda _: (0, "here"))
    with pytest.raises(ConfigError, match="are free here"):
        resources.check_memory(subject, rows, Batches.of(subject, rows))
    monkeypatch.setenv("PREFRL_NUM_PROCESSES", "1")
    assert resources.check_memory(subject, rows, Batches.of(subject, rows)) is None


def test_the_memory_of_other_devices_is_what_the_user_says(
    workspace: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        f"# prefrl sft run.yaml\nmodel_name_or_path: {model_folder}\ndataset_name: texts.jsonl\nnum_processes: 512\n"
    )
    (workspace / "run.yaml").write_text(text, encoding="utf-8")
    assert main(["doctor", "run.yaml", "--device_memory", "0.5"]) == 0
    assert re.search(r"ok  .*needed by each of 512 processes, 512.0 MiB are free on each dev", capsys.readouterr().out)
    assert main(["doctor", "run.yaml", "--device_memory", "0.0001"]) == 2
    assert "problem" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert main(["doctor", "run.yaml"]) == 0
        assert "This machine has no GPU to compare with: --device_memory 80" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"device_memory=0\.0: must be a number > 0"):
        commands.doctor(["run.yaml", "--device_memory", "0"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0", "num_processes=0: must be a number >= 1"),
        ("-1", "num_processes=-1: must be a number >= 1"),
        ("many", "'many': must be a whole number"),
        ("1000000000", "num_processes=1000000000: must be a number >= 1 and <= 1000000"),
    ],
)
def test_numbers_of_processes_that_mean_nothing_are_refused(value: str, message: str, workspace: Path) -> None:
    (workspace / "run.yaml").write_text("# prefrl sft run.yaml\nmodel_name_or_path: m\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        commands.doctor(["run.yaml", "--num_processes", value])


# MiB of each of two processes at most, measured with a model of 109,548,288 weights; see docs/distributed.md.
MEASURED = {"ddp": 2214, "zero1": 1567, "zero2": 1480, "zero3": 1362, "fsdp2": 1149}


@pytest.mark.parametrize("backend", MEASURED)
def test_the_memory_of_a_process_is_that_which_was_measured_with_two(backend: str) -> None:
    sizes = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12}
    with torch.device("meta"):
        model = Qwen2ForCausalLM(
            Qwen2Config(vocab_size=32000, num_key_value_heads=6, tie_word_embeddings=True, **sizes)
        )
    config = SimpleNamespace(
        world_size=2, parallelism_config=None, deepspeed=None, fsdp=None, bf16=False, fp16=False, device=CPU
    )
    subject: Any = SimpleNamespace(config=config, model=model, trained=model)
    size = weights_of(model).total
    whole = Footprint(size, size, 2 * size, reference=0, activations=0, cache=0, first_gradients=size)
    plan = plan_of(config, LaunchArguments(accelerate_config=backend, num_processes=2))
    estimated = footprint_of_process(subject, plan, whole).peak / 2**20
    assert 0.96 <= estimated / MEASURED[backend] <= 1.0


def test_512_processes_hold_one_part_in_512_of_what_divides() -> None:
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(hidden_size=1024, intermediate_size=4096, vocab_size=65536))
    config = SimpleNamespace(
        world_size=512, parallelism_config=None, deepspeed=None, fsdp=None, bf16=True, fp16=False, device=CPU
    )
    subject: Any = SimpleNamespace(config=config, model=model, trained=model)
    weights = weights_of(model)
    whole = Footprint(weights.total, weights.total, 2 * weights.total, weights.total, 10**9, 10**8, weights.total)
    parts = {}
    for backend in ("ddp", "zero1", "zero2", "zero3", "fsdp2"):
        plan = plan_of(config, LaunchArguments(accelerate_config=backend, num_processes=512))
        parts[backend] = footprint_of_process(subject, plan, whole)
        assert parts[backend].activations == whole.activations
    half, equal = weights.total // 2, pytest.approx
    assert (parts["ddp"].weights, parts["ddp"].copies) == (weights.total, weights.total)
    assert (parts["zero1"].weights, parts["zero1"].gradients) == (half, half)  # DeepSpeed trains weights of 2 bytes
    assert (parts["zero1"].optimizer, parts["zero1"].copies) == (equal(4 * half / 512), equal(2 * half / 512))
    assert parts["zero2"].gradients == equal(half / 512)
    assert (parts["zero3"].weights, parts["zero3"].reference) == (equal(half / 512), equal(half / 512))
    assert parts["zero3"].cache == 10**8 + half  # sampling needs all weights
    assert parts["fsdp2"].weights == equal(weights.total / 512)
    assert parts["fsdp2"].copies == 0
