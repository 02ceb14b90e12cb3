"""Shut a command in. It is run as a script, outside of the sandbox: `jail.py CONFIG`, with the standard library alone.

CONFIG is the JSON of `prefrl.sandbox.local`. With `"how": "namespaces"`, the command gets user, mount,
process, network, IPC and host name namespaces of its own, no capabilities, and a root file system in memory that holds
nothing but `binds`, read-only, and an empty /tmp. With "process" it gets another user id, if this one is root's, and
its descendants are killed when it ends. With "bwrap" it is bubblewrap, which replaces this process. With "free" there
is no sandbox, but its descendants are killed when it ends, or when this process is asked to end or loses its parent.

The limits are set before namespaces are made, so that every process in them has them, and the filter of system calls
afterwards, because it does not allow making them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import sys
import time
from typing import Any, NoReturn

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_ALL_NAMESPACES = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SYS_MOUNT_SETATTR = 442
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_READ_ONLY_NOSUID_NODEV = 0x1 | 0x2 | 0x4
_CAPABILITY_VERSION = 0x20080522

# The user inside. Root's id would get capabilities back with each program that is started.
_INNER_ID = 1000
# Seconds in which the descendants of a plain process have to be gone.
_CLEANING_S = 2.0


def main() -> NoReturn:
    """End like the command: with its exit code, or with 128 and the number of the signal that ended it."""
    config = json.loads(sys.argv[1])
    _die_with_parent()
    if os.getppid() != config["parent"]:  # it died before
        os._exit(1)
    if config["how"] == "free":
        os._exit(_as_process(config))
    # A session keyring of its own. This fails in containers that refuse the call, and where the user has no room for
    # another key; the filter of system calls keeps completions from all keys anyway.
    _libc.syscall(config["keyctl"], _KEYCTL_JOIN_SESSION_KEYRING, None)
    if config["how"] == "bwrap":
        _into_bwrap(config)
    os._exit(_in_namespaces(config) if config["how"] == "namespaces" else _as_process(config))


def _into_bwrap(config: dict[str, Any]) -> NoReturn:
    """Become bwrap, which sets the filter once it has made the namespaces."""
    if config["uid"] is not None:
        _become(config["uid"])
    _limit(config["limits"])
    readable, writable = os.pipe()
    os.write(writable, bytes.fromhex(config["filter"]))
    os.close(writable)
    os.set_inheritable(readable, True)
    program, *arguments = config["command"]
    _exec({**config, "command": [program, "--seccomp", str(readable), *arguments]})


def _in_namespaces(config: dict[str, Any]) -> int:
    are_made, made = os.pipe()
    is_mapped, mapped = os.pipe()
    child = os.fork()
    if child == 0:
        _die_with_parent()
        _limit(config["limits"])
        _call("unshare", _libc.unshare(_ALL_NAMESPACES))
        if config["has_loopback"]:
            _start_loopback()
        os.write(made, b".")
        os.close(mapped)
        if os.read(is_mapped, 1) != b".":
            os._exit(125)
        for descriptor in (made, are_made, is_mapped):
            os.close(descriptor)
        first = os.fork()
        if first == 0:
            _be_first_process(config)
        os._exit(_code(os.waitpid(first, 0)[1]))
    os.close(made)
    if os.read(are_made, 1) == b".":
        # From outside, because only root's process out here may map two ids.
        _map_ids(child, config["uid"])
        os.write(mapped, b".")
    os.close(mapped)
    return _code(os.waitpid(child, 0)[1])


def _start_loopback() -> None:
    """In the new network namespace, which has no other device."""
    import fcntl
    import socket
    import struct

    with socket.socket() as device:
        fcntl.ioctl(device, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _map_ids(child: int, uid: int | None) -> None:
    """Inside, the setup runs as root's user out here, who can read everything that is bound, the command as `uid`."""
    if uid is None:
        _write(f"/proc/{child}/setgroups", "deny")
        ids = [(os.getuid(), ""), (os.getgid(), "")]
    else:
        ids = [(uid, "0 0 1\n"), (uid, "0 0 1\n")]
    for name, (outer, root) in zip(("uid_map", "gid_map"), ids, strict=True):
        _write(f"/proc/{child}/{name}", f"{root}{_INNER_ID} {outer} 1\n")


def _be_first_process(config: dict[str, Any]) -> NoReturn:
    """Process 1, whose end kills all others of its namespace; the command is its child."""
    _make_root(config)
    _drop_capabilities(_INNER_ID if config["uid"] is not None else None)
    _die_with_parent()
    _prctl(_PR_SET_DUMPABLE, 0)  # the command, of the same user, cannot trace it
    _limit({"RLIMIT_NPROC": config["processes"]})  # counted in the new namespace; out there it would be the user's
    _close_system_calls(config)
    command = os.fork()
    if command == 0:
        _exec(config)
    while True:
        ended, status = os.wait()  # also orphans
        if ended == command:
            os._exit(_code(status))


def _make_root(config: dict[str, Any]) -> None:
    root = os.path.dirname(os.path.abspath(__file__))  # a folder that exists; it is covered in this namespace alone
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    options = f"size={config['scratch_bytes']},nr_inodes={config['scratch_files']},mode=755"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path in config["binds"]:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):  # /bin -> /usr/bin
            os.symlink(os.path.realpath(path), target)
            continue
        if os.path.isfile(path):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        else:
            os.makedirs(target, exist_ok=True)
        _mount(path, target, None, _MS_BIND | _MS_REC)
        _make_read_only(target)
    for folder in ("/dev", "/dev/shm", "/tmp"):
        os.makedirs(root + folder, exist_ok=True)
        os.chmod(root + folder, 0o1777 if folder != "/dev" else 0o755)
    for device in config["devices"]:
        os.close(os.open(f"{root}/dev/{device}", os.O_CREAT | os.O_WRONLY))
        _mount(f"/dev/{device}", f"{root}/dev/{device}", None, _MS_BIND)
    os.chdir(root)
    # The old root comes to lie upon the new one and is then taken away, with everything below it.
    _call("pivot_root", _libc.syscall(_SYS_PIVOT_ROOT[platform.machine()], b".", b"."))
    _call("umount2", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/tmp")


def _make_read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, ctypes.byref(attributes), size)
    _call(f"mount_setattr {path}", result)


def _drop_capabilities(new_id: int | None) -> None:
    with_capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, with_capability, 0, 0, 0) == 0:
        with_capability += 1  # the first that the kernel does not know ends it
    if new_id is not None:
        _become(new_id)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    _call("capset", _libc.capset(header, none))


def _as_process(config: dict[str, Any]) -> int:
    """Run the command as a child; whoever it leaves behind becomes a child of this process, and is killed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    uid = config["uid"]
    signal.signal(signal.SIGTERM, lambda *_: _end_early(config))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    is_free = config["how"] == "free"
    num_others = 0 if uid is not None or is_free else _num_threads_of_user()
    if uid is not None:
        os.chown(config["folder"], uid, uid)
    command = os.fork()
    if command == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if is_free:
            _die_with_parent()
            os.execve(config["command"][0], config["command"], os.environ)
        os.chdir(config["folder"])
        if uid is not None:
            _become(uid)
        _die_with_parent()
        _limit({**config["limits"], "RLIMIT_NPROC": config["processes"] + num_others})
        _close_system_calls(config)
        _exec(config)
    while True:
        ended, status = os.wait()
        if ended == command:
            _kill_descendants()
            return _code(status)


def _end_early(config: dict[str, Any]) -> NoReturn:
    """Leave no process; and no folder, which nobody may be left to remove."""
    code = _kill_descendants()
    if config["folder"] is not None:
        import shutil

        shutil.rmtree(config["folder"], ignore_errors=True)
    os._exit(code)


def _kill_descendants() -> int:
    """Kill until none is left. Returns the exit code of a run that was ended.

    They are stopped first: stopped processes still count for the limit of processes, into which a fork bomb then runs.
    """
    ends = time.monotonic() + _CLEANING_S
    stopped: set[int] = set()
    while time.monotonic() < ends:
        found = set(_descendants())
        _signal(found - stopped, signal.SIGSTOP)
        if not found - stopped:
            _signal(found, signal.SIGKILL)
        stopped = found
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
    return 128 + signal.SIGKILL


def _signal(processes: set[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    found, todo = [], [os.getpid()]
    while todo:
        new = children.get(todo.pop(), [])
        found += new
        todo += new
    return found


def _num_threads_of_user() -> int:
    """Threads of this user on the whole machine, which count for the limit of processes."""
    number = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    number += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return number


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _limit(limits: dict[str, int]) -> None:
    """Set limits that nobody can raise again. One that is lower already stays."""
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        if hard == resource.RLIM_INFINITY or value < hard:
            resource.setrlimit(number, (value, value))


class _Filter(ctypes.Structure):
    _fields_ = (("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _close_system_calls(config: dict[str, Any]) -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    instructions = bytes.fromhex(config["filter"])
    filter = _Filter(len(instructions) // 8, instructions)
    result = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter), 0, 0)
    _call("a seccomp filter, which needs a kernel with CONFIG_SECCOMP_FILTER", result)


def _exec(config: dict[str, Any]) -> NoReturn:
    os.execve(config["command"][0], config["command"], config["environment"])


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    _call(f"prctl {option}", _libc.prctl(option, value, 0, 0, 0))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    _call(f"mount {source or kind} {target}", _libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()))


def _call(what: str, result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    main()
