"""Helpers of preference trainers: datasets, row sums, metrics, and losses that sort all pairs of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor

from prefrl import distributed
from prefrl.data.images import ProcessingClass
from prefrl.data.preference import prepare_preference_dataset, prepare_unpaired_dataset
from prefrl.losses.per_token import TokenScores, row_sums, trainable_per_row
from prefrl.losses.preference.pairwise import Pairs
from prefrl.losses.preference.unpaired import length_desensitized, wpo_weights
from prefrl.metrics import Difference, Mean, Metric
from prefrl.options.types import TRUNCATION_SIDES
from prefrl.trainer.configs import OfflineConfig
from prefrl.types import LabeledBatch


def prepare_pairs(dataset: Dataset, processing_class: ProcessingClass, args: OfflineConfig) -> Dataset:
    """See `data.preference.prepare_preference_dataset`."""
    return prepare_preference_dataset(
        dataset,
        processing_class,
        max_length=args.max_length,
        truncation=TRUNCATION_SIDES[args.truncation_mode],
        invalid_rows=args.invalid_rows,
        chat_template_kwargs=cast("dict[str, Any] | None", args.chat_template_kwargs),
        num_proc=args.dataset_num_proc,
    )


def half_pairs(batch: Any) -> Tensor:
    """[B] what each row of a `TokenBatch` counts if items are pairs."""
    return torch.full((batch.num_rows,), 0.5, device=batch.device)


def prepare_unpaired(
    dataset: Dataset, processing_class: ProcessingClass, args: OfflineConfig, *, with_mismatched: bool
) -> Dataset:
    """See `data.preference.prepare_unpaired_dataset`."""
    return prepare_unpaired_dataset(
        dataset,
        processing_class,
        max_length=args.max_length,
        truncation=TRUNCATION_SIDES[args.truncation_mode],
        invalid_rows=args.invalid_rows,
        with_mismatched=with_mismatched,
        chat_template_kwargs=cast("dict[str, Any] | None", args.chat_template_kwargs),
        num_proc=args.dataset_num_proc,
    )


@dataclass(frozen=True, eq=False)
class RowScores:
    """The log-probs of a micro-batch, summed over each row."""

    batch: LabeledBatch
    sums: Tensor  # [B] nats, summed log-probs of a row's trained tokens; gradient flows
    logps: Tensor  # [B] nats, compared by losses: the sums, or with `ld_alpha` sums that weight the excess tokens less
    lengths: Tensor  # [B] float32, number of trained tokens

    @classmethod
    def of(cls, logprobs: Tensor, batch: LabeledBatch, *, ld_alpha: float | None = None) -> RowScores:
        """Scores from [N] log-probs; `ld_alpha` is the weight of tokens beyond the length of a pair's shorter side."""
        layout = (batch.trainable, batch.row_index, batch.num_rows)
        lengths = trainable_per_row(*layout)
        sums = row_sums(logprobs, *layout)
        if ld_alpha is None:
            return cls(batch, sums, sums, lengths)
        shared = lengths.clone()
        chosen, rejected = batch.pair_index
        shared[chosen] = shared[rejected] = torch.minimum(lengths[chosen], lengths[rejected])
        logps = length_desensitized(
            logprobs, batch.trainable, batch.row_index, shared, batch.num_rows, ld_alpha=ld_alpha
        )
        return cls(batch, sums, logps, lengths)


def make_pairs(rows: RowScores, reference: RowScores | None = None) -> Pairs:
    """The pairs of a micro-batch, in the order of `LabeledBatch.pairs`; without a reference, its log-probs are 0."""
    chosen, rejected = rows.batch.pair_index
    ref_logps = torch.zeros_like(rows.logps) if reference is None else reference.logps
    return Pairs(
        chosen_logps=rows.logps[chosen],
        rejected_logps=rows.logps[rejected],
        ref_chosen_logps=ref_logps[chosen],
        ref_rejected_logps=ref_logps[rejected],
        chosen_lengths=rows.lengths[chosen],
        rejected_lengths=rows.lengths[rejected],
    )


def pair_groups(batch: LabeledBatch) -> list[int]:
    """The group numbers of the pairs, in the order of `LabeledBatch.pairs`."""
    return [batch.group_index[row] for row in batch.pairs()[0]]


def pair_weights(scores: TokenScores, batch: LabeledBatch) -> Tensor:
    """[P] weights of the pairs by WPO: the product of those of both responses; `scores` have `log_collision`."""
    layout = (batch.trainable, batch.row_index, batch.num_rows)
    weights = wpo_weights(scores.logprobs, scores.log_collision, *layout)
    chosen, rejected = batch.pair_index
    return weights[chosen] * weights[rejected]


def sided_rows(batch: LabeledBatch) -> list[int]:
    """The rows that have a label: all except those that only serve to estimate a KL divergence."""
    return [row for row, side in enumerate(batch.is_preferred) if side is not None]


def pairs_per_chosen_token(batches: Sequence[LabeledBatch], device: torch.device) -> float:
    """(pairs of a step) / (trained tokens of their chosen responses), over all ranks. All ranks must call it.

    A sum over tokens, multiplied by this and divided by the number of pairs, is a mean over tokens.
    """
    pairs = tokens = 0.0
    for batch in batches:
        chosen, _ = batch.pairs()
        pairs += len(chosen)
        tokens += sum(batch.trainable_counts[row] for row in chosen)
    pairs, tokens = distributed.sum_over_ranks([pairs, tokens], device)
    return pairs / max(tokens, 1.0)


def preference_metrics(
    batch: LabeledBatch, scores: TokenScores, *, logps: Tensor, rewards: Tensor
) -> dict[str, Metric]:
    """TRL's metrics of chosen and rejected rows, and of pairs if the batch has them.

    Args:
        batch: The rows.
        scores: With entropy and mean logit. For pairs also `correct`: whether each token is the most likely one.
        logps: [B] nats.
        rewards: [B] implicit rewards.
    """
    logps, rewards = logps.detach(), rewards.detach()
    is_chosen = batch.preferred
    metrics: dict[str, Metric] = {
        "entropy": Mean((scores.entropy.detach() * batch.trainable).sum(), batch.trainable.sum())
    }
    for side, rows in (("chosen", is_chosen), ("rejected", ~is_chosen)):
        tokens = rows[batch.row_index] & batch.trainable
        metrics[f"logits/{side}"] = Mean((scores.mean_logit * tokens).sum(), tokens.sum())
        metrics[f"logps/{side}"] = Mean((logps * rows).sum(), rows.sum())
        metrics[f"rewards/{side}"] = Mean((rewards * rows).sum(), rows.sum())
    metrics["rewards/margins"] = Difference(
        (rewards * is_chosen).sum(), is_chosen.sum(), (rewards * ~is_chosen).sum(), (~is_chosen).sum()
    )
    if "correct" in scores.wanted:  # only for pairs
        tokens = is_chosen[batch.row_index] & batch.trainable
        metrics["mean_token_accuracy"] = Mean((scores.correct & tokens).sum(), tokens.sum())
        chosen, rejected = batch.pair_index
        metrics["rewards/accuracies"] = Mean((rewards[chosen] > rewards[rejected]).sum(), len(chosen))
    return metrics


class StepPairs:
    """All pairs of an optimizer step on all ranks, for losses that sort the pairs of a batch.

    Such a loss is computed over the whole step for every micro-batch. Gradients flow only through the pairs of the
    micro-batch; all others are constants. The result is the micro-batch's part of the full gradient, however the step
    is cut.

    Args:
        batches: This rank's pairs, one entry for each micro-batch; constants.
        groups: The group numbers of these pairs: 0, 1, ... in any order.
    """

    def __init__(self, batches: Sequence[Pairs], groups: Sequence[int]) -> None:
        order = torch.tensor(groups, dtype=torch.long).argsort()
        mine = {name: _joined([getattr(pairs, name).cpu() for pairs in batches])[order] for name in _PER_PAIR}
        parts = distributed.gather_objects(mine)
        self._first = sum(len(part["chosen_logps"]) for part in parts[: distributed.rank()])
        self._values = {name: torch.cat([part[name] for part in parts]) for name in _PER_PAIR}

    def loss(self, function: Callable[[Pairs], Tensor], pairs: Pairs, groups: Sequence[int]) -> Tensor:
        """Scalar: this micro-batch's share of the summed loss, with the full gradient of its pairs.

        Args:
            function: Maps all pairs to their [P] losses.
            pairs: The pairs of the micro-batch; gradient flows.
            groups: The group numbers of these pairs.
        """
        device = pairs.chosen_logps.device
        positions = (torch.tensor(groups) + self._first).to(device, non_blocking=True)
        live: dict[str, Any] = {
            name: values.to(device, non_blocking=True).index_copy(0, positions, getattr(pairs, name))
            for name, values in self._values.items()
        }
        everyone = replace(pairs, **live)
        total = function(everyone).sum()
        share = len(groups) / len(everyone.chosen_logps)
        return total + (share - 1) * total.detach()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *parts])  # a rank may have no pairs


_PER_PAIR = (
    "chosen_logps",
    "rejected_logps",
    "ref_chosen_logps",
    "ref_rejected_logps",
    "chosen_lengths",
    "rejected_lengths",
)
