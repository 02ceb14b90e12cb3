"""Losses of preferences, and the reference model that implicit rewards are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from prefrl.options.fields import Rule, example, opt, plain_value, unset, when
from prefrl.options.params import Params, hyperparameters

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


LabelSmoothing = Annotated[float, Ge(0), Le(0.5)]


@hyperparameters
class PairParams(Params):
    """Hyperparameters that go with every pairwise loss."""

    beta: Annotated[float, Gt(0)] = opt(0.1, "Parameter b of the loss, in 1 / nats.")


@hyperparameters
class SmoothedParams(PairParams):
    """Hyperparameters of the losses that allow for wrong labels."""

    label_smoothing: LabelSmoothing = opt(0.0, "Probability e that a label is wrong.")


@hyperparameters
class ExoParams(SmoothedParams):
    """Hyperparameters of `exo_pair`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.label_smoothing >= 0.5,
            "label_smoothing={label_smoothing}: exo_pair needs it below 0.5: its target distribution is "
            "[1 - label_smoothing, label_smoothing]. The paper's value is 1e-3.",
            example("dpo", loss_type=["exo_pair"], label_smoothing=0.5),
        ),
    )

    @property
    def smoothing(self) -> float:
        """The effective value of `label_smoothing`: the paper's 1e-3 for 0, with which the divergence is infinite."""
        return self.label_smoothing or 1e-3


@hyperparameters
class RobustParams(SmoothedParams):
    """Hyperparameters of `robust`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.label_smoothing == 0.5,
            "label_smoothing=0.5: robust needs it below 0.5, because it divides by 1 - 2 * label_smoothing.",
            example("dpo", loss_type=["robust"], label_smoothing=0.5),
        ),
    )


@hyperparameters
class DiscopopParams(PairParams):
    """Hyperparameters of `discopop`."""

    discopop_tau: Annotated[float, Gt(0)] = opt(
        0.05,
        "Temperature tau of the mixture, 0.05 in the paper. Above 1, the loss grows exponentially for negative "
        "margins.",
    )


@hyperparameters
class SimpoParams(SmoothedParams):
    """Hyperparameters of `simpo`."""

    simpo_gamma: Annotated[float, Ge(0)] = opt(0.5, "Target margin g of rewards.")


@hyperparameters
class AlphaParams(SimpoParams):
    """Hyperparameters of `alphapo`."""

    alpha: float = opt(0.0, "Shape of the reward. At 0 it is that of SimPO.")


@dataclass(frozen=True)
class PairLossFacts:
    """What is known of a pairwise loss without its function, which is in `prefrl.losses.preference`."""

    params: type[PairParams]
    source: str
    uses_log_ratios: bool = False  # uses log-ratios in place of scores, so it allows only the reverse KL divergence
    is_batch_loss: bool = False  # sorts the pairs: needs all pairs of a step at once and allows no pair weights


_AOT = "Melnyk et al. 2024, arXiv 2406.05882, section 3"
_APO = "D'Oosterlinck et al. 2024, arXiv 2408.06266"

PAIR_LOSS_FACTS: dict[str, PairLossFacts] = {
    "sigmoid": PairLossFacts(SmoothedParams, "Rafailov et al. 2023, arXiv 2305.18290, eq. 7"),
    "hinge": PairLossFacts(PairParams, "Zhao et al. 2023, arXiv 2305.10425, section 2"),
    "ipo": PairLossFacts(PairParams, "Azar et al. 2023, arXiv 2310.12036, eq. 17"),
    "exo_pair": PairLossFacts(ExoParams, "Ji et al. 2024, arXiv 2402.00856, eq. 16"),
    "nca_pair": PairLossFacts(PairParams, "Chen et al. 2024, arXiv 2402.05369, section 4.1", uses_log_ratios=True),
    "robust": PairLossFacts(RobustParams, "Chowdhury et al. 2024, arXiv 2403.00409, section 3.1"),
    "bco_pair": PairLossFacts(PairParams, "Jung et al. 2024, arXiv 2404.04656, section 4", uses_log_ratios=True),
    "sppo_hard": PairLossFacts(PairParams, "Wu et al. 2024, arXiv 2405.00675, eq. 4.7", uses_log_ratios=True),
    "aot": PairLossFacts(SmoothedParams, _AOT, uses_log_ratios=True, is_batch_loss=True),
    "aot_unpaired": PairLossFacts(SmoothedParams, _AOT, uses_log_ratios=True, is_batch_loss=True),
    "apo_zero": PairLossFacts(PairParams, f"{_APO}, eq. 7", uses_log_ratios=True),
    "apo_down": PairLossFacts(PairParams, f"{_APO}, eq. 8", uses_log_ratios=True),
    "discopop": PairLossFacts(DiscopopParams, "Lu et al. 2024, arXiv 2406.08414, eq. 5"),
    "sft": PairLossFacts(PairParams, "TRL, DPOConfig.loss_type"),
    "sigmoid_norm": PairLossFacts(PairParams, "Lambert et al. 2024, arXiv 2411.15124, section 5"),
}

CPO_LOSS_FACTS: dict[str, PairLossFacts] = {
    "sigmoid": PairLossFacts(SmoothedParams, "Xu et al. 2024, arXiv 2401.08417, eq. 3"),
    "hinge": PairLossFacts(PairParams, "Zhao et al. 2023, arXiv 2305.10425, section 2"),
    "ipo": PairLossFacts(PairParams, "Azar et al. 2023, arXiv 2310.12036, eq. 17"),
    "simpo": PairLossFacts(SimpoParams, "Meng et al. 2024, arXiv 2405.14734, eq. 6"),
    "alphapo": PairLossFacts(AlphaParams, "Gupta et al. 2025, arXiv 2501.03884, section 3"),
}


@dataclass
class ReferenceOptions:
    """The reference model, which the policy stays close to."""

    beta: Annotated[float, Ge(0)] = opt(
        0.04, "Weight of the KL term. At 0 there is no KL term, and no reference model is loaded."
    )
    sync_ref_model: bool = opt(False, "Move the reference toward the policy during training (TR-DPO).")
    ref_model_mixup_alpha: Annotated[float, Gt(0), Le(1)] = opt(
        0.6,
        "Each update of the reference sets it to alpha * policy + (1 - alpha) * reference.",
        needs=["sync_ref_model"],
    )
    ref_model_sync_steps: Annotated[int, Ge(1)] = opt(
        512, "Optimizer steps between updates of the reference.", needs=["sync_ref_model"]
    )
    reset_optimizer_with_reference: bool = opt(
        False,
        "Also discard the optimizer's moments with each update of the reference. The learning rate goes on as before.",
        needs=["sync_ref_model"],
    )


REFERENCE_RULES = (
    *unset(
        {"reset_optimizer_with_reference": True},
        lambda o: not o.sync_ref_model,
        "sync_ref_model=False. Set sync_ref_model=True.",
        example("grpo"),
    ),
    *unset(
        {"ref_model_mixup_alpha": 0.3, "ref_model_sync_steps": 3},
        lambda o: not o.sync_ref_model,
        "sync_ref_model=False. Set sync_ref_model=True.",
        example("grpo"),
        hint=True,
    ),
    when(
        lambda o: o.sync_ref_model and o.beta == 0,
        "sync_ref_model=True with beta=0.0: there is no reference model to move. Set beta > 0.",
        example("grpo", sync_ref_model=True, beta=0.0),
    ),
    when(
        lambda o: o.reset_optimizer_with_reference and plain_value(o.optim).startswith("schedule_free"),
        "reset_optimizer_with_reference=True with optim={optim!r}: the weights that it trains are part of its state. "
        "Use another optimizer, or leave it False.",
        example("grpo", optim="schedule_free_adamw", sync_ref_model=True, reset_optimizer_with_reference=True),
    ),
)
PRECOMPUTED_REFERENCE_RULES = (
    *unset(
        {"precompute_ref_batch_size": 3},
        lambda o: not o.precompute_ref_log_probs,
        "precompute_ref_log_probs=False. Set precompute_ref_log_probs=True.",
        example("dpo"),
        hint=True,
    ),
    when(
        lambda o: o.precompute_ref_log_probs and o.sync_ref_model,
        "precompute_ref_log_probs=True with sync_ref_model=True: values computed before training cannot follow a "
        "reference that moves. Set one of them to False.",
        example("dpo", precompute_ref_log_probs=True, sync_ref_model=True),
    ),
)
