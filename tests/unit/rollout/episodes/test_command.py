"""Programs as agents: what they are given, what becomes of them, and what a sandbox keeps them from."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.rollout.episodes.command import CommandAgent, Template
from prefrl.rollout.gateway.formats import Client
from prefrl.sandbox.commands import OUTPUT_BYTES, OutputLimitError, archive_of
from prefrl.sandbox.local import ENVIRONMENT
from tests.patience import PATIENCE

PYTHON = "/usr/bin/python3"
NOBODY = Client("http://127.0.0.1:9", "sk-of-the-episode")


def ran(agent: CommandAgent, row: Mapping[str, Any], client: Client = NOBODY, seconds: float = PATIENCE) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(seconds):
            return await agent(row, client)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "row", "words"),
    [
        ("env -p {q}", {"q": 'a "b" $HOME; `ls` {q}'}, ["-p", 'a "b" $HOME; `ls` {q}']),
        ("env --task={q} 'two words' {{}}", {"q": "x y"}, ["--task=x y", "two words", "{}"]),
        ("env {n} {d}", {"n": 3, "d": {"a": [1]}}, ["3", '{"a": [1]}']),
        ("env {prompt}", {"prompt": [{"role": "user", "content": "Hi."}]}, ["Hi."]),
        ("env '{a column}'", {"a column": ""}, [""]),
        ("""sh -c 'echo "$1"' sh {q}""", {"q": "$(ls)"}, ["-c", 'echo "$1"', "sh", "$(ls)"]),
    ],
)
def test_what_a_column_contains_is_one_argument(text: str, row: dict[str, Any], words: list[str]) -> None:
    assert Template(text, "agent").filled(row)[1:] == words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not-a-program-of-anyone {q}", r"the program 'not-a-program-of-anyone' is not found"),
        ("sh -c 'claude -p {q}'", r"the shell would run what the column 'q' contains"),
        ("bash -lc 'claude -p {q}'", r"the shell would run what the column 'q' contains"),
        ("env 'a", r"No closing quotation"),
        ("", r"must be a program and its arguments"),
        ("{q} a", r"the program must not be a column"),
        ("""env '{"a": 1}'""", r"a column is written as \{column\}"),
        ("env {", r"Write \{\{ and \}\} for braces"),
    ],
)
def test_a_command_that_cannot_work_is_refused_when_it_is_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CommandAgent(text)


@pytest.mark.parametrize(("row", "message"), [({}, "nothing in the column 'q'"), ({"q": "a\0b"}, "null character")])
def test_a_row_that_gives_no_argument_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Template("env {q}", "agent").filled(row)


def test_a_command_gets_the_address_and_no_secret_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "PREFRL_VLLM_KEY"):
        monkeypatch.setenv(name, "secret")
    lines = dict(line.split("=", 1) for line in ran(CommandAgent("env"), {}).splitlines())
    assert lines["OPENAI_BASE_URL"] == "http://127.0.0.1:9/v1"
    assert lines["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert lines["OPENAI_API_KEY"] == lines["ANTHROPIC_API_KEY"] == "sk-of-the-episode"
    assert "sk-of" not in lines["PREFRL_SESSION"]
    named = {"PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", *NOBODY.environment}
    assert "secret" not in lines.values()
    assert set(lines) <= named


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("echo said; echo why it failed >&2; exit 3", ChildProcessError, "exit code 3: why it failed"),
        ("kill -9 $$", ChildProcessError, "exit code 137: nothing on standard error"),
        ("cat /dev/zero", OutputLimitError, f"more than {OUTPUT_BYTES} bytes"),
    ],
)
def test_a_command_that_fails_says_how(code: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ran(CommandAgent(f"sh -c '{code}'"), {})


@pytest.mark.parametrize("ending", ["wait", "exit 0"])
def test_nothing_that_a_command_started_outlives_it(tmp_path: Path, ending: str) -> None:
    """Also a process that left its group and has another parent; at a time-out, and at the end."""
    pids = tmp_path / "pids"
    code = f"setsid sleep 600 & echo $! >> {pids}; sh -c 'sleep 600 & echo $! >> {pids}' & echo $$ >> {pids}; "
    code += f"while [ $(wc -l < {pids}) -lt 3 ]; do sleep 0.01; done; {ending}"
    agent = CommandAgent("sh -c 'eval \"$1\"' sh {code}")

    async def run() -> None:
        work = asyncio.create_task(agent({"code": code}, NOBODY))
        while not (pids.exists() and len(pids.read_text().splitlines()) == 3):
            await asyncio.sleep(0.01)
        if ending == "wait":
            work.cancel()
        await asyncio.wait({work})

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    states = [Path(f"/proc/{pid}/stat") for pid in pids.read_text().split()]
    assert [path for path in states if path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"] == []


def test_files_are_a_mapping_or_an_archive(tmp_path: Path) -> None:
    tar, packed = archive_of({"a.txt": "A", "b/c": b"C", "none": None}), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.txt", "A")
        archive.writestr("b/c", "C")
    (tmp_path / "files.zip").write_bytes(packed.getvalue())
    for files in (tar, packed.getvalue(), str(tmp_path / "files.zip")):
        with tarfile.open(fileobj=io.BytesIO(archive_of(files))) as found:
            assert {one.name: found.extractfile(one).read() for one in found} == {"a.txt": b"A", "b/c": b"C"}  # type: ignore[union-attr]
    for wrong in ({"../a": "A"}, {"/a": "A"}, {"a": 1}, b"no archive", None):
        with pytest.raises(ValueError, match="file"):
            archive_of(wrong)


class _Gateway(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"an answer")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Client]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Client(f"http://127.0.0.1:{server.server_address[1]}", "key")
        server.shutdown()


_AGENT = """
import os, socket, sys, urllib.request
seen = {"files": sorted(os.listdir(".")), "home": os.path.exists(sys.argv[1])}
seen["answer"] = urllib.request.urlopen(os.environ["OPENAI_BASE_URL"], timeout=30).read().decode()
try:
    seen["other"] = socket.create_connection(("127.0.0.1", int(sys.argv[2])), 5) is not None
except OSError:
    seen["other"] = False
open("made.txt", "w").write("right")
open("tests.sh", "w").write("exit 0")
print(__import__("json").dumps(seen))
"""


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
def test_an_agent_in_a_sandbox_has_its_folder_and_the_gateway(gateway: Client, isolation: Any) -> None:
    agent = CommandAgent(f"{PYTHON} agent.py {{path}} {{port}}", files="files", isolation=isolation)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Gateway) as other:
        row = {"path": "/etc/passwd", "port": other.server_address[1], "files": {"agent.py": _AGENT, "a.txt": "A"}}
        seen = json.loads(ran(agent, row, gateway))
    is_open = isolation == "process"
    assert seen == {"files": ["a.txt", "agent.py"], "home": is_open, "answer": "an answer", "other": is_open}


@pytest.mark.parametrize(
    ("tests", "wall_s", "rewards"),
    [
        ({"made": "sh tests.sh right", "wrong": "sh tests.sh wrong"}, PATIENCE, {"made": 1.0, "wrong": 0.0}),
        ("sleep 600", 1.0, 0.0),
    ],
)
def test_tests_judge_what_the_agent_made_with_files_that_it_cannot_change(
    gateway: Client, tests: Any, wall_s: float, rewards: Any
) -> None:
    agent = CommandAgent(
        f"{PYTHON} agent.py / 9", files="files", tests=tests, test_files="hidden", limits={"wall_s": wall_s}
    )
    row = {"files": {"agent.py": _AGENT}, "hidden": {"tests.sh": 'test "$(cat made.txt)" = "$1"'}}
    assert ran(agent, row, gateway, 3 * PATIENCE) == rewards


# What an agent may leave so that tests pass that should not. It may know the names of their files.
_CHEATS = """
import os, pathlib, py_compile, subprocess, sys
passing = "import os, sys; sys.stderr.flush(); os._exit(0)"
for name in ("conftest", "sitecustomize", "usercustomize", "pytest", "subprocess", "hidden", "hidden_case"):
    pathlib.Path(name + ".py").write_text(passing)
for name in ("hidden", "hidden_case"):
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(name + ".py", invalidation_mode=unchecked)
    if "folders" in sys.argv:
        os.mkdir(name)
        pathlib.Path(name, "__init__.py").write_text(passing)
pathlib.Path("pytest.ini").write_text("[pytest]\\naddopts = --version")
site = pathlib.Path(os.environ["HOME"], ".local/lib/python%d.%d/site-packages" % sys.version_info[:2])
site.mkdir(parents=True)
(site / "cheat.pth").write_text(passing)
forever = "import os, time\\nwhile True: open('hidden.py', 'w').write('raise SystemExit(0)'); time.sleep(0.01)"
subprocess.Popen([sys.executable, "-c", forever], start_new_session=True)
pathlib.Path("f.py").write_text(sys.argv[1])
"""
_HIDDEN = {
    "hidden.py": "import subprocess, sys; sys.exit(__import__('f').answer != 42)",
    "hidden_case.py": """
import unittest, f
class Case(unittest.TestCase):
    def test(self): self.assertEqual(f.answer, 42)
""",
}
_TESTS = {
    "script": f"{PYTHON} hidden.py",
    "unittest": f"{PYTHON} -m unittest hidden_case",
    "pytest": f"{sys.executable} -m pytest -q hidden_case.py",
}


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
@pytest.mark.parametrize(("answer", "reward"), [(41, 0.0), (42, 1.0)])
def test_tests_see_nothing_of_an_agent_but_its_solution(
    gateway: Client, isolation: Any, answer: int, reward: float
) -> None:
    tests = dict(_TESTS)
    if isolation == "process":  # its user may not be allowed to run this interpreter
        del tests["pytest"]
    agent = CommandAgent(
        f"{PYTHON} agent.py {{f}} folders",
        files="files",
        tests=tests,
        test_files="hidden",
        solution=["f.*"],
        isolation=isolation,
        limits={"wall_s": 2 * PATIENCE},
    )
    row = {"f": f"answer = {answer}", "files": {"agent.py": _CHEATS, "f.py": ""}, "hidden": _HIDDEN}
    assert ran(agent, row, gateway, 8 * PATIENCE) == dict.fromkeys(tests, reward)


def test_files_of_tests_replace_those_of_the_agent_and_what_was_compiled_of_them(gateway: Client) -> None:
    tests = {name: _TESTS[name] for name in ("script", "unittest")}
    limits = {"wall_s": PATIENCE}
    agent = CommandAgent(f"{PYTHON} agent.py {{f}}", files="files", tests=tests, test_files="hidden", limits=limits)
    row = {"f": "answer = 41", "files": {"agent.py": _CHEATS}, "hidden": {"subprocess.py": "", **_HIDDEN}}
    assert ran(agent, row, gateway, 3 * PATIENCE) == dict.fromkeys(tests, 0.0)


_ODD_FILES = """
import os, pathlib
for name, mode in (("secret", 0), ("closed/file", 0), ("right", 0o400)):
    pathlib.Path(name).parent.mkdir(exist_ok=True)
    pathlib.Path(name).write_text("x")
    os.chmod(name, mode)
os.chmod("closed", 0)
os.mkfifo("pipe")
os.symlink("/etc/passwd", "outside")
os.symlink("right", "inside")
os.chmod(".", 0o500)
"""


def test_no_file_that_an_agent_leaves_keeps_it_from_being_judged(gateway: Client) -> None:
    test = "sh -c 'cat secret closed/file right inside && ! test -e outside && ! test -e pipe'"
    agent = CommandAgent(f"{PYTHON} agent.py", files="files", tests=test)
    assert ran(agent, {"files": {"agent.py": _ODD_FILES}}, gateway) == 1.0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os\nwhile True: os.write(1, bytes(2**16))", f"more than {OUTPUT_BYTES} bytes to standard output"),
        ("for i in range(64): open(str(i), 'wb').truncate(2**24)", r"more than \d+ bytes to its folder"),
        ("import sys\nfor i in range(64): open(str(i), 'wb').write(bytes(2**20))", "No space left on device"),
        ("import os\nfor i in range(10**5): os.close(os.open(str(i), 64))", "No space left on device"),
    ],
)
def test_what_an_agent_writes_is_bounded(gateway: Client, code: str, message: str) -> None:
    agent = CommandAgent(
        f"{PYTHON} agent.py", files="files", isolation="namespaces", limits={"scratch_mb": 16, "wall_s": 60}
    )
    with pytest.raises((OutputLimitError, ChildProcessError), match=message):
        ran(agent, {"files": {"agent.py": code}}, gateway)


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
def test_an_agent_in_a_sandbox_gets_no_variable_of_the_trainer(
    gateway: Client, isolation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    lines = dict(
        line.split("=", 1) for line in ran(CommandAgent("env", isolation=isolation), {}, gateway).splitlines()
    )
    assert "secret" not in lines.values()
    assert set(lines) <= {*ENVIRONMENT, "TMPDIR", *gateway.environment}


def test_a_program_outside_of_the_sandbox_is_found_before_training(tmp_path: Path) -> None:
    program = tmp_path / "my-agent"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match=r"my-agent' is in none of the folders that the sandbox shows"):
        CommandAgent(str(program), isolation="namespaces").setup()
    CommandAgent(str(program), isolation="namespaces", folders=[str(tmp_path)]).setup()
