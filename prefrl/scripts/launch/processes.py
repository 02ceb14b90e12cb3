"""Processes that are started together and must end together, with all that they started; a server is one such unit."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from prefrl.errors import GenerationError
from prefrl.generation.server import KEY_VARIABLE
from prefrl.generation.vllm.members import Registration

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Program:
    """A command, and its environment variables in addition to those of this process."""

    command: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        shown = {name: value for name, value in self.environment.items() if name != KEY_VARIABLE}
        return shlex.join([*(f"{name}={value}" for name, value in shown.items()), *self.command])


class StopNote:
    """The last signal that asked this process to end, if any."""

    signal: signal.Signals | None = None


@contextlib.contextmanager
def stop_signals_noted() -> Iterator[StopNote]:
    """Inside this context, signals that would end the program are only noted, so that no step is left half done."""
    noted = StopNote()

    def note(number: int, _frame: object) -> None:
        noted.signal = signal.Signals(number)

    heeded = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # as by nohup
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def of_session(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name in parentheses, which may contain anything, come state, parent, group and session.
            state, _, _, its_session = (
                path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:4]
            )
        except OSError:  # it has just ended
            continue
        if int(its_session) == session and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def with_variable(name: str, value: str) -> list[int]:
    """The processes with this environment variable that have not ended, in any session."""
    entry = f"{name}={value}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def kill_all(find: Callable[[], list[int]], *, seconds: float) -> None:
    """Kill processes until none is found.

    Args:
        find: Lists the remaining processes.
        seconds: Time after which the rest is left alone: a process that is blocked in the kernel cannot be killed.
    """
    deadline = time.monotonic() + seconds
    while (living := find()) and time.monotonic() < deadline:
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_POLL_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_STOP_SECONDS = 20.0
# Seconds in which a server whose engine died may still write the reason.
_LAST_WORDS_SECONDS = 10.0
_KILL_SECONDS = 10.0
_KEPT_LINES = 2000
_TAIL_LINES = 20
_SHOWN_CAUSES = 4
# The last line of a traceback, after the prefix of vLLM's log.
_CAUSE = re.compile(r"(?:^|[\s\]])((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)")
# The names that Python's multiprocessing gives to its shared memory.
_SHARED_MEMORY = re.compile(r"/dev/shm/psm_\w+")


class Supervisor:
    """Runs a command in its own session, watches it through `GET /health`, and ends all of its processes.

    Args:
        command: What to run.
        environment: All of its environment variables.
        address: Host and port where it answers.
        start_timeout: Seconds within which it must answer for the first time.
        health_timeout: Seconds without an answer after which it counts as hung.
        registration: Its file in the folder of a fleet, renewed while it answers; None: it does not register.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        address: tuple[str, int],
        start_timeout: float,
        health_timeout: float,
        registration: Registration | None = None,
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._address = address
        self._start_timeout = start_timeout
        self._health_timeout = health_timeout
        self._registration = registration
        self._problem_told: str | None = None  # with the registration
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._shared_memory: set[Path] = set()
        self._stop = StopNote()

    def run(self, *, when_ready: str) -> signal.Signals:
        """Run until a signal ends it.

        Returns:
            The signal.

        Raises:
            GenerationError: It did not start in time, ended by itself, or hangs; with the end of its log.
        """
        with stop_signals_noted() as self._stop:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it only through this process
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
            assert self._process.stdout is not None
            guard = _guard_of(self._process.pid)
            reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
            reader.start()
            try:
                problem = self._watch(when_ready)
            finally:
                if self._registration is not None:
                    self._registration.leave()
                self._end()
                guard.kill()
                guard.wait()
                reader.join(timeout=_ANSWER_SECONDS)
        if problem is not None:
            raise GenerationError(self._with_log(problem))
        assert self._stop.signal is not None  # nothing else ends the watch
        return self._stop.signal

    def _read(self, pipe: IO[bytes]) -> None:
        """Forward its output, and keep the end of it."""
        for line in pipe:
            text = line.decode(errors="replace")
            self._lines.append(text.rstrip())
            with contextlib.suppress(OSError, ValueError):  # its output must be read even if nobody reads ours
                sys.stderr.write(text)
                sys.stderr.flush()

    def _watch(self, when_ready: str) -> str | None:
        """Wait until it fails and return how, or until a signal arrives and return None."""
        began = answered = time.monotonic()
        is_ready = False
        while self._stop.signal is None:
            code = self._exit_code(_POLL_SECONDS)
            if code is not None:
                return f"vLLM ended by itself, with exit code {code}."
            status, now = health(self._address), time.monotonic()
            if status == 200:
                answered = now
                if not is_ready:
                    is_ready = True
                    self._shared_memory |= _shared_memory(self._process.pid)
                    print(when_ready, flush=True)
                self._renew()
            elif not is_ready and now - began > self._start_timeout:
                limit = f"start_timeout={self._start_timeout:g}"
                return f"vLLM was not ready after {limit} s. Set a longer one if it only needs more time."
            elif is_ready and status == 503:
                self._exit_code(_LAST_WORDS_SECONDS)
                return "vLLM's engine died."
            elif is_ready and now - answered > self._health_timeout:
                return f"vLLM hung: no answer for health_timeout={self._health_timeout:g} s."
        return None

    def _renew(self) -> None:
        """Tell trainers that it lives. If that fails, they set it aside, and it goes on trying."""
        if self._registration is None:
            return
        problem = None
        try:
            self._registration.renew()
        except OSError as error:
            problem = f"prefrl vllm-serve: trainers will not find this server: {error}"
        if problem not in (None, self._problem_told):
            print(problem, file=sys.stderr, flush=True)
        self._problem_told = problem

    def _exit_code(self, seconds: float) -> int | None:
        """The exit code, if it ends within this time. A signal ends the wait."""
        deadline = time.monotonic() + seconds
        while self._stop.signal is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=0.1)
        return None

    def _end(self) -> None:
        """End every process of its session, at first with SIGINT: killed processes leave shared memory behind."""
        session = self._process.pid
        self._shared_memory |= _shared_memory(session)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_STOP_SECONDS)
        _kill_session(session, self._shared_memory)

    def _with_log(self, problem: str) -> str:
        """What went wrong, the errors that the log names, and the end of the log."""
        lines = list(self._lines)
        causes = _causes(lines)[:_SHOWN_CAUSES]
        parts = [problem, *(["Errors in its log, the first one first:", *causes] if causes else [])]
        return "\n  ".join([*parts, "The end of its log:", *lines[-_TAIL_LINES:]])


def _end_with_parent() -> None:
    """Let SIGTERM end this process when its parent is killed, as Ray does with what its tasks have started."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _guard_of(session: int) -> subprocess.Popen[bytes]:
    """A process that ends a session once this one was killed: a server that is starting may ignore its own signal."""
    command = [sys.executable, "-P", "-m", __name__, str(session), str(_STOP_SECONDS)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _guard(session: int, seconds: float) -> None:
    """Wait until the process that has started this one is gone, give a session time to end, and kill what is left."""
    sys.stdin.read()
    segments = _shared_memory(session)
    deadline = time.monotonic() + seconds
    while of_session(session) and time.monotonic() < deadline:
        time.sleep(0.1)
    _kill_session(session, segments)


def _kill_session(session: int, segments: Iterable[Path]) -> None:
    """Kill the processes of a session, and remove what is left of the shared memory that they use, or used before."""
    left = {*segments, *_shared_memory(session)}  # an engine that was starting has only now got some
    kill_all(lambda: of_session(session), seconds=_KILL_SECONDS)
    for path in left:
        path.unlink(missing_ok=True)


def _causes(lines: Sequence[str]) -> list[str]:
    """The last lines of the tracebacks in a log, without duplicates, with an explaining line where there is one."""
    found: dict[str, None] = {}
    for line, below in itertools.pairwise([*lines, ""]):
        match = _CAUSE.search(line)
        if match is not None:
            found[f"{match[1]} {below.strip()}" if below.startswith("  ") else match[1]] = None
    return list(found)


def health(address: tuple[str, int]) -> int | None:
    """The status code of `GET /health`; None if there is no answer."""
    connection = http.client.HTTPConnection(*address, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _shared_memory(session: int) -> set[Path]:
    """The segments of Python's shared memory that the processes of a session use."""
    found: set[Path] = set()
    for pid in of_session(session):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            found |= {Path(match) for match in _SHARED_MEMORY.findall(maps)}
    return found


if __name__ == "__main__":
    _guard(int(sys.argv[1]), float(sys.argv[2]))
