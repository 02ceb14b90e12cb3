"""Options that say when evaluations take place and when checkpoints are saved, and what is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt

from prefrl.options.fields import opt, plain_value
from prefrl.options.rules import Example, Rule, example, unset, when

__all__ = ["EVALUATION_RULES", "EvaluationOptions"]

_Epochs = Annotated[float, Gt(0)]


@dataclass
class EvaluationOptions:
    """Intervals of evaluations and checkpoints in epochs, and the rows that are evaluated."""

    changeable: ClassVar[tuple[str, ...]] = (
        *("eval_epochs", "save_epochs", "max_eval_samples", "evaluate_training_set"),
    )

    eval_epochs: _Epochs = opt(
        1.0,
        "With eval_strategy='epoch': epochs between evaluations; 0.25 means four per epoch, 2 means one every two "
        "epochs.",
    )
    save_epochs: _Epochs = opt(
        1.0, "With save_strategy='epoch': epochs between checkpoints; 0.25 means four per epoch."
    )
    max_eval_samples: Annotated[int, Ge(1)] | None = opt(
        None, "Evaluate only this many rows of a dataset, from its start; None: all of them."
    )
    evaluate_training_set: bool = opt(
        False, "Evaluate the training dataset, too, in the same way; its metrics are named eval_train_..."
    )


def _interval(what: str, example: Example) -> tuple[Rule, ...]:
    return unset(
        {f"{what}_epochs": 2.0},
        lambda o: plain_value(getattr(o, f"{what}_strategy")) != "epoch",
        f"{what}_strategy={{{what}_strategy!r}}. Set {what}_strategy='epoch'.",
        example,
    )


def _lacks_evaluations(o: Any) -> bool:
    ratio = o.save_epochs / o.eval_epochs
    return bool(o.load_best_model_at_end) and o.save_strategy == "epoch" and abs(ratio - round(ratio)) > 1e-6


EVALUATION_RULES = (
    *_interval("eval", example("sft")),
    *_interval("save", example("sft")),
    when(
        _lacks_evaluations,
        "load_best_model_at_end=True with save_epochs={save_epochs} and eval_epochs={eval_epochs}: each checkpoint "
        "needs an evaluation. Make save_epochs a multiple of eval_epochs.",
        example("sft", load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch", save_epochs=1.5),
    ),
)
