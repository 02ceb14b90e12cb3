"""`prefrl launch --write`: files that start a run on the nodes of a cluster, and the config that it then has."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge

from prefrl.errors import ConfigError, masked, printable
from prefrl.generation.server import KEY_VARIABLE
from prefrl.options.fields import check_fields, check_unset, opt
from prefrl.options.server_rules import FOLDER
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.command import Given
from prefrl.scripts.arguments.launch import config_file
from prefrl.scripts.declaration import CommandParser
from prefrl.scripts.inputs import read
from prefrl.scripts.launch.vllm_serve import ServeArguments, serve_command, server_words
from prefrl.scripts.schema import SchemaParser, options_of

# What `nodes` and `gpus_per_node` decide.
_DECIDED = ("num_processes", "num_machines", "machine_rank", "main_process_ip")
_SERVERS = ("vllm", "vllm_server_base_url", "vllm_server_host", "vllm_server_port")
_OF_SERVERS = ("vllm_args", "vllm_python")  # they are in the file that starts the servers, not in the config
_START_SECONDS = 1800.0  # for servers that load a large model
_PORT = 8000
OUTPUT_DIR = "trainer_output"  # the folder that transformers uses without an output_dir
_NEW_KEY = "python3 -c 'import secrets; print(secrets.token_hex(32))'"
_LAUNCHER = "prefrl.scripts.main"


@dataclass
class ClusterArguments:
    """Nodes of a cluster, and what is written for them."""

    write: Literal["slurm", "k8s"] | None = opt(
        None,
        "Write a script for sbatch, or a JobSet for kubectl, and the config of the run into output_dir, instead of "
        "starting it.",
    )
    nodes: Annotated[int, Ge(1)] = opt(1, "With write: number of nodes that train.")
    server_nodes: Annotated[int, Ge(0)] = opt(
        0, "With write: number of further nodes, each of which runs a vLLM server. They may fail and come back."
    )
    gpus_per_node: Annotated[int, Ge(1)] = opt(8, "With write: GPUs of each node, or processes with use_cpu.")
    image: str | None = opt(None, "With write=k8s: container image that has prefrl.")
    server_image: str | None = opt(
        None, "With write=k8s: container image that has prefrl and vLLM. The default is image."
    )
    volume: str | None = opt(
        None,
        "With write=k8s: PersistentVolumeClaim that all nodes can write to. It is mounted as the current folder, and "
        "contains what the config names.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        because = f"write={self.write!r}"
        if self.write is None:
            names = ("nodes", "server_nodes", "gpus_per_node")
            check_unset(self, *names, because=because, remedy="Set write=slurm.")
        if self.write != "k8s":
            check_unset(self, "image", "server_image", "volume", because=because, remedy="Set write=k8s.")
        for name in ("image", "volume"):
            if self.write == "k8s" and not getattr(self, name):
                raise ConfigError(f"{name}: not given. Kubernetes needs it; see prefrl launch --help.")
        if self.server_image == "":
            raise ConfigError("server_image='': must be a container image. Leave it out for that of image.")


@dataclass(frozen=True)
class Job:
    """A run on a cluster.

    Args:
        algorithm: Its name.
        cluster: The nodes.
        values: The options of the run that are given.
        serve: Options of `prefrl vllm-serve`; None: there are no servers.
        folder: Its output folder.
        uses_gpus: Whether nodes need GPUs.
        words: The command line that asked for it.
    """

    algorithm: str
    cluster: ClusterArguments
    values: Mapping[str, Any]
    serve: Sequence[str] | None
    folder: Path
    uses_gpus: bool
    words: Sequence[str]

    @property
    def name(self) -> str:
        """A name that clusters accept."""
        return re.sub(r"[^a-z0-9]+", "-", f"prefrl-{self.folder.name.lower()}").strip("-")[:40].strip("-")

    @property
    def config(self) -> dict[str, Any]:
        """The options of the run, with those that follow from the nodes."""
        nodes, server_nodes = self.cluster.nodes, self.cluster.server_nodes
        values = {name: value for name, value in self.values.items() if value is not None and name not in _OF_SERVERS}
        values |= {"output_dir": str(self.folder), "num_processes": nodes * self.cluster.gpus_per_node}
        if nodes > 1:
            values["num_machines"] = nodes
        if server_nodes:
            values.setdefault("vllm_server_timeout", _START_SECONDS)
        return json.loads(json.dumps(values))  # type: ignore[no-any-return]  # texts of own classes become texts

    @property
    def fleet(self) -> Path:
        """The folder in which the servers register."""
        return _fleet_in(self.folder)

    @property
    def server_words(self) -> list[str]:
        """What follows `prefrl vllm-serve`."""
        return [*(self.serve or ()), "--host", "0.0.0.0", "--port", str(_PORT), "--join", str(self.fleet)]

    def check(self) -> None:
        """Refuse options that contradict each other, secrets in files, and folders that files cannot name.

        Raises:
            ConfigError: There are some.
        """
        for name, path in (("output_dir", self.folder), ("the current folder", Path.cwd())):
            if not str(path).isprintable():
                raise ConfigError(f"{name}={str(path)!r}: has a line break or the like, which no script can name.")
        for name in _DECIDED:
            if self.values.get(name) is not None:
                raise ConfigError(
                    f"{name}={self.values[name]!r}: follows from nodes and gpus_per_node. Remove it, and set these."
                )
        for name, value in self.values.items():
            if masked(value, name) != value:
                raise ConfigError(
                    f"{name}: is a secret, and would be written into a file. Remove it, and set it in the environment "
                    "of the job, such as HF_TOKEN."
                )


def write(job: Job) -> list[Path]:
    """Write the files of a job; returns what starts it, and its config."""
    job.check()
    slurm = job.cluster.write == "slurm"
    config = job.folder / "launch.config.yaml"
    start = job.folder / ("launch.slurm" if slurm else "launch.k8s.yaml")
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        config.write_text(f"# prefrl {job.algorithm} --config {config}\n{_yaml(job.config)}", encoding="utf-8")
        start.write_text(script(job, config) if slurm else manifest(job, config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"output_dir={str(job.folder)!r}: {error.strerror}. Name a folder in which files can be written."
        ) from error
    return [start, config]


def start_commands(job: Job, start: Path) -> list[str]:
    """The commands that start a job that was written."""
    if job.cluster.write == "slurm":
        return [f"sbatch {shlex.quote(str(start))}"]
    secret = f'kubectl create secret generic {job.name}-key --from-literal={KEY_VARIABLE}="$({_NEW_KEY})"'
    return [*([secret] if job.serve is not None else []), f"kubectl apply -f {shlex.quote(str(start))}"]


def _written_by(job: Job) -> str:
    r"""A comment, each line of which is one. YAML knows more line breaks than `\n`, and refuses some characters."""
    words = shlex.join(["prefrl", "launch", *job.words])
    return f"# Written by: {printable(words)}".replace("\n", "\n# ")


def _yaml(values: Any) -> str:
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def script(job: Job, config: Path) -> str:
    """A script for sbatch."""
    nodes, servers = job.cluster.nodes, job.cluster.server_nodes
    log = str(job.folder).replace("%", "%%")  # sbatch puts numbers in the place of %j and others
    lines = [
        "#!/bin/bash",
        _written_by(job),
        "# Options of sbatch, such as --time and --partition, go before the name of this file, the run's after it.",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={nodes + servers}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={job.cluster.gpus_per_node}"] if job.uses_gpus else []),
        *(["#SBATCH --no-kill"] if servers > 1 else []),
        f"#SBATCH --chdir={shlex.quote(str(Path.cwd()))}",
        f"#SBATCH --output={shlex.quote(f'{log}/slurm-%j.log')}",
        "set -euo pipefail",
        "",
        f"TRAINER_PYTHON=${{TRAINER_PYTHON:-{shlex.quote(sys.executable)}}}",
        'mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f'TRAINERS=("${{NODES[@]:0:{nodes}}}")',
        "",
        "# The first of the steps to end ends the job, and with it the others.",
        "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT",
        "",
    ]
    if servers:
        python = job.values.get("vllm_python") or os.environ.get("PREFRL_VLLM_PYTHON") or sys.executable
        lines += [
            f"SERVER_PYTHON=${{SERVER_PYTHON:-{shlex.quote(python)}}}",
            f'SERVERS=("${{NODES[@]:{nodes}}}")',
            f"{KEY_VARIABLE}=$({_NEW_KEY}) # of this job alone",
            f"export {KEY_VARIABLE}",
            "# A server on each of these nodes. If one ends, the others go on.",
            f"srun --kill-on-bad-exit=0 --no-kill --nodes={servers} --ntasks={servers} \\",
            '  --nodelist="$(IFS=, && echo "${SERVERS[*]}")" \\',
            f'  "$SERVER_PYTHON" -P -m {_LAUNCHER} vllm-serve {shlex.join(job.server_words)} &',
            "",
        ]
    rank = '--machine_rank "$SLURM_PROCID" ' if nodes > 1 else ""
    lines += [
        "# A launcher on each of these nodes. If one fails, srun ends those of the other nodes.",
        f"srun --kill-on-bad-exit=1 --nodes={nodes} --ntasks={nodes} \\",
        '  --nodelist="$(IFS=, && echo "${TRAINERS[*]}")" \\',
        f'  bash -c \'exec "$0" -m {_LAUNCHER} launch {job.algorithm} {rank}"$@"\' "$TRAINER_PYTHON" \\',
        f"  --config {shlex.quote(str(config))} "
        + ('--main_process_ip "${TRAINERS[0]}" ' if nodes > 1 else "")
        + '"$@" &',
        "",
        "wait -n",
    ]
    return "\n".join(lines) + "\n"


def manifest(job: Job, config: Path) -> str:
    """A JobSet for kubectl."""
    cluster = job.cluster
    launch = ["prefrl", "launch", job.algorithm, "--config", str(config)]
    if cluster.nodes > 1:
        launch += ["--main_process_ip", f"{job.name}-trainers-0-0.{job.name}"]
        # The rank is known in the container alone.
        launch = ["sh", "-c", 'exec "$0" "$@" --machine_rank "$JOB_COMPLETION_INDEX"', *launch]
    jobs = [_replicated(job, "trainers", cluster.nodes, cluster.image, launch, restarts=0)]
    if job.serve is not None:
        serve = ["prefrl", "vllm-serve", *job.server_words]
        image = cluster.server_image or cluster.image
        jobs.append(_replicated(job, "servers", cluster.server_nodes, image, serve, restarts=1000))
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainers"]},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": jobs,
    }
    head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": job.name}}
    lines = start_commands(job, config.with_name("launch.k8s.yaml"))
    comment = f"{_written_by(job)}\n# Start it with:\n" + "".join(f"#   {line}\n" for line in lines)
    return comment + _yaml(head | {"spec": spec})


def _replicated(
    job: Job, name: str, number: int, image: str | None, command: Sequence[str], *, restarts: int
) -> dict[str, Any]:
    """A job of a JobSet, with a pod on each of its nodes; a server that fails is started again in its place."""
    here = str(Path.cwd())
    key = {"secretKeyRef": {"name": f"{job.name}-key", "key": KEY_VARIABLE}}
    container: dict[str, Any] = {"name": name, "image": image, "workingDir": here, "command": list(command)}
    if job.serve is not None:
        container["env"] = [{"name": KEY_VARIABLE, "valueFrom": key}]
    if job.uses_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.cluster.gpus_per_node}}
    container["volumeMounts"] = [{"name": "work", "mountPath": here}, {"name": "memory", "mountPath": "/dev/shm"}]
    pod = {
        "restartPolicy": "OnFailure" if restarts else "Never",
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": job.cluster.volume}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    spec = {"parallelism": number, "completions": number, "completionMode": "Indexed", "backoffLimit": restarts}
    return {"name": name, "replicas": 1, "template": {"spec": spec | {"template": {"spec": pod}}}}


def _folder_of(values: Mapping[str, Any]) -> Path:
    return Path(values.get("output_dir") or OUTPUT_DIR).resolve()


def _fleet_in(folder: Path) -> Path:
    return folder / "fleet"


def with_servers(algorithm: str, words: Sequence[str], server_nodes: int) -> list[str]:
    """The words of a run, with those that let it sample on servers.

    Raises:
        ConfigError: It cannot, or names other servers.
    """
    if "use_vllm" not in {option["name"] for option in options_of(algorithm)}:
        raise ConfigError(f"server_nodes={server_nodes}: {algorithm} samples no completions. Leave it out.")
    parser = SchemaParser(algorithm)
    values = parser.read(words)[0]
    is_off = not values["use_vllm"] and "use_vllm" in {*parser.given(words), *parser.places}
    switch = {"use_vllm": False} if is_off else {}
    words = [*words, "--use_vllm", "true"]
    given = parser.parse(words)
    for name, value in (switch | {name: given.values.get(name) for name in _SERVERS}).items():
        if value is not None:
            raise given.located(
                ConfigError(
                    f"{name}={value!r}: with server_nodes, the run samples on the servers of these nodes. Remove one "
                    "of them."
                )
            )
    return [*words, "--vllm_server_base_url", f"{FOLDER}{_fleet_in(_folder_of(values))}"]


def write_files(argv: Sequence[str], given: Given, cluster: ClusterArguments) -> int:
    """Write what starts a run on a cluster; returns the exit code.

    Args:
        argv: The words after `prefrl launch`.
        given: The options of the run.
        cluster: Its nodes.

    Raises:
        ConfigError: The options ask for something that cannot work.
    """
    defaults = {option["name"]: option.get("default") for option in options_of(argv[0])}
    run = {**defaults, **given.values}
    with given.locating():
        config_file(run["accelerate_config"])
        serve = None
        if cluster.server_nodes:
            num_gpus = 1 if run["use_cpu"] else cluster.gpus_per_node
            serve = ["--model", run["model_name_or_path"], *server_words(run, num_gpus, run["vllm_args"])]
        folder = _folder_of(run)
        job = Job(argv[0], cluster, given.values, serve, folder, not run["use_cpu"], argv)
        if serve is not None:
            parsed, forwarded = CommandParser("vllm-serve", (ServeArguments,), "").parse_known(job.server_words)
            serve_command(parsed[0], forwarded)
        start, config = write(job)
    read(REGISTRY[argv[0]], ["--config", str(config)], is_launched=True)
    print(f"Wrote {start} and {config}. Start it with:")
    print(*(f"  {line}" for line in start_commands(job, start)), sep="\n")
    return 0
