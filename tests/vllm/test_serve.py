"""`prefrl vllm-serve` with the real vLLM: who has access, where it listens, and that no process outlives it."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefrl import __version__
from prefrl.generation.server import INFO_PATH, PROTOCOL, ServerInfo, vocabulary_fingerprint
from prefrl.http import Http
from prefrl.scripts.launch.processes import with_variable
from tests.assets import tiny_tokenizer
from tests.launch import run
from tests.patience import wait_until
from tests.vllm.server import (
    KEY,
    MAX_LORA_RANK,
    MAX_MODEL_LEN,
    PYTHON,
    SIZES,
    START_SECONDS,
    environment,
    free_port,
    living,
    processes,
    shared_memory_of,
)
from tests.vllm.test_training import check_agreement_after_sync, logged, online

pytestmark = pytest.mark.vllm

# What trainers, and whoever wants to take a server over, would call; the application's own list must have them all.
CONTROL = {
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/shutdown_weight_transfer_engine",
    "/update_weight_version",
    "/weight_info",
    "/weight_checker",
    "/pause",
    "/resume",
    "/is_paused",
    "/abort_requests",
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
    "/get_world_size",
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/server_info",
    "/metrics",
    "/invocations",
    "/tokenize",
    "/v1/completions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
DOCUMENTATION = ["/docs", "/redoc", "/openapi.json"]
OPEN = {"/health", "/ping"}


class Launched:
    """A running `prefrl vllm-serve`."""

    def __init__(self, folder: Path, *options: str, key: str | None) -> None:
        self.port = free_port()
        self.key = key
        self._paths = (folder / "stdout", folder / "stderr")
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            self.process = subprocess.Popen(
                [str(PYTHON), "-m", "prefrl.scripts.main", "vllm-serve", "--port", str(self.port), *options],
                env=environment(key=key) | {"XDG_CONFIG_HOME": str(folder)},
                cwd=folder,
                stdout=out,
                stderr=err,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return self._paths[0].read_text(encoding="utf-8")

    @property
    def errors(self) -> str:
        return self._paths[1].read_text(encoding="utf-8", errors="replace")

    @property
    def session(self) -> int:
        """That of the server: this child leads it. The other one guards it."""
        children = [pid for pid, (_, parent, _) in processes().items() if parent == self.process.pid]
        (server,) = [pid for pid in children if b"vllm.entrypoints" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return server

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.url not in self.output:
            assert self.process.poll() is None, self.errors[-5000:]
            assert time.monotonic() < deadline, self.errors[-5000:]
            time.sleep(0.2)

    def exit_code(self) -> int:
        return self.process.wait(timeout=300)

    def ask(self, method: str, path: str, *, key: str | None, body: str | None = None) -> int:
        """The status of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        connection.request(method, path, body=body, headers=headers)
        with contextlib.closing(connection):
            return connection.getresponse().status


@contextlib.contextmanager
def launch(folder: Path, *options: str, key: str | None) -> Iterator[Launched]:
    launched = Launched(folder, *options, key=key)
    try:
        yield launched
    finally:
        if launched.process.poll() is None:  # a test failed
            launched.process.terminate()
            launched.exit_code()


def small(model: Path) -> list[str]:
    length = str(MAX_MODEL_LEN)
    return ["--model", str(model), "--dtype", "float32", "--enforce_eager", "--max_model_len", length]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `launched` registers."""
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def launched(
    tmp_path_factory: pytest.TempPathFactory, tied_model: Path, fleet: Path
) -> Generator[Launched, None, None]:
    """With a key and LoRA. Its engine is killed at the end, so that nothing that is asked of it matters later."""
    options = [*small(tied_model), "--max_lora_rank", str(MAX_LORA_RANK), "--join", str(fleet)]
    with launch(tmp_path_factory.mktemp("launched"), *options, key=KEY) as running:
        running.wait_until_ready()
        yield running


def routes(log: str) -> set[tuple[str, str]]:
    """Method and path of each route, as vLLM lists them when it starts, with x in the place of parameters."""
    found = set()
    for path, methods in re.findall(r"Route: (\S+), Methods: (.+)", log):
        found |= {(method, re.sub(r"\{\w+\}", "x", path)) for method in methods.split(", ")}
    return found


def test_every_route_but_health_needs_the_key(launched: Launched) -> None:
    everything = routes(launched.errors)
    assert {path for _, path in everything} >= CONTROL | OPEN
    assert len(everything) > 50
    closed = {(method, path) for method, path in everything if path not in OPEN}
    closed |= {("GET", path) for path in (INFO_PATH, "/", "/no-such-route", "/health/", "//health", *DOCUMENTATION)}
    closed |= {("OPTIONS", "/collective_rpc"), ("GET", "/metrics/")}
    for key in (None, "", KEY[:-1], KEY + "x", KEY.upper()):
        answers = {route: launched.ask(*route, key=key, body="{}") for route in closed}
        assert answers == dict.fromkeys(closed, 401)
    # Served in the same way as without the guard: found and understood, or refused for what was sent.
    answers = {route: launched.ask(*route, key=KEY, body="{}") for route in sorted(closed)}
    assert not {route: status for route, status in answers.items() if status in (401, 403)}
    found = {route: status for route, status in answers.items() if route in everything}
    assert found["GET", "/get_world_size"] == found["GET", "/weight_info"] == found["GET", "/metrics"] == 200
    assert found["POST", "/collective_rpc"] == 400


def test_health_needs_no_key(launched: Launched) -> None:
    assert launched.ask("GET", "/health", key=None) == 200
    assert launched.ask("GET", "/health", key="wrong") == 200


def test_there_are_no_documentation_pages(launched: Launched) -> None:
    assert [launched.ask("GET", path, key=KEY) for path in DOCUMENTATION] == [404, 404, 404]


def test_it_listens_on_loopback_only(launched: Launched) -> None:
    addresses = listening(living(launched.session))
    assert f"0100007F:{launched.port:04X}" in addresses
    assert {address.split(":")[0] for address in addresses} == {"0100007F"}  # 127.0.0.1, in the kernel's byte order


def listening(pids: list[int]) -> set[str]:
    """Local addresses of the listening TCP sockets of some processes."""
    mine = {os.readlink(path) for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


def test_it_says_what_it_is(launched: Launched, tied_model: Path) -> None:
    with contextlib.closing(Http(key=KEY)) as requests:
        info = ServerInfo.from_json(launched.url, requests.request("GET", launched.url + INFO_PATH, timeout=60))
    assert info.vllm.startswith("0.32.")
    assert info.torch.startswith("2.13.")
    assert info == ServerInfo(
        protocol=PROTOCOL,
        prefrl=__version__,
        vllm=info.vllm,
        torch=info.torch,
        transformers="5.19.0",
        model=str(tied_model),
        architecture="Qwen2ForCausalLM",
        vocab_size=128,
        hidden_size=SIZES["hidden_size"],
        num_hidden_layers=2,
        tokenizer=vocabulary_fingerprint(tiny_tokenizer().get_vocab()),  # the trainer's transformers is another one
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        logprobs_mode="processed_logprobs",
        max_lora_rank=MAX_LORA_RANK,
        num_workers=1,
        memory_share=info.memory_share,
        returns_routes=False,
    )
    assert info.memory_share is not None  # a build for CPUs takes the requests of a sleep


def test_the_key_is_on_no_command_line(launched: Launched) -> None:
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in [launched.process.pid, *living(launched.session)]]
    assert len(lines) >= 4  # this command, the HTTP server, the engine, a worker
    assert not [line for line in lines if KEY.encode() in line]
    assert KEY not in launched.output + launched.errors


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path, launched: Launched, tied_model: Path) -> None:
    with launch(tmp_path, *small(tied_model), "--port", str(launched.port), key=None) as second:
        assert second.process.wait(timeout=START_SECONDS) == 2
    assert second.errors.endswith("cannot listen there: Address already in use. Set another.\n")


def test_a_trainer_finds_it_in_the_folder_where_it_registered(
    launched: Launched, fleet: Path, tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    trainer = online(
        tmp_path, SimpleNamespace(url=f"dir:{fleet}", model_dir=tied_model), max_steps=2, vllm_server_timeout=600
    )
    trainer.train()
    assert logged(trainer, "server/alive") == [1, 1]
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    check_agreement_after_sync(trainer)
    trainer.generator.close()


def test_the_death_of_the_engine_ends_everything_with_a_message(launched: Launched, fleet: Path) -> None:
    session = launched.session
    assert wait_until(lambda: len(list(fleet.glob("*.json"))) == 1)
    everyone, segments = living(session), shared_memory_of(session)
    assert segments
    os.kill(process_named("VLLM::EngineCore", everyone), signal.SIGKILL)
    assert launched.exit_code() == 2
    assert re.search(r"prefrl vllm-serve: GenerationError: vLLM('s engine died| ended by itself)", launched.errors)
    assert "The end of its log:" in launched.errors
    assert_gone(session, everyone, segments)
    assert list(fleet.iterdir()) == [], "trainers would still look for it"


def process_named(name: str, pids: list[int]) -> int:
    (found,) = [pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name.encode())]
    return found


def assert_gone(session: int, pids: list[int], segments: list[Path]) -> None:
    assert living(session) == []
    assert not [pid for pid in pids if processes().get(pid, ("Z", 0, 0))[0] not in "ZX"]
    assert not [path for path in segments if path.exists()]


def test_a_model_that_cannot_be_loaded_is_named_in_the_message(tmp_path: Path) -> None:
    model = tmp_path / "no-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "no-such-type"}), encoding="utf-8")
    with launch(tmp_path, *small(model), key=None) as launched:
        assert launched.process.wait(timeout=START_SECONDS) == 2
    message = launched.errors.partition("prefrl vllm-serve: ")[2]
    assert message.startswith("GenerationError: vLLM ended by itself, with exit code 1.\n  Errors in its log")
    assert "no-such-type" in message.partition("The end of its log:")[0]
    assert launched.output == ""


def test_the_trainers_environment_has_no_vllm() -> None:
    assert importlib.util.find_spec("vllm") is None


# Tries to reach the server without the key, like anybody else on the machine, and waits until it has registered.
REWARD = """
import glob, time, urllib.error, urllib.request
from pathlib import Path

def length(completions, **columns):
    try:
        urllib.request.urlopen("http://127.0.0.1:{port}/is_paused")
    except urllib.error.HTTPError as error:
        Path("{answer}").write_text(str(error.code))
    while not glob.glob("{folder}/fleet/*.json"):
        time.sleep(0.1)
    return [float(len(text)) for text in completions]
"""
RUN = """
model_name_or_path: {model}
dataset_name: {folder}/prompts.jsonl
reward_funcs: [{folder}/reward.py:length]
output_dir: {folder}/run
vllm: auto
vllm_mode: colocate
vllm_python: {python}
vllm_args: --dtype float32 --enforce_eager --max_model_len 64 --join {folder}/fleet
vllm_server_port: {port}
use_cpu: true
max_steps: 2
num_generations: 4
max_completion_length: 8
per_device_train_batch_size: 4
save_strategy: 'no'
"""
# What the server is asked for in a step; it sleeps before the first one, too. A build for CPUs frees nothing then.
SLEEP = "/sleep?level=2"
STEP = ["/wake_up?tags=weights", "/update_weights", "/wake_up?tags=kv_cache", "/inference/v1/generate", SLEEP]


def test_one_command_starts_a_server_that_sleeps_while_it_trains_and_ends_it(tied_model: Path, tmp_path: Path) -> None:
    port, mark, answer = free_port(), uuid.uuid4().hex, tmp_path / "answer"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n' * 4)
    (tmp_path / "reward.py").write_text(REWARD.format(port=port, answer=answer, folder=tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(model=tied_model, folder=tmp_path, python=PYTHON, port=port))
    variables = environment(key=None) | {"MARK_OF_TEST": mark}
    run([sys.executable, "-m", "prefrl.scripts.main", "grpo", str(file)], environment=variables)
    assert (tmp_path / "run/model.safetensors").exists()
    logs = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any("sampling/sampling_logp_difference/mean" in entry for entry in logs)  # sampled on the server
    requests = re.findall(r'"POST (\S+) HTTP', (tmp_path / "run/vllm-server.log").read_text(encoding="utf-8"))
    assert [path for path in requests if path in STEP] == [SLEEP, *STEP, *STEP]
    assert answer.read_text(encoding="utf-8") == "401"
    assert list((tmp_path / "fleet").iterdir()) == [], "the server left when it was ended"
    assert with_variable("MARK_OF_TEST", mark) == []
