"""Which system calls code in a sandbox may not make, and a program that finds out whether the sandbox holds.

The filter is a seccomp filter, as the kernel's BPF program. Everything that Linux has added since 5.0 answers "not
implemented", as a kernel of that age would: new calls have the same numbers on all architectures, so that later ones
are closed, too. Older calls are refused one by one.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import platform
import socket
import struct
import tempfile
from typing import Protocol

from prefrl.errors import ConfigError
from prefrl.sandbox.jailed import Output
from prefrl.sandbox.protocol import SandboxLimits

__all__ = ["number_of", "seccomp_filter", "isolation_problem"]

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
