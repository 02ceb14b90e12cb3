"""`prefrl launch`: run an algorithm on several GPUs and nodes, optionally with a vLLM server beside it."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from prefrl.errors import ConfigError
from prefrl.generation.vllm.key import KEY_VARIABLE
from prefrl.optional import is_installed
from prefrl.options.fields import check_fields, check_no_effect, opt
from prefrl.options.suggest import nearest
from prefrl.registry import REGISTRY
from prefrl.scripts.command_parser import CommandParser
from prefrl.scripts.launch_run import run_together
from prefrl.scripts.processes import Program
from prefrl.scripts.schema import SchemaParser
from prefrl.scripts.vllm_serve import ServeArguments, check_port, serve_command
from prefrl.scripts.yaml_file import load_yaml

__all__ = ["CONFIGS", "LaunchArguments", "main", "plan_server", "plan_training"]

# Folder of the accelerate configs that can be selected by name; examples/accelerate_configs links to it.
CONFIGS = Path(__file__).parent / "accelerate_configs"
# Options that the user's accelerate config may also set.
_IN_CONFIG = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
_CPU = "cpu"
# Defaults of the run's own options, and the folder that transformers uses without an output_dir.
_HOST, _PORT, _OUTPUT_DIR = "127.0.0.1", "vllm_server_port", "trainer_output"
# The values that vLLM accepts for its maximum LoRA rank.
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass
class LaunchArguments:
    """How many processes run, where, and with which backend. All other options are those of the algorithm."""

    num_processes: Annotated[int, Ge(1)] | None = opt(
        None, "Training processes on all machines together; None: one for each training GPU, or one on a CPU."
    )
    accelerate_config: str | None = opt(
        None,
        "single, ddp, zero1, zero2, zero3, zero3_offload, fsdp2, or an accelerate config file of your own. "
        "None: single for one process, ddp for several.",
    )
    num_machines: Annotated[int, Ge(1)] | None = opt(None, "Machines that train; run the command on each. None: 1.")
    machine_rank: Annotated[int, Ge(0)] | None = opt(None, "Number of this machine, starting at 0.")
    main_process_ip: str | None = opt(None, "Address or host name of machine 0 that all machines can reach.")
    main_process_port: Annotated[int, Ge(1), Le(65535)] | None = opt(
        None, "Port on machine 0 for the rendezvous of processes; None: a free port, or 29500 with several machines."
    )
    vllm_gpus: str | None = opt(
        None,
        "GPUs for a vLLM server that is started for this run, such as 6,7; the other GPUs train. "
        "cpu: for a vLLM that was built for CPUs.",
    )
    vllm_python: str | None = opt(
        None, "Python of the environment with vLLM; None: PREFRL_VLLM_PYTHON if set, else the current Python."
    )
    vllm_args: str | None = opt(
        None, "More options of prefrl vllm-serve for that server, in quotes: '--max_model_len 4096'."
    )
    dry_run: bool = opt(False, "Print the commands and their environment variables without running them.")

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("vllm_python", "vllm_args"):
            if self.vllm_gpus is None:
                check_no_effect(
                    name=name,
                    value=getattr(self, name),
                    unset=None,
                    because="no server is started",
                    remedy="Set vllm_gpus.",
                )

    def check_machines(self) -> None:
        """Refuse inconsistent numbers of machines and processes.

        Raises:
            ConfigError: They are inconsistent.
        """
        if self.num_machines is None:
            for name in ("machine_rank", "main_process_ip"):
                check_no_effect(
                    name=name,
                    value=getattr(self, name),
                    unset=None,
                    because="one machine trains",
                    remedy="Set num_machines.",
                )
        machines, rank, processes = self.num_machines or 1, self.machine_rank, self.num_processes
        if machines == 1:
            return
        if rank is None or processes is None or self.main_process_ip is None:
            given = f"machine_rank={rank}, num_processes={processes}, main_process_ip={self.main_process_ip}"
            raise ConfigError(f"num_machines={machines} with {given}: set all three on each machine")
        if rank >= machines:
            raise ConfigError(f"machine_rank={rank}: must be below num_machines={machines}")
        if processes % machines:
            raise ConfigError(
                f"num_processes={processes}: counts the processes of all machines, and must be a multiple of "
                f"num_machines={machines}"
            )
        if self.vllm_gpus is not None:
            raise ConfigError(
                f"vllm_gpus={self.vllm_gpus!r} with num_machines={machines}: only this machine could reach the "
                "server. Start `prefrl vllm-serve` on a separate machine and set vllm_server_host, as "
                "examples/grpo_vllm.slurm does."
            )


def main(argv: Sequence[str]) -> int:
    """Start the processes, watch them, and end all of them together.

    Args:
        argv: The algorithm, then its options and those of `LaunchArguments`.

    Returns:
        The exit code: 0 if training ended well, else that of the part that failed, or 128 + the signal.

    Raises:
        PrefrlError: The options ask for something that cannot work.
    """
    parser = CommandParser(
        f"launch {{{','.join(REGISTRY)}}}",
        (LaunchArguments,),
        "Start an algorithm on several GPUs or nodes, through `accelerate launch`. Options that are not listed are "
        "those of the algorithm: see prefrl ALGORITHM --help.",
        takes_config=False,
    )
    is_algorithm = bool(argv) and not argv[0].startswith("-")
    (options,), forwarded = parser.parse_known(argv[1:] if is_algorithm else argv)
    if not is_algorithm:
        raise ConfigError(f"the algorithm comes first: prefrl launch NAME. Known: {', '.join(REGISTRY)}.")
    if argv[0] not in REGISTRY:
        raise ConfigError(f"{argv[0]!r} cannot be launched. {nearest(argv[0], REGISTRY)}")
    run = SchemaParser(argv[0]).values(forwarded)
    visible = visible_gpus(os.environ)
    training = plan_training(options, [argv[0], *forwarded], run, visible)
    server = None
    if options.vllm_gpus is not None:
        server = plan_server(options, argv[0], run, visible, os.environ)
        # Unless the user has set one, a key for this run alone.
        key = {KEY_VARIABLE: os.environ.get(KEY_VARIABLE) or secrets.token_hex(32)}
        server.environment.update(key)
        training.environment.update(key)
    if options.dry_run:
        print(*filter(None, (server, training)), sep="\n")
        return 0
    if server is not None:
        check_port(_HOST, run[_PORT])
    log = Path(run["output_dir"] or _OUTPUT_DIR) / "vllm-server.log"
    return run_together(training, server, port=run.get(_PORT, 0), log=log)


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """For each GPU that this process sees, the value that selects it in CUDA_VISIBLE_DEVICES.

    Args:
        environment: Environment variables of this process.
    """
    import torch  # not needed for --help

    listed = environment.get("CUDA_VISIBLE_DEVICES")
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return listed.split(",")[:count] if listed else [str(i) for i in range(count)]


def plan_training(
    options: LaunchArguments, words: Sequence[str], run: Mapping[str, Any], visible: Sequence[str]
) -> Program:
    """The program that starts the training processes of this machine.

    Args:
        options: How many processes, and where.
        words: The algorithm and its options, as on the command line.
        run: The algorithm's options by name.
        visible: GPUs of this machine.

    Raises:
        ConfigError: There are too few GPUs, or options contradict each other.
    """
    config = _config_file(options.accelerate_config)
    options = options if config is None else _completed(options, config)
    options.check_machines()
    server_gpus = _gpus_of_server(options.vllm_gpus, visible)
    gpus = [gpu for gpu in visible if gpu not in server_gpus]
    machines = options.num_machines or 1
    here = (options.num_processes or len(gpus) or 1) // machines
    environment = {}
    if not run["use_cpu"]:
        _check_gpus(here, gpus, server_gpus, options)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:here])
    elif options.num_processes is None:
        here = 1
    environment["PREFRL_NUM_PROCESSES"] = str(here * machines)
    config = config or CONFIGS / ("ddp.yaml" if here * machines > 1 else "single.yaml")
    command = [sys.executable, "-m", "prefrl.distributed.launcher", "--config_file", str(config)]
    command += ["--num_processes", str(here * machines), "--num_machines", str(machines)]
    if machines > 1:
        command += ["--machine_rank", str(options.machine_rank), "--main_process_ip", str(options.main_process_ip)]
    # With 0, accelerate looks for a free port.
    command += ["--main_process_port", str(options.main_process_port or (29500 if machines > 1 else 0))]
    uses_server = [] if options.vllm_gpus is None else ["--use_vllm", "true"]
    return Program([*command, "-m", "prefrl.scripts.main", *words, *uses_server], environment)


def plan_server(
    options: LaunchArguments,
    algorithm: str,
    run: Mapping[str, Any],
    visible: Sequence[str],
    environment: Mapping[str, str],
) -> Program:
    """The program that starts the vLLM server.

    Args:
        options: Where the server runs, and with which Python.
        algorithm: The algorithm that is trained.
        run: Its options by name.
        visible: GPUs of this machine.
        environment: Environment variables of this process.

    Raises:
        ConfigError: The algorithm does not use a server, or the options of the server cannot work.
    """
    if "use_vllm" not in run:
        raise ConfigError(
            f"vllm_gpus={options.vllm_gpus!r}: {algorithm} does not sample completions. Remove vllm_gpus."
        )
    if run["vllm_server_base_url"] or run["vllm_server_host"] != _HOST:
        given = run["vllm_server_base_url"] or run["vllm_server_host"]
        raise ConfigError(
            f"vllm_gpus={options.vllm_gpus!r} starts a server, but the run names another one: {given}. Remove one of "
            "them."
        )
    gpus = _gpus_of_server(options.vllm_gpus, visible)
    words = ["--model", run["model_name_or_path"], "--port", str(run[_PORT])]
    if run["model_revision"] != "main":  # the default of both
        words += ["--revision", run["model_revision"]]
    if len(gpus) > 1:
        words += ["--tensor_parallel_size", str(len(gpus))]
    if run["use_peft"] and run["weight_sync"] in (None, "adapter"):
        words += ["--max_lora_rank", str(_lora_rank(run))]
    words += shlex.split(options.vllm_args or "")
    _check_server(words, gpus, run)
    python = options.vllm_python or environment.get("PREFRL_VLLM_PYTHON") or sys.executable
    if not os.access(python, os.X_OK):
        raise ConfigError(f"vllm_python={python!r}: is not a program. Give the Python of the environment with vLLM.")
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return Program([python, "-P", "-m", "prefrl.scripts.main", "vllm-serve", *words], devices)


def _config_file(name: str | None) -> Path | None:
    """The accelerate config with a name; the name may also be the path of a file."""
    known = {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}
    if name is None or name in known:
        return None if name is None else known[name]
    if not Path(name).is_file():
        raise ConfigError(f"accelerate_config={name!r}: is neither a file nor a name. {nearest(name, known)}")
    return Path(name)


def _completed(options: LaunchArguments, config: Path) -> LaunchArguments:
    """The options, with unset ones filled in from an accelerate config."""
    where = f"accelerate_config={options.accelerate_config!r}"
    content = load_yaml(config, where)
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise ConfigError(f"{where}: has no distributed_type, as accelerate configs have")
    if content["distributed_type"] == "DEEPSPEED" and not is_installed("deepspeed"):
        raise ConfigError(f"{where}: DeepSpeed is not installed. pip install 'prefrl[deepspeed]'")
    if content.get("gpu_ids", "all") != "all":
        raise ConfigError(
            f"{where}: has gpu_ids={content['gpu_ids']!r}, but GPUs are those of CUDA_VISIBLE_DEVICES without those "
            "of vllm_gpus. Remove gpu_ids."
        )
    said: dict[str, Any] = {name: content.get(name) for name in _IN_CONFIG if getattr(options, name) is None}
    if said.get("num_processes") == -1:  # accelerate's value for "see the command line"
        del said["num_processes"]
    return dataclasses.replace(options, **said)


def _gpus_of_server(vllm_gpus: str | None, visible: Sequence[str]) -> list[str]:
    """The GPUs of the server; none if it runs on the CPU."""
    if vllm_gpus is None or vllm_gpus == _CPU:
        return []
    gpus = [gpu.strip() for gpu in vllm_gpus.split(",")]
    if len(set(gpus)) < len(gpus):
        raise ConfigError(f"vllm_gpus={vllm_gpus!r}: names a GPU twice")
    for gpu in gpus:
        if gpu not in visible:
            seen = f"GPUs {','.join(visible)} are visible" if visible else "no GPU is visible"
            raise ConfigError(f"vllm_gpus={vllm_gpus!r}: there is no GPU {gpu!r}, {seen}. Write numbers such as 6,7.")
    return gpus


def _check_gpus(processes: int, gpus: Sequence[str], server_gpus: Sequence[str], options: LaunchArguments) -> None:
    beside = f" beside vllm_gpus={options.vllm_gpus!r}" if server_gpus else ""
    if not gpus:
        raise ConfigError(f"no GPU is visible{beside} to train on. To try the run out on CPUs, add --use_cpu true.")
    if processes > len(gpus):
        raise ConfigError(
            f"num_processes={options.num_processes}: {processes} processes on this machine need as many GPUs, but "
            f"only {len(gpus)} ({','.join(gpus)}) can train{beside}. Set a smaller num_processes."
        )


def _lora_rank(run: Mapping[str, Any]) -> int:
    """The smallest maximum rank that vLLM accepts and that fits the adapters of the run."""
    pattern = run["lora_rank_pattern"] or {}
    largest = max([run["lora_r"], *(json.loads(pattern) if isinstance(pattern, str) else pattern).values()])
    return next((rank for rank in _LORA_RANKS if rank >= largest), largest)


def _check_server(words: Sequence[str], gpus: Sequence[str], run: Mapping[str, Any]) -> None:
    """Before anything is started, refuse options that the server would refuse or that do not match the run."""
    (serve,), forwarded = CommandParser("vllm-serve", (ServeArguments,), "").parse_known(words)
    serve_command(serve, forwarded)
    if (serve.host, serve.port) != (_HOST, run[_PORT]):
        raise ConfigError(
            f"vllm_args: host={serve.host!r} and port={serve.port} differ from the address that the run connects to, "
            f"{_HOST} and {run[_PORT]}. Remove them; vllm_server_port of the run sets the port of both."
        )
    size = (serve.tensor_parallel_size or 1) * (serve.data_parallel_size or 1)
    if gpus and size != len(gpus):
        raise ConfigError(
            f"vllm_args: tensor_parallel_size={serve.tensor_parallel_size} times "
            f"data_parallel_size={serve.data_parallel_size} is {size}, but vllm_gpus names {len(gpus)} GPUs"
        )
