"""CPU seconds and peak memory of one DPO and one reward-model step: prefrl against TRL 1.16, each through its trainer.

    pip install -e '.[bench]' && OMP_NUM_THREADS=1 python -m benchmarks.preference_step [--runs 5]

4 pairs with prompts of 256 tokens and responses of 64 to 256 tokens (and 4 of equal lengths, 160), 5.2 M parameters,
vocabulary 8,192, float32. TRL runs with its fastest settings on a CPU: bf16 and gradient checkpointing off. Loss and
gradient norm are compared before a ratio is printed. A step is a whole optimizer step; the two libraries take turns;
medians. Memory is the growth of the resident set over the loaded process in the first step, one process for each case.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    TrainerCallback,
)

V = 8192
PROMPT = 256
LENGTHS = {
    "ragged": [(64, 256), (96, 224), (256, 128), (192, 160)],
    "equal": [(160, 160)] * 4,
}
# Options of both libraries, then of one.
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"trainer": "DPO", "options": {"max_length": None}},
    "dpo precomputed": {"trainer": "DPO", "options": {"max_length": None, "precompute_ref_log_probs": True}},
    "reward": {"trainer": "Reward", "options": {"max_length": None}},
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word t0, t1, ..."""
    vocabulary = {"<pad>": 0, "<end>": 1, **{f"t{i}": i for i in range(2, V)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def rows(kind: str, seed: int) -> Dataset:
    """4 pairs of random words; a response's last token is the end token that both libraries add."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> str:
        return " ".join(f"t{i}" for i in torch.randint(2, V, (count,), generator=generator).tolist())

    return Dataset.from_list(
        [
            {"prompt": words(PROMPT), "chosen": " " + words(chosen - 1), "rejected": " " + words(rejected - 1)}
            for chosen, rejected in LENGTHS[kind]
        ]
    )


def model(trainer: str, seed: int = 0) -> Any:
    """Model S of the measurements: 5.2 M parameters."""
    config = Qwen2Config(
        vocab_size=V,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        num_labels=1,
    )
    torch.manual_seed(seed)
    auto_class = AutoModelForSequenceClassification if trainer == "Reward" else AutoModelForCausalLM
    return auto_class.from_config(config, dtype=torch.float32)


class Meter(TrainerCallback):
    """CPU seconds from the end of a step to the end of the next, and by how much the resident set grew in the first.

    So all that a step needs counts, whether a library does it before or after HuggingFace's begin of the step.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.growth_mib = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._base = _status("VmRSS")
        self._start = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.process_time()
        self.seconds.append(now - self._start)
        self._start = now
        if len(self.seconds) == 1:
            self.growth_mib = (_status("VmHWM") - self._base) / 1024


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0])


def train(library: str, case: str, kind: str, steps: int) -> tuple[Meter, dict[str, float]]:
    """Steps on the same 4 pairs; the meter, and the first log."""
    spec = CASES[case]
    module = import_module(library)
    meter = Meter()
    own: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False} if library == "trl" else {}
    with tempfile.TemporaryDirectory() as folder:
        args = getattr(module, f"{spec['trainer']}Config")(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-6,
            optim="sgd",
            max_grad_norm=1e9,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **own,
            **spec["options"],
        )
        extra = {"ref_model": model("DPO", seed=1)} if spec["trainer"] == "DPO" else {}
        trainer = getattr(module, f"{spec['trainer']}Trainer")(
            model(spec["trainer"]),
            args=args,
            train_dataset=rows(kind, seed=0),
            processing_class=tokenizer(),
            callbacks=[meter],
            **extra,
        )
        trainer.train()
        return meter, trainer.state.log_history[0]


def memory_of(library: str, case: str, kind: str) -> float:
    """MiB, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.preference_step", "--memory_of", library, case, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["growth_mib"])


def compare(case: str, kind: str, runs: int) -> list[str]:
    """A row of the table."""
    seconds: dict[str, list[float]] = {"trl": [], "prefrl": []}
    logs = {}
    for _ in range(runs):
        for library, values in seconds.items():
            meter, logs[library] = train(library, case, kind, 3)
            values.append(statistics.median(meter.seconds[1:]))
    for key in ("loss", "grad_norm"):
        difference = abs(logs["trl"][key] - logs["prefrl"][key]) / abs(logs["trl"][key])
        assert difference < 1e-4, f"{case}, {kind}: {key} differs: {logs}"
    ratios = [a / b for a, b in zip(seconds["trl"], seconds["prefrl"], strict=True)]
    medians = [statistics.median(seconds[library]) for library in ("trl", "prefrl")]
    memory = [memory_of(library, case, kind) for library in ("trl", "prefrl")]
    return [
        f"{case}, {kind}",
        *(f"{value:.2f}" for value in medians),
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        *(f"{value:.0f}" for value in memory),
        f"{memory[0] / memory[1]:.1f}",
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--memory_of", nargs=3)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.memory_of:
        meter, _ = train(*arguments.memory_of, 1)
        print(json.dumps({"growth_mib": meter.growth_mib}))
        return
    table = Table("step", "TRL, s", "prefrl, s", "ratio", "TRL, MiB", "prefrl, MiB", "ratio")
    for case in CASES:
        for kind in LENGTHS:
            row = compare(case, kind, arguments.runs)
            print(row, flush=True)  # what is measured is not lost if the run is stopped
            table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
