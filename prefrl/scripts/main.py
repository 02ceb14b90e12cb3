"""The `prefrl` command: one subcommand for each algorithm of the registry, and a few others."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import prefrl
from prefrl.errors import ConfigError, PrefrlError, not_on_windows, printable
from prefrl.options.names import nearest
from prefrl.registry import REGISTRY, uncollected


class Listed(NamedTuple):
    """A command that is not an algorithm.

    Args:
        module: Its module in `prefrl.scripts`, and its function after a colon, if that is not `main`. The function is
            called as `main(argv) -> exit code`, see `prefrl.scripts.declaration`. The words follow the command's name,
            and what the user has to change raises PrefrlError.
        text: What it does, for the help.
        is_anywhere: Whether it runs on Windows, too.
    """

    module: str
    text: str
    is_anywhere: bool = False

    def __call__(self, argv: Sequence[str]) -> int:
        """Import the module, and run the command with the words after its name."""
        module, _, function = self.module.partition(":")
        return int(getattr(importlib.import_module(f"prefrl.scripts.{module}"), function or "main")(argv))


OTHERS = {
    "init": Listed("schema:init", "print a commented YAML file for an algorithm: prefrl init grpo > run.yaml", True),
    "doctor": Listed("commands:doctor", "check a run before it starts: data, rewards, server, batches, memory, time"),
    "launch": Listed("launch.command", "run an algorithm on several GPUs or nodes, optionally with a vLLM server"),
    "resume": Listed(
        "commands:resume", "continue a run from its last checkpoint, with the options that it was started with"
    ),
    "demo": Listed("commands:demo", "train a tiny model on arithmetic, SFT then GRPO, offline on the CPU"),
    "watch": Listed("report:watch", "show a run in the browser while it trains", True),
    "report": Listed("report:report", "write one HTML file about a run, or about two", True),
    "look": Listed("report:look", "show the best and the worst completions of a run", True),
    "play": Listed("play", "play an episode of an environment, by hand or with a model, turn by turn"),
    "gateway": Listed("gateway:serve", "serve a model over the APIs of OpenAI and Anthropic, and keep the sessions"),
    "pairs": Listed("gateway:pairs", "make preference pairs of the best and the worst completion of each prompt"),
    "chat": Listed("sampling:chat", "talk to a model in the terminal"),
    "generate": Listed("sampling:generate", "sample completions of a prompt or of a dataset"),
    "eval": Listed(
        "eval", "score a model, or responses in a file: mean reward, pass@k, maj@k and best@k by data source"
    ),
    "teacher": Listed("teacher", "store what a teacher finds likely at a dataset's completions, for distillation"),
    "merge": Listed("commands:merge", "merge an adapter into its base model"),
    "soup": Listed("soup", "average checkpoints"),
    "replay": Listed("commands:replay", "compute a past step of a run again, and compare it with what was logged"),
    "verify": Listed("oracle.command", "compute the exact bias of your own loss, advantage or KL estimate"),
    "vllm-serve": Listed("launch.vllm_serve", "serve a model to trainers, with vLLM in its own environment"),
    "migrate": Listed("migrate.command", "rewrite scripts and configs of TRL, verl, cosmos-rl and Ludwig", True),
    "env": Listed("commands:env", "print the versions and devices of this machine, for bug reports", True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: The command line without the program's name; None: the one of this process.

    Returns:
        The exit code: 0, 1 if a file or the output fails, 2 for anything that prefrl refuses, 3 if `prefrl
        migrate` leaves something to do, or 130 after Ctrl-C.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    if not sys.stderr.isatty():
        # Libraries draw their bars with tqdm, which reads this when it is imported.
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        code = _run(arguments.command, arguments.arguments)
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, ModuleNotFoundError, OSError, PrefrlError) as error:
        if arguments.debug:
            raise
        return _report(arguments.command, error)


def _report(command: str, error: BaseException) -> int:
    """Print an error in one line, unless there is nothing to say, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    words = printable(f"prefrl {command}: {type(error).__name__}: {error}")
    if not isinstance(error, PrefrlError):
        _leave_stdout()
        remedy = "; pip install prefrl installs what it needs" if isinstance(error, ImportError) else ""
        if not isinstance(error, BrokenPipeError):  # head and the like have read enough
            print(f"{words}. prefrl --debug {command} shows where{remedy}", file=sys.stderr)
        return 1
    if not _is_reported():
        # A single write, because processes that start together often fail together.
        print(f"{words}\n", end="", file=sys.stderr)
    return 2


def _is_reported() -> bool:
    """Whether `prefrl launch`, which has started this process, prints its error."""
    from prefrl.scripts.arguments.launch import LAUNCHED

    if LAUNCHED not in os.environ:
        return False
    from prefrl.distributed.launcher import is_recorded  # imports torch

    return is_recorded()


def _leave_stdout() -> None:
    """Drop what is left for stdout: the interpreter writes it when it exits, and would fail again."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    commands = {row.name: f"train on {row.dataset}" for row in REGISTRY.values()}
    commands |= {name: command.text for name, command in OTHERS.items()}
    width = max(map(len, commands))
    parser = _Parser(
        prog="prefrl",
        description="Post-training of language models.",
        epilog="commands:\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in commands.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"prefrl {prefrl.__version__}")
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    parser.add_argument(
        "command",
        metavar="command",
        nargs="?",
        help="One of the commands below. prefrl COMMAND --help shows its options.",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Options of the command.")
    return parser


def _run(command: str, arguments: Sequence[str]) -> int:
    if command in OTHERS:
        if sys.platform == "win32" and not OTHERS[command].is_anywhere:
            raise not_on_windows(f"prefrl {command}")
        return OTHERS[command](list(arguments))
    if command in REGISTRY:
        return _train(command, arguments)
    raise ConfigError(f"unknown command. {nearest(command.lower(), [*REGISTRY, *OTHERS])}")


def _train(command: str, arguments: Sequence[str]) -> int:
    is_done = threading.Event()
    atexit.register(_leave_worker, is_done)  # before torch is imported: exit handlers run in reverse order
    from prefrl.scripts.arguments.launch import launch_options
    from prefrl.scripts.inputs import check_files, read

    algorithm = REGISTRY[command]
    given = read(algorithm, arguments)  # refuses mistakes before torch is imported
    check_files(given)
    if sys.platform == "win32":
        raise not_on_windows(f"prefrl {command}")
    options = launch_options(given, os.environ)
    if options is not None:
        from prefrl.scripts.launch.command import start

        return start([command, *arguments], given, options)

    from prefrl.distributed.launcher import as_worker  # imports torch

    def train() -> int:
        with uncollected():
            from prefrl.scripts.train import main as train_and_save
        return train_and_save(algorithm, given)

    code = as_worker(train)
    is_done.set()
    return code


def _leave_worker(is_done: threading.Event) -> None:
    """Exit without the interpreter's teardown, if this is a worker of torchrun whose work is done.

    In the teardown, a native thread of torch now and then aborts the process, and the launcher would report a training
    that succeeded as failed.
    """
    if is_done.is_set() and "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
