"""Sees for itself whether a sandbox holds, by a program that tries to get out."""

from __future__ import annotations

import json
import os
import platform
import socket
import tempfile
from typing import Protocol

from prefrl.rewards.sandbox.base import SandboxLimits
from prefrl.rewards.sandbox.processes import Output
from prefrl.rewards.sandbox.system_calls import number_of

__all__ = ["problem_of"]

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


def problem_of(launcher: _Launcher, *, is_isolating: bool) -> str | None:
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
