"""What the measurements on a real model make of their results."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.real.tables import failures, tables

ENVIRONMENT = {"machine": "a machine"}
GOOD: dict[str, Any] = {
    "agreement": {"name": "dpo", "loss": (0.7, 0.7), "grad_norm": (3.0, 3.0), "difference": 1e-6},
    "logprobs": {"name": "trainer and local generation", "tokens": 2048, "mean": 1e-6, "largest": 1e-5},
    "dpo": {
        "name": "dpo",
        "metrics": {"rewards/margins": (0.0, 0.4)},
        "steps": 30,
        "seconds": 9.0,
        "cpu_seconds": 8.0,
    },
    "sft": {"name": "sft", "metrics": {"loss": (1.5, 1.2)}, "steps": 30, "seconds": 9.0, "cpu_seconds": 8.0},
    "demo": {
        "seed": 1,
        "accuracy_base": 0.3,
        "accuracy_grpo": 0.7,
        "grpo_steps": 24,
        "seconds_total": 300.0,
        "cpu_seconds": 290.0,
    },
}


def stored(**changes: dict[str, Any]) -> dict[str, Any]:
    return {part: {"rows": [row | changes.get(part, {})], "environment": ENVIRONMENT} for part, row in GOOD.items()}


def test_good_results_have_a_table_each_and_no_failure() -> None:
    assert failures(stored()) == []
    text = tables(stored())
    assert text.count("Measured on: machine a machine.") == len(GOOD)
    assert "| dpo | 0.0000 to 0.4000 | 30 | 9 | 8 |" in text
    assert "| 1 | 0.300 | 0.700 | 0.400 | 24 | 300 | 290 |" in text


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("agreement", {"difference": 2e-4}, "agreement, dpo: differs by 2.0e-04"),
        ("agreement", {"difference": float("nan")}, "agreement, dpo: differs by nan"),
        ("logprobs", {"largest": 0.02}, "log-probs, trainer and local generation: differ by 2.0e-02"),
        ("dpo", {"metrics": {"rewards/margins": (0.1, 0.0)}}, "held-out rewards/margins went from 0.1000 to 0.0000"),
        ("sft", {"metrics": {"loss": (1.2, 1.5)}}, "held-out loss went from 1.2000 to 1.5000"),
        ("demo", {"accuracy_grpo": 0.45}, "demo, seed 1: gains 0.15, less than 0.2"),
    ],
)
def test_each_bad_result_is_named(part: str, change: dict[str, Any], message: str) -> None:
    [problem] = failures(stored(**{part: change}))
    assert message in problem
