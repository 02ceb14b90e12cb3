"""What a sandbox does not allow, and how its processes run: fed, read, and all of them ended at a deadline.

The filter is a seccomp filter, as the kernel's BPF program. Everything that Linux has added since 5.0 answers "not
implemented", as a kernel of that age would: new calls have the same numbers on all architectures, so that later ones
are closed, too. Older calls are refused one by one. A program finds out whether the sandbox holds.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import platform
import selectors
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from prefrl.errors import ConfigError
from prefrl.sandbox.protocol import SandboxError, SandboxLimits

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


# The first number that was given since Linux 5.0.
_FIRST_NEW = 424

_MACHINES = ("x86_64", "aarch64")
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# The numbers are those of the machines above, in their order.
_CLOSED = {
    # Memory that no limit counts, or that outlives the process.
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "vmsplice": (278, 75),
    "bpf": (321, 280),
    # Keys, which are in no namespace.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Other processes, such as the first one of the sandbox.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    # User namespaces, in which code would have capabilities; see also clone.
    "unshare": (272, 97),
    "setns": (308, 268),
}
# These depend on an argument.
_PARTLY_CLOSED = {
    "mmap": (9, 222),
    "clone": (56, 220),
    "socket": (41, 198),
    "socketpair": (53, 199),
}

_LOAD, _IF_EQUAL, _IF_NOT_LESS, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
# Offsets in what the filter sees of a call.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_CLONE_NEWUSER = 0x10000000
_MAP_SHARED, _MAP_ANONYMOUS = 0x1, 0x20
# All others, such as AF_VSOCK, are in no network namespace, or of no use there.
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10

# Operation, instructions to skip if true, if false, operand.
_Instruction = tuple[int, int, int, int]


def number_of(name: str, machine: str) -> int:
    """The number of a system call that the filter knows."""
    return (_CLOSED | _PARTLY_CLOSED)[name][_MACHINES.index(machine)]


@functools.cache
def seccomp_filter(machine: str) -> bytes:
    """The filter, as the array of `struct sock_filter` that `prctl` and bwrap's `--seccomp` take.

    Args:
        machine: What `platform.machine` says.

    Raises:
        ConfigError: The numbers of its system calls are not known.
    """
    if machine not in _MACHINES:
        raise ConfigError(
            f"a sandbox on this machine needs a processor of {' or '.join(_MACHINES)}, not {machine}, because the "
            "numbers of system calls differ; use RemoteSandbox(url)"
        )
    refuse = _fail(errno.EPERM)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),  # calls of 32-bit programs have other numbers
        (_LOAD, 0, 0, _NUMBER),
        (_IF_NOT_LESS, 0, 1, _FIRST_NEW),
        _fail(errno.ENOSYS),
    ]
    blocks = {name: [refuse] for name in _CLOSED} | _blocks(refuse)
    for name, block in blocks.items():
        program += [(_IF_EQUAL, 0, len(block), number_of(name, machine)), *block]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _blocks(refuse: _Instruction) -> dict[str, list[_Instruction]]:
    """What decides about calls that are partly closed. Each block ends in a decision."""
    allow = (_RETURN, 0, 0, _ALLOW)
    family = [
        (_LOAD, 0, 0, _argument(0)),
        (_IF_EQUAL, 3, 0, _AF_UNIX),
        (_IF_EQUAL, 2, 0, _AF_INET),
        (_IF_EQUAL, 1, 0, _AF_INET6),
        _fail(errno.EAFNOSUPPORT),
        allow,
    ]
    return {
        # Shared memory without a file stays as long as one page of it is mapped, and only what is mapped is counted.
        "mmap": [
            (_LOAD, 0, 0, _argument(3)),
            (_IF_ANY_BIT, 0, 2, _MAP_ANONYMOUS),
            (_IF_ANY_BIT, 0, 1, _MAP_SHARED),
            refuse,
            allow,
        ],
        "clone": [(_LOAD, 0, 0, _argument(0)), (_IF_ANY_BIT, 0, 1, _CLONE_NEWUSER), refuse, allow],
        "socket": family,
        "socketpair": family,
    }


def _argument(number: int) -> int:
    """The offset of its lower half, on machines that store it first."""
    return _ARGUMENTS + 8 * number


def _fail(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _FAIL | number)


# More processes than the limit, with what a sandbox needs itself.
_MARGIN = 16

# What `isolation="process"` does not keep a program from.
_ISOLATION = (
    "read a file of this machine",
    "connect to a server on this machine",
    "write more than scratch_mb to files",
)
# Each attempt is a way that is or was open in some sandbox; it raises OSError, or says False, if it fails.
_PROGRAM = """
import ctypes, json, mmap, os, signal, socket, sys
path, port, most, scratch, numbers = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None)

def calls(name, *args):
    return libc.syscall(numbers[name], *args) >= 0

def writes_more():
    sizes = {}
    for folder in ("/", "/dev", "/dev/shm", "/tmp"):
        if os.access(folder, os.W_OK):
            system = os.statvfs(folder)
            sizes[os.stat(folder).st_dev] = system.f_blocks * system.f_frsize or float("inf")
    return sum(sizes.values()) > scratch

attempts = {
    "read a file of this machine": lambda: open(path).read() != "",
    "connect to a server on this machine": lambda: socket.create_connection(("127.0.0.1", port), 1.0),
    "write more than scratch_mb to files": writes_more,
    "take System V shared memory": lambda: calls("shmget", 0, 4096, 0o600),
    "take memory with memfd_create": lambda: os.memfd_create("memory"),
    "take shared memory without a file": lambda: mmap.mmap(-1, 4096),
    "use the user's keyring": lambda: calls("keyctl", 0, -3, 1),
    "trace the first process of its sandbox": lambda: calls("ptrace", 0x4206, os.getppid(), 0, 0),
    "open a VSOCK socket": lambda: socket.socket(40, socket.SOCK_STREAM),
    "open a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "use io_uring": lambda: calls("io_uring_setup", 1, ctypes.create_string_buffer(120)),
    "make a user namespace": lambda: calls("unshare", 0x10000000),
}

def succeeds(attempt):
    try:
        return attempt() is not False
    except OSError:
        return False

seen = [what for what, attempt in attempts.items() if succeeds(attempt)]
children = []
try:
    while len(children) < most:
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
except OSError:
    pass
for child in children:
    os.kill(child, signal.SIGKILL)
if len(children) == most:
    seen.append(f"start {most} processes, in spite of its limit")
print(json.dumps(seen))
"""
_CALLS = ("shmget", "keyctl", "ptrace", "unshare")
_IO_URING_SETUP = 425  # on all architectures


class _Launcher(Protocol):
    @property
    def limits(self) -> SandboxLimits: ...

    def run_program(self, language: str, code: str, text: str) -> Output: ...


def isolation_problem(launcher: _Launcher, *, is_isolating: bool) -> str | None:
    """What a sandbox does not do; None: it does everything.

    Args:
        launcher: Starts programs in the sandbox.
        is_isolating: Whether it has to keep a program from files and from the network, too.

    Raises:
        SandboxError: It does not start.
    """
    most = launcher.limits.processes + _MARGIN
    # A file system has whole pages, of at most 64 KiB.
    scratch = launcher.limits.scratch_mb * 2**20 + 2**16
    numbers = {name: number_of(name, platform.machine()) for name in _CALLS} | {"io_uring_setup": _IO_URING_SETUP}
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile("w") as file:
        file.write("readable")
        file.flush()
        os.chmod(file.name, 0o644)
        task = json.dumps([file.name, server.getsockname()[1], most, scratch, numbers])
        output = launcher.run_program("python", _PROGRAM, task)
    try:
        seen = json.loads(output.data)
    except ValueError:
        return (
            f"a small program ended with code {output.code} and wrote {output.data[:200]!r}; are the limits too low?"
        )
    found = [what for what in seen if is_isolating or what not in _ISOLATION]
    return f"a program can {', '.join(found)}" if found else None
