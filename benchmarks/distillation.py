"""What a story model's first layers learn from all of them, with and without credit for later tokens.

    python -m benchmarks.distillation STORIES260K [--steps 200]
    python -m benchmarks.distillation

The student is the first 3 of the 5 layers of the teacher, stories260K. In each step it completes 12 beginnings of
stories, 4 times each, with 48 tokens. The reverse KL is that of these samples, and the forward KL that on the
teacher's own continuations of 12 other beginnings, after every 10 steps. Without a model, the figures of the docs are
drawn again from `results/distillation.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PrinterCallback, TrainerCallback

from benchmarks.curves import FIGURES, Point, curves
from prefrl import DistillationConfig, DistillationTrainer

__all__ = ["Learned", "figures", "first_layers", "main", "table"]

RESULTS = Path(__file__).parent / "results" / "distillation.json"
LAYERS, LENGTH, SEEDS, EVERY, WINDOW = 3, 48, 3, 10, 5
PROMPTS = (
    *("Once upon a time", "Lily and Tom", "The dog was", "One day a", "There was a", "In the park"),
    *("The sun was", "A little boy", "Mom said", "The cat saw", "He wanted to", "She went to"),
)
HELD_OUT = (
    *("Tim had a", "The bird was", "It was a", "A big bear", "Sam liked to", "One night"),
    *("The girl ran", "Dad took", "They saw a", "Ben and Mia", "At the beach", "The old man"),
)
# A text of the teacher: tokens of its beginning, and [16, T] ids.
Text = tuple[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Learned:
    """One run. Divergences are in nats per token."""

    later_tokens: bool
    seed: int
    cpu_s: float  # of training, without the measurements
    reverse: list[float]  # of each step, on its own samples
    entropy: list[float]  # of each step, in nats per token
    forward: list[tuple[int, float]]  # step and value, on the held-out texts
    length: list[float]  # of the completions of each step, in tokens


def first_layers(folder: str, count: int) -> PreTrainedModel:
    """A model's first layers, with its embeddings and its head."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:count]
    return model  # type: ignore[no-any-return]


class Measure(TrainerCallback):
    """Measures the forward KL on the teacher's texts, and how long that takes."""

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel, tokenizer: Any) -> None:
        self.student, self.teacher = student, teacher
        torch.manual_seed(0)
        self.texts = [_text(teacher, tokenizer, beginning) for beginning in HELD_OUT]
        self.cpu_s = 0.0
        self.found = [(0, self.forward_kl())]

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step % EVERY == 0:
            start = time.process_time()
            self.found.append((state.global_step, self.forward_kl()))
            self.cpu_s += time.process_time() - start

    @torch.no_grad()
    def forward_kl(self) -> float:
        """The mean over tokens of KL(teacher || student)."""
        total, count = 0.0, 0
        for start, ids in self.texts:
            log_p, log_q = (
                model(ids).logits[:, start - 1 : -1].log_softmax(-1) for model in (self.student, self.teacher)
            )
            total += float((log_q.exp() * (log_q - log_p)).sum())
            count += log_p[..., 0].numel()
        return round(total / count, 4)


def _text(teacher: PreTrainedModel, tokenizer: Any, beginning: str) -> Text:
    ids = tokenizer(beginning, return_tensors="pt").input_ids.repeat(16, 1)
    lengths = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH}
    plain = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": 0}
    return ids.shape[1], teacher.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **plain)


def learn(folder: str, *, later_tokens: bool, seed: int, steps: int) -> Learned:
    """One run with the model in a folder as the teacher."""
    student = first_layers(folder, LAYERS)
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    measure = Measure(student, teacher, tokenizer)
    with tempfile.TemporaryDirectory() as output:
        config = DistillationConfig(
            output_dir=output,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=4 * len(PROMPTS),
            num_generations=4,
            max_completion_length=LENGTH,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            later_tokens=later_tokens,
            seed=seed,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        rows = Dataset.from_list([{"prompt": beginning} for beginning in PROMPTS])
        trainer = DistillationTrainer(student, teacher, config, rows, processing_class=tokenizer, callbacks=[measure])
        trainer.remove_callback(PrinterCallback)
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start - measure.cpu_s
    logs = [log for log in trainer.state.log_history if "divergence" in log]
    names = ("divergence", "entropy", "completions/mean_length")
    reverse, entropy, length = ([round(log[name], 4) for log in logs] for name in names)
    return Learned(later_tokens, seed, round(seconds, 1), reverse, entropy, measure.found, length)


def figures(runs: Sequence[Mapping[str, Any]], folder: Path = FIGURES) -> None:
    """Draw the two divergences of all runs."""
    for name, title in (("reverse", "reverse KL on its own samples"), ("forward", "forward KL on held-out texts")):
        lines = [(f"later_tokens: {str(run['later_tokens']).lower()}", _points(run[name])) for run in runs]
        (folder / f"distillation_{name}.svg").write_text(curves(lines, f"{title}, nats per token:"), encoding="utf-8")


def _points(values: Sequence[Any]) -> list[Point]:
    """Steps and values; those of each step as means of `WINDOW` steps."""
    if values and isinstance(values[0], list | tuple):
        return [(step, value) for step, value in values]
    parts = [values[start : start + WINDOW] for start in range(0, len(values), WINDOW)]
    return [(number * WINDOW + (len(part) + 1) / 2, fmean(part)) for number, part in enumerate(parts)]


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table with a line for each run."""
    steps = [step for step in (60, 200) if step <= len(runs[0]["reverse"])]
    names = {"entropy": "entropy", "reverse": "reverse KL", "forward": "forward KL"}
    heads = ["`later_tokens`", "seed", *(f"{name}, step {step}" for name in names.values() for step in (0, *steps))]
    lines = [heads, ["---"] * len(heads)]
    for run in runs:
        at = dict(run["forward"])
        values = [_at(run[name], step) for name in names if name != "forward" for step in (0, *steps)]
        values += [at[step] for step in (0, *steps)]
        lines.append([f"`{str(run['later_tokens']).lower()}`", str(run["seed"]), *(f"{v:.2f}" for v in values)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _at(values: Sequence[float], step: int) -> float:
    """The mean of the last `WINDOW` steps; the first value before them."""
    return fmean(values[max(step - WINDOW, 0) : max(step, 1)])


def main(argv: list[str] | None = None) -> int:
    """Measure, or draw again what was measured; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", nargs="?", help="folder of stories260K, as a checkpoint of transformers")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.teacher is not None:
        runs = []
        for seed in range(SEEDS):
            for later_tokens in (False, True):
                run = learn(arguments.teacher, later_tokens=later_tokens, seed=seed, steps=arguments.steps)
                runs.append(asdict(run))
                print(table(runs).splitlines()[-1], f"{run.cpu_s} CPU s", flush=True)
        RESULTS.write_text(json.dumps(runs) + "\n", encoding="utf-8")
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))
    figures(runs)
    RESULTS.with_suffix(".md").write_text(table(runs), encoding="utf-8")
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
