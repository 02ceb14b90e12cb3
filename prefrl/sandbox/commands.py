"""Commands on an event loop: started, read, and ended with everything that they have started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OUTPUT_BYTES = 2**20
# Of standard error, the end is kept: it says why a program failed.
_COMPLAINT_BYTES = 2**12
# Seconds in which a launcher has to end what it started. Then its process group is killed.
_GRACE_S = 5.0
_CHUNK = 2**16
_JAIL = Path(__file__).with_name("jail.py")


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended."""

    code: int  # exit code, or 128 and the number of a signal
    output: bytes  # standard output
    complaint: str  # the last line of standard error


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
        config = json.dumps({"how": "free", "uid": None, "parent": os.getpid(), "command": launched})
        launched = [sys.executable, "-I", "-S", str(_JAIL), config]
    process = await asyncio.create_subprocess_exec(
        *launched, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=dict(environment), start_new_session=True
    )
    try:
        return await _finished(process)
    finally:
        await _end(process)


async def _finished(process: Process) -> Finished:
    output, complaint = bytearray(), bytearray()

    async def read() -> None:
        assert process.stdout is not None
        while part := await process.stdout.read(_CHUNK):
            if len(output) <= OUTPUT_BYTES:
                output.extend(part)
                if len(output) > OUTPUT_BYTES:
                    _signal(process, signal.SIGTERM)

    async def read_complaint() -> None:
        assert process.stderr is not None
        while part := await process.stderr.read(_CHUNK):
            complaint.extend(part)
            del complaint[:-_COMPLAINT_BYTES]

    await asyncio.gather(read(), read_complaint())
    code = await process.wait()
    if len(output) > OUTPUT_BYTES:
        raise OutputLimitError(f"wrote more than {OUTPUT_BYTES} bytes to standard output")
    lines = complaint.decode(errors="replace").strip().splitlines()
    return Finished(code if code >= 0 else 128 - code, bytes(output), lines[-1].strip() if lines else "")


async def _end(process: Process) -> None:
    """End a command that still runs. The signal goes out at once: nobody may be left to wait for its end."""
    if process.returncode is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal(process: Process, number: signal.Signals) -> None:
    """To a launcher, which ends its descendants; where there is none, to the process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sys.platform == "linux":
            os.kill(process.pid, number)
        else:
            os.killpg(process.pid, signal.SIGKILL)
