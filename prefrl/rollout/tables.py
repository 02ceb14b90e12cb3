"""Sends tables to those trackers in `report_to` that have tables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prefrl.printable import reason_of

__all__ = ["Tables"]

_log = logging.getLogger(__name__)


class Tables:
    """Logs tables to Weights & Biases, Trackio, MLflow and Comet, whichever of them a run reports to.

    Args:
        trackers: Names as in `report_to`. HuggingFace has imported these packages and begun their runs.
    """

    def __init__(self, trackers: Iterable[str]) -> None:
        self._trackers = [tracker for tracker in trackers if tracker in _SENDERS]

    def send(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int) -> None:
        """Send a table. A tracker that fails is left out from then on, with one warning.

        Args:
            name: Of the table.
            columns: Names of the columns.
            rows: A value for each column.
            step: The optimizer step of the table, part of the name where a tracker keeps one table for each name.
        """
        for tracker in tuple(self._trackers):
            try:
                _SENDERS[tracker](sys.modules[tracker], name, list(columns), [list(row) for row in rows], step)
            except Exception as error:  # it must not end the training
                self._trackers.remove(tracker)
                _log.warning("%s gets no further tables, because it failed: %s", tracker, reason_of(error))


def _to_wandb(wandb: Any, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    wandb.log({name: wandb.Table(columns=columns, data=rows)})


def _to_trackio(trackio: Any, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    import pandas  # which Trackio needs

    trackio.log({name: trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))}, step=step)


def _to_mlflow(mlflow: Any, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    data = {column: [row[i] for row in rows] for i, column in enumerate(columns)}
    mlflow.log_table(data, artifact_file=f"{name}_{step:05d}.json")


def _to_comet(comet: Any, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    comet.get_running_experiment().log_table(f"{name}.csv", tabular_data=rows, headers=columns)


_SENDERS: dict[str, Callable[[Any, str, list[str], list[list[Any]], int], None]] = {
    "wandb": _to_wandb,
    "trackio": _to_trackio,
    "mlflow": _to_mlflow,
    "comet_ml": _to_comet,
}
