"""What the backends cost with two processes: memory of each process for a model, and CPU seconds of a step.

    python -m benchmarks.sharding memory [--sizes 768 12 2304 32000]    all backends, about a minute each
    python -m benchmarks.sharding cost                                  a GRPO and a DPO step; also TRL's if installed

Two gloo processes share the machine's cores, each with one thread. The figures include no network.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.workloads import MODEL_S, ModelSizes, Workload

BACKENDS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
MIB = 2**20


class Formula(NamedTuple):
    """Bytes of weights, both moments and the copy of the weights that DeepSpeed updates; and of gradients."""

    held_text: str
    held: Callable[[int], float]
    gradients_text: str
    gradients: Callable[[int], float]


# Bytes for each weight on each of n processes, in float32 with Adam: held between steps, and gradients in addition.
FORMULAS = {
    "ddp": Formula("4 + 8 + 4 of buckets", lambda n: 16.0, "4", lambda n: 4.0),
    "zero1": Formula("4 + (8 + 4) / n", lambda n: 4 + 12 / n, "4", lambda n: 4.0),
    "zero2": Formula("4 + (8 + 4) / n", lambda n: 4 + 12 / n, "4 / n", lambda n: 4 / n),
    "zero3": Formula("(4 + 8 + 4 + 4 of gradients) / n", lambda n: 20 / n, "0", lambda n: 0.0),
    "fsdp2": Formula("(4 + 8) / n", lambda n: 12 / n, "4 / n", lambda n: 4 / n),
}
LENGTHS = (16, 28, 40, 56, 72, 90, 110, 128)
PAIRS = (64, 256, 96, 224, 256, 128, 192, 160)
WORKLOADS = {
    "grpo": Workload("grpo", "GRPO loss step", "grpo_loss", MODEL_S, LENGTHS, num_prompts=2, options={"beta": 0.0}),
    "dpo": Workload("dpo", "DPO step, 4 pairs", "dpo", MODEL_S, PAIRS),
}
STEPS = 6  # the first of them is the warm-up


def memory(sizes: ModelSizes, backends: Sequence[str]) -> None:
    """Print what the first of two processes holds for SFT with Adam, between steps and at its peak, by backend."""
    print("| backend | bytes of a weight | formula, MiB | measured | with gradients | formula, MiB | peak measured |")
    print("|---|---|---|---|---|---|---|")
    for backend in backends:
        found = run(backend, "memory", json.dumps([getattr(sizes, name) for name in ModelSizes.__slots__]))
        formula = FORMULAS[backend]
        held = found["elements"] * formula.held(2) / MIB
        at_most = held + found["elements"] * formula.gradients(2) / MIB
        print(
            f"| {backend} | {formula.held_text} | {held:.0f} | {found['held_mib']:.0f} | + {formula.gradients_text} "
            f"| {at_most:.0f} | {found['peak_mib']:.0f} |",
            flush=True,
        )
    print(f"\n{found['elements']:,} weights")


def cost(backends: Sequence[str], rounds: int) -> None:
    """Print the CPU seconds of a step on both processes. Backends and libraries alternate."""
    libraries = ["prefrl", *(["trl"] if find_spec("trl") else [])]
    for name in WORKLOADS:
        seconds: dict[tuple[str, str], list[float]] = {}
        losses: dict[tuple[str, str], float] = {}
        for _ in range(rounds):
            for backend in backends:
                for library in libraries:
                    found = run(backend, "cost", json.dumps([name, library]))
                    seconds.setdefault((backend, library), []).extend(found["seconds"])
                    losses[backend, library] = found["loss"]
        print(f"\n{WORKLOADS[name].title}: CPU seconds of a step on each process, median\n")
        print("| backend | prefrl | / DDP | TRL | TRL / prefrl | loss |\n|---|---|---|---|---|---|")
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        for backend in backends:
            own = medians[backend, "prefrl"]
            other = medians.get((backend, "trl"))
            ratio = "" if other is None else f"{other / own:.2f}"
            shown = "" if other is None else f"{other:.2f}"
            loss = ", ".join(f"{losses[backend, library]:.5f}" for library in libraries)
            print(
                f"| {backend} | {own:.2f} | {own / medians['ddp', 'prefrl']:.2f} | {shown} | {ratio} | {loss} |",
                flush=True,
            )


def run(backend: str, *arguments: str) -> Any:
    """Run two processes, and return what the first one stored."""
    with tempfile.TemporaryDirectory(prefix="prefrl-bench-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command += ["-m", "benchmarks.sharding", "worker", backend, folder, *arguments]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            # Freed tensors are returned to the system at once, so that resident memory is what is held.
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
            "MALLOC_ARENA_MAX": "1",
            "HF_DATASETS_CACHE": f"{folder}/cache",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode:
            sys.exit(f"{backend} {arguments}: {done.stderr[-4000:]}")
        return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))


def worker(backend: str, folder: Path, kind: str, text: str) -> None:
    """One of the processes."""
    from prefrl import distributed
    from tests.distributed.backends import enter

    options = enter(backend, folder)
    measure = _memory if kind == "memory" else _cost
    result = measure(json.loads(text), options, folder)
    distributed.wait_for_all()
    if distributed.is_main():
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    distributed.wait_for_all()
    os._exit(0)


def _memory(sizes: list[int], options: dict[str, Any], folder: Path) -> dict[str, float]:
    from datasets import Dataset
    from transformers import TrainerCallback

    from benchmarks.inputs import build_model, build_tokenizer
    from benchmarks.meter import HostMemory
    from prefrl import SFTConfig, SFTTrainer, distributed

    found: dict[str, float] = {}

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            found.update(held_mib=meter.grown_mib(), peak_mib=meter.peak_mib())
            meter.forget_peak()  # memory that a backend holds only while it prepares the model does not count

    # One short text: activations are small compared with weights.
    rows = Dataset.from_list([{"text": "t5 t6 t7 t8"} for _ in range(4)])
    arguments: dict[str, Any] = {"use_cpu": True, "max_steps": 3, "per_device_train_batch_size": 1}
    config = SFTConfig(
        output_dir=str(folder),
        report_to="none",
        save_strategy="no",
        optim="adamw_torch_fused",  # other optimizers make temporary tensors of the size of a partition
        **arguments,
        **options,
    )
    meter = HostMemory()
    meter.reset()
    model = build_model(ModelSizes(*sizes), seed=0)
    elements = sum(distributed.shape_of(parameter).numel() for parameter in model.parameters())
    trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=build_tokenizer(100))
    del model
    trainer.add_callback(Clock())
    trainer.train()
    return {"elements": elements, **found}


def _cost(arguments: list[str], options: dict[str, Any], folder: Path) -> dict[str, Any]:
    from importlib import import_module

    from transformers import TrainerCallback

    from benchmarks import inputs

    inputs.build_model = _whole(inputs.build_model)  # before the modules that use it are imported
    from benchmarks.inputs import TokenCounter
    from benchmarks.job import Setup

    name, library = arguments
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.process_time())

    class OnTwo(Setup):
        """Each process has half of the rows."""

        def arguments(self) -> dict[str, Any]:
            both = super().arguments()
            return both | {"per_device_train_batch_size": both["per_device_train_batch_size"] // 2} | options

        def callback(self) -> Any:
            return Clock()

    setup = OnTwo(WORKLOADS[name], None, TokenCounter(), str(folder), "cpu", STEPS)  # type: ignore[arg-type]
    outcome = import_module(f"benchmarks.{library}_side").build(setup)()
    return {"seconds": [after - before for before, after in pairwise(seconds)], "loss": outcome.loss}


def _whole(build: Callable[..., Any]) -> Callable[..., Any]:
    """Build whole models even after the config was made, because both libraries get instances."""
    from prefrl import distributed

    def built(*arguments: Any, **options: Any) -> Any:
        with distributed.unpartitioned():
            return build(*arguments, **options)

    return built


def main() -> None:
    """See the module."""
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "cost"])
    parser.add_argument(
        "--sizes", nargs=4, type=int, default=[768, 12, 2304, 32000], help="hidden layers ffn vocabulary"
    )
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="cost divides by ddp")
    parser.add_argument("--rounds", type=int, default=2, help="how often each is started, of cost")
    chosen = parser.parse_args()
    if chosen.what == "cost":
        cost(chosen.backends, chosen.rounds)
        return
    hidden, layers, ffn, vocabulary = chosen.sizes
    memory(ModelSizes(hidden, layers, ffn, vocabulary, num_heads=hidden // 64), chosen.backends)


if __name__ == "__main__":
    main()
