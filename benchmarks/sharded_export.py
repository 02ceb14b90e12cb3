"""The memory that is needed to read partitioned weights for a server, with two processes on a CPU.

    python -m benchmarks.sharded_export          ZeRO-3 and FSDP2, about two minutes
    python -m benchmarks.sharded_export fsdp2    one of them

Rank 0 reads a model of about 100 million random weights in float32: layer by layer without changes, then also packed
into the messages of a `gloo` transfer, then both with a merged adapter, and for comparison gathered as a whole. The
growth is the peak resident memory of a process minus its resident memory before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from prefrl import distributed
from prefrl.generation.weights import process_group, wire
from prefrl.models.export import PolicyWeights
from tests.assets import tiny_model
from tests.contract.cases import make_trainer
from tests.distributed.backends import enter, leave_training
from tests.unit.models.test_export import adapted

BACKENDS = ("zero3", "fsdp2")
SIZES: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "head_dim": 64}
SIZES |= {"num_key_value_heads": 4, "intermediate_size": 2304, "vocab_size": 8192, "tie_word_embeddings": False}
MIB = 2**20


def main(arguments: list[str] | None = None) -> int:
    """Measure in separate processes, and print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", choices=[[], *BACKENDS], help="nothing: all")
    names = parser.parse_args(arguments).backends or BACKENDS
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            # Freed memory is returned to the system, so that it shows in the resident memory.
            env = os.environ | {
                "OMP_NUM_THREADS": "1",
                "MALLOC_MMAP_THRESHOLD_": "65536",
                "MALLOC_TRIM_THRESHOLD_": "0",
            }
            subprocess.run(
                [*command, "-m", "benchmarks.sharded_export", "--worker", name, folder], env=env, check=True
            )
            rows += json.loads((Path(folder) / f"{name}.json").read_text(encoding="utf-8"))
    print(table(rows))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| backend | read | model, MiB | largest layer | growth on rank 0 | on rank 1 | seconds |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    lines += [
        f"| {row['backend']} | {row['what']} | {row['model']:.0f} | {row['layer']:.0f} | {row['growth'][0]:.0f} | "
        f"{row['growth'][1]:.0f} | {row['seconds']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def measure(backend: str, folder: Path) -> None:
    """Measure all ways of reading under one backend. Rank 0 stores the rows."""
    accelerator = make_trainer("sft", folder / "run", **enter(backend, folder)).accelerator
    rows = []
    for name, options in (("all weights", None), ("a merged adapter", {"target_modules": "all-linear", "r": 16})):
        leave_training()
        model = tiny_model("qwen2", **SIZES)
        model = model if options is None else adapted(model, options)
        distributed.prepare_frozen(accelerator, model)
        facts = {"backend": backend, "model": mib_of(model), "layer": max(map(mib_of, layers_of(model)))}
        weights = PolicyWeights(model)
        weights.lead(lambda weights=weights: send(weights))  # memory that the first call loads is kept
        for what, read in ((name, look_at), (f"{name}, packed to be sent", send)):
            rows.append(facts | {"what": what} | growth(lambda w=weights, read=read: w.lead(lambda: read(w))))
        if options is None:
            rows.append(facts | {"what": "the whole model at once"} | growth(lambda model=model: gather(model)))
    if distributed.is_main():
        (folder / f"{backend}.json").write_text(json.dumps(rows), encoding="utf-8")


def layers_of(model: Any) -> list[torch.nn.Module]:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return [*base.model.layers, base.model.embed_tokens, base.lm_head]


def mib_of(module: torch.nn.Module) -> float:
    return sum(distributed.shape_of(p).numel() * p.element_size() for p in module.parameters()) / MIB


def look_at(weights: PolicyWeights) -> None:
    for _, tensor in weights:
        del tensor


def send(weights: PolicyWeights) -> None:
    """Pack the weights as for a server that takes everything at once."""
    for _ in wire.messages(weights, device=process_group.HOST_DEVICE, key=wire.new_key()):
        pass


def gather(model: torch.nn.Module) -> None:
    with distributed.full_params(model):
        distributed.wait_for_all()


def growth(task: Callable[[], None]) -> dict[str, Any]:
    """Seconds, and the growth of each rank's memory."""
    distributed.wait_for_all()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is counted from here
    before, started = memory("VmRSS"), time.perf_counter()
    task()
    seconds, peak = time.perf_counter() - started, memory("VmHWM")
    return {"seconds": seconds, "growth": distributed.gather_objects(peak - before)}


def memory(field: str) -> float:
    """MiB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        measure(sys.argv[2], Path(sys.argv[3]))
        distributed.wait_for_all()
        os._exit(0)
    sys.exit(main())
