"""Options that say when evaluations take place and when checkpoints are saved, and what is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt

from prefrl.errors import ConfigError
from prefrl.options.fields import check_unset, opt, plain_value

__all__ = ["EvaluationOptions", "check_evaluation"]

_Epochs = Annotated[float, Gt(0)]


@dataclass
class EvaluationOptions:
    """Intervals of evaluations and checkpoints in epochs, and the rows that are evaluated."""

    eval_epochs: _Epochs = opt(
        1.0,
        "With eval_strategy='epoch': epochs between evaluations; 0.25 means four per epoch, 2 means one every two "
        "epochs.",
        decides=False,
    )
    save_epochs: _Epochs = opt(
        1.0,
        "With save_strategy='epoch': epochs between checkpoints; 0.25 means four per epoch.",
        decides=False,
    )
    max_eval_samples: Annotated[int, Ge(1)] | None = opt(
        None,
        "Evaluate only this many rows of a dataset, from its start; None: all of them.",
        decides=False,
    )
    evaluate_training_set: bool = opt(
        False,
        "Evaluate the training dataset, too, in the same way; its metrics are named eval_train_...",
        decides=False,
    )


def check_evaluation(config: Any) -> None:
    """Reject intervals of epochs that have no effect, or that leave the best model without a checkpoint.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    for what in ("eval", "save"):
        strategy = plain_value(getattr(config, f"{what}_strategy"))
        if strategy != "epoch":
            because = f"{what}_strategy={strategy!r}"
            check_unset(config, f"{what}_epochs", because=because, remedy=f"Set {what}_strategy='epoch'.")
    ratio = config.save_epochs / config.eval_epochs
    if config.load_best_model_at_end and config.save_strategy == "epoch" and abs(ratio - round(ratio)) > 1e-6:
        raise ConfigError(
            f"load_best_model_at_end=True with save_epochs={config.save_epochs} and eval_epochs={config.eval_epochs}: "
            "each checkpoint needs an evaluation. Make save_epochs a multiple of eval_epochs."
        )
