"""Evaluates a trainer's policy: runs over datasets without gradients, and metrics over all rows and processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from datasets import IterableDataset
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.metrics import Metric, merge
from prefrl.models.modes import eval_mode
from prefrl.options.fields import plain_value
from prefrl.options.names import current_metric, nearest
from prefrl.trainer.memory import EVALUATION, explained
from prefrl.trainer.parts import Run
from prefrl.trainer.steps import drained

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader
    from transformers import TrainingArguments

    from prefrl.trainer.base_config import BaseConfig

ComputeMetrics = Callable[[EvalPrediction], Mapping[str, float]]

_log = logging.getLogger(__name__)

# What HuggingFace adds to the metrics of an evaluation.
_OF_EVERY_EVALUATION = ("runtime", "samples_per_second", "steps_per_second")
NO_TOKEN = -100  # in the place of a token that is not predicted or not learned


class Evaluated(Run, Protocol):
    """A training, as its evaluations see it."""

    processing_class: Any
    compute_metrics: ComputeMetrics | None
    predicted: PredictedRows | None

    def prepared(self, dataset: Any, processing_class: Any, *, training: bool) -> Any:
        """A raw dataset, or several by name, checked and tokenized; None stays None."""

    def evaluation_step(self, model: nn.Module, item: Any) -> dict[str, Metric]:
        """Metrics of one item of the evaluation loader."""

    def end_evaluation(self, model: nn.Module, name: str) -> dict[str, Metric]:
        """Metrics of all items together, after the last one. All ranks call it.

        Args:
            model: Evaluated.
            name: Of the evaluation, with which the names of its metrics begin.
        """

    def rows_of(self, item: Any) -> int:
        """Dataset rows in an item of the evaluation loader."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The items of a prepared dataset."""

    def run_evaluation(self, dataloader: Iterable[Any], prefix: str) -> EvalLoopOutput:
        """See `Evaluation.run`."""


class Evaluation:
    """Runs the evaluations of a trainer.

    Args:
        trainer: Is asked for each item's metrics.
    """

    def __init__(self, trainer: Evaluated) -> None:
        self._trainer = trainer
        self._predicts = False

    def datasets(self, given: Any) -> dict[str, Any]:
        """The prepared datasets of an evaluation, by what their metrics' names begin with after the prefix.

        Args:
            given: Raw, prepared or the name of one; None: the trainer's own, and the training set if that is on.

        Raises:
            ConfigError: There is none.
        """
        trainer, prepared = self._trainer, given
        if given is not None and not isinstance(given, str):
            prepared = self.prepared(given)
        elif given is None and trainer.eval_dataset is None:
            raise ConfigError("eval_dataset=None: evaluation needs a dataset, here or in the constructor")
        parts = (
            {f"_{name}": part for name, part in prepared.items()} if isinstance(prepared, Mapping) else {"": prepared}
        )
        if given is None and trainer.args.evaluate_training_set:
            parts["_train"] = first_rows(trainer.train_dataset, trainer.args.max_eval_samples)
        return parts

    def prepared(self, dataset: Any) -> Any:
        """A raw dataset, prepared; the trainer's own as they are: `trainer.evaluate(trainer.train_dataset)`."""
        trainer = self._trainer
        own = [trainer.train_dataset, trainer.eval_dataset]
        own += trainer.eval_dataset.values() if isinstance(trainer.eval_dataset, Mapping) else []
        if any(dataset is one for one in own):
            return dataset
        return trainer.prepared(dataset, trainer.processing_class, training=False)

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Context of an evaluation that also returns what is known of each row."""
        self._predicts = True
        try:
            yield
        finally:
            self._predicts = False

    def check_metrics(self) -> None:
        """Look for the metrics that decide something in training before its first step. All ranks must call it.

        A metric that not every evaluation has is looked for in an evaluation of the first rows.

        Raises:
            ConfigError: There is no such metric. It is a warning where later rows or the user's functions may add it.
        """
        trainer, args = self._trainer, self._trainer.args
        check_metric_names(args, trainer.eval_dataset)
        wanted = {option: name for option, name in _deciding_metrics(args).items() if name.startswith("eval_")}
        if not wanted or args.eval_on_start or (trainer.eval_dataset is None and not args.evaluate_training_set):
            return
        parts = self.datasets(None)
        kinds = ["", "_ema"] if args.ema_decay is not None else [""]
        prefixes = {f"eval{kind}{part}_": part for kind in kinds for part in parts}
        for option, name in wanted.items():
            prefix = max((one for one in prefixes if name.startswith(one)), key=len)
            if name.removeprefix(prefix) != args.best_metric:
                known = self._metrics_of_first_rows(parts[prefixes[prefix]])
                self._check_known(option, name, {f"{prefix}{one}" for one in known})

    def _metrics_of_first_rows(self, dataset: Any) -> set[str]:
        """The names of metrics of an evaluation of one item, without those of `compute_metrics`."""
        trainer, compute_metrics = self._trainer, self._trainer.compute_metrics
        trainer.compute_metrics = None  # is for whole datasets
        try:
            items = list(islice(trainer.get_eval_dataloader(dataset), 1))
            found = trainer.run_evaluation(items, "").metrics
        finally:
            trainer.compute_metrics = compute_metrics
        return {name.removeprefix("_") for name in found} | set(_OF_EVERY_EVALUATION)

    def _check_known(self, option: str, name: str, known: Collection[str]) -> None:
        """Raise if there is no such metric, or warn if it may come later."""
        if name in known:
            return
        text = f"{option}: an evaluation of the first rows has no metric {name!r}. {nearest(name, known)}"
        if self._trainer.compute_metrics is None and self._trainer.args.best_metric == "loss":
            raise ConfigError(text)
        if distributed.is_main():
            _log.warning("%s The run ends at its first evaluation unless other rows or your functions add it.", text)

    def run(self, dataloader: Iterable[Any], prefix: str) -> EvalLoopOutput:
        """Take the means over all items and all ranks. They do the same number of forward passes.

        Args:
            dataloader: Items of a prepared dataset.
            prefix: What the names of its metrics begin with; "" for a trial, of which nothing is shown.
        """
        trainer, args = self._trainer, self._trainer.args
        model = trainer.policy if distributed.is_sharded(trainer.policy) else trainer.policy.to(args.device)
        wants_rows = self._predicts or trainer.compute_metrics is not None
        num_rows, trainer.predicted = 0, PredictedRows() if wants_rows else None
        memory = explained(lambda: f"evaluation, after {num_rows} rows", args, EVALUATION)
        with trainer.account.phase(None), eval_mode(model), torch.no_grad(), distributed.usable(model), memory:
            for item in dataloader:
                merge(trainer.metrics["eval"], trainer.evaluation_step(model, item))
                num_rows += trainer.rows_of(item)
            merge(trainer.metrics["eval"], trainer.end_evaluation(model, prefix))
        distributed.release(model)
        (num_samples,) = distributed.sum_over_ranks([num_rows], args.device)
        found = drained(trainer.metrics, "eval") | {"num_tokens": float(trainer.state.num_input_tokens_seen)}
        rows = None if trainer.predicted is None else trainer.predicted.gathered()
        if rows is not None and trainer.compute_metrics is not None:
            found |= _computed(trainer.compute_metrics, rows)
        trainer.predicted = None
        values = {f"{prefix}_{name.removeprefix(f'{prefix}_')}": value for name, value in found.items()}
        predictions, labels = (None, None) if rows is None else (rows.predictions, rows.label_ids)
        return EvalLoopOutput(predictions, labels, metrics=values, num_samples=int(num_samples))


def first_rows(dataset: Any, limit: int | None) -> Any:
    """The first rows of a dataset; None: all."""
    if limit is None:
        return dataset
    return dataset.take(limit if isinstance(dataset, IterableDataset) else min(limit, len(dataset)))


# What an evaluation decides in training.


def best_metric(args: TrainingArguments) -> str:
    """The name of the metric by which models are compared, as evaluations return it."""
    return f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"


def check_best_metric(args: TrainingArguments, metrics: Mapping[str, float]) -> None:
    """Reject an evaluation without the metric by which models are compared.

    Raises:
        ConfigError: See above.
    """
    if args.metric_for_best_model is not None and (name := best_metric(args)) not in metrics:
        raise ConfigError(
            f"metric_for_best_model={args.metric_for_best_model!r}: evaluations have no metric {name!r}. "
            f"{nearest(name, metrics)}"
        )


def check_training_set(args: BaseConfig, train_dataset: Any, eval_dataset: Any) -> None:
    """Reject evaluations of nothing, and `evaluate_training_set` where the training set cannot be evaluated.

    Raises:
        ConfigError: There is none, it may have no end, or an evaluation dataset has its name.
    """
    strategy = plain_value(args.eval_strategy)
    if strategy != "no" and eval_dataset is None:
        raise ConfigError(
            f"eval_strategy={strategy!r} with eval_dataset=None: there is nothing to evaluate on. Pass an "
            "eval_dataset, or set eval_strategy='no'."
        )
    if not args.evaluate_training_set:
        return
    if train_dataset is None:
        raise ConfigError("evaluate_training_set=True: there is no train_dataset. Set it to False.")
    if isinstance(eval_dataset, Mapping) and "train" in eval_dataset:
        raise ConfigError(
            "evaluate_training_set=True with an eval_dataset named 'train': both would be logged as "
            "eval_train_... Give it another name, or set evaluate_training_set=False."
        )
    if isinstance(train_dataset, IterableDataset) and args.max_eval_samples is None:
        raise ConfigError("evaluate_training_set=True with a stream: it may have no end. Set max_eval_samples.")


def check_metric_names(args: BaseConfig, eval_dataset: Any) -> None:
    """Reject metrics that decide something in training, but that no evaluation will have.

    What an evaluation measures is known only when it has run; to which dataset a name belongs is known before.

    Raises:
        ConfigError: There are several evaluation datasets, and a name contains none of theirs.
    """
    if not isinstance(eval_dataset, Mapping) or not eval_dataset:
        return
    names = [*eval_dataset, *(["train"] if args.evaluate_training_set else [])]
    kinds = ["", "ema_"] if args.ema_decay is not None else [""]
    prefixes = [f"eval_{kind}{name}_" for kind in kinds for name in names]
    for option, metric in _deciding_metrics(args).items():
        if metric.startswith("eval_") and not metric.startswith(tuple(prefixes)):
            kind = kinds[-1] if metric.startswith(f"eval_{kinds[-1]}") else ""
            example = f"eval_{kind}{names[0]}_{metric.removeprefix(f'eval_{kind}')}"
            raise ConfigError(
                f"{option}: evaluations have no metric {metric!r}. Each evaluation dataset has a name, so their "
                f"metrics begin with {' or '.join(map(repr, prefixes))}. Choose {example!r}, for example."
            )


def _deciding_metrics(args: BaseConfig) -> dict[str, str]:
    """The logged metrics that decide something in training, by the options that name them."""
    found = {}
    if args.metric_for_best_model is not None and args.eval_strategy != "no":
        found[f"metric_for_best_model={args.metric_for_best_model!r}"] = best_metric(args)
    if args.reduces_on_plateau:
        metric = args.plateau_params.metric
        found[f"reduce_on_plateau_kwargs: metric={metric!r}"] = current_metric(metric)
    if args.increase_batch_size_on_plateau:
        growth = args.growth_params
        found[f"increase_batch_size_kwargs: eval_metric={growth.eval_metric!r}"] = growth.key
    return found


# What is known of each row.


@dataclass
class PredictedRows:
    """The predictions and labels of the rows that this process has evaluated, and the dataset rows, where needed."""

    predictions: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)

    def add(self, predictions: Sequence[Any], labels: Sequence[Any], inputs: Sequence[Any] = ()) -> None:
        """Add some rows."""
        self.predictions += predictions
        self.labels += labels
        self.inputs += inputs

    def gathered(self) -> EvalPrediction:
        """The rows of all processes, which all must call it. Lists of ids are filled up with -100 to the longest."""
        parts = distributed.gather_objects((self.predictions, self.labels, self.inputs))
        predictions, labels, inputs = ([row for part in parts for row in part[i]] for i in range(3))
        return EvalPrediction(_array(predictions), _array(labels), inputs or None)


def _computed(compute_metrics: ComputeMetrics, rows: EvalPrediction) -> dict[str, float]:
    """What the user's function makes of the rows of all processes.

    Raises:
        ConfigError: The function does not return a mapping of names to numbers.
    """
    found = compute_metrics(rows)
    if not isinstance(found, Mapping):
        raise ConfigError(f"compute_metrics returned {found!r:.80}: must be a mapping of names to numbers")
    wrong = [name for name, value in found.items() if np.ndim(value) != 0 or not np.isreal(value)]
    if wrong:
        raise ConfigError(f"compute_metrics: {wrong[0]!r} is {found[wrong[0]]!r:.80}: must be a number")
    return {name: float(value) for name, value in found.items()}


def _array(rows: Sequence[Any]) -> Any:
    """An array of numbers, or of lists of ids; other rows are given as they are."""
    if not rows or not isinstance(rows[0], np.ndarray) or rows[0].ndim == 0:
        return rows if rows and isinstance(rows[0], str | list) else np.array(rows)
    if len({len(row) for row in rows}) == 1:
        return np.stack(rows)
    filled = np.full((len(rows), max(map(len, rows))), NO_TOKEN, dtype=rows[0].dtype)
    for row, values in zip(filled, rows, strict=True):
        row[: len(values)] = values
    return filled
