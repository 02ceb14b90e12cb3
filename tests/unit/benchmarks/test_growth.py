from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.growth import AXES, Point, figure_of, lengths_of, main, workload_at, workloads
from benchmarks.report import Figures, Report, Row, failed_row
from benchmarks.worker import Library, Machine, Measurement
from benchmarks.workloads import CPU_WORKLOADS, LENGTHS, Gate, Workload
from tests.unit.benchmarks.conftest import measured

Measurements = dict[Library, Measurement]


@pytest.fixture
def report() -> Report:
    """By hand: TRL's seconds are the number of completions and its MiB the vocabulary, prefrl's half and a quarter."""

    def figures(point: Point, part: float) -> Figures:
        return Figures((point.num_completions * part,), (99.0,), point.vocab_size * part**2, 540, 0.5, 2.0)

    points = {point.name: point for axis in AXES for point in axis.points()}
    rows = [
        Row(name, name, Gate(), trl=figures(point, 1.0), prefrl=figures(point, 0.5)) for name, point in points.items()
    ]
    return Report({"machine": "this one"}, rows)


def fake(*, missing_at: str = "") -> Callable[..., Measurements]:
    """Equal work but for one point, where prefrl leaves out a token."""

    def measure(workload: Workload, *, num_turns: int, machine: Machine) -> Measurements:
        seconds = (num_turns + 1) * [1.0]
        ran = workload.num_tokens - (workload.name == missing_at)
        return {
            "trl": measured(seconds, num_tokens=workload.num_tokens),
            "prefrl": measured(seconds, num_tokens=ran),
        }

    return measure


def test_each_axis_changes_one_size_of_the_base_point() -> None:
    base = ("grpo_loss", 8, 256, 128, 8192, 1)
    expected = {base}
    expected |= {("grpo_loss", g, 256, 128, 8192, 1) for g in (2, 4, 16, 32)}
    expected |= {("grpo_loss", 8, p, 128, 8192, 1) for p in (64, 512, 1024, 2048)}
    expected |= {("grpo_loss", 8, 256, t, 8192, 1) for t in (64, 256, 512, 1024)}
    expected |= {("grpo_loss", 8, 256, 128, v, 1) for v in (32768, 65536, 151936)}
    sizes = [
        (w.task, len(w.lengths), w.prompt_length, max(w.lengths), w.model.vocab_size, w.num_prompts)
        for w in workloads()
    ]
    assert len(sizes) == len(expected)  # the base point lies on all axes and is measured once
    assert set(sizes) == expected
    assert len({w.name for w in workloads()}) == len(sizes)


def test_the_base_point_is_the_main_benchmarks_loss_step() -> None:
    main_step = next(workload for workload in CPU_WORKLOADS if workload.name == "grpo_loss")
    base = workload_at(Point())
    assert (base.model, base.lengths, base.prompt_length) == (main_step.model, LENGTHS, main_step.prompt_length)
    assert base.options == main_step.options


@pytest.mark.parametrize(
    ("point", "lengths"),
    [
        (Point(num_completions=2), (16, 128)),
        (Point(num_completions=4), (16, 40, 90, 128)),
        (Point(num_completions=16), tuple(length for length in LENGTHS for _ in range(2))),
        (Point(completion_length=64), (8, 14, 20, 28, 36, 45, 55, 64)),
        (Point(completion_length=1024), (128, 224, 320, 448, 576, 720, 880, 1024)),
    ],
)
def test_lengths_keep_their_spread(point: Point, lengths: tuple[int, ...]) -> None:
    assert lengths_of(point) == lengths


@pytest.mark.parametrize("num_completions", [2, 4, 8, 16, 32])
def test_more_completions_are_not_longer_ones(num_completions: int) -> None:
    lengths = lengths_of(Point(num_completions=num_completions))
    assert sum(lengths) / len(lengths) == pytest.approx(67.5, abs=5.0)


def test_a_run_stores_one_timed_turn_of_each_point_and_draws(tmp_path: Path) -> None:
    figure = tmp_path / "figures" / "growth.svg"
    assert main(["--jobs", "1"], measure=fake(), results=tmp_path, figure=figure) == 0
    written = json.loads((tmp_path / "growth.json").read_text())
    assert written["environment"].keys() >= {"machine", "commit", "trl", "torch", "prefrl"}
    assert [row["name"] for row in written["rows"]] == [workload.name for workload in workloads()]
    assert {len(row[library]["cpu_s"]) for row in written["rows"] for library in ("trl", "prefrl")} == {1}
    assert figure.exists()


def test_unequal_work_at_one_point_fails_the_run_and_draws_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "growth.svg"
    name = "g8_p256_t512_v8192"
    assert main(["--jobs", "1"], measure=fake(missing_at=name), results=tmp_path, figure=figure) == 1
    errors = capsys.readouterr().err
    assert f"FAILED {name}: prefrl ran [2159] tokens in a turn, not 2160" in errors  # 4 times 540, less 1
    assert errors.count("FAILED") == 1
    assert not figure.exists()


def test_a_stored_run_that_failed_is_not_drawn(tmp_path: Path, report: Report) -> None:
    report.rows[3] = failed_row(workloads()[3], RuntimeError("no memory"))
    report.write(tmp_path / "growth.json")
    figure = tmp_path / "growth.svg"
    assert main(["--plot-only"], results=tmp_path, figure=figure) == 1
    assert not figure.exists()


def test_plot_only_draws_the_stored_run_in_the_same_bytes_each_time(tmp_path: Path, report: Report) -> None:
    def never(*_: Any, **__: Any) -> Measurements:
        raise AssertionError("--plot-only measures nothing")

    report.write(tmp_path / "growth.json")
    figures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for figure in figures:
        assert main(["--plot-only"], measure=never, results=tmp_path, figure=figure) == 0
    drawn = figures[0].read_bytes()
    assert drawn == figures[1].read_bytes()
    assert b"<svg" in drawn
    assert b"<dc:date>" not in drawn
    assert len(drawn) < 300_000


def test_lines_show_seconds_above_and_memory_below(report: Report) -> None:
    panels = figure_of(report).axes
    lines = {line.get_label(): line for line in panels[0].get_lines()}
    assert list(lines) == ["TRL 1.16", "prefrl"]
    assert lines["TRL 1.16"].get_xydata().tolist() == [[g, g] for g in (2, 4, 8, 16, 32)]
    assert lines["prefrl"].get_xydata().tolist() == [[g, g / 2] for g in (2, 4, 8, 16, 32)]
    trl, prefrl = panels[7].get_lines()
    assert trl.get_ydata().tolist() == [8192, 32768, 65536, 151936]
    assert prefrl.get_ydata().tolist() == [2048, 8192, 16384, 37984]


def test_a_column_is_named_by_its_size_and_both_its_scales_are_logarithmic(report: Report) -> None:
    panels = figure_of(report).axes
    assert [panel.get_xlabel() for panel in panels[4:]] == [axis.title for axis in AXES]
    assert {(panel.get_xscale(), panel.get_yscale()) for panel in panels} == {("log", "log")}
    assert [tick.get_text() for tick in panels[7].get_xticklabels()] == ["8,192", "32,768", "65,536", "151,936"]


def test_between_the_lines_stands_how_many_times_trl_needs_what_prefrl_needs(report: Report) -> None:
    panels = figure_of(report).axes
    assert [[text.get_text() for text in panel.texts] for panel in panels] == [["2.0x"] * 2] * 4 + [["4.0x"] * 2] * 4
