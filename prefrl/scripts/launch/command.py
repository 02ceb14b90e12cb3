"""`prefrl launch`: run an algorithm on several GPUs and nodes, optionally with a vLLM server beside it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefrl.errors import ConfigError
from prefrl.generation.server import KEY_VARIABLE
from prefrl.optional import is_installed
from prefrl.options.suggest import nearest
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.given import Given
from prefrl.scripts.arguments.launch import (
    AUTO,
    CONFIGS,
    CPU,
    LAUNCHED,
    ONLY_CHECK,
    LaunchArguments,
    config_file,
    launch_options,
)
from prefrl.scripts.inputs import check_files, read
from prefrl.scripts.launch.processes import Program
from prefrl.scripts.launch.together import ServerProgram, check_start, choose_port, plan_server, run_together
from prefrl.scripts.parsing.option_parser import OptionParser, boolean
from prefrl.scripts.parsing.yaml_file import load_yaml
from prefrl.scripts.schema.help import option_list
from prefrl.scripts.schema.parser import options_of

__all__ = ["CONFIGS", "main", "plan_training", "start", "visible_gpus", "with_gpus"]

_NAMES = frozenset(field.name for field in dataclasses.fields(LaunchArguments))
# Options that the user's accelerate config may also set.
_IN_CONFIG = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
_PORT = "vllm_server_port"
_OUTPUT_DIR = "trainer_output"  # the folder that transformers uses without an output_dir


def main(argv: Sequence[str]) -> int:
    """`prefrl launch ALGORITHM ...`: the same as `prefrl ALGORITHM ...`, but always through accelerate."""
    parser = OptionParser(
        takes_config=False,
        prog="prefrl launch",
        usage=f"prefrl launch {{{','.join(REGISTRY)}}} [FILE.yaml] [--option value ...]",
        description="Start an algorithm on several GPUs or nodes, through accelerate: one process per GPU,\nunless "
        "the options below say otherwise. They are also options of prefrl ALGORITHM.",
        epilog=option_list(option for option in options_of("grpo") if option["name"] in _NAMES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    about = "Print the commands and their environment variables without running them."
    parser.add_argument("--dry_run", "--dry-run", type=boolean, nargs="?", const=True, default=False, help=about)
    is_algorithm = bool(argv) and not argv[0].startswith("-")
    own, _, words = parser.read(argv[1:] if is_algorithm else argv, keeps_words=True)
    if not is_algorithm:
        raise ConfigError(f"the algorithm comes first: prefrl launch NAME. Known: {', '.join(REGISTRY)}.")
    if argv[0] not in REGISTRY:
        raise ConfigError(f"{argv[0]!r} cannot be launched. {nearest(argv[0], REGISTRY)}")
    given = read(REGISTRY[argv[0]], words, is_launched=True)
    if not own["dry_run"]:
        check_files(given)
    options = launch_options(given, os.environ) or LaunchArguments()
    return start([argv[0], *words], given, options, dry_run=own["dry_run"])


def start(words: Sequence[str], given: Given, options: LaunchArguments, *, dry_run: bool = False) -> int:
    """Start the processes, watch them, and end all of them together.

    Returns:
        The exit code: 0 if training ended well, else that of the part that failed, or 128 + the signal.

    Raises:
        PrefrlError: The options ask for something that cannot work.
    """
    defaults = {option["name"]: option.get("default") for option in options_of(words[0])}
    run = {**defaults, **given.values}
    try:
        if options.vllm is not None and not dry_run:
            port = choose_port(run[_PORT], is_given=_PORT in given.values)
            if port != run[_PORT]:
                words, run = [*words, f"--{_PORT}", str(port)], {**run, _PORT: port}
        training, server = _plan(words, run, options, is_real=not dry_run)
    except ConfigError as error:
        raise given.located(error) from None
    if dry_run:
        print(*filter(None, (server, training)), sep="\n")
        return 0
    # A server takes minutes to start: what is wrong is told before.
    checks = None if server is None else Program(training.command, {**training.environment, ONLY_CHECK: "1"})
    log = Path(run["output_dir"] or _OUTPUT_DIR) / "vllm-server.log"
    return run_together(training, server, checks=checks, log=log)


def _plan(
    words: Sequence[str], run: Mapping[str, Any], options: LaunchArguments, *, is_real: bool
) -> tuple[Program, ServerProgram | None]:
    """Training and its server; if it is real, also checks that the server can start on this machine."""
    config_file(options.accelerate_config)  # before torch is imported
    if options.vllm is None:
        return plan_training(options, words, run, visible_gpus(os.environ)), None
    visible = visible_gpus(os.environ)
    options = with_gpus(options, run, visible)
    training = plan_training(options, words, run, visible)
    server = plan_server(options, run, visible, os.environ)
    if is_real:
        check_start(server)
    # Unless the user has set one, a key for this run alone.
    key = {KEY_VARIABLE: os.environ.get(KEY_VARIABLE) or secrets.token_hex(32)}
    server.environment.update(key)
    training.environment.update(key)
    return training, server


def with_gpus(options: LaunchArguments, run: Mapping[str, Any], visible: Sequence[str]) -> LaunchArguments:
    """The options, with a place for the server instead of "auto".

    Raises:
        ConfigError: There is a single GPU, which cannot train and serve.
    """
    if options.vllm != AUTO:
        return options
    if run["use_cpu"] or not visible:
        return dataclasses.replace(options, vllm=CPU)
    if len(visible) == 1:
        raise ConfigError(
            "vllm='auto': one GPU is visible, but the server and training need one each. Leave vllm out, so that the "
            "training process samples, or start `prefrl vllm-serve` on another machine and set vllm_server_host."
        )
    return dataclasses.replace(options, vllm=visible[-1])


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """For each GPU that this process sees, the value that selects it in CUDA_VISIBLE_DEVICES."""
    import torch  # not needed for --help

    listed = environment.get("CUDA_VISIBLE_DEVICES")
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return listed.split(",")[:count] if listed else [str(i) for i in range(count)]


def plan_training(
    options: LaunchArguments, words: Sequence[str], run: Mapping[str, Any], visible: Sequence[str]
) -> Program:
    """The program that starts the training processes of this machine.

    Raises:
        ConfigError: There are too few GPUs, or options contradict each other.
    """
    config = config_file(options.accelerate_config)
    options = options if config is None else _completed(options, config)
    options.check_machines()
    server_gpus = options.server_gpus(visible)
    gpus = [gpu for gpu in visible if gpu not in server_gpus]
    machines = options.num_machines or 1
    here = (options.num_processes or len(gpus) or 1) // machines
    environment = {}
    if not run["use_cpu"]:
        _check_gpus(here, gpus, server_gpus, options)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:here])
    elif options.num_processes is None:
        here = 1
    environment[LAUNCHED] = str(here * machines)
    config = config or CONFIGS / ("ddp.yaml" if here * machines > 1 else "single.yaml")
    command = [sys.executable, "-m", "prefrl.distributed.launcher", "--config_file", str(config)]
    command += ["--num_processes", str(here * machines), "--num_machines", str(machines)]
    if machines > 1:
        command += ["--machine_rank", str(options.machine_rank), "--main_process_ip", str(options.main_process_ip)]
    # With 0, accelerate looks for a free port.
    command += ["--main_process_port", str(options.main_process_port or (29500 if machines > 1 else 0))]
    # A run that is resumed by its own command must have as many.
    count = [] if run.get("num_processes") else ["--num_processes", str(here * machines)]
    return Program([*command, "-m", "prefrl.scripts.main", *words, *count], environment)


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
            f"{where}: has gpu_ids={content['gpu_ids']!r}, but prefrl uses the GPUs of CUDA_VISIBLE_DEVICES, except "
            "those of the server. Remove gpu_ids."
        )
    said: dict[str, Any] = {name: content.get(name) for name in _IN_CONFIG if getattr(options, name) is None}
    if said.get("num_processes") == -1:  # accelerate's value for "see the command line"
        del said["num_processes"]
    return dataclasses.replace(options, **said)


def _check_gpus(processes: int, gpus: Sequence[str], server_gpus: Sequence[str], options: LaunchArguments) -> None:
    beside = f" beside vllm={options.vllm!r}" if server_gpus else ""
    if not gpus:
        raise ConfigError(f"no GPU is visible{beside} to train on. To try the run out on CPUs, add --use_cpu true.")
    if processes > len(gpus):
        raise ConfigError(
            f"num_processes={options.num_processes}: {processes} processes on this machine need as many GPUs, but "
            f"only {len(gpus)} ({','.join(gpus)}) can train{beside}. Set a smaller num_processes."
        )
