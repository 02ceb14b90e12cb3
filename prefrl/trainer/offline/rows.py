"""Rows of prepared datasets: the longest, what `compute_metrics` gets about a row, a mean over those of all steps."""

from __future__ import annotations

import heapq
import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from prefrl import distributed
from prefrl.data.samplers import dealing_of
from prefrl.errors import ConfigError
from prefrl.trainer.evaluation import NO_TOKEN
from prefrl.types import LabeledBatch, TokenBatch


def longest_rows(dataset: Any, num_rows: int, *, hidden_size: int, option: str) -> list[dict[str, Any]]:
    """The rows whose forward pass costs the most, the costliest first; again from the first if there are too few.

    Args:
        dataset: Prepared.
        num_rows: Number of rows.
        hidden_size: Hidden size of the model.
        option: The name of the dataset, for messages.

    Raises:
        ConfigError: The dataset is a stream.
    """
    if isinstance(dataset, datasets.IterableDataset):
        raise ConfigError(
            f"{option} is an IterableDataset, whose longest rows are not known before they are read: sizes cannot "
            "be 'auto'. Set numbers, or give a Dataset, such as Dataset.from_list(list(stream.take(n)))."
        )
    cost_of = dealing_of(dataset, hidden_size=hidden_size, equal_counts=True).cost_of
    longest = heapq.nlargest(num_rows, range(len(dataset)), key=cost_of)
    return [dataset[row] for row in islice(cycle(longest), num_rows)]


def predicted_tokens(batch: TokenBatch, most_likely: Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The most likely token after each token of a row, and the row's tokens, -100 where there is no loss.

    The places are those of HuggingFace's logits and labels: the prediction for a label stands one place before it.

    Args:
        batch: B rows.
        most_likely: [N] ids, the most likely one at the place of each response token.
    """
    trainable = batch.trainable.cpu().numpy()
    predicted = np.where(trainable, most_likely.cpu().numpy(), NO_TOKEN).astype(np.int32)
    learned = np.where(trainable, batch.response_ids.cpu().numpy(), NO_TOKEN).astype(np.int32)
    ends = np.cumsum(batch.response_lengths)[:-1]
    predictions, labels = [], []
    for i, (guess, label) in enumerate(zip(np.split(predicted, ends), np.split(learned, ends), strict=True)):
        context = np.full(batch.context_lengths[i], NO_TOKEN, dtype=np.int32)
        predictions.append(np.concatenate([context[1:], guess, [NO_TOKEN]], dtype=np.int32))
        labels.append(np.concatenate([context, label]))
    return predictions, labels


def predicted_pairs(batch: LabeledBatch, rewards: Tensor) -> tuple[list[np.ndarray], list[int]]:
    """[2] rewards of the chosen and the rejected side of each pair, and the place of the chosen one, 0."""
    chosen, rejected = batch.pairs()
    values = rewards.float().cpu().numpy()
    return [values[[first, second]] for first, second in zip(chosen, rejected, strict=True)], [0] * len(chosen)


def predicted_rows(batch: LabeledBatch, rewards: Tensor) -> tuple[list[float], list[int]]:
    """The reward of each row, and whether it is desirable: 1 or 0."""
    return rewards.float().tolist(), [int(bool(label)) for label in batch.is_preferred]


class RunningMean:
    """The mean of all values of earlier optimizer steps, over all ranks; 0 before the first step.

    The values of a step are included from the next step on, so that a loss that reads the mean does not depend on how
    its step is cut into micro-batches. The mean stays on the device.
    """

    def __init__(self, device: torch.device) -> None:
        dtype = torch.float32 if device.type == "mps" else torch.float64  # which MPS does not have
        self._sums = torch.zeros(2, dtype=dtype, device=device)  # of values, and their number
        self._pending: list[Tensor] = []

    @property
    def value(self) -> Tensor:
        """[] the mean."""
        total, count = self._sums.unbind()
        return total / count.clamp(min=1.0)

    def add(self, values: Tensor) -> None:
        """Record values of this rank; the next `fold` includes them in the mean."""
        self._pending.append(torch.stack([values.detach().sum(), values.new_full((), values.numel())]))

    def fold(self) -> None:
        """Include the recorded values of all ranks in the mean. All ranks must call it."""
        own = torch.stack(self._pending).to(self._sums).sum(0) if self._pending else torch.zeros_like(self._sums)
        self._pending = []
        sums = distributed.summed_over_ranks(own)
        self._sums = self._sums + torch.where(sums[0].isfinite(), sums, 0.0)  # otherwise, the step was not applied

    def forget(self) -> None:
        """Drop the values that were recorded since the last `fold`."""
        self._pending = []

    def save(self, path: Path, *, writes: bool) -> None:
        """Write the state, including recorded values. All ranks must call it; they all have the same state."""
        self.fold()
        if writes:
            total, count = self._sums.tolist()
            path.write_text(json.dumps({"total": total, "count": count}), encoding="utf-8")

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        state = json.loads(path.read_text(encoding="utf-8"))
        self._sums = self._sums.new_tensor([state["total"], state["count"]])
        self._pending = []
