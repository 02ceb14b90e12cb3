"""What `prefrl doctor` says of the memory of a run, beside the measured peak: on Linux, on one thread of a CPU.

    python -m benchmarks.doctor_memory

The peak is the growth of the resident memory (VmHWM) while a trainer loads a model and makes three steps. A training
of a smaller model comes first, so that libraries and their caches are not counted.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

MIB = 2**20
ALGORITHMS = ("sft", "dpo", "grpo")
SIZES: dict[str, dict[str, int]] = {
    "first": {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 128},
    "small": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 4096},
    "medium": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 8192},
}
OPTIONS = ["--use_cpu", "--report_to", "none", "--save_strategy", "no", "--max_steps", "3"]
ONLINE = ["--num_generations", "4", "--max_completion_length", "96", "--reward_funcs", "my_rewards.py:random_reward"]
ONLINE += ["--journal_keep", "0"]
REWARD = "import random\ndef random_reward(completions, **_):\n    return [random.random() for _ in completions]\n"


def main() -> None:
    """Print a table."""
    print("| algorithm | weights | measured, MiB | estimated, MiB | ratio |", "|---|---|---|---|---|", sep="\n")
    context = multiprocessing.get_context("spawn")
    for algorithm in ALGORITHMS:
        process = context.Process(target=_measure, args=(algorithm,))
        process.start()
        process.join()


def _measure(algorithm: str) -> None:
    import torch

    from tests.assets import tiny_model, tiny_tokenizer

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        _write_rows(algorithm)
        for name, sizes in SIZES.items():
            heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
            tiny_model(**(heads | sizes)).save_pretrained(name)
            tiny_tokenizer().save_pretrained(name)
        _train(algorithm, "first")
        for name in ("small", "medium"):
            footprint, count = _estimate(algorithm, name)
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            before = _memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
            _train(algorithm, name)
            measured, estimated = _memory("VmHWM") - before, footprint.peak / MIB
            row = (algorithm, f"{count / 1e6:.1f} M", f"{measured:.0f}", f"{estimated:.0f}")
            print("|", " | ".join(row), f"| {estimated / measured:.2f} |", flush=True)
        os.chdir("/")


def _write_rows(algorithm: str) -> None:
    rows = []
    for i in range(64):
        text = {length: " ".join(str((7 * i + j) % 10) for j in range(length)) for length in (20, 40, 60 + i % 20)}
        prompt, answer, long = text.values()
        pair = {"chosen": answer, "rejected": answer[::-1] + "."} if algorithm == "dpo" else {}
        rows.append({"text": long} if algorithm == "sft" else {"prompt": prompt, **pair})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    Path("my_rewards.py").write_text(REWARD, encoding="utf-8")


def _run(algorithm: str, model: str) -> tuple[Any, Any, Any]:
    from prefrl.registry import REGISTRY
    from prefrl.scripts.train import options_of, read

    row = REGISTRY[algorithm]
    argv = ["--model_name_or_path", model, "--dataset_name", "rows.jsonl", "--output_dir", f"out_{model}", *OPTIONS]
    return row, *options_of(row, read(row, [*argv, *(ONLINE if algorithm == "grpo" else [])]))


def _train(algorithm: str, model: str) -> None:
    from prefrl.rewards.named import reward_by_name
    from prefrl.scripts.train import datasets_of

    row, script, config = _run(algorithm, model)
    rewards = [reward_by_name(name) for name in getattr(script, "reward_funcs", None) or []]
    extra: dict[str, Any] = {"reward_funcs": rewards} if rewards else {}
    dataset, _ = datasets_of(script, config)
    trainer = row.load_trainer()(model=model, args=config, train_dataset=dataset, **extra)
    trainer.train()
    trainer.end()


def _estimate(algorithm: str, model: str) -> tuple[Any, int]:
    """What the doctor says, and the number of weights."""
    from prefrl.models.footprint import weights_of
    from prefrl.scripts.checkup.batches import Batches
    from prefrl.scripts.checkup.findings import Section
    from prefrl.scripts.checkup.resources import estimated_footprint
    from prefrl.scripts.checkup.rows import check_rows
    from prefrl.scripts.checkup.subject import Subject
    from prefrl.scripts.train import datasets_of

    row, script, config = _run(algorithm, model)
    subject = Subject(row, script, config)
    raw, evaluated = datasets_of(script, config)
    rows = check_rows(Section("Rows"), subject, raw, evaluated)
    footprint = estimated_footprint(subject, rows, Batches.of(subject, len(raw)))
    return footprint, weights_of(subject.model).count


def _memory(name: str) -> float:
    """MiB of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


if __name__ == "__main__":
    main()
