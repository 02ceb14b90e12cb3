"""`prefrl launch`: run an algorithm on several GPUs and nodes, optionally with a vLLM server beside it.

Training and the server run as a unit: when one part ends, the other is ended too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefrl.errors import ConfigError, is_installed
from prefrl.generation.server import KEY_VARIABLE
from prefrl.generation.vllm.handshake import Waiting
from prefrl.options.names import nearest
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.command import Given
from prefrl.scripts.arguments.launch import (
    COLOCATE,
    CONFIGS,
    LAUNCHED,
    ONLY_CHECK,
    LaunchArguments,
    config_file,
    launch_options,
    visible_gpus,
    with_mode,
)
from prefrl.scripts.inputs import check_files, read
from prefrl.scripts.launch.cluster import OUTPUT_DIR, ClusterArguments, with_servers, write_files
from prefrl.scripts.launch.processes import Program, StopNote, health, kill_all, stop_signals_noted, with_variable
from prefrl.scripts.launch.vllm_serve import PORT, ServerProgram, check_start, choose_port, plan_server
from prefrl.scripts.parsing.option_parser import EarlyParser, OptionParser, option_of
from prefrl.scripts.parsing.yaml_file import load_yaml
from prefrl.scripts.schema import options_of

__all__ = [
    "run_together",
    "CONFIGS",
    "plan_training",
    "start",
    "main",
]

_POLL_SECONDS = 0.2
# torchrun gives its workers 30 s to end; `prefrl vllm-serve` gives its server 20 s, and 10 s more for killing it.
_STOP_SECONDS = 40.0
_KILL_SECONDS = 10.0
_TAIL_LINES = 20
_ERROR = re.compile(r"prefrl vllm-serve: \w+Error: ")
# Environment variable of everything that a launch starts: workers have their own sessions and may outlive their
# parent.
_MARK = "PREFRL_LAUNCH"


def run_together(
    training: Program, server: ServerProgram | None, *, checks: Program | None, log: Path, share: Path | None = None
) -> int:
    """Check, start the server, wait for it, train, and end whatever is left. Failures are reported on stderr.

    Args:
        training: Reports its own failures, unless a signal ends it.
        server: None: there is no server.
        checks: Runs before all others, which are started if it ends well, and reports its own failures; None: nothing
            is checked.
        log: File for the server's output.
        share: Where the checks write the share of the device's memory that the server has, if they find one.

    Returns:
        0 if training ended well, else the exit code of the part that failed, or 128 + the signal.
    """
    with stop_signals_noted() as stop:
        launch = _Launch(stop)
        try:
            if checks is not None:
                launch.run("the check of the run", checks)
            if server is not None and launch.goes_on:
                server = server if share is None or not share.exists() else server.with_share(share.read_text())
                print(f"prefrl launch: starting the vLLM server; its log is {log}", file=sys.stderr, flush=True)
                launch.start("the vLLM server", server, log)
                launch.watch(until=_Answers(server))
            if launch.goes_on:
                launch.start("training", training)
                launch.watch()
            return launch.outcome()
        finally:
            launch.end()


class _Answers:
    """Whether a server answers by now; says from time to time that it does not."""

    def __init__(self, server: ServerProgram) -> None:
        self._port = server.port
        self._began = time.monotonic()
        self._waiting = Waiting(f"http://127.0.0.1:{server.port}", server.start_timeout)

    def __call__(self) -> bool:
        self._waiting.tell(time.monotonic() - self._began)
        return health(("127.0.0.1", self._port)) == 200


class _Part:
    """A program in its own session, which Ctrl-C reaches only through this process."""

    def __init__(self, name: str, program: Program, mark: str, log: Path | None) -> None:
        self.name = name
        self.log = log
        with contextlib.ExitStack() as stack:
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                log.unlink(missing_ok=True)  # it could be a link
            output = None if log is None else stack.enter_context(log.open("wb"))
            self.process = subprocess.Popen(
                program.command,
                env={**os.environ, **program.environment, _MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Ask the program to end, and wait for a while until it has ended."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=_STOP_SECONDS)


class _Launch:
    """The running parts, and the one that ended first."""

    def __init__(self, stop: StopNote) -> None:
        self._stop = stop
        self._mark = uuid.uuid4().hex
        self._parts: list[_Part] = []
        self._ended: _Part | None = None

    @property
    def goes_on(self) -> bool:
        """Whether no signal has arrived and no part has ended."""
        return self._stop.signal is None and self._ended is None

    def start(self, name: str, program: Program, log: Path | None = None) -> None:
        """Start a part."""
        self._parts.append(_Part(name, program, self._mark, log))

    def run(self, name: str, program: Program) -> None:
        """Start a part and wait until it has ended; if it ended well, the launch goes on."""
        self.start(name, program)
        self.watch()
        if self._ended is not None and self._ended.process.returncode == 0:
            self._parts.remove(self._ended)
            self._ended = None

    def watch(self, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until a condition holds, a part ends or a signal arrives."""
        while self.goes_on and not until():
            time.sleep(_POLL_SECONDS)
            self._ended = next((part for part in self._parts if part.process.poll() is not None), None)

    def outcome(self) -> int:
        """The exit code. Reports failures that training did not report itself."""
        if self._stop.signal is not None:
            print(f"prefrl launch: ended by {self._stop.signal.name}", file=sys.stderr, flush=True)
            return 128 + self._stop.signal
        assert self._ended is not None  # otherwise `watch` would not have returned
        code = self._ended.process.returncode
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        if self._ended.log is not None:
            end = "\n  ".join(_last_words(self._ended.log))
            message = f"{self._ended.name} ended {how}. The end of its log, {self._ended.log}:\n  {end}"
            print(f"prefrl launch: {message}", file=sys.stderr, flush=True)
            return code if code > 0 else 1
        if code < 0:
            print(f"prefrl launch: {self._ended.name} ended {how}", file=sys.stderr, flush=True)
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """End every part, the last one first, and kill what is left of them."""
        for part in reversed(self._parts):
            part.stop()
        kill_all(lambda: with_variable(_MARK, self._mark), seconds=_KILL_SECONDS)


def _last_words(log: Path) -> list[str]:
    """The message with which `prefrl vllm-serve` ended, or the last lines of its log."""
    text = log.read_text(encoding="utf-8", errors="replace")
    own = [found.start() for found in _ERROR.finditer(text)]  # not always in a line of its own
    return text[own[-1] :].splitlines() if own else text.splitlines()[-_TAIL_LINES:]


_NAMES = frozenset(field.name for field in dataclasses.fields(LaunchArguments))
# Options that the user's accelerate config may also set.
_IN_CONFIG = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")


class _Parser(OptionParser):
    """Its help also shows the options that it leaves to the algorithm."""

    def show_help(self, argv: Sequence[str], early: EarlyParser) -> None:
        """Print it."""
        for option in options_of("grpo"):
            if option["name"] in _NAMES:
                self.add_option(option, group="Options")
        self.print_help()


def main(argv: Sequence[str]) -> int:
    """`prefrl launch ALGORITHM ...`: the same as `prefrl ALGORITHM ...`, but always through accelerate."""
    parser = _Parser(
        takes_config=False,
        groups=("Options", "Cluster"),
        prog="prefrl launch",
        usage=f"prefrl launch {{{','.join(REGISTRY)}}} [FILE.yaml] [--option value ...]",
        description="Start an algorithm on several GPUs or nodes, through accelerate: one process for each GPU, "
        "unless the options below say otherwise. They are also options of prefrl ALGORITHM.\n\nExample:\n"
        "  prefrl launch grpo run.yaml --num_processes 8 --accelerate_config zero2\n"
        "  prefrl launch grpo run.yaml --nodes 4 --server_nodes 2 --write slurm",
    )
    about = "Print the commands and their environment variables without running them."
    parser.add_option(
        {"name": "dry_run", "kind": "bool", "help": about, "is_flag": True, "default": False}, group="Options"
    )
    is_algorithm = bool(argv) and not argv[0].startswith("-")
    hints = typing.get_type_hints(ClusterArguments, include_extras=True)
    for field in dataclasses.fields(ClusterArguments):
        parser.add_option(option_of(field, hints[field.name]), group="Cluster")
    own, _, words = parser.read(argv[1:] if is_algorithm else argv, keeps_words=True)
    if not is_algorithm:
        raise ConfigError(f"the algorithm comes first: prefrl launch NAME. Known: {', '.join(REGISTRY)}.")
    if argv[0] not in REGISTRY:
        raise ConfigError(f"{argv[0]!r} cannot be launched. {nearest(argv[0], REGISTRY)}")
    cluster = ClusterArguments(**{field.name: own[field.name] for field in dataclasses.fields(ClusterArguments)})
    if cluster.server_nodes:
        words = with_servers(argv[0], words, cluster.server_nodes)
    if cluster.write is not None and own["dry_run"]:
        raise ConfigError(
            f"dry_run=True: write={cluster.write!r} starts nothing, and writes files. Remove one of them."
        )
    given = read(REGISTRY[argv[0]], words, is_launched=True)
    if not own["dry_run"]:
        check_files(given)
    if cluster.write is not None:
        return write_files(argv, given, cluster)
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
    with given.locating():
        config_file(options.accelerate_config)  # before torch is imported
        visible = visible_gpus(os.environ)
        if options.vllm is not None:
            chosen = {"vllm_mode": with_mode(given, options, visible).values.get("vllm_mode", run["vllm_mode"])}
            if not dry_run:
                chosen[PORT] = choose_port(run[PORT], is_given=PORT in given.values)
            changed = {name: value for name, value in chosen.items() if value != run[name]}
            words = [*words, *(word for name, value in changed.items() for word in (f"--{name}", str(value)))]
            run |= changed
        training, server = _plan(words, run, options, visible, is_real=not dry_run)
    if dry_run:
        print(*filter(None, (server, training)), sep="\n")
        return 0
    log = Path(run["output_dir"] or OUTPUT_DIR) / "vllm-server.log"
    with tempfile.TemporaryDirectory() as folder:
        share = Path(folder) / "share"
        # A server takes minutes to start: what is wrong is told before.
        checked = {**training.environment, ONLY_CHECK: str(share)}
        checks = None if server is None else Program(training.command, checked)
        return run_together(training, server, checks=checks, log=log, share=share)


def _plan(
    words: Sequence[str], run: Mapping[str, Any], options: LaunchArguments, visible: Sequence[str], *, is_real: bool
) -> tuple[Program, ServerProgram | None]:
    """Training and its server; if it is real, also checks that the server can start on this machine."""
    if options.vllm is None:
        return plan_training(options, words, run, visible), None
    options = options.placed(run, visible)
    training = plan_training(options, words, run, visible)
    server = plan_server(options, run, visible, os.environ)
    if is_real:
        check_start(server)
    # Unless the user has set one, a key for this run alone.
    key = {KEY_VARIABLE: os.environ.get(KEY_VARIABLE) or secrets.token_hex(32)}
    server.environment.update(key)
    training.environment.update(key)
    return training, server


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
    shares_device = options.vllm is not None and run.get("vllm_mode") == COLOCATE
    gpus = server_gpus if shares_device else [gpu for gpu in visible if gpu not in server_gpus]
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
