"""Judges the numbers of each step: a step with NaN is not applied, and after a spike training may go back.

They are judged between backward pass and update, or right after the update if the device can leave it out by itself:
it then works on the update while the host waits for the numbers and goes on to the next step.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prefrl import distributed
from prefrl.errors import ConfigError, NonFiniteError
from prefrl.metrics import Max, Mean, Metric, merge
from prefrl.run.checkpoints import find_last
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.dumps import dump_step, dumped_before
from prefrl.trainer.parts import GoBack, Part, Run

_log = logging.getLogger(__name__)


class Guard(Part):
    """Leaves out steps whose numbers are not finite, or that are a spike, and lets no weights with NaN be saved.

    Raises:
        ConfigError: The backend cannot go back after a spike.
    """

    def __init__(self, run: Run) -> None:
        args = run.args
        if args.on_spike == "rollback" and distributed.updates_in_backward(run.accelerator):
            raise ConfigError(
                "on_spike='rollback' with DeepSpeed: its engine updates the weights before a step can be checked for "
                "a spike, and can train only once. Use DDP or FSDP2, or set on_spike='ignore'."
            )
        self._rolls_back = args.on_spike == "rollback"
        self._skips = args.on_nan == "skip"
        self._begin(args)

    def _begin(self, args: BaseConfig) -> None:
        self.steps = StepGuard(args.nan_patience if self._skips else 1, sorted({"loss", *args.watched_metrics}))
        self._rollback = Rollback()
        # Sum and count of the KL since the last log, without this step's.
        self._kl_before: tuple[float | Tensor, float | Tensor] = (0.0, 0.0)
        self._judges_late = False  # whether the device can leave out an update before the host knows
        # Reads the numbers of a step whose update has been queued.
        self._unjudged: Callable[[], list[list[float]]] | None = None

    def prepare(self, run: Run) -> None:
        """See `Part`; a run that goes back or resumes there knows how often it has."""
        self._begin(run.args)
        folder, checkpoint = run.run_folder, run.start.checkpoint
        self._rollback = distributed.on_main(
            lambda: Rollback.noted(folder.path, run=folder.run, checkpoint=checkpoint)
        )
        if self._rollback.times:  # the rollouts that were left belong to other weights
            run.start = replace(run.start, changed=(*run.start.changed, "learning_rate_factor"))

    def load(self, run: Run, folder: Path) -> None:
        """See `Part`; after a rollback, training goes on with a smaller learning rate."""
        self.steps.load(folder)
        if self._rollback.times:
            factor = run.args.spike_params.learning_rate_factor**self._rollback.times
            scale_learning_rates(factor, run.optimizer, run.lr_scheduler)
            self.steps.num_rollbacks += self._rollback.times

    def save(self, run: Run, folder: Path) -> None:
        """See `Part`."""
        if run.args.should_save:
            self.steps.save(folder)

    def begin(self, run: Run) -> None:
        """See `Part`; after a spike, the host must know before the update: it computes the scores."""
        device = torch.empty((), device=run.args.device).device  # with its number
        can_be_late = distributed.updates_conditionally(run.accelerator, run.optimizer, device)
        self._judges_late = can_be_late and not self._rolls_back

    def before_step(self, run: Run) -> None:
        """See `Part`."""
        if "kl" in self.steps.watched:
            self._kl_before = _kl_so_far(run)

    def before_update(self, run: Run, model: nn.Module, norm: Tensor | float | None) -> None:
        """Judge the step now, or let the device leave out the update and judge later."""
        loss = run.step_loss.float()
        whole = distributed.whole(norm.detach()) if isinstance(norm, torch.Tensor) else torch.tensor(norm or 0.0)
        # Of each process its share of the loss, the gradient norm, and the sum and the count of the step's KL.
        mine = [loss, whole.to(loss.device, torch.float32)]
        if "kl" in self.steps.watched:
            of_step = zip(_kl_so_far(run), self._kl_before, strict=True)
            mine += [torch.as_tensor(now - before, device=loss.device).float() for now, before in of_step]
        numbers = distributed.gather_numbers(torch.stack(mine))  # on the device
        if self._judges_late:
            distributed.leave_out_update_if(run.optimizer, has_problem(numbers))
            self._unjudged = read_later(numbers)
        else:
            self._judge(run, numbers.tolist())

    def after_update(self, run: Run) -> None:
        """Judge the step, if that has not been done."""
        if self._unjudged is not None:
            read, self._unjudged = self._unjudged, None
            self._judge(run, read())

    def _judge(self, run: Run, numbers: list[list[float]]) -> None:
        """Decide whether the step is applied, or note that it was not."""
        problem = self.steps.problem(numbers, may_overflow=lambda: distributed.is_finding_scale(run.accelerator))
        spikes = self.steps.spike(numbers)
        is_spike = self._rolls_back and problem is None and self._is_spike(run, spikes)
        distributed.leave_out_update(run.accelerator, run.optimizer, leaves_out=problem is not None or is_spike)
        merge(run.metrics["train"], spikes)
        if self._skips:
            merge(run.metrics["train"], {"guard/skipped_steps": Max(self.steps.num_skipped)})
        if self._rolls_back:
            merge(run.metrics["train"], {"guard/rollbacks": Max(self.steps.num_rollbacks)})
        run.failure = None if problem is None else self._told(run, problem)

    def _is_spike(self, run: Run, spikes: dict[str, Metric]) -> bool:
        """Whether a step is to be left out because of a spike.

        Raises:
            GoBack: Training has to go on from a checkpoint.
        """
        params, scores = run.args.spike_params, {name: metric.value() for name, metric in spikes.items()}
        over = [
            f"{name} is {scores[key]:.1f} robust deviations above its median"
            for name in run.args.watched_metrics
            if scores.get(key := f"guard/{name}_spike", 0.0) > params.threshold
        ]
        if not over:
            return False
        place = run.run_folder
        place.wait()
        found = distributed.on_main(lambda: find_last(place.path, run=place.run)).folder
        what = f"step {run.state.global_step + 1}: {', '.join(over)}. The step is not applied"
        if self._rollback.num_to(found) == params.max_rollbacks:
            _say(f"{what}; training has gone back to {found} {params.max_rollbacks} times, so it continues.")
            return True
        if found is None:
            scale_learning_rates(params.learning_rate_factor, run.optimizer, run.lr_scheduler)
            rate = run.optimizer.param_groups[0]["lr"]
            _say(f"{what}. There is no checkpoint yet: the learning rate is lowered to {rate:g}.")
            return True
        self._rollback = again = self._rollback.again(found)
        _say(
            f"{what}. Training goes back to {found} with {params.learning_rate_factor**again.times:g} times "
            f"its learning rate: rollback {again.times} of max_rollbacks={params.max_rollbacks} to it."
        )
        distributed.on_main(lambda: again.note(place.path, run=place.run))
        run.metrics["train"] = {}
        raise GoBack(found)

    def _told(self, run: Run, problem: str) -> NonFiniteError | None:
        """Keep the step, and warn, or say why training stops."""
        step, steps = run.state.global_step + 1, self.steps
        kept = self._kept(run, step)
        if not steps.is_exhausted:
            _log.warning(
                "step %d: %s; the step is skipped, %d of nan_patience=%d in a row. %s",
                *(step, problem, steps.in_a_row, steps.patience, kept),
            )
            return None
        patience = f" It was the last of nan_patience={steps.patience} in a row." if self._skips else ""
        remedy = "" if self._skips else " on_nan='skip' skips such steps."
        return NonFiniteError(
            f"step {step}: {problem}. The step was not applied.{patience} {kept} Lower learning_rate, or set "
            f"max_grad_norm, or remove the rows that cause it, then resume from the last checkpoint with "
            f"resume_from_checkpoint=True.{remedy}"
        )

    def _kept(self, run: Run, step: int) -> str:
        """Keep the first such step of a run; says where it is."""
        if not run.keeps_steps:
            return ""
        output_dir, name = Path(run.args.output_dir), run.run_folder.run
        weight = distributed.first_non_finite(run.model, run.args.device)
        before = "" if weight is None else f"The weights were not finite before it: {weight}. "
        folder = distributed.on_main(lambda: dumped_before(output_dir, name))
        if folder is not None:
            return f"{before}The first step of this kind is in {folder}: prefrl replay {folder}."
        try:
            folder = dump_step(
                output_dir,
                run.current_step.micro_batches,
                step=step,
                num_items=run.current_step.num_items,
                identity=run.identity(),
                save_model=run.write_model,
            )
        except OSError as error:
            return f"{before}It could not be kept in {output_dir}: {error}."
        return f"{before}It is kept in {folder}; prefrl replay {folder} recomputes it."

    # Weights.

    def may_save(self, run: Run) -> bool:
        """Weights that are not finite replace no checkpoint."""
        weight = distributed.first_non_finite(run.model, run.args.device)
        if weight is None:
            return True
        refusal = _refusal(run, weight, "it is not saved")
        if run.args.on_nan == "stop":
            raise NonFiniteError(refusal)
        _log.warning("%s", refusal)
        return False

    def finished(self, run: Run) -> None:
        """See `Part`.

        Raises:
            NonFiniteError: The trained weights are not finite.
        """
        weight = distributed.first_non_finite(run.model, run.args.device)
        if weight is not None:
            raise NonFiniteError(_refusal(run, weight, "training has ended"))


def _kl_so_far(run: Run) -> tuple[float | Tensor, float | Tensor]:
    """Sum and count of the KL since the last log, on this process."""
    kl = run.metrics["train"].get("kl")
    return (kl.total, kl.count) if isinstance(kl, Mean) else (0.0, 0.0)


def _refusal(run: Run, weight: str, what: str) -> str:
    return (
        f"after step {run.state.global_step}, {weight} holds NaN or infinity: {what}. Lower learning_rate, or "
        "set max_grad_norm, then resume from the last checkpoint with resume_from_checkpoint=True."
    )


def _say(text: str) -> None:
    if distributed.is_main():
        _log.warning("%s", text)


# Steps whose losses a new one is compared with, and the fewest that say what is usual.
_WINDOW = 100
_FEWEST = 10
# The standard deviation of a normal distribution is this many times its median absolute deviation.
_MAD_SCALE = 1.4826
_FILE = "guard.json"
_COUNTS = ("num_skipped", "num_rollbacks", "in_a_row")


def has_problem(numbers: Tensor) -> Tensor:
    """[] bool on the device: whether `StepGuard.problem` will find one, if gradients may not overflow.

    Args:
        numbers: [num_processes, >= 2], for each process, its share of the loss, the gradient norm, and more.
    """
    norms = numbers[:, 1]
    return ~(numbers[:, :2].isfinite().all() & (norms >= 0).all())


@dataclass
class StepGuard:
    """Looks at the loss, the gradient norm and the KL of each step.

    Args:
        patience: Steps in a row that are left out because they are not finite, after which training must stop.
        watched: What is compared with the steps before: loss, grad_norm, kl.
    """

    patience: int
    watched: Collection[str] = ("loss",)
    num_skipped: int = 0
    num_rollbacks: int = 0
    in_a_row: int = 0  # of the skipped steps, the latest ones without a finite one between them
    known: dict[str, deque[float]] = field(default_factory=dict)  # of the latest finite steps, what is watched

    @property
    def is_exhausted(self) -> bool:
        """Whether training must stop."""
        return self.in_a_row >= self.patience

    def problem(self, numbers: Sequence[Sequence[float]], *, may_overflow: Callable[[], bool]) -> str | None:
        """Judge a step; what is not finite, and on which process. None: the step may be applied.

        Args:
            numbers: For each process, its share of the loss, the gradient norm over all processes, and more.
            may_overflow: Whether a gradient norm that is not finite is no problem, because the scaler of float16
                leaves the step out and tries a smaller scale.
        """
        found = None
        for process, (loss, norm, *_) in enumerate(numbers):
            if not math.isfinite(loss):
                found = f"the loss is {loss}"
            elif not (math.isfinite(norm) and norm >= 0) and not may_overflow():  # DeepSpeed may report NaN as -1
                found = f"the gradient norm is {norm}"
            if found is not None:
                found = found if len(numbers) == 1 else f"{found} on process {process}"
                break
        if found is None:
            self.in_a_row = 0
        else:
            self.num_skipped += 1
            self.in_a_row += 1
        return found

    def spike(self, numbers: Sequence[Sequence[float]]) -> dict[str, Metric]:
        """How unusual a step is, and remember it.

        Args:
            numbers: For each process, its share of the loss, the gradient norm over all processes, and the sum and the
                count of its KL. A count of 0 on all of them: there is none.

        Returns:
            `guard/<name>_spike` of what is watched: (value - median) / (1.4826 * median absolute deviation) over the
            last 100 steps; the largest since the last log. Left out while there are fewer than 10, or if they do not
            differ.
        """
        values = {"loss": statistics.fmean(row[0] for row in numbers), "grad_norm": numbers[0][1]}
        if num_tokens := sum(sum(row[3:]) for row in numbers):
            values["kl"] = sum(row[2] for row in numbers) / num_tokens
        return {
            f"guard/{name}_spike": Max(score)
            for name in self.watched
            if name in values and (score := self._score(name, values[name])) is not None
        }

    def _score(self, name: str, value: float) -> float | None:
        if not math.isfinite(value):
            return None
        window = self.known.setdefault(name, deque(maxlen=_WINDOW))
        known = list(window)
        window.append(value)
        if len(known) < _FEWEST:
            return None
        median = statistics.median(known)
        deviation = _MAD_SCALE * statistics.median(abs(other - median) for other in known)
        return (value - median) / deviation if deviation > 0 else None

    # Checkpoints. The state is the same on all processes.

    def save(self, folder: Path) -> None:
        """Write the state; called on one process."""
        state = {name: getattr(self, name) for name in _COUNTS}
        state["known"] = {name: list(values) for name, values in self.known.items()}
        (folder / _FILE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        state = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.known = {name: deque(values, maxlen=_WINDOW) for name, values in state["known"].items()}


def read_later(numbers: Tensor) -> Callable[[], list[list[float]]]:
    """Reads numbers on the host when it is called, and then waits only for what was queued before this.

    Args:
        numbers: [M, n] on the device; they stay as they are until they are read.
    """
    if numbers.is_cuda:
        copy, mark = numbers.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(numbers.device))  # a reward may have set another device

        def read() -> list[list[float]]:
            mark.synchronize()
            found: list[list[float]] = copy.tolist()
            return found

        return read
    return numbers.tolist


_ROLLBACK_FILE = "rollback.json"


@dataclass(frozen=True)
class Rollback:
    """Where training has gone back to. It is noted in the run's folder, so that a resumed run knows it.

    Checkpoints that are written later hold the smaller learning rate themselves.
    """

    folder: Path | None = None
    times: int = 0  # to this checkpoint

    def num_to(self, folder: Path | None) -> int:
        """Rollbacks to a checkpoint so far."""
        return self.times if folder is not None and folder == self.folder else 0

    def again(self, folder: Path) -> Rollback:
        """One more rollback, to a checkpoint."""
        return Rollback(folder, self.num_to(folder) + 1)

    def note(self, run_folder: Path, *, run: str) -> None:
        """Write it to the run's folder; called on one process."""
        assert self.folder is not None
        aside = run_folder / f"{_ROLLBACK_FILE}.part"
        aside.write_text(json.dumps({"run": run, "checkpoint": self.folder.name, "times": self.times}))
        os.replace(aside, run_folder / _ROLLBACK_FILE)

    @classmethod
    def noted(cls, run_folder: Path, *, run: str, checkpoint: Path | None) -> Rollback:
        """The rollback to the checkpoint that a run resumes from, if there was one."""
        path = run_folder / _ROLLBACK_FILE
        if checkpoint is None or not path.exists():
            return cls()
        state = json.loads(path.read_text(encoding="utf-8"))
        folder = run_folder / state["checkpoint"]
        is_this = state["run"] == run and folder.resolve() == checkpoint.resolve()
        return cls(folder, state["times"]) if is_this else cls()


def scale_learning_rates(factor: float, optimizer: Any, scheduler: Any) -> None:
    """Multiply the learning rates from here on, now and at the start of the schedule, by a factor."""
    for group in optimizer.param_groups:
        group["lr"] *= factor
        if "initial_lr" in group:
            group["initial_lr"] *= factor
    _scale_schedule(factor, scheduler)


def _scale_schedule(factor: float, scheduler: Any) -> None:
    for name in ("base_lrs", "_last_lr"):
        if hasattr(scheduler, name):
            setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])
    for part in getattr(scheduler, "_schedulers", []):  # of torch's ChainedScheduler and SequentialLR
        _scale_schedule(factor, part)
