"""Log-probs of response tokens: the one forward pass that every trainer, reference and old policy uses."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from torch import nn

from prefrl.distributed import is_main
from prefrl.errors import ConfigError
from prefrl.losses.logprobs import TokenScores
from prefrl.models.plans import ForwardPlan, Plan, lay_out
from prefrl.models.scoring import ScoredTokens, Want, inner_model, prepare_for_scoring, score_tokens
from prefrl.models.selfcheck import Verdict, check_plans, fingerprint

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.types import TokenBatch

__all__ = ["Plan", "prepare_for_scoring", "token_logprobs"]

logger = logging.getLogger(__name__)

# Each plan is followed by the one that replaces it where it does not work.
_PLANS: tuple[ForwardPlan, ...] = ("shared_prefix", "packed", "padded")


def token_logprobs(
    model: nn.Module,
    batch: TokenBatch,
    *,
    temperature: float = 1.0,
    want: Collection[Literal["entropy", "correct"]] = (),
    plan: Plan = "auto",
) -> TokenScores:
    """Log softmax(logits / temperature) at every trainable response token, with gradients.

    All plans give equal numbers: "shared_prefix" computes each prompt once for all its responses, "packed" lays rows
    end to end without padding, "padded" is the ordinary batch. "auto" takes the first that may gain and that
    the first-use check found right for this model, and says so once where it falls back. While dropout is active,
    "auto" does not share prefixes, since the responses of a prompt would share its dropout mask.

    Args:
        model: A causal language model, with PEFT or DDP around it if wanted; see `prepare_for_scoring`.
        batch: On the model's device, at least one row.
        temperature: > 0, divides the logits.
        want: What to compute beside log-probs, of the same distribution.
        plan: How the rows are laid out.
    Returns:
        [N] float32 nats (and entropies in nats, and whether the token is the most likely one), aligned with
        `batch.response_ids`; 0 or False where `batch.trainable` is False. Connected to every parameter that the pass
        uses, even if nothing is trainable.
    Raises:
        ConfigError: The plan asked for does not work for this model, or the model is no causal language model.
        ValueError: The batch has no rows.
    """
    verdict = _verdict(model)
    chosen = _choose(model, batch, plan, verdict)
    scored = score_tokens(
        model,
        batch,
        lay_out(batch, chosen),
        temperature=temperature,
        want=Want(entropy="entropy" in want, correct="correct" in want),
        own_logits=verdict.own_logits,
    )
    return _spread(scored, batch.num_tokens)


def _spread(scored: ScoredTokens, num_tokens: int) -> TokenScores:
    """[N] from [M], with 0 or False at the other tokens."""

    def spread(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.new_zeros(num_tokens).index_copy(0, scored.positions, values)

    scores = scored.scores
    logprobs = scores.logprobs.new_zeros(num_tokens).index_copy(0, scored.positions, scores.logprobs)
    return TokenScores(logprobs, spread(scores.entropy), spread(scores.correct))


def _verdict(model: nn.Module) -> Verdict:
    """The model's verdict, from its first use or since its head, adapter or attention was exchanged."""
    state = prepare_for_scoring(model)
    if state.verdict is None or state.verdict.fingerprint != fingerprint(model):
        state.verdict = check_plans(model)
        _report(model, state.verdict)
    return state.verdict


def _report(model: nn.Module, verdict: Verdict) -> None:
    failed = [plan for plan in _PLANS if plan in verdict.reasons]
    if failed and is_main():
        logger.warning(
            "%s: log-probs fall back from plan %s to %s: %s",
            type(inner_model(model)).__name__,
            " and ".join(failed),
            _working(failed[0], verdict),
            verdict.reasons[failed[0]],
        )


def _working(plan: ForwardPlan, verdict: Verdict) -> ForwardPlan:
    """`plan`, or the next one that works."""
    return next(p for p in _PLANS[_PLANS.index(plan) :] if p not in verdict.reasons)


def _choose(model: nn.Module, batch: TokenBatch, plan: Plan, verdict: Verdict) -> ForwardPlan:
    if plan == "auto":
        shares = batch.num_prompts < batch.num_rows and not _has_active_dropout(model)
        return _working("shared_prefix" if shares else "packed", verdict)
    if plan not in _PLANS:
        raise ConfigError(f'plan="{plan}": allowed are "auto", {", ".join(map(repr, _PLANS))}.')
    if plan in verdict.reasons:
        raise ConfigError(
            f'plan="{plan}" does not work for {type(inner_model(model)).__name__}: {verdict.reasons[plan]}. '
            f'Use plan="auto" or "{_working(plan, verdict)}".'
        )
    return plan


def _has_active_dropout(model: nn.Module) -> bool:
    """Whether a module in training mode drops something: nn.Dropout, or a rate that a module keeps as a number."""
    for module in model.modules():
        if module.training and isinstance(module, nn.Dropout) and module.p > 0:
            return True
        if module.training and any("drop" in name and _is_rate(value) for name, value in vars(module).items()):
            return True
    return False


def _is_rate(value: object) -> bool:
    return isinstance(value, float) and value > 0
