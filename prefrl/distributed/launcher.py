"""Both ends of a launch: `accelerate launch` with one message per failure, and a worker's reaction to its failure."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure

T = TypeVar("T")

# Environment variable with the file in which torchrun expects a worker's error.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# Seconds that a failed worker has to exit: its threads and process groups may wait for workers that wait for it.
_LAST_SECONDS = 10.0
_NO_FILE = "<N/A>"


def as_worker(run: Callable[[], T]) -> T:
    """Call `run`. If it raises and torchrun started this process, record the error for the launcher and exit soon.

    Args:
        run: The work of this process.
    """
    if _ERROR_FILE not in os.environ:
        return run()
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        return run()
    except Exception as error:
        _record(handler, error)
        # This timer runs without the GIL, so it also ends a process that hangs during shutdown.
        faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True)
        raise


def _record(handler: ErrorHandler, error: Exception) -> None:
    """Write the file in one step: when another worker fails, too, torchrun ends this one and reads what is there."""
    file = os.environ[_ERROR_FILE]
    os.environ[_ERROR_FILE] = f"{file}.part"  # where the handler writes
    try:
        handler.record_exception(error)
        os.replace(f"{file}.part", file)
    finally:
        os.environ[_ERROR_FILE] = file


def is_recorded() -> bool:
    """Whether `as_worker` has recorded an error of this process, which the launcher prints."""
    return os.path.exists(os.environ.get(_ERROR_FILE, _NO_FILE))


def main(argv: Sequence[str]) -> int:
    """`accelerate launch` without the launcher's own traceback when a worker fails.

    Args:
        argv: Options of `accelerate launch`, then the script and its arguments.

    Returns:
        The exit code of the worker that failed first, 128 + the signal number if a signal ended it, or 0.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    api.logger.setLevel(logging.CRITICAL)  # it also says which worker failed, in two lines
    with tempfile.TemporaryDirectory(prefix="prefrl-launch-") as folder:  # for the workers' errors
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
        except SignalException as error:  # ended by the launcher or the user
            return 128 + error.sigval
    return 0


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Rank and failure of the worker that failed first; the others fail because it is gone.

    torchrun's timestamps have a resolution of a second, by which time the others have lost their connections, too.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        failure = item[1]
        if failure.exitcode == -signal.SIGTERM:  # sent by torchrun to the other workers
            return 3, 0.0
        if failure.exitcode == -signal.SIGABRT:  # raised by a process group on a timeout
            return 2, 0.0
        if failure.error_file == _NO_FILE:
            return 0, 0.0
        return 1, os.stat(failure.error_file).st_mtime

    return min(failures.items(), key=order)


def words_of(failure: ProcessFailure) -> str:
    """How a worker ended, and its error if it recorded one."""
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
