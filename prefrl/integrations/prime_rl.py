"""prefrl's policy losses as a custom loss of prime-rl, which imports `policy_loss` by its path.

    [trainer.loss]
    type = "custom"
    import_path = "prefrl.integrations.prime_rl.policy_loss"

    [trainer.loss.kwargs]
    loss_type = "dapo"
    epsilon_high = 0.28

prime-rl hands over the tokens of packed sequences end to end and divides the sum by the number of tokens of the step,
so that only losses of `of_tokens.LOSSES` are possible. The ratio is that of the trained policy to the one that
sampled. It has no hook for advantages or for a selection of rollouts: those are its own `algo.type`.
"""

from __future__ import annotations

from typing import Any

from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

from prefrl.errors import ConfigError
from prefrl.integrations.of_tokens import check_loss, token_losses
from prefrl.losses.kl import KL_ESTIMATORS
from prefrl.losses.tensors import kl


def policy_loss(
    inputs: LossInputs, *, loss_type: str = "dapo", beta: float = 0.0, kl_estimator: str = "k3", **hyperparameters: Any
) -> LossOutputs:
    """The sum of the loss over the tokens of a micro-batch.

    Args:
        inputs: What prime-rl knows of them.
        loss_type: One of `of_tokens.LOSSES`.
        beta: Weight of KL(policy || reference), for which the algorithm has to ship reference log-probs.
        kl_estimator: A name in `KL_ESTIMATORS`.
        **hyperparameters: Of the loss.

    Raises:
        ConfigError: prime-rl cannot compute the loss or the KL term, or there is no such hyperparameter.
    """
    check_loss("prime-rl", loss_type, hyperparameters)
    flat = inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages
    rows, found = token_losses(loss_type, inputs.loss_mask, *flat, hyperparameters)
    losses, stats = found.loss, dict(found.stats)
    if beta:
        if kl_estimator not in KL_ESTIMATORS:
            raise ConfigError(f"kl_estimator={kl_estimator!r} with prime-rl: allowed are {', '.join(KL_ESTIMATORS)}.")
        if inputs.ref_logprobs is None:
            raise ConfigError(
                f"beta={beta}: this algorithm of prime-rl ships no reference log-probs. Set beta=0, or use its ref_kl "
                "component."
            )
        stats["kl"] = kl(kl_estimator, rows, inputs.trainer_logprobs, inputs.ref_logprobs)
        losses = losses + beta * stats["kl"]
    if inputs.loss_weights is not None:
        losses = losses * inputs.loss_weights
    count = inputs.loss_mask.sum().clamp(min=1)
    return LossOutputs(
        loss=losses.sum(), metrics={name: values.detach().sum() / count for name, values in stats.items()}
    )
