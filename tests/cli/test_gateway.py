"""`prefrl gateway`: from a folder with a model to sessions that SFT and DPO are trained on."""

from __future__ import annotations

import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import openai
import pyarrow.parquet as pq
import pytest

from prefrl.errors import ConfigError, GenerationError
from prefrl.generation.base import SamplingParams
from prefrl.http import Http, Refused
from prefrl.rollout.gateway.formats import RequestError
from prefrl.scripts import gateway
from prefrl.scripts.main import main
from tests.patience import PATIENCE

QUICK = ["--use_cpu", "--max_steps", "1", "--logging_steps", "1", "--save_strategy", "no"]


def test_sessions_of_a_served_model_are_data_for_sft_and_dpo(
    workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waves: list[int] = []
    failures: list[BaseException] = []

    def play(url: str, number: int) -> None:
        key = f"key {number}"
        with openai.OpenAI(base_url=url, api_key=key, timeout=PATIENCE) as api:
            asked: Any = {"model": "any", "messages": [{"role": "user", "content": "What is 20 + 3?"}]}
            api.chat.completions.create(**asked, max_tokens=3 + number % 3, temperature=(0.5, 1.0)[number % 2])
        scored = httpx.post(f"{url}/reward", json={"reward": number}, headers={"authorization": f"Bearer {key}"})
        assert scored.status_code == 200

    def play_all(url: str) -> None:
        try:
            with ThreadPoolExecutor(6) as pool:
                list(pool.map(lambda number: play(url, number), range(6)))
            assert httpx.post(f"{url}/chat/completions", json={}).status_code == 401
            assert len(pq.read_table("sessions")) == 6  # while the server goes on
        except BaseException as error:
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def serve(source: Any) -> None:
        sample = source._generator.generate

        def noted(prompts: Any, *more: Any, **named: Any) -> Any:
            waves.append(len(prompts))
            return sample(prompts, *more, **named)

        source._generator.generate = noted
        url = re.search(r"OpenAI: (\S+)", capsys.readouterr().out)
        assert url is not None
        Thread(target=play_all, args=(url[1],)).start()
        own_serve(source)

    own_serve = gateway._Waves.serve
    monkeypatch.setattr(gateway._Waves, "serve", serve)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["gateway", "--model", str(model_folder), "--port", "0"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert not failures
    assert sum(waves) == 6
    assert "6 sessions are in sessions." in capsys.readouterr().out
    rows = pq.read_table("sessions").to_pylist()
    assert sorted((row["reward"], row["tokens"]) for row in rows) == [(n, 3.0 + n % 3) for n in range(6)]

    model = ["--model_name_or_path", str(model_folder)]
    assert main(["sft", *model, "--dataset_name", "sessions", *QUICK, "--output_dir", "sft"]) == 0
    assert main(["pairs", "sessions", "pairs.parquet"]) == 0
    (pair,) = pq.read_table("pairs.parquet").to_pylist()
    assert (pair["reward_chosen"], pair["reward_rejected"]) == (5.0, 0.0)
    assert main(["dpo", *model, "--dataset_name", "pairs.parquet", *QUICK, "--output_dir", "dpo"]) == 0
    capsys.readouterr()
    assert main(["look", "sessions", "--best", "1"]) == 0
    shown = capsys.readouterr().out
    assert "6 sessions: 6 completions, reward 0 to 5, mean 2.5" in shown
    assert "user: What is 20 + 3?" in shown


def test_what_cannot_be_served_is_refused(
    workspace: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["gateway", str(model_folder), "--port", str(port)]) == 2
    assert f"port={port}: Address already in use. Choose another port, or 0" in capsys.readouterr().err
    assert main(["gateway", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    (workspace / "no_pairs.jsonl").write_text('{"prompt": "a", "completion": "b", "reward": 1}\n', encoding="utf-8")
    assert main(["pairs", "no_pairs.jsonl", "pairs.parquet"]) == 2
    assert "none of its 1 rows, 1 of which have a reward" in capsys.readouterr().err
    assert main(["pairs", "no_pairs.jsonl", "pairs.json"]) == 2
    assert "output_file='pairs.json': must end in .parquet" in capsys.readouterr().err


def test_a_vllm_server_gets_and_returns_ids(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    choices = [
        {"token_ids": [7, 8], "finish_reason": "length", "stop_reason": None},
        {"token_ids": [7, 1], "finish_reason": "stop", "stop_reason": None},
        {"token_ids": [7], "finish_reason": "stop", "stop_reason": "!"},
        {"text": "no ids", "finish_reason": "stop"},
    ]

    class Wire(Http):
        def request(self, method: str, url: str, **options: Any) -> Any:
            return {"data": [{"id": "served", "root": str(model_folder), "max_model_len": 64}]}

        async def send(self, method: str, url: str, **options: Any) -> Any:
            asked.append({"url": url, **options["json"]})
            if options["json"]["temperature"] > 2:
                raise Refused("temperature must be in [0, 2]", status=400)
            return {"choices": [choices[len(asked) - 1]]}

    monkeypatch.setattr("prefrl.http.Http", Wire)
    source = gateway._Remote(gateway.GatewayArguments(server="http://127.0.0.1:8000/v1"))
    assert (source.name, source.context_limit) == (str(model_folder), 64)
    sampling = SamplingParams(1, 9, temperature=0.5, stop=("!",))
    found = [source.ask([3, 4], sampling, 2**31 + 5).result(PATIENCE) for _ in choices[:3]]
    assert [(one.token_ids, one.finish_reason) for one in found] == [
        ([7, 8], "length"),
        ([7, 1], "stop"),
        ([7], "stop_string"),
    ]
    with pytest.raises(GenerationError, match="returns no token_ids"):
        source.ask([3, 4], sampling, 0).result(PATIENCE)
    with pytest.raises(RequestError, match=r"temperature must be in \[0, 2\]") as refused:
        source.ask([3, 4], SamplingParams(1, 9, temperature=5.0), 0).result(PATIENCE)
    assert refused.value.status == 400  # with 500, clients ask again
    expected = {"model": "served", "prompt": [3, 4], "max_tokens": 9, "temperature": 0.5, "seed": 5, "stop": ["!"]}
    assert expected.items() <= asked[0].items()
    assert asked[0]["url"] == "http://127.0.0.1:8000/v1/completions"
    with pytest.raises(ConfigError, match="model_name_or_path='nowhere': its tokenizer cannot be loaded"):
        gateway._Remote(gateway.GatewayArguments(model_name_or_path="nowhere", server="http://127.0.0.1:8000/v1"))
