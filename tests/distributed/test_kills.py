"""One of two processes is killed, the other ends by itself, and the run goes on exactly."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from prefrl.scripts.report_tokens import turns_of
from tests.launch import run_module

# With ZeRO-3, both share the tokens of every row.
KILLS = {"ddp": 1, "zero3_sp2": 1}
STEPS_OF_A_GENERATION = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are: BACKEND-whole, and those that were killed."""
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    argv = [str(item) for pair in KILLS.items() for item in pair]
    found: list[dict[str, Any]] = json.loads(
        run_module("tests.distributed.kill_worker", folder, *argv).splitlines()[-1]
    )
    return found


def test_runs_of_two_processes_survive_the_kill_of_one(results: list[dict[str, Any]]) -> None:
    assert {result["backend"]: result["kills"] for result in results} == KILLS
    for result in results:
        assert set(result["killed"]) == {result["whole"]}, result


def rows_of(run: Path, kind: str, step: int) -> list[dict[str, Any]]:
    """Of the files of all ranks."""
    return [
        row for path in sorted(run.glob(f"completions/{kind}_{step:05d}*")) for row in pq.read_table(path).to_pylist()
    ]


@pytest.mark.parametrize("backend", KILLS)
@pytest.mark.parametrize("name", ["whole", "0"])
@pytest.mark.usefixtures("results")
def test_the_tokens_of_all_ranks_are_recorded_once_and_shown(folder: Path, backend: str, name: str) -> None:
    run, whole = (folder / f"{backend}-{each}/runs/grpo" for each in (name, "whole"))
    for first in (0, STEPS_OF_A_GENERATION):
        sampled = Counter((row["group"], *row["completion_ids"]) for row in rows_of(run, "completions", first))
        assert len(sampled) > 4
        steps = [rows_of(run, "tokens", first + i) for i in range(STEPS_OF_A_GENERATION)]
        assert steps == [rows_of(whole, "tokens", first + i) for i in range(STEPS_OF_A_GENERATION)]
        for visit in (steps[:2], steps[2:]):
            assert Counter((row["group"], *row["response_ids"]) for rows in visit for row in rows) == sampled
        paths = sorted(run.glob(f"completions/completions_{first:05d}*"))
        wanted = [(row["group"], row["rollout"]) for row in rows_of(run, "completions", first)]
        shown = turns_of(run, paths, wanted, first=first, end=first + STEPS_OF_A_GENERATION).turns
        assert len(shown) == len(wanted)
        for (turn,) in shown.values():
            assert turn.step in (first + 3, first + 4)  # of the second visit, counted from 1
            assert all({"logprob", "ratio", "advantage", "kl"} <= {*token.values} for token in turn.tokens)
            assert all(math.isfinite(token.values["ratio"]) for token in turn.tokens)
        assert sum(len(turn.tokens) for (turn,) in shown.values()) == sum(len(row) - 1 for row in sampled.elements())
