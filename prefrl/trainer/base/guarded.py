"""A trainer that does not apply a step whose numbers are not finite, and never saves weights that are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import TrainerCallback

from prefrl import distributed
from prefrl.errors import ConfigError, NonFiniteError
from prefrl.metrics import Max, Mean, Metric, merge
from prefrl.run.checkpoints import find_last
from prefrl.trainer.base.early_read import EarlyRead
from prefrl.trainer.base.guard import StepGuard, has_problem
from prefrl.trainer.base.resumable import ResumableTrainer
from prefrl.trainer.base.rollback import Rollback, RollbackRequest, scale_learning_rates
from prefrl.trainer.base.step_dump import dump_step, dumped_before

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers.trainer_utils import TrainOutput

    from prefrl.trainer.base.config import BaseConfig
    from prefrl.trainer.base.steps import Step

__all__ = ["GuardedTrainer"]

_log = logging.getLogger(__name__)


class GuardedTrainer(ResumableTrainer):
    """HuggingFace's loop, in which the numbers of a step are judged before anything of it is applied.

    They are judged between backward pass and update, or right after the update if the device can leave it out by
    itself: it then works on the update while the host waits for the numbers and goes on to the next step.

    Args:
        args: Options.
        arguments: See HuggingFace's `Trainer`.
    """

    metrics: dict[Literal["train", "eval"], dict[str, Metric]]
    keeps_steps = True  # whether the first step that is not applied is written to `output_dir`

    def __init__(self, *, args: BaseConfig, **arguments: Any) -> None:
        super().__init__(args=args, **arguments)
        if args.on_spike == "rollback" and distributed.updates_in_backward(self.accelerator):
            raise ConfigError(
                "on_spike='rollback' with DeepSpeed: its engine updates the weights before a step can be checked for "
                "a spike, and can train only once. Use DDP or FSDP2, or set on_spike='ignore'."
            )
        self.guard = self._new_guard()
        self._rollback = Rollback()
        # Sum and count of the KL since the last log, without this step's.
        self._kl_before: tuple[float | Tensor, float | Tensor] = (0.0, 0.0)
        self._step: tuple[Step, Tensor]  # the one that has run, and this process's share of its loss
        self._stop_reason: str | None = None
        self._unjudged: EarlyRead | None = None  # the numbers of a step whose update has been queued
        self.callback_handler.callbacks.insert(0, _AfterUpdate(self._judge_late))  # others shall see what it decides

    def _new_guard(self) -> StepGuard:
        watched = sorted({"loss", *self.args.watched_metrics})
        return StepGuard(self.args.nan_patience if self.args.on_nan == "skip" else 1, watched)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Any:
        """HuggingFace's hook, called right before the update, with the norm before clipping or None."""
        norm = super()._get_grad_norm(model, grad_norm)
        numbers = self._numbers(0.0 if norm is None else norm)
        must_know = self.args.on_spike == "rollback"  # for which the host computes scores
        if must_know or not distributed.updates_conditionally(self.accelerator, self.optimizer, numbers.device):
            self._judge(numbers.tolist())
            return norm
        distributed.leave_out_update_if(self.optimizer, has_problem(numbers))
        self._unjudged = EarlyRead(numbers)
        return norm

    def _judge_late(self) -> None:
        if self._unjudged is not None:
            numbers, self._unjudged = self._unjudged.numbers(), None
            self._judge(numbers)

    def _judge(self, numbers: list[list[float]]) -> None:
        """Decide whether the step is applied, or note that it was not."""
        problem = self.guard.problem(numbers, may_overflow=lambda: distributed.is_finding_scale(self.accelerator))
        spikes = self.guard.spike(numbers)
        is_spike = problem is None and self._is_spike({name: metric.value() for name, metric in spikes.items()})
        distributed.leave_out_update(self.accelerator, self.optimizer, leaves_out=problem is not None or is_spike)
        merge(self.metrics["train"], spikes)
        if self.args.on_nan == "skip":
            merge(self.metrics["train"], {"guard/skipped_steps": Max(self.guard.num_skipped)})
        if self.args.on_spike == "rollback":
            merge(self.metrics["train"], {"guard/rollbacks": Max(self.guard.num_rollbacks)})
        self._stop_reason = None
        if problem is not None:
            self._tell(problem)

    def _numbers(self, norm: Tensor | float) -> Tensor:
        """For each process its share of the loss, the gradient norm, and the sum and the count of the step's KL.

        They are on the device.
        """
        loss = self._step[1].float()
        whole = distributed.whole(norm.detach()) if isinstance(norm, torch.Tensor) else torch.tensor(norm)
        numbers = [loss, whole.to(loss.device, torch.float32)]
        if "kl" in self.guard.watched:
            of_step = zip(self._kl_so_far(), self._kl_before, strict=True)
            numbers += [torch.as_tensor(now - before, device=loss.device).float() for now, before in of_step]
        return distributed.gather_numbers(torch.stack(numbers))

    def _kl_so_far(self) -> tuple[float | Tensor, float | Tensor]:
        """Sum and count of the KL since the last log, on this process."""
        kl = self.metrics["train"].get("kl")
        return (kl.total, kl.count) if isinstance(kl, Mean) else (0.0, 0.0)

    def _is_spike(self, scores: dict[str, float]) -> bool:
        """Whether a step is to be left out because of a spike.

        Raises:
            RollbackRequest: Training has to go on from a checkpoint.
        """
        if self.args.on_spike != "rollback":
            return False
        params = self.args.spike_params
        over = [
            f"{name} is {scores[key]:.1f} robust deviations above its median"
            for name in self.args.watched_metrics
            if scores.get(key := f"guard/{name}_spike", 0.0) > params.threshold
        ]
        if not over:
            return False
        self.run_folder.wait()
        found = distributed.on_main(lambda: find_last(self.run_folder.path, run=self.run_folder.run)).folder
        what = f"step {self.state.global_step + 1}: {', '.join(over)}. The step is not applied"
        if self._rollback.num_to(found) == params.max_rollbacks:
            self._say(f"{what}; training has gone back to {found} {params.max_rollbacks} times, so it continues.")
            return True
        if found is None:
            scale_learning_rates(params.learning_rate_factor, self.optimizer, self.lr_scheduler)
            self._say(
                f"{what}. There is no checkpoint yet: the learning rate is lowered to {self._get_learning_rate():g}."
            )
            return True
        self._rollback = self._rollback.again(found)
        self._say(
            f"{what}. Training goes back to {found} with {params.learning_rate_factor**self._rollback.times:g} times "
            f"its learning rate: rollback {self._rollback.times} of max_rollbacks={params.max_rollbacks} to it."
        )
        raise RollbackRequest

    def _say(self, text: str) -> None:
        if distributed.is_main():
            _log.warning("%s", text)

    def _tell(self, problem: str) -> None:
        """Keep the step, and warn, or note why training stops."""
        step, guard = self.state.global_step + 1, self.guard
        kept = self._kept(step)
        if not guard.is_exhausted:
            _log.warning(
                "step %d: %s; the step is skipped, %d of nan_patience=%d in a row. %s",
                *(step, problem, guard.in_a_row, guard.patience, kept),
            )
            return
        skips = self.args.on_nan == "skip"
        patience = f" It was the last of nan_patience={guard.patience} in a row." if skips else ""
        remedy = "" if skips else " on_nan='skip' skips such steps."
        self._stop_reason = (
            f"step {step}: {problem}. The step was not applied.{patience} {kept} Lower learning_rate, or set "
            f"max_grad_norm, or remove the rows that cause it, then resume from the last checkpoint with "
            f"resume_from_checkpoint=True.{remedy}"
        )

    def _kept(self, step: int) -> str:
        """Keep the first such step of a run; says where it is."""
        if not self.keeps_steps:
            return ""
        output_dir, run = Path(self.args.output_dir), self.run_folder.run
        weight = distributed.first_non_finite(self.model, self.args.device)
        before = "" if weight is None else f"The weights were not finite before it: {weight}. "
        folder = distributed.on_main(lambda: dumped_before(output_dir, run))
        if folder is not None:
            return f"{before}The first step of this kind is in {folder}: prefrl replay {folder}."
        batches, num_items = self._step[0].micro_batches, self._step[0].num_items
        try:
            folder = dump_step(
                output_dir,
                batches,
                step=step,
                num_items=num_items,
                identity=self._identity(),
                save_model=self.write_model,
            )
        except OSError as error:
            return f"{before}It could not be kept in {output_dir}: {error}."
        return f"{before}It is kept in {folder}; prefrl replay {folder} recomputes it."

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """HuggingFace's hook, called after the step and all its callbacks."""
        if self._stop_reason is not None:
            self.control.should_log = True
            self.control.should_evaluate = self.control.should_save = False
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if self._globalstep_last_logged == self.state.global_step:
            tr_loss.zero_()  # HuggingFace subtracts it from itself, which leaves NaN
        self._kl_before = self._kl_so_far()
        if self._stop_reason is not None:
            raise NonFiniteError(self._stop_reason)

    def _stop_if_asked(self) -> None:
        if self._stop_reason is None:
            super()._stop_if_asked()

    # Weights.

    def _train(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> TrainOutput:
        self.guard, self._stop_reason, self._kl_before = self._new_guard(), None, (0.0, 0.0)
        self._unjudged = None
        output = super()._train(checkpoint, *args, **kwargs)
        weight = distributed.first_non_finite(self.model, self.args.device)
        if weight is not None:
            raise NonFiniteError(self._refusal(weight, "training has ended"))
        return output

    def _run(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> TrainOutput:
        """See `ResumableTrainer`; after a spike, again from the last checkpoint."""
        place, run, start = self.run_folder.path, self.run_folder.run, checkpoint and Path(checkpoint)
        self._rollback = distributed.on_main(lambda: Rollback.noted(place, run=run, checkpoint=start or None))
        while True:
            if self._rollback.times:  # the rollouts that were left belong to other weights
                self._start = replace(self._start, changed=(*self._start.changed, "learning_rate_factor"))
            try:
                return super()._run(checkpoint, *args, **kwargs)
            except RollbackRequest:
                distributed.on_main(lambda: self._rollback.note(place, run=run))
                self.metrics["train"], self._kl_before = {}, (0.0, 0.0)
                checkpoint = str(self._rollback.folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """See `ResumableTrainer`; after a rollback, with a smaller learning rate."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._rollback.times:
            factor = self.args.spike_params.learning_rate_factor**self._rollback.times
            scale_learning_rates(factor, self.optimizer, self.lr_scheduler)
            self.guard.num_rollbacks += self._rollback.times

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """HuggingFace's hook. Weights that are not finite replace no checkpoint."""
        weight = distributed.first_non_finite(self.model, self.args.device)
        if weight is None:
            super()._save_checkpoint(model, trial)
            return
        refusal = self._refusal(weight, "it is not saved")
        if self.args.on_nan == "stop":
            raise NonFiniteError(refusal)
        _log.warning("%s", refusal)

    def _refusal(self, weight: str, what: str) -> str:
        return (
            f"after step {self.state.global_step}, {weight} holds NaN or infinity: {what}. Lower learning_rate, or "
            "set max_grad_norm, then resume from the last checkpoint with resume_from_checkpoint=True."
        )

    def _save_update_state(self, folder: Path) -> None:
        """See `ResumableTrainer`; also writes what the guard has seen."""
        super()._save_update_state(folder)
        if self.args.should_save:
            self.guard.save(folder)

    def _load_update_state(self, folder: Path) -> None:
        """Read what `_save_update_state` wrote. All ranks must call it."""
        super()._load_update_state(folder)
        self.guard.load(folder)


class _AfterUpdate(TrainerCallback):
    def __init__(self, judge: Callable[[], None]) -> None:
        self.judge = judge

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """HuggingFace's hook, called right after the update."""
        self.judge()
