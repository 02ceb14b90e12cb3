"""Small pictures of curves for the docs: python -m benchmarks.curves RUN/metrics.jsonl METRIC FIGURE.svg.

The pictures have no background and middle tones, so that they can be read on light and on dark pages.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

__all__ = ["curve", "main"]

_WIDTH, _HEIGHT = 560, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 24, 34  # margins
_POINTS = 200  # of a curve at most; each is a mean of neighbors


def main(argv: Sequence[str] | None = None) -> None:
    """Draw one metric of a run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("metric")
    parser.add_argument("figure", type=Path)
    parser.add_argument("--where", help="only lines of the file with this value, such as stage=grpo")
    options = parser.parse_args(argv)
    rows = [json.loads(line) for line in options.metrics.read_text(encoding="utf-8").splitlines()]
    if options.where is not None:
        key, _, value = options.where.partition("=")
        rows = [row for row in rows if row.get(key) == value]
    found = [(row["step"], row[options.metric]) for row in rows if row.get(options.metric) is not None]
    options.figure.write_text(curve(found, options.metric), encoding="utf-8")


def curve(points: Sequence[tuple[float, float]], title: str) -> str:
    """An SVG of values by step.

    Args:
        points: Step and value, in the order of the steps.
        title: Written above the curve.
    """
    size = math.ceil(len(points) / _POINTS)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    steps = [sum(step for step, _ in part) / len(part) for part in parts]
    values = [sum(value for _, value in part) / len(part) for part in parts]
    low, high = min(0.0, *values), max(values)
    unit = _unit(high - low)
    low, high = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    last = points[-1][0]

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, values, strict=True))
    marks = [low + i * unit for i in range(round((high - low) / unit) + 1)]
    grid = [f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>' for mark in marks]
    names = [f'<text x="{_LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:.4g}</text>' for mark in marks]
    names += [
        f'<text x="{x(step):.1f}" y="{_HEIGHT - 14}" text-anchor="{anchor}">{text}</text>'
        for step, anchor, text in ((0, "middle", "0"), (last, "end", f"step {last:g}"))
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
            'font-size="12" fill="#7f8793">',
            f'<text x="{_LEFT}" y="15" font-weight="bold">{escape(title)}</text>',
            f'<g stroke="#7f8793" stroke-opacity="0.3">{"".join(grid)}</g>',
            *names,
            f'<polyline points="{line}" fill="none" stroke="#3b82f6" stroke-width="2" stroke-linejoin="round"/>',
            "</svg>\n",
        ]
    )


def _unit(span: float) -> float:
    """A round distance of about four marks on an axis."""
    power = 10.0 ** math.floor(math.log10(span / 4)) if span else 1.0
    return next((power * factor for factor in (1, 2, 5) if span / (power * factor) <= 5), power * 10)


if __name__ == "__main__":
    main()
