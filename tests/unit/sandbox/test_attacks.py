"""What the kernel offers to programs beyond the limits and the namespaces of a sandbox is closed."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

import pytest

from prefrl.errors import ConfigError
from prefrl.sandbox import LocalSandbox, SandboxLimits, local
from prefrl.sandbox.walls import number_of
from tests.unit.sandbox.test_local import LIMITS, isolating, printed, program, working

# A filter that allows all system calls.
OPEN = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)

# Prints what succeeds. `setup` tries other attacks, see `prefrl.sandbox.walls`.
ATTACKS = """
import ctypes, os, socket
libc = ctypes.CDLL(None)
mapped, vector = ctypes.create_string_buffer(8), (ctypes.c_void_p * 2)()
here = {"clone": 56, "vmsplice": 278, "read": 310, "write": 311}
there = {"clone": 220, "vmsplice": 75, "read": 270, "write": 271}
numbers = here if os.uname().machine == "x86_64" else there
attempts = {
    "message queue": lambda: libc.msgget(0, 0o1600),
    "semaphores": lambda: libc.semget(0, 1, 0o1600),
    "memfd_secret": lambda: libc.syscall(447, 0),
    "vmsplice": lambda: libc.syscall(numbers["vmsplice"], os.pipe()[1], 0, 0, 0),
    "read process 1": lambda: libc.syscall(numbers["read"], os.getppid(), 0, 0, 0, 0, 0),
    "write process 1": lambda: libc.syscall(numbers["write"], os.getppid(), 0, 0, 0, 0, 0),
    "file of process 1": lambda: libc.syscall(438, libc.syscall(434, os.getppid(), 0), 0, 0),
    "clone": lambda: libc.syscall(numbers["clone"], 0x10000000 | 17, 0, 0, 0, 0),
    "pair": lambda: bool(socket.socketpair(socket.AF_NETLINK)),
    "crypto": lambda: bool(socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)),
}
for what, attempt in attempts.items():
    try:
        if attempt() >= 0:
            print(what)
    except OSError:
        pass
"""

# What right completions use, and what the C library does in another way if a system call is closed.
ORDINARY = """
import asyncio, ctypes, multiprocessing, socket, subprocess, tempfile, threading
queue = multiprocessing.Queue()
process = multiprocessing.Process(target=queue.put, args=(multiprocessing.Value("i", 3).value,))
process.start(); assert queue.get() == 3; process.join()
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
left, right = socket.socketpair(); left.send(b"x"); assert right.recv(1) == b"x"
callback = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 7); assert callback() == 7
with tempfile.TemporaryFile() as file: file.write(b"x")
async def echo():
    child = await asyncio.create_subprocess_exec("echo", "child", stdout=subprocess.PIPE)
    return (await child.communicate())[0]
assert asyncio.run(echo()) == b"child\\n" == subprocess.check_output(["echo", "child"])
"""


def test_calls_that_give_memory_processes_or_sockets_without_a_limit_fail() -> None:
    for sandbox in working():
        assert printed(sandbox, ATTACKS) == ""


def test_threads_processes_and_sockets_of_ordinary_programs_work() -> None:
    for sandbox in working():
        assert program(sandbox, ORDINARY, "thread").passed


def test_the_first_process_of_a_sandbox_has_the_limits() -> None:
    for sandbox in isolating():
        limits = local._resource_limits(LIMITS)
        code = f"import resource as r; print({{name: r.prlimit(1, getattr(r, name))[1] for name in {list(limits)}}})"
        assert printed(sandbox, code) == f"{limits}\n"


def test_setup_finds_what_is_open_without_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "seccomp_filter", lambda machine: OPEN)
    with pytest.raises(ConfigError, match="no sandbox works here") as caught:
        LocalSandbox("process", SandboxLimits(wall_s=8.5)).setup()
    for what in ("System V shared memory", "memfd_create", "shared memory without a file", "a netlink socket"):
        assert what in str(caught.value)
    assert "read a file" not in str(caught.value)


def test_a_sandbox_has_a_session_keyring_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no program gets keys by a call that the filter does not know."""
    sandbox = working()[-1]
    monkeypatch.setattr(local, "seccomp_filter", lambda machine: OPEN)
    keyctl = number_of("keyctl", platform.machine())
    libc = ctypes.CDLL(None)
    libc.syscall(keyctl, 1, None)  # this process may have none, which its children could inherit
    inside = int(printed(sandbox, f"import ctypes; print(ctypes.CDLL(None).syscall({keyctl}, 0, -3, 0))"))
    assert inside == -1 or inside != libc.syscall(keyctl, 0, -3, 0)


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match=r"x86_64 or aarch64, not riscv64.*RemoteSandbox"):
        LocalSandbox(limits=SandboxLimits(wall_s=8.25)).setup()


@pytest.mark.parametrize(
    ("id_map", "has_ids"),
    [("0 0 4294967295\n", True), ("0 1000 1\n", False), ("0 1000 1\n1 100000 65536\n", True), ("0 0 61000\n", False)],
)
def test_root_needs_other_user_ids(id_map: str, has_ids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local._has_ids(id_map) == has_ids
    if not has_ids:
        monkeypatch.setattr(os, "getuid", lambda: 0)
        monkeypatch.setattr(local, "_has_ids", lambda _: False)
        with pytest.raises(ConfigError, match="no user and group ids 60600 to 61099"):
            LocalSandbox("process", SandboxLimits(wall_s=8.75)).setup()
