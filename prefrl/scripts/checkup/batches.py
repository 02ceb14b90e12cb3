"""The arithmetic of batches: what a step learns from, and how many steps there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefrl.options.size import num_ranks
from prefrl.trainer.online.prompts import prompts_per_generation

if TYPE_CHECKING:
    from prefrl.scripts.checkup.findings import Section
    from prefrl.scripts.checkup.subject import Subject

__all__ = ["Batches"]


@dataclass(frozen=True)
class Batches:
    """Sizes over all processes.

    Args:
        lines: The arithmetic in words.
        rows_per_step: Rows of the dataset, or completions, of an optimizer step.
        rows_per_micro_batch: Of one process, at most those that there are.
        num_rows: Rows of the dataset; None: not known, as it is a stream.
        num_steps: Optimizer steps of the run; None: not known, as the dataset is a stream.
        note: What else is to be said; empty: nothing.
    """

    lines: tuple[str, ...]
    rows_per_step: int
    rows_per_micro_batch: int
    num_rows: int | None
    num_steps: int | None
    note: str = ""

    @classmethod
    def of(cls, subject: Subject, num_rows: int | None) -> Batches:
        """From the options and the number of dataset rows; None: a stream."""
        config = subject.config
        per_device = config.rows_per_micro_batch
        if not isinstance(per_device, int):  # auto
            return cls(("sizes that are 'auto' are determined when the run begins",), 1, 1, num_rows, None)
        accumulation = int(config.gradient_accumulation_steps)
        ranks = num_ranks(config) if subject.plan is None else subject.plan.num_ranks
        rows = per_device * accumulation * ranks
        who = "processes" if ranks == config.world_size else f"teams of {config.world_size // ranks} processes"
        noun = "completions" if subject.is_online else "rows"
        product = f"{per_device} {noun} in a micro-batch * {accumulation} micro-batches * {ranks} {who}"
        lines = [f"{product} = {rows} {noun} a step"]
        steps_per_epoch = None if num_rows is None else -(-num_rows // rows)
        if subject.is_online:
            prompts = prompts_per_generation(config)
            lines.append(
                f"{prompts} prompts * {config.num_generations} completions = {config.completions_of_generation} "
                f"completions a generation batch, for {config.steps_of_a_generation} steps"
            )
            if num_rows is not None:
                steps_per_epoch = num_rows // prompts * config.steps_of_a_generation
        num_steps = _num_steps(config, steps_per_epoch)
        if num_steps is not None and steps_per_epoch:
            lines.append(f"{steps_per_epoch:,} steps an epoch, {num_steps:,} steps in all")
        if subject.is_online or num_rows is None or per_device * ranks <= num_rows:
            return cls(tuple(lines), rows, per_device, num_rows, num_steps)
        note = f"a micro-batch of {per_device:,} {noun} is never full: the dataset has {num_rows:,}"
        return cls(tuple(lines), rows, -(-num_rows // ranks), num_rows, num_steps, note)

    def report(self, section: Section) -> None:
        """Say it."""
        for line in self.lines:
            section.ok(line)
        if self.note:
            section.note(self.note)
        if self.num_steps == 0:
            section.problem("there is no step: the dataset is smaller than one generation batch")


def _num_steps(config: Any, steps_per_epoch: int | None) -> int | None:
    if config.max_steps > 0:
        return int(config.max_steps)
    return None if steps_per_epoch is None else int(steps_per_epoch * config.num_train_epochs)
