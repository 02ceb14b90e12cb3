"""`prefrl sft` and `prefrl grpo` from files on disk to a saved model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefrl.errors import ConfigError, DataError
from prefrl.registry import REGISTRY
from prefrl.rewards import numeric_reward
from prefrl.scripts import train
from prefrl.scripts.main import main

ROOT = Path(__file__).parents[2]
QUICK = ["--use_cpu", "--max_steps", "2", "--logging_steps", "1", "--learning_rate", "1e-2", "--output_dir", "out"]
GRPO = ["--max_completion_length", "5", "--num_generations", "2", "--per_device_train_batch_size", "2"]


def history(folder: Path) -> list[dict[str, float]]:
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return [dict(entry) for entry in state["log_history"]]


def test_sft_trains_and_saves_a_model_that_loads(workspace: Path, model_folder: Path) -> None:
    argv = ["sft", "--model_name_or_path", str(model_folder), "--dataset_name", "texts.jsonl", *QUICK]
    assert main([*argv, "--save_steps", "2"]) == 0
    model = AutoModelForCausalLM.from_pretrained("out")
    before = AutoModelForCausalLM.from_pretrained(model_folder)
    assert not model.lm_head.weight.equal(before.lm_head.weight)
    assert AutoTokenizer.from_pretrained("out").eos_token == "<|end|>"
    losses = [entry["loss"] for entry in history(workspace / "out/checkpoint-2") if "loss" in entry]
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_grpo_trains_with_a_reward_of_the_working_directory(workspace: Path, model_folder: Path) -> None:
    (workspace / "run.yaml").write_text(
        f"model_name_or_path: {model_folder}\ndataset_name: prompts.jsonl\nreward_funcs: [my_rewards:short]\n",
        encoding="utf-8",
    )
    assert main(["grpo", "--config", "run.yaml", *QUICK, *GRPO, "--save_steps", "2"]) == 0
    logged = [entry for entry in history(workspace / "out/checkpoint-2") if "reward" in entry]
    assert len(logged) == 2
    assert all(-5 <= entry["rewards/short/mean"] <= 0 for entry in logged)
    assert (workspace / "out/model.safetensors").exists()


def test_grpo_with_lora_saves_an_adapter(workspace: Path, model_folder: Path) -> None:
    argv = ["grpo", "--model_name_or_path", str(model_folder), "--dataset_name", "chats.jsonl", *QUICK, *GRPO]
    lora = ["--use_peft", "--lora_r", "3", "--lora_target_modules", "q_proj", "--reward_funcs", "my_rewards:short"]
    assert main([*argv, *lora]) == 0
    adapter = load_file(workspace / "out/adapter_model.safetensors")
    assert {tensor.shape[0] for name, tensor in adapter.items() if "lora_A" in name} == {3}
    assert all("q_proj" in name for name in adapter)


def test_evaluation_reads_the_test_split(workspace: Path, model_folder: Path) -> None:
    argv = ["sft", "--model_name_or_path", str(model_folder), "--dataset_name", "texts.jsonl", *QUICK]
    splits = ["--dataset_train_split", "train[:2]", "--dataset_test_split", "train[2:]"]
    assert main([*argv, *splits, "--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "2"]) == 0
    evaluated = [entry for entry in history(workspace / "out/checkpoint-2") if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluated] == [1, 2]


def test_resume_goes_on_from_the_last_checkpoint(workspace: Path, model_folder: Path) -> None:
    argv = ["sft", "--model_name_or_path", str(model_folder), "--dataset_name", "texts.jsonl", *QUICK]
    argv += ["--save_steps", "1"]
    assert main(argv) == 0
    path = workspace / "out/checkpoint-2/trainer_state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    state["log_history"][0]["seen"] = 1.0
    path.write_text(json.dumps(state), encoding="utf-8")
    assert main([*argv, "--max_steps", "3", "--resume_from_checkpoint", "true"]) == 0
    resumed = [entry for entry in history(workspace / "out/checkpoint-3") if "loss" in entry]
    assert [entry["step"] for entry in resumed] == [1, 2, 3]
    assert resumed[0]["seen"] == 1.0  # the first two steps were not run again


class Recorder:
    """Stands in the place of a trainer and keeps what it was given."""

    given: ClassVar[dict[str, Any]] = {}

    def __init__(self, **arguments: Any) -> None:
        Recorder.given = arguments

    def train(self, resume_from_checkpoint: str | bool | None) -> None:
        Recorder.given["resume"] = resume_from_checkpoint

    def save_model(self, output_dir: str) -> None:
        Recorder.given["saved"] = output_dir

    def end(self) -> None:
        Recorder.given["ended"] = True


def test_what_the_command_line_says_reaches_the_trainer(workspace: Path) -> None:
    row = dataclasses.replace(REGISTRY["grpo"], trainer=f"{__name__}:Recorder")
    argv = ["--model_name_or_path", "m", "--model_revision", "v2", "--dataset_name", "prompts.jsonl", *QUICK]
    argv += ["--model_init_kwargs", '{"dtype": "bfloat16"}', "--resume_from_checkpoint", "out/checkpoint-7"]
    rewards = ["--reward_funcs", "numeric_reward", "my_rewards:short", "--reward_model_name_or_path", "judge"]
    assert train.main(row, [*argv, *rewards]) == 0
    given = Recorder.given
    assert given["ended"]
    assert given["model"] == "m"
    assert given["args"].model_init_kwargs == {"dtype": "bfloat16", "revision": "v2"}
    assert given["train_dataset"]["answer"][:] == ["2", "23"]
    assert given["eval_dataset"] is None
    assert given["peft_config"] is None
    assert given["reward_funcs"][0] is numeric_reward
    assert given["reward_funcs"][1](["abc"]) == [-3.0]
    assert given["reward_funcs"][2] == "judge"
    assert (given["resume"], given["saved"]) == ("out/checkpoint-7", "out")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--reward_funcs", "no_such_reward_at_all"], ConfigError, "no built-in reward, and no module:function"),
        (["--reward_funcs", "my_rewards:shrot"], ConfigError, "cannot be imported"),
        (["--reward_funcs", "my_rewards:NUMBER"], ConfigError, "is a int; a reward is a function"),
        (["--reward_funcs", "nowhere:short"], ConfigError, "No module named 'nowhere'"),
        (["--reward_funcs", "my_rewards:short", "--dataset_name", "no.jsonl"], DataError, "there is no such file"),
        (
            ["--reward_funcs", "my_rewards:short", "--dataset_train_split", "validation"],
            DataError,
            "dataset_train_split='validation' cannot be loaded",
        ),
        (
            ["--reward_funcs", "my_rewards:short", "--eval_strategy", "steps", "--dataset_test_split", "held_out"],
            DataError,
            "dataset_test_split='held_out' cannot be loaded",
        ),
        (
            [
                "--reward_funcs",
                "my_rewards:short",
                "--model_revision",
                "a",
                "--model_init_kwargs",
                '{"revision": "b"}',
            ],
            ConfigError,
            "remove one of them",
        ),
    ],
)
def test_what_cannot_be_found_is_named(
    workspace: Path, model_folder: Path, options: list[str], error: type[Exception], message: str
) -> None:
    argv = ["grpo", "--model_name_or_path", str(model_folder), "--dataset_name", "prompts.jsonl", *QUICK, *GRPO]
    with pytest.raises(error, match=message):
        main(["--debug", *argv, *options])


def test_the_module_runs_under_a_launcher_of_several_processes(workspace: Path, model_folder: Path) -> None:
    # What `accelerate launch` runs, too, where each process has its GPU.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    argv = ["--model_name_or_path", str(model_folder), "--dataset_name", "prompts.jsonl", *QUICK, *GRPO]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            *launch,
            "-m",
            "tests.cli.launched",
            "grpo",
            *argv,
            "--reward_funcs",
            "my_rewards:short",
            "--save_steps",
            "2",
        ],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    saved = {path.name for path in (workspace / "out/checkpoint-2").glob("rollouts_*")}
    assert saved == {"rollouts_0_of_2.safetensors", "rollouts_1_of_2.safetensors"}
