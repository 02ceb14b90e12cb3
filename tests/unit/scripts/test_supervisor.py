"""A server with two processes, the second of which outlives the first unless it is ended."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefrl.errors import GenerationError
from prefrl.generation.vllm.members import Folder, Registration
from prefrl.scripts.launch import processes
from prefrl.scripts.launch.processes import Supervisor
from tests.patience import is_running, wait_until

KEY = "a-key-for-tests-of-more-than-32-characters"
# A stall may cost an answer, and the server counts it as given.
MANY_200 = (200, 200, 200)
# Takes the port, what /health answers one after the other (the last for ever; 0: nothing), and a file for what it
# started; beside it is a file for each question. Its child ignores signals, as an engine in a collective does, and its
# shared memory is left behind.
SERVER = """
import json, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import resource_tracker, shared_memory

port, answers, record = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
asked = 0
memory = shared_memory.SharedMemory(create=True, size=8)
resource_tracker.unregister(memory._name, "shared_memory")
ignore = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignore], stdout=subprocess.PIPE)
child.stdout.readline()
with open(record + ".new", "w") as file:
    json.dump({"server": os.getpid(), "child": child.pid, "memory": memory.name}, file)
os.rename(record + ".new", record)  # whole as soon as it is there

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        open(f"{record}.{asked}", "w").close()
        status = answers.pop(0) if len(answers) > 1 else answers[0]
        if status == 0:
            time.sleep(600)
        if status < 0:
            print("Traceback (most recent call last):", flush=True)
            print("(Engine pid=1) ERROR [core.py:7] some.where.OddError: the reason", flush=True)
            print("  and what explains it", flush=True)
            sys.exit(-status)
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_):
        pass

try:
    HTTPServer(("127.0.0.1", port), Health).serve_forever()
except KeyboardInterrupt:
    print("ended as asked", flush=True)
"""


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.1)


@pytest.fixture(autouse=True)
def heeded_signals() -> Iterator[None]:
    """As in a terminal: tests that run in the background, or under nohup, ignore some, and so would the server."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(
    folder: Path,
    *answers: int,
    start_timeout: float = 600.0,
    health_timeout: float = 600.0,
    registration: Registration | None = None,
) -> signal.Signals:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-c", SERVER, str(port), json.dumps(answers), str(folder / "record")]
    it = Supervisor(
        command,
        os.environ,
        address=("127.0.0.1", port),
        start_timeout=start_timeout,
        health_timeout=health_timeout,
        registration=registration,
    )
    return it.run(when_ready="it is ready")


def assert_nothing_is_left(folder: Path) -> None:
    record: dict[str, Any] = json.loads((folder / "record").read_text(encoding="utf-8"))
    assert not Path("/dev/shm", record["memory"]).exists()
    assert not is_running(record["child"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_server_politely_and_its_child_by_force(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(number)

    def send_when_it_runs() -> None:
        while not (tmp_path / "record.9").exists():  # it is known by now that it answers
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=send_when_it_runs, daemon=True).start()
    assert run(tmp_path, 200) is number
    captured = capsys.readouterr()
    assert captured.out == "it is ready\n"
    assert "ended as asked" in captured.err
    assert signal.getsignal(number) is handler
    assert_nothing_is_left(tmp_path)


def test_a_server_is_in_the_folder_of_its_fleet_while_it_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Folder(tmp_path / "fleet", KEY)
    registration = Registration(fleet.path, "http://127.0.0.1:8000", key=KEY)
    found: list[Sequence[str]] = []

    def look_when_it_runs() -> None:
        found.append(fleet.find().urls)
        while not (tmp_path / "record.9").exists():
            time.sleep(0.05)
        found.append(fleet.find().urls)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look_when_it_runs, daemon=True).start()
    run(tmp_path, 200, registration=registration)
    found.append(fleet.find().urls)
    assert found == [[], ["http://127.0.0.1:8000"], []]
    assert "will not find" not in capsys.readouterr().err


def test_a_server_that_cannot_register_goes_on_and_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registration = Registration(tmp_path / "fleet", "http://127.0.0.1:8000", key=KEY)
    (tmp_path / "fleet").rmdir()

    def end_when_it_runs() -> None:
        while not (tmp_path / "record.9").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_when_it_runs, daemon=True).start()
    assert run(tmp_path, 200, registration=registration) is signal.SIGTERM
    assert capsys.readouterr().err.count("trainers will not find this server") == 1


def test_a_server_that_ends_by_itself_is_told_with_the_error_in_its_log(tmp_path: Path) -> None:
    with pytest.raises(GenerationError) as caught:
        run(tmp_path, 200, -3)
    assert str(caught.value).splitlines() == [
        "vLLM ended by itself, with exit code 3.",
        "  Errors in its log, the first one first:",
        "  some.where.OddError: the reason and what explains it",
        "  The end of its log:",
        "  Traceback (most recent call last):",
        "  (Engine pid=1) ERROR [core.py:7] some.where.OddError: the reason",
        "    and what explains it",
    ]
    assert_nothing_is_left(tmp_path)


def test_a_server_whose_engine_died_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "_LAST_WORDS_SECONDS", 0.5)
    with pytest.raises(GenerationError, match=re.escape("vLLM's engine died.")):
        run(tmp_path, *MANY_200, 503)
    assert capsys.readouterr().out == "it is ready\n"
    assert_nothing_is_left(tmp_path)


def test_a_server_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="vLLM hung: no answer for health_timeout=1 s"):
        run(tmp_path, *MANY_200, 0, health_timeout=1.0)
    assert_nothing_is_left(tmp_path)


def test_a_short_silence_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def clock() -> float:
        """Two seconds for each question, at any speed of the machine, and a moment for each look."""
        return 2.0 * len(list(tmp_path.glob("record.*"))) + 1e-3 * next(calls)

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    monkeypatch.setattr(processes, "_POLL_SECONDS", 1.5e-3)
    with pytest.raises(GenerationError, match="exit code 4"):
        run(tmp_path, *4 * (*MANY_200, 500), -4, health_timeout=12.0)


def test_a_server_that_is_not_ready_in_time_is_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def health(address: tuple[str, int]) -> int | None:
        """It has started something by then."""
        assert wait_until((tmp_path / "record").exists)
        return health_now(address)

    health_now = processes.health
    monkeypatch.setattr(processes, "health", health)
    with pytest.raises(GenerationError, match="not ready after start_timeout=1 s"):
        run(tmp_path, 404, start_timeout=1.0)
    assert capsys.readouterr().out == ""
    assert_nothing_is_left(tmp_path)


# Takes the seconds that a server has to end, and the server.
SUPERVISED = """
import os, sys
from prefrl.scripts.launch import processes

processes._STOP_SECONDS = float(sys.argv[1])
command, limits = [sys.executable, "-c", *sys.argv[2:]], {"start_timeout": 600, "health_timeout": 600}
processes.Supervisor(command, os.environ, address=("127.0.0.1", 1), **limits).run(when_ready="")
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@contextlib.contextmanager
def killed_supervisor(folder: Path, server: str, *, seconds: float) -> Iterator[dict[str, Any]]:
    """What a server recorded whose supervisor was killed. Its processes are ended."""
    record = folder / "record"
    words = [str(seconds), server, "0", "[200]", str(record)]
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISED, *words])
    try:
        assert wait_until(record.exists)
    finally:
        supervisor.kill()
        supervisor.wait()
    known = json.loads(record.read_text(encoding="utf-8"))
    try:
        yield known
    finally:
        for name in ("server", "child"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(known[name], signal.SIGKILL)
        Path("/dev/shm", known["memory"]).unlink(missing_ok=True)


def test_shared_memory_that_came_last_is_removed_too(tmp_path: Path) -> None:
    """An engine that starts gets some while its server is being ended: nobody has seen it before."""
    command = [sys.executable, "-c", SERVER, "0", "[200]", str(tmp_path / "record")]
    with subprocess.Popen(command, start_new_session=True) as server:
        assert wait_until((tmp_path / "record").exists)
        processes._kill_session(server.pid, ())
    assert_nothing_is_left(tmp_path)


def test_a_server_hears_that_its_supervisor_was_killed(tmp_path: Path) -> None:
    with killed_supervisor(tmp_path, SERVER, seconds=600) as known:
        assert wait_until(lambda: not is_running(known["server"]))
        assert is_running(known["child"]), "there was time for it"


def test_a_server_that_does_not_hear_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    """A vLLM server whose engine starts ignores the signal."""
    with killed_supervisor(tmp_path, DEAF + SERVER, seconds=0.5) as known:
        assert wait_until(lambda: not is_running(known["server"]))
        assert wait_until(lambda: not Path("/dev/shm", known["memory"]).exists())
        assert_nothing_is_left(tmp_path)
