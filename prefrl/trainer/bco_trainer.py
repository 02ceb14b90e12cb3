"""Binary classifier optimization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import datasets
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prefrl.data.collate import unpaired_batch
from prefrl.data.images import ProcessingClass, tokenizer_of
from prefrl.errors import ConfigError, DataError, require
from prefrl.losses.preference.unpaired import bco, density_ratio_weights
from prefrl.options.fields import warn_of_hint
from prefrl.trainer.arguments import check_arguments
from prefrl.trainer.configs import BCOConfig
from prefrl.trainer.offline.preference import RowScores, preference_metrics, prepare_unpaired
from prefrl.trainer.offline.rows import RunningMean, predicted_rows
from prefrl.trainer.offline.trainer import OfflineTrainer, TrainerArguments
from prefrl.types import LabeledBatch, LossOutput, ReferencedBatch


class BCOTrainer(OfflineTrainer[LabeledBatch, ReferencedBatch]):
    """Minimizes the mean over rows of -log sigmoid(+-(beta log r - delta)), + for desirable rows.

    r = policy / reference; delta is the running mean of all rewards beta log r so far. With `embedding_func`,
    undesirable rows are weighted by the ratio of the densities of desirable and undesirable prompts, which a logistic
    regression on prompt embeddings estimates (underlying distribution matching).

    Args:
        model: Name, path or instance. An instance is trained in place.
        ref_model: The reference. By default, it is the model's weights at construction.
        args: Options. The default options write to `<model name>-BCO`.
        embedding_func: `f(input_ids=..., attention_mask=...)` -> [n, d] embeddings of n prompts.
        embedding_tokenizer: Tokenizes the text of the prompts for `embedding_func`.
        arguments: See `TrainerArguments`. Datasets have unpaired rows with `prompt`, `completion` and `label`, or
            preference rows, each of which is split into two unpaired rows.

    Source: Jung et al. 2024, arXiv 2404.04656.
    """

    algorithm = "bco"
    args: BCOConfig
    predictions_of = staticmethod(predicted_rows)
    lay_out = staticmethod(unpaired_batch)

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        ref_model: str | Path | PreTrainedModel | None = None,
        args: BCOConfig | None = None,
        *data: Any,
        embedding_func: Callable[..., Any] | None = None,
        embedding_tokenizer: PreTrainedTokenizerBase | None = None,
        **arguments: Unpack[TrainerArguments],
    ) -> None:
        if (embedding_func is None) != (embedding_tokenizer is None):
            raise ConfigError("embedding_func and embedding_tokenizer: pass both, for the density ratio, or neither")
        self._embed = embedding_func
        self._embedding_tokenizer = embedding_tokenizer
        self._density_ratio: DensityRatio | None = None
        check_arguments(type(self), {"model": model, "ref_model": ref_model, "args": args})
        super().__init__(model, args, *data, **arguments)
        self.set_up_reference(ref_model)
        self._mean = self.reward_mean = RunningMean(self.args.device)
        if embedding_func is None:
            for name, unset in (("prompt_sample_size", 1024), ("min_density_ratio", 0.5), ("max_density_ratio", 10.0)):
                if (value := getattr(self.args, name)) != unset:
                    warn_of_hint(
                        self.args,
                        f"{name}={value!r} has no effect because there is no embedding_func to estimate densities "
                        "with. Give embedding_func and embedding_tokenizer.",
                    )

    def prepare_dataset(self, dataset: Dataset, processing_class: ProcessingClass, *, training: bool) -> Dataset:
        """Tokenize; with `embedding_func`, weight the undesirable rows."""
        rows = prepare_unpaired(dataset, processing_class, self.args, with_mismatched=False)
        if self._embed is None or self._embedding_tokenizer is None:
            return rows
        if self._density_ratio is None:  # the training dataset is prepared first
            self._density_ratio = DensityRatio(
                self._embed,
                embedding_tokenizer=self._embedding_tokenizer,
                tokenizer=tokenizer_of(processing_class),
                lowest=self.args.min_density_ratio,
                highest=self.args.max_density_ratio,
            )
            self._density_ratio.fit(rows, sample_size=self.args.prompt_sample_size, seed=self.args.seed)
        return self._density_ratio.weigh(rows)

    def row_items(self, batch: LabeledBatch) -> Tensor:
        """Rows."""
        return torch.ones(batch.num_rows, device=batch.device)

    def prepare_step(self, batches: list[LabeledBatch]) -> list[ReferencedBatch]:
        """See `OfflineTrainer`."""
        return self.with_reference(batches)

    def loss(self, model: nn.Module, batch: ReferencedBatch) -> LossOutput:
        """Weighted sum over rows."""
        scores = self.scorer.scores(model, batch, want=("entropy", "mean_logit"))
        policy = RowScores.of(scores.logprobs, batch)
        log_ratio = policy.logps - RowScores.of(batch.ref_logprobs, batch).logps
        is_desirable = batch.preferred
        shift = self._mean.value.to(log_ratio.device)
        losses = bco(log_ratio, is_desirable, beta=self.args.beta, reward_shift=shift)
        losses = losses * batch.on_device(batch.weights)
        rewards = self.args.beta * log_ratio.detach()
        if model.training:
            self._mean.add(rewards)
        metrics = preference_metrics(batch, scores, logps=policy.logps, rewards=rewards)
        return LossOutput(total=losses.sum(), metrics=metrics, predictions=rewards)


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
