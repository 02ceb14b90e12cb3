"""Train SmolLM2: DPO on right and wrong solutions of GSM8K, SFT on worked ones, and the demo's GRPO."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console

from benchmarks.real.inputs import Inputs, pairs, split, worked_examples
from prefrl.registry import REGISTRY
from prefrl.scripts import demo as demo_smollm2

__all__ = ["measure_demo", "measure_dpo", "measure_sft"]

STEPS = 16
NUM_ROWS = 8  # of a step
NUM_HELD_OUT = 40
SEEDS = (0, 1, 2)


def measure_dpo(inputs: Inputs) -> list[dict[str, Any]]:
    """Held-out loss, margin and accuracy of pairs before and after DPO."""
    options = {"learning_rate": 5e-6, "precompute_ref_log_probs": True}
    return [_offline(inputs, "dpo", pairs(inputs), ("loss", "rewards/margins", "rewards/accuracies"), options)]


def measure_sft(inputs: Inputs) -> list[dict[str, Any]]:
    """Held-out loss and token accuracy of worked solutions before and after SFT."""
    return [_offline(inputs, "sft", worked_examples(inputs), ("loss", "mean_token_accuracy"), {"learning_rate": 5e-5})]


def measure_demo(inputs: Inputs) -> Iterator[dict[str, Any]]:
    """A row for each seed of `prefrl demo --model smollm2`."""
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            yield demo_smollm2.run_smollm2(seed, Path(folder), Console(width=120), model_folder=inputs.model)
        gc.collect()


def _offline(
    inputs: Inputs, algorithm: str, rows: Dataset, metrics: tuple[str, ...], options: dict[str, Any]
) -> dict[str, Any]:
    row = REGISTRY[algorithm]
    training, held_out = split(rows, NUM_HELD_OUT)
    with tempfile.TemporaryDirectory() as folder:
        args = row.load_config()(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=NUM_ROWS,
            per_device_eval_batch_size=NUM_ROWS,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        # Only the rows that the steps take: the reference's log-probs are computed for every row.
        trainer = row.load_trainer()(
            inputs.policy(),
            args=args,
            train_dataset=training.shuffle(seed=0).select(range(STEPS * NUM_ROWS)),
            eval_dataset=held_out,
            processing_class=inputs.tokenizer(),
        )
        before = trainer.evaluate()
        started, started_cpu = time.perf_counter(), time.process_time()
        trainer.train()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        after = trainer.evaluate()
    changes = {name: (before[f"eval_{name}"], after[f"eval_{name}"]) for name in metrics}
    return {"name": algorithm, "metrics": changes, "steps": STEPS, "seconds": seconds, "cpu_seconds": cpu_seconds}
