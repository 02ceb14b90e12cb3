"""A reference model that moves toward the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefrl import distributed
from prefrl.trainer.parts import Part, Run

if TYPE_CHECKING:
    from prefrl.models.reference import Reference

__all__ = ["MovingReference"]


class MovingReference(Part):
    """reference = alpha * policy + (1 - alpha) * reference, every `steps` optimizer steps.

    Source: Gorbatovski et al. 2024 (TR-DPO), arXiv 2404.09656, eq. 2.
    """

    def __init__(self, reference: Reference, *, alpha: float, steps: int) -> None:
        self.reference = reference
        self.alpha = alpha
        self.steps = steps

    def after_step(self, run: Run) -> None:
        """Mix the policy into the reference, if it is due."""
        if run.state.global_step % self.steps == 0:
            self.reference.mix(distributed.unwrap(run.model), self.alpha)
