"""The SLURM scripts, under a `srun` of one machine: nodes are loopback addresses, and tasks are processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.launch import launch_options
from prefrl.scripts.declaration import CommandParser
from prefrl.scripts.inputs import read
from prefrl.scripts.launch.vllm_serve import ServeArguments
from prefrl.scripts.schema.parser import SchemaParser

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.slurm"))
# As SLURM's with --kill-on-bad-exit: a task that fails ends the step. A signal goes to its tasks.
SRUN = """#!/bin/bash
tasks=1
while [[ $1 == --* ]]; do
  [[ $1 == --ntasks=* ]] && tasks=${1#*=}
  echo "$1" >> "$RECORDS/srun_$$"
  shift
done
trap 'kill $(jobs -p) 2>/dev/null' TERM
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i "$@" & done
status=0
while [[ -n $(jobs -pr) ]]; do wait -n || { status=$?; kill $(jobs -p) 2>/dev/null; }; done
exit $status
"""
SCONTROL = """#!/bin/bash
[[ "$1 $2" == "show hostnames" ]] && tr , '\\n' <<< "$3"
"""
# Stands for `prefrl`: writes down how it was called. A server runs until it is ended, or fails if it is told to.
# Training ends when there is a server: its end is the end of the server, too.
RECORDER = """#!{python}
import json, os, sys, time
from pathlib import Path
call = {{"argv": sys.argv[1:], "rank": os.environ.get("SLURM_PROCID"), "key": os.environ.get("VLLM_API_KEY")}}
Path(os.environ["RECORDS"], f"call_{{os.getpid()}}").write_text(json.dumps(call))
serves = sys.argv[1] == "vllm-serve"
if os.environ.get("SERVER_FAILS"):
    sys.exit(5) if serves else time.sleep(600)
is_up = Path(os.environ["RECORDS"], "is_up")
if serves:
    is_up.touch()
    time.sleep(600)
while not is_up.exists():
    time.sleep(0.05)
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def run(script: Path, folder: Path, nodes: int, prefrl: str, *options: str, **variables: str) -> int:
    """The exit code of a job whose environments have `prefrl` as their command."""
    executable(folder / "bin/srun", SRUN)
    executable(folder / "bin/scontrol", SCONTROL)
    executable(folder / "env/bin/prefrl", prefrl)
    environment = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "RECORDS": str(folder),
        "SLURM_JOB_NODELIST": ",".join(f"127.0.0.{i + 1}" for i in range(nodes)),
        "TRAINER_ENV": f"{folder}/env",
        "SERVER_ENV": f"{folder}/env",
    }
    job = ["bash", str(script), *options]
    return subprocess.run(job, env={**os.environ, **environment, **variables}, cwd=ROOT, timeout=600).returncode


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_short_and_bash_reads_them(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 60
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_four_nodes_train_and_the_fifth_serves(tmp_path: Path) -> None:
    recorder = RECORDER.format(python=sys.executable)
    assert run(ROOT / "examples/grpo_vllm.slurm", tmp_path, 5, recorder, "--max_steps", "7") == 0
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
        runs.append(SchemaParser("grpo").values(call["argv"][2:]))
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
    assert run(ROOT / "examples/grpo_vllm.slurm", tmp_path, 5, recorder, SERVER_FAILS="1") == 5


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
    assert run(ROOT / "examples/sft_zero3.slurm", workspace, 2, prefrl, *options, **variables) == 0
    assert (workspace / "out/adapter_model.safetensors").exists()
    # Random states of two processes of one training.
    assert {path.name for path in (workspace / "out/checkpoint-2").glob("rng_state_*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
