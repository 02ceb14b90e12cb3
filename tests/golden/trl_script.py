"""A script for TRL, and what both libraries get to run it: the original there, the migrated one here."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from typing import Any

from tests.assets import tiny_model, tiny_tokenizer
from tests.contract.cases import dataset_of

__all__ = ["SCRIPT", "values_of"]

SCRIPT = '''\
"""Fine-tune on pairs: trl dpo --model_name_or_path model"""
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer


def main():
    training_args = DPOConfig(
        output_dir="run",
        loss_type=["sigmoid", "sft"],
        loss_weights=[1.0, 0.5],
        beta=0.2,
        learning_rate=1e-3,  # of the first step, without a warm-up
        lr_scheduler_type="cosine",
        optim="sgd",
        max_grad_norm=1e9,
        max_length=64,
        padding_free=False,
        pad_to_multiple_of=None,
        per_device_train_batch_size=8,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False  # equal to the last digits
    )
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained("model"),
        ref_model=AutoModelForCausalLM.from_pretrained("reference"),
        args=training_args,
        train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
        processing_class=AutoTokenizer.from_pretrained("model"),
    )
    trainer.train()
    return trainer.state.log_history[0]


FIRST_LOG = main()
'''


def values_of(script: str) -> dict[str, float]:
    """The loss and the gradient norm of the first step of a script, with random models and 8 ragged rows."""
    names: dict[str, Any] = {"__name__": "script"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, seed in (("model", 0), ("reference", 5)):
            tiny_model(seed=seed).save_pretrained(name)
            tiny_tokenizer(chat_template=None).save_pretrained(name)
        with open("pairs.jsonl", "w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row)}{os.linesep}" for row in dataset_of("dpo", 8))
        exec(compile(script, "script", "exec"), names)
    return {key: names["FIRST_LOG"][key] for key in ("loss", "grad_norm")}
