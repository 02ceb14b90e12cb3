"""Where servers that come and go are found: a folder in which they register, the addresses of a DNS name, or a list.

Servers and trainers both import this: it must stay light.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from prefrl.errors import ConfigError, printable
from prefrl.options.server_rules import DNS, FOLDER, are_local, wrong_urls

RENEWED_SECONDS = 5.0  # between two signs of life
ALIVE_SECONDS = 30.0  # after the last sign of life; also how far clocks of machines may differ
_MAX_BYTES = 4096  # of a file
_PURPOSE = b"prefrl: a server of this fleet\n"  # the key signs nothing else that begins in this way


@dataclass(frozen=True, slots=True)
class Found:
    """The servers that there are now."""

    urls: Sequence[str]  # sorted
    left_out: Sequence[str] = ()  # of others that were named: why they are not asked


class Source(Protocol):
    """Knows which servers there are. `str` of it is what the user wrote."""

    @property
    def options(self) -> str:
        """Options of `prefrl vllm-serve` with which a server is found."""
        ...

    def find(self) -> Found:
        """The servers that there are now."""
        ...


@dataclass(frozen=True)
class Listed:
    """A `Source` that never changes.

    Args:
        urls: Base URLs of the servers.
    """

    urls: Sequence[str]

    @property
    def options(self) -> str:
        """See `Source`."""
        return "--host HOST --port PORT"

    def __str__(self) -> str:
        return ", ".join(self.urls)

    def find(self) -> Found:
        """See `Source`."""
        return Found(sorted(self.urls))


@dataclass(frozen=True)
class Name:
    """A `Source`: each address of a DNS name is a server.

    Args:
        name: The name, which is looked up each time.
        port: The port of all servers.
    """

    name: str
    port: int

    @property
    def options(self) -> str:
        """See `Source`."""
        return f"--host 0.0.0.0 --port {self.port}"

    def __str__(self) -> str:
        return f"{DNS}{self.name}:{self.port}"

    def find(self) -> Found:
        """See `Source`."""
        try:
            found = socket.getaddrinfo(self.name, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            return Found([], [f"{self.name!r} has no address: {error}"])
        return Found(sorted({url_of(str(address[0]), self.port) for *_, address in found}))


def url_of(host: str, port: int) -> str:
    """The base URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True)
class _Sign:
    """A sign of life, as it is written into the folder."""

    url: str
    host: str  # name of the machine
    pid: int
    time: float  # seconds since the epoch


@dataclass(frozen=True)
class Folder:
    """A `Source`: each server has a file in a folder, renewed every few seconds and signed with the servers' key.

    Args:
        path: The folder.
        key: The servers' key.
        clock: Seconds since the epoch.
    """

    path: Path
    key: str
    clock: Callable[[], float] = time.time

    @property
    def options(self) -> str:
        """See `Source`."""
        return f"--join {shlex.quote(str(self.path))}"

    def __str__(self) -> str:
        return f"{FOLDER}{self.path}"

    def find(self) -> Found:
        """See `Source`."""
        try:
            names = sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return Found([], [f"there is no folder {self.path}"])
        except OSError as error:  # a mounted folder whose machine is gone
            return Found([], [f"the folder {self.path} cannot be read: {error.strerror}"])
        urls, left_out = set[str](), []
        for name in names:
            if not name.endswith(".json"):
                continue
            try:
                urls.add(self._checked(_read(self.path / name, self.key)))
            except FileNotFoundError:  # it has just left
                continue
            except (OSError, ValueError) as error:
                left_out.append(printable(f"{name}: {error}"))
        return Found(sorted(urls), left_out)

    def _checked(self, sign: _Sign) -> str:
        """The URL of a server that is alive, as far as its file tells."""
        age = self.clock() - sign.time
        if abs(age) > ALIVE_SECONDS:  # how old it is would be another message each time
            limit = f"more than {ALIVE_SECONDS:g} s"
            when = f"{limit} ago" if age > 0 else f"{limit} from now, so the clocks of the machines differ"
            raise ValueError(f"the last sign of life of {sign.url} is from {when}")
        if are_local([sign.url]) and sign.host != socket.gethostname():
            raise ValueError(
                f"{sign.url} can only be reached on its own machine, {sign.host}. Start it with --host 0.0.0.0."
            )
        if wrong_urls([sign.url]):
            raise ValueError(f"{sign.url!r} is not the URL of a server")
        return sign.url


class Registration:
    """The file of a server in the folder of a fleet.

    Args:
        folder: The folder; created if it does not exist.
        url: Base URL of the server, as trainers reach it.
        key: The servers' key.
        clock: Seconds since the epoch.

    Raises:
        ConfigError: It is not possible to write there.
    """

    def __init__(self, folder: Path, url: str, *, key: str, clock: Callable[[], float] = time.time) -> None:
        # Machines may have one name, such as that of an image, and loopback is one address of many machines.
        self._path = folder / f"{socket.gethostname()}_{urlsplit(url).netloc}.json"
        self._url, self._key, self._clock = url, key, clock
        self._renewed = -float("inf")
        draft = self._draft
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draft.touch()
            draft.unlink()
        except OSError as error:
            raise ConfigError(
                f"join={str(folder)!r}: {error.strerror}. Name a folder in which this server can write and which "
                "trainers can read."
            ) from error

    @property
    def _draft(self) -> Path:
        return self._path.with_name(f".{self._path.name}.{os.getpid()}")

    def renew(self) -> None:
        """Write a sign of life, unless the last one is recent.

        Raises:
            OSError: It is not possible to write there now.
        """
        now = self._clock()
        if 0 <= now - self._renewed < RENEWED_SECONDS:  # below 0, the clock was set back
            return
        sign = _Sign(self._url, socket.gethostname(), os.getpid(), now)
        payload = json.dumps(asdict(sign)).encode()
        self._draft.write_bytes(payload + b"\n" + _seal(payload, self._key))
        self._draft.replace(self._path)  # a reader sees the old file or the new one
        self._renewed = now

    def leave(self) -> None:
        """Remove the file. If that is not possible, it soon is too old to count."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def _seal(payload: bytes, key: str) -> bytes:
    return hmac.new(key.encode(), _PURPOSE + payload, hashlib.sha256).hexdigest().encode()


def _read(path: Path, key: str) -> _Sign:
    """What a file says.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a file that a server with this key has written.
    """
    # A pipe would block, and a link could lead to any file.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is not a regular file")
        payload, _, seal = file.read(_MAX_BYTES).partition(b"\n")
    if not hmac.compare_digest(seal, _seal(payload, key)):
        raise ValueError("was not written by a server with the key of this run (VLLM_API_KEY)")
    try:
        return _Sign(**json.loads(payload))
    except TypeError as error:
        raise ValueError("is of another version of prefrl. Start the server with the trainer's version.") from error


def source_of(urls: Sequence[str], *, key: str) -> Source:
    """The source that `vllm_server_base_url`, or `admin_urls`, names.

    Args:
        urls: Base URLs, without slashes at the end; or a single `dir:FOLDER` or `dns:NAME:PORT`.
        key: The servers' key.
    """
    (first, *_) = urls
    if first.startswith(FOLDER):
        return Folder(Path(os.path.expanduser(first.removeprefix(FOLDER))), key)
    if first.startswith(DNS):
        name, _, port = first.removeprefix(DNS).rpartition(":")
        return Name(name, int(port))
    return Listed(urls)


def in_words(left_out: Iterable[str]) -> str:
    """Why servers are not asked, as a list below a message."""
    return "".join(f"\n  {reason}" for reason in left_out)
