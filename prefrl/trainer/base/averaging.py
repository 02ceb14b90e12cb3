"""A trainer that averages weights: over the steps of a run, and of its best checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.models.averages import AveragedWeights
from prefrl.models.soup_choice import Ingredient, Soup, greedy_choice
from prefrl.options.suggest import nearest
from prefrl.run.checkpoints import own_checkpoints
from prefrl.trainer.base.early_stopping import EarlyStopping, best_metric
from prefrl.trainer.base.evaluating import EvaluatingTrainer
from prefrl.trainer.base.moving_average import MovingAverage
from prefrl.trainer.base.optimizers.schedule_free import averages_weights

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers.trainer_utils import TrainOutput

    from prefrl.trainer.base.config import BaseConfig

__all__ = ["AveragingTrainer"]

_log = logging.getLogger(__name__)

_EMA = "ema"  # the folder of the moving average, and its name in the logs
_SOUP = "eval_soup"  # the name of evaluations of soups


class AveragingTrainer(EvaluatingTrainer):
    """HuggingFace's loop, beside which a moving average of the weights is kept, and after which the best are averaged.

    Args:
        args: Options.
        arguments: See HuggingFace's `Trainer`.

    Raises:
        ConfigError: The backend's weights cannot be averaged, or a dataset has a name that is taken.
    """

    def __init__(self, *, args: BaseConfig, **arguments: Any) -> None:
        super().__init__(args=args, **arguments)
        for name in ("ema_decay", "model_soup"):
            if getattr(args, name) is not None:
                distributed.check_weights_stay(self.accelerator, f"{name}={getattr(args, name)!r}")
        if args.early_stopping_patience is not None:
            self.add_callback(EarlyStopping(args.early_stopping_patience, args.early_stopping_params.threshold))
        self.ema = None if args.ema_decay is None else MovingAverage(args.ema_decay)
        self._has_ema_weights = False
        if self.ema is not None:
            if isinstance(self.eval_dataset, Mapping) and _EMA in self.eval_dataset:
                raise ConfigError(
                    f"ema_decay={args.ema_decay} with an eval_dataset named 'ema': both would be logged as "
                    "eval_ema_... Give it another name, or leave ema_decay None."
                )
            self.add_callback(self.ema)

    # The moving average.

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Context in which the policy has the weights of the moving average."""
        assert self.ema is not None
        assert self.ema.average is not None
        with self.ema.average.in_place():
            self._has_ema_weights = True
            try:
                yield
            finally:
                self._has_ema_weights = False

    @property
    def evaluates_averages(self) -> bool:
        """Whether the weights that are evaluated now are others than those that are trained."""
        return self._has_ema_weights or averages_weights(self.optimizer)

    @property
    def _has_average(self) -> bool:
        return self.ema is not None and self.ema.average is not None

    def evaluate(
        self,
        eval_dataset: Dataset | Mapping[str, Dataset] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """See `EvaluatingTrainer`; evaluates the moving average of the weights, too, as `<prefix>_ema_...`."""
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if self._has_average:
            with self._averaged():
                metrics |= super().evaluate(eval_dataset, ignore_keys, f"{metric_key_prefix}_{_EMA}")
        return metrics

    def _write_described(self, folder: Path, *, is_checkpoint: bool) -> None:
        """See `ResumableTrainer`; but for checkpoints, saves the moving average beside it, in the folder `ema`."""
        if self._has_average and not is_checkpoint:
            with self._averaged():
                super()._write_described(folder / _EMA, is_checkpoint=False)
        super()._write_described(folder, is_checkpoint=is_checkpoint)

    def _save_update_state(self, folder: Path) -> None:
        """See `ResumableTrainer`; also writes the moving average."""
        super()._save_update_state(folder)
        if self.ema is not None:
            self.ema.save(folder, writes=self.args.should_save)

    def _load_update_state(self, folder: Path) -> None:
        """See `ResumableTrainer`."""
        super()._load_update_state(folder)
        if self.ema is not None:
            self.ema.load(self.policy, folder)

    def _checkpoint_bytes(self) -> int:
        has_state = self.ema is not None and not self.args.save_only_model
        trained = sum(distributed.shape_of(p).numel() for p in self.model.parameters() if p.requires_grad)
        return super()._checkpoint_bytes() + 4 * trained * has_state

    # The best checkpoints.

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """HuggingFace's hook, called after each evaluation of a training."""
        if self.args.metric_for_best_model is not None and (name := best_metric(self.args)) not in metrics:
            raise ConfigError(
                f"metric_for_best_model={self.args.metric_for_best_model!r}: evaluations have no metric {name!r}. "
                f"{nearest(name, metrics)}"
            )
        is_best: bool = super()._determine_best_metric(metrics, trial)
        return is_best

    def _train(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> TrainOutput:
        output = super()._train(checkpoint, *args, **kwargs)
        if self.args.model_soup is not None:
            self._make_soup()
        return output

    def _make_soup(self) -> None:
        """Go on with the average of the best checkpoints, and record in `soup.json` what it is made of."""
        self.run_folder.wait()
        ranked = self._ranked()[: self.args.soup_params.top_k]
        if len(ranked) < 2:
            self._say(
                f"model_soup={self.args.model_soup!r}: there is no soup, because fewer than two checkpoints "
                f"were evaluated: {', '.join(i.checkpoint.name for i in ranked) or 'none'}."
            )
            return

        def evaluate(folders: Sequence[Path]) -> float:
            self._put_soup(folders)
            return super(AveragingTrainer, self).evaluate(metric_key_prefix=_SOUP)[self._soup_metric]

        if self.args.model_soup == "greedy":
            soup = greedy_choice(ranked, evaluate, greater_is_better=bool(self.args.greater_is_better))
            self._put_soup(soup.used)
        else:
            metric = evaluate([ingredient.checkpoint for ingredient in ranked])
            soup = Soup([dataclasses.replace(i, weight=1 / len(ranked)) for i in ranked], metric)
        if self.args.should_save:
            soup.save(self.run_folder.path, method=str(self.args.model_soup), metric=best_metric(self.args))
        self._say(
            f"{self.args.model_soup} soup of {', '.join(folder.name for folder in soup.used)}: "
            f"{best_metric(self.args)} is {soup.metric:g}, that of the best checkpoint {ranked[0].metric:g}."
        )

    @property
    def _soup_metric(self) -> str:
        return f"{_SOUP}_{best_metric(self.args).removeprefix('eval_')}"

    def _ranked(self) -> list[Ingredient]:
        """The run's checkpoints that were evaluated, best first; of equal ones, the later one first."""
        path, run, name = self.run_folder.path, self.run_folder.run, best_metric(self.args)
        found = distributed.on_main(lambda: own_checkpoints(path, run=run))
        metrics = {log["step"]: log[name] for log in self.state.log_history if name in log}
        sign = -1 if self.args.greater_is_better else 1
        steps = [step for step in found if math.isfinite(metrics.get(step, math.nan))]
        steps.sort(key=lambda step: (sign * metrics[step], -step))
        return [Ingredient(found[step], weight=0.0, metric=metrics[step]) for step in steps]

    def _put_soup(self, checkpoints: Sequence[Path]) -> None:
        """Put the mean of the weights of checkpoints into the policy: theta = sum_i theta_i / k."""
        average: AveragedWeights | None = None
        best = self.state.best_model_checkpoint
        for count, folder in enumerate(checkpoints, start=1):
            self.state.best_model_checkpoint = str(folder)  # which HuggingFace loads
            self._load_best_model()
            if average is None:
                average = AveragedWeights(self.policy)
            else:
                average.mix(1 / count)
        self.state.best_model_checkpoint = best
        if average is not None:
            average.put()
