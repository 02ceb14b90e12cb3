from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import (
    BEGIN,
    END,
    Report,
    Row,
    failed_row,
    measured_row,
    replace_between_markers,
    row_of,
    unequal_work,
)
from benchmarks.worker import WorkerError
from benchmarks.workloads import Gate, Task
from tests.unit.benchmarks.conftest import measured, tiny

TOKENS = 2 + 7 + 4 + 5


def row(gate: Gate | None = None, *, task: Task = "grpo_loss", make: Any = row_of, **prefrl: Any) -> Row:
    """Pairs of 6/2, 8/2 and 10/2 seconds after a warm-up of 100/1; memory 100/25."""
    workload = replace(tiny(task), gate=gate or Gate())
    arguments = {"seconds": (1.0, 2.0, 2.0, 2.0), "num_tokens": TOKENS, "peak_mib": 25.0} | prefrl
    measurements = {"trl": measured((100.0, 6.0, 8.0, 10.0), num_tokens=TOKENS), "prefrl": measured(**arguments)}
    made: Row = make(workload, measurements)
    return made


def test_ratios_are_of_turns_that_followed_each_other_without_the_warm_up() -> None:
    assert row(seconds=(1.0, 2.0, 4.0, 1.0)).ratios() == [3.0, 2.0, 10.0]


def test_memory_ratio_is_of_the_highest_peaks() -> None:
    assert row().memory_ratio() == 4.0


def test_a_gpu_is_timed_by_the_clock_on_the_wall() -> None:
    assert row(make=measured_row).seconds("trl") == (60.0, 80.0, 100.0)
    assert row().seconds("trl") == (6.0, 8.0, 10.0)


def test_bfloat16_may_round_otherwise_by_three_percent() -> None:
    assert row(make=measured_row, grad_norm=2.05).problems == ()
    assert row(make=measured_row, grad_norm=2.1).problems == ("grad_norm differs: TRL 2.0, prefrl 2.1",)
    assert row(grad_norm=2.05).problems != ()


def test_a_library_that_fails_leaves_the_figures_of_the_other() -> None:
    workload = tiny("grpo_loss")
    found = {
        "trl": WorkerError("Traceback\nOutOfMemoryError: no memory"),
        "prefrl": measured((1.0, 2.0), num_tokens=TOKENS),
    }
    half = measured_row(workload, found)
    assert half.problems == ("trl: OutOfMemoryError: no memory",)
    assert half.trl is None
    assert half.prefrl is not None
    assert half.prefrl.wall_s == (20.0,)


@pytest.mark.parametrize(
    ("gate", "misses"),
    [
        (Gate(), []),
        (Gate(must=4.0, memory=4.0), []),  # the median is 4, the mean too; the memory ratio is 4
        (Gate(must=4.01, aim=9.0), ["time 4.00 < 4.01"]),
        (Gate(must=3.0, aim=9.0, memory=4.01), ["memory 4.00 < 4.01"]),
        (Gate(must=5.0, memory=5.0), ["time 4.00 < 5", "memory 4.00 < 5"]),
    ],
)
def test_a_gate_is_met_from_its_ratio_on_and_the_aim_is_no_gate(gate: Gate, misses: list[str]) -> None:
    assert row(gate).misses() == misses


def test_a_gate_is_about_the_median() -> None:
    assert row(Gate(must=3.0), seconds=(1.0, 2.0, 0.01, 4.0)).misses() == []  # 3, 800, 2.5
    assert row(Gate(must=3.01), seconds=(1.0, 2.0, 0.01, 4.0)).misses() == ["time 3.00 < 3.01"]


def test_cells_of_a_row() -> None:
    assert row(Gate(must=5.0, aim=8.0, memory=1.5)).cells() == [
        "grpo_loss",
        "8.00",
        "2.00",
        "**4.00** (3.00 to 5.00)",
        "100",
        "25",
        "**4.00**",
    ]


@pytest.mark.parametrize(
    ("task", "prefrl", "message"),
    [
        ("grpo_loss", {"num_tokens": TOKENS - 1}, r"prefrl ran \[17\] tokens in a turn, not 18"),
        ("grpo", {"num_tokens": TOKENS + 1}, r"prefrl ran \[19\] tokens in a turn, not 18"),
        ("grpo_loss", {"grad_norm": 2.0 * (1 + 2e-4)}, "grad_norm differs: TRL 2.0"),
        ("grpo_loss", {"loss": 0.5 * (1 - 2e-4)}, "loss differs: TRL 0.5"),
        ("grpo_loss", {"loss": float("nan")}, "loss differs: TRL 0.5, prefrl nan"),
        ("grpo_loss", {"grad_norm": None}, "grad_norm differs: TRL 2.0, prefrl None"),
    ],
)
def test_unequal_work_has_no_ratio(task: Task, prefrl: dict[str, Any], message: str) -> None:
    failed = row(Gate(must=1.0), task=task, **prefrl)
    assert len(failed.problems) == 1
    assert re.match(message, failed.problems[0])
    assert failed.cells()[1].startswith("**failed**")
    assert set(failed.cells()[2:]) == {""}


def test_rounding_is_no_unequal_work() -> None:
    assert row(grad_norm=2.0 * (1 + 5e-5), loss=0.5 * (1 + 5e-5)).problems == ()


def test_tasks_that_sample_are_compared_by_their_tokens_alone() -> None:
    assert row(task="grpo", grad_norm=3.0).problems == ()
    assert row(task="generation", loss=None, grad_norm=None).problems == ()


def test_a_loss_next_to_zero_needs_no_equal_digits() -> None:
    both = {"trl": measured((1.0,), num_tokens=TOKENS, loss=3e-8)}
    both["prefrl"] = measured((1.0,), num_tokens=TOKENS, loss=-2e-8)
    assert unequal_work(tiny("grpo_loss"), both, tolerance=1e-4) == []


def test_offline_tasks_are_counted_by_what_the_libraries_log() -> None:
    num_tokens = TOKENS + 4 * 6  # each row with its prompt
    assert row(task="dpo").problems[0] == f"trl ran [18] tokens in a turn, not {num_tokens}"
    both = {"trl": measured((1.0,), num_tokens=num_tokens), "prefrl": measured((1.0,), num_tokens=num_tokens)}
    assert unequal_work(tiny("dpo"), both, tolerance=1e-4) == []


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    failed = failed_row(tiny("sft"), RuntimeError("Traceback\nValueError: no"))
    report = Report({"machine": "this one"}, [row(Gate(must=3.0)), failed])
    report.write(tmp_path / "new" / "cpu.json")
    assert Report.read(tmp_path / "new" / "cpu.json") == report
    table = (tmp_path / "new" / "cpu.md").read_text()
    assert table == report.markdown()
    assert "| sft | **failed**: ValueError: no |" in table
    assert table.endswith("Measured on: machine this one.\n")
    assert [r.name for r in report.failed()] == ["sft"]
    assert report.missed() == []


def test_the_table_goes_between_the_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        replace_between_markers(page, "| new |")
        assert page.read_text() == f"before\n{BEGIN}\n| new |\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["", BEGIN, END + BEGIN, BEGIN + END + END, BEGIN + BEGIN + END])
def test_a_page_without_its_two_markers_is_refused(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md: needs"):
        replace_between_markers(page, "new")
    assert page.read_text() == text
