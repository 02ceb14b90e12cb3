"""`vllm: auto` with the real vLLM: one command starts a server, trains with it, and leaves nothing behind."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

import pytest

from prefrl.scripts.launch.processes import with_variable
from tests.launch import run
from tests.vllm.server import PYTHON, environment, free_port

pytestmark = pytest.mark.vllm

# Tries to reach the server without the key, like anybody else on the machine.
REWARD = """
import urllib.error, urllib.request
from pathlib import Path

def length(completions, **columns):
    try:
        urllib.request.urlopen("http://127.0.0.1:{port}/is_paused")
    except urllib.error.HTTPError as error:
        Path("{answer}").write_text(str(error.code))
    return [float(len(text)) for text in completions]
"""
RUN = """
model_name_or_path: {model}
dataset_name: {folder}/prompts.jsonl
reward_funcs: [{folder}/reward.py:length]
output_dir: {folder}/run
vllm: auto
vllm_python: {python}
vllm_args: --dtype float32 --enforce_eager --max_model_len 64
vllm_server_port: {port}
use_cpu: true
max_steps: 1
num_generations: 4
max_completion_length: 8
per_device_train_batch_size: 4
save_strategy: 'no'
"""


def test_one_command_starts_a_server_trains_and_ends_it(tied_model: Path, tmp_path: Path) -> None:
    port, mark, answer = free_port(), uuid.uuid4().hex, tmp_path / "answer"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n' * 4)
    (tmp_path / "reward.py").write_text(REWARD.format(port=port, answer=answer))
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(model=tied_model, folder=tmp_path, python=PYTHON, port=port))
    variables = environment(key=None) | {"MARK_OF_TEST": mark}
    run([sys.executable, "-m", "prefrl.scripts.main", "grpo", str(file)], environment=variables)
    assert (tmp_path / "run/model.safetensors").exists()
    logs = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any("sampling/sampling_logp_difference/mean" in entry for entry in logs)  # sampled on the server
    assert answer.read_text(encoding="utf-8") == "401"
    assert with_variable("MARK_OF_TEST", mark) == []
