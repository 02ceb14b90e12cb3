"""Rules of a vLLM server that shares the device of training, or that does not."""

from __future__ import annotations

from typing import Any

from prefrl.options.fields import example, unset, when

_OF_TRL = (0.3, 0.55)  # TRL's defaults of the share


def _asks_for_nccl(o: Any) -> bool:
    return bool(o.weight_sync == "nccl")


# With use_vllm and vllm_mode="colocate".
SHARED_DEVICE_RULES = (
    when(
        lambda o: o.knows_sizes and o.world_size > 1,
        "vllm_mode='colocate' with {world_size} training processes: one process and one server share a device. Set "
        "num_processes=1, or leave vllm_mode out; vllm='auto' then gives the server the last GPU.",
        example("grpo", processes=2, use_vllm=True, vllm_mode="colocate"),
    ),
    when(
        lambda o: len(o.server_urls) > 1 or not o.servers_are_local,
        "vllm_mode='colocate' with {urls}: one server of this machine shares the device of training. Remove what "
        "names the servers, or vllm_mode.",
        example("grpo", use_vllm=True, vllm_mode="colocate", vllm_server_host="node5"),
        urls=lambda o: ", ".join(o.server_urls),
    ),
    when(
        lambda o: o.generation_mode != "sync",
        "generation_mode={generation_mode!r} with vllm_mode='colocate', which vllm='auto' chooses where there is one "
        "GPU: it samples while the trainer works, but a device that is shared does one or the other. Use "
        "generation_mode='sync', or give the server a GPU of its own.",
        example("grpo", use_vllm=True, vllm_mode="colocate", generation_mode="async"),
    ),
    when(
        _asks_for_nccl,
        "weight_sync='nccl' with vllm_mode='colocate': NCCL does not connect two processes on one GPU. Leave "
        "weight_sync out; weights then go through shared memory.",
        example("grpo", use_vllm=True, vllm_mode="colocate", weight_sync="nccl"),
    ),
)
# Without one of them.
OWN_DEVICE_RULES = (
    when(
        lambda o: o.vllm_gpu_memory_utilization not in (None, *_OF_TRL),
        "vllm_gpu_memory_utilization={vllm_gpu_memory_utilization} has no effect because use_vllm={use_vllm} and "
        "vllm_mode={vllm_mode!r}. Set use_vllm=True and vllm_mode='colocate', or give --gpu_memory_utilization to "
        "prefrl vllm-serve.",
        example("grpo", use_vllm=True, vllm_gpu_memory_utilization=0.5),
        hint=True,
    ),
    *unset(
        {"vllm_enable_sleep_mode": True},
        lambda o: True,
        "use_vllm={use_vllm} and vllm_mode={vllm_mode!r}, and a server with GPUs of its own never sleeps. Leave it "
        "out.",
        example("grpo"),
        hint=True,
    ),
)
