"""A trainer that is killed while a server samples for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import run_module
from tests.vllm.server import Server

pytestmark = pytest.mark.vllm


def test_a_killed_trainer_goes_on_exactly_with_a_server(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    job = {"url": server.url, "model_dir": str(server.model_dir), "folder": str(tmp_path), "kills": 5}
    output = run_module("tests.vllm.survival_worker", json.dumps(job))
    whole, killed, asked_again = json.loads(output.splitlines()[-1])
    assert set(killed) == {whole}
    assert asked_again == []
