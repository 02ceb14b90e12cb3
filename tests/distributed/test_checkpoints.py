"""Checkpoints and exported models under every backend, and with another number of processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prefrl.distributed import names_in_checkpoint, partition_of
from prefrl.errors import ConfigError
from tests.contract.cases import model_of
from tests.distributed.resume_worker import RESUMED, SAVED_AT, folder_of, run
from tests.launch import launch

# What each backend writes into its checkpoints about itself.
SIGNATURES = {
    "ddp": "no sharding",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zero3_offload": "ZeRO-3",
    "fsdp2": "FSDP2 (FULL_STATE_DICT)",
    "fsdp2_sharded": "FSDP2 (SHARDED_STATE_DICT)",
}
JOBS = (
    "ddp:grpo_reuse",
    "zero1:grpo_reuse",
    "zero2:sft_averaged",
    "fsdp2:sft_averaged",
    "zero3:grpo_reuse",
    "zero3:dpo_lora",
    "zero3_offload:ppo_model",
    "fsdp2:grpo_reuse",
    "fsdp2:dpo_moving",
    "fsdp2_sharded:ppo_lora_exported",
)
# ZeRO-1 leaves out a step as ZeRO-2 does, and offloading changes nothing about it.
LEFT_OUT = ("ddp:nan", "zero2:nan", "zero3:nan", "fsdp2_sharded:nan")
BACK = ("ddp:spike", "fsdp2:spike")


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def check_export(folder: Path, job: str, trained: dict[str, torch.Tensor]) -> None:
    """What `save_model` wrote is loaded in the usual way, and is what was trained."""
    backend, name = job.split(":")
    case, path = RESUMED[name], folder_of(folder, backend, name) / "final"
    if case.lora:
        model: Any = PeftModel.from_pretrained(model_of(case.algorithm, **case.model), str(path))
    else:
        model = AutoModelForCausalLM.from_pretrained(path)
    loaded = dict(model.named_parameters())
    policy = {key: value for key, value in trained.items() if not key.startswith("prefrl_critic.")}
    assert loaded.keys() == policy.keys(), job
    assert all(torch.equal(loaded[key].detach(), value) for key, value in policy.items()), job
    if case.algorithm == "ppo":
        (file,) = (path / "critic").glob("*.safetensors")
        saved = load_file(file)
        critic = {f"prefrl_critic.{key}": value for key, value in saved.items()}
        assert critic.keys() == trained.keys() - policy.keys(), job
        assert all(torch.equal(value, trained[key]) for key, value in critic.items()), job


def check_names(checkpoint: Path, backend: str, *, has_rollouts: bool) -> None:
    """Each process writes the files that the doctor foresees, and no others have the number of a process."""
    stage = int(backend.removesuffix("_offload")[-1]) if backend.startswith("zero") else 0
    config: dict[str, Any] = {"distributed_type": "MULTI_GPU"}
    if backend.startswith("zero"):
        config = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}}
    elif backend.startswith("fsdp2"):
        saved = "SHARDED_STATE_DICT" if backend == "fsdp2_sharded" else "FULL_STATE_DICT"
        config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_state_dict_type": saved}}
    partition = partition_of(config, 2, option="accelerate_config")
    foreseen = {
        name
        for process in (0, 1)
        for name in names_in_checkpoint(partition, process, step=SAVED_AT, has_rollouts=has_rollouts, is_bf16=False)
    }
    found = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert foreseen <= found
    assert [name for name in found - foreseen if re.search(r"dp_rank_\d|rng_state|_of_\d|__\d", name)] == []
    assert 14 <= len(found - foreseen) <= 22  # "about 20" in the doctor's words


def test_runs_are_resumed_and_exported_under_every_backend(tmp_path: Path) -> None:
    alone = run(tmp_path, "single", "grpo_reuse", None)
    from_one = f"ddp:grpo_reuse:{folder_of(tmp_path, 'single', 'grpo_reuse') / f'checkpoint-{SAVED_AT}'}"
    worker, result = "tests.distributed.resume_worker", tmp_path / "results.pt"
    results = launch(worker, tmp_path, *JOBS, from_one, *LEFT_OUT, *BACK, result=result)
    for job in JOBS:
        backend, name = job.split(":")
        checkpoint = folder_of(tmp_path, backend, name) / f"checkpoint-{SAVED_AT}"
        written_by = json.loads((checkpoint / "written_by.json").read_text(encoding="utf-8"))
        assert written_by == {"backend": SIGNATURES[backend], "num_processes": 2, "team_size": 1}
        assert results[job]["steps"] == 6, job
        assert distance(results[job]["resumed"], results[job]["whole"]) == 0, job
        averages, resumed_averages = results[job]["averages"], results[job]["resumed_averages"]
        assert bool(averages) == name.endswith("_averaged"), job
        assert not averages or distance(resumed_averages, averages) == 0, job
        check_export(tmp_path, job, results[job]["whole"])
        check_names(checkpoint, backend, has_rollouts=RESUMED[name].algorithm in ("grpo", "ppo"))
        has_weights = (checkpoint / "model.safetensors").exists() or (
            checkpoint / "adapter_model.safetensors"
        ).exists()
        assert has_weights, job
    for job in LEFT_OUT:
        assert results[job]["changed"] == [True, False, True, True], job
        assert {"model.safetensors", "step_0_of_2.safetensors", "step_1_of_2.safetensors"} <= {*results[job]["kept"]}
    for job in BACK:
        assert results[job]["rates"] == [0.01] * 4 + [0.005] * 2, job
        assert (results[job]["rollbacks"], results[job]["steps"]) == (1, 6), job
    # In the middle of rollouts, on more and on fewer processes.
    assert distance(results[from_one]["resumed"], alone["whole"]) < 1e-6
    checkpoint = folder_of(tmp_path, "ddp", "grpo_reuse") / f"checkpoint-{SAVED_AT}"
    resumed = run(tmp_path, "single", "grpo_reuse", str(checkpoint))
    assert distance(resumed["resumed"], results["ddp:grpo_reuse"]["whole"]) < 1e-6
    # Optimizer states that this process could not read.
    for backend, words in (("zero1", "2 processes with ZeRO-1"), ("fsdp2", "2 processes with FSDP2")):
        checkpoint = folder_of(tmp_path, backend, "grpo_reuse") / f"checkpoint-{SAVED_AT}"
        with pytest.raises(ConfigError, match=rf"{words}.* 1 process with no sharding.*model="):
            run(tmp_path, "single", "grpo_reuse", str(checkpoint))
