"""What runs inside of a sandbox, with the standard library alone: a command in a folder of files.

Its text is given to `python -c`, with the JSON of its configuration as argument. Standard input brings the command, as
a message like those of inside.py, and then archives of files. A socket takes the news that the sandbox stands, with
the socket of a server that is answered outside, and in the end the folder as an archive.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import socket
import sys
import tarfile
from typing import IO, Any, NoReturn


def main() -> None:
    """Run what standard input says, and end with its exit code."""
    config = json.loads(sys.argv[1])
    header = json.loads(_read(int.from_bytes(_read(8), "big")))
    if config["processes"] is not None:  # in a namespace of bwrap, where they are counted
        resource.setrlimit(resource.RLIMIT_NPROC, (config["processes"], config["processes"]))
    os.set_inheritable(config["status"], False)
    status = socket.socket(fileno=config["status"])
    if config["port"] is None:
        status.send(b"s")
    else:  # whoever gets it answers; all other addresses lead nowhere
        with socket.create_server(("127.0.0.1", config["port"])) as server:
            socket.send_fds(status, [b"s"], [server.fileno()])
    home = os.getcwd()
    folder = os.path.join(home, "work")
    os.mkdir(folder)
    for size in header["archives"]:
        with tarfile.open(fileobj=io.BytesIO(_read(size))) as files:
            _extract(files, folder)
    command = os.fork()
    if command == 0:
        _become(header["command"], {**header["environment"], "HOME": home, "TMPDIR": home}, folder)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    if config["is_alone"]:  # what the command left running changes nothing any more
        with contextlib.suppress(ProcessLookupError):  # there is none
            os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError), status.makefile("wb") as out:
        _send(folder, out)
    sys.exit(code if code >= 0 else 128 - code)


def _read(length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = os.read(0, min(length - len(data), 1 << 16))
        if not part:
            raise EOFError("the other side has ended")
        data += part
    return bytes(data)


def _send(folder: str, out: IO[bytes]) -> None:
    """Send the folder as an archive of tar: files, folders, and links that stay inside.

    What the command has made of them cannot keep them from being read. Compiled Python is left out: Python would run
    it in the place of a file that is written over its source.
    """

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if os.path.basename(member.name) == "__pycache__":
            return None
        if hasattr(tarfile, "data_filter"):
            try:
                tarfile.data_filter(member, folder)
            except tarfile.FilterError:
                return None
            return member
        return member if member.isfile() or member.isdir() else None

    os.chmod(folder, 0o700)
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(place, name)
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | (0o700 if name in folders else 0o600))
    with tarfile.open(fileobj=out, mode="w|") as files:
        files.add(folder, ".", filter=kept)


def _extract(files: tarfile.TarFile, folder: str) -> None:
    """Extract nothing outside of the folder; an old Python only extracts plain files."""
    if hasattr(tarfile, "data_filter"):
        files.extractall(folder, filter="data")
        return
    for member in files:
        is_inside = not os.path.isabs(member.name) and ".." not in member.name.split("/")
        if is_inside and (member.isfile() or member.isdir()):
            files.extract(member, folder, set_attrs=member.isfile())


def _become(command: list[str], environment: dict[str, Any], folder: str) -> NoReturn:
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and others would inherit it
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        os.write(2, f"{command[0]}: {error}".encode())
        os._exit(127)


if __name__ == "__main__":
    main()
