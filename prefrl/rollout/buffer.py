"""The rollouts that training currently learns from: cut into minibatches, reused, saved in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prefrl.data.collate import batch_of, parts_of_batch
from prefrl.errors import DataError
from prefrl.metrics import Metric, from_json, merge, to_json
from prefrl.types import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Minibatch", "RolloutBuffer"]

Ready = TypeVar("Ready", bound=TokenBatch)


@dataclass(frozen=True)
class Minibatch(Generic[Ready]):
    """The data of one optimizer step on this rank."""

    micro_batches: list[Ready]  # rows without a gradient may be left out
    num_items: float  # counts all rows, including those left out
    metrics: dict[str, Metric] = field(default_factory=dict)  # of the rows left out; values on the host


@dataclass
class RolloutBuffer(Generic[Ready]):
    """The minibatches of one generation batch, each visited `num_iterations` times, in the same order.

    Args:
        num_iterations: Number of visits.
        stage: The class of the micro-batches.
    """

    num_iterations: int
    stage: type[Ready]
    minibatches: list[Minibatch[Ready]] = field(default_factory=list)
    position: int = 0  # number of minibatches returned since the buffer was filled

    @property
    def is_spent(self) -> bool:
        """Whether new rollouts are needed."""
        return self.position >= len(self.minibatches) * self.num_iterations

    def fill(self, minibatches: Sequence[Minibatch[Ready]]) -> None:
        """Replace the contents with the minibatches of a new generation batch."""
        self.minibatches = list(minibatches)
        self.position = 0

    def next(self) -> Minibatch[Ready]:
        """The next minibatch.

        Raises:
            IndexError: The buffer is spent.
        """
        if self.is_spent:
            raise IndexError("the rollout buffer is spent; fill it first")
        minibatch = self.minibatches[self.position % len(self.minibatches)]
        self.position += 1
        return minibatch

    def change_visited(self, change: Callable[[Ready, Tensor], Ready], logprobs: Sequence[Tensor]) -> None:
        """Change the minibatch that was returned last, for its later visits.

        Args:
            change: Maps a micro-batch and its log-probs to the changed micro-batch.
            logprobs: For each micro-batch, [N] nats, as computed in this visit. They stay on their device.
        """
        index = (self.position - 1) % len(self.minibatches)
        minibatch = self.minibatches[index]
        changed = [change(batch, values) for batch, values in zip(minibatch.micro_batches, logprobs, strict=True)]
        self.minibatches[index] = replace(minibatch, micro_batches=changed)

    def save(self, path: Path) -> None:
        """Write the buffer to a safetensors file. Tensors are saved bit by bit, and nothing is pickled."""
        tensors: dict[str, Tensor] = {}
        layout = []
        for i, minibatch in enumerate([] if self.is_spent else self.minibatches):
            batches = []
            for j, batch in enumerate(minibatch.micro_batches):
                of_batch, host = parts_of_batch(batch, f"{i}.{j}.")
                tensors |= of_batch
                batches.append(host)
            metrics = {name: to_json(metric) for name, metric in minibatch.metrics.items()}
            layout.append({"micro_batches": batches, "num_items": minibatch.num_items, "metrics": metrics})
        state = {"position": self.position if layout else 0, "num_iterations": self.num_iterations}
        save_file(tensors, path, metadata={"layout": json.dumps(layout), "state": json.dumps(state)})

    def load_share(
        self, paths: Sequence[Path], *, cut: Callable[[Ready], list[Ready]], rank: int, world_size: int
    ) -> None:
        """Read this rank's file; of a run with another number of ranks, read all files and keep this rank's share.

        A sum over the rows of a minibatch does not depend on how they are distributed, so the update is the same up to
        rounding. Log-probs and advantages are read from the files.

        Args:
            paths: The files of all ranks, in order.
            cut: Cuts the rows of a minibatch into micro-batches.
            rank: Number of this process; it takes every `world_size`-th micro-batch.
            world_size: Number of processes.

        Raises:
            DataError: See `load`.
        """
        if len(paths) == world_size:
            self.load(paths[rank])
            return
        parts = []
        for path in paths:
            self.load(path)
            parts.append(self.minibatches)
        self.minibatches = []
        for shares in zip(*parts, strict=True):
            batches = [batch for share in shares for batch in share.micro_batches]
            micro_batches = cut(self.stage.concat(batches)) if batches else []
            # Item counts are summed over ranks, so only one rank keeps them.
            num_items = sum(share.num_items for share in shares) if rank == 0 else 0.0
            metrics: dict[str, Metric] = {}
            for share in shares if rank == 0 else []:
                merge(metrics, share.metrics)
            self.minibatches.append(Minibatch(micro_batches[rank::world_size], num_items, metrics))

    def load(self, path: Path) -> None:
        """Read what `save` wrote.

        Raises:
            DataError: The file belongs to a run with another `num_iterations`.
        """
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        state = json.loads(metadata["state"])
        if state["num_iterations"] != self.num_iterations:
            raise DataError(
                f"{path}: num_iterations was {state['num_iterations']} when the checkpoint was written and is "
                f"{self.num_iterations} now. Resume with the same value."
            )
        self.minibatches = [
            Minibatch(
                [batch_of(self.stage, host, tensors, f"{i}.{j}.") for j, host in enumerate(row["micro_batches"])],
                row["num_items"],
                {name: from_json(metric) for name, metric in row["metrics"].items()},
            )
            for i, row in enumerate(json.loads(metadata["layout"]))
        ]
        self.position = state["position"]
