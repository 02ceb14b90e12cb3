"""`prefrl launch` with real processes: two on the CPU, one of which fails while the other waits for it."""

from __future__ import annotations

import fnmatch
import json
import os
import socket
import subprocess
import sys
import time
import tomllib
import uuid
from pathlib import Path
from typing import Any

import pytest

from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.launch import launch_options
from prefrl.scripts.declaration import CommandParser
from prefrl.scripts.inputs import read
from prefrl.scripts.launch.command import CONFIGS
from prefrl.scripts.launch.processes import with_variable
from prefrl.scripts.launch.vllm_serve import ServeArguments
from prefrl.scripts.main import main
from prefrl.scripts.schema import SchemaParser
from tests.cli.jobs import RECORDER, run_job

ROOT = Path(__file__).parents[2]
# Process 1 fails in its second optimizer step, and process 0 waits for it in the next collective.
REWARD = """
import os, time
from pathlib import Path
import torch

def length(completions, **columns):
    Path(f"world_of_{os.environ['RANK']}").write_text(str(torch.distributed.get_world_size()))
    return [-float(len(text)) for text in completions]

step, calls = torch.optim.AdamW.step, 0

def failing(self, *args, **kwargs):
    global calls
    calls += 1
    if calls == 2:
        Path("failed_at").write_text(str(time.time()))
        raise ZeroDivisionError("the cause")
    return step(self, *args, **kwargs)

if os.environ.get("RANK") == "1":
    torch.optim.AdamW.step = failing
"""
# Half a second on a quiet machine; a process group's own time-out is 30 minutes.
END_SECONDS = 180.0


def test_when_a_process_fails_the_others_end_and_its_error_is_told(workspace: Path, model_folder: Path) -> None:
    """The file of the run says how many processes there are."""
    (workspace / "failing_reward.py").write_text(REWARD, encoding="utf-8")
    (workspace / "run.yaml").write_text(
        f"model_name_or_path: {model_folder}\ndataset_name: prompts.jsonl\noutput_dir: out\nuse_cpu: true\n"
        "reward_funcs: [failing_reward:length]\nmax_completion_length: 5\nnum_generations: 2\n"
        "max_steps: 4\nper_device_train_batch_size: 2\nnum_processes: 2\nsave_steps: 1\n",
        encoding="utf-8",
    )
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-m", "prefrl.scripts.main", "grpo", "run.yaml"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MARK_OF_TEST": mark},
        timeout=600,
    )
    ended = time.time()
    assert done.returncode == 1, done.stderr[-4000:]
    # One training of two processes, which share the data, and not two trainings.
    assert [(workspace / f"world_of_{rank}").read_text(encoding="utf-8") for rank in (0, 1)] == ["2", "2"]
    saved = {path.name for path in (workspace / "out/checkpoint-1").glob("rollouts_*")}
    assert saved == {"rollouts_0_of_2.safetensors", "rollouts_1_of_2.safetensors"}
    assert ended - float((workspace / "failed_at").read_text(encoding="utf-8")) < END_SECONDS
    assert with_variable("MARK_OF_TEST", mark) == []
    assert "%|" not in done.stderr + done.stdout  # a bar of a library
    assert "closing signal" not in done.stderr  # torchrun's own words
    first, message = done.stderr.partition("Traceback")[2], done.stderr.splitlines()[-1]
    assert "ZeroDivisionError: the cause" in first.partition("Traceback")[0]
    assert message == (
        "prefrl launch: training failed: process 1 of 2 ended with exit code 1; the others were ended, too. "
        "ZeroDivisionError: the cause"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the algorithm comes first: prefrl launch NAME. Known: sft, dpo,"),
        (["--num_processes", "2"], "the algorithm comes first"),
        (["demo"], "'demo' cannot be launched. Known: "),
        (["grop"], "'grop' cannot be launched. Did you mean 'grpo'?"),
        (["sft", "--learnin_rate", "1"], "unknown option '--learnin_rate'. Did you mean '--learning_rate'?"),
        (["sft", "--num_processes", "two"], "num_processes='two': must be a whole number"),
        (["sft", "--config", "missing.yaml"], "config='missing.yaml': cannot be read"),
        (
            ["sft", "--model_name_or_path", "m", "--dataset_name", "d", "--num_processes", "2"],
            "no GPU is visible to train on. To try the run out on CPUs, add --use_cpu true.",
        ),
    ],
)
def test_what_cannot_be_launched_is_one_line_and_nothing_is_started(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("prefrl launch: ConfigError: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_dry_run_prints_the_commands_without_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    argv = ["grpo", "--config", str(ROOT / "examples/grpo_vllm.yaml"), "--use_cpu", "--num_processes", "2"]
    assert main(["launch", *argv, "--vllm", "cpu", "--dry_run"]) == 0
    server, training = capsys.readouterr().out.splitlines()
    assert server.endswith("vllm-serve --model Qwen/Qwen2.5-0.5B-Instruct --port 8000")
    assert training.startswith("PREFRL_NUM_PROCESSES=2 ")
    assert training.endswith(f"grpo --config {ROOT}/examples/grpo_vllm.yaml --use_cpu --num_processes 2 --vllm cpu")
    assert "secret" not in server + training


def test_help_lists_the_options_of_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "grpo", "--help"])
    text = capsys.readouterr().out
    assert "--vllm" in text
    assert "--config" not in text  # it is the run's


def test_the_configs_are_in_the_package_and_the_examples_lead_to_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    # All files in the folder of the package go into the wheel but those that git ignores.
    (package,) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    names = {path.relative_to(ROOT / package).as_posix() for path in CONFIGS.iterdir()}
    assert len(names) == 7
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert not [name for name in (*names, "py.typed") for pattern in ignored if fnmatch.fnmatch(name, pattern)]
    link = ROOT / "examples/accelerate_configs"
    assert not link.readlink().is_absolute()
    assert link.resolve() == CONFIGS


SCRIPTS = sorted((ROOT / "examples").glob("*.slurm"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_short_and_bash_reads_them(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 60
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_four_nodes_train_and_the_fifth_serves(tmp_path: Path) -> None:
    recorder = RECORDER.format(python=sys.executable)
    assert run_job(ROOT / "examples/grpo_vllm.slurm", tmp_path, 5, recorder, "--max_steps", "7") == 0
    calls: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("call_*")]
    (server,) = (call["argv"] for call in calls if call["argv"][0] == "vllm-serve")
    training = sorted((call for call in calls if call["argv"][0] == "launch"), key=lambda call: call["rank"])
    assert len(training) == 4
    assert len({call["key"] for call in calls}) == 1
    assert training[0]["key"]
    (serve,) = CommandParser("vllm-serve", (ServeArguments,), "").parse(server[1:])
    launches, runs = [], []
    for call in training:
        given = read(REGISTRY[call["argv"][1]], call["argv"][2:])
        launch = launch_options(given, {})
        assert launch is not None
        launch.check_machines()
        launches.append(launch)
        runs.append(SchemaParser("grpo").read(call["argv"][2:])[0])
    assert [launch.machine_rank for launch in launches] == [0, 1, 2, 3]
    assert {(launch.num_machines, launch.num_processes) for launch in launches} == {(4, 32)}
    assert {launch.main_process_ip for launch in launches} == {"127.0.0.1"}
    for options in runs:
        assert (options["vllm_server_host"], options["vllm_server_port"]) == ("127.0.0.5", serve.port)
        assert (options["use_vllm"], options["max_steps"]) == (True, 7)
        assert options["model_name_or_path"] == serve.model
    steps = [path.read_text(encoding="utf-8").split() for path in tmp_path.glob("srun_*")]
    (of_training,) = (step for step in steps if "--ntasks=4" in step)
    assert {"--kill-on-bad-exit=1", "--nodelist=127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4"} <= set(of_training)


def test_a_job_whose_server_fails_ends(tmp_path: Path) -> None:
    recorder = RECORDER.format(python=sys.executable)
    assert run_job(ROOT / "examples/grpo_vllm.slurm", tmp_path, 5, recorder, SERVER_FAILS="1") == 5


def test_two_nodes_train_one_model(workspace: Path, model_folder: Path) -> None:
    prefrl = f'#!/bin/bash\nexec {sys.executable} -m prefrl.scripts.main "$@"\n'
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    options = ["--model_name_or_path", str(model_folder), "--dataset_name", str(workspace / "texts.jsonl")]
    options += ["--output_dir", str(workspace / "out"), "--max_steps", "2", "--per_device_train_batch_size", "1"]
    options += ["--save_steps", "2", "--gradient_accumulation_steps", "1"]
    # What one machine without GPUs can do of it.
    options += ["--accelerate_config", "ddp", "--use_cpu", "true", "--num_processes", "2", "--main_process_port", port]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(workspace / "cache")}
    assert run_job(ROOT / "examples/sft_zero3.slurm", workspace, 2, prefrl, *options, **variables) == 0
    assert (workspace / "out/adapter_model.safetensors").exists()
    # Random states of two processes of one training.
    assert {path.name for path in (workspace / "out/checkpoint-2").glob("rng_state_*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
