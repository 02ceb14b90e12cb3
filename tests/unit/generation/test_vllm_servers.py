"""URLs of servers, and the command that starts the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefrl.errors import ConfigError
from prefrl.generation.vllm.client import VLLMGenerator
from prefrl.generation.vllm.handshake import Requirements, check_server_url
from prefrl.generation.weights.sync import WeightSync
from prefrl.http import Http
from tests.assets import tiny_model, tiny_tokenizer


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
