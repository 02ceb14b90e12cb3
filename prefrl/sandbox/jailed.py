"""Run sandboxed processes: feed them, read one's output, and end all of them at a deadline."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from prefrl.sandbox.protocol import SandboxError

__all__ = ["Jailed", "Output", "run_jailed"]

# Seconds in which processes have to start, also on a busy machine.
_START_S = 60.0
# Seconds in which a launcher that was asked to end has to end what it started. Then it is killed.
_GRACE_S = 4.0
_POLL_S = 0.002
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Output:
    """What a process wrote, and how it ended."""

    data: bytes
    ended_by: Literal["itself", "wall", "output"]
    code: int = 0  # exit code, or minus the number of a signal


@dataclass(slots=True)
class Jailed:
    """A sandboxed process that was started, but has not yet said that its sandbox stands.

    Args:
        command: The launcher.
        todo: What it gets on standard input.
        status: End of the pipe through which the sandbox says that it stands; belongs to this object.
        inherited: File descriptors that the process gets; belong to this object, and are closed once it has them.
    """

    command: Sequence[str]
    todo: memoryview
    status: int
    inherited: list[int]
    process: subprocess.Popen[bytes] = field(init=False)
    is_started: bool = field(init=False, default=False)

    def start(self) -> None:
        """Start it, in a session of its own and with no environment."""
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            self.command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env={},
            cwd="/",
            pass_fds=self.inherited,
            start_new_session=True,
        )
        self._close_inherited()  # so that the end of a process is the end of its pipes

    def end(self) -> None:
        """End it and everything that it started. No process and no descriptor is left."""
        os.close(self.status)
        self._close_inherited()
        if not hasattr(self, "process"):
            return
        # The launcher first, because it also finds those that left its process group.
        if not self.has_ended(0.0):
            os.kill(self.process.pid, signal.SIGTERM)
            self.has_ended(_GRACE_S)
        # Until it is waited for, no other process gets its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def has_ended(self, seconds: float) -> bool:
        """Wait until it has ended, or for so many seconds; it is still there for `end`."""
        ends = time.monotonic() + seconds
        while os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= ends:
                return False
            time.sleep(_POLL_S)
        return True

    def _close_inherited(self) -> None:
        while self.inherited:
            os.close(self.inherited.pop())

    def complaint(self) -> str:
        """What it wrote to standard error before its sandbox stood."""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        try:
            text = os.read(self.process.stderr.fileno(), _CHUNK).decode(errors="replace").strip()
        except BlockingIOError:
            text = ""
        return text.splitlines()[-1] if text else "no message"


def run_jailed(jailed: Sequence[Jailed], *, wall_s: float, output_bytes: int) -> Output:
    """Start processes and wait for the last of them, or for a limit; then end all of them.

    Args:
        jailed: The processes; the output is that of the last one.
        wall_s: Seconds from the moment at which all sandboxes stand.
        output_bytes: The most bytes of output.

    Raises:
        SandboxError: A sandbox does not start.
    """
    try:
        for each in jailed:
            each.start()
        output = _communicate(jailed, wall_s, output_bytes)
    except OSError as error:
        raise SandboxError(f"sandbox: could not be started: {type(error).__name__}: {error}") from error
    finally:
        for each in jailed:
            each.end()
    return replace(output, code=jailed[-1].process.returncode)


def _communicate(jailed: Sequence[Jailed], wall_s: float, output_bytes: int) -> Output:
    last = jailed[-1].process
    assert last.stdout is not None
    data, ends = bytearray(), time.monotonic() + _START_S
    with selectors.DefaultSelector() as selector:
        _register(selector, jailed)
        selector.register(last.stdout, selectors.EVENT_READ)
        is_open = True
        while is_open or _late(jailed):
            were_late = _late(jailed)
            for key, _ in selector.select(max(ends - time.monotonic(), 0.0)):
                if key.data is not None:
                    _serve(selector, key)
                elif part := os.read(key.fd, _CHUNK):
                    data += part
                else:
                    is_open = False
                    selector.unregister(key.fileobj)
            if were_late and not _late(jailed):
                ends = time.monotonic() + wall_s
            if len(data) > output_bytes:
                return Output(bytes(data[:output_bytes]), "output")
            if time.monotonic() >= ends:
                return _at_deadline(jailed, data)
    has_ended = jailed[-1].has_ended(max(ends - time.monotonic(), 0.0))
    return Output(bytes(data), "itself" if has_ended else "wall")


def _late(jailed: Sequence[Jailed]) -> list[Jailed]:
    return [each for each in jailed if not each.is_started]


def _serve(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Hear that a sandbox stands, or feed a process."""
    each: Jailed = key.data
    if key.fd == each.status:
        _read_status(each)
        selector.unregister(key.fileobj)
    elif _feed(each, key.fd):
        selector.unregister(key.fileobj)
        assert each.process.stdin is not None
        each.process.stdin.close()


def _register(selector: selectors.BaseSelector, jailed: Sequence[Jailed]) -> None:
    for each in jailed:
        stdin = each.process.stdin
        assert stdin is not None
        os.set_blocking(stdin.fileno(), False)
        selector.register(stdin.fileno(), selectors.EVENT_WRITE, each)
        selector.register(each.status, selectors.EVENT_READ, each)


def _feed(each: Jailed, stdin: int) -> bool:
    """Write more; whether there is nothing more to write."""
    try:
        each.todo = each.todo[os.write(stdin, each.todo) :] if each.todo else each.todo
    except BlockingIOError:
        return False
    except BrokenPipeError:  # it does not read its input
        each.todo = each.todo[:0]
    return not each.todo


def _read_status(each: Jailed) -> None:
    if os.read(each.status, 1) == b"":
        each.has_ended(1.0)
        raise SandboxError(f"sandbox: ended before the completion was run: {each.complaint()}")
    each.is_started = True


def _at_deadline(jailed: Sequence[Jailed], data: bytearray) -> Output:
    late = _late(jailed)
    if late:
        raise SandboxError(f"sandbox: did not start within {_START_S:g} s: {late[0].complaint()}")
    return Output(bytes(data), "wall")
