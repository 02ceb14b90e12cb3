"""Options of DPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from prefrl.losses.preference.pairwise import PAIR_LOSSES, PairLoss
from prefrl.options.fields import opt
from prefrl.options.offline_rules import DIVERGENCE_RULES, PAIR_LOSS_RULES, check_loss_options
from prefrl.options.preference import Divergence, LabelSmoothing
from prefrl.options.rules import apply
from prefrl.trainer.base.options.reference import PRECOMPUTED_REFERENCE_RULES, REFERENCE_RULES, OfflineReferenceOptions
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["DPOConfig"]


@dataclass
class DPOConfig(OfflineReferenceOptions, OfflineConfig):
    """Options of `DPOTrainer`."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    loss_type: list[str] = opt(["sigmoid"], f"One or several of: {', '.join(PAIR_LOSSES)}.")
    loss_weights: list[float] | None = opt(None, "Weights of the losses in loss_type, in order; None: 1 each.")
    label_smoothing: LabelSmoothing = opt(
        0.0,
        "Probability that a label is wrong; used by sigmoid (cDPO), robust, aot, aot_unpaired and "
        "exo_pair, which uses its paper's 1e-3 instead of 0.",
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

    @property
    def pair_losses(self) -> Mapping[str, PairLoss[Any]]:
        """The losses that there are to choose from."""
        return PAIR_LOSSES

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        apply(self, REFERENCE_RULES, PRECOMPUTED_REFERENCE_RULES, PAIR_LOSS_RULES)
        check_loss_options(self, PAIR_LOSSES, self.loss_type)
        apply(self, DIVERGENCE_RULES)
