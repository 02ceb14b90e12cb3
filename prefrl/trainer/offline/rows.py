"""Rows of prepared datasets: those that need the most memory, and what `compute_metrics` gets about a row."""

from __future__ import annotations

import heapq
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from prefrl.data.samplers import dealing_of
from prefrl.errors import ConfigError
from prefrl.trainer.evaluation import NO_TOKEN

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.types import LabeledBatch, TokenBatch

__all__ = [
    "longest_rows",
    "predicted_pairs",
    "predicted_rows",
    "predicted_tokens",
]


def longest_rows(dataset: Any, num_rows: int, *, hidden_size: int) -> list[dict[str, Any]]:
    """The rows whose forward pass costs the most, the costliest first; again from the first if there are too few.

    Args:
        dataset: Prepared.
        num_rows: Number of rows.
        hidden_size: Hidden size of the model.

    Raises:
        ConfigError: The dataset is a stream.
    """
    if isinstance(dataset, datasets.IterableDataset):
        raise ConfigError(
            "train_dataset is an IterableDataset, whose longest rows are not known before they are read: sizes cannot "
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
