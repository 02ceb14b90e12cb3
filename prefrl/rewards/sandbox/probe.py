"""Sees for itself whether a sandbox holds, by a program that tries to get out."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from typing import Protocol

from prefrl.rewards.sandbox.base import SandboxLimits
from prefrl.rewards.sandbox.processes import Output

__all__ = ["problem_of"]

# More processes than the limit, with what a sandbox needs itself.
_MARGIN = 16

_PROGRAM = """
import json, os, signal, socket, sys
path, port, most = json.loads(sys.stdin.read())

def reads():
    try:
        return bool(open(path).read())
    except OSError:
        return False

def connects():
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    except OSError:
        return False

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
print(json.dumps({"reads": reads(), "connects": connects(), "forks": len(children), "environment": len(os.environ)}))
"""


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
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile("w") as file:
        file.write("readable")
        file.flush()
        os.chmod(file.name, 0o644)
        task = json.dumps([file.name, server.getsockname()[1], most])
        output = launcher.run_program("python", _PROGRAM, task)
    try:
        seen = json.loads(output.data)
    except ValueError:
        return (
            f"a small program ended with code {output.code} and wrote {output.data[:200]!r}; are the limits too low?"
        )
    if seen["forks"] >= most:
        return f"a program can start {most} processes, though the limit is {launcher.limits.processes}"
    if is_isolating and seen["reads"]:
        return "a program can read a file of this machine"
    if is_isolating and seen["connects"]:
        return "a program can connect to a server on this machine"
    return None
