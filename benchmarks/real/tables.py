"""Turn the stored results into Markdown, and into the list of what is not as it must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.report import HEADS, Row

__all__ = ["failures", "tables"]

TOLERANCE = 1e-4  # of TRL's and prefrl's first step, relative
LARGEST_LOGPROB_DIFFERENCE = 1e-2  # nats; all sources compute in float32
GAIN = 0.2
Rows = Sequence[dict[str, Any]]


def tables(stored: dict[str, Any]) -> str:
    """A section with a table for each part that was measured."""
    parts = []
    for part, (title, table) in SECTIONS.items():
        if part in stored:
            facts = "; ".join(f"{name} {value}" for name, value in stored[part]["environment"].items())
            parts.append(f"### {title}\n\n{table(stored[part]['rows'])}\n\nMeasured on: {facts}.\n")
    return "\n".join(parts)


def failures(stored: dict[str, Any]) -> list[str]:
    """What is not as it must be, one line each."""
    rows = {part: content["rows"] for part, content in stored.items()}
    found = [
        f"agreement, {row['name']}: differs by {row['difference']:.1e}"
        for row in rows.get("agreement", ())
        if not row["difference"] < TOLERANCE
    ]
    for row in rows.get("performance", ()):
        found += [f"performance, {row['name']}: {problem}" for problem in row["problems"]]
    found += [
        f"log-probs, {row['name']}: differ by {row['largest']:.1e}"
        for row in rows.get("logprobs", ())
        if not row["largest"] < LARGEST_LOGPROB_DIFFERENCE
    ]
    for part, metric, sign in (("dpo", "rewards/margins", 1), ("sft", "loss", -1)):
        for row in rows.get(part, ()):
            before, after = row["metrics"][metric]
            if not sign * (after - before) > 0:
                found.append(f"{part}: held-out {metric} went from {before:.4f} to {after:.4f}")
    found += [
        f"demo, seed {row['seed']}: gains {row['accuracy_grpo'] - row['accuracy_base']:.2f}, less than {GAIN}"
        for row in rows.get("demo", ())
        if not row["accuracy_grpo"] - row["accuracy_base"] >= GAIN
    ]
    return found


def _agreement(rows: Rows) -> str:
    heads = ("step", "TRL loss", "prefrl loss", "TRL grad. norm", "prefrl grad. norm", "largest rel. diff.")
    return _markdown(
        heads,
        [
            (row["name"], *(f"{x:.7g}" for key in ("loss", "grad_norm") for x in row[key]), f"{row['difference']:.1e}")
            for row in rows
        ],
    )


def _performance(rows: Rows) -> str:
    return _markdown(HEADS, [Row.from_json(row).cells() for row in rows])


def _logprobs(rows: Rows) -> str:
    heads = ("log-probs of", "tokens", "mean difference, nats", "largest")
    cells = [(row["name"], f"{row['tokens']:,}", f"{row['mean']:.1e}", f"{row['largest']:.1e}") for row in rows]
    return _markdown(heads, cells)


def _training(rows: Rows) -> str:
    metrics = list(rows[0]["metrics"])
    return _markdown(
        ("trainer", *(f"held-out {name}" for name in metrics), "steps", "seconds", "CPU seconds"),
        [
            (
                row["name"],
                *("{:.4f} to {:.4f}".format(*row["metrics"][name]) for name in metrics),
                str(row["steps"]),
                f"{row['seconds']:.0f}",
                f"{row['cpu_seconds']:.0f}",
            )
            for row in rows
        ],
    )


def _demo(rows: Rows) -> str:
    return _markdown(
        ("seed", "right before", "right after", "gain", "steps", "seconds", "CPU seconds"),
        [
            (
                str(row["seed"]),
                f"{row['accuracy_base']:.3f}",
                f"{row['accuracy_grpo']:.3f}",
                f"{row['accuracy_grpo'] - row['accuracy_base']:.3f}",
                str(row["grpo_steps"]),
                f"{row['seconds_total']:.0f}",
                f"{row['cpu_seconds']:.0f}",
            )
            for row in rows
        ],
    )


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ("---",) * len(heads), *rows))


SECTIONS: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "demo": ("GRPO on sums", _demo),
    "dpo": ("DPO on right and wrong solutions", _training),
    "sft": ("SFT on worked solutions", _training),
    "agreement": ("Agreement with TRL", _agreement),
    "logprobs": ("Log-probs of the same completions", _logprobs),
    "performance": ("Speed and memory", _performance),
}
