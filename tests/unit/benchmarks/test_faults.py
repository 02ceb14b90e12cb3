from __future__ import annotations

import json
import math

import pytest

from benchmarks.faults import CASES, RESULTS, Seen, compared, table, verdict

DONE = Seen(steps=6, weights="a", logged={"loss": 0.25, "grad_norm": 1.0})


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (Seen(ended="hangs (stopped after 60 s)"), "hangs (stopped after 60 s)"),
        (Seen(phase="in step 2", error="ValueError: x", messages=["y"]), "error in step 2: `ValueError: x`"),
        (Seen(exit_code=143), "exit code 143"),
        (Seen(messages=["no row"]), "ends at step 0; warns: `no row`"),
        (DONE, "trains 6 steps, logs loss 0.25, grad_norm 1; nothing said"),
        (
            Seen(steps=6, weights="a", has_changed=False, logged={"reward": None, "loss": 0.0}),
            "trains 6 steps, weights as before, logs reward None, loss 0; nothing said",
        ),
        (
            Seen(steps=6, weights="a", is_finite=False, logged={"loss": math.nan}),
            "trains 6 steps, weights are not finite, logs loss nan; nothing said",
        ),
    ],
)
def test_what_was_seen_is_said(seen: Seen, text: str) -> None:
    assert verdict(seen) == text


@pytest.mark.parametrize(
    ("whole", "resumed", "text"),
    [
        (DONE, DONE, "exact"),
        (DONE, Seen(weights="a", messages=["skips"]), "exact; warns: `skips`"),
        (DONE, Seen(weights="b"), "other weights; nothing said"),
        (DONE, Seen(phase="before step 1", error="ValueError: x"), "error before step 1: `ValueError: x`"),
        (Seen(ended="ended by signal 11"), DONE, "the undisturbed run: ended by signal 11"),
    ],
)
def test_resumed_runs_are_compared_with_the_undisturbed_one(whole: Seen, resumed: Seen, text: str) -> None:
    assert compared(whole, resumed) == text


def test_the_page_has_what_was_seen_in_every_case() -> None:
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert list(stored) == list(CASES)
    assert table(stored) in RESULTS.with_suffix(".md").read_text(encoding="utf-8")
