"""A learning rate that is reduced when a metric stops improving: shows the scheduler what is logged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefrl.errors import ConfigError
from prefrl.options.names import current_metric
from prefrl.trainer.parts import Part, Run
from prefrl.trainer.scheduler import RatePlateau, Scheduler, refresh

if TYPE_CHECKING:
    from transformers import TrainerState

    from prefrl.trainer.base_config import BaseConfig

_log = logging.getLogger(__name__)


def plateau_watch(args: BaseConfig) -> WatchPlateau | None:
    """What watches the metric that `reduce_on_plateau_kwargs` names, if the options say so."""
    return WatchPlateau(current_metric(args.plateau_params.metric)) if args.reduces_on_plateau else None


class WatchPlateau(Part):
    """Shows the plateau of the scheduler the metric that it waits for.

    Evaluations before the first step do not count: a run that is resumed may make one more of them.
    """

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self._has_stepped = False
        self._was_seen = False
        self._was_evaluated = False

    def begin(self, run: Run) -> None:
        """See `Part`."""
        self._has_stepped = self._was_seen = self._was_evaluated = False

    def after_step(self, run: Run) -> None:
        """See `Part`."""
        self._has_stepped = True

    def logged(self, run: Run, logs: dict[str, float]) -> None:
        """See `Part`.

        Raises:
            ConfigError: Steps or an evaluation have passed, but there is no such metric.
        """
        scheduler = run.lr_scheduler
        if not self._has_stepped or not isinstance(scheduler, Scheduler) or scheduler.plateau is None:
            return
        if self.metric in logs:
            self._was_seen = True
            self._show(logs[self.metric], scheduler, scheduler.plateau, run.state)
        elif "loss" in logs:
            self._check_seen(logs)
        else:
            self._was_evaluated = self._was_evaluated or any(name.startswith("eval_") for name in logs)

    def _show(self, value: float, scheduler: Scheduler, plateau: RatePlateau, state: TrainerState) -> None:
        if not plateau.observe(value):
            return
        refresh(scheduler)
        if state.is_world_process_zero:
            _log.warning(
                "step %d: %s does not improve; the learning rate is reduced, %d of reduce_on_plateau=%d times.",
                *(state.global_step, self.metric, plateau.num_reductions, plateau.most),
            )

    def _check_seen(self, logs: Mapping[str, float]) -> None:
        if not self._was_seen and (self._was_evaluated or not self.metric.startswith("eval_")):
            raise ConfigError(
                f"reduce_on_plateau_kwargs: metric={self.metric!r} is not among the metrics that are logged. "
                f"Choose one that is; of training there are {', '.join(sorted(logs))}."
            )
