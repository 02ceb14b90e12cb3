"""Weights to real servers: what is generated afterwards is what the trainer's own model computes."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from prefrl.errors import ConfigError, WeightSyncError
from prefrl.generation.server import INFO_PATH, ServerInfo
from prefrl.generation.weights.sync import UPDATING, SyncMethod, WeightSync
from prefrl.http import Http, Refused
from prefrl.models.export import PolicyWeights
from tests.vllm.conftest import StartServer
from tests.vllm.server import MAX_LORA_RANK, ROOT, Server, save_tiny_model

pytestmark = pytest.mark.vllm

Named = tuple[str, torch.Tensor]
MakeSync = Callable[..., WeightSync]
SHORT = [10, 20, 30]
LONG = [(7 * i) % 100 + 5 for i in range(200)]  # several blocks of the prefix cache
TOLERANCE = 1e-4  # nats, float32
# nats: which of two tokens is the likelier one is then a matter of rounding, by which log-probs of a token differ by
# up to 2.5e-5 after hundreds of tokens.
TIE = 5e-5
TIMEOUT = 100.0  # seconds; what must not wait for it takes less than half


class Answer(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[str, int, int]]


@pytest.fixture
def make_sync(http: Http, tmp_path: Path) -> Iterator[MakeSync]:
    """`make_sync("gloo", timeout=3)`: a `WeightSync` that is closed after the test."""
    made: list[WeightSync] = []
    shared = tmp_path / "shared"

    def make(method: SyncMethod, *, timeout: float = TIMEOUT) -> WeightSync:
        folder = shared if method in ("shm", "adapter") else None
        made.append(WeightSync(http, method=method, folder=folder, timeout=timeout))
        return made[-1]

    yield make
    for sync in made:
        sync.close()


@pytest.fixture
def info(http: Http, server: Server) -> ServerInfo:
    return server_info(http, server)


def server_info(http: Http, server: Server) -> ServerInfo:
    return ServerInfo.from_json(server.url, http.request("GET", server.url + INFO_PATH, timeout=30))


def policy(server: Server, *, seed: int) -> PreTrainedModel:
    """The server's model with other weights: all of them, also biases and norms."""
    model = AutoModelForCausalLM.from_pretrained(server.model_dir, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            center = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(center + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()  # type: ignore[no-any-return]


def with_adapter(server: Server, *, seed: int, rank: int = 4) -> peft.PeftModel:
    """An adapter that does something, on weights that are always the same."""
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(policy(server, seed=99), config).eval()


def generate(http: Http, server: Server, prompt: list[int], *, model: str, max_tokens: int = 24) -> Answer:
    body = http.request(
        "POST", server.url + "/inference/v1/generate", timeout=120, json=request(prompt, model, max_tokens)
    )
    return read_answer(body)


def request(prompt: list[int], model: str, max_tokens: int) -> dict[str, Any]:
    sampling = {"n": 1, "max_tokens": max_tokens, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    return {"token_ids": prompt, "model": model, "sampling_params": sampling}


def read_answer(body: Any) -> Answer:
    (choice,) = body["choices"]
    return Answer(
        token_ids=choice["token_ids"],
        logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
        versions=[(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]],
    )


@torch.no_grad()
def trainers_logprobs(model: torch.nn.Module, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    """[T, V] nats, of each token that follows the prompt, by the trainer's own forward pass."""
    logits = model(torch.tensor([prompt + token_ids])).logits[0].float()
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def assert_is(
    model: torch.nn.Module, answer: Answer, prompt: list[int], *, start: int = 0, end: int | None = None
) -> None:
    """Tokens `start` to `end` were chosen by `model`, with its log-probs."""
    logprobs = trainers_logprobs(model, prompt, answer.token_ids)[start:end]
    chosen = torch.tensor(answer.token_ids[start:end])
    given = torch.tensor(answer.logprobs[start:end])
    own = logprobs.gather(1, chosen[:, None])[:, 0]
    assert (logprobs.amax(-1) - own).max() <= TIE
    torch.testing.assert_close(given, own, atol=TOLERANCE, rtol=0)


def assert_serves(model: torch.nn.Module, http: Http, server: Server, *, name: str, version: str) -> None:
    for prompt in (SHORT, LONG):
        answer = generate(http, server, prompt, model=name)
        assert answer.versions == [(version, 0, 24)]
        assert_is(model, answer, prompt)


def is_paused(http: Http, server: Server) -> bool:
    return bool(http.request("GET", server.url + "/is_paused", timeout=30)["is_paused"])


def version_of(http: Http, server: Server) -> str:
    return str(http.request("GET", server.url + "/weight_info", timeout=30)["weight_version"])


class Altered:
    """A policy's weights, with a fault in them."""

    def __init__(self, model: torch.nn.Module, alter: Callable[[Iterable[Named]], Iterable[Named]]) -> None:
        self._weights = PolicyWeights(model)
        self._alter = alter
        self.times_read = 0  # to the end

    def __iter__(self) -> Iterator[Named]:
        yield from self._alter(self._weights)
        self.times_read += 1

    @property
    def has_adapter(self) -> bool:
        return False

    @property
    def is_quantized(self) -> bool:
        return False

    def base(self) -> Iterable[Named]:
        return self

    def save_adapter(self, folder: Path) -> None:
        raise AssertionError("there is none")


@pytest.mark.parametrize("method", ["gloo", "shm"])
def test_after_each_sync_the_server_generates_as_the_trainer_would(
    method: SyncMethod, server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    sync = make_sync(method)
    for step in range(3):
        model = policy(server, seed=step)
        sync.send({server.url: info}, PolicyWeights(model), version=f"run:{step}")
        assert_serves(model, http, server, name=sync.model_name(info), version=f"run:{step}")
    sizes = sum(parameter.nbytes for parameter in model.parameters())
    assert sizes <= sync.bytes_sent < 1.1 * sizes  # tied weights once; headers
    assert sync.seconds > 0


@pytest.mark.parametrize("method", ["gloo", "shm"])
def test_weights_in_bfloat16_are_what_the_server_computes_with(
    method: SyncMethod, server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    def narrow(weights: Iterable[Named]) -> Iterator[Named]:
        """Every other one, so that widths alternate in a bucket."""
        yield from ((name, t.bfloat16() if i % 2 else t) for i, (name, t) in enumerate(weights))

    model = policy(server, seed=5)
    make_sync(method).send({server.url: info}, Altered(model, narrow), version="run:bf16")
    model.load_state_dict({name: t.float() for name, t in narrow(PolicyWeights(model))}, strict=False)
    assert_serves(model, http, server, name=info.model, version="run:bf16")


def test_after_each_sync_of_an_adapter_the_server_generates_as_the_trainer_would(
    server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    sync = make_sync("adapter")
    sizes = []
    for step in range(3):
        model = with_adapter(server, seed=step)
        sync.send({server.url: info}, PolicyWeights(model), version=f"run:{step}")
        sizes.append(sync.bytes_sent)
        assert sync.model_name(info) != info.model
        assert_serves(model, http, server, name=sync.model_name(info), version=f"run:{step}")
    assert sizes[1] == sizes[2] < sizes[0] / 5  # the weights below the adapter went once
    assert_is(policy(server, seed=99), generate(http, server, SHORT, model=info.model), SHORT)


def test_a_merged_adapter_is_sent_with_all_weights(
    server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    model = with_adapter(server, seed=3)
    make_sync("gloo").send({server.url: info}, PolicyWeights(model), version="run:0")
    assert_serves(model, http, server, name=info.model, version="run:0")


def test_a_server_reads_an_adapter_once_and_not_in_each_step(
    server: Server, http: Http, info: ServerInfo, make_sync: MakeSync, tmp_path: Path
) -> None:
    sync = make_sync("adapter")
    for step in range(2):
        model = with_adapter(server, seed=step)
        sync.send({server.url: info}, PolicyWeights(model), version=f"run:{step}")
    for file in (tmp_path / "shared").rglob("adapter_*"):
        file.rename(file.with_name("moved"))
    assert_serves(model, http, server, name=sync.model_name(info), version="run:1")


def test_the_adapter_of_a_quantized_policy_goes_on_the_weights_of_the_server(
    server: Server, http: Http, info: ServerInfo, make_sync: MakeSync, tmp_path: Path
) -> None:
    plain = with_adapter(server, seed=3)
    plain.save_pretrained(str(tmp_path / "adapter"))
    plain.get_base_model().save_pretrained(tmp_path / "base", state_dict=dict(PolicyWeights(plain).base()))
    make_sync("shm").send({server.url: info}, PolicyWeights(policy(server, seed=99)), version="run:0")
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    trained = peft.PeftModel.from_pretrained(quantized, str(tmp_path / "adapter"), is_trainable=True)
    sync = make_sync("adapter")
    sync.send({server.url: info}, PolicyWeights(trained), version="run:1")
    assert_serves(plain, http, server, name=sync.model_name(info), version="run:1")


def test_files_are_private_and_gone_at_the_end(
    server: Server, http: Http, info: ServerInfo, make_sync: MakeSync, tmp_path: Path
) -> None:
    modes: list[int] = []

    def watch(weights: Iterable[Named]) -> Iterator[Named]:
        yield from weights
        modes.extend(stat.S_IMODE(folder.stat().st_mode) for folder in (tmp_path / "shared").iterdir())

    full = make_sync("shm")
    full.send({server.url: info}, Altered(policy(server, seed=0), watch), version="run:0")
    assert modes == [0o700]
    assert not [path for path in (tmp_path / "shared").rglob("*") if path.is_file()]
    full.close()
    assert not list((tmp_path / "shared").iterdir())

    adapter = make_sync("adapter")
    for step in range(2):
        adapter.send({server.url: info}, PolicyWeights(with_adapter(server, seed=step)), version=f"run:{step}")
        assert len(list((tmp_path / "shared").rglob("adapter_model.safetensors"))) == 1
    adapter.close()
    assert not list((tmp_path / "shared").iterdir())


def until_cut(attempt: Callable[[float], list[Answer]]) -> None:
    """Repeat it, with longer pauses before a sync, until one falls into a request.

    Between its first and its last token are hundreds of others, so that one of the pauses does at any speed of the
    machine.
    """
    for number in range(18):
        if max(len(answer.versions) for answer in attempt(0.05 * 1.4**number)) > 1:
            return
    raise AssertionError("no sync fell into a request")


@pytest.mark.parametrize("method", ["gloo", "shm", "adapter"])
def test_requests_in_flight_go_on_and_know_which_weights_chose_each_token(
    method: SyncMethod, server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    sync = make_sync(method)
    make = with_adapter if method == "adapter" else policy
    models = {f"run:{step}": make(server, seed=step) for step in range(4)}
    names = list(models)
    prompts = [[first, 11, 12] for first in range(6, 18)]
    url = server.url + "/inference/v1/generate"
    max_tokens = 240

    def send_during_requests(pause: float) -> list[Answer]:
        sync.send({server.url: info}, PolicyWeights(models[names[0]]), version=names[0])
        name = sync.model_name(info)
        running = []
        for i, version in enumerate(names[1:]):
            for prompt in prompts[4 * i : 4 * (i + 1)]:
                running.append(
                    http.submit(http.send("POST", url, timeout=120, json=request(prompt, name, max_tokens)))
                )
            time.sleep(pause)
            sync.send({server.url: info}, PolicyWeights(models[version]), version=version)
        answers = [read_answer(future.result(timeout=120)) for future in running]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer.token_ids) == max_tokens
            assert [start for _, start, _ in answer.versions] == [0, *(end for _, _, end in answer.versions[:-1])]
            assert answer.versions[-1][2] == max_tokens
            for version, start, end in answer.versions:
                assert_is(models[version], answer, prompt, start=start, end=end)
        return answers

    until_cut(send_during_requests)


def test_requests_with_seeds_go_on_after_a_sync_that_makes_the_server_read_them_again(
    server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    sync = make_sync("gloo")
    url = server.url + "/inference/v1/generate"

    def send_during_requests(pause: float) -> list[Answer]:
        sync.send({server.url: info}, PolicyWeights(policy(server, seed=0)), version="run:0")
        running = []
        for seed in range(32):  # together more tokens than the server reads in one step
            body = request([6 + seed, *LONG[:99]], info.model, 150)
            body["sampling_params"] |= {"temperature": 1.0, "seed": seed}
            running.append(http.submit(http.send("POST", url, timeout=120, json=body)))
        time.sleep(pause)
        sync.send({server.url: info}, PolicyWeights(policy(server, seed=1)), version="run:1")
        answers = [read_answer(future.result(timeout=120)) for future in running]
        assert [len(answer.token_ids) for answer in answers] == [150] * 32
        return answers

    until_cut(send_during_requests)


def renamed(weights: Iterable[Named]) -> Iterator[Named]:
    yield from ((name.replace("mlp.up_proj", "mlp.upper"), tensor) for name, tensor in weights)


def reshaped(weights: Iterable[Named]) -> Iterator[Named]:
    yield from ((name, tensor[:-1] if "1.mlp.down_proj" in name else tensor) for name, tensor in weights)


def broken_bias(weights: Iterable[Named]) -> Iterator[Named]:
    yield from (
        (name, tensor * float("nan") if "1.self_attn.k_proj.bias" in name else tensor) for name, tensor in weights
    )


def endless_norm(weights: Iterable[Named]) -> Iterator[Named]:
    yield from ((name, tensor / 0 if name == "model.norm.weight" else tensor) for name, tensor in weights)


def without(part: str) -> Callable[[Iterable[Named]], Iterator[Named]]:
    def alter(weights: Iterable[Named]) -> Iterator[Named]:
        yield from ((name, tensor) for name, tensor in weights if part not in name)

    return alter


def doubled(weights: Iterable[Named]) -> Iterator[Named]:
    for name, tensor in weights:
        yield name, tensor
        if name == "model.norm.weight":
            yield name, tensor


def nothing(weights: Iterable[Named]) -> Iterator[Named]:
    yield from ()


def head_too(weights: Iterable[Named]) -> Iterator[Named]:
    for name, tensor in weights:
        yield name, tensor
        if name == "model.embed_tokens.weight":
            yield "lm_head.weight", tensor + 1


FAULTS = [
    pytest.param(renamed, "upper", id="unknown name"),
    pytest.param(reshaped, "cannot take these weights", id="wrong shape"),
    pytest.param(broken_bias, r"not finite: model\.layers\.1\.self_attn\.k_proj\.bias", id="NaN"),
    pytest.param(endless_norm, r"not finite: model\.norm\.weight", id="infinity"),
    pytest.param(without("1.self_attn.v_proj.bias"), r"incomplete.*layers\.1\.self_attn\.qkv_proj", id="part missing"),
    pytest.param(without("0.mlp.gate_proj"), r"incomplete.*layers\.0\.mlp\.gate_up_proj", id="half a layer missing"),
    pytest.param(without("model.norm"), r"incomplete.*model\.norm", id="layer missing"),
    pytest.param(without("embed_tokens"), r"incomplete.*embed_tokens", id="tied weights missing"),
    pytest.param(doubled, r"more than once: model\.norm\.weight", id="twice"),
    pytest.param(head_too, r"send them once", id="tied weights twice"),
    pytest.param(nothing, "incomplete|no safetensors", id="nothing"),
]


# The plugin judges weights in the same way however they arrive; files are also read as a whole.
BY_FILE = [pytest.param(*fault.values, "shm", id=f"{fault.id}-shm") for fault in (FAULTS[1], FAULTS[7], FAULTS[-1])]


@pytest.mark.parametrize(
    ("alter", "reason", "method"),
    [*(pytest.param(*fault.values, "gloo", id=f"{fault.id}-gloo") for fault in FAULTS), *BY_FILE],
)
def test_weights_that_are_not_the_models_change_nothing(
    alter: Any, reason: str, method: SyncMethod, server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    sync = make_sync(method)
    old, new = policy(server, seed=1), policy(server, seed=2)
    sync.send({server.url: info}, PolicyWeights(old), version="run:old")
    faulty = Altered(new, alter)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=reason) as caught:
        sync.send({server.url: info}, faulty, version="run:new")
    assert time.monotonic() - started < TIMEOUT / 2
    assert server.url in str(caught.value)
    assert faulty.times_read == 1
    assert not is_paused(http, server)
    assert_serves(old, http, server, name=info.model, version=UPDATING)
    sync.send({server.url: info}, PolicyWeights(new), version="run:new")
    assert_serves(new, http, server, name=info.model, version="run:new")


@pytest.mark.parametrize("method", ["gloo", "shm"])
def test_an_error_of_the_trainer_reaches_the_caller_and_leaves_the_server_serving(
    method: SyncMethod, server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    def fail(weights: Iterable[Named]) -> Iterator[Named]:
        yield next(iter(weights))
        raise LookupError("no such layer")

    sync = make_sync(method)
    model = policy(server, seed=1)
    sync.send({server.url: info}, PolicyWeights(model), version="run:0")
    with pytest.raises(LookupError, match="no such layer"):
        sync.send({server.url: info}, Altered(model, fail), version="run:1")
    assert not is_paused(http, server)
    assert_serves(model, http, server, name=info.model, version=UPDATING)
    sync.send({server.url: info}, PolicyWeights(model), version="run:2")
    assert_serves(model, http, server, name=info.model, version="run:2")


def test_a_trainer_that_is_silent_for_too_long_is_an_error_and_the_server_serves_on(
    server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    def silent(weights: Iterable[Named]) -> Iterator[Named]:
        answer = short._servers[server.url].answer
        assert answer is not None
        futures.wait([answer], timeout=TIMEOUT)
        assert answer.done(), "the server goes on waiting"
        yield from weights

    sync = make_sync("gloo")
    short = make_sync("gloo", timeout=10)  # in which it also forms its group
    model = policy(server, seed=1)
    sync.send({server.url: info}, PolicyWeights(model), version="run:0")
    with pytest.raises(WeightSyncError, match=r"Worker failed.*no data was sent or received for 10 s"):
        short.send({server.url: info}, Altered(policy(server, seed=2), silent), version="run:1")
    sync.forget(server.url)  # the server has left its group for the other one
    assert not is_paused(http, server)
    assert_serves(model, http, server, name=info.model, version=UPDATING)
    sync.send({server.url: info}, PolicyWeights(model), version="run:2")
    assert_serves(model, http, server, name=info.model, version="run:2")


def test_an_invitation_by_nobody_is_refused_in_time_and_the_server_serves_on(
    server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    sync = make_sync("gloo")
    model = policy(server, seed=1)
    sync.send({server.url: info}, PolicyWeights(model), version="run:0")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    group = {"transport": "gloo", "host": "127.0.0.1", "port": port, "tag": "t", "world_size": 2, "timeout_s": 2.0}
    with pytest.raises(Refused):  # and not Overdue
        http.request("POST", server.url + "/init_weight_transfer_engine", json={"init_info": group}, timeout=TIMEOUT)
    assert_serves(model, http, server, name=info.model, version="run:0")
    sync.forget(server.url)  # its group was left for the invitation
    sync.send({server.url: info}, PolicyWeights(model), version="run:1")
    assert_serves(model, http, server, name=info.model, version="run:1")


@pytest.mark.parametrize("method", ["gloo", "shm"])
def test_a_server_that_is_not_there_is_named_at_once(
    method: SyncMethod, server: Server, info: ServerInfo, make_sync: MakeSync
) -> None:
    url = "http://127.0.0.1:9"

    def large(weights: Iterable[Named]) -> Iterator[Named]:
        """More than fits a bucket."""
        yield from weights
        yield from ((f"large.{i}", torch.zeros(()).expand(2**24)) for i in range(3))

    weights = Altered(policy(server, seed=1), large)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"{url}.*pausing.*Connect"):
        make_sync(method).send({url: info}, weights, version="run:0")
    assert time.monotonic() - started < TIMEOUT / 2
    assert weights.times_read == 0  # it may be large, and partitioned over processes


def test_weights_that_another_trainer_left_half_sent_do_not_matter(
    server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    for path in ("/pause?mode=keep", "/start_weight_update"):
        http.request("POST", server.url + path, timeout=30)
    model = policy(server, seed=7)
    make_sync("gloo").send({server.url: info}, PolicyWeights(model), version="run:0")
    assert not is_paused(http, server)
    assert_serves(model, http, server, name=info.model, version="run:0")


KILLED_TRAINER = """
    import os, sys
    import torch
    from prefrl.http import Http
    from prefrl.generation.server import INFO_PATH, ServerInfo
    from prefrl.generation.weights.sync import WeightSync

    url, key = sys.argv[1:]
    http = Http(key=key)
    info = ServerInfo.from_json(url, http.request("GET", url + INFO_PATH, timeout=30))

    class Weights:
        def __iter__(self):
            yield "model.norm.weight", torch.ones(2**25)
            yield "model.other.weight", torch.ones(2**25)
            os._exit(9)

    WeightSync(http, method="gloo", folder=None, timeout=600).send({url: info}, Weights(), version="dead:0")
"""


def test_after_a_trainer_was_killed_while_sending_the_next_one_is_served_at_once(
    server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED_TRAINER), server.url, server.key]
    assert subprocess.run(command, cwd=ROOT, timeout=600).returncode == 9
    assert version_of(http, server) == UPDATING
    started = time.monotonic()
    model = policy(server, seed=8)
    make_sync("gloo").send({server.url: info}, PolicyWeights(model), version="run:0")
    assert time.monotonic() - started < TIMEOUT / 2
    assert_serves(model, http, server, name=info.model, version="run:0")


def test_an_adapter_that_the_server_cannot_take_leaves_it_with_the_last_one(
    server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    sync = make_sync("adapter")
    good, large = with_adapter(server, seed=1), with_adapter(server, seed=2, rank=2 * MAX_LORA_RANK)
    sync.send({server.url: info}, PolicyWeights(good), version="run:0")
    with_base = sync.bytes_sent
    with pytest.raises(WeightSyncError, match="rank"):
        sync.send({server.url: info}, PolicyWeights(large), version="run:1")
    assert not is_paused(http, server)
    assert_serves(good, http, server, name=sync.model_name(info), version=UPDATING)
    sync.send({server.url: info}, PolicyWeights(good), version="run:2")
    assert sync.bytes_sent == with_base  # after a failure nothing is taken for granted
    assert_serves(good, http, server, name=sync.model_name(info), version="run:2")


def test_a_folder_is_asked_for_where_files_are_written_and_only_there(http: Http, tmp_path: Path) -> None:
    for method in ("shm", "adapter"):
        with pytest.raises(ConfigError, match=f"folder=None: weight sync by '{method}' needs a folder"):
            WeightSync(http, method=method, folder=None, timeout=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs None"):
        WeightSync(http, method="gloo", folder=tmp_path, timeout=1)


def test_a_head_of_its_own_is_sent_and_must_not_be_missing(
    start_server: StartServer, http: Http, make_sync: MakeSync, tmp_path: Path
) -> None:
    # The server pads this vocabulary: rows that nobody sends are not missing.
    model_dir = save_tiny_model(tmp_path / "model", tie_word_embeddings=False, vocab_size=110)
    with start_server(model_dir) as server:
        info = server_info(http, server)
        for method in ("gloo", "shm"):
            sync = make_sync(method)
            for step in range(2):
                model = policy(server, seed=step)
                sync.send({server.url: info}, PolicyWeights(model), version=f"run:{step}")
                assert_serves(model, http, server, name=info.model, version=f"run:{step}")
            with pytest.raises(WeightSyncError, match=r"incomplete.*lm_head"):
                sync.send({server.url: info}, Altered(policy(server, seed=5), without("lm_head")), version="run:no")
            assert_serves(model, http, server, name=info.model, version=UPDATING)
        with pytest.raises(WeightSyncError, match="takes no adapters"):
            make_sync("adapter").send({server.url: info}, PolicyWeights(with_adapter(server, seed=1)), version="run:9")


def test_two_servers_take_the_same_weights_and_one_that_fails_does_not_stop_the_other(
    server: Server, second_server: Server, http: Http, info: ServerInfo, make_sync: MakeSync
) -> None:
    infos = {server.url: info, second_server.url: server_info(http, second_server)}
    syncs = [make_sync("gloo"), make_sync("shm")]
    for step, sync in enumerate([*syncs, *syncs]):
        model = policy(server, seed=step)
        sync.send(infos, PolicyWeights(model), version=f"run:{step}")
        for each in (server, second_server):
            assert_serves(model, http, each, name=infos[each.url].model, version=f"run:{step}")
    second_server.kill()
    for step, sync in enumerate(syncs, 4):
        model = policy(server, seed=step)
        with pytest.raises(WeightSyncError, match=f"1 of 2 servers.*\n{second_server.url}") as caught:
            sync.send(infos, PolicyWeights(model), version=f"run:{step}")
        assert f"{server.url}:" not in str(caught.value)
        assert_serves(model, http, server, name=info.model, version=f"run:{step}")
    second_server.start()
    for step, sync in enumerate(syncs, 6):
        model = policy(server, seed=step)
        sync.send(infos, PolicyWeights(model), version=f"run:{step}")
        for each in (server, second_server):
            assert_serves(model, http, each, name=infos[each.url].model, version=f"run:{step}")
