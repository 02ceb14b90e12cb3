"""What an optimizer step is made of, the plan that counts steps, and the folder in which a step is kept.

A step whose numbers are not finite is kept, so that it can be computed again:

nan-step-<N>/                         the model before the step, its tokenizer, training_args.json, run.json
nan-step-<N>/step_<rank>_of_<M>.safetensors   the step's micro-batches on each of M ranks
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from prefrl import distributed
from prefrl.data.collate import batch_of, parts_of_batch
from prefrl.run.records import Identity, read_identity, write_identity
from prefrl.types import IdleBatch, TokenBatch


class MicroStep(Protocol):
    """Forward and backward pass of one micro-batch."""

    def __call__(
        self, model: nn.Module, batch: TokenBatch, num_items: Tensor | float | None, *, is_last: bool
    ) -> Tensor:
        """The micro-batch's share of the loss. The last micro-batch of a step synchronizes gradients over ranks."""
        ...


class Step(Protocol):
    """The item that HuggingFace's loop passes to `training_step`."""

    micro_batches: list[TokenBatch]  # those that are known so far, or have run
    num_items: float  # what their sums are divided by, known when they have run

    def run(self, model: nn.Module, micro_step: MicroStep, num_items: Tensor | float | None) -> Tensor:
        """Run all micro-batches and return the loss of the step on this rank."""
        ...


@dataclass
class SyncStep:
    """A `Step` whose micro-batches are all known when it begins; with none, it is an empty item."""

    micro_batches: list[TokenBatch] = field(default_factory=list)
    num_items: float = 1.0

    def run(self, model: nn.Module, micro_step: MicroStep, num_items: Tensor | float | None) -> Tensor:
        """Run the micro-batches one after another."""
        self.num_items = max(float(num_items or 0.0), 1.0)
        total = torch.zeros(())
        for i, batch in enumerate(self.micro_batches):
            total = total + micro_step(model, batch, num_items, is_last=i + 1 == len(self.micro_batches))
        return total


@dataclass(frozen=True)
class LongBatch:
    """A micro-batch of rows that are as long as any.

    Args:
        batch: Ready for its loss.
        tokens: What `max_tokens_per_micro_batch` counts for these rows.
    """

    batch: TokenBatch
    tokens: int


class StepPlan:
    """Counts the steps of a run as they are planned when it begins, and finds the generation batches of each.

    An optimizer step is one planned step; only when the batch grows does it take the data of several, see
    `features.growth`.

    Args:
        unit: Planned steps that belong together: those that learn from one generation batch; offline, 1.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.total = self.per_epoch = 1
        self.position = 0  # planned steps that are done
        self.start = self.end = 0  # of the unit that is under way

    def start_at(self, step: int, *, total: int, per_epoch: int, checkpoint: Path | None) -> None:
        """Start at a step of a run: 0, or the one that a checkpoint was written after.

        Args:
            step: Optimizer steps that are done.
            total: Planned steps of the run.
            per_epoch: Planned steps of an epoch.
            checkpoint: Where training resumes from.
        """
        self.total, self.per_epoch, self.position = total, per_epoch, step
        self.end = -(-step // self.unit) * self.unit
        self.start = self.end - self.unit

    def next_items(self, items: Iterator[Any], num_each: int) -> list[Any]:
        """The data loader's items for the next step; [] at the end of an epoch.

        Args:
            items: Of the rest of the epoch.
            num_each: Items of a planned step.
        """
        found = list(islice(items, num_each))
        if found and self.position >= self.end:
            self.start, self.end = self.position, self.position + self.unit
        return found

    def end_step(self) -> None:
        """Count the step that is under way."""
        self.position += 1

    @property
    def units(self) -> range:
        """The numbers of the generation batches that the unit under way learns from."""
        return range(self.start // self.unit, self.end // self.unit)

    @property
    def units_left(self) -> range:
        """The numbers of the generation batches that later units need."""
        return range(self.end // self.unit, self.last_unit + 1)

    @property
    def last_unit(self) -> int:
        """The number of the last generation batch of the run."""
        return (self.total - 1) // self.unit

    @property
    def steps_left(self) -> int:
        """Optimizer steps from here to the end."""
        return self.total - self.position


_PREFIX = "nan-step-"


@dataclass(frozen=True)
class DumpedBatch:
    """A micro-batch of a step that was kept."""

    rank: int
    number: int  # of the micro-batches of its rank
    batch: TokenBatch
    num_items: float  # the loss is the sum over the micro-batch, divided by this


def dumped_before(output_dir: Path, run: str) -> Path | None:
    """The step that a run has kept already."""
    for folder in sorted(output_dir.glob(f"{_PREFIX}*")):
        identity = read_identity(folder)
        if identity is not None and identity.run == run:
            return folder
    return None


def dump_step(
    output_dir: Path,
    batches: Sequence[TokenBatch],
    *,
    step: int,
    num_items: float,
    identity: Identity,
    save_model: Callable[[Path], None],
) -> Path:
    """Write the folder of a step. All processes must call it.

    Args:
        output_dir: The run's folder.
        batches: The micro-batches of this rank.
        step: Number of the step, counted from 1.
        num_items: What the sums of the micro-batches are divided by.
        identity: The run.
        save_model: Writes model, tokenizer and options to a folder; called on all processes.

    Returns:
        The folder.

    Raises:
        OSError: It cannot be written; on all processes.
    """
    final = output_dir / f"{_PREFIX}{step}"
    aside = output_dir / f".{final.name}"
    aside.mkdir(mode=0o700, parents=True, exist_ok=True)
    problem = None
    try:
        save_model(aside)
        if distributed.place_in_team() == 0:
            rank, world_size = distributed.rank(), distributed.world_size()
            name = f"step_{distributed.rank_in_names(rank, world_size)}_of_{world_size}.safetensors"
            _write(aside / name, batches, num_items)
    except (OSError, SafetensorError) as error:
        problem = str(error)
    problems = [text for text in distributed.gather_objects(problem) if text is not None]
    if problems:
        raise OSError(problems[0])

    def publish() -> None:
        write_identity(aside, identity)
        shutil.rmtree(final, ignore_errors=True)  # of another run
        os.rename(aside, final)

    distributed.on_main(publish)
    return final


def _write(path: Path, batches: Sequence[TokenBatch], num_items: float) -> None:
    tensors: dict[str, Tensor] = {}
    layout = []
    for i, batch in enumerate(batch for batch in batches if not isinstance(batch, IdleBatch)):
        of_batch, host = parts_of_batch(batch, f"{i}.")
        tensors |= {name: tensor.clone() for name, tensor in of_batch.items()}  # a file holds no tensor twice
        layout.append({"stage": type(batch).__name__, "host": host})
    save_file(tensors, path, metadata={"layout": json.dumps(layout), "num_items": json.dumps(num_items)})


def read_dump(folder: Path) -> list[DumpedBatch]:
    """The micro-batches of all ranks. The classes of the batches must have been imported."""
    stages = {stage.__name__: stage for stage in _stages(TokenBatch)}
    found = []
    paths = folder.glob("step_*_of_*.safetensors")
    for rank, path in sorted((int(path.name.split("_")[1]), path) for path in paths):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors, num_items = load_file(path), json.loads(metadata["num_items"])
        for i, row in enumerate(json.loads(metadata["layout"])):
            batch = batch_of(stages[row["stage"]], row["host"], tensors, f"{i}.")
            found.append(DumpedBatch(rank, i, batch, num_items))
    return found


def _stages(stage: type[TokenBatch]) -> Iterator[type[TokenBatch]]:
    yield stage
    for inner in stage.__subclasses__():
        yield from _stages(inner)
