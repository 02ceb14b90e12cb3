"""Small pictures of curves for the docs. They can be read on light and on dark pages.

python -m benchmarks.curves                          a tiny run of every trainer: a minute of CPU time
python -m benchmarks.curves RUN METRIC FIGURE.svg    one metric of a run
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from prefrl.registry import REGISTRY
from prefrl.run.folder import read_metrics

__all__ = ["curve", "curves", "draw", "main", "train"]

Point = tuple[float, float]  # step and value

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
_WIDTH, _HEIGHT = 560, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 24, 34  # margins
_POINTS = 200  # of a curve at most; each is a mean of neighbors
_COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ec4899")


# The metric that is drawn, and options that differ from those of all.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("loss", {}),
    "dpo": ("rewards/accuracies", {}),
    "kto": ("rewards/margins", {}),
    "orpo": ("rewards/margins", {}),
    "cpo": ("rewards/margins", {}),
    "bco": ("rewards/margins", {}),
    "reward": ("accuracy", {}),
    **dict.fromkeys(("grpo", "rloo", "reinforce_plus_plus"), ("reward", {"num_generations": 8})),
    "ppo": ("reward", {"critic_learning_rate": 1e-3}),
    "online_dpo": ("reward", {}),
    "distillation": ("divergence", {}),
}
ON_PROMPTS = ("grpo", "rloo", "reinforce_plus_plus", "ppo", "online_dpo", "distillation")


def main(argv: Sequence[str] | None = None) -> None:
    """Draw one metric of a run, or train and draw all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("metric", nargs="?")
    parser.add_argument("figure", type=Path, nargs="?")
    options = parser.parse_args(argv)
    if options.run is not None:
        draw(options.run, options.metric, options.figure)
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(ROOT / "examples/first_run.py"), folder], check=True)
        for name, (metric, own) in RUNS.items():
            train(name, Path(folder), **own)
            draw(Path(folder) / name, metric, FIGURES / f"{name}.svg")


def train(name: str, folder: Path, **options: Any) -> None:
    """Train the model of examples/first_run.py on sums, with any trainer; it teaches a model with random weights."""
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from prefrl.rewards import numeric_reward

    config = REGISTRY[name].load_config()(
        output_dir=str(folder / name),
        max_steps=60,
        per_device_train_batch_size=128 if name in ON_PROMPTS else 32,
        learning_rate=1e-3 if name in ON_PROMPTS else 3e-4,
        logging_steps=2,
        save_strategy="no",
        use_cpu=True,
        **({"max_completion_length": 4, "temperature": 1.0} if name in ON_PROMPTS else {}),
        **options,
    )
    more: dict[str, Any] = {"reward_funcs": numeric_reward} if name in ON_PROMPTS else {}
    data, model = Dataset.from_list([*_rows(name)]), str(folder / "model")
    student: Any = model
    if name == "distillation":
        student = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        more |= {"teacher_model": model, "processing_class": AutoTokenizer.from_pretrained(model)}
    REGISTRY[name].load_trainer()(student, args=config, train_dataset=data, **more).train()


def _rows(name: str) -> Iterator[dict[str, Any]]:
    """Sums with right and wrong answers, in the form that a trainer reads."""
    chance = random.Random(0)
    for a, b in [(a, b) for a in range(1, 10) for b in range(1, 10)] * 4:
        prompt = [{"role": "user", "content": f"{a} + {b} ="}]
        wrong = chance.choice([number for number in range(2, 19) if number != a + b])
        right, rejected = ([{"role": "assistant", "content": str(number)}] for number in (a + b, wrong))
        if name in ON_PROMPTS:
            yield {"prompt": prompt, "answer": str(a + b)}
        elif name == "sft":
            yield {"prompt": prompt, "completion": right}
        elif name in ("kto", "bco"):
            yield from ({"prompt": prompt, "completion": c, "label": c is right} for c in (right, rejected))
        else:
            yield {"prompt": prompt, "chosen": right, "rejected": rejected}


def draw(run: Path, metric: str, figure: Path) -> None:
    """Draw a metric of the last run in a folder."""
    found = [(row["step"], row[metric]) for row in read_metrics(run) if row.get(metric) is not None]
    figure.write_text(curve(found, metric), encoding="utf-8")


def curve(points: Sequence[Point], title: str) -> str:
    """An SVG of values by step.

    Args:
        points: Step and value, in the order of the steps.
        title: Written above the curve.
    """
    return curves([("", points)], title)


def curves(lines: Sequence[tuple[str, Sequence[Point]]], title: str) -> str:
    """An SVG of several runs. Runs of the same name have the same color.

    Args:
        lines: The name of each run, and its steps and values.
        title: Written above the curves, before the names.
    """
    means = [_means(points) for _, points in lines]
    values = [value for points in means for _, value in points]
    low, high = min(0.0, *values), max(values)
    unit = _unit(high - low)
    low, high = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    last = max(points[-1][0] for _, points in lines)

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    marks = [low + i * unit for i in range(round((high - low) / unit) + 1)]
    grid = [f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>' for mark in marks]
    numbers = [f'<text x="{_LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:.4g}</text>' for mark in marks]
    numbers += [
        f'<text x="{x(step):.1f}" y="{_HEIGHT - 14}" text-anchor="{anchor}">{text}</text>'
        for step, anchor, text in ((0, "middle", "0"), (last, "end", f"step {last:g}"))
    ]
    colors = dict(zip(dict.fromkeys(name for name, _ in lines), _COLORS, strict=False))
    legend = "".join(f'<tspan fill="{color}" dx="14">{escape(name)}</tspan>' for name, color in colors.items() if name)
    drawn = [
        f'<polyline points="{" ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)}" fill="none" '
        f'stroke="{colors[name]}" stroke-width="2" stroke-linejoin="round"/>'
        for (name, _), points in zip(lines, means, strict=True)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
            f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12" fill="#7f8793">',
            f'<text x="{_LEFT}" y="15" font-weight="bold">{escape(title)}{legend}</text>',
            f'<g stroke="#7f8793" stroke-opacity="0.3">{"".join(grid)}</g>',
            *numbers,
            *drawn,
            "</svg>\n",
        ]
    )


def _means(points: Sequence[Point]) -> list[Point]:
    """At most `_POINTS` means of neighbors."""
    size = math.ceil(len(points) / _POINTS)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(fmean(step for step, _ in part), fmean(value for _, value in part)) for part in parts]


def _unit(span: float) -> float:
    """A round distance of about four marks on an axis."""
    power = 10.0 ** math.floor(math.log10(span / 4)) if span else 1.0
    return next((power * factor for factor in (1, 2, 5) if span / (power * factor) <= 5), power * 10)


if __name__ == "__main__":
    main()
