"""A soak with stubs for its servers and its trainer, which a signal ends while a server starts. See test_soak.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
# Makes a step, and has a child in a session of its own.
TRAINER = (
    "import subprocess, sys; from pathlib import Path; "
    f"subprocess.Popen([sys.executable, '-c', {STUBBORN + 'time.sleep(1000)'!r}], start_new_session=True); "
    f"{STUBBORN}Path(sys.argv[1], 'steps').write_text('1 1 0 0 0\\n'); time.sleep(1000)"
)


class Answers(BaseHTTPRequestHandler):
    """Those of a server that is ready."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")


def serve(port: int) -> None:
    """Answer, unless this is the second start in this folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if Path("is-started").exists():
        Path("is-starting").touch()
        time.sleep(1000)
    Path("is-started").touch()
    HTTPServer(("127.0.0.1", port), Answers).serve_forever()


def soak(folder: Path) -> int:
    """Begin the soak, with a fault at once."""
    from benchmarks import soak
    from tests.forks import Forks
    from tests.vllm import server

    class Stubs(Forks):
        def start(self, module: str, arguments: Any, **options: Any) -> Any:
            port = arguments[arguments.index("--port") + 1]
            return super().start("tests.unit.benchmarks.soak_worker", ["serve", port], **options)

    server.forks = cache(lambda: Stubs(sys.executable, (), server.environment(key=None)))
    server.PYTHON = Path(sys.executable)
    soak.COMMAND = (sys.executable, "-c", TRAINER)
    soak.FAULTS = {"server killed": soak.Soak.restart_server}
    return soak.main([str(folder), "--every", "1"])


def ended_by(number: int, folder: Path) -> int:
    """The exit code of a soak that a signal ends while a server starts."""
    pid = os.fork()
    if pid == 0:
        os._exit(soak(folder))
    while not (folder / "is-starting").exists():
        time.sleep(0.02)
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        os.environ["MARK_OF_TEST"] = sys.argv[3]
        numbers = (signal.SIGTERM, signal.SIGINT)
        print(json.dumps([ended_by(number, Path(sys.argv[2], number.name)) for number in numbers]))
