from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.worker import Library, Machine, Measurement, Worker, WorkerError
from benchmarks.workloads import CPU_WORKLOADS, Workload
from tests.unit.benchmarks.conftest import measured, tiny

Measurements = dict[Library, Measurement]


def fake(*, missing: int = 0) -> Callable[..., Measurements]:
    """3 s by TRL and 1 s by prefrl, which leaves out some tokens."""

    def measure(workload: Workload, *, num_turns: int, machine: Machine) -> Measurements:
        seconds = (num_turns + 1) * [1.0]
        return {
            "trl": measured([3 * s for s in seconds], num_tokens=workload.num_tokens),
            "prefrl": measured(seconds, num_tokens=workload.num_tokens - missing, peak_mib=10.0),
        }

    return measure


def run(arguments: list[str], tmp_path: Path, **options: Any) -> tuple[int, dict[str, Any]]:
    code = main(["--jobs", "1", "--output", str(tmp_path / "out.json"), *arguments], **options)
    return code, json.loads((tmp_path / "out.json").read_text())


def test_equal_work_ends_well_even_if_a_gate_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, written = run(["--only", "reward", "dpo", "--turns", "2"], tmp_path, measure=fake())
    assert code == 0
    assert [row["name"] for row in written["rows"]] == ["dpo", "reward"]
    assert written["rows"][0]["trl"]["cpu_s"] == [3.0, 3.0]
    output = capsys.readouterr().out
    assert "**3.00** (3.00 to 3.00)" in output
    assert "Gates missed: dpo (time 3.00 < 3.2)." in output


def test_unequal_work_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, written = run(["--only", "grpo"], tmp_path, measure=fake(missing=1))
    assert code == 1
    assert written["rows"][0]["problems"] == ["prefrl ran [539] tokens in a turn, not 540"]
    assert "FAILED grpo: prefrl ran [539] tokens" in capsys.readouterr().err


def test_a_library_that_fails_does_not_stop_the_other_workloads(tmp_path: Path) -> None:
    def measure(workload: Workload, **options: Any) -> Measurements:
        if workload.name == "dpo":
            raise WorkerError("Traceback\nRuntimeError: no memory")
        return fake()(workload, **options)

    code, written = run(["--only", "dpo", "reward"], tmp_path, measure=measure)
    assert code == 1
    assert [bool(row["problems"]) for row in written["rows"]] == [True, False]


def test_quick_runs_the_main_workloads_with_fewer_turns(tmp_path: Path) -> None:
    _, written = run(["--quick"], tmp_path, measure=fake())
    turns = {row["name"]: len(row["trl"]["cpu_s"]) for row in written["rows"]}
    assert turns == {w.name: w.quick_turns for w in CPU_WORKLOADS if w.quick_turns}
    assert 0 < len(turns) < len(CPU_WORKLOADS)


def test_only_a_full_run_replaces_the_stored_results(tmp_path: Path) -> None:
    main(["--quick"], measure=fake(), results=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"cpu-part.json", "cpu-part.md"}
    main([], measure=fake(), results=tmp_path)
    assert len(json.loads((tmp_path / "cpu.json").read_text())["rows"]) == len(CPU_WORKLOADS)


MACHINE = Machine("cpu", (min(os.sched_getaffinity(0)),))


def test_a_process_takes_its_turns_and_sends_what_it_logged() -> None:
    with Worker(tiny("sft"), "prefrl", machine=MACHINE, num_turns=2) as worker:
        turns = [worker.turn(), worker.turn()]
        outcome = worker.outcome()
    assert outcome.num_tokens == (18, 18)
    assert all(0 < turn.cpu_s < 60 for turn in turns)


def test_a_process_that_fails_says_why() -> None:
    workload = tiny("dpo", options={"beta": -1.0})
    with (
        Worker(workload, "prefrl", machine=MACHINE, num_turns=1) as worker,
        pytest.raises(WorkerError, match="beta=-1"),
    ):
        worker.turn()


def test_a_process_that_dies_is_reported() -> None:
    with Worker(tiny("sft"), "prefrl", machine=MACHINE, num_turns=2) as worker:
        worker.turn()
        worker._process.kill()
        with pytest.raises(WorkerError, match="ended with code -9"):
            worker.turn()
