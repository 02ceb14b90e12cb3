"""What the sides of both libraries share: common arguments, and the definition of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback

from benchmarks.inputs import (
    POLICY_SEED,
    REFERENCE_SEED,
    TokenCounter,
    build_model,
    build_processor,
    build_tokenizer,
    rows_of,
)
from benchmarks.meter import MeterCallback, TurnMeter
from benchmarks.worker import Outcome

if TYPE_CHECKING:
    from benchmarks.workloads import Workload

__all__ = ["Job", "Setup", "job_of", "offline_arguments", "taught_arguments"]

# Runs all turns, and returns what the library logged.
Job = Callable[[], Outcome]


@dataclass
class Setup:
    """A workload in one process."""

    workload: Workload
    meter: TurnMeter
    counter: TokenCounter
    folder: str  # an empty folder for this process only
    device: str
    num_turns: int

    def arguments(self) -> dict[str, Any]:
        """Options for the configs of both libraries. With this learning rate all steps do the same work."""
        workload = self.workload
        num_rows = len(workload.lengths) // (2 if workload.task in ("dpo", "reward") else 1)
        return {
            "output_dir": self.folder,
            "max_steps": self.num_turns * workload.steps_per_turn,
            "per_device_train_batch_size": num_rows * workload.num_prompts,
            "learning_rate": 1e-9,
            "optim": "adamw_torch" if workload.task == "grpo" else "sgd",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": self.device == "cpu",
            "bf16": self.device == "cuda",
            **workload.options,
        }

    def callback(self) -> MeterCallback:
        """The callback that takes turns in the trainer's loop."""
        return MeterCallback(self.meter, steps_per_turn=self.workload.steps_per_turn)

    def generation_job(self, generate: Callable[[], int]) -> Job:
        """A job whose turns call `generate`, which returns the number of tokens."""

        def run() -> Outcome:
            self.meter.begin()
            for _ in range(self.num_turns):
                self.counter.total += generate()
                self.meter.end_turn()
            return Outcome()

        return run


def offline_arguments(setup: Setup) -> dict[str, Any]:
    """The arguments of both libraries' trainers on fixed datasets."""
    workload = setup.workload
    arguments: dict[str, Any] = {
        "model": build_model(
            workload.model, seed=POLICY_SEED, is_classifier=workload.task == "reward", device=setup.device
        ),
        "train_dataset": rows_of(workload),
        "processing_class": build_tokenizer(workload.model.vocab_size),
        "callbacks": [setup.callback()],
    }
    if workload.task in ("dpo", "kto"):
        arguments["ref_model"] = build_model(workload.model, seed=REFERENCE_SEED, device=setup.device)
    return arguments


def taught_arguments(setup: Setup) -> dict[str, Any]:
    """The arguments of both libraries' trainers that learn from a teacher."""
    sizes = setup.workload.model
    return {
        "model": build_model(sizes, seed=POLICY_SEED, device=setup.device),
        "teacher_model": build_model(sizes, seed=REFERENCE_SEED, device=setup.device),
        "processing_class": build_processor(setup.workload),
        "callbacks": [setup.callback()],
    }


def job_of(setup: Setup, trainer: Any) -> Job:
    """The job that runs the trainer's own loop."""
    trainer.remove_callback(PrinterCallback)

    def run() -> Outcome:
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        totals = [0, *(int(log.get("num_tokens", 0)) for log in logs)]
        counts = tuple(after - before for before, after in pairwise(totals))
        return Outcome(loss=logs[0]["loss"], grad_norm=logs[0]["grad_norm"], num_tokens=counts)

    return run
