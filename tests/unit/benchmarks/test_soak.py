from __future__ import annotations

import json
import uuid
from pathlib import Path

from prefrl.scripts.launch.processes import kill_all, with_variable
from tests.launch import run_module


def test_a_signal_ends_all_servers_and_trainers_even_those_that_start(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    left = []
    try:
        codes = json.loads(
            run_module("tests.unit.benchmarks.soak_worker", "all", tmp_path, mark, seconds=300).splitlines()[-1]
        )
        left = with_variable("MARK_OF_TEST", mark)
    finally:
        kill_all(lambda: with_variable("MARK_OF_TEST", mark), seconds=10)
    assert left == []
    assert codes == [143, 130]
