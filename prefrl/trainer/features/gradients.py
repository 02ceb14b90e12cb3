"""Changes of a step's gradients: penalties on the weights, and clipping by value."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prefrl import distributed
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.parts import Part, Run


def penalty(args: BaseConfig) -> Penalty | None:
    """The penalty that the options ask for."""
    kind = args.regularization_type
    return None if kind is None else Penalty(kind, args.regularization_lambda)


class Penalty(Part):
    """Adds the gradient of `regularization_type` to the gradients of a step: c sign(w), 2 c w, or both.

    Args:
        kind: "l1", "l2" or both of them.
        weight: c.
    """

    def __init__(self, kind: str, weight: float) -> None:
        self.kind, self.weight = kind, weight

    @torch.no_grad()
    def gradients(self, run: Run, model: nn.Module) -> None:
        """See `Part`; what accelerate divides later, because of float16, is multiplied here."""
        weight = self.weight * distributed.loss_scale(run.accelerator)
        for parameter in run.penalized(model):
            if parameter.grad is None:
                continue
            if self.kind != "l2":
                parameter.grad.add_(parameter.sign(), alpha=weight)
            if self.kind != "l1":
                parameter.grad.add_(parameter, alpha=2.0 * weight)


def clip_by_value(args: BaseConfig) -> ClipByValue | None:
    """The limit of gradients that the options ask for."""
    return None if args.max_grad_value is None else ClipByValue(args.max_grad_value)


class ClipByValue(Part):
    """Limits each gradient to [-limit, limit], after the norm of all of them was limited."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def before_update(self, run: Run, model: nn.Module, norm: Tensor | float | None) -> None:
        """See `Part`."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-self.limit, self.limit)
