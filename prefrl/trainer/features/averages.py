"""Averages of weights: over the steps of a run, and of its best checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.models.soup_choice import Ingredient, Soup, greedy_choice
from prefrl.run.checkpoints import own_checkpoints
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.evaluation import best_metric
from prefrl.trainer.parts import Part, Run

_log = logging.getLogger(__name__)

_EMA = "ema"  # the folder of the moving average, and its name in the logs
_FILE = "ema.safetensors"
_COUNT = "num_updates"
_SOUP = "eval_soup"  # the name of evaluations of soups


class AveragedWeights:
    """An average of a model's trained weights, in float32, partitioned as they are. ZeRO-3 is not supported.

    With an adapter, its matrices are averaged themselves, not the products of two of them. Of DDP and ZeRO-2, each
    process keeps all of it, of FSDP2 its part.

    Args:
        model: Without a backend's wrappers. The average begins with its weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.is_in_place = False  # whether the model has the averaged weights for a while
        self._weights = {name: p.detach().to(torch.float32, copy=True) for name, p in self._trained()}

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        distributed.release(self._model)
        return ((name, p) for name, p in self._model.named_parameters() if p.requires_grad)

    def mix(self, alpha: float) -> None:
        """Set average = alpha * weights of the model + (1 - alpha) * average."""
        with torch.no_grad():
            for name, parameter in self._trained():
                distributed.mix(self._weights[name], parameter, alpha)

    def put(self) -> None:
        """Copy the average into the model, in the model's dtype."""
        for name, parameter in self._trained():
            distributed.assign(parameter, self._weights[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model has the averaged weights."""
        before = {name: p.detach().clone() for name, p in self._trained()}
        self.put()
        self.is_in_place = True
        try:
            yield
        finally:
            self.is_in_place = False
            for name, parameter in self._trained():
                distributed.assign(parameter, before[name])

    def state(self, *, keep: bool) -> dict[str, Tensor]:
        """Whole copies on the host. All processes must call it; those without `keep` get {}."""
        return distributed.whole_on_host(self._weights, keep=keep)

    def load(self, read: Callable[[str], Tensor]) -> None:
        """Read what `state` returned, one tensor at a time. All processes must call it with the same tensors."""
        for name, weight in self._weights.items():
            distributed.load_whole(weight, read(name))


def moving_average(run: Run) -> MovingAverage | None:
    """The moving average that the options ask for.

    Raises:
        ConfigError: The backend's weights cannot be averaged, or a dataset has a name that is taken.
    """
    decay = run.args.ema_decay
    if decay is None:
        return None
    distributed.check_weights_stay(run.accelerator, f"ema_decay={decay!r}")
    if isinstance(run.eval_dataset, Mapping) and _EMA in run.eval_dataset:
        raise ConfigError(
            f"ema_decay={decay} with an eval_dataset named 'ema': both would be logged as "
            "eval_ema_... Give it another name, or leave ema_decay None."
        )
    return MovingAverage(decay)


class MovingAverage(Part):
    """ema = d_t * ema + (1 - d_t) * weights after each optimizer step, with d_t = min(decay, (1 + t) / (10 + t)).

    t counts the steps; it makes the average follow the weights while it is young. Steps that are left out do not
    count. A checkpoint holds the average in float32.

    Args:
        decay: The largest d_t.

    Source: Polyak and Juditsky 1992; the warm-up is that of TensorFlow's ExponentialMovingAverage.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self.average: AveragedWeights | None = None

    def checkpoint_bytes(self, run: Run) -> int:
        """See `Part`."""
        trained = sum(distributed.shape_of(p).numel() for p in run.model.parameters() if p.requires_grad)
        return 0 if run.args.save_only_model else 4 * trained

    def begin(self, run: Run) -> None:
        """Starts with the weights before the first step."""
        if run.state.global_step == 0:
            self._begin(run.policy)

    def _begin(self, model: nn.Module) -> None:
        self.num_updates, self.average = 0, AveragedWeights(model)

    def after_step(self, run: Run) -> None:
        """Takes the weights after a step into the average."""
        assert self.average is not None
        if run.optimizer.step_was_skipped:
            return
        self.num_updates += 1
        self.average.mix(1.0 - min(self.decay, (1 + self.num_updates) / (10 + self.num_updates)))

    def other_weights(self, run: Run) -> Sequence[tuple[str, AbstractContextManager[None]]]:
        """The average, once training has begun."""
        return [] if self.average is None else [(_EMA, self.average.in_place())]

    def has_replaced_weights(self, run: Run) -> bool:
        """See `Part`."""
        return self.average is not None and self.average.is_in_place

    def save(self, run: Run, folder: Path) -> None:
        """Write the average into a checkpoint."""
        assert self.average is not None
        state = self.average.state(keep=run.args.should_save)
        if run.args.should_save:
            tensors = {name: tensor.contiguous() for name, tensor in state.items()}
            save_file(tensors, folder / _FILE, metadata={_COUNT: str(self.num_updates)})

    def load(self, run: Run, folder: Path) -> None:
        """Read what `save` wrote, or begin with the model's weights, if a resumed run begins to average."""
        self._begin(run.policy)
        assert self.average is not None
        if not (folder / _FILE).exists():
            if distributed.is_main():
                _log.warning("%s has no %s: the average of the weights starts with its weights.", folder, _FILE)
            return
        with safe_open(folder / _FILE, framework="pt") as file:
            self.num_updates = int(file.metadata()[_COUNT])
            self.average.load(file.get_tensor)


def soup_of_checkpoints(run: Run) -> SoupOfCheckpoints | None:
    """What averages the best checkpoints at the end, if the options say so.

    Raises:
        ConfigError: The backend's weights cannot be averaged.
    """
    method = run.args.model_soup
    if method is None:
        return None
    distributed.check_weights_stay(run.accelerator, f"model_soup={method!r}")
    return SoupOfCheckpoints(run.args)


class SoupOfCheckpoints(Part):
    """Goes on with the average of the best checkpoints, and records in `soup.json` what it is made of."""

    def __init__(self, args: BaseConfig) -> None:
        self._method, self._most = str(args.model_soup), args.soup_params.top_k
        self._greater_is_better = bool(args.greater_is_better)
        self._metric = best_metric(args)

    def finished(self, run: Run) -> None:
        """See `Part`."""
        run.run_folder.wait()
        ranked = self._ranked(run)[: self._most]
        if len(ranked) < 2:
            _say(
                f"model_soup={self._method!r}: there is no soup, because fewer than two checkpoints "
                f"were evaluated: {', '.join(i.checkpoint.name for i in ranked) or 'none'}."
            )
            return

        def evaluate(folders: Sequence[Path]) -> float:
            _put_soup(run, folders)
            return run.evaluate_policy(None, None, _SOUP)[f"{_SOUP}_{self._metric.removeprefix('eval_')}"]

        if self._method == "greedy":
            soup = greedy_choice(ranked, evaluate, greater_is_better=self._greater_is_better)
            _put_soup(run, soup.used)
        else:
            metric = evaluate([ingredient.checkpoint for ingredient in ranked])
            soup = Soup([dataclasses.replace(i, weight=1 / len(ranked)) for i in ranked], metric)
        if run.args.should_save:
            soup.save(run.run_folder.path, method=self._method, metric=self._metric)
        _say(
            f"{self._method} soup of {', '.join(folder.name for folder in soup.used)}: "
            f"{self._metric} is {soup.metric:g}, that of the best checkpoint {ranked[0].metric:g}."
        )

    def _ranked(self, run: Run) -> list[Ingredient]:
        """The run's checkpoints that were evaluated, best first; of equal ones, the later one first."""
        place, name = run.run_folder, self._metric
        found = distributed.on_main(lambda: own_checkpoints(place.path, run=place.run))
        metrics = {log["step"]: log[name] for log in run.state.log_history if name in log}
        sign = -1 if self._greater_is_better else 1
        steps = [step for step in found if math.isfinite(metrics.get(step, math.nan))]
        steps.sort(key=lambda step: (sign * metrics[step], -step))
        return [Ingredient(found[step], weight=0.0, metric=metrics[step]) for step in steps]


def _put_soup(run: Run, checkpoints: Sequence[Path]) -> None:
    """Put the mean of the weights of checkpoints into the policy: theta = sum_i theta_i / k."""
    average: AveragedWeights | None = None
    for count, folder in enumerate(checkpoints, start=1):
        run.load_weights(folder)
        if average is None:
            average = AveragedWeights(run.policy)
        else:
            average.mix(1 / count)
    if average is not None:
        average.put()


def _say(text: str) -> None:
    if distributed.is_main():
        _log.warning("%s", text)
