"""Train every preference trainer on right and wrong solutions of GSM8K; held-out margin and accuracy before and after.

    python -m benchmarks.preference_gsm8k example_model_solutions.jsonl [trainer ...]

The file comes from the repository openai/grade-school-math. It has questions with the solutions of four models, each
marked right or wrong. A pair is the first right and the first wrong solution of a question; unpaired rows are all
solutions. The model has 0.4 M random parameters; one question in ten is held out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast, Qwen2Config

from prefrl.registry import REGISTRY

OPTIONS: dict[str, dict[str, Any]] = {
    "dpo": {"learning_rate": 1e-3},
    "kto": {"learning_rate": 1e-3},
    "orpo": {"learning_rate": 1e-3, "beta": 1.0},
    # SimPO, because the rewards of plain CPO are sums over tokens: for a random model they only reflect the length.
    "cpo": {"learning_rate": 1e-3, "loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    "bco": {"learning_rate": 1e-3},
    "reward": {"learning_rate": 1e-3},
}
UNPAIRED = ("kto", "bco")


def rows_of(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The pairs, and the single solutions with their labels; both with the number of their question."""
    pairs, singles = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        question = json.loads(line)
        answers = [value for value in question.values() if isinstance(value, dict)]
        prompt = question["question"] + "\n"
        sides: dict[bool, list[str]] = {True: [], False: []}
        for answer in answers:
            sides[answer["is_correct"]].append(answer["solution"])
            singles.append(
                {"number": number, "prompt": prompt, "completion": answer["solution"], "label": answer["is_correct"]}
            )
        if sides[True] and sides[False]:
            pairs.append({"number": number, "prompt": prompt, "chosen": sides[True][0], "rejected": sides[False][0]})
    return pairs, singles


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with 2,048 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<|pad|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")


def make_model(algorithm: str, seed: int) -> Any:
    """A model with random weights."""
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        num_labels=1,
    )
    torch.manual_seed(seed)
    auto_class = AutoModelForSequenceClassification if algorithm == "reward" else AutoModelForCausalLM
    return auto_class.from_config(config, dtype=torch.float32)


def split(rows: list[dict[str, Any]]) -> tuple[Dataset, Dataset]:
    """The training rows, and the held-out rows of every tenth question."""
    training = [row for row in rows if row["number"] % 10]
    held_out = [row for row in rows if row["number"] % 10 == 0]
    return tuple(Dataset.from_list(part).remove_columns("number") for part in (training, held_out))  # type: ignore[return-value]


def run(algorithm: str, training: Dataset, held_out: Dataset, tokenizer: Any, steps: int, seed: int) -> dict[str, Any]:
    """Evaluate, train, evaluate."""
    row = REGISTRY[algorithm]
    with tempfile.TemporaryDirectory() as folder:
        args = row.load_config()(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=32 if algorithm in UNPAIRED else 16,
            per_device_eval_batch_size=32,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            seed=seed,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            invalid_rows="drop",
            **OPTIONS[algorithm],
        )
        trainer = row.load_trainer()(
            make_model(algorithm, seed),
            args=args,
            train_dataset=training,
            eval_dataset=held_out,
            processing_class=tokenizer,
        )
        before = trainer.evaluate()
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {"before": before, "after": trainer.evaluate(), "losses": losses, "seconds": seconds}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("trainers", nargs="*", choices=[*OPTIONS, []], default=[])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pairs, singles = rows_of(arguments.data)
    tokenizer = make_tokenizer([row["prompt"] + row["completion"] for row in singles])
    table = Table("trainer", "first loss", "last 10", "held-out margin", "accuracy", "steps", "seconds")
    for name in arguments.trainers or OPTIONS:
        training, held_out = split(singles if name in UNPAIRED else pairs)
        result = run(name, training, held_out, tokenizer, arguments.steps, arguments.seed)
        shown = [
            _change(result, *keys) for keys in (("rewards/margins", "margin"), ("rewards/accuracies", "accuracy"))
        ]
        last = sum(result["losses"][-10:]) / 10
        table.add_row(
            name, f"{result['losses'][0]:.4f}", f"{last:.4f}", *shown, str(arguments.steps), f"{result['seconds']:.0f}"
        )
    Console().print(table)


def _change(result: dict[str, Any], *names: str) -> str:
    for name in names:
        if f"eval_{name}" in result["before"]:
            return f"{result['before'][f'eval_{name}']:.3f} -> {result['after'][f'eval_{name}']:.3f}"
    return "-"


if __name__ == "__main__":
    main()
