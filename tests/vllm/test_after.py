"""`prefrl eval`, `prefrl generate` and `prefrl doctor` with a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefrl.scripts import commands, eval, sampling
from tests.vllm.server import Server

pytestmark = pytest.mark.vllm


def test_a_server_answers_texts_and_its_model_is_found(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    prompts, answered = tmp_path / "prompts.jsonl", tmp_path / "answered.jsonl"
    prompts.write_text('{"prompt": "1+1=", "data_source": "sums"}\n{"prompt": "2+3=", "data_source": "more"}\n')
    asking = ["--server", f"{server.url}/v1", "--dataset_name", str(prompts), "--num_generations", "2"]
    asking += ["--max_completion_length", "4"]
    assert sampling.generate([*asking, "--output_file", str(answered)]) == 0
    rows = [json.loads(line) for line in answered.read_text(encoding="utf-8").splitlines()]
    assert [len(row["responses"]) for row in rows] == [2, 2]
    (tmp_path / "rewards.py").write_text("def size(completions, **_): return [len(text) for text in completions]\n")
    rewards = ["--reward_funcs", f"{tmp_path}/rewards.py:size", "--output_dir"]
    assert eval.main([*asking, *rewards, str(tmp_path / "server")]) == 0
    assert eval.main(["--dataset_name", str(answered), *rewards, str(tmp_path / "file")]) == 0
    of_server, of_file = (
        json.loads((tmp_path / name / "metrics.json").read_text(encoding="utf-8")) for name in ("server", "file")
    )
    assert of_server == of_file  # the same seeds
    assert list(of_file) == ["all", "more", "sums"]


def test_the_doctor_finds_the_server_and_its_model_and_notices_a_wrong_key(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+3=", "answer": "5"}\n', encoding="utf-8")
    options = ["--dataset_name", str(prompts), "--reward_funcs", "numeric_reward", "--num_generations", "4"]
    options += ["--max_completion_length", "4", "--use_cpu", "--output_dir", str(tmp_path / "run"), "--use_vllm"]
    options += ["--vllm_server_base_url", server.url]
    assert commands.doctor(["grpo", "--model_name_or_path", str(server.model_dir), *options]) == 0
    found = " ".join(capsys.readouterr().out.split())
    assert f"{server.url} serves {server.model_dir}" in found
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    assert commands.doctor(["grpo", "--model_name_or_path", str(server.model_dir), *options]) == 2
    assert "refused the request" in " ".join(capsys.readouterr().out.split())
