"""Peak memory of one training step of each given case, in a separate process. Reads `Case`s as text, writes JSON.

Growth is the peak of a step minus the memory before it, the least of the steps after the first, in which libraries are
loaded and models checked. On a busy machine, pages of libraries may go and come back within one step, but not in each.
Growth includes the gradients, and what the step computes before its first backward pass: completions, reference
log-probs.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    TrainerCallback,
)

from prefrl.generation.base import OnDemand
from prefrl.losses import logprobs
from prefrl.registry import REGISTRY
from prefrl.types import Completion
from tests.assets import tiny_tokenizer
from tests.launch import run_module

if TYPE_CHECKING:
    from prefrl.generation.base import Pending, SamplingParams, WeightSource

MIB = 2**20

PROMPT_LENGTH = 256
COMPLETION_LENGTHS = (16, 28, 40, 56, 72, 90, 110, 128)  # of a group
PAIR_LENGTHS = (200, 120)  # of the chosen and the rejected side
TEXT_LENGTHS = (512, 256, 128, 64)
# Dataset rows of a case, by algorithm.
ROWS = {"grpo": 1, "dpo": 2, "reward": 2, "sft": 4}
# Forward tokens that half of these rows are, about.
BUDGET = {
    "grpo": PROMPT_LENGTH + sum(COMPLETION_LENGTHS[:6]),
    "dpo": PROMPT_LENGTH + sum(PAIR_LENGTHS),
    "reward": PROMPT_LENGTH + sum(PAIR_LENGTHS) + 2,  # and what marks the end of a text
    "sft": TEXT_LENGTHS[0],
}
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """A step of `times` the rows of `ROWS`."""

    algorithm: str
    times: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    full_logits: bool = False  # what a regression of the head would do


class ScriptedGenerator:
    """`prefrl.generation.base.Generator` of random tokens in the lengths of `COMPLETION_LENGTHS`."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        return [
            [
                self._completion(seed, COMPLETION_LENGTHS[i % len(COMPLETION_LENGTHS)])
                for i in range(sampling.num_samples)
            ]
            for seed in seeds
        ]

    def _completion(self, seed: int, length: int) -> Completion:
        generator = torch.Generator().manual_seed(seed + length)
        ids = torch.randint(10, 100, (length,), generator=generator).tolist()
        return Completion(ids, "length", [-4.6] * length, [True] * length, [0] * length)

    def start(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, seeds: Sequence[int]) -> Pending:
        """See `generate`."""
        return OnDemand(lambda: self.generate(prompts, sampling, seeds=seeds))

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """No weights are used."""

    def invalidate(self) -> None:
        """As `sync`."""

    def close(self) -> None:
        """Nothing is held."""


class Gauge(Protocol):
    """Bytes held now, and at most since `reset`."""

    def reset(self) -> None: ...
    def held(self) -> int: ...
    def peak(self) -> int: ...


class ProcessGauge:
    """Resident memory of this process, as Linux counts it."""

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def held(self) -> int:
        return self._status("VmRSS")

    def peak(self) -> int:
        return self._status("VmHWM")

    def _status(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class CudaGauge:
    """Memory that torch's allocator gave out on the current CUDA device."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def held(self) -> int:
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


class _Watch(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Reads the gauge over each step after the first."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._held = 0
        self.growths: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 1:
            self.growths.append(self._gauge.peak() - self._held)
        self._held = self._gauge.held()
        self._gauge.reset()


def growth_mib(case: Case, gauge: Gauge, folder: Path) -> float:
    """Of steps on the same rows."""
    whole = {"default_chunk_size": lambda device: 2**20} if case.full_logits else {}
    # What a small vocabulary keeps is bounded by a constant that is larger than all that is measured here.
    with patch.multiple(logprobs, KEPT_BYTES=0, **whole):
        return _growth_mib(case, gauge, folder)


def _growth_mib(case: Case, gauge: Gauge, folder: Path) -> float:
    watch = _Watch(gauge)
    row = REGISTRY[case.algorithm]
    num_rows = ROWS[case.algorithm] * case.times
    options = {
        "output_dir": str(folder),
        "use_cpu": isinstance(gauge, ProcessGauge),
        "max_steps": 3,
        "per_device_train_batch_size": num_rows,
        "optim": "sgd",
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    arguments: dict[str, Any] = {}
    if case.algorithm == "grpo":
        options |= {"num_generations": 8, "max_completion_length": 128, "per_device_train_batch_size": 8 * num_rows}
        arguments["reward_funcs"] = _length_reward
    trainer = row.load_trainer()(
        model=_model(case.algorithm),
        args=row.load_config()(**(options | case.options)),
        train_dataset=Dataset.from_list([_ROWS[case.algorithm](i) for i in range(num_rows)]),
        processing_class=tiny_tokenizer(chat_template=None),
        callbacks=[watch],
        **arguments,
    )
    if case.algorithm == "grpo":
        trainer.generator = ScriptedGenerator()
    trainer.train()
    return min(watch.growths) / MIB


def _model(algorithm: str) -> PreTrainedModel:
    auto_class: Any = AutoModelForCausalLM
    config = AutoConfig.for_model("qwen2", **SIZES, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    if algorithm == "reward":
        auto_class = AutoModelForSequenceClassification
        config.num_labels = 1
    torch.manual_seed(0)
    model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
    return model


def _text(seed: int, length: int) -> str:
    """One token for each character."""
    codes = torch.randint(97, 123, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return "".join(map(chr, codes))


def _pair(i: int) -> dict[str, str]:
    # The tokenizer's end-of-sequence token comes behind each side.
    chosen, rejected = (_text(3 * i + side, length - 1) for side, length in enumerate(PAIR_LENGTHS))
    return {"prompt": _text(3 * i + 2, PROMPT_LENGTH), "chosen": f"a{chosen[1:]}", "rejected": f"b{rejected[1:]}"}


_ROWS: dict[str, Any] = {
    "grpo": lambda i: {"prompt": _text(i, PROMPT_LENGTH)},
    "dpo": _pair,
    "reward": _pair,
    "sft": lambda i: {"text": _text(i, TEXT_LENGTHS[i % 4] - 1)},
}


def _length_reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def measure(cases: Sequence[Case]) -> list[float]:
    """Growth in MiB of each case, which gets a process for itself."""
    output = run_module("tests.contract.memory_worker", repr([astuple(case) for case in cases]))
    return [json.loads(line)["growth_mib"] for line in output.splitlines() if line.startswith('{"growth_mib"')]


def _main() -> None:
    prctl_disable_huge_pages = 41
    trim_threshold, mmap_threshold = -1, -3  # of mallopt
    libc = ctypes.CDLL(None)
    libc.prctl(prctl_disable_huge_pages, 1, 0, 0, 0)
    for threshold in (trim_threshold, mmap_threshold):  # whatever is freed goes back to the system at once
        assert libc.mallopt(threshold, 2**16) == 1
    gc.freeze()  # a collection would copy what the processes share
    for values in ast.literal_eval(sys.argv[1]):
        child = os.fork()
        if child == 0:
            with tempfile.TemporaryDirectory() as folder:
                growth = growth_mib(Case(*values), ProcessGauge(), Path(folder))
            print(json.dumps({"growth_mib": growth}), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    _main()
