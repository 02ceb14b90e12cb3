"""Training and a server run as a unit. Small programs stand in for them; each leaves a process that must be killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefrl.generation.vllm import handshake
from prefrl.scripts.launch.command import run_together
from prefrl.scripts.launch.processes import Program
from prefrl.scripts.launch.vllm_serve import ServerProgram
from tests.patience import is_running

# Starts a process in a session of its own, as torchrun does, which ignores SIGTERM; then does what it is told.
PROGRAM = """
import http.client, http.server, os, signal, subprocess, sys, time
record, port, task = sys.argv[1], int(sys.argv[2]), sys.argv[3]
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()

def end(*_):
    open(record + ".asked", "w").close()
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
with open(record + ".new", "w") as file:
    file.write(str(child.pid))
os.rename(record + ".new", record)  # whole as soon as it is there

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

if task == "serve":
    time.sleep(0.5)
    http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
if task == "ask":
    http.client.HTTPConnection("127.0.0.1", port).request("GET", "/health")
if task == "break":
    print("prefrl vllm-serve: model is ready")
    print("a line without an end", end="")
    print("prefrl vllm-serve: GenerationError: the reason\\n  more of it", flush=True)
    sys.exit(7)
if task == "serve and break":
    server = http.server.HTTPServer(("127.0.0.1", port), Health)
    server.timeout = 0.1
    while not os.path.exists(os.path.join(os.path.dirname(record), "training")):
        server.handle_request()
    sys.exit(3)
if task == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if task == "sleep":
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def heeded_signals() -> Iterator[None]:
    """As in a terminal: tests that run in the background ignore SIGINT, and so would the launch."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is slow to start gets no line unless a test asks for it."""
    monkeypatch.setattr(handshake, "_FIRST_S", 1e9)


class Launched:
    """What came of a launch: everything that it started has ended when this is made.

    Args:
        folder: For records and logs.
        training: What training does; None: it must not be started.
        server: What the server does; None: it must not be started.
        checks: What the check does before both; None: there is none.
    """

    def __init__(self, folder: Path, training: str | None, server: str | None, checks: str | None = None) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.folder = folder
        self.code = run_together(
            self.program("training", port, training),
            ServerProgram(self.program("server", port, server).command, {}, port=port, start_timeout=90.0),
            checks=None if checks is None else self.program("checks", port, checks),
            log=folder / "logs/server.log",
        )

    def program(self, name: str, port: int, task: str | None) -> Program:
        if task is None:
            return Program(["/no/such/program"], {})
        return Program([sys.executable, "-c", PROGRAM, str(self.folder / name), str(port), task], {})

    def assert_nothing_is_left(self, *asked: str) -> None:
        """What the parts started has ended, and these parts themselves were asked to end."""
        for record in (self.folder / "training", self.folder / "server"):
            assert not record.exists() or not is_running(json.loads(record.read_text(encoding="utf-8")))
        assert {path.stem for path in self.folder.glob("*.asked")} == set(asked)


def test_training_starts_when_the_server_answers_and_the_server_ends_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_FIRST_S", 0.0)
    monkeypatch.setattr(handshake, "_NEXT_S", 1e9)
    launched = Launched(tmp_path, "ask", "serve")
    assert launched.code == 0
    launched.assert_nothing_is_left("server")
    first, second = capfd.readouterr().err.splitlines()
    assert first == f"prefrl launch: starting the vLLM server; its log is {tmp_path}/logs/server.log"
    assert re.fullmatch(r"waiting for http://127\.0\.0\.1:\d+ \(0 of 90 s\)", second)


def test_a_server_that_does_not_start_is_told_with_its_reason_and_nothing_is_trained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launched = Launched(tmp_path, None, "break")
    assert launched.code == 7
    launched.assert_nothing_is_left()
    assert capfd.readouterr().err.splitlines()[1:] == [
        f"prefrl launch: the vLLM server ended with exit code 7. The end of its log, {tmp_path}/logs/server.log:",
        "  prefrl vllm-serve: GenerationError: the reason",
        "    more of it",
    ]


def test_the_server_gets_the_share_that_the_check_has_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = f"open({str(tmp_path / 'share')!r}, 'w').write('0.41')"
    server = "import sys; sys.exit(f'prefrl vllm-serve: GenerationError: {sys.argv[1:]}')"
    result = run_together(
        Program(["/no/such/program"], {}),
        ServerProgram([sys.executable, "-c", server], {}, port=1, start_timeout=90.0),
        checks=Program([sys.executable, "-c", code], {}),
        log=tmp_path / "server.log",
        share=tmp_path / "share",
    )
    assert result == 1
    said = capfd.readouterr().err
    assert "the vLLM server gets 0.41 of the memory of the GPU" in said
    assert "GenerationError: ['--gpu_memory_utilization', '0.41']" in said


def test_a_check_that_fails_is_the_end_before_the_server_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launched = Launched(tmp_path, None, None, checks="break")
    assert launched.code == 7
    launched.assert_nothing_is_left()
    assert "prefrl launch:" not in capfd.readouterr().err  # it reported its failure itself
    assert Launched(tmp_path, "ask", "serve", checks="end").code == 0


def test_training_ends_when_the_server_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launched = Launched(tmp_path, "sleep", "serve and break")
    assert launched.code == 3
    launched.assert_nothing_is_left("training")
    assert "prefrl launch: the vLLM server ended with exit code 3." in capfd.readouterr().err


def test_training_that_a_signal_ended_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launched = Launched(tmp_path, "die", "serve")
    assert launched.code == 128 + signal.SIGKILL
    launched.assert_nothing_is_left("server")
    assert capfd.readouterr().err.endswith("prefrl launch: training ended by SIGKILL\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_of_it(number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(number)

    def send_when_it_runs() -> None:
        while not (tmp_path / "training").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=send_when_it_runs, daemon=True).start()
    launched = Launched(tmp_path, "sleep", "serve")
    assert launched.code == 128 + number
    launched.assert_nothing_is_left("training", "server")
    assert capfd.readouterr().err.endswith(f"prefrl launch: ended by {number.name}\n")
    assert signal.getsignal(number) is handler
