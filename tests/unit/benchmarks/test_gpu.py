"""The run on a GPU: stages end at their deadlines, and what they measured is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_report, gpu_stages
from benchmarks.gpu import Stage, main
from benchmarks.gpu_stages import _tiny_workloads, lives, plans, shared
from benchmarks.workloads import CUDA_WORKLOADS
from prefrl.models.attention.interface import KERNELS

# What a stage does: it keeps a record, and goes on, ends or fails.
ENDS = {"sleeps": "import time; time.sleep(3600)", "ends": "", "fails": "raise SystemExit(1)"}


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stages, each with a record of its name and one of its three ends."""
    monkeypatch.setattr(gpu, "STAGES", {name: Stage(60, name) for name in ENDS})

    def command(name: str, options: Any, seconds: float) -> list[str]:
        record = (
            f"from benchmarks.gpu import Results; Results(Path({str(options.output)!r})).add({name!r}, {{'x': 1}})"
        )
        return [sys.executable, "-c", f"from pathlib import Path\n{record}\n{ENDS[name]}"]

    monkeypatch.setattr(gpu, "_command", command)


def run(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["--rehearse", "--output", str(path), *arguments])
    return code, json.loads(path.read_text())["stages"]


@pytest.mark.usefixtures("stages")
def test_a_stage_that_is_cut_has_left_its_figures_and_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []

    def wait(process: Any, timeout: float | None = None) -> int:
        """The deadline comes as soon as the stage has its record."""
        while timeout is not None and not json.loads((tmp_path / "a.json").read_text())["stages"]["sleeps"]["records"]:
            pass
        if timeout is not None:
            waited.append(timeout)
        return original(process, None if timeout is None else 0.0)

    original = gpu.subprocess.Popen.wait
    monkeypatch.setattr(gpu.subprocess.Popen, "wait", wait)
    code, stages = run(tmp_path / "a.json", "--only", "sleeps", "--minutes", "2")
    assert code == 0
    assert stages["sleeps"]["state"] == "cut"
    assert stages["sleeps"]["records"] == [{"x": 1}]
    assert 100 < waited[0] <= 120  # of the two minutes of all stages, not of the stage's sixty


@pytest.mark.usefixtures("stages")
def test_stages_go_on_after_one_that_fails_and_other_stages_are_kept(tmp_path: Path) -> None:
    code, stages = run(tmp_path / "a.json", "--only", "fails", "ends")
    assert code == 1
    assert {name: stage["state"] for name, stage in stages.items()} == {"fails": "failed", "ends": "complete"}
    code, stages = run(tmp_path / "a.json", "--only", "ends")
    assert code == 0
    assert {name: stage["records"] for name, stage in stages.items()} == {"fails": [{"x": 1}], "ends": [{"x": 1}]}


@pytest.mark.usefixtures("stages")
def test_a_stage_without_time_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, stages = run(tmp_path / "a.json", "--only", "ends", "--minutes", "0")
    assert (code, stages) == (0, {})
    assert "ends: left out" in capsys.readouterr().out


def test_figures_of_another_machine_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    results = gpu.Results(tmp_path / "a.json")
    results.begin({"machine": "one"}, ["steps"])
    results.start("steps")
    results.begin({"machine": "other"}, ["plans"])
    assert json.loads(results.path.read_text()) == {"environment": {"machine": "other"}, "stages": {}}


def test_each_plan_is_measured_with_each_kernel() -> None:
    records: list[dict[str, Any]] = []
    plans(records.append, rehearses=True)
    assert [found["kernel"] for found in records] == ["", *2 * [kernel.name for kernel in KERNELS[1:]]]
    for found in records:
        assert found["logprob_error"] < 1e-3
        assert found["gradient_error"] < 0.02
        assert found["ms"] > 0


def test_a_rehearsal_has_each_task_once() -> None:
    tasks = [workload.task for workload in _tiny_workloads()]
    assert sorted(tasks) == sorted({workload.task for workload in CUDA_WORKLOADS})


def test_a_stage_that_works_in_another_folder_finds_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert gpu._parse(["--output", "a.json"]).output == tmp_path / "a.json"
    assert gpu._parse(["--rehearse"]).output == tmp_path / "runs/gpu-rehearsal.json"


LOG = """\
INFO [gpu_worker.py:326] Sleep mode freed 1.00 GiB memory, 9.00 GiB memory is still in use.
INFO [abstract.py:390] It took 0.100000 seconds to fall asleep.
INFO [abstract.py:408] It took 0.200000 seconds to wake up tags ['weights'].
INFO [abstract.py:408] It took 0.300000 seconds to wake up tags ['kv_cache'].
INFO [gpu_worker.py:326] Sleep mode freed 12.50 GiB memory, 7.25 GiB memory is still in use.
INFO [abstract.py:390] It took 0.400000 seconds to fall asleep.
"""
METRICS = {"time/weight_sync_s": 0.7, "time/generation_s": 2.0, "step_time": 5.0}


def test_a_step_has_the_sleep_after_its_completions() -> None:
    expected = {"step": 1, "sync_s": 0.7, "generation_s": 2.0, "step_s": 5.0, "wake_weights_s": 0.2}
    expected |= {"wake_cache_s": 0.3, "sleep_s": 0.4, "freed_gib": 12.5, "held_gib": 7.25}
    logged = [{"step": 1, **METRICS}, {"step": 1, "train_loss": 0.0}]
    assert lives(LOG, logged) == [expected]
    of_cpu = "".join(line for line in LOG.splitlines(keepends=True) if "freed" not in line)
    (found,) = lives(of_cpu, logged)
    assert expected.items() - found.items() == {("freed_gib", 12.5), ("held_gib", 7.25)}
    table = gpu_report._shared([{"share": 0.4}, expected])
    assert table.startswith("The server had 0.40 of the memory.\n\n| step | waking for weights, s |")
    assert table.endswith("| 1 | 0.2 | 0.7 | 0.3 | 2 | 0.4 | 12.5 | 7.25 | 5 |")


HELD = {"context": 0.5, "libraries": 0.625, "held": 6.0, "allocated": 4.25, "counted": 4.625, "beside": 1.375}


def test_a_machine_without_vllm_measures_the_trainer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFRL_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(gpu_stages, "memory_of_training", lambda model, device: HELD)
    records: list[dict[str, Any]] = []
    shared(records.append, rehearses=True)
    assert [*records[1]] == ["left_out"]
    says, left_out = gpu_report._shared(records).split("\n\n")
    assert left_out.startswith("Not measured: vLLM")
    assert says.endswith("2.00 GiB aside for the rest and for the server's context, which suffices.")
    records[0]["beside_gib"] += 0.125
    assert "too little: correct `_CONTEXTS`" in gpu_report._shared(records)
