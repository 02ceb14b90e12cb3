"""Options of CPO, SimPO and AlphaPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from prefrl.losses.preference.reference_free import CPO_LOSSES
from prefrl.options.fields import opt
from prefrl.options.offline_rules import SHAPE_RULES, check_loss_options
from prefrl.options.preference import LabelSmoothing
from prefrl.options.rules import apply
from prefrl.trainer.offline.config import OfflineConfig, SampleOptions

__all__ = ["CPOConfig"]


@dataclass
class CPOConfig(SampleOptions, OfflineConfig):
    """Options of `CPOTrainer`."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"] = opt(
        "sigmoid", "sigmoid: CPO. simpo: length-normalized with a target margin; for pure SimPO set cpo_alpha=0."
    )
    beta: Annotated[float, Gt(0)] = opt(0.1, "Implicit rewards are beta * log policy.")
    label_smoothing: LabelSmoothing = opt(0.0, "Probability that a label is wrong.")
    cpo_alpha: Annotated[float, Ge(0)] | None = opt(
        None, "Weight of the NLL of the chosen responses; None: 1, but 0 for alphapo."
    )
    simpo_gamma: Annotated[float, Ge(0)] = opt(0.5, "Target reward margin of simpo and alphapo.")
    alpha: float = opt(0.0, "Shape of AlphaPO's reward (1 - p^-alpha) / alpha; 0: log p, as in SimPO.")

    @property
    def nll_weight(self) -> float:
        """The effective value of `cpo_alpha`."""
        if self.cpo_alpha is None:
            return 0.0 if self.loss_type == "alphapo" else 1.0
        return self.cpo_alpha

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        check_loss_options(self, CPO_LOSSES, [self.loss_type])
        apply(self, SHAPE_RULES)
