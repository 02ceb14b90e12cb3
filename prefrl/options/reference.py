"""Options of the reference model and of the KL term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from prefrl.options.fields import opt
from prefrl.options.rules import example, unset, when

__all__ = ["PRECOMPUTED_REFERENCE_RULES", "REFERENCE_RULES", "ReferenceOptions"]


@dataclass
class ReferenceOptions:
    """The reference model, which the policy stays close to."""

    beta: Annotated[float, Ge(0)] = opt(0.04, "Weight of the KL term; 0: no KL term and no reference model.")
    sync_ref_model: bool = opt(False, "Move the reference toward the policy during training (TR-DPO).")
    ref_model_mixup_alpha: Annotated[float, Gt(0), Le(1)] = opt(
        0.6,
        "Each update of the reference sets it to alpha * policy + (1 - alpha) * reference.",
        needs=["sync_ref_model"],
    )
    ref_model_sync_steps: Annotated[int, Ge(1)] = opt(
        512, "Optimizer steps between updates of the reference.", needs=["sync_ref_model"]
    )


REFERENCE_RULES = (
    *unset(
        {"ref_model_mixup_alpha": 0.3, "ref_model_sync_steps": 3},
        lambda o: not o.sync_ref_model,
        "sync_ref_model=False. Set sync_ref_model=True.",
        example("grpo"),
    ),
    when(
        lambda o: o.sync_ref_model and o.beta == 0,
        "sync_ref_model=True with beta=0.0: there is no reference model to move. Set beta > 0.",
        example("grpo", sync_ref_model=True, beta=0.0),
    ),
)
PRECOMPUTED_REFERENCE_RULES = (
    *unset(
        {"precompute_ref_batch_size": 3},
        lambda o: not o.precompute_ref_log_probs,
        "precompute_ref_log_probs=False. Set precompute_ref_log_probs=True.",
        example("dpo"),
    ),
    when(
        lambda o: o.precompute_ref_log_probs and o.sync_ref_model,
        "precompute_ref_log_probs=True with sync_ref_model=True: values computed before training cannot follow a "
        "reference that moves. Set one of them to False.",
        example("dpo", precompute_ref_log_probs=True, sync_ref_model=True),
    ),
)
