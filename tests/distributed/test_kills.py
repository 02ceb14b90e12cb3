"""One of two processes is killed, the other ends by itself, and the run goes on exactly."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launch import run_module

# With ZeRO-3, both share the tokens of every row.
KILLS = {"ddp": 1, "zero3_sp2": 1}


def test_runs_of_two_processes_survive_the_kill_of_one(tmp_path: Path) -> None:
    argv = [str(item) for pair in KILLS.items() for item in pair]
    results = json.loads(run_module("tests.distributed.kill_worker", tmp_path, *argv).splitlines()[-1])
    assert {result["backend"]: result["kills"] for result in results} == KILLS
    for result in results:
        assert set(result["killed"]) == {result["whole"]}, result
