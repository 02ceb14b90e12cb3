"""`prefrl vllm-serve` without vLLM: which command it would run, and what it refuses."""

from __future__ import annotations

import itertools
import re
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from prefrl.errors import ConfigError
from prefrl.generation.server import key_of_user
from prefrl.scripts.launch import vllm_serve
from prefrl.scripts.launch.vllm_serve import ServeArguments, serve_command, serve_environment
from prefrl.scripts.main import main

KEY = "a-secret-of-more-than-32-characters"
CONTRACT = [
    ["--enable-scale-out"],
    ["--logprobs-mode", "processed_logprobs"],
    ["--max-logprobs", "-1"],
    ["--weight-transfer-config", '{"backend":"prefrl"}'],
    ["--middleware", "prefrl.generation.server.Guard"],
    ["--disable-fastapi-docs"],
]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "VLLM_PLUGINS", "VLLM_USE_RUST_FRONTEND"):
        monkeypatch.delenv(name, raising=False)


def dry_run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, str], list[str]]:
    """Environment variables and command that are printed."""
    assert main(["vllm-serve", "--dry_run", *argv]) == 0
    words = shlex.split(capsys.readouterr().out)
    variables = list(itertools.takewhile(lambda word: "=" in word and not word.startswith("-"), words))
    return dict(word.split("=", 1) for word in variables), words[len(variables) :]


def contains(words: list[str], part: list[str]) -> bool:
    return any(words[i : i + len(part)] == part for i in range(len(words)))


def test_without_options_vllm_decides_all_but_the_contract_and_where_to_listen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    variables, command = dry_run(capsys, "--model", "some/model")
    assert variables == {"VLLM_SERVER_DEV_MODE": "1"}
    start = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", "some/model"]
    assert command[: len(start)] == start
    rest = command[len(start) :]
    assert all(contains(rest, part) for part in CONTRACT)
    others = [["--host", "127.0.0.1"], ["--port", "8000"], ["--disable-access-log-for-endpoints", "/health"]]
    assert all(contains(rest, part) for part in others)
    assert len(rest) == sum(map(len, CONTRACT + others))


def test_each_option_is_passed_in_vllms_words(capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "revision": "abc",
        "tensor_parallel_size": "2",
        "data_parallel_size": "3",
        "host": "::1",
        "port": "81",
        "gpu_memory_utilization": "0.5",
        "dtype": "bfloat16",
        "max_model_len": "7",
        "kv_cache_dtype": "fp8",
        "speculative_config": '{"method": "ngram"}',
        "max_lora_rank": "8",
    }
    argv = [word for name, value in given.items() for word in (f"--{name}", value)]
    flags = ["--enforce_eager", "--trust_remote_code", "--enable_prefix_caching", "no", "--log_level", "warning"]
    variables, command = dry_run(capsys, "--model", "m", *argv, *flags)
    for name, value in given.items():
        assert contains(command, [f"--{name.replace('_', '-')}", value])
    assert {"--enforce-eager", "--trust-remote-code", "--no-enable-prefix-caching", "--enable-lora"} <= {*command}
    assert contains(command, ["--uvicorn-log-level", "warning"])
    assert contains(command, ["--api-server-count", "1"])
    assert variables == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    assert all(contains(command, part) for part in CONTRACT)


@pytest.mark.parametrize("argv", [["--max_lora_rank", "8"], ["--data_parallel_size", "2"]])
def test_only_replicas_that_take_adapters_are_held_to_one_front_end(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, command = dry_run(capsys, "--model", "m", *argv)
    assert "--api-server-count" not in command


def test_unknown_options_go_on_to_vllm_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--max-num-seqs", "4", "--port", "82", "-q", "fp8", "--compilation-config.mode=3", "--seed", "-1"]
    _, command = dry_run(capsys, "--model", "m", *argv)
    assert command[-7:] == ["--max-num-seqs", "4", "-q", "fp8", "--compilation-config.mode=3", "--seed", "-1"]
    assert contains(command, ["--port", "82"])


def test_a_file_sets_options_and_the_command_line_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "model: m\nport: 83\nmax_lora_rank: 16\nspeculative_config:\n  method: ngram\nenable_prefix_caching: true\n",
        encoding="utf-8",
    )
    _, command = dry_run(capsys, "--config", str(file), "--port", "84")
    assert contains(command, ["--port", "84"])
    assert contains(command, ["--max-lora-rank", "16"])
    assert contains(command, ["--speculative-config", '{"method": "ngram"}'])
    assert "--enable-prefix-caching" in command


def test_the_key_is_used_and_never_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert main(["vllm-serve", "--model", "m", "--host", "0.0.0.0", "--dry_run"]) == 0
    captured = capsys.readouterr()
    assert KEY not in captured.out + captured.err
    assert "--host 0.0.0.0" in captured.out


class Recorder:
    """Takes the place of the supervisor."""

    environments: ClassVar[list[Mapping[str, str]]] = []

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> None:
        self.environments.append(environment)
        self.command = command

    def run(self, *, when_ready: str) -> signal.Signals:
        assert self.environments[-1]["VLLM_API_KEY"] not in " ".join([*self.command, when_ready])
        return signal.SIGTERM


def test_without_the_variable_the_server_has_the_key_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(vllm_serve, "Supervisor", Recorder)
    monkeypatch.setattr(vllm_serve, "_check_vllm", lambda: None)
    monkeypatch.setattr(vllm_serve, "check_port", lambda *_: None)
    assert main(["vllm-serve", "--model", "some/model", "--trust_remote_code"]) == 0
    key = Recorder.environments[-1]["VLLM_API_KEY"]
    assert key == key_of_user({"XDG_CONFIG_HOME": str(tmp_path)})
    captured = capsys.readouterr()
    assert key not in captured.out + captured.err
    assert "trust_remote_code=True with revision=None: code from the repository of 'some/model' runs" in captured.err
    assert captured.err.endswith("prefrl vllm-serve: ended by SIGTERM\n")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_variable(host: str) -> None:
    assert serve_environment(ServeArguments(model="m", host=host), {}) == {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node7", "localhost.example.org", ""])
@pytest.mark.parametrize("environment", [{}, {"VLLM_API_KEY": ""}], ids=["no key", "empty key"])
def test_any_other_address_needs_a_key(host: str, environment: dict[str, str]) -> None:
    options = ServeArguments(model="m", host=host)
    with pytest.raises(ConfigError, match="Set VLLM_API_KEY to a secret"):
        serve_environment(options, environment)
    assert "VLLM_API_KEY" not in serve_environment(options, {"VLLM_API_KEY": KEY})  # inherited, not added


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"VLLM_API_KEY": "sesame"}, "VLLM_API_KEY: has 6 characters, but must have at least 32"),
        ({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}, "VLLM_ALLOW_INSECURE_SERIALIZATION: vLLM would run code"),
        ({"VLLM_USE_RUST_FRONTEND": "1"}, "does not check the key"),
    ],
)
def test_an_environment_that_lets_strangers_in_is_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        serve_environment(ServeArguments(model="m"), variables)


@pytest.mark.parametrize(
    ("given", "added"), [("a,b", "a,b,prefrl"), ("", "prefrl"), ("prefrl,a", None), ("my-prefrl", "my-prefrl,prefrl")]
)
def test_our_plugin_is_among_those_that_the_user_chose(given: str, added: str | None) -> None:
    environment = serve_environment(ServeArguments(model="m"), {"VLLM_PLUGINS": given})
    assert environment.get("VLLM_PLUGINS") == added


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--api-key", KEY], "api-key"),
        (["--api_key", KEY], "api-key"),
        ([f"--api-key={KEY}"], "api-key"),
        ([f"--api-k={KEY}"], "api-key"),  # vLLM takes any beginning
        (["--seed", "1", "--middleware", "a.B"], "middleware"),
        (["--logprobs-mode=raw_logprobs"], "logprobs-mode"),
        (["--weight-transfer-config.backend", "nccl"], "weight-transfer-config"),
        (["--weight_transfer_config", "{}"], "weight-transfer-config"),
        (["--no-enable-scale-out"], "enable-scale-out"),
        (["--no-enable-sc"], "enable-scale-out"),
        (["--max-logp", "5"], "max-logprobs"),
        (["--hos", "0.0.0.0"], "host"),
        (["--mod", "other"], "model"),
        (["--ssl-keyfile", "x"], "ssl-keyfile"),
        (["--root-path", "/x"], "root-path"),
        (["--enable-lora"], "enable-lora"),
        (["--skip-tokenizer-init"], "skip-tokenizer-init"),
        (["--headless"], "headless"),
        (["--data-parallel-rank", "1"], "data-parallel-rank"),
    ],
)
def test_what_would_break_the_contract_is_refused(words: list[str], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM's --{flag} cannot be given here: ") as caught:
        serve_command(ServeArguments(model="m"), words)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("word", ["-dpe", "-dph", "-dpm", "-dpn", "-dpr"])
def test_short_forms_are_refused_too(word: str) -> None:
    with pytest.raises(ConfigError, match="through one address"):
        serve_command(ServeArguments(model="m"), [word])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param([], "model: not given. Write --model VALUE", id="no model"),
        pytest.param(["other/model", "--model", "m"], "unexpected argument 'other/model'", id="no option"),
        pytest.param(["--model", "m", "--port", "0"], "port=0: must be a number >= 1 and <= 65535", id="port"),
        pytest.param(["--model", "m", "--max_lora_rank", "0"], "max_lora_rank=0: must be", id="rank"),
        pytest.param(["--model", "m", "--start_timeout", "0"], "start_timeout=0.0: must be", id="timeout"),
        pytest.param(["--model", "m", "--gpu_memory_utilization", "90"], "must be a number > 0 and <= 1", id="share"),
        pytest.param(["--model", "m", "--log_level", "loud"], "log_level='loud': must be one of", id="level"),
        pytest.param(["--model", "m", "--speculative_config", "x"], "must be a JSON object", id="JSON"),
        pytest.param(["--model", "m"], "vLLM is not installed for", id="no vLLM"),
    ],
)
def test_what_cannot_work_is_one_line_on_stderr(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vllm-serve", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_on_macos_the_server_runs_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["vllm-serve", "--model", "m"]) == 2
    error = "prefrl vllm-serve: ConfigError: prefrl vllm-serve needs Linux, not macOS. Start prefrl vllm-serve on a "
    assert capsys.readouterr().err.startswith(error)


def test_an_unknown_option_in_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model: m\ntensor_parallel: 2\n", encoding="utf-8")
    assert main(["vllm-serve", "--config", str(file), "--dry_run"]) == 2
    assert f"{file}:2: unknown option 'tensor_parallel'. Did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "expected"), [("10.0.0.5", r"10\.0\.0\.5"), ("node7", "node7"), ("0.0.0.0", r"\d+\.\d+\.\d+\.\d+")]
)
def test_a_server_registers_an_address_that_others_can_reach(host: str, expected: str) -> None:
    found = vllm_serve._address(host)
    assert re.fullmatch(expected, found)
    assert found != "0.0.0.0"


def fake_distribution(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")


@pytest.mark.parametrize("version", ["0.31.2", "0.9.0"])
def test_an_old_vllm_is_refused(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_distribution(tmp_path, "vllm", version)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["vllm-serve", "--model", "m"]) == 2
    assert f"vLLM {version} is too old: prefrl needs at least 0.32" in capsys.readouterr().err


def test_experts_are_returned_by_the_runner_that_can(capsys: pytest.CaptureFixture[str]) -> None:
    variables, command = dry_run(capsys, "--model", "m", "--enable_return_routed_experts")
    assert variables["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "--enable-return-routed-experts" in command


def test_a_build_for_cpus_is_refused_if_experts_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_distribution(tmp_path, "vllm", "1.0.0+cpu")
    fake_distribution(tmp_path, "prefrl", "0.0.1", "[vllm.general_plugins]\nprefrl = prefrl.generation.vllm:plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["vllm-serve", "--model", "m", "--enable_return_routed_experts"]) == 2
    assert "enable_return_routed_experts=True: a CPU build of vLLM cannot" in capsys.readouterr().err


def test_a_prefrl_that_vllm_would_not_find_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_distribution(tmp_path, "vllm", "1.0.0")
    fake_distribution(tmp_path, "prefrl", "0.0.1", "[console_scripts]\nprefrl = prefrl.scripts.main:main\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["vllm-serve", "--model", "m"]) == 2
    assert "cannot find prefrl's plugin" in capsys.readouterr().err


def test_a_port_in_use_and_an_address_of_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_distribution(tmp_path, "vllm", "0.32.0+cpu")
    fake_distribution(tmp_path, "prefrl", "0.0.1", "[vllm.general_plugins]\nprefrl = prefrl.x:y\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert main(["vllm-serve", "--model", "m", "--port", port]) == 2
        assert f"port={port}: cannot listen there: Address already in use" in capsys.readouterr().err
    free = port  # by now
    (tmp_path / "file").touch()
    assert main(["vllm-serve", "--model", "m", "--port", free, "--join", str(tmp_path / "file")]) == 2
    assert f"join='{tmp_path}/file': File exists. Name a folder in which" in capsys.readouterr().err
    for join in ("", "dir:/shared/fleet", "s3://bucket/fleet"):
        assert main(["vllm-serve", "--model", "m", "--port", free, "--join", join]) == 2
        assert f"join={join!r}: must be a folder, such as /shared/fleet" in capsys.readouterr().err
    assert main(["vllm-serve", "--model", "m", "--host", "192.0.2.99"]) == 2
    assert "host='192.0.2.99', port=8000: cannot listen there" in capsys.readouterr().err
