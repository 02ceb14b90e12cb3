"""Sandboxes on this machine."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from prefrl.errors import ConfigError, only_on_linux
from prefrl.sandbox.protocol import AssertionTest, InputOutputTest, SandboxError, SandboxLimits, Verdict
from prefrl.sandbox.walls import Jailed, Output, isolation_problem, number_of, run_jailed, seccomp_filter

Isolation = Literal["auto", "bwrap", "namespaces", "process"]

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a program that prints a set gets the same reward each time
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32")
_SCRATCH_FILES = 4096
# Without zero: mapped and shared, it is memory that no limit counts.
_DEVICES = ("null", "random", "urandom")
# The first process of a process namespace, and whoever waits for it, count for the limit of processes.
_OWN_PROCESSES = 2
# If we are root, a sandbox gets one of these user ids: root's processes have no limit. systemd leaves them free.
_USER_IDS = range(60600, 61100)
# Each sandbox gets the next one, so that no two at a time share one; other trainers begin elsewhere.
_numbers = itertools.count(secrets.randbelow(len(_USER_IDS)))
# Wait before a sandbox that did not start gets a second try.
_RETRY_S = 0.5
_VERDICT_BYTES = 2**16
# What the program that tries a sandbox gets, however short the limits of completions are.
_PROBE_S = 30.0
_MIB = 2**20

_JAIL = Path(__file__).with_name("jail.py")
_INSIDE = Path(__file__).with_name("inside.py")
_INSIDE_FOLDER = Path(__file__).with_name("inside_folder.py")


@dataclass(frozen=True, slots=True)
class LocalSandbox:
    """Runs each test in new processes on this machine, with limits.

    Args:
        isolation: "bwrap" uses namespaces made by bubblewrap, and "namespaces" those made by prefrl. Both have no
            network, and no files but the installed programs and an empty /tmp. "process" is a process with limits
            only, which can read the files that its user may read, and has the network. "auto" takes the first of
            "bwrap" and "namespaces" that works.
        limits: What a completion may use for one test.
        python: Interpreter that runs Python; its packages are those that completions can import. By default, this is
            the base interpreter of this environment, without the environment's packages, or /usr/bin/python3.

    Raises:
        ConfigError: `isolation` is unknown.
    """

    isolation: Isolation = "auto"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    python: str | None = None

    def __post_init__(self) -> None:
        if self.isolation not in ("auto", *_HOW):
            raise ConfigError(f"isolation={self.isolation!r}: allowed are 'auto', {', '.join(map(repr, _HOW))}")

    def setup(self) -> None:
        """See `Sandbox.setup`. What works is found out once for each process."""
        working_launcher(self)

    def check(self, language: str, code: str, test: InputOutputTest | AssertionTest) -> Verdict:
        """See `Sandbox.check`."""
        launcher = working_launcher(self)
        try:
            return self._checked(launcher, language, code, test)
        except SandboxError:  # a busy machine may have been out of processes or memory
            time.sleep(_RETRY_S)
            return self._checked(launcher, language, code, test)

    def _checked(self, launcher: Launcher, language: str, code: str, test: InputOutputTest | AssertionTest) -> Verdict:
        if isinstance(test, AssertionTest):
            return _asserted(launcher, code, test)
        return _compared(launcher.run_program(language, code, test.input), test, self.limits)


def _compared(output: Output, test: InputOutputTest, limits: SandboxLimits) -> Verdict:
    if output.ended_by == "wall":
        return Verdict(False, f"not finished within {limits.wall_s:g} s")
    if output.ended_by == "output":
        return Verdict(False, f"more than {limits.output_bytes} bytes of output")
    if output.code != 0:
        return Verdict(False, f"exit code {output.code}")
    is_equal = _lines(output.data.decode(errors="replace")) == _lines(test.output)
    return Verdict(True) if is_equal else Verdict(False, "wrong output")


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends and without empty lines at the end of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _asserted(launcher: Launcher, code: str, test: AssertionTest) -> Verdict:
    """A doubt about the test is certain if the test raises it without any completion, too."""
    verdict = _judged(launcher, code, test)
    if verdict.doubt is None:
        return verdict
    return replace(verdict, defect=_judged(launcher, None, test).doubt)


def _judged(launcher: Launcher, code: str | None, test: AssertionTest) -> Verdict:
    nonce = secrets.token_hex(16)
    output = launcher.run_assertions(code, test.code, nonce)
    if output.ended_by == "wall":
        return Verdict(False, f"not finished within {launcher.limits.wall_s:g} s")
    try:
        verdict = json.loads(output.data)
    except ValueError:
        verdict = None
    if not isinstance(verdict, dict) or verdict.get("nonce") != nonce:
        return Verdict(False, "the tests did not finish")
    if verdict.get("passed") is True:
        return Verdict(True)
    doubt = verdict.get("doubt")
    return Verdict(False, str(verdict.get("failed", doubt)), doubt=doubt)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts processes in one kind of sandbox."""

    how: str
    limits: SandboxLimits
    python: str
    folders: tuple[str, ...]  # what has to be visible inside for Python to run

    @property
    def _processes(self) -> int:
        return self.limits.processes + _OWN_PROCESSES

    def run_program(self, language: str, code: str, text: str) -> Output:
        """Run a program with a text on standard input."""
        python = [self.python, *_python_flags()]
        settings = {
            "role": "program",
            "file": "main.py" if language == "python" else "main.sh",
            "interpreter": python if language == "python" else ["/bin/bash"],
        }
        with ExitStack() as stack:
            program = self._jailed(stack, settings, {"code": code}, rest=text.encode(errors="surrogatepass"))
            return run_jailed([program], wall_s=self.limits.wall_s, output_bytes=self.limits.output_bytes)

    def run_assertions(self, code: str | None, tests: str, nonce: str) -> Output:
        """Run tests in one sandbox, against a completion in another, or against nothing."""
        header = {"code": tests, "nonce": nonce}
        with ExitStack() as stack:
            if code is None:
                judge = self._jailed(stack, {"role": "tests"}, header)
                return run_jailed([judge], wall_s=self.limits.wall_s, output_bytes=_VERDICT_BYTES)
            calls, replies = os.pipe(), os.pipe()
            ends = {"incoming": calls[0], "outgoing": replies[1]}
            candidate = self._jailed(stack, {"role": "functions", **ends}, {"code": code})
            ends = {"incoming": replies[0], "outgoing": calls[1]}
            judge = self._jailed(stack, {"role": "tests", **ends}, header)
            return run_jailed([candidate, judge], wall_s=self.limits.wall_s, output_bytes=_VERDICT_BYTES)

    def _jailed(
        self, stack: ExitStack, settings: dict[str, Any], header: dict[str, str], *, rest: bytes = b""
    ) -> Jailed:
        status, status_inside = os.pipe()
        settings |= {"status": status_inside, "processes": self._processes if self.how == "bwrap" else None}
        inside = [self.python, *_python_flags(), "-c", _text_of(_INSIDE), json.dumps(settings)]
        folder = None
        if self.how == "process":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prefrl-", ignore_cleanup_errors=True))
        message = json.dumps(header).encode()
        todo = memoryview(len(message).to_bytes(8, "big") + message + rest)
        inherited = [status_inside, *(settings[name] for name in ("incoming", "outgoing") if name in settings)]
        return Jailed(self.command(inside, folder), todo, status, inherited)

    def command_in_folder(self, status: int, port: int | None, folder: str | None) -> list[str]:
        """What runs inside_folder.py.

        Args:
            status: Socket that says when the sandbox stands, brings the server's socket, and the files in the end.
            port: Of a server that the command can reach; None: it can reach none.
            folder: Where it runs with "process".
        """
        processes = self._processes if self.how == "bwrap" else None
        is_alone = self.how != "process"  # in a namespace of processes
        settings = json.dumps({"status": status, "port": port, "processes": processes, "is_alone": is_alone})
        inside = [self.python, *_python_flags(), "-c", _text_of(_INSIDE_FOLDER), settings]
        return self.command(inside, folder, has_loopback=port is not None)

    def command(self, inside: list[str], folder: str | None, *, has_loopback: bool = False) -> list[str]:
        """What shuts `inside` in and runs it."""
        uid = _USER_IDS[next(_numbers) % len(_USER_IDS)] if os.getuid() == 0 else None
        config = {
            "how": self.how,
            "parent": os.getpid(),
            "uid": uid,
            "binds": self.folders,
            "scratch_bytes": math.ceil(self.limits.scratch_mb * _MIB),
            "scratch_files": _SCRATCH_FILES,
            "devices": _DEVICES,
            "limits": _resource_limits(self.limits),
            "processes": self._processes,
            "filter": seccomp_filter(platform.machine()).hex(),
            "keyctl": number_of("keyctl", platform.machine()),
            "folder": folder,
            "has_loopback": has_loopback,
            "command": _bwrap_command(self.folders, self.limits, inside) if self.how == "bwrap" else inside,
            "environment": ENVIRONMENT,
        }
        return [sys.executable, "-I", "-S", str(_JAIL), json.dumps(config)]


def _bwrap_command(folders: Sequence[str], limits: SandboxLimits, inside: Sequence[str]) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bwrap: not found")
    command = [program, "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--die-with-parent"]
    command += ["--new-session", "--cap-drop", "ALL", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    # All that can be written is one file system; that of bwrap itself has no limit.
    command += ["--size", str(math.ceil(limits.scratch_mb * _MIB)), "--tmpfs", "/"]
    command += ["--perms", "1777", "--dir", "/tmp", "--perms", "1777", "--dir", "/dev/shm"]
    for device in _DEVICES:
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for folder in folders:
        is_link = os.path.islink(folder)
        command += ["--symlink", os.path.realpath(folder), folder] if is_link else ["--ro-bind", folder, folder]
    return [*command, "--chdir", "/tmp", "--", *inside]


def _resource_limits(limits: SandboxLimits) -> dict[str, int]:
    return {
        "RLIMIT_AS": math.ceil(limits.memory_mb * _MIB),
        "RLIMIT_CPU": math.ceil(limits.cpu_s),
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_FSIZE": math.ceil(limits.scratch_mb * _MIB),
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,  # sockets can pin memory that is no longer mapped
    }


def _python_flags() -> list[str]:
    return ["-s", "-B", "-X", "utf8"]


@functools.cache
def _text_of(program: Path) -> str:
    return program.read_text(encoding="ascii")


@functools.cache
def working_launcher(sandbox: LocalSandbox) -> Launcher:
    """The first kind of sandbox that is seen to work.

    Raises:
        ConfigError: None does.
    """
    _check_machine()
    isolations = [name for name in _HOW if name != "process"] if sandbox.isolation == "auto" else [sandbox.isolation]
    problems = []
    for python in [sandbox.python] if sandbox.python is not None else _pythons():
        for isolation in isolations:
            try:
                launcher = Launcher(isolation, sandbox.limits, python, folders_of(python))
                patient = replace(sandbox.limits, wall_s=_PROBE_S, cpu_s=_PROBE_S)
                problem = isolation_problem(replace(launcher, limits=patient), is_isolating=isolation != "process")
            except (OSError, ValueError, SandboxError, subprocess.SubprocessError) as error:
                problem = str(error)
            if problem is None:
                return launcher
            problems.append(f"{isolation} with {python}: {problem}")
    remedy = _REMEDIES[isolations[0]]
    if sandbox.limits != SandboxLimits():
        remedy += ". If Python cannot start within the limits that you set, raise them, above all memory_mb"
    raise ConfigError(f"isolation={sandbox.isolation!r}: no sandbox works here ({'; '.join(problems)}). {remedy}")


def _check_machine() -> None:
    """What no kind of sandbox can do without."""
    if sys.platform != "linux":
        raise only_on_linux("a sandbox on this machine", "Use RemoteSandbox(url).")
    seccomp_filter(platform.machine())
    ids = [Path("/proc/self", name).read_text(encoding="ascii") for name in ("uid_map", "gid_map")]
    if os.getuid() == 0 and not all(map(_has_ids, ids)):
        raise ConfigError(
            f"no sandbox works here: you are root in a container that has no user and group ids {_USER_IDS[0]} to "
            f"{_USER_IDS[-1]}, and code must not run as root, whose processes have no limits. Start the container "
            "with these ids (/etc/subuid and /etc/subgid), train as a user who is not root, or use RemoteSandbox(url)"
        )


def _has_ids(id_map: str) -> bool:
    """Whether a user namespace has the ids of sandboxes; a line of its map is a first id, the one outside, a count."""
    ranges = [list(map(int, line.split())) for line in id_map.splitlines()]
    return any(first <= _USER_IDS[0] and _USER_IDS[-1] < first + count for first, _, count in ranges)


def _pythons() -> list[str]:
    base = getattr(sys, "_base_executable", None) or sys.executable
    return list(dict.fromkeys([os.path.realpath(base), "/usr/bin/python3"]))


@functools.cache
def folders_of(python: str) -> tuple[str, ...]:
    """The folders that an interpreter needs, with those of the system. It is asked once for each process.

    Raises:
        ValueError: It cannot be used.
    """
    if not os.access(python, os.X_OK) or not os.path.isabs(python):
        raise ValueError("it needs to be the absolute path of an interpreter")
    code = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.executable]))"
    found = subprocess.run([python, "-I", "-c", code], capture_output=True, check=True, timeout=60, env={})
    prefix, base_prefix, executable = json.loads(found.stdout)
    needed = [prefix, base_prefix, os.path.dirname(os.path.realpath(executable)), os.path.dirname(executable)]
    needed += [os.path.realpath(folder) for folder in needed]
    system = [folder for folder in _SYSTEM if os.path.lexists(folder)]
    more = [folder for folder in sorted(set(needed)) if not is_below(folder, system)]
    if "/" in more:
        raise ValueError("its prefix is /, so all files of the machine would be visible")
    outer = [folder for folder in more if not is_below(folder, [other for other in more if other != folder])]
    return (*system, *outer)


def is_below(folder: str, others: Sequence[str]) -> bool:
    """Whether a path is one of others or in one of them."""
    return any(folder == other or folder.startswith(f"{other}/") for other in others)


_HOW = ("bwrap", "namespaces", "process")
_NAMESPACES_REMEDY = (
    "Install bubblewrap (`apt install bubblewrap`), or allow user namespaces: on Ubuntu `sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0`, in Docker a seccomp profile that allows `unshare`. Or use "
    "RemoteSandbox(url). isolation='process' limits the resources of a completion, but not its access to files and "
    "the network"
)
_REMEDIES: Mapping[str, str] = {
    "bwrap": _NAMESPACES_REMEDY,
    "namespaces": _NAMESPACES_REMEDY,
    "process": "Give `python` an interpreter that every user may run, such as /usr/bin/python3, or use "
    "RemoteSandbox(url)",
}
