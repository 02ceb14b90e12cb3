"""Processes that begin as forks of one that has imported what they need: imports take longer than most of their work.

    forks = Forks(sys.executable, ["torch"])
    process = forks.start("a.module", ["an argument"], output=file, errors=file)

`python -m tests.forks` is that one. It imports nothing else, so that it can be one of another environment, too.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
_MOST_BYTES = 2**20  # of a request, most of which are the environment variables


class Fork:
    """What `subprocess.Popen` is of other processes. It leads a session of its own."""

    def __init__(self, answers: socket.socket) -> None:
        self._answers = answers
        process = answers.recv(64)
        assert process, "the process that forks others has ended: see what it wrote above"
        self.pid = int(process)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code if it has ended; negative: the signal that ended it."""
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(self._answers.recv(64))
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """As `Popen`'s."""
        self.send_signal(signal.SIGTERM)


class Forks:
    """A process that has imported `modules`, and forks others. It ends with this one."""

    def __init__(self, python: str | Path, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._requests, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            self._process = subprocess.Popen(
                [str(python), "-m", "tests.forks", str(its_end.fileno()), *modules],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[its_end.fileno()],
                start_new_session=True,
            )

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: IO[bytes],
        errors: IO[bytes],
        folder: Path = ROOT,
    ) -> Fork:
        """Run `python -m module arguments`, as it were."""
        ours, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"argv": [module, *arguments], "environment": dict(environment), "folder": str(folder)}
        with its_end:
            descriptors = [its_end.fileno(), output.fileno(), errors.fileno()]
            socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
        return Fork(ours)


def main(requests: socket.socket, modules: Sequence[str]) -> None:
    """Import, then fork a process for each request, until nobody can send one any more."""
    for module in modules:
        import_module(module)
    gc.collect()
    gc.freeze()
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
        while _reap():
            pass
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            _keep(json.loads(request), *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _keep(request: dict[str, object], answers: int, output: int, errors: int) -> None:
    """Fork once more, and tell the process id, then the exit code. Returns in the new process, when it has ended."""
    child = os.fork()
    if child != 0:
        for descriptor in (0, 1, 2, output, errors):
            os.close(descriptor)
        os.write(answers, str(child).encode())
        os.write(answers, str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    os.setsid()
    os.close(answers)
    for descriptor, number in ((output, 1), (errors, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    os.chdir(str(request["folder"]))
    sys.argv = list(request["argv"])  # type: ignore[call-overload]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
