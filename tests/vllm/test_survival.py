"""A trainer that is killed while a server samples for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.server import Server

pytestmark = pytest.mark.vllm


def test_a_killed_trainer_goes_on_exactly_with_a_server(tmp_path: Path, server: Server) -> None:
    job = {"url": server.url, "model_dir": str(server.model_dir), "folder": str(tmp_path), "kills": 5}
    command = [sys.executable, "-m", "tests.vllm.survival_worker", json.dumps(job)]
    environment = os.environ | {"VLLM_API_KEY": server.key}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, killed, asked_again = json.loads(done.stdout.splitlines()[-1])
    assert set(killed) == {whole}
    assert asked_again == []
