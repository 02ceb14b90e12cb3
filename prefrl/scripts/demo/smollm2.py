"""`prefrl demo --model smollm2`: a real model of 135 million weights learns to add."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefrl.scripts.demo.parts import be_quiet, greedy_texts, keep_results
from prefrl.scripts.demo.smollm2_model import cached_smollm2
from prefrl.trainer.grpo_config import GRPOConfig
from prefrl.trainer.grpo_trainer import GRPOTrainer

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["gives_number", "is_right", "make_questions", "run"]

NUM_HELD_OUT = 48
MAX_TOKENS = 16
STEPS = 24


def run(seed: int, output_dir: Path, console: Console, *, model_folder: Path | None = None) -> dict[str, Any]:
    """Answer, train, answer again; write summary, curve, metrics and model into `output_dir`; return the summary.

    `model_folder` holds SmolLM2; None: it is fetched once, see `cached_smollm2`.
    """
    started, started_cpu = time.monotonic(), time.process_time()
    be_quiet()
    output_dir.mkdir(parents=True, exist_ok=True)
    folder = model_folder or cached_smollm2(console.print)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    train, held_out = make_questions(seed)

    before = _answers(model, tokenizer, held_out)
    console.print(_table("Held-out questions, greedy answers before training", held_out, {"answer": before}))
    console.rule("GRPO: 1 for the right number alone, 0.3 for an answer that ends with it")
    _train(model, tokenizer, train, seed=seed, output_dir=output_dir)
    after = _answers(model, tokenizer, held_out)

    summary = {
        "accuracy_base": _accuracy(before, held_out),
        "accuracy_grpo": _accuracy(after, held_out),
        "grpo_steps": STEPS,
        "seconds_total": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time() - started_cpu, 1),
        "seed": seed,
    }
    keep_results(output_dir, summary, model, tokenizer)
    console.print(_table("Held-out questions, greedy answers", held_out, {"before": before, "after": after}))
    for stage, name in (("base", "before"), ("grpo", "after")):
        console.print(
            f"held-out answers that end with the right number, {name} GRPO: {summary[f'accuracy_{stage}']:.3f}"
        )
    console.print(f"{summary['seconds_total']} s, {summary['cpu_seconds']} of CPU; everything is in {output_dir}")
    console.print(f"To go on: prefrl chat {output_dir / 'model'}, or prefrl report {output_dir}")
    return summary


def make_questions(seed: int) -> tuple[Dataset, Dataset]:
    """Sums of two numbers from 2 to 29; the held-out ones are never trained on."""
    pairs = [(a, b) for a in range(2, 30) for b in range(2, 30)]
    random.Random(seed).shuffle(pairs)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}],
            "answer": str(a + b),
        }
        for a, b in pairs
    ]
    return Dataset.from_list(rows[NUM_HELD_OUT:]), Dataset.from_list(rows[:NUM_HELD_OUT])


def is_right(text: str, answer: str) -> bool:
    """Whether the last number of the text is the answer."""
    return re.findall(r"\d+", text)[-1:] == [answer]


def gives_number(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 for the right number alone, 0.3 for another text whose last number is right, 0 otherwise."""
    texts = [messages[-1]["content"] for messages in completions]
    return [
        1.0 if text.strip() == expected else 0.3 * is_right(text, expected)
        for text, expected in zip(texts, answer, strict=True)
    ]


def _train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, train: Dataset, *, seed: int, output_dir: Path
) -> None:
    config = GRPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=STEPS,
        per_device_train_batch_size=64,  # 8 questions
        num_generations=8,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        top_k=None,
        beta=0.0,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=False,  # which transformers does while it is told to log errors alone
        use_cpu=True,
    )
    trainer = GRPOTrainer(model, gives_number, config, train, processing_class=tokenizer)
    trainer.train()
    trainer.generator.close()


def _answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: Dataset) -> list[str]:
    prompts = [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        for prompt in questions["prompt"]
    ]
    return greedy_texts(model, tokenizer, prompts, max_tokens=MAX_TOKENS)


def _accuracy(answers: list[str], questions: Dataset) -> float:
    rights: int = sum(map(is_right, answers, questions["answer"]))
    return rights / len(answers)


def _table(title: str, questions: Dataset, answers: dict[str, list[str]]) -> Table:
    """The first ten questions with what the model answered."""
    table = Table("question", "right", *answers, title=title)
    for i in range(10):
        table.add_row(
            questions[i]["prompt"][0]["content"], questions[i]["answer"], *(given[i] for given in answers.values())
        )
    return table
