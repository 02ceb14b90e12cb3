"""Log-probs of response tokens: the one forward pass that every trainer, reference and old policy uses.

It is `token_logprobs`: rows are laid out (`plans`), the model runs, and a readout inside the model's own forward
(`scoring`) computes the log-probs of chunks of tokens from its last hidden states (`losses.logprobs`).

Passes without gradients run over pieces of a batch, so that their memory does not depend on its size. Ranks that share
a model's partitioned weights must run equally many passes: ranks with fewer pieces run idle rows for the remaining
passes, and so do ranks without any row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from prefrl.distributed import is_main, missing_passes, num_processes, place_in_team, release, team_size
from prefrl.errors import ConfigError
from prefrl.losses.per_token import TokenScores, WantName
from prefrl.losses.top_logprobs import ReferenceDistribution
from prefrl.losses.truncation import TokenHistory, TokenTruncation, Truncation
from prefrl.models.images import image_rules
from prefrl.models.modes import dropout_rates
from prefrl.models.plans import FlatInputs, ForwardPlan, ModelInputs, Plan, PlanVerdict, lay_out, part_of
from prefrl.models.routers import RouterRecord
from prefrl.models.scoring import (
    ScoringState,
    inner_model,
    is_classifier,
    prepare_for_scoring,
    score_tokens,
    user_model,
)
from prefrl.models.selfcheck import check_plans
from prefrl.types import IdleBatch, TokenBatch


def token_truncation(batch: TokenBatch, cuts: Truncation) -> TokenTruncation:
    """The truncation of the trainable tokens of a batch; its history is only built for a repetition penalty."""
    return TokenTruncation(cuts, None if cuts.repetition_penalty == 1.0 else _history(batch))


def _history(batch: TokenBatch) -> TokenHistory:
    """The context of each response and its tokens, and how many of these come before each trainable token."""
    lengths = [
        start + place
        for start, count in zip(batch.context_lengths, batch.response_lengths, strict=True)
        for place in range(count)
    ]
    numbers = [number for number, count in enumerate(batch.response_lengths) for _ in range(count)]
    index = torch.tensor([numbers, lengths]).to(batch.device, non_blocking=True)[:, batch.trainable_positions]
    return TokenHistory(pad_sequence(batch.texts, batch_first=True), *index)


T = TypeVar("T")


def score_pieces(
    model: nn.Module, score: Callable[[TokenBatch], T], batch: TokenBatch, *, max_tokens: int | None
) -> tuple[list[TokenBatch], list[T]]:
    """Split the batch into pieces of at most `max_tokens` forward tokens and call `score` on each piece.

    If the model's weights are partitioned over ranks, all ranks must call it.

    Args:
        model: The model of which each call of `score` runs one pass.
        score: Called without gradients.
        batch: B rows, possibly none.
        max_tokens: Limit per piece; a longer row becomes its own piece. None: one piece.

    Returns:
        Pieces, in any order, and their results, for `in_batch_order`. `group_index` of a piece holds the row numbers
        in `batch`. Without rows, the only piece is an idle row.
    """
    pieces: list[TokenBatch] = [batch.replace(group_index=tuple(range(batch.num_rows)))]
    if not batch.num_rows:
        pieces = [IdleBatch.of_token().to(batch.device)]
    elif max_tokens is not None:
        pieces = pieces[0].split(max_tokens)
    passes = pieces
    if num_missing := missing_passes(model, len(pieces), batch.device):
        passes = [*pieces, *[IdleBatch.of_token().to(batch.device)] * num_missing]
    with torch.no_grad():
        results = [score(piece) for piece in passes]
    release(model)
    return pieces, results[: len(pieces)]


def in_batch_order(batch: TokenBatch, pieces: Sequence[TokenBatch], parts: Sequence[Tensor]) -> Tensor:
    """[N, ...] in the order of the batch, from per-token results of its pieces."""
    rows: dict[int, Tensor] = {}
    for piece, part in zip(pieces, parts, strict=True):
        rows.update(zip(piece.group_index, torch.split(part, list(piece.row_lengths)), strict=True))
    return torch.cat([rows[row] for row in range(len(rows))])[: batch.num_tokens]


def scores_in_pieces(
    model: nn.Module,
    batch: TokenBatch,
    scoring: Scoring,
    *,
    max_tokens: int | None,
    want: Collection[WantName] = (),
) -> TokenScores:
    """Scores of the response tokens without gradients, in passes of at most `max_tokens` forward tokens.

    If the model's weights are partitioned over ranks, all ranks must call it, including those without a row.

    Args:
        model: Runs in its current mode.
        batch: B rows, N response tokens, possibly none.
        scoring: What is scored, and how.
        max_tokens: Limit per pass; a longer row gets its own pass. None: one pass.
        want: What to compute besides log-probs, by its name in `TokenScores`.

    Returns:
        [N] float32 nats, and what is wanted, in the batch's order; 0 where `batch.trainable` is False.

    Raises:
        ConfigError: Hidden states are wanted, but cannot be read from this model.
    """
    score = partial(token_logprobs, model, **vars(scoring), want=want)
    pieces, scores = score_pieces(model, score, batch, max_tokens=max_tokens)
    names = list(scores[0].wanted)
    logprobs = in_batch_order(batch, pieces, [each.logprobs for each in scores])
    return TokenScores(
        logprobs, {n: in_batch_order(batch, pieces, [each.wanted[n] for each in scores]) for n in names}
    )


def in_pieces(
    model: nn.Module, score: Callable[[TokenBatch], Tensor], batch: TokenBatch, *, max_tokens: int | None
) -> Tensor:
    """The per-token results of `score` for the whole batch, without gradients.

    Args:
        model: See `score_pieces`.
        score: Maps a batch to [N, ...], aligned with its response tokens.
        batch: B rows, N response tokens.
        max_tokens: See `score_pieces`.

    Returns:
        [N, ...] in the batch's order.
    """
    return in_batch_order(batch, *score_pieces(model, score, batch, max_tokens=max_tokens))


logger = logging.getLogger(__name__)

# If a plan does not work for a model, the next one replaces it.
_PLANS: tuple[ForwardPlan, ...] = ("shared_prefix", "packed", "padded")


@dataclass(frozen=True)
class Scoring:
    """What a run scores, and how: arguments of `token_logprobs` that are the same in all of its passes.

    Args:
        temperature: > 0, divides the logits.
        truncation: Cuts the distribution as a sampler did; None: it is not cut.
        plan: How rows are laid out.
    """

    temperature: float = 1.0
    truncation: Truncation | None = None
    plan: Plan = "auto"


def token_logprobs(
    model: nn.Module,
    batch: TokenBatch,
    *,
    temperature: float = 1.0,
    want: Collection[WantName] = (),
    plan: Plan = "auto",
    truncation: Truncation | None = None,
    reference: ReferenceDistribution | None = None,
    routers: RouterRecord | None = None,
) -> TokenScores:
    """Log softmax(logits / temperature) at every trainable response token, with gradients.

    All plans give equal numbers: "shared_prefix" computes each prompt once for all its responses, "packed" lays rows
    end to end without padding, "padded" is the ordinary batch. "auto" picks the fastest plan that passed the
    self-check for this model, and logs one warning if it has to fall back. While dropout is active, "auto" does not
    share prefixes, since all responses of a prompt would share its dropout mask.

    Args:
        model: A causal language model, optionally wrapped in PEFT or DDP; see `prepare_for_scoring`.
        batch: On the model's device, at least one row.
        temperature: > 0, divides the logits.
        want: What to compute besides log-probs, by its name in `TokenScores`.
        plan: How the rows are laid out.
        truncation: Cuts the distribution as a sampler did, see `losses.truncation`; None: it is not cut.
        reference: For `divergence`: the reference's hidden states [N, h] of the batch's tokens, and its
            `Reference.logits`.
        routers: Collects the balancing losses of the routers of a mixture of experts; None: they are not computed.
    Returns:
        [N] float32 nats, and what is wanted, aligned with `batch.response_ids`; 0 or False where `batch.trainable` is
        False. Hidden states are [N, h] in the model's dtype. Connected to every parameter that the pass uses, even if
        nothing is trainable.
    Raises:
        ConfigError: The requested plan does not work for this model, the model is not a causal language model, or its
            hidden states are wanted and cannot be read.
        ValueError: The batch has no rows.
    """
    state = prepare_for_scoring(model)
    if state.is_classifier:
        raise ConfigError(
            f"model is a {type(inner_model(model)).__name__}, which scores sequences, but log-probs need a "
            "language-model head. Load it with AutoModelForCausalLM."
        )
    verdict = verdict_of(model, state)
    rows = batch if state.image_example is None else with_idle_image(model, batch)
    if reference is not None and rows is not batch:
        # What the tokens of the idle row are compared with does not matter: their scores are not used.
        reference = reference[torch.arange(rows.num_tokens, device=batch.device).clamp(max=batch.num_tokens - 1)]
    scores = score_tokens(
        model,
        rows,
        inputs_of(model, rows, plan, verdict),
        temperature=temperature,
        want=want,
        own_logits=verdict.own_logits,
        truncation=None if truncation is None else token_truncation(rows, truncation),
        reference=reference,
        routers=routers,
    )
    if routers is not None:
        routers.keep(batch.num_responses)
    return scores if rows is batch else scores.map(lambda values: values[: batch.num_tokens])


def with_idle_image(model: nn.Module, batch: TokenBatch) -> TokenBatch:
    """The batch that a pass runs: one without images gets a row with an image, if other processes may have images.

    All processes then run the vision tower equally often, as backends require. The scores of the row at the end are
    not used, but connect the tower to the loss.
    """
    example = prepare_for_scoring(model).image_example
    if example is None or batch.has_images or num_processes() == 1:
        return batch
    row = min((i for i in range(example.num_rows) if example.images_of(i)), key=lambda i: example.forward_tokens([i]))
    idle = example.select([row]).to(batch.device)
    return TokenBatch.concat([TokenBatch.of(batch), TokenBatch.of(idle)])


def set_image_example(model: nn.Module, example: TokenBatch) -> None:
    """Give the self-check rows with images, which it compares as it compares rows of text.

    Args:
        model: Prepared.
        example: On any device; each row has one response.
    """
    state = prepare_for_scoring(model)
    state.image_example, state.verdict = example, None


def prepare_like(model: nn.Module, policy: nn.Module) -> None:
    """Prepare another model, such as a reference, to score the batches of a prepared policy."""
    prepare_for_scoring(model).image_example = prepare_for_scoring(policy).image_example


def inputs_of(model: nn.Module, batch: TokenBatch, plan: Plan, verdict: PlanVerdict) -> ModelInputs:
    """What this process feeds to the model, if `plan` is requested: its part of rows that a team of processes shares.

    Raises:
        ConfigError: The plan does not work for this model or does not exist, or processes share rows but the plan
            pads, so that its rows cannot be shared.
    """
    num_parts = team_size()
    reasons = verdict.image_reasons if batch.has_images else verdict.reasons
    if batch.has_images and num_parts > 1:
        raise ConfigError(f"sp_size={num_parts} with images: processes share only rows of text. Set sp_size=1.")
    chosen = _chosen(model, batch, plan, reasons)
    if chosen == "padded" and num_parts > 1:
        reason = reasons.get("packed", f'plan="{plan}" pads')
        raise ConfigError(
            f"sp_size={num_parts} does not work for {type(inner_model(model)).__name__}: processes can share only "
            f"flat rows, but {reason}. Set sp_size=1."
        )
    inputs = lay_out(batch, chosen, image_rules(inner_model(model)) if batch.has_images else None)
    return part_of(inputs, place_in_team(), num_parts) if num_parts > 1 and isinstance(inputs, FlatInputs) else inputs


def verdict_of(model: nn.Module, state: ScoringState | None = None) -> PlanVerdict:
    """The model's self-check verdict, computed at first use and again if its head, adapter or attention changed.

    Routers that shall replay are tried at first use, too.

    Args:
        model: See `token_logprobs`.
        state: What `prepare_for_scoring` has just returned for the model; None: the model is prepared here.

    Raises:
        ConfigError: See `check_plans` and `RouterReplay.prove`.
    """
    state = prepare_for_scoring(model) if state is None else state
    if state.verdict is None or state.verdict.fingerprint != state.fingerprint(model):
        state.verdict = check_plans(model, state.image_example)
        _report(model, state.verdict, has_images=state.image_example is not None)
    if state.replay is not None:
        state.replay.prove(user_model(model))
    return state.verdict


def plan_in_words(model: nn.Module, plan: Plan) -> str:
    """The plan that is chosen for rows of text; runs the self-check if "auto" leaves the choice to it."""
    if plan != "auto":
        return plan
    reasons = verdict_of(model).reasons
    if any(True for _ in dropout_rates(model)):
        return _working("packed", reasons)
    shared, alone = _working("shared_prefix", reasons), _working("packed", reasons)
    return alone if shared == alone else f"{shared} where rows share a prompt, {alone} elsewhere"


def _report(model: nn.Module, verdict: PlanVerdict, *, has_images: bool) -> None:
    inner = inner_model(model)
    what = "scores" if is_classifier(inner) else "log-probs"
    checked = {what: verdict.reasons}
    if has_images and verdict.image_reasons != verdict.reasons:
        checked[f"{what} of rows with images"] = verdict.image_reasons
    for name, reasons in checked.items():
        failed = [plan for plan in _PLANS if plan in reasons]
        if failed and is_main():
            logger.warning(
                "%s: %s fall back from plan %s to %s: %s",
                type(inner).__name__,
                name,
                " and ".join(failed),
                _working(failed[0], reasons),
                reasons[failed[0]],
            )


def _working(plan: ForwardPlan, reasons: Mapping[ForwardPlan, str]) -> ForwardPlan:
    """`plan`, or the next one that works."""
    return next(p for p in _PLANS[_PLANS.index(plan) :] if p not in reasons)


def _chosen(model: nn.Module, batch: TokenBatch, plan: Plan, reasons: Mapping[ForwardPlan, str]) -> ForwardPlan:
    if plan == "auto":
        shares = batch.shares_prompts and not any(module.training for module, _ in dropout_rates(model))
        return _working("shared_prefix" if shares else "packed", reasons)
    if plan not in _PLANS:
        raise ConfigError(f'plan="{plan}": allowed are "auto", {", ".join(map(repr, _PLANS))}.')
    if plan in reasons:
        raise ConfigError(
            f'plan="{plan}" does not work for {type(inner_model(model)).__name__}: {reasons[plan]}. '
            f'Use plan="auto" or "{_working(plan, reasons)}".'
        )
    return plan
