"""SmolLM2 and rows of GSM8K, which the measurements of this folder share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.inputs import add_noise

__all__ = ["Inputs", "graded_solutions", "pairs", "split", "worked_examples"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is measured on: folders of the model and of GSM8K."""

    model: Path
    gsm8k: Path

    def policy(self) -> Any:
        """The model, in float32."""
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)

    def reference(self) -> Any:
        """The model with some noise."""
        torch.manual_seed(1)
        return add_noise(self.policy())

    def reward_model(self) -> Any:
        """The model with a random score head."""
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_pretrained(self.model, dtype=torch.float32, num_labels=1)

    def tokenizer(self) -> Any:
        """Its tokenizer, with the chat template."""
        return AutoTokenizer.from_pretrained(self.model)


def worked_examples(inputs: Inputs) -> Dataset:
    """Questions with worked solutions, as prompt and completion."""
    rows = _lines(inputs.gsm8k / "train.jsonl")
    return Dataset.from_list(
        [{"prompt": _user(row["question"]), "completion": _answer(row["answer"])} for row in rows]
    )


def graded_solutions(inputs: Inputs) -> list[dict[str, Any]]:
    """Questions with `solutions`, a list of four pairs (text, is right), of which some are right and some wrong."""
    rows = []
    for line in _lines(inputs.gsm8k / "example_model_solutions.jsonl"):
        found = [(value["solution"], value["is_correct"]) for value in line.values() if isinstance(value, dict)]
        if {is_right for _, is_right in found} == {True, False}:
            rows.append({"prompt": _user(line["question"]), "solutions": found})
    return rows


def pairs(inputs: Inputs) -> Dataset:
    """The first right and the first wrong solution of each question that has both."""
    return Dataset.from_list(
        [
            {
                "prompt": row["prompt"],
                **{
                    side: _answer(next(text for text, is_right in row["solutions"] if is_right is wanted))
                    for side, wanted in (("chosen", True), ("rejected", False))
                },
            }
            for row in graded_solutions(inputs)
        ]
    )


def split(rows: Dataset, num_held_out: int) -> tuple[Dataset, Dataset]:
    """Rows to train on, and rows spread evenly over the dataset that are held out."""
    interval = len(rows) // num_held_out
    held_out = range(0, interval * num_held_out, interval)
    return rows.select(sorted(set(range(len(rows))) - set(held_out))), rows.select(held_out)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]
