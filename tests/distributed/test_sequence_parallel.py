"""Two processes that share the tokens of every row train like a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import prefrl.losses.logprobs as logprobs
from tests.distributed import worker
from tests.distributed.cases import CASES
from tests.launch import launch

TOLERANCE = 1e-5

# With ZeRO-3 in its strict form, where a process that takes no part in a pass hangs the other.
BACKEND = "zero3_sp2"
NAMES = (
    "sft_micro_batches",
    "sft_checkpointing",
    "sft_lora_head_chunks",
    "sft_adam",
    "sft_window",
    "sft_eval",
    "sft_mixture",
    "dpo",
    "orpo",
    "reward",
    "grpo_reuse",
    "grpo_replay",
    "ppo",
    "distillation",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sequence_parallel")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """Of two processes, by case."""
    result, jobs = folder / "results.pt", [f"{BACKEND}:{name}" for name in NAMES]
    found: dict[str, Any] = launch("tests.distributed.worker", result, *jobs, result=result)[BACKEND]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_update_is_that_of_one_process(
    name: str, results: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "default_chunk_size", logprobs.default_chunk_size)  # the worker changes it
    expected, result = worker.run(name, CASES[name], folder, {}), results[name]
    assert expected["update"].norm() > 1e-3
    assert (result["update"] - expected["update"]).norm() / expected["update"].norm() < TOLERANCE
    for key in ("losses", "grad_norms", "eval"):
        assert result[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    assert bool(expected["eval"]) == bool(CASES[name].eval_rows)
    # Half of the tokens on each process, and half of the prompts to sample from; one more where their number is odd.
    assert result["widths"] == [-(-width // 2) for width in expected["widths"]]
    assert result["prompts"] == [-(-count // 2) for count in expected["prompts"]]
    assert bool(expected["prompts"]) == name.startswith(("grpo", "ppo", "distillation"))
