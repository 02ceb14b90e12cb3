"""Commands on an event loop: started, read, and ended with everything that they have started."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import sys
import tarfile
import tempfile
import zipfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from prefrl.errors import ConfigError
from prefrl.sandbox.local import ENVIRONMENT, Launcher, LocalSandbox, folders_of, is_below, working_launcher
from prefrl.sandbox.protocol import SandboxError

OUTPUT_BYTES = 2**20
# Of standard error, the end is kept: it says why a program failed.
_COMPLAINT_BYTES = 2**12
# Seconds in which a sandbox has to stand, also on a busy machine.
_START_S = 60.0
# Seconds in which a launcher has to end what it started. Then its process group is killed.
_GRACE_S = 5.0
_CHUNK = 2**16
_MIB = 2**20
# What an archive takes beside the content of its files.
_ARCHIVE_BYTES = 16 * _MIB
_JAIL = Path(__file__).with_name("jail.py")


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended."""

    code: int  # exit code, or 128 and the number of a signal
    output: bytes  # standard output
    complaint: str  # the last line of standard error
    files: bytes = b""  # its folder in a sandbox, as an archive of tar


def archive_of(files: object) -> bytes:
    """Files as an archive of tar.

    Args:
        files: Contents by path, text or bytes, where None means no file; or an archive of tar or zip, or its path.

    Raises:
        ValueError: It is something else, or a path leads out of the folder.
        OSError: The archive cannot be read.
    """
    if isinstance(files, str):
        files = Path(files).read_bytes()
    if isinstance(files, bytes):
        if zipfile.is_zipfile(io.BytesIO(files)):
            with zipfile.ZipFile(io.BytesIO(files)) as archive:
                files = {one.filename: archive.read(one) for one in archive.infolist() if not one.is_dir()}
        elif tarfile.is_tarfile(io.BytesIO(files)):
            return files
    if not isinstance(files, Mapping):
        raise ValueError("files must be a mapping from paths to contents, or an archive of tar or zip, or its path")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as made:
        for path, content in files.items():
            if content is None:  # a column has the same keys in each row
                continue
            if not isinstance(content, str | bytes) or path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"the file {path!r} must have a path below the folder, and text or bytes as content")
            member = tarfile.TarInfo(path)
            content = content.encode() if isinstance(content, str) else content
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return data.getvalue()


def chosen(archive: bytes, patterns: Sequence[str]) -> bytes:
    """The regular files of an archive of tar whose paths match a pattern, as another one."""
    data = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files, tarfile.open(fileobj=data, mode="w") as made:
        for one in files:
            if one.isfile() and any(fnmatchcase(os.path.normpath(one.name), pattern) for pattern in patterns):
                made.addfile(one, files.extractfile(one))
    return data.getvalue()


class OutputLimitError(Exception):
    """A command wrote more than it may, and was ended."""


async def run_command(command: Sequence[str], environment: Mapping[str, str]) -> Finished:
    """Run a command without a sandbox. Its descendants end when it does, or when this call is canceled.

    Args:
        command: The path of the program, and its arguments.
        environment: All of its environment variables.

    Raises:
        OSError: It cannot be started.
        OutputLimitError: It wrote more than `OUTPUT_BYTES` to standard output.
    """
    launched = [*command]
    if sys.platform == "linux":  # elsewhere, only its process group ends with it
        config = json.dumps({"how": "free", "uid": None, "folder": None, "parent": os.getpid(), "command": launched})
        launched = [sys.executable, "-I", "-S", str(_JAIL), config]
    process = await asyncio.create_subprocess_exec(
        *launched, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=dict(environment), start_new_session=True
    )
    try:
        return await _finished(process)
    finally:
        await _end(process)


@dataclass(frozen=True, slots=True)
class Workplace:
    """Runs commands in a sandbox, each in a new folder.

    Args:
        sandbox: Its limits hold for each command, but for that of the time, which is the caller's.
        programs: Paths of programs that are run inside.
        shown: Further files and folders that can be read inside.
    """

    sandbox: LocalSandbox
    programs: tuple[str, ...]
    shown: tuple[str, ...] = ()

    def setup(self) -> None:
        """Find out whether it works. What a sandbox does here is found out once for each process.

        Raises:
            ConfigError: It does not.
        """
        launcher = self._launcher()
        for program in self.programs:
            if launcher.how != "process" and not is_below(program, launcher.folders):
                raise ConfigError(
                    f"the program {program!r} is in none of the folders that the sandbox shows, which are "
                    f"{', '.join(launcher.folders)}. Name the folder of its installation in folders"
                )

    def _launcher(self) -> Launcher:
        launcher = working_launcher(self.sandbox)
        paths = [*launcher.folders]
        for program in self.programs:
            if Path(program).name.startswith("python") and not is_below(program, paths):
                paths += [folder for folder in folders_of(program) if not is_below(folder, paths)]
        return replace(launcher, folders=(*paths, *(path for path in self.shown if not is_below(path, paths))))

    async def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        archives: Sequence[bytes] = (),
        *,
        server: tuple[str, int] | None = None,
    ) -> Finished:
        """Run a command in a folder with the files of some archives; those of later ones replace earlier ones.

        Args:
            command: The path of the program, and its arguments.
            environment: Environment variables beside those of every sandbox.
            archives: Of tar.
            server: Host and port of the only server that it can connect to. Inside, this is the port of 127.0.0.1.
                With isolation "process", the network is not limited.

        Raises:
            SandboxError: The sandbox does not start.
            OSError: It cannot be started.
            OutputLimitError: It wrote more than the limits allow.
        """
        launcher = self._launcher()
        is_shared = launcher.how == "process"  # the network and the file system of this machine
        async with AsyncExitStack() as stack:
            folder = None
            if is_shared:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prefrl-", ignore_cleanup_errors=True))
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            with theirs:
                port = None if server is None or is_shared else server[1]
                process = await asyncio.create_subprocess_exec(
                    *launcher.command_in_folder(theirs.fileno(), port, folder),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=PIPE,
                    env={},
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            stack.push_async_callback(_end, process)
            path = f"{Path(command[0]).parent}:{ENVIRONMENT['PATH']}"
            todo = {"command": [*command], "environment": {**ENVIRONMENT, "PATH": path, **environment}}
            finished = asyncio.create_task(_finished(process, _with_header(todo, archives)))
            stack.callback(finished.cancel)
            async with asyncio.timeout(_START_S):
                heard, sockets = await _heard(ours)
            if not heard:
                raise SandboxError(f"sandbox: ended before the command was run: {(await finished).complaint}")
            if sockets and server is not None:
                await stack.enter_async_context(_forwarding(socket.socket(fileno=sockets[0]), server))
            most = self.sandbox.limits.scratch_mb * _MIB + _ARCHIVE_BYTES
            files, result = await asyncio.gather(_received(ours, most), finished)
            return replace(result, files=files)
        raise AssertionError("no context suppresses errors")


def _with_header(todo: Mapping[str, object], archives: Sequence[bytes]) -> bytes:
    """What inside_folder.py reads."""
    text = json.dumps({**todo, "archives": [len(archive) for archive in archives]}).encode()
    return b"".join([len(text).to_bytes(8, "big"), text, *archives])


async def _heard(ours: socket.socket) -> tuple[bytes, list[int]]:
    """The first byte from a sandbox, with the socket that it brings; no byte: it has ended."""
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(ours, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(ours)
    heard, sockets, _, _ = socket.recv_fds(ours, 1, 1)
    return heard, sockets


async def _received(ours: socket.socket, most: int) -> bytes:
    """What else comes.

    Raises:
        OutputLimitError: It is too much.
    """
    loop = asyncio.get_running_loop()
    ours.setblocking(False)
    data = bytearray()
    while part := await loop.sock_recv(ours, _CHUNK):
        data += part
        if len(data) > most:
            raise OutputLimitError(f"wrote more than {most} bytes to its folder")
    return bytes(data)


@asynccontextmanager
async def _forwarding(listening: socket.socket, server: tuple[str, int]) -> AsyncIterator[None]:
    """Inside this context, connections to a socket of a sandbox lead to a server."""
    open_now: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(_CHUNK):
            writer.write(part)
            await writer.drain()
        writer.write_eof()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_now.add(task)
        with contextlib.suppress(OSError), contextlib.closing(writer):
            their_reader, their_writer = await asyncio.open_connection(*server)
            with contextlib.closing(their_writer):
                await asyncio.gather(copy(reader, their_writer), copy(their_reader, writer))
        open_now.discard(task)

    listener = await asyncio.start_server(forward, sock=listening)
    try:
        yield
    finally:
        listener.close()
        for task in open_now:
            task.cancel()


async def _finished(process: Process, feed: bytes = b"") -> Finished:
    output, complaint = bytearray(), bytearray()

    async def write() -> None:
        if process.stdin is not None:
            with contextlib.suppress(ConnectionError):  # it does not read its input
                process.stdin.write(feed)
                await process.stdin.drain()
            process.stdin.close()

    async def read() -> None:
        assert process.stdout is not None
        while part := await process.stdout.read(_CHUNK):
            if len(output) <= OUTPUT_BYTES:
                output.extend(part)
                if len(output) > OUTPUT_BYTES:
                    _stop(process)

    async def read_complaint() -> None:
        assert process.stderr is not None
        while part := await process.stderr.read(_CHUNK):
            complaint.extend(part)
            del complaint[:-_COMPLAINT_BYTES]

    await asyncio.gather(write(), read(), read_complaint())
    code = await process.wait()
    if len(output) > OUTPUT_BYTES:
        raise OutputLimitError(f"wrote more than {OUTPUT_BYTES} bytes to standard output")
    lines = complaint.decode(errors="replace").strip().splitlines()
    return Finished(code if code >= 0 else 128 - code, bytes(output), lines[-1].strip() if lines else "")


async def _end(process: Process) -> None:
    """End a command that still runs. The signal goes out at once: nobody may be left to wait for its end."""
    if process.returncode is None:
        _stop(process)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _stop(process: Process) -> None:
    """Tell a launcher to end its descendants; where there is none, kill the process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sys.platform == "linux":
            os.kill(process.pid, signal.SIGTERM)
        else:
            os.killpg(process.pid, signal.SIGKILL)
