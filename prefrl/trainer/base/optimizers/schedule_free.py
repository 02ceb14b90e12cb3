"""Schedule-free optimizers, which train one set of weights and average them into another.

The average is what is evaluated, saved and used. The methods `train` and `eval` of such an optimizer put one set or
the other into the model.

Source: Defazio et al. 2024, arXiv 2405.15682
"""

from __future__ import annotations

from typing import Any

__all__ = ["averages_weights", "use_averaged_weights", "use_trained_weights"]


def averages_weights(optimizer: Any) -> bool:
    """Whether an optimizer, or the one that accelerate wrapped, has two sets of weights."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return callable(getattr(inner, "train", None)) and callable(getattr(inner, "eval", None))


def use_averaged_weights(optimizer: Any) -> None:
    """Put the averaged weights into the model, if the optimizer has two sets."""
    if averages_weights(optimizer):
        optimizer.eval()


def use_trained_weights(optimizer: Any) -> None:
    """Put the weights that are trained into the model, if the optimizer has two sets."""
    if averages_weights(optimizer):
        optimizer.train()
