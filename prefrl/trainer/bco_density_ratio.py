"""Weights undesirable rows so that their prompts match the distribution of desirable rows' prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import datasets
import torch

from prefrl.errors import DataError
from prefrl.losses.preference.unpaired import density_ratio_weights
from prefrl.optional import require

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

__all__ = ["DensityRatio"]

_ROWS_PER_BATCH = 64


class DensityRatio:
    """p(desirable | prompt) / p(undesirable | prompt), from a logistic regression on embeddings of prompts.

    Args:
        embed: `f(input_ids=..., attention_mask=...)` -> [n, d].
        embedding_tokenizer: Tokenizes text for `embed`.
        tokenizer: The tokenizer that made the prompts' token ids.
        lowest: Smallest weight.
        highest: Largest weight.

    Raises:
        ImportError: scikit-learn is not installed.

    Source: Jung et al. 2024, arXiv 2404.04656, section 3.3
    """

    def __init__(
        self,
        embed: Callable[..., Any],
        *,
        embedding_tokenizer: PreTrainedTokenizerBase,
        tokenizer: PreTrainedTokenizerBase,
        lowest: float,
        highest: float,
    ) -> None:
        linear_model = require("sklearn.linear_model", extra="bco", feature="BCO with embedding_func")
        self._classifier = linear_model.LogisticRegression(class_weight="balanced", max_iter=1000)
        self._embed = embed
        self._embedding_tokenizer = embedding_tokenizer
        self._tokenizer = tokenizer
        self._lowest = lowest
        self._highest = highest

    def fit(self, rows: datasets.Dataset, *, sample_size: int, seed: int) -> None:
        """Fit the classifier that separates the prompts of the two labels.

        Args:
            rows: Dataset with `prompt_ids` and `label`.
            sample_size: Number of prompts to fit on; at most half of them have the same label.
            seed: Seed of the sample.

        Raises:
            DataError: The dataset is a stream, or has no rows of one of the labels.
        """
        if isinstance(rows, datasets.IterableDataset):
            raise DataError(
                "IterableDataset with embedding_func: the density ratio needs a sample of all rows. Use a "
                "datasets.Dataset"
            )
        labels = torch.tensor(rows["label"][:], dtype=torch.bool)
        generator = torch.Generator().manual_seed(seed)
        chosen: list[int] = []
        for side in (True, False):
            of_side = (labels == side).nonzero().squeeze(1)
            if len(of_side) == 0:
                raise DataError(
                    f"no row has label={side}: embedding_func compares the prompts of both labels. Add such rows, or "
                    "remove embedding_func"
                )
            order = torch.randperm(len(of_side), generator=generator)[: sample_size // 2]
            chosen += of_side[order].tolist()
        self._classifier.fit(self._embeddings(rows.select(chosen)["prompt_ids"][:]), labels[chosen].numpy())

    def weigh(self, rows: datasets.Dataset) -> datasets.Dataset:
        """The rows with a column `weight`: 1 for desirable rows, the bounded density ratio for the others."""
        is_desirable = torch.tensor(rows["label"][:], dtype=torch.bool)
        probability = torch.from_numpy(self._classifier.predict_proba(self._embeddings(rows["prompt_ids"][:]))[:, 1])
        ratio = density_ratio_weights(probability, lowest=self._lowest, highest=self._highest)
        return rows.add_column("weight", torch.where(is_desirable, 1.0, ratio).tolist())

    def _embeddings(self, prompts: Sequence[Sequence[int]]) -> Any:
        """[n, d] float64 array."""
        texts = [self._tokenizer.decode(list(ids), skip_special_tokens=True) for ids in prompts]
        parts: list[Tensor] = []
        for start in range(0, len(texts), _ROWS_PER_BATCH):
            inputs = self._embedding_tokenizer(
                texts[start : start + _ROWS_PER_BATCH], padding=True, return_tensors="pt"
            )
            with torch.no_grad():
                embedded = self._embed(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            parts.append(torch.as_tensor(embedded).detach().cpu().double())
        return torch.cat(parts).numpy()
