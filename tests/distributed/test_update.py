"""Under every backend, with weights that are really partitioned, the update is that of a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.backends import BACKENDS
from tests.distributed.cases import CASES
from tests.launch import launch

TOLERANCE = 1e-5
# Margins are differences of sums of log-probs, which are a thousand times as large.
METRIC_TOLERANCES = {"rel": 1e-4, "abs": 1e-5}

# Everything under the two backends that partition weights. What the others do differently is in the step, not in the
# forward pass: of them, what could be cut, divided or clipped wrongly.
STEPS = (
    "sft_micro_batches",
    "sft_token_budget",
    "sft_adam",
    "sft_nadam_rates",
    "sft_lora",
    "grpo_reuse",
    "ppo_model",
)
# What other cases do, too: mixtures and critics have micro-batches, KTO and GRPO a budget of tokens, rewards and DPO
# adapters. test_sequence_parallel.py trains some of them, and windows, which are nothing of a backend, under ZeRO-3.
ELSEWHERE = {
    *("sft_micro_batches", "sft_token_budget", "sft_checkpointing", "sft_lora", "sft_lora_head_chunks"),
    *("sft_window", "dpo", "orpo", "reward", "ppo"),
}
# Under ZeRO-3, that file has these; and an optimizer with rates by name has all that one without them has.
SHARED_TOKENS = {"sft_adam", "grpo_replay"}
# Losses, and how rows are dealt out, do not depend on what partitions the weights: under ZeRO-3 alone, where a rank
# that leaves out a pass hangs the other.
DEALT = {
    *("online_dpo", "dpo_by_name_precomputed", "reward_lora", "grpo_scored_first", "grpo_episodes"),
    *("ppo_micro_batches", "sft_grown", "grpo_resampled", "grpo_overlap", "grpo_one_group_of_episodes"),
    "distillation_several",
}
SELECTED: dict[str, tuple[str, ...]] = {
    # The contract's tests train everything on two processes.
    "ddp": ("sft_adam", "sft_mixture", "grpo_replay", "ppo_model", "ppo_clipped"),
    "zero1": ("sft_micro_batches", "sft_adam", "grpo_reuse", "reward_by_name"),
    "zero2": STEPS,
    # DeepSpeed clips a critic with the policy; ZeRO refuses LARS, and ZeRO-3 compiled layers.
    "zero3": tuple(
        name for name in CASES if name not in {*ELSEWHERE, *SHARED_TOKENS, "ppo_clipped", "sft_lars", "sft_compiled"}
    ),
    "zero3_offload": ("sft_adam", "grpo_reuse", "ppo_model"),
    # One mixture, and one model whose weights are read before they are shared out, of each kind of training.
    "fsdp2": tuple(
        name for name in CASES if name not in {*ELSEWHERE, *DEALT, "sft_mixture", "distillation_lora_by_name"}
    ),
}
SELECTED["single"] = tuple(name for name in CASES if any(name in names for names in SELECTED.values()))
# What a rank keeps of the weights between passes.
SHARE = {"ddp": 1.0, "zero1": 1.0, "zero2": 1.0, "zero3": 0.5, "zero3_offload": 0.5, "fsdp2": 0.5}

# Backends that one launch runs, in the same processes: imports take longer than most cases.
LAUNCHES = (("single",), ("ddp", "fsdp2"), ("zero1", "zero2", "zero3", "zero3_offload"))

_results: dict[str, dict[str, Any]] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


def results_of(backend: str, folder: Path) -> dict[str, Any]:
    """Of all cases of a backend, trained in the launch that it shares with others."""
    if backend not in _results:
        (together,) = (backends for backends in LAUNCHES if backend in backends)
        result, number = folder / f"{backend}.pt", 1 if backend == "single" else 2
        jobs = [f"{each}:{name}" for each in together for name in SELECTED[each]]
        _results.update(launch("tests.distributed.worker", result, *jobs, result=result, num_processes=number))
    return _results[backend]


@pytest.mark.parametrize(
    ("backend", "name"), [(backend, name) for backend in BACKENDS for name in SELECTED[backend]], ids=str
)
def test_the_update_is_that_of_one_process(backend: str, name: str, folder: Path) -> None:
    expected, result = results_of("single", folder)[name], results_of(backend, folder)[name]
    assert expected["update"].norm() > 1e-3
    assert (result["update"] - expected["update"]).norm() / expected["update"].norm() < TOLERANCE
    assert bool(expected["eval"]) == bool(CASES[name].eval_rows)
    torch.testing.assert_close(result["averaged"], expected["averaged"], rtol=1e-4, atol=1e-6)
    for key in ("losses", "grad_norms", "eval"):
        assert result[key] == pytest.approx(expected[key], **METRIC_TOLERANCES), key


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_partitioned(backend: str, folder: Path) -> None:
    whole = results_of("single", folder)
    for name, result in results_of(backend, folder).items():
        share = result["local_elements"] / result["elements"]
        # FSDP2 deals rows of a weight: of a head with one row, rank 0 has all.
        assert share == pytest.approx(SHARE[backend], abs=0.005), name
        # Also when a training pass begins: what other passes have gathered is given back.
        assert max(result["layers"]) == pytest.approx(SHARE[backend] * max(whole[name]["layers"]), rel=0.01), name
        if result["reference_is_sharded"] is not None:
            assert result["reference_is_sharded"] == (SHARE[backend] < 1), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_is_not_finite_if_one_of_its_numbers_is_not(backend: str, folder: Path) -> None:
    for name, result in results_of(backend, folder).items():
        assert result["non_finite"] == (False, True), name
