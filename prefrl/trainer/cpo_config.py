"""Options of CPO, SimPO and AlphaPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.losses.preference.reference_free import CPO_LOSSES
from prefrl.options.fields import check_no_effect, opt
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["CPOConfig"]


@dataclass
class CPOConfig(OfflineConfig):
    """Options of `CPOTrainer`."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"] = opt(
        "sigmoid", "sigmoid: CPO. simpo: length-normalized with a target margin; for pure SimPO set cpo_alpha=0."
    )
    beta: Annotated[float, Gt(0)] = opt(0.1, "Implicit rewards are beta * log policy.")
    label_smoothing: Annotated[float, Ge(0), Le(0.5)] = opt(0.0, "Probability that a label is wrong.")
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
        read = CPO_LOSSES[self.loss_type].hyperparameters
        for name, unset in (("label_smoothing", 0.0), ("simpo_gamma", 0.5), ("alpha", 0.0)):
            if name not in read:
                check_no_effect(
                    name=name,
                    value=getattr(self, name),
                    unset=unset,
                    because=f"loss_type={self.loss_type!r} does not read it",
                    remedy=f"Leave it {unset}.",
                )
        if self.loss_type == "alphapo" and self.alpha == 0:
            raise ConfigError("alpha=0.0 with loss_type='alphapo': that is SimPO. Set alpha, or loss_type='simpo'.")
