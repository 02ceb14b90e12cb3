"""A trainer that evaluates: runs over datasets without gradients, and metrics over all rows and processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from datasets import IterableDataset
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.metrics import Metric, host, merge, values_of
from prefrl.models.modes import eval_mode
from prefrl.trainer.base.early_stopping import best_metric
from prefrl.trainer.base.memory import EVALUATION, explained
from prefrl.trainer.base.optimizers.schedule_free import use_averaged_weights
from prefrl.trainer.base.predictions import PredictedRows, metrics_of
from prefrl.trainer.base.sized import SizedTrainer
from prefrl.trainer.base.step_plan import Plateau

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn
    from torch.utils.data import DataLoader

    from prefrl.data.images import ProcessingClass
    from prefrl.trainer.base.config import BaseConfig
    from prefrl.trainer.base.step_account import StepAccount

__all__ = ["EvaluatingTrainer"]


def _deciding_metrics(args: BaseConfig) -> dict[str, str]:
    """The logged metrics that decide something in training, by the options that name them."""
    found = {}
    if args.metric_for_best_model is not None and args.eval_strategy != "no":
        found[f"metric_for_best_model={args.metric_for_best_model!r}"] = best_metric(args)
    if args.reduces_on_plateau:
        metric = args.plateau_params.metric
        found[f"reduce_on_plateau_kwargs: metric={metric!r}"] = metric
    if args.increase_batch_size_on_plateau:
        growth = args.growth_params
        found[f"increase_batch_size_kwargs: eval_metric={growth.eval_metric!r}"] = Plateau(growth).key
    return found


class EvaluatingTrainer(SizedTrainer):
    """HuggingFace's loop, with evaluations whose metrics are over the whole dataset and all processes.

    A subclass implements `evaluation_step`, and `end_evaluation` if it needs all rows at once.
    """

    account: StepAccount
    predicted: PredictedRows | None = None  # of the running evaluation, if anybody asks for them
    _predicts = False

    @abstractmethod
    def _prepared(self, dataset: Any, processing_class: ProcessingClass, *, training: bool) -> Any:
        """A raw dataset, or several by name, checked and tokenized; None stays None."""

    def evaluate(
        self,
        eval_dataset: Dataset | Mapping[str, Dataset] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Metrics on the evaluation dataset, and on the training dataset if that is on; or on raw data given here."""
        use_averaged_weights(self.optimizer)
        prepared: Any = eval_dataset
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            prepared = self._ready(eval_dataset)
        elif eval_dataset is None and self.eval_dataset is None:
            raise ConfigError("eval_dataset=None: evaluation needs a dataset, here or in the constructor")
        parts = (
            {f"_{name}": part for name, part in prepared.items()} if isinstance(prepared, Mapping) else {"": prepared}
        )
        if eval_dataset is None and self.args.evaluate_training_set:
            parts["_train"] = self._first_rows(self.train_dataset)
        metrics: dict[str, float] = {}
        for name, part in parts.items():
            metrics |= super().evaluate(part, ignore_keys, f"{metric_key_prefix}{name}")
        return metrics

    def predict(
        self, test_dataset: Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """What `compute_metrics` gets about raw data, as `predictions` and `label_ids`, and metrics as of `evaluate`.

        The metrics are returned and not logged.

        Raises:
            ConfigError: There is no dataset, or there are several.
        """
        if test_dataset is None or isinstance(test_dataset, Mapping):
            raise ConfigError(f"test_dataset is {type(test_dataset).__name__}: predict() needs one dataset")
        use_averaged_weights(self.optimizer)
        prepared = self._ready(test_dataset)
        self._predicts = True
        try:
            return super().predict(prepared, ignore_keys, metric_key_prefix)
        finally:
            self._predicts = False

    def _ready(self, dataset: Any) -> Any:
        """A raw dataset, prepared; the trainer's own as they are: `trainer.evaluate(trainer.train_dataset)`."""
        own = [self.train_dataset, self.eval_dataset]
        own += self.eval_dataset.values() if isinstance(self.eval_dataset, Mapping) else []
        if any(dataset is one for one in own):
            return dataset
        return self._prepared(dataset, self.processing_class, training=False)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """The loader of an evaluation."""
        loader: DataLoader[Any] = self.get_eval_dataloader(test_dataset)
        return loader

    def check_training_set(self) -> None:
        """Reject `evaluate_training_set` where the training set cannot be evaluated.

        Raises:
            ConfigError: There is none, it may have no end, or an evaluation dataset has its name.
        """
        if not self.args.evaluate_training_set:
            return
        if self.train_dataset is None:
            raise ConfigError("evaluate_training_set=True: there is no train_dataset. Set it to False.")
        if isinstance(self.eval_dataset, Mapping) and "train" in self.eval_dataset:
            raise ConfigError(
                "evaluate_training_set=True with an eval_dataset named 'train': both would be logged as "
                "eval_train_... Give it another name, or set evaluate_training_set=False."
            )
        if isinstance(self.train_dataset, IterableDataset) and self.args.max_eval_samples is None:
            raise ConfigError("evaluate_training_set=True with a stream: it may have no end. Set max_eval_samples.")

    def check_metric_names(self) -> None:
        """Reject metrics that decide something in training, but that no evaluation will have.

        What an evaluation measures is known only when it has run; to which dataset a name belongs is known before.

        Raises:
            ConfigError: There are several evaluation datasets, and a name contains none of theirs.
        """
        if not isinstance(self.eval_dataset, Mapping) or not self.eval_dataset:
            return
        names = [*self.eval_dataset, *(["train"] if self.args.evaluate_training_set else [])]
        kinds = ["", "ema_"] if self.args.ema_decay is not None else [""]
        prefixes = [f"eval_{kind}{name}_" for kind in kinds for name in names]
        for option, metric in _deciding_metrics(self.args).items():
            if metric.startswith("eval_") and not metric.startswith(tuple(prefixes)):
                kind = kinds[-1] if metric.startswith(f"eval_{kinds[-1]}") else ""
                example = f"eval_{kind}{names[0]}_{metric.removeprefix(f'eval_{kind}')}"
                raise ConfigError(
                    f"{option}: evaluations have no metric {metric!r}. Each evaluation dataset has a name, so their "
                    f"metrics begin with {' or '.join(map(repr, prefixes))}. Choose {example!r}, for example."
                )

    def _first_rows(self, dataset: Any) -> Any:
        """The first `max_eval_samples` rows."""
        limit = self.args.max_eval_samples
        if limit is None:
            return dataset
        return dataset.take(limit if isinstance(dataset, IterableDataset) else min(limit, len(dataset)))

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run `evaluation_step` on every item; the means are over the whole dataset and all ranks."""
        model = self.policy if distributed.is_sharded(self.policy) else self.policy.to(self.args.device)
        wants_rows = self._predicts or self.compute_metrics is not None
        num_rows, self.predicted = 0, PredictedRows() if wants_rows else None
        memory = explained(lambda: f"evaluation, after {num_rows} rows", self.args, EVALUATION)
        with self.account.phase(None), eval_mode(model), torch.no_grad(), distributed.usable(model), memory:
            for item in dataloader:
                merge(self.metrics["eval"], self.evaluation_step(model, item))
                num_rows += self._rows_of(item)
            merge(self.metrics["eval"], self.end_evaluation(model, metric_key_prefix))
        distributed.release(model)
        (num_samples,) = distributed.sum_over_ranks([num_rows], self.args.device)
        found = self._drain("eval") | {"num_tokens": float(self.state.num_input_tokens_seen)}
        rows = None if self.predicted is None else self.predicted.gathered()
        if rows is not None and self.compute_metrics is not None:
            found |= metrics_of(self.compute_metrics, rows)
        self.predicted = None
        values = {
            f"{metric_key_prefix}_{name.removeprefix(f'{metric_key_prefix}_')}": value for name, value in found.items()
        }
        predictions, labels = (None, None) if rows is None else (rows.predictions, rows.label_ids)
        return EvalLoopOutput(predictions, labels, metrics=values, num_samples=int(num_samples))

    @abstractmethod
    def evaluation_step(self, model: nn.Module, item: Any) -> dict[str, Metric]:
        """Metrics of one item of the evaluation loader."""

    def end_evaluation(self, model: nn.Module, name: str) -> dict[str, Metric]:
        """Metrics of all items together, after the last one. All ranks call it.

        Args:
            model: Evaluated.
            name: Of the evaluation, with which the names of its metrics begin.
        """
        return {}

    @abstractmethod
    def _rows_of(self, item: Any) -> int:
        """Dataset rows in an item of the evaluation loader."""

    def _drain(self, mode: Literal["train", "eval"]) -> dict[str, float]:
        """Values of the metrics so far, merged over ranks, on the host; resets the metrics."""
        hosted = {name: host(metric) for name, metric in self.metrics[mode].items()}
        self.metrics[mode] = {}
        return values_of(distributed.gather_objects(hosted))
