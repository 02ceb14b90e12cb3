"""`prefrl launch --write`: the files that start a run on a cluster, with commands that stand for the cluster's."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.launch import launch_options
from prefrl.scripts.declaration import CommandParser
from prefrl.scripts.inputs import read
from prefrl.scripts.launch.processes import with_variable
from prefrl.scripts.launch.vllm_serve import ServeArguments
from prefrl.scripts.main import main
from prefrl.scripts.schema import SchemaParser
from tests.cli.jobs import RECORDER, ROOT, executable, free_port, run_job
from tests.patience import wait_until

# Stands for the Python of an environment: what it runs is `python -m prefrl.scripts.main ...`.
PYTHON = """#!/bin/bash
until [[ $1 == launch || $1 == vllm-serve ]]; do shift; done
exec "$(dirname "$0")/prefrl" "$@"
"""
# A comment of YAML also ends at some of these characters, and must not have others.
NAME = "a\nexit: 1\rexit: 2\x85exit: 3\u2028exit: 4\x1b"
CLUSTER = ("--nodes", "4", "--server_nodes", "2", "--vllm_args", "--max_model_len 4096", "--run_name", NAME)
CLUSTER += ("--vllm_kwargs", '{"min_servers": 2}')


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Path:
    """The file that starts a run, as `--write` writes it."""
    monkeypatch.chdir(folder)
    (folder / "rows.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n', encoding="utf-8")
    (folder / "run.yaml").write_text(
        "model_name_or_path: some/model\ndataset_name: rows.jsonl\nreward_funcs: [numeric_reward]\n"
        "output_dir: runs/My_run\nuse_peft: true\nlora_r: 24\nlearning_rate: 1.0e-6\n",
        encoding="utf-8",
    )
    assert main(["launch", "grpo", "run.yaml", *options]) == 0
    config = folder / "runs/My_run/launch.config.yaml"
    (start,) = {*config.parent.iterdir()} - {config}
    return start


def check_calls(calls: list[dict[str, Any]], folder: Path) -> None:
    """Two servers register where four nodes look for them, and the nodes know each other."""
    servers = [call["argv"] for call in calls if call["argv"][0] == "vllm-serve"]
    training = sorted((call for call in calls if call["argv"][0] == "launch"), key=lambda call: call["rank"])
    (words,) = {tuple(words) for words in servers}
    assert (len(servers), len(training)) == (2, 4)
    serve: ServeArguments = CommandParser("vllm-serve", (ServeArguments,), "").parse(words[1:])[0]
    assert serve.join == str(folder / "runs/My_run/fleet")
    assert (serve.model, serve.tensor_parallel_size, serve.max_lora_rank) == ("some/model", 8, 32)
    assert (serve.max_model_len, serve.host) == (4096, "0.0.0.0")
    for rank, call in enumerate(training):
        given = read(REGISTRY[call["argv"][1]], call["argv"][2:])
        launch = launch_options(given, {})
        assert launch is not None
        launch.check_machines()
        assert (launch.machine_rank, launch.num_machines, launch.num_processes) == (rank, 4, 32)
        assert launch.main_process_ip
        run = SchemaParser("grpo").read(call["argv"][2:])[0]
        assert run["vllm_server_base_url"] == [f"dir:{serve.join}"]
        assert (run["use_vllm"], run["lora_r"], run["learning_rate"]) == (True, 24, 1e-6)


def test_a_written_script_starts_servers_and_training_on_their_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = written(tmp_path, monkeypatch, *CLUSTER, "--write", "slurm")
    assert f"sbatch {script}" in capsys.readouterr().out
    text = script.read_text(encoding="utf-8")
    assert "#SBATCH --nodes=6\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    python = str(executable(tmp_path / "env/bin/python", PYTHON))
    recorder = RECORDER.format(python=sys.executable)
    variables = {"TRAINER_PYTHON": python, "SERVER_PYTHON": python}
    assert run_job(script, tmp_path, 6, recorder, "--max_steps", "7", **variables) == 0
    calls: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("call_*")]
    check_calls(calls, tmp_path)
    assert all(call["argv"][-2:] == ["--max_steps", "7"] for call in calls if call["argv"][0] == "launch")
    (key,) = {call["key"] for call in calls}
    assert len(key) == 64
    steps = [{*path.read_text(encoding="utf-8").split()} for path in tmp_path.glob("srun_*")]
    (of_training,) = (step for step in steps if "--kill-on-bad-exit=1" in step)
    (of_servers,) = (step for step in steps if "--kill-on-bad-exit=0" in step)
    assert "--nodelist=127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4" in of_training
    assert {"--nodelist=127.0.0.5,127.0.0.6", "--no-kill"} <= of_servers


def test_the_end_of_training_is_that_of_the_job_and_of_its_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = written(tmp_path, monkeypatch, *CLUSTER, "--write", "slurm")
    python = str(executable(tmp_path / "env/bin/python", PYTHON))
    recorder = RECORDER.format(python=sys.executable)
    variables = {"TRAINER_PYTHON": python, "SERVER_PYTHON": python, "TRAINING_FAILS": "7"}
    assert run_job(script, tmp_path, 6, recorder, **variables) in (7, 128 + signal.SIGTERM)  # others were ended
    assert wait_until(lambda: not with_variable("RECORDS", str(tmp_path)))


# The fields of a JobSet that are written, as in its definition (v1alpha2, config/components/crd/bases of
# kubernetes-sigs/jobset), and in JobSpec (batch/v1), PodSpec and Container (v1) of Kubernetes' API. A type, a set of
# values, the elements of a list, one of several, or a mapping, of whose fields all are needed.
CONTAINER = {
    "name": str,
    "image": str,
    "workingDir": str,
    "command": [str],
    "env": [{"name": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}],
    "resources": {"limits": {"nvidia.com/gpu": int}},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
VOLUME = ({"name": str, "persistentVolumeClaim": {"claimName": str}}, {"name": str, "emptyDir": {"medium": str}})
POD = {"restartPolicy": {"Never", "OnFailure"}, "containers": [CONTAINER], "volumes": [VOLUME]}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": {"Indexed", "NonIndexed"},
    "backoffLimit": int,
    "template": {"spec": POD},
}
JOBSET = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"},
    "kind": {"JobSet"},
    "metadata": {"name": str},
    "spec": {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
        "successPolicy": {"operator": {"All", "Any"}, "targetReplicatedJobs": [str]},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}


def test_folders_with_spaces_stand_in_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my %j runs"
    folder.mkdir()
    text = written(folder, monkeypatch, "--write", "slurm").read_text(encoding="utf-8")
    log = tmp_path / "my %%j runs/runs/My_run/slurm-%j.log"
    assert f"#SBATCH --chdir='{folder}'\n#SBATCH --output='{log}'\n" in text


def fits(value: Any, schema: Any) -> bool:
    if isinstance(schema, dict):
        return value.keys() == schema.keys() and all(fits(value[name], schema[name]) for name in schema)
    if isinstance(schema, list):
        return isinstance(value, list) and all(fits(item, schema[0]) for item in value)
    if isinstance(schema, tuple):
        return any(fits(value, one) for one in schema)
    return value in schema if isinstance(schema, set) else type(value) is schema


def test_a_written_jobset_has_the_fields_of_one_and_starts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--write", "k8s", "--image", "trainer:1", "--server_image", "vllm:1", "--volume", "work")
    path = written(tmp_path, monkeypatch, *CLUSTER, *options)
    printed = capsys.readouterr().out
    assert "kubectl create secret generic prefrl-my-run-key --from-literal=VLLM_API_KEY=" in printed
    assert f"kubectl apply -f {path}" in printed
    jobset = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert fits(jobset, JOBSET)
    assert not fits(jobset | {"spec": jobset["spec"] | {"networks": {}}}, JOBSET)
    trainers, servers = jobset["spec"]["replicatedJobs"]
    executable(tmp_path / "pod/prefrl", '#!/bin/sh\nfor word; do echo "$word"; done\n')
    calls = []
    for job, image in ((trainers, "trainer:1"), (servers, "vllm:1")):
        spec = job["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        assert (container["image"], spec["parallelism"]) == (image, spec["completions"])
        for index in range(spec["completions"]):
            variables = {"PATH": f"{tmp_path}/pod:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index)}
            # Not `env=`: the command is looked for in the PATH of this process.
            words = subprocess.run(
                ["env", *(f"{name}={value}" for name, value in variables.items()), *container["command"]],
                capture_output=True,
                text=True,
                check=True,
            )
            calls.append({"argv": words.stdout.splitlines(), "rank": str(index)})
    check_calls(calls, tmp_path)
    # The host name of the first pod, as JobSet gives it.
    name = jobset["metadata"]["name"]
    assert f"{name}-{trainers['name']}-0-0.{name}" in calls[0]["argv"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2"], "nodes=2 has no effect because write=None. Set write=slurm."),
        (["--write", "slurm", "--image", "a"], "image='a' has no effect because write='slurm'. Set write=k8s."),
        (["--write", "k8s", "--image", "a"], "volume: not given. Kubernetes needs it"),
        (["--write", "slurm", "--num_processes", "4"], "num_processes=4: follows from nodes and gpus_per_node."),
        (
            ["--write", "slurm", "--server_nodes", "1", "--vllm_server_port", "81"],
            "vllm_server_port=81: with server_nodes, the run samples on the servers of these nodes.",
        ),
        (["--write", "slurm", "--server_nodes", "1", "--vllm_args", "'--uds x'"], "vLLM's --uds cannot be given here"),
        (
            ["--write", "slurm", "--server_nodes", "1", "--use_vllm", "false"],
            "use_vllm=False: with server_nodes, the run samples on the servers of these nodes.",
        ),
        (["--write", "k8s", "--image", "", "--volume", "v"], "image: not given. Kubernetes needs it"),
        (["--write", "slurm", "--output_dir", "run.yaml"], "run.yaml': File exists. Name a folder in which files can"),
        (["--write", "slurm", "--output_dir", "a\nb"], "a\\nb': has a line break or the like, which no"),
        (["--write", "slurm", "--dry_run"], "dry_run=True: write='slurm' starts nothing, and writes files."),
        (["--write", "slurm", "--hub_token", "hf_abc"], "hub_token: is a secret, and would be written into a file."),
        (["--write", "slurm", "--accelerate_config", "zero9"], "accelerate_config='zero9': is neither a file nor"),
    ],
)
def test_what_cannot_be_written_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, monkeypatch, "--write", "slurm")
    assert main(["launch", "grpo", "run.yaml", *(word.strip("'") for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_algorithms_that_sample_nothing_need_no_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "sft", "run.yaml", "--write", "slurm", "--server_nodes", "1"]) == 2
    assert "server_nodes=1: sft samples no completions." in capsys.readouterr().err


def check_run(calls: list[dict[str, Any]], *, nodes: int, gpus: int) -> tuple[ServeArguments, list[dict[str, Any]]]:
    """One server and the training on several nodes fit together; returns the options of both."""
    (server,) = (call["argv"] for call in calls if call["argv"][0] == "vllm-serve")
    serve: ServeArguments = CommandParser("vllm-serve", (ServeArguments,), "").parse(server[1:])[0]
    assert (serve.tensor_parallel_size, serve.host) == (gpus, "0.0.0.0")
    runs = []
    for call in calls:
        if call["argv"][0] == "launch":
            launch = launch_options(read(REGISTRY[call["argv"][1]], call["argv"][2:]), {})
            assert launch is not None
            launch.check_machines()
            assert (launch.num_machines, launch.num_processes) == (nodes, nodes * gpus)
            assert launch.main_process_ip == "127.0.0.1"
            run = SchemaParser("grpo").read(call["argv"][2:])[0]
            assert (run["use_vllm"], run["model_name_or_path"]) == (True, serve.model)
            runs.append(run)
    assert sorted(run["machine_rank"] for run in runs) == list(range(nodes))
    return serve, runs


def test_two_nodes_of_skypilot_train_and_the_third_serves_until_they_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = yaml.safe_load((ROOT / "examples/clusters/grpo_sky.yaml").read_text(encoding="utf-8"))
    assert task.keys() == {"name", "num_nodes", "workdir", "resources", "envs", "secrets", "setup", "run"}
    for environment in (".venv", ".venv-server"):
        executable(tmp_path / environment / "bin/prefrl", RECORDER.format(python=sys.executable))
        assert environment in task["setup"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    variables = {name: str(value) for name, value in task["envs"].items()} | {
        "VLLM_API_KEY": "key",
        "PORT": str(free_port()),
        "RECORDS": str(tmp_path),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2\n127.0.0.3",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    quick = f"sleep() {{ command sleep 0.1; }}\n{task['run']}"
    nodes = [
        subprocess.Popen(
            ["bash", "-c", quick], env=os.environ | variables | {"SKYPILOT_NODE_RANK": str(rank)}, cwd=tmp_path
        )
        for rank in range(task["num_nodes"])
    ]
    assert [node.wait(timeout=300) for node in nodes] == [0, 0, 0]
    calls = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("call_*")]
    monkeypatch.chdir(tmp_path)
    serve, runs = check_run(calls, nodes=2, gpus=8)
    assert {(run["vllm_server_host"], run["vllm_server_port"]) for run in runs} == {("127.0.0.3", serve.port)}


class FakeRay(types.ModuleType):
    """Runs tasks at once, and notes those of commands."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.tasks: list[tuple[list[str], dict[str, Any]]] = []
        self.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def init(self) -> None:
        """Nothing."""

    def remote(self, function: Any) -> Any:
        def run(options: dict[str, Any], *arguments: Any) -> Any:
            if not arguments:
                return function()
            self.tasks.append((arguments[0], options))
            return None

        options = lambda **options: types.SimpleNamespace(remote=lambda *words: run(options, *words))  # noqa: E731
        return types.SimpleNamespace(options=options)

    def get(self, values: Any) -> Any:
        return values


def test_ray_places_servers_and_training_on_nodes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay()
    group = types.ModuleType("ray.util.placement_group")
    group.placement_group = lambda bundles, strategy: types.SimpleNamespace(  # type: ignore[attr-defined]
        bundles=bundles, strategy=strategy, ready=lambda: None
    )
    strategies = types.ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda group, i: (group, i)  # type: ignore[attr-defined]
    for module in (fake, types.ModuleType("ray.util"), group, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "argv", ["grpo_ray.py", "--gpus", "4"])
    monkeypatch.chdir(ROOT)
    runpy.run_path("examples/clusters/grpo_ray.py", run_name="__main__")
    assert all(words[0] == "prefrl" and options["num_gpus"] == 4 for words, options in fake.tasks)
    placed = [options["scheduling_strategy"] for _, options in fake.tasks]
    assert sorted(number for _, number in placed) == [0, 1, 2]
    assert {(of.strategy, len(of.bundles)) for of, _ in placed} == {("STRICT_SPREAD", 3)}
    serve, runs = check_run([{"argv": words[1:]} for words, _ in fake.tasks], nodes=2, gpus=4)
    assert {tuple(run["vllm_server_base_url"]) for run in runs} == {(f"dir:{serve.join}",)}
