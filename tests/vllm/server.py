"""Real vLLM servers for tests, in their own environment (`make .venv-vllm/.ready`)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from prefrl.generation.server import INFO_PATH, KEY_VARIABLE
from prefrl.http import Http, HttpError
from prefrl.scripts.launch.vllm_serve import CPU_FLAGS, ServeArguments, serve_command, serve_environment
from tests.assets import tiny_model, tiny_tokenizer
from tests.forks import Forks
from tests.vlms import tiny_vlm

ROOT = Path(__file__).parents[2]
# `bin/python` of an environment is a link, which must stay one: it tells Python where its packages are.
PYTHON = Path(os.environ.get("PREFRL_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
KEY = "a-key-for-tests-of-more-than-32-characters"
MAX_MODEL_LEN = 256
MAX_LORA_RANK = 8
# Options of `prefrl vllm-serve` for a small machine.
SMALL = {"dtype": "float32", "enforce_eager": True, "max_model_len": MAX_MODEL_LEN}
START_SECONDS = 600.0  # far more than it takes: afresh, two replicas on a busy machine have needed 300
STOP_SECONDS = 20.0


# What nearly all imports of a server's processes belong to.
_IMPORTED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "vllm.lora.worker_manager",
    "prefrl.generation.vllm.plugin",
    "prefrl.generation.server",
)


# vLLM's attention on a CPU knows no head smaller than 32.
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 256}


def save_tiny_model(folder: Path, **overrides: Any) -> Path:
    """A tiny Qwen2 and its tokenizer on disk; its head is tied unless told otherwise."""
    tiny_model("qwen2", **(SIZES | {"tie_word_embeddings": True} | overrides)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_tiny_vlm(folder: Path) -> Path:
    """A tiny Idefics3 and its processor on disk: a family whose code in vLLM does not need torchvision."""
    model, processor = tiny_vlm("idefics3", text=SIZES | {"tie_word_embeddings": False})
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# At the first request for log-probs, a server compiles a count of likelier tokens, in three CPU seconds. Those of
# test_serve.py do.
_UNCOMPILED = {"TORCH_COMPILE_DISABLE": "1"}


class Server:
    """`vllm serve` as `prefrl vllm-serve` starts it, in a session of its own; ready when the constructor returns.

    It is a fork of a process that has imported vLLM, and so are its engine and its workers: see forked.py. What users
    run, where each of them starts afresh, is in test_serve.py.

    Args:
        model_dir: Folder of the model.
        folder: Where its logs go.
        flags: More flags of `vllm serve`.
        key: What clients must send.
        port: None: one that is free.
        options: More options of `prefrl vllm-serve`.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        folder: Path,
        flags: Sequence[str] = (),
        key: str = KEY,
        port: int | None = None,
        **options: Any,
    ) -> None:
        self.model_dir = model_dir
        self.key = key
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = folder / f"vllm-{self.port}.log"
        self._flags = tuple(flags)
        self._options = ServeArguments(model=str(model_dir), port=self.port, **(SMALL | options))
        self.start()

    def start(self) -> None:
        """Start it on its port and wait until it answers."""
        if not PYTHON.exists():
            raise AssertionError(f"no vLLM environment: {PYTHON} does not exist; run `make .venv-vllm/.ready`")
        inherited = environment(key=self.key)
        with self.log_path.open("ab") as log:
            command = serve_command(self._options, [*CPU_FLAGS, *self._flags])
            self.process = forks().start(
                "tests.vllm.forked",
                command[command.index("serve") :],
                environment=inherited | serve_environment(self._options, inherited) | _UNCOMPILED,
                output=log,
                errors=log,
                folder=self.log_path.parent,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        http = Http(key=self.key)
        try:
            while True:
                if self.process.poll() is not None:
                    raise AssertionError(f"vLLM ended with code {self.process.returncode}:\n{self.log_tail()}")
                try:
                    http.request("GET", self.url + INFO_PATH, timeout=10)
                except HttpError:
                    if time.monotonic() > deadline:
                        message = f"vLLM was not ready after {START_SECONDS:g} s:\n{self.log_tail()}"
                        raise AssertionError(message) from None
                    time.sleep(0.2)
                else:
                    return
        finally:
            http.close()

    def log_tail(self, lines: int = 60) -> str:
        """The last lines that it wrote."""
        return "\n".join(self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End it as a user would, and whatever of it is left by force."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=STOP_SECONDS)
        self.kill()

    def freeze(self) -> None:
        """Stop all of its processes, which answer nothing from now on."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """End all of its processes at once, as a machine that fails does."""
        leftovers = shared_memory_of(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        while living(self.process.pid):
            time.sleep(0.05)
        for path in leftovers:
            path.unlink(missing_ok=True)

    def restart(self) -> None:
        """Kill it and start another one with the same model, port and key."""
        self.kill()
        self.start()


@cache
def forks() -> Forks:
    """A process of vLLM's environment that has imported it."""
    return Forks(PYTHON, _IMPORTED, environment(key=None) | _UNCOMPILED)


def environment(*, key: str | None) -> dict[str, str]:
    """Environment variables of a server on a small machine without a GPU."""
    own = {
        "PYTHONPATH": str(ROOT),  # the tree under test, wherever the environment installed prefrl from
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return inherited | own | ({} if key is None else {KEY_VARIABLE: key})


def living(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    return [
        pid for pid, (state, _, its_session) in processes().items() if its_session == session and state not in "ZX"
    ]


def shared_memory_of(session: int) -> list[Path]:
    """Segments of /dev/shm that processes of a session have mapped under Python's names."""
    found: set[Path] = set()
    for pid in living(session):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
        except OSError:  # it has just ended
            continue
        found |= {Path(line[line.index("/dev/shm/psm_") :].split()[0]) for line in lines if "/dev/shm/psm_" in line}
    return sorted(found)


def processes() -> Mapping[int, tuple[str, int, int]]:
    """State, parent and session of every process."""
    found: dict[int, tuple[str, int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        found[int(path.parent.name)] = (fields[0], int(fields[1]), int(fields[3]))
    return found
