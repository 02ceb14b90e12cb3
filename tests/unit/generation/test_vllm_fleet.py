"""Who gets weights, what is known of servers, and which requests their guard lets through."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError, GenerationError, WeightSyncError
from prefrl.generation.server import INFO_PATH, ServerInfo, check_key, key_file, key_of_user
from prefrl.generation.vllm import fleet as code
from prefrl.generation.vllm.client import VLLMGenerator
from prefrl.generation.vllm.fleet import Fleet
from prefrl.generation.vllm.handshake import PROBE_SECONDS, Requirements, check_server_url
from prefrl.generation.weights.sync import WeightSync
from prefrl.http import Http, Overdue, Unreachable
from tests.assets import tiny_model, tiny_tokenizer
from tests.unit.generation.scripted import A, B, ScriptedHttp, info


class Servers:
    """Two servers, and a weight sync that reaches them."""

    def __init__(self) -> None:
        self.versions = {A: "default", B: "default"}
        self.sent: list[set[str]] = []
        self.forgotten: list[str] = []
        self.gone: set[str] = set()
        self.error: Exception | None = None
        self.dies: str | None = None  # in the next `send`, and is back at once
        self.keeps = True
        self.bytes_sent = 5

    def answer(self, url: str, path: str, json: Any) -> Any:
        if url in self.gone:
            raise Unreachable(f"{url} is gone")
        return {"/health": None, INFO_PATH: asdict(info()), "/weight_info": {"weight_version": self.versions[url]}}[
            path
        ]

    def send(self, servers: Mapping[str, ServerInfo], weights: object, *, version: str) -> None:
        self.sent.append(set(servers))
        if self.dies is not None:
            self.versions[self.dies], self.dies = "default", None
            raise WeightSyncError("broken pipe")
        if self.error is not None:
            raise self.error
        if self.keeps:
            self.versions |= dict.fromkeys(servers, version)

    def forget(self, url: str) -> None:
        self.forgotten.append(url)

    def model_name(self, info: ServerInfo) -> str:
        return info.model


class Weights:
    def lead(self, task: Callable[[], None]) -> None:
        task()


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def fleet(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(code, "_DEATH_SECONDS", 0.05)
    http = ScriptedHttp(servers.answer)
    requirements = Requirements("m", "X", 8, 4, 1, "t", has_adapters=False)
    yield Fleet([A, B], http=http, weight_sync=servers, requirements=requirements, server_timeout=0.3)
    http.close()


def test_only_servers_that_lack_a_version_get_it(fleet: Fleet, servers: Servers) -> None:
    assert not fleet.has_weights
    fleet.sync(Weights(), version=1)
    fleet.sync(Weights(), version=1)
    assert fleet.has_weights
    assert servers.sent == [{A, B}]
    assert set(servers.versions.values()) == {fleet.version} == {f"{fleet.run}:1"}
    servers.versions[B] = "updating"
    fleet.sync(Weights(), version=1)
    assert servers.sent[1:] == [{B}]
    assert (servers.forgotten, fleet.stats.restarts, fleet.model_name(A)) == ([], 0, "m")
    assert fleet.stats.bytes_sent == 2 * 5


def test_a_server_that_was_restarted_is_counted_forgotten_and_gets_the_weights(fleet: Fleet, servers: Servers) -> None:
    fleet.sync(Weights(), version=1)
    assert fleet.stats.restarts == 0, "a server that never had weights"
    servers.versions[A] = "default"
    fleet.recover()
    assert servers.sent == [{A, B}, {A}]
    assert (servers.forgotten, fleet.stats.restarts) == ([A], 1)


def test_after_invalidate_an_equal_step_is_another_version(fleet: Fleet, servers: Servers) -> None:
    fleet.sync(Weights(), version=1)
    before = fleet.version
    fleet.invalidate()
    fleet.sync(Weights(), version=1)
    assert fleet.version != before
    assert servers.sent == [{A, B}] * 2
    assert servers.forgotten == [A, B]


def test_a_server_that_lives_and_does_not_take_the_weights_is_an_error_at_once(fleet: Fleet, servers: Servers) -> None:
    servers.error = WeightSyncError("no memory")
    with pytest.raises(WeightSyncError, match="no memory"):
        fleet.sync(Weights(), version=1)
    assert servers.sent == [{A, B}]
    assert not fleet.is_sending


def test_a_server_that_was_restarted_while_weights_were_sent_gets_them_again(fleet: Fleet, servers: Servers) -> None:
    fleet.sync(Weights(), version=1)
    servers.dies = A
    fleet.sync(Weights(), version=2)
    assert servers.sent == [{A, B}] * 3
    assert (servers.forgotten, fleet.stats.restarts) == ([A], 1)


def test_a_server_that_does_not_come_back_is_an_error(fleet: Fleet, servers: Servers) -> None:
    fleet.sync(Weights(), version=1)
    servers.gone = {A}
    with pytest.raises(GenerationError, match=rf"{A} did not answer within 0\.3 s") as caught:
        fleet.sync(Weights(), version=2)
    assert isinstance(caught.value, ConnectionError)  # as in TRL
    assert fleet.stats.wait_s > 0


def test_a_server_that_is_slow_to_tell_its_weights_is_waited_for(
    fleet: Fleet, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.server_timeout = 2 * PROBE_SECONDS
    send = ScriptedHttp.send

    async def slow(http: ScriptedHttp, method: str, url: str, *, timeout: float, **options: Any) -> Any:
        if url.endswith("/weight_info") and timeout <= PROBE_SECONDS:
            raise Overdue("late")
        return await send(http, method, url, timeout=timeout, **options)

    monkeypatch.setattr(ScriptedHttp, "send", slow)
    servers.versions = dict.fromkeys((A, B), f"{fleet.run}:1")
    fleet.sync(Weights(), version=1)
    assert servers.sent == [], "their versions are not known"


def test_weights_that_do_not_stay_are_an_error(fleet: Fleet, servers: Servers) -> None:
    servers.keeps = False
    with pytest.raises(WeightSyncError, match="were sent 3 times, but the server does not have them"):
        fleet.sync(Weights(), version=1)
    assert len(servers.sent) == 3


def test_servers_without_weights_cannot_be_recovered(fleet: Fleet) -> None:
    with pytest.raises(GenerationError, match="call sync first"):
        fleet.recover()


@pytest.mark.parametrize(
    ("url", "host_and_port"),
    [
        ("http://127.0.0.1:8001", " --port 8001"),
        ("http://localhost:8001", " --port 8001"),
        ("http://10.0.0.7:9000", " --host 10.0.0.7 --port 9000"),
        ("http://gpu-node", " --host gpu-node --port 80"),
    ],
)
def test_the_command_serves_the_policys_model_where_the_trainer_looks_for_it(url: str, host_and_port: str) -> None:
    model = tiny_model()
    model.name_or_path = "some/model"
    requirements = Requirements.of(model, tiny_tokenizer(), has_adapters=False)
    assert requirements.start_command(url) == f"prefrl vllm-serve --model some/model{host_and_port}"
    with_adapters = Requirements.of(model, tiny_tokenizer(), has_adapters=True)
    assert with_adapters.start_command(url).endswith(f"{host_and_port} --max_lora_rank <rank>")


def test_requirements_are_those_of_the_text_model() -> None:
    requirements = Requirements.of(tiny_model("llama"), tiny_tokenizer(), has_adapters=False)
    sizes = requirements.vocab_size, requirements.hidden_size, requirements.num_hidden_layers
    assert (requirements.architecture, *sizes) == ("LlamaForCausalLM", 128, 32, 2)


def test_a_url_loses_the_slash_at_its_end() -> None:
    assert check_server_url("http://127.0.0.1:8000/") == "http://127.0.0.1:8000"
    assert check_server_url("https://[::1]:8000") == "https://[::1]:8000"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a:1", "http://", "http://a:1/v1", "http://a:x", "http://a:1?b", "http://u:p@a:1"]
)
def test_what_is_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"must look like http://127\.0\.0\.1:8000"):
        check_server_url(url)


@pytest.mark.parametrize(
    ("urls", "changes", "words"),
    [
        ([], {}, "must be at least one URL, without duplicates"),
        (["http://a:1", "http://a:1/"], {}, "must be at least one URL, without duplicates"),
        (["http://a:1"], {"server_timeout": 0.0}, r"server_timeout=0\.0: must be above 0"),
        (["http://a:1"], {"request_timeout": -1.0}, r"request_timeout=-1\.0: must be above 0"),
        (["http://a:1"], {"max_concurrency": 0}, "max_concurrency=0: must be above 0"),
    ],
)
def test_values_out_of_range_are_refused(
    urls: list[str], changes: dict[str, float], words: str, tmp_path: Path
) -> None:
    http = Http()
    options = {"server_timeout": 1.0, "request_timeout": 1.0, "max_concurrency": 1} | changes
    with pytest.raises(ConfigError, match=words):
        VLLMGenerator(
            urls,
            http=http,
            weight_sync=WeightSync(http, method="shm", folder=tmp_path, timeout=1.0),
            requirements=Requirements.of(tiny_model(), tiny_tokenizer(), has_adapters=False),
            stop_ids=[1],
            server_timeout=options["server_timeout"],
            request_timeout=options["request_timeout"],
            max_concurrency=int(options["max_concurrency"]),
        )
    http.close()


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Environment variables of a user without a key."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


def test_server_and_trainer_of_a_user_have_the_same_key_which_nobody_else_can_read(home: dict[str, str]) -> None:
    key = key_of_user(home)
    assert len(key) == 64
    assert key_of_user(home) == key
    path = key_file(home)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path], "a draft is left"


def test_another_user_has_another_key(home: dict[str, str], tmp_path: Path) -> None:
    assert key_of_user(home) != key_of_user({"XDG_CONFIG_HOME": str(tmp_path / "other")})


def test_the_variable_wins_and_no_file_is_made(home: dict[str, str]) -> None:
    assert key_of_user(home | {"VLLM_API_KEY": "k" * 40}) == "k" * 40
    assert not key_file(home).exists()


def test_a_file_that_others_can_read_or_that_is_a_link_is_refused(home: dict[str, str], tmp_path: Path) -> None:
    key_of_user(home)
    path = key_file(home)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"vllm_api_key: other users can read or change this key\. Remove the file"):
        key_of_user(home)
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="VLLM_API_KEY is not set, and there is no file for a key"):
        key_of_user(home)


@pytest.mark.parametrize("key", ["pass word" * 5, "secret\n" * 8, "schl\u00fcssel" * 5, "a" * 31])
def test_a_key_that_is_short_or_fits_no_header_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError, match=r"Set another key|has 31 characters, but must have at least 32") as caught:
        check_key(key)
    assert key not in str(caught.value)


def test_a_server_that_keeps_its_experts_to_itself_is_refused_if_they_are_needed() -> None:
    requirements = Requirements("m", "X", 8, 4, 1, "t", has_adapters=False, has_routes=True)
    requirements.check(A, info(returns_routes=True))
    message = (
        r"does not return the experts .* which router_replay=True needs. Start it with `prefrl .*_routed_experts`"
    )
    with pytest.raises(GenerationError, match=message):
        requirements.check(A, info())
