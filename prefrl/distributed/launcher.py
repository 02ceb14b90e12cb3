"""Both ends of a launch: `accelerate launch` with one message for a failure, and what a worker does when it fails."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["as_worker", "first_failure", "main", "words_of"]

T = TypeVar("T")

# The file in which torchrun expects the error of a worker, in the worker's environment.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# So long a worker that failed may take to end: threads and process groups may wait for others that wait for it.
_LAST_SECONDS = 10.0
_NO_FILE = "<N/A>"


def as_worker(run: Callable[[], T]) -> T:
    """Run what this process is for. If it fails, and torchrun started it, leave word for the launcher and end soon.

    Args:
        run: Raises what goes wrong.
    """
    if _ERROR_FILE not in os.environ:
        return run()
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        return run()
    except Exception as error:
        handler.record_exception(error)
        # A thread without the interpreter's lock: it also ends a process that hangs while it is torn down.
        faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True)
        raise


def main(argv: Sequence[str]) -> int:
    """`accelerate launch`, without its own traceback for a failure of a worker.

    Args:
        argv: Its options, then the script and the script's.

    Returns:
        The exit code of the worker that failed first, 128 + the signal if one ended it, or 0.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory(prefix="prefrl-launch-") as folder:  # for the errors of workers
        arguments = launch_command_parser().parse_args(["--log_dir", folder, *argv])
        try:
            launch_command(arguments)
        except ChildFailedError as error:
            rank, failure = first_failure(error.failures)
            _say(f"process {rank} of {arguments.num_processes} {words_of(failure)}")
            return _code(failure.exitcode)
        except subprocess.CalledProcessError as error:  # one process, without torchrun
            _say(f"the process {_how(error.returncode)}.")
            return _code(error.returncode)
        except SignalException as error:  # the launcher, or the user, ended it
            return 128 + error.sigval
    return 0


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Rank and failure of the worker that failed by itself; others fail because it is gone.

    torchrun goes by whole seconds, in which the others have lost their connections to it, too.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        failure = item[1]
        if failure.exitcode == -signal.SIGTERM:  # torchrun's, for the others
            return 3, 0.0
        if failure.exitcode == -signal.SIGABRT:  # a process group's, when it waited for too long
            return 2, 0.0
        if failure.error_file == _NO_FILE:
            return 0, 0.0
        return 1, os.stat(failure.error_file).st_mtime

    return min(failures.items(), key=order)


def words_of(failure: ProcessFailure) -> str:
    """How a worker ended, and its error if it left one."""
    message = failure.error_file_data["message"]
    said = f" {message['message']}" if isinstance(message, dict) else ""
    return f"{_how(failure.exitcode)}; the others were ended, too.{said}"


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    name = signal.Signals(-returncode).name
    return f"was ended by {name}" + (" (often because memory ran out)" if name == "SIGKILL" else "")


def _code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _say(words: str) -> None:
    print(f"prefrl launch: training failed: {words}", file=sys.stderr, flush=True)  # noqa: T201 - a command's message


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
