"""One case for each algorithm of the registry: a trainer on a tiny model and ragged data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from prefrl.registry import REGISTRY
from prefrl.trainer.base_trainer import BaseTrainer
from tests.assets import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]

QUESTIONS = ["1+1=", "What is 23 + 4?", "9-3=", "a", "Count: one, two,", "7*8 is", "12/4", "Say hello to the world."]
ANSWERS = ["2", "27, twenty-seven", "6", "bcd", " three, four, five, six", "56", "3", "Hello, world!"]


def ragged_reward(completions: list[str], **_: Any) -> list[float]:
    """Depends on every character, so that groups have different means and deviations."""
    return [sum(ord(c) * (i + 1) % 7 for i, c in enumerate(text)) / 10 for text in completions]


def dataset_of(algorithm: str, num_rows: int = 24) -> Dataset:
    """Rows of different lengths."""
    rows = [
        {"prompt": f"{QUESTIONS[i % 8]}{'?' * (i // 8)}", "completion": ANSWERS[(3 * i) % 8]} for i in range(num_rows)
    ]
    dataset = Dataset.from_list(rows)
    return dataset if algorithm == "sft" else dataset.remove_columns("completion")


# A step of 8 rows on one process, as SGD: the weights' change is the gradient.
OPTIONS: dict[str, dict[str, Any]] = {
    "sft": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "grpo": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 12,
        "temperature": 1.0,
        "top_k": None,
    },
}


def stopping_model(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Every fifth token ends a completion, so that lengths differ and some are cut off."""
    return tiny_model(seed=seed, eos_token_id=[1, *range(10, 128, 5)], **overrides)


def make_trainer(
    algorithm: str,
    output_dir: Path,
    *,
    model: PreTrainedModel | None = None,
    rows: int = 24,
    reward: Any = ragged_reward,
    **options: Any,
) -> BaseTrainer:
    """A trainer of the registry with deterministic data; `options` override the config."""
    row = REGISTRY[algorithm]
    extra = {key: options.pop(key) for key in ("peft_config", "eval_dataset", "callbacks") if key in options}
    config = row.load_config()(
        **(
            {
                "output_dir": str(output_dir),
                "use_cpu": True,
                "max_steps": 1,
                "learning_rate": 0.1,
                "optim": "sgd",
                "lr_scheduler_type": "constant",
                "max_grad_norm": 0.0,
                "report_to": "none",
                "disable_tqdm": True,
                "save_strategy": "no",
                "logging_steps": 1,
            }
            | OPTIONS[algorithm]
            | options
        )
    )
    arguments: dict[str, Any] = {"train_dataset": dataset_of(algorithm, rows), "processing_class": tiny_tokenizer()}
    if algorithm == "grpo":
        arguments["reward_funcs"] = reward
    return row.load_trainer()(model=model or stopping_model(), args=config, **arguments, **extra)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def update_of(trainer: BaseTrainer, *, resume_from_checkpoint: str | None = None) -> torch.Tensor:
    """The change of all weights over `train()`, as one vector; from the first weights also after a resume."""
    before = weights_of(trainer.model)
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    after = weights_of(trainer.model)
    return torch.cat([(after[name] - before[name]).flatten() for name in before])


def run_on_two_processes(name: str, options: dict[str, Any], result: Path, *checkpoint: Path) -> None:
    """Train on two gloo processes, in `result`'s folder / run, and store the update of rank 0 in `result`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "tests.contract.worker", name, repr(options), str(result), *map(str, checkpoint)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((a - b).norm() / b.norm())
