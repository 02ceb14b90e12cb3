"""The curves of the docs."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.curves import FIGURES, ROOT, RUNS, curve, main
from prefrl.registry import REGISTRY
from prefrl.run.folder import append_metrics


def heights(figure: str) -> list[float]:
    """How far the points of a curve are from the top."""
    (points,) = re.findall(r'<polyline points="([^"]+)"', figure)
    return [float(point.partition(",")[2]) for point in points.split()]


def test_the_largest_value_is_at_the_top_and_zero_on_its_line() -> None:
    figure = curve([(0, 0.0), (1, 0.5), (2, 1.0)], "reward")
    zero, half, one = heights(figure)
    assert zero - half == half - one > 0
    assert f'y1="{zero}"' in figure
    assert ">0<" in figure
    assert ">1<" in figure


def test_a_long_run_is_drawn_by_means_of_its_neighbors() -> None:
    points = heights(curve([(step, float(step % 5)) for step in range(1000)], "reward"))
    assert len(points) == 200  # each a mean of five
    assert len({*points}) == 1


def test_the_curve_is_that_of_the_last_run_in_the_folder(tmp_path: Path) -> None:
    for run, reward in (("a", 8.0), ("b", 1.0)):
        for step in (1, 2):
            append_metrics(tmp_path, {"run": run, "step": step, "loss": 0.5, "reward": reward * step})
    main([str(tmp_path), "reward", str(tmp_path / "reward.svg")])
    assert (tmp_path / "reward.svg").read_text(encoding="utf-8") == curve([(1, 1.0), (2, 2.0)], "reward")


def test_the_page_of_every_trainer_shows_its_curve() -> None:
    assert RUNS.keys() == REGISTRY.keys()
    for name, row in REGISTRY.items():
        assert f"(../figures/{name}.svg)" in (ROOT / row.docs).read_text(encoding="utf-8")
        assert (FIGURES / f"{name}.svg").exists()
