"""Options of DPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.losses.preference.pairwise import PAIR_LOSSES, Divergence, LabelSmoothing
from prefrl.options.fields import check_no_effect, opt
from prefrl.trainer.base.reference_options import OfflineReferenceOptions
from prefrl.trainer.offline.config import OfflineConfig
from prefrl.trainer.offline.loss_options import check_loss_options

__all__ = ["DPOConfig"]


@dataclass
class DPOConfig(OfflineReferenceOptions, OfflineConfig):
    """Options of `DPOTrainer`."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    loss_type: list[str] = opt(["sigmoid"], f"One or several of: {', '.join(PAIR_LOSSES)}.")
    loss_weights: list[float] | None = opt(None, "Weights of the losses in loss_type, in order; None: 1 each.")
    label_smoothing: LabelSmoothing = opt(
        0.0, "Probability that a label is wrong; used by sigmoid (cDPO), robust, aot, aot_unpaired and exo_pair."
    )
    discopop_tau: Annotated[float, Gt(0)] = opt(0.05, "discopop: temperature of the mixture.")
    f_divergence_type: Divergence = opt(
        "reverse_kl", "Divergence that regularizes the policy toward the reference (f-DPO, arXiv 2309.16240)."
    )
    f_alpha_divergence_coef: float = opt(0.5, "alpha_divergence: its alpha.")
    ld_alpha: Annotated[float, Ge(0), Le(1)] | None = opt(
        None, "Weight of tokens beyond the length of the pair's shorter response (LD-DPO, arXiv 2409.06411); None: 1."
    )
    use_weighting: bool = opt(
        False, "Weight each pair by the probability of its responses under the policy (WPO, arXiv 2406.11827)."
    )
    rpo_alpha: Annotated[float, Gt(0)] | None = opt(
        None, "Weight of the length-normalized NLL of the chosen response (RPO, arXiv 2404.19733); None: term off."
    )

    @property
    def weighted_losses(self) -> list[tuple[str, float]]:
        """The names of the losses with their weights."""
        return list(zip(self.loss_type, self.loss_weights or [1.0] * len(self.loss_type), strict=True))

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        super().validate()
        self.validate_reference()
        self._validate_losses()
        check_loss_options(self, PAIR_LOSSES, self.loss_type)
        if self.f_divergence_type != "alpha_divergence":
            check_no_effect(
                name="f_alpha_divergence_coef",
                value=self.f_alpha_divergence_coef,
                unset=0.5,
                because=f"f_divergence_type={self.f_divergence_type!r}",
                remedy="Set f_divergence_type='alpha_divergence'.",
            )

    def _validate_losses(self) -> None:
        unknown = [name for name in self.loss_type if name not in PAIR_LOSSES]
        if unknown or not self.loss_type:
            raise ConfigError(f"loss_type={self.loss_type}: must be one or several of {', '.join(PAIR_LOSSES)}")
        if len(set(self.loss_type)) < len(self.loss_type):
            raise ConfigError(f"loss_type={self.loss_type}: list each loss once, and weight it with loss_weights")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ConfigError(
                f"loss_weights={self.loss_weights}: must have one number for each of loss_type={self.loss_type}"
            )
        raw = [name for name in self.loss_type if PAIR_LOSSES[name].uses_log_ratios]
        if raw and self.f_divergence_type != "reverse_kl":
            raise ConfigError(
                f"f_divergence_type={self.f_divergence_type!r} with loss_type={raw}: these losses use the "
                "log-ratios themselves. Use reverse_kl, or another loss."
            )
        sorting = [name for name in self.loss_type if PAIR_LOSSES[name].is_batch_loss]
        if sorting and self.use_weighting:
            raise ConfigError(
                f"use_weighting=True with loss_type={sorting}: its values belong to positions in the sorted "
                "batch, not to pairs. Set use_weighting=False."
            )
