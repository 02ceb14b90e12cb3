"""What `prefrl doctor` says of the memory and time of a run, beside measurements: on Linux, on one thread of a CPU.

    python -m benchmarks.doctor

The peak is the growth of the resident memory (VmHWM) while a trainer loads a model and makes six steps. A training
of a smaller model comes first, so that libraries and their caches are not counted.

The time of a step is the median of steps two to six, in CPU seconds, so that other work on the machine does not count.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

MIB = 2**20
ALGORITHMS = ("sft", "dpo", "grpo")
SIZES: dict[str, dict[str, int]] = {
    "first": {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 128},
    "small": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 4096},
    "medium": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 8192},
}
OPTIONS = ["--report_to", "none", "--save_strategy", "no", "--max_steps", "6"]
ONLINE = ["--num_generations", "4", "--max_completion_length", "96", "--reward_funcs", "my_rewards.py:random_reward"]
ONLINE += ["--journal_keep", "0"]
REWARD = "import random\ndef random_reward(completions, **_):\n    return [random.random() for _ in completions]\n"


def main() -> None:
    """Print a table."""
    names = ("algorithm", "weights", "peak, MiB", "estimated, MiB", "ratio", "step, s", "lower bound, s", "ratio")
    print(f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", sep="\n")
    context = multiprocessing.get_context("spawn")
    for algorithm in ALGORITHMS:
        process = context.Process(target=_print_rows, args=(algorithm,))
        process.start()
        process.join()


def _print_rows(algorithm: str) -> None:
    import torch

    from tests.assets import tiny_model, tiny_tokenizer

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, sizes in SIZES.items():
            heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
            tiny_model(**(heads | sizes)).save_pretrained(name)
            tiny_tokenizer().save_pretrained(name)
        beside_each_other(algorithm, "first", device="cpu")
        for name in SIZES:
            found = beside_each_other(algorithm, name, device="cpu")
            measured, estimated, seconds, bound = (found[x] for x in ("peak", "estimated_peak", "step", "least_step"))
            memory = (f"{measured:.0f}", f"{estimated:.0f}", f"{estimated / measured:.2f}")
            times = (f"{seconds:.3f}", f"{bound:.3f}", f"{bound / seconds:.2f}")
            print("|", " | ".join((algorithm, f"{found['weights'] / 1e6:.2f} M", *memory, *times)), "|", flush=True)


def beside_each_other(algorithm: str, model: str, *, device: str, scale: int = 1) -> dict[str, Any]:
    """The doctor's estimates of a run in the current folder, and the run's own figures: MiB and seconds.

    Args:
        model: The model's folder.
        device: cpu, on which seconds are those of the CPU, or cuda, on which they are those of the wall.
        scale: The factor by which texts are longer.
    """
    write_rows(algorithm, scale)
    clock = time.perf_counter if device == "cuda" else time.process_time
    options = ["--bf16", "true", "--dtype", "bfloat16"] if device == "cuda" else ["--use_cpu"]
    run = partial(run_of, algorithm, model, options)
    footprint, bound, count = _estimate(run, clock)
    memory = _CudaPeak() if device == "cuda" else _HostPeak()
    seconds = _train(run, model, clock)
    return {
        "algorithm": algorithm,
        "weights": count,
        "peak": memory.mib(),
        "estimated_peak": footprint.peak / MIB,
        "step": seconds,
        "least_step": bound,
    }


class _HostPeak:
    """Growth of the resident memory of this process since it was made."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew

    def mib(self) -> float:
        return _memory("VmHWM") - self._before


class _CudaPeak:
    """Growth of what torch's allocator holds."""

    def __init__(self) -> None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def mib(self) -> float:
        import torch

        return (torch.cuda.max_memory_allocated() - self._before) / MIB


def write_rows(algorithm: str, scale: int) -> None:
    """The dataset and the reward function of a run, in the current folder."""
    rows = []
    for i in range(64):
        lengths = (20 * scale, 40 * scale, (60 + i % 20) * scale)
        text = {length: " ".join(str((7 * i + j) % 10) for j in range(length)) for length in lengths}
        prompt, answer, long = text.values()
        pair = {"chosen": answer, "rejected": answer[::-1] + "."} if algorithm == "dpo" else {}
        rows.append({"text": long} if algorithm == "sft" else {"prompt": prompt, **pair})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    Path("my_rewards.py").write_text(REWARD, encoding="utf-8")


def run_of(algorithm: str, model: str, options: list[str]) -> tuple[Any, Any, Any]:
    """The algorithm, and the options of its script and its training."""
    from prefrl.registry import REGISTRY
    from prefrl.scripts.inputs import options_of, read

    row = REGISTRY[algorithm]
    argv = ["--model_name_or_path", model, "--dataset_name", "rows.jsonl", "--output_dir", f"out_{model}"]
    argv += [*OPTIONS, *options, *(ONLINE if algorithm == "grpo" else [])]
    return row, *options_of(row, read(row, argv))


def _train(run: Callable[[], tuple[Any, Any, Any]], model: str, clock: Callable[[], float]) -> float:
    """Seconds of a step."""
    from transformers import TrainerCallback

    from prefrl.rewards.named import reward_by_name
    from prefrl.scripts.inputs import datasets_of

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
            if args.device.type == "cuda":
                import torch

                torch.cuda.synchronize()
            ends.append(clock())

    row, script, config = run()
    rewards = [reward_by_name(name) for name in getattr(script, "reward_funcs", None) or []]
    extra: dict[str, Any] = {"reward_funcs": rewards} if rewards else {}
    dataset, _ = datasets_of(script, config)
    trainer = row.load_trainer()(model=model, args=config, train_dataset=dataset, callbacks=[Clock], **extra)
    trainer.train()
    trainer.end()
    return statistics.median(end - start for start, end in itertools.pairwise(ends))


def _estimate(run: Callable[[], tuple[Any, Any, Any]], clock: Callable[[], float]) -> tuple[Any, float, int]:
    """What the doctor says of memory and seconds, and the number of weights."""
    from prefrl.models.footprint import weights_of
    from prefrl.scripts.checkup import resources
    from prefrl.scripts.checkup.dataset import Batches, check_rows
    from prefrl.scripts.checkup.findings import Section
    from prefrl.scripts.checkup.subject import Subject
    from prefrl.scripts.inputs import datasets_of

    row, script, config = run()
    subject = Subject(row, script, config)
    raw, evaluated = datasets_of(script, config)
    rows = check_rows(Section("Rows"), subject, raw, evaluated)
    batches = Batches.of(subject, len(raw))
    footprint = resources.footprint_of(subject, resources.large_micro_batch(subject, rows, batches))
    speed = resources.products_per_second(config.device, subject.model.dtype, clock=clock)
    phases = resources.least_seconds(subject, resources.large_micro_batch(subject, rows, batches), speed)
    return footprint, sum(phases.values()), weights_of(subject.model).count


def _memory(name: str) -> float:
    """MiB of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


if __name__ == "__main__":
    main()
