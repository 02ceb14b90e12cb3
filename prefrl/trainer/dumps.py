"""The folder in which a step is kept whose numbers are not finite, so that it can be computed again.

nan-step-<N>/                         the model before the step, its tokenizer, training_args.json, run.json
nan-step-<N>/step_<rank>_of_<M>.safetensors   the step's micro-batches on each of M ranks
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from prefrl import distributed
from prefrl.data.collate import batch_of, parts_of_batch
from prefrl.run.folder import Identity, read_identity, write_identity
from prefrl.types import IdleBatch, TokenBatch

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
