"""Saves, resumes and exports: `resume_worker FOLDER BACKEND:CASE[:CHECKPOINT]...`, on any processes.

One launch runs all backends, because imports take longer than a case. Rank 0 writes `FOLDER/results.pt`. A case is
trained and saved on the way, exported, and trained again from the saved checkpoint. A case with a checkpoint of
another run only resumes from it. `BACKEND:nan` is a training with a step that must be left out, `BACKEND:spike` one
that goes back to a checkpoint.
"""

from __future__ import annotations

import faulthandler
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from prefrl import distributed
from prefrl.metrics import Max
from prefrl.trainer.base_trainer import BaseTrainer
from prefrl.trainer.features.averages import MovingAverage
from prefrl.trainer.features.guard import Guard
from prefrl.types import LossOutput
from tests import plans
from tests.distributed.backends import enter
from tests.distributed.cases import ADAM, ATTENTION, MOVING, TIED, Case
from tests.distributed.worker import SECONDS_FOR_A_CASE, make, weights_of
from tests.process import leave_modules_uncollected

SAVED_AT = 3
# Saved in the middle of an epoch of 5 steps, which ends on the way.
SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": SAVED_AT, "rows": 40}
# Saved in the last of the four steps that learn from the first rollouts.
REUSE = {"steps_per_generation": 2, "num_iterations": 2}
CRITIC = {"critic_learning_rate": 1e-2}
# Reduced in the middle, with a state that the first reduction after resuming depends on.
FALLING: dict[str, Any] = {
    **{"lr_scheduler_type": "cosine", "weight_decay_schedule": "linear", "reduce_on_plateau": 2},
    "reduce_on_plateau_kwargs": {"metric": "loss", "patience": 1, "factor": 0.5, "threshold": 0.9},
}
AVERAGED = {"ema_decay": 0.6, "model_soup": "uniform", "eval_strategy": "steps", "eval_steps": SAVED_AT}
RATES = {"optim": "nadam", "learning_rates": {"norm": 1e-3, "mlp": 2e-2}}
RUNNING_MEAN = {"loss_type": ["bco_pair", "aot"]}
EXPORTED = {"checkpoint_kwargs": {"export_weights": True}}

RESUMED: dict[str, Case] = {
    "sft_averaged": Case("sft", {**ADAM, **RATES, **AVERAGED}, model=TIED, eval_rows=4),
    "dpo_moving": Case("dpo", {**ADAM, **MOVING, **FALLING, **RUNNING_MEAN, "optim": "muon"}, model=TIED),
    "dpo_lora": Case("dpo", ADAM, lora=ATTENTION),
    "grpo_reuse": Case("grpo", {**ADAM, **REUSE, "beta": 0.04, "teacher_kl_coef": 0.5}, model=TIED),
    "ppo_model": Case("ppo", {**ADAM, **CRITIC, "critic": "model"}, model=TIED),
    "ppo_lora_exported": Case("ppo", {**ADAM, **CRITIC, **EXPORTED}, lora=ATTENTION),
}


def folder_of(folder: Path, backend: str, name: str) -> Path:
    """Where a case has its checkpoints, and what it exports in `final`."""
    return folder / backend / "runs" / name


def run(folder: Path, backend: str, name: str, checkpoint: str | None) -> dict[str, Any]:
    """Train a case: what a test compares."""
    case = RESUMED[name]
    (folder / backend).mkdir(exist_ok=True)
    options = {**enter(backend, folder), **SAVING}
    if name == "ppo_lora_exported":
        options["upload_to"] = str(folder / "uploaded")
    result: dict[str, Any] = {}
    if checkpoint is None:
        trainer = make(name, case, folder / backend, **options)
        trainer.train()
        result["whole"], result["averages"] = weights_of(trainer), averages_of(trainer)
        trainer.save_model(str(folder_of(folder, backend, name) / "final"))
        checkpoint = str(folder_of(folder, backend, name) / f"checkpoint-{SAVED_AT}")
        if "model_soup" not in case.options:
            options["save_strategy"] = "no"
        if "upload_to" in options:  # the disk is lost
            lost = Path(checkpoint)
            distributed.on_main(lambda: shutil.rmtree(lost))
            checkpoint = f"file://{options.pop('upload_to')}/checkpoint-{SAVED_AT}"
    trainer = make(name, case, folder / backend, **options)
    trainer.train(resume_from_checkpoint=checkpoint)
    resumed = {"resumed": weights_of(trainer), "resumed_averages": averages_of(trainer)}
    return {**result, **resumed, "steps": trainer.state.global_step}


def averages_of(trainer: BaseTrainer) -> dict[str, torch.Tensor]:
    """The moving average of the weights, whole; none on other processes than the first."""
    ema = trainer.parts.get(MovingAverage)
    if ema is None or ema.average is None:
        return {}
    return ema.average.state(keep=distributed.is_main())


class Broken(TrainerCallback):
    """The loss of the second step is NaN on the second rank only; notes which steps change weights."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.before: dict[str, torch.Tensor] = {}
        self.changed: list[bool] = []
        loss = trainer.loss

        def broken(model: Any, batch: Any) -> LossOutput:
            output = loss(model, batch)
            is_here = trainer.state.global_step == 1 and distributed.rank() == 1
            return LossOutput(output.total + math.nan, output.metrics) if is_here else output

        trainer.loss = broken
        trainer.add_callback(self)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        self.before = weights_of(self.trainer)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        after = weights_of(self.trainer)
        self.changed.append(any(not torch.equal(after[name], self.before[name]) for name in after))


def leave_out(folder: Path, backend: str) -> dict[str, Any]:
    """Train with a step whose loss is NaN: which steps changed weights, and what is kept of that step."""
    (folder / backend).mkdir(exist_ok=True)
    options = {**enter(backend, folder), "max_steps": 4, "rows": 40, "on_nan": "skip"}
    if not backend.startswith("zero"):  # so that the device leaves out the update
        options["optim"] = "adamw_torch_fused"
    trainer = make("nan", Case("sft", ADAM, model=TIED), folder / backend, **options)
    broken = Broken(trainer)
    trainer.train()
    kept = folder_of(folder, backend, "nan") / "nan-step-2"
    return {"changed": broken.changed, "kept": sorted(path.name for path in kept.iterdir())}


def go_back(folder: Path, backend: str) -> dict[str, Any]:
    """Train with a spike in the fifth step, after which the run goes back to the checkpoint after the fourth."""
    (folder / backend).mkdir(exist_ok=True)
    options = {**enter(backend, folder), **SAVING, "save_steps": 2, "on_spike": "rollback"}
    options["spike_kwargs"] = {"max_rollbacks": 1}
    trainer: Any = make("spike", Case("sft", ADAM, model=TIED), folder / backend, **options)
    guard: Any = trainer.parts[Guard]
    judged = guard._is_spike
    guard._is_spike = lambda run, _: judged(run, {"guard/loss_spike": Max(99.0 * (run.state.global_step == 4))})
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    return {"rates": rates, "rollbacks": guard.steps.num_rollbacks, "steps": trainer.state.global_step}


def main(folder: Path, jobs: list[str]) -> None:
    """Run the jobs one after another."""
    plans.check_once()
    results = {}
    for job in jobs:
        faulthandler.dump_traceback_later(SECONDS_FOR_A_CASE, exit=True)
        print(f"job {job}", file=sys.stderr, flush=True)
        leave_modules_uncollected()
        backend, name, *checkpoint = job.split(":", 2)
        if name == "nan":
            results[job] = leave_out(folder, backend)
            continue
        if name == "spike":
            results[job] = go_back(folder, backend)
            continue
        results[job] = run(folder, backend, name, checkpoint[0] if checkpoint else None)
    faulthandler.cancel_dump_traceback_later()
    if distributed.is_main():
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
