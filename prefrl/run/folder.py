"""The folder of a run: one process at a time writes to it, there is room for what is written, and it may hold a model.

Other nodes see whether it is the same folder. A training ends before it is done, at a signal or a deadline, so that it
can be resumed. A run writes down what decides its updates, its starts and its metrics, for itself and others.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import platform
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from prefrl.errors import ConfigError, masked
from prefrl.run.checkpoints import write_synced

_FILE = ".writer"
_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_log = logging.getLogger(__name__)
_held: set[io.FileIO] = set()  # the locked files of this process


def _let_go() -> None:
    """In a fork, close the locked files that it shares with the trainer, which may die before it."""
    for file in _held:
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):  # Windows has none, where a run can be read
    os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def only_writer(run_folder: Path) -> Iterator[str]:
    """Context in which this process is the only one that trains in a folder.

    The kernel holds the lock and releases it when the process ends, however it ends, so nothing is left to clean up.
    The lock belongs to the open file (`flock`): this process may open and close the file again, as a copy does.

    Args:
        run_folder: Created if it does not exist.

    Returns:
        What `writer_token` reads on every node that sees this folder.

    Raises:
        ConfigError: The folder cannot be written to, or another process trains in it: names its host and process id.
    """
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"output_dir={str(run_folder)!r} cannot be written to: {error.strerror}. Choose another folder."
        ) from error
    with io.FileIO(descriptor, "r+") as file:
        _held.add(file)
        try:
            _lock(descriptor, run_folder)
            token = secrets.token_hex(8)
            os.ftruncate(descriptor, 0)
            writer = {"host": socket.gethostname(), "pid": os.getpid(), "token": token}
            os.pwrite(descriptor, json.dumps(writer).encode(), 0)
            os.fsync(descriptor)
            yield token
        finally:
            _held.discard(file)


def _lock(descriptor: int, run_folder: Path) -> None:
    import fcntl  # not on Windows

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            _log.warning("%s: its file system has no locks, so a second run in it would not be noticed", run_folder)
            return
        holder = _read(descriptor)
        raise ConfigError(
            f"output_dir={str(run_folder)!r} is in use: process {holder.get('pid', '?')} on host "
            f"{holder.get('host', '?')} trains in it. Choose another folder, or stop that process."
        ) from error


def writer_token(run_folder: Path) -> str | None:
    """The token of the process that trains in a folder; None if there is none."""
    try:
        return str(json.loads((run_folder / _FILE).read_bytes())["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(descriptor: int) -> dict[str, object]:
    try:
        values = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def check_writable(run_folder: Path, *, option: str = "output_dir") -> None:
    """Raise ConfigError unless files can be written to a folder, the value of an option. It is created if need be."""
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option}={str(run_folder)!r} cannot be written to: {error.strerror}. Choose another folder."
        ) from error


def check_space(run_folder: Path, *, needed: int) -> None:
    """Raise ConfigError, which names both numbers, unless a checkpoint of `needed` bytes fits on the disk."""
    free = shutil.disk_usage(run_folder).free
    if free < needed:
        raise ConfigError(
            f"output_dir={str(run_folder)!r} has {free / 1e6:,.0f} MB free, and a checkpoint needs "
            f"{needed / 1e6:,.0f} MB. Free space, choose another folder, or set save_strategy='no' or "
            "save_only_model=True."
        )


# Names of transformers and peft. The config of an adapter decides how weights beside it are loaded.
_WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*", "adapter_model.*", "adapter_config.json")


def weights_in(folder: Path) -> list[Path]:
    """The files of the model in a folder; empty if there is none."""
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))


# Exit code after `max_train_time`: EX_TEMPFAIL of sysexits.h, "try again". A signal's is 128 + its number.
DEADLINE = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """Raised out of a wait for completions or rewards when a signal asks to stop."""


class StopRequest:
    """Whether this process has been asked to stop.

    The first signal is noted; whoever runs the training asks for `code` between steps. Within `interruptible`, it also
    raises `Stopped` at once. The second signal has its usual effect.

    Args:
        max_seconds: Deadline, counted from `listen`; None: no deadline.
        clock: Returns seconds, never goes back.
    """

    def __init__(self, max_seconds: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_seconds = max_seconds
        self._clock = clock
        self._started = clock()
        self._signal: int | None = None
        self._interruptible = False

    @property
    def code(self) -> int:
        """The exit code that was asked for; 0: nobody has asked to stop."""
        if self._signal is not None:
            return 128 + self._signal
        is_over = self._max_seconds is not None and self._clock() - self._started >= self._max_seconds
        return DEADLINE if is_over else 0

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Context in which signals are noted. A handler that a user has installed is left alone."""
        self._started, self._signal = self._clock(), None
        usual: dict[int, Any] = {
            number: handler
            for number in _SIGNALS
            if (handler := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler)
        }
        if threading.current_thread() is not threading.main_thread():
            usual = {}  # only the main thread can install handlers
        self._usual = usual
        for number in usual:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            self._restore()
            signal.raise_signal(number)
            return
        self._signal = number
        name = signal.Signals(number).name
        when = "now" if self._interruptible else "after this step"
        sys.stderr.write(f"{name}: saving a checkpoint {when}; the next {name} stops immediately\n")
        if self._interruptible:
            raise Stopped

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context of a wait that changes nothing: a signal ends it at once.

        Raises:
            Stopped: A signal asked to stop.
        """
        if self._signal is not None:
            raise Stopped
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False


class Interrupted(SystemExit, KeyboardInterrupt):
    """The KeyboardInterrupt of an orderly end after Ctrl-C, at which a script ends without a traceback."""


def leave(code: int) -> NoReturn:
    """End the process with an exit code; after Ctrl-C, with a KeyboardInterrupt whose argument is that code.

    A Python in which somebody types does not end.
    """
    if code != 128 + signal.SIGINT:
        raise SystemExit(code)
    is_typed = hasattr(sys, "ps1") or sys.flags.interactive
    raise KeyboardInterrupt(code) if is_typed else Interrupted(code)


# What a run writes down about itself.

IDENTITY = "run.json"


@dataclass(frozen=True)
class Identity:
    """A run: which parts of what decides its updates have which value."""

    run: str  # id of the run
    # JSON values by name: "algorithm", "model", "data", "rewards", and the options that decide the updates.
    decisive: Mapping[str, Any]
    model: str = ""  # name or path of the model that it began with; empty: an instance that has none
    sizes: Mapping[str, int] = field(default_factory=dict)  # those that were "auto", once they are found


def new_run_id() -> str:
    """An id that no other run has."""
    return secrets.token_hex(6)


def write_identity(folder: Path, identity: Identity) -> None:
    """Write `run.json`, in place of the one that is there; a kill leaves one of the two."""
    aside = folder / f"{IDENTITY}.part"
    aside.unlink(missing_ok=True)  # it could be a link
    write_synced(aside, json.dumps(asdict(identity), indent=1, sort_keys=True))
    os.replace(aside, folder / IDENTITY)


def read_identity(folder: Path) -> Identity | None:
    """Read `run.json`; None if there is none that can be read."""
    try:
        values = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
        return Identity(values["run"], dict(values["decisive"]), values["model"], dict(values["sizes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_same_run(saved: Identity, now: Identity, *, where: str, allowed: Collection[str]) -> list[str]:
    """Check that what decides the updates is what it was when a checkpoint was written.

    Returns:
        The names that are allowed to differ and do.

    Raises:
        ConfigError: Lists every other difference.
    """
    after = json.loads(json.dumps(now.decisive))  # as it would be read
    names = [name for name in sorted({*saved.decisive, *after}) if saved.decisive.get(name) != after.get(name)]
    refused = [name for name in names if name not in allowed]
    if refused:
        lines = "".join(f"\n  {name}: {_difference(saved.decisive.get(name), after.get(name))}" for name in refused)
        raise ConfigError(
            f"{where} belongs to a run with other settings, which decide the updates:{lines}\nResume with the same "
            f"settings, or set allow_resume_changes={refused!r} to continue with the new ones, or start a new run "
            f"from its weights, model={where!r}."
        )
    return names


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
        return ", ".join(f"{key} was {before.get(key)!r} and is {after.get(key)!r}" for key in keys)
    return f"was {before!r} and is {after!r}"


STARTS = "starts.jsonl"
_PACKAGES = ("prefrl", "torch", "transformers", "accelerate", "datasets", "peft", "deepspeed", "vllm")


@dataclass(frozen=True)
class Start:
    """A start of training, from step 0 or from a checkpoint."""

    run: str  # id of the run
    time: str  # ISO 8601, UTC
    command: str  # as a shell takes it, without secrets
    versions: dict[str, str]  # of Python and the packages that are installed
    platform: str


def record_start(folder: Path, run: str) -> None:
    """Add a line to `starts.jsonl`."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    start = Start(run, now, command_of(sys.orig_argv), _versions(), f"{platform.system()} {platform.machine()}")
    with (folder / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(start)) + "\n")


def read_starts(folder: Path, run: str) -> list[Start]:
    """The starts of a run, in their order; those of other runs in the folder and damaged lines are left out."""
    try:
        lines = (folder / STARTS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    starts = []
    for line in lines:
        try:
            starts.append(Start(**json.loads(line)))
        except (ValueError, TypeError):
            continue  # the last line of a killed process
    return [start for start in starts if start.run == run]


def how_to_resume(output_dir: str) -> str:
    """A sentence that says how the run of this process goes on: by the command, if that has started it."""
    if command_of(sys.orig_argv).startswith("prefrl ") or "prefrl.scripts.main" in sys.orig_argv:
        return f"To continue: {shlex.join(['prefrl', 'resume', output_dir])}"
    return f"To continue, start the same training with resume_from_checkpoint=True; output_dir is {output_dir}"


def is_trained(run_folder: Path) -> bool | None:
    """Whether the process that last trained in a folder is alive; None: it was on another host, or is unknown."""
    try:
        writer = json.loads((run_folder / _FILE).read_bytes())
        host, pid = writer["host"], int(writer["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if host != socket.gethostname() or not hasattr(os, "fork"):  # on Windows, the signal 0 is not a question
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def command_of(argv: Sequence[str]) -> str:
    """A command line as a shell takes it, with `***` for secrets and without the folders of the programs.

    Args:
        argv: The words with which the process was started, the program first.
    """
    words = [Path(argv[0]).name, *argv[1:]] if argv else []
    if len(words) > 1 and Path(words[1]).name == "prefrl":
        words = ["prefrl", *words[2:]]
    shown = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=")
        if equals and word.startswith("-"):
            shown.append(f"{option}={masked(value, _name(option))}")
        else:
            shown.append(masked(word, _name(before)) if before.startswith("-") else masked(word))
    return shlex.join(shown)


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


METRICS_FILE = "metrics.jsonl"


def append_metrics(folder: Path, row: Mapping[str, Any]) -> None:
    """Append a line. NaN and infinity, which JSON does not have, become null.

    Args:
        folder: The folder of the run.
        row: `run` (its id), `step`, `time` (seconds since 1970) and the metrics by name.

    Raises:
        OSError: The file cannot be written.
    """
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite, default=str) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of the last run in a folder, in order.

    A run that was interrupted and resumed repeats the steps after its checkpoint; their earlier rows are left out, and
    so is a line that was cut off by a crash.

    Raises:
        OSError: There is no file, or it cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or not {"run", "step"} <= row.keys():
            continue  # of another program
        if rows and row["run"] != rows[-1]["run"]:
            rows = []
        # A step is logged once with its loss; evaluations of the same step follow.
        first_repeated = row["step"] if "loss" in row else row["step"] + 1
        while rows and rows[-1]["step"] >= first_repeated:
            rows.pop()
        rows.append(row)
    return rows
