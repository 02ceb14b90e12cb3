"""Sets this process up for a backend, as `accelerate launch` would, on a machine without GPUs or compilers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# One process, then two under each backend. ZeRO-3 in its strict form: nothing is kept between passes, so that a
# rank that does not take part in a pass hangs the others, where DeepSpeed's defaults would forgive it.
BACKENDS = ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2")
_STRICT = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_gather_16bit_weights_on_model_save": True,
    "overlap_comm": False,
}


def enter(backend: str, folder: Path) -> dict[str, Any]:
    """Set the environment for a backend, before configs are made for it; gives its options."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        os.environ.pop(name, None)
    if backend in ("single", "ddp"):
        return {}
    if backend.startswith("fsdp2"):
        _allow_fsdp_on_cpu()
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        config = {"version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        if backend == "fsdp2_sharded":
            config["state_dict_type"] = "SHARDED_STATE_DICT"
        return {"fsdp": True, "fsdp_config": config}
    if backend.endswith("_sp2"):
        return enter(backend.removesuffix("_sp2"), folder) | {"parallelism_config": _sequence_parallelism()}
    _need_no_compiler()
    path = folder / f"{backend}_{os.environ['RANK']}.json"
    path.write_text(json.dumps(_deepspeed_config(backend)), encoding="utf-8")
    os.environ |= {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(backend.startswith("zero3")).lower(),
    }
    return {}


def _sequence_parallelism() -> Any:
    """Two processes share every row."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)


def leave_training() -> None:
    """Models made from here on are not partitioned while they are made, as before the first trainer of the process."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def _deepspeed_config(backend: str) -> dict[str, Any]:
    stage = int(backend[4])
    # DeepSpeed's default is for models of billions of weights: 5e8 elements.
    buckets = {"reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000}
    zero: dict[str, Any] = {"stage": stage, **buckets, **(_STRICT if stage == 3 else {})}
    if backend == "zero3_ungathered":
        zero["stage3_gather_16bit_weights_on_model_save"] = False
    if backend == "zero3_offload":
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {
        "zero_optimization": zero,
        **dict.fromkeys((*automatic, "gradient_clipping"), "auto"),
        "bf16": {"enabled": "auto"},
        # DeepSpeed's own optimizer for offloaded states is built by a compiler.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _need_no_compiler() -> None:
    """DeepSpeed compiles an operation for inference when it starts; nothing here uses it."""
    import deepspeed  # noqa: F401

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def _allow_fsdp_on_cpu() -> None:
    """Accelerate shards on accelerators only: let it take processes on a CPU for such, where FSDP is asked for."""
    from accelerate import state
    from accelerate.utils import DistributedType

    original = state.AcceleratorState.__init__
    if original.__module__ == __name__:  # it has been allowed
        return

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        shared = state.PartialState._shared_state
        uses_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if uses_fsdp and shared.get("distributed_type") is DistributedType.MULTI_CPU:
            shared["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, **kwargs)

    state.AcceleratorState.__init__ = init
