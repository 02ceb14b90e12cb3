"""prefrl's policy losses as loss functions of NeMo-RL, which takes one as an argument of `grpo_train`.

In a launch script like its examples/run_grpo.py, after `setup(...)`:

    loss_fn = PolicyLoss(**config.loss_fn.prefrl)

where the section `loss_fn` of the config, which takes further keys, has ours:

    loss_fn:
      reference_policy_kl_penalty: 0.001  # NeMo-RL then computes the log-probs of the reference
      prefrl: {loss_type: cispo, epsilon_high: 4.0, beta: 0.001}

Left out: `clip_cov` and `kl_cov`, which select among the tokens of a whole generation batch; advantages, for which
NeMo-RL has names of its own and no hook; sampling from a truncated distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType
from torch import Tensor

from prefrl.errors import ConfigError
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.tensors import TokenRows, kl, loss_params, policy_loss, reduction_of, sampling_weights, summed
from prefrl.options.policy import ImportanceLevel

LOSSES = tuple(name for name, row in POLICY_LOSSES.items() if row.selection is None)


class PolicyLoss:
    """A policy loss plus beta * KL(policy || reference).

    Args:
        loss_type: One of `LOSSES`.
        level: Level of the ratio.
        beta: Weight of the KL term. NeMo-RL's `reference_policy_kl_penalty` needs to be above 0, too: it decides
            whether there are log-probs of the reference.
        kl_kwargs: `estimator`, and hyperparameters of the KL term; see `losses.tensors.kl`.
        sampling: `mode`, `low` and `high` of `losses.tensors.sampling_weights`, which multiply the losses of tokens;
            None: samples of the generator are treated as those of the trainer.
        max_completion_length: Of `dr_grpo`, which divides by it.
        **hyperparameters: Of the loss.

    Raises:
        ConfigError: NeMo-RL cannot compute the loss, or an option is not known or has no effect.
    """

    input_type = LossInputType.LOGPROB

    def __init__(
        self,
        loss_type: str = "dapo",
        *,
        level: ImportanceLevel = "token",
        beta: float = 0.0,
        kl_kwargs: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        max_completion_length: int | None = None,
        **hyperparameters: Any,
    ) -> None:
        loss_params(loss_type, level, hyperparameters)
        if loss_type not in LOSSES:
            raise ConfigError(
                f"loss_type={loss_type!r} with NeMo-RL: it selects tokens of a whole generation batch, but losses see "
                f"a micro-batch. Use one of {', '.join(LOSSES)}."
            )
        self.reduction = reduction_of(loss_type)
        if (self.reduction == "constant") != (max_completion_length is not None):
            raise ConfigError(
                f"max_completion_length={max_completion_length}: loss_type='dr_grpo' divides by it, and others do not."
            )
        if kl_kwargs and not beta:
            raise ConfigError(f"kl_kwargs={dict(kl_kwargs)!r} has no effect with beta={beta}. Set beta > 0.")
        self.policy_loss = {"loss_type": loss_type, "level": level, **hyperparameters}
        self.kl = {"estimator": "k3", **(kl_kwargs or {})}
        self.reference_policy_kl_penalty = beta
        self.sampling, self.length = sampling, max_completion_length
        self.loss_type = LossType.TOKEN_LEVEL if self.reduction == "token" else LossType.SEQUENCE_LEVEL

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of a micro-batch divided by the tokens or sequences of the step, and its metrics.

        Args:
            next_token_logprobs: [B, S - 1] nats, of the tokens from the second on.
            data: NeMo-RL's batch, each tensor [B, S], and `sample_mask` [B].
            global_valid_seqs: Sequences of the step that have a loss.
            global_valid_toks: Tokens of the step that have a loss.

        Raises:
            ConfigError: The samples are of a truncated distribution, or a score is missing.
        """
        if "curr_logprobs_keep_mask" in data or "curr_logprobs_unfiltered" in data:
            raise ConfigError(
                "policy.generation.top_k or top_p: log-probs of truncated distributions are not supported. Set "
                "top_k=null and top_p=1."
            )
        if self.reference_policy_kl_penalty and "reference_policy_logprobs" not in data:
            raise ConfigError(
                f"beta={self.reference_policy_kl_penalty}: there are no log-probs of a reference. Set "
                "loss_fn.reference_policy_kl_penalty to the same value."
            )
        rows = TokenRows((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).bool())
        old, sampled = data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:]
        options = dict(self.policy_loss)
        found = policy_loss(
            options.pop("loss_type"), rows, next_token_logprobs, old, data["advantages"][:, 1:], **options
        )
        stats, losses = dict(found.stats), found.loss
        if self.sampling is not None:
            losses = (
                losses
                * sampling_weights(rows=rows, old_logprobs=old, sampling_logprobs=sampled, **self.sampling).weights
            )
        if self.reference_policy_kl_penalty:
            options = dict(self.kl)
            if options["estimator"] == "sequence" or options.get("bias_correction"):
                options["sampling_logprobs"] = sampled
            reference = data["reference_policy_logprobs"][:, 1:]
            stats["kl_penalty"] = kl(options.pop("estimator"), rows, next_token_logprobs, reference, **options)
            losses = losses + self.reference_policy_kl_penalty * stats["kl_penalty"]
        total = summed(rows, losses, self.reduction, constant=self.length).total
        items = global_valid_toks if self.reduction == "token" else global_valid_seqs * (self.length or 1)
        loss = total / items
        means = {name: float(values.detach().sum() / global_valid_toks) for name, values in stats.items()}
        return loss, {"loss": loss.item(), "num_valid_samples": data["sample_mask"].sum().item(), **means}
