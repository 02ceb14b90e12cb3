"""A trainer that does not apply a step whose numbers are not finite, and never saves weights that are not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from prefrl import distributed
from prefrl.errors import NonFiniteError
from prefrl.metrics import Max, Metric, merge
from prefrl.trainer.base.guard import StepGuard
from prefrl.trainer.base.resumable import ResumableTrainer
from prefrl.trainer.base.step_dump import dump_step, dumped_before

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers.trainer_utils import TrainOutput

    from prefrl.trainer.base.config import BaseConfig
    from prefrl.trainer.base.steps import Step

__all__ = ["GuardedTrainer"]

_log = logging.getLogger(__name__)


class GuardedTrainer(ResumableTrainer):
    """HuggingFace's loop, in which the numbers of a step are judged between its backward pass and its update.

    Args:
        args: Options.
        arguments: See HuggingFace's `Trainer`.
    """

    metrics: dict[Literal["train", "eval"], dict[str, Metric]]
    keeps_steps = True  # whether the first step that is not applied is written to `output_dir`

    def __init__(self, *, args: BaseConfig, **arguments: Any) -> None:
        super().__init__(args=args, **arguments)
        self.guard = self._new_guard()
        self._step: tuple[Step, Tensor]  # the one that has run, and this process's share of its loss
        self._stop_reason: str | None = None

    def _new_guard(self) -> StepGuard:
        return StepGuard(self.args.nan_patience if self.args.on_nan == "skip" else 1)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Any:
        """HuggingFace's hook, called right before the update, with the norm before clipping or None."""
        norm = super()._get_grad_norm(model, grad_norm)
        numbers = self._numbers(0.0 if norm is None else norm)
        problem = self.guard.problem(numbers, may_overflow=lambda: distributed.is_finding_scale(self.accelerator))
        distributed.leave_out_update(self.accelerator, self.optimizer, leaves_out=problem is not None)
        merge(self.metrics["train"], self.guard.spike(numbers))
        if self.args.on_nan == "skip":
            merge(self.metrics["train"], {"guard/skipped_steps": Max(self.guard.num_skipped)})
        self._stop_reason = None
        if problem is not None:
            self._tell(problem)
        return norm

    def _numbers(self, norm: Tensor | float) -> list[list[float]]:
        """For each process its share of the loss, and the gradient norm."""
        loss = self._step[1].float()
        whole = distributed.whole(norm.detach()) if isinstance(norm, torch.Tensor) else torch.tensor(norm)
        return distributed.gather_numbers(torch.stack([loss, whole.to(loss.device, torch.float32)]))

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
        remedy = "" if skips else " on_nan='skip' leaves such steps out."
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
        return f"{before}It is kept in {folder}; prefrl replay {folder} computes it again."

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """HuggingFace's hook, called after the step and all its callbacks."""
        if self._stop_reason is not None:
            self.control.should_log = True
            self.control.should_evaluate = self.control.should_save = False
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if self._globalstep_last_logged == self.state.global_step:
            tr_loss.zero_()  # HuggingFace subtracts it from itself, which leaves NaN
        if self._stop_reason is not None:
            raise NonFiniteError(self._stop_reason)

    def _stop_if_asked(self) -> None:
        if self._stop_reason is None:
            super()._stop_if_asked()

    # Weights.

    def _train(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> TrainOutput:
        self.guard, self._stop_reason = self._new_guard(), None
        output = super()._train(checkpoint, *args, **kwargs)
        weight = distributed.first_non_finite(self.model, self.args.device)
        if weight is not None:
            raise NonFiniteError(self._refusal(weight, "training has ended"))
        return output

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
