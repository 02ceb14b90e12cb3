"""`prefrl sft` and `prefrl grpo` from files on disk to a saved model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefrl.errors import ConfigError, DataError
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
    assert main([*argv, "--max_steps", "3", "--resume_from_checkpoint", "true"]) == 0
    assert [entry["step"] for entry in history(workspace / "out/checkpoint-3") if "loss" in entry] == [1, 2, 3]


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
            "prefrl.scripts.main",
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
