"""Code that a model wrote harms nobody, and passes no test by harming the tests."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError, RewardError
from prefrl.sandbox import AssertionTest, InputOutputTest, LocalSandbox, SandboxLimits, Verdict, local
from prefrl.sandbox.local import working_launcher
from prefrl.sandbox.walls import Output

LIMITS = SandboxLimits(wall_s=20.0, cpu_s=1.0, memory_mb=256, processes=4, scratch_mb=2, output_bytes=2**16)
QUICK = replace(LIMITS, wall_s=0.5)
ISOLATING = ("bwrap", "namespaces")
# Long enough for a machine that does other things too.
GRACE_S = 15.0


@functools.cache
def working() -> list[LocalSandbox]:
    """What works on this machine."""
    found = []
    for isolation in (*ISOLATING, "process"):
        with suppress(ConfigError):
            sandbox = LocalSandbox(isolation, LIMITS)
            sandbox.setup()
            found.append(sandbox)
    assert found
    return found


def isolating() -> list[LocalSandbox]:
    return [sandbox for sandbox in working() if sandbox.isolation in ISOLATING]


def printed(sandbox: LocalSandbox, code: str, text: str = "") -> str:
    """What a program prints, by its launcher, without a test."""
    return working_launcher(sandbox).run_program("python", code, text).data.decode()


def program(sandbox: LocalSandbox, code: str, output: str = "done") -> Verdict:
    return sandbox.check("python", code, InputOutputTest("", output))


@pytest.mark.parametrize(("platform", "name"), [("darwin", "macOS"), ("win32", "Windows"), ("freebsd14", "freebsd14")])
def test_other_systems_are_refused_with_what_to_do(platform: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(ConfigError, match=rf"^a sandbox on this machine needs Linux, not {name}\. Use RemoteSandbox"):
        LocalSandbox(limits=SandboxLimits(wall_s=8.5)).setup()


def asserted(code: str, test: str) -> bool:
    """Whether a test by assertions passes. How they work is the same in all sandboxes."""
    return working()[0].check("python", code, AssertionTest(test)).passed


@pytest.fixture
def marker() -> Iterator[str]:
    """A duration that no other process sleeps, to find those that do."""
    seconds = f"{61 + os.getpid() / 1e7 + time.monotonic_ns() % 1000 / 1e10:.10f}"
    yield seconds
    ends = time.monotonic() + GRACE_S
    while sleepers(seconds) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not sleepers(seconds)


def sleepers(seconds: str) -> list[str]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            arguments = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if arguments[:2] == [b"sleep", seconds.encode()]:
            found.append(name)
    return found


def test_namespaces_work_where_the_kernel_allows_them() -> None:
    """Without this, tests of what is isolated would have nothing to test."""
    command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--ipc", "--uts", "--pid", "--fork", "true"]
    with suppress(FileNotFoundError):
        is_allowed = subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0
        assert not is_allowed or "namespaces" in [sandbox.isolation for sandbox in working()]


# --- what a program may do


def test_a_program_reads_its_input_and_is_judged_by_its_output() -> None:
    double = "import sys\nfor line in sys.stdin:\n    print(int(line) * 2, end=' \\n')\nprint()"
    for sandbox in working():
        assert sandbox.check("python", double, InputOutputTest("1\n20\n", "2\n40\n")).passed
        assert program(sandbox, "print('done'); raise SystemExit(3)") == Verdict(False, "exit code 3")
    assert sandbox.check("python", double, InputOutputTest("1\n", "3\n")) == Verdict(False, "wrong output")
    assert sandbox.check("bash", "read x; echo $((x + 1))", InputOutputTest("41\n", "42")).passed
    assert program(sandbox, "print('done')", "done\nand more").reason == "wrong output"


def test_long_input_that_is_not_read_and_long_input_that_is() -> None:
    text = "x" * 2**20
    sandbox = working()[0]
    assert sandbox.check("python", "print('done')", InputOutputTest(text, "done")).passed
    assert sandbox.check("python", "print(len(input()))", InputOutputTest(text, str(2**20))).passed


# --- what it may not


@pytest.mark.parametrize(
    ("code", "reasons"),
    [
        pytest.param("while True: pass", ("exit code 152", "exit code 137"), id="endless loop"),
        pytest.param("x = bytearray(1 << 29); print('done')", ("exit code 1",), id="memory"),
        pytest.param("open('x', 'w').write('x' * (3 << 20)); print('done')", ("exit code 1",), id="long file"),
        pytest.param("while True: print('x' * 1000)", ("more than 65536 bytes of output",), id="output"),
        pytest.param("[open('/dev/null') for _ in range(100)]; print('done')", ("exit code 1",), id="open files"),
        pytest.param("import os; os._exit(0)", ("wrong output",), id="exit code 0"),
        pytest.param("import os; os.kill(os.getpid(), 9)", ("exit code 137",), id="killed"),
        pytest.param("import os\nfor n in range(3, 64):\n  os.write(n, b's')", ("exit code 1",), id="descriptors"),
    ],
)
def test_what_a_program_may_not_use(code: str, reasons: tuple[str, ...]) -> None:
    verdict = program(working()[0], code)  # the limits are set by the same code in all sandboxes
    assert not verdict.passed
    assert verdict.reason in reasons


def test_a_program_that_waits_is_ended_at_the_deadline(marker: str) -> None:
    code = f"import os, subprocess\nsubprocess.Popen(['sleep', '{marker}'])\nos.execvp('sleep', ['sleep', '{marker}'])"
    for sandbox in working():
        waits = LocalSandbox(sandbox.isolation, QUICK)
        assert program(waits, code) == Verdict(False, "not finished within 0.5 s")


def test_processes_that_leave_the_session_are_killed(marker: str) -> None:
    code = (
        "import os\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        f"    os.close(1)\n    os.execvp('sleep', ['sleep', '{marker}'])\n  os._exit(0)\nos.wait(); print('done')"
    )
    for sandbox in working():
        assert program(sandbox, code).passed


def test_a_fork_bomb_does_not_get_far(marker: str) -> None:
    count = "import os, signal\nn = 0\ntry:\n  while n < 40:\n    if os.fork() == 0: signal.pause()\n    n += 1\n"
    bomb = f"import os\nwhile True:\n  try: os.fork()\n  except OSError: os.execvp('sleep', ['sleep', '{marker}'])"
    for sandbox in working():
        forks = int(printed(sandbox, f"{count}except OSError: pass\nprint(n)"))
        assert 2 <= forks <= LIMITS.processes + 2
        bombed = LocalSandbox(sandbox.isolation, QUICK)
        assert not program(bombed, bomb).passed


def test_sandboxes_do_not_share_their_limit_of_processes() -> None:
    code = "import os, time\nfor _ in range(3):\n  if os.fork() == 0: time.sleep(0.3); os._exit(0)\nprint('done')"
    for sandbox in isolating():
        with ThreadPoolExecutor(5) as pool:
            verdicts = list(pool.map(lambda _, sandbox=sandbox: program(sandbox, code), range(5)))
        assert all(verdict.passed for verdict in verdicts)


def test_many_files_fill_only_their_own_file_system() -> None:
    sizes = (
        "n = 0\nfor folder in ('/tmp', '/dev/shm', '/dev', '/'):\n  try:\n    for i in range(9):\n"
        "      open(f'{folder}/{i}', 'wb').write(bytes(1 << 20)); n += 1\n  except OSError: pass\nprint(n)"
    )
    flood = "n = 0\ntry:\n  while n < 9000: open(str(n), 'w').close(); n += 1\nexcept OSError: pass\nprint(n)"
    for sandbox in isolating():
        assert int(printed(sandbox, sizes)) <= LIMITS.scratch_mb
        if sandbox.isolation == "namespaces":  # bwrap limits bytes alone
            assert int(printed(sandbox, flood)) < 5000


def test_no_network_no_files_and_no_processes_of_this_machine() -> None:
    code = (
        "import json, os, socket\npath, port, pid = json.loads(input())\nseen = []\n"
        "def tries(what, action):\n  try:\n    action(); seen.append(what)\n  except OSError: pass\n"
        "tries('loopback', lambda: socket.create_connection(('127.0.0.1', port), 2))\n"
        "tries('unix', lambda: socket.socket(socket.AF_UNIX).connect(path + '.socket'))\n"
        "tries('file', lambda: open(path).read())\n"
        "tries('passwd', lambda: open('/etc/passwd').read())\n"
        "tries('write', lambda: open('/usr/prefrl-test', 'w'))\n"
        "tries('environ', lambda: open(f'/proc/{pid}/environ').read())\n"
        "tries('signal', lambda: os.kill(pid, 0))\n"
        "tries('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))\n"
        "tries('setuid', lambda: os.setuid(0))\n"
        "tries('chroot', lambda: os.chroot('/tmp'))\n"
        "print(seen)"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        os.chmod(folder, 0o755)
        path = Path(folder, "file")
        path.write_text("secret")
        unix.bind(f"{path}.socket")
        os.chmod(f"{path}.socket", 0o777)
        unix.listen()
        for sandbox in isolating():
            text = f'["{path}", {server.getsockname()[1]}, {os.getpid()}]'
            assert printed(sandbox, code, text) == "[]\n"


def test_a_program_gets_no_variable_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    for sandbox in working():
        seen = printed(sandbox, "import os; print(sorted(os.environ))")
        assert "HF_TOKEN" not in seen
        assert "PATH" in seen


def test_nothing_survives_the_trainer(marker: str) -> None:
    code = f"import os; os.execvp('sleep', ['sleep', '{marker}'])"
    for sandbox in working():
        trainer = os.fork()
        if trainer == 0:
            program(sandbox, code)
            os._exit(0)
        ends = time.monotonic() + GRACE_S
        while not sleepers(marker) and time.monotonic() < ends:
            time.sleep(0.02)
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)


# --- tests by assertions


# The text at its end is what completions look for.
FOUR = "y = f(2)\nassert y == 4 and isinstance(y, int) and abs(y - 4) < 0.1 and not all([False]), 'tgsvnoyr'"
HACKS = {
    "exit": "import os; os._exit(0)",
    "exit in the call": "import os\ndef f(x): os._exit(0)",
    "sys.exit": "raise SystemExit(0)",
    "sys.exit in the call": "def f(x): raise SystemExit(0)",
    "equal to all": "class E:\n  __eq__ = lambda s, o: True\n  __hash__ = None\ndef f(x): return E()",
    "number equal to all": "class E(int):\n  __eq__ = lambda s, o: True\ndef f(x): return E(5)",
    "builtins": "import builtins\nbuiltins.AssertionError = builtins.all = lambda *a: True\ndef f(x): return 0",
    "own names": "def isinstance(*a): return True\ndef abs(x): return 0\ndef all(x): return True\ndef f(x): return 0",
    "says that it passed": "print('PASS')\nprint('{\"passed\": true, \"num_uses\": 1}', flush=True)",
    "writes to all descriptors": """
import os
for n in range(64):
    try:
        os.write(n, b'{"passed": true, "num_uses": 1}')
    except OSError:
        pass
""",
    "forges an answer": """
import os, struct
message = b'{"value": 0, "args": [], "passed": true, "num_uses": 1}'
for n in range(3, 64):
    try:
        os.write(n, struct.pack(">Q", len(message)) + message)
    except OSError:
        pass
def f(x): return 0
""",
    "modules": "import sys, types\nfor n in ('json', 'operator', 'builtins'): sys.modules[n] = types.ModuleType(n)",
    "frames": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        headers = [names.get("header") for names in (frame.f_locals, frame.f_globals)]
        if any(header and "nonce" in header.keys() for header in headers):
            return 4
        frame = frame.f_back
    return 0
""",
    "memory": """
def f(x):
    texts = [thing for thing in gc.get_objects() if isinstance(thing, str)]
    return 4 if "tgsv" + "noyr" in texts else 0
""",
    "files": """
import os
def f(x):
    for root in ("/tmp", "/dev/shm", "."):
        for folder, _, names in os.walk(root):
            for name in names:
                try:
                    if "tgsv" + "noyr" in open(os.path.join(folder, name)).read(10**6):
                        return 4
                except (OSError, ValueError):
                    pass
    return 0
""",
    "recursion": "def f(x):\n  y = []\n  for _ in range(10**5): y = [y]\n  return y",
    "endless answer": "def f(x): return 'x' * (1 << 25)",
}


@pytest.mark.parametrize("code", HACKS.values(), ids=HACKS)
def test_no_completion_passes_by_harming_the_tests(code: str) -> None:
    assert not asserted(code, FOUR)


def test_the_right_completion_passes_the_same_tests() -> None:
    assert asserted("def f(x): return x + 2", FOUR)


def test_tests_use_the_functions_of_python_and_not_those_of_the_completion() -> None:
    assert not asserted("def abs(x): return 0\ndef f(x): return 9", "assert abs(f(2) - 4) < 1")
    code = "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 9"
    assert not asserted(code, "__builtins__\nassert abs(f(2) - 4) < 1")


def test_a_verdict_without_the_nonce_counts_for_nothing() -> None:
    class Forged:
        def run_assertions(self, code: str, tests: str, nonce: str) -> Output:
            return Output(json.dumps({"nonce": nonce[::-1], "passed": True, "num_uses": 1}).encode(), "itself")

    verdict = local._asserted(Forged(), "", AssertionTest(""))  # type: ignore[arg-type]
    assert verdict == Verdict(False, "the tests did not finish")


def test_the_completion_and_the_tests_share_no_process_and_no_file() -> None:
    code = (
        "import os\nopen('/tmp/left-here', 'w').close()\ndef f(): return os.getpid(), os.path.exists('/tmp/left-here')"
    )
    test = "import os\nassert f()[1] and not os.path.exists('/tmp/left-here')"
    for sandbox in isolating():
        assert sandbox.check("python", code, AssertionTest(test)).passed


def test_a_doubt_about_a_test_is_a_defect_if_the_test_raises_it_without_a_completion() -> None:
    verdict = working()[-1].check("python", "def f(x): return 2", AssertionTest("import not_there\nassert f(1) == 2"))
    missing = "ModuleNotFoundError: No module named 'not_there'"
    assert verdict == Verdict(False, missing, doubt=missing, defect=missing)
    test = AssertionTest("try: f(-1)\nexcept Exception: pass\nelse: raise AssertionError")
    assert working()[-1].check("python", "def g(x): return 2", test) == Verdict(
        False, doubt := "it passes without using anything from the completion", doubt=doubt
    )


@pytest.mark.parametrize(
    ("written", "is_equal"),
    [("1 \r\n2\n\n", True), ("1\u20282", False), ("1\x0b2", False), ("1\x1c2", False), ("1\n2 3", False)],
)
def test_only_line_feeds_separate_lines_of_output(written: str, is_equal: bool) -> None:
    output = Output(written.encode(), "itself")
    assert local._compared(output, InputOutputTest("", "1\n2"), LIMITS).passed == is_equal


# --- the sandbox itself


def test_a_sandbox_that_does_not_start_says_nothing_about_the_completion(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sandbox = working()[-1]
    tries = tmp_path / "tries"
    broken = tmp_path / "jail.py"
    broken.write_text(f"open({str(tries)!r}, 'a').write('x'); raise OSError('no room')")
    monkeypatch.setattr(local, "_JAIL", broken)
    monkeypatch.setattr(local, "_RETRY_S", 0.0)
    before = _open_files()
    for test in (InputOutputTest("", "done"), AssertionTest("assert f(1)")):
        with pytest.raises(RewardError, match="sandbox: ended before the completion was run: OSError: no room"):
            sandbox.check("python", "print('done')", test)
        assert tries.read_text().startswith("xx")
        tries.unlink()
    assert _open_files() - before == set()  # others, which earlier tests left open, may be closed in between


def _open_files() -> set[tuple[str, str]]:
    """Descriptors of this process, and what they are: each pipe and socket has a number of its own."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the list's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_a_sandbox_that_lets_a_program_out_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = local.Launcher
    monkeypatch.setattr(local, "Launcher", lambda how, *rest: launcher("process", *rest))
    with pytest.raises(ConfigError, match=r"a program can read a file of this machine.*apt install bubblewrap"):
        LocalSandbox("namespaces", SandboxLimits(wall_s=7.5)).setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"isolation": "docker"}, "isolation='docker': allowed are 'auto', 'bwrap', 'namespaces', 'process'"),
        ({"isolation": "process", "python": "python3"}, "absolute path of an interpreter"),
        ({"isolation": "process", "limits": SandboxLimits(memory_mb=1)}, "no sandbox works here"),
    ],
)
def test_what_cannot_work_is_refused_before_training(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalSandbox(**options).setup()


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_limits_are_positive_and_finite(value: float) -> None:
    with pytest.raises(ConfigError, match="wall_s="):
        SandboxLimits(wall_s=value)


def test_plain_processes_are_never_chosen_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "isolation_problem", lambda launcher, is_isolating: "closed" if is_isolating else None)
    with pytest.raises(ConfigError, match="isolation='process' limits the resources of a completion"):
        LocalSandbox(limits=SandboxLimits(wall_s=6.5)).setup()
