"""Run training, and possibly a server, as a unit: when one part ends, the other is ended too."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefrl.generation.vllm.handshake import Waiting
from prefrl.scripts.launch.processes import Program, StopNote, kill_all, stop_signals_noted, with_variable
from prefrl.scripts.launch.supervisor import health

__all__ = ["ServerProgram", "run_together"]

_POLL_SECONDS = 0.2
# torchrun gives its workers 30 s to end; `prefrl vllm-serve` gives its server 20 s, and 10 s more for killing it.
_STOP_SECONDS = 40.0
_KILL_SECONDS = 10.0
_TAIL_LINES = 20
_ERROR = re.compile(r"prefrl vllm-serve: \w+Error: ")
# Environment variable of everything that a launch starts: workers have their own sessions and may outlive their
# parent.
_MARK = "PREFRL_LAUNCH"


@dataclass(frozen=True)
class ServerProgram(Program):
    """A vLLM server on this machine."""

    port: int
    start_timeout: float  # seconds within which it must answer, which it watches itself


def run_together(training: Program, server: ServerProgram | None, *, checks: Program | None, log: Path) -> int:
    """Check, start the server, wait for it, train, and end whatever is left. Failures are reported on stderr.

    Args:
        training: Reports its own failures, unless a signal ends it.
        server: None: there is no server.
        checks: Runs before all others, which are started if it ends well, and reports its own failures; None: nothing
            is checked.
        log: File for the server's output.

    Returns:
        0 if training ended well, else the exit code of the part that failed, or 128 + the signal.
    """
    with stop_signals_noted() as stop:
        launch = _Launch(stop)
        try:
            if checks is not None:
                launch.run("the check of the run", checks)
            if server is not None and launch.goes_on:
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
