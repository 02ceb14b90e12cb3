"""The first-use check: which plans give a model's own log-probs, found by trying.

An architecture can ignore our attention in many ways, each silently wrong (linear attention, state-space layers,
sinks, windows that exist only in a mask). So before the first batch every plan scores a few random rows, and the
result is compared with one plain forward for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from prefrl.models import attention
from prefrl.models.modes import eval_mode
from prefrl.models.plans import lay_out
from prefrl.models.scoring import Want, inner_model, score_tokens, user_model
from prefrl.types import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from prefrl.models.plans import ForwardPlan

__all__ = ["Verdict", "check_plans", "fingerprint"]

_FLAT_PLANS: tuple[ForwardPlan, ...] = ("shared_prefix", "packed")

# Largest and mean absolute difference in nats that rounding explains, by the coarsest dtype of the pass.
_TOLERANCES = {
    torch.float64: (1e-4, 1e-4),
    torch.float32: (1e-4, 1e-4),
    torch.float16: (0.1, 0.02),
    torch.bfloat16: (0.5, 0.1),
}

# Windows up to this size are crossed by the rows of the check; of longer ones we check that attention is told of them.
_LONGEST_TESTED_WINDOW = 128


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a plan does not work, by plan; a plan that is not listed gives the model's own log-probs."""

    reasons: Mapping[ForwardPlan, str]
    own_logits: bool  # the padded plan needs the model's own logits
    fingerprint: tuple[object, ...]  # of the model that was checked


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    """What must stay as it was for a verdict to hold: the kind of head, of PEFT and of attention."""
    inner = inner_model(model)
    head = type(inner.get_output_embeddings())
    return head, _uses_prompt_learning(model), inner.config.get_text_config()._attn_implementation


def check_plans(model: nn.Module) -> Verdict:
    """Compare every plan with the model's plain forward; our attention stays installed if a flat plan passed.

    No gradients, eval mode, token ids from an own generator: weights, modes and random states stay as they are. Every
    call runs the same number of forward passes, so that sharded ranks stay in step.
    """
    inner = inner_model(model)
    bare = user_model(model)  # nothing to synchronise without gradients
    with eval_mode(bare), torch.no_grad():
        attention.uninstall(inner)
        batch = _random_batch(inner)
        truth = _one_by_one(bare, batch)
        reasons = _failures(bare, batch, truth, _known_limit(model))
        own_logits = False
        if all(plan in reasons for plan in _FLAT_PLANS):
            attention.uninstall(inner)
            own_logits = _failure(bare, batch, truth, "padded") is not None
    return Verdict(reasons, own_logits, fingerprint(model))


def _failures(bare: nn.Module, batch: TokenBatch, truth: Tensor, limit: str | None) -> dict[ForwardPlan, str]:
    """Why flat plans fail, by plan."""
    inner = inner_model(bare)
    if limit is None and not attention.install(inner):
        name = inner.config.get_text_config()._attn_implementation
        limit = f'attn_implementation="{name}" has no flat form; load the model with attn_implementation="sdpa"'
    # Padded rows go through the same head and, by way of ours, the model's own attention and masks, which generation
    # needs too: what fails there leaves no flat plan standing.
    limit = limit or _failure(bare, batch, truth, "padded")
    if limit is not None:
        return dict.fromkeys(_FLAT_PLANS, limit)
    failures = {plan: _failure(bare, batch, truth, plan) for plan in _FLAT_PLANS}
    return {plan: reason for plan, reason in failures.items() if reason is not None}


def _known_limit(model: nn.Module) -> str | None:
    """What in the config rules out flat rows, also where few random tokens would not show it."""
    inner = inner_model(model)
    config = inner.config.get_text_config()
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other_layers:
        return f"it has layers of type {', '.join(sorted(other_layers))}"
    if getattr(inner, "_is_stateful", False):
        return "it carries a recurrent state"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "it soft-caps attention scores (attn_logit_softcapping)"
    if _uses_prompt_learning(model):
        return "PEFT prompt learning puts virtual tokens in front of each row"
    return None


def _uses_prompt_learning(model: nn.Module) -> bool:
    peft_config = getattr(user_model(model), "active_peft_config", None)
    return bool(getattr(peft_config, "is_prompt_learning", False))


def _sliding_window(model: PreTrainedModel) -> int | None:
    """The window of the model's sliding layers; None if it has no such layers."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _random_batch(model: PreTrainedModel) -> TokenBatch:
    """2 prompts with 3 responses each, ragged and interleaved, longer than a small sliding window."""
    window = _sliding_window(model)
    base = 8 if window is None or window > _LONGEST_TESTED_WINDOW else window + 3
    prompt_lengths = (base, base + 3)
    response_lengths = (base + 2, 1, 4, 3, base + 5, 2)
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size

    def random_ids(count: int) -> Tensor:
        return torch.randint(vocab_size, (count,), generator=generator)

    return TokenBatch(
        prompt_ids=random_ids(sum(prompt_lengths)),
        prompt_lengths=prompt_lengths,
        prompt_index=(0, 1, 0, 1, 1, 0),
        response_ids=random_ids(sum(response_lengths)),
        response_lengths=response_lengths,
        trainable=torch.ones(sum(response_lengths), dtype=torch.bool),
        group_index=(0, 1, 0, 1, 1, 0),
    ).to(model.device)


def _one_by_one(model: nn.Module, batch: TokenBatch) -> Tensor:
    """[N] log-probs from one plain forward for each row."""
    prompts = torch.split(batch.prompt_ids, list(batch.prompt_lengths))
    responses = torch.split(batch.response_ids, list(batch.response_lengths))
    logprobs = []
    for prompt, response in zip(batch.prompt_index, responses, strict=True):
        input_ids = torch.cat([prompts[prompt], response])[None]
        logits = model(input_ids=input_ids, use_cache=False).logits[0, -len(response) - 1 : -1]
        logprobs.append(logits.float().log_softmax(-1).gather(-1, response[:, None]).squeeze(-1))
    return torch.cat(logprobs)


def _failure(model: nn.Module, batch: TokenBatch, truth: Tensor, plan: ForwardPlan) -> str | None:
    """Why `plan` does not give the true log-probs; None if it does."""
    inputs = lay_out(batch, plan)
    try:
        scored = score_tokens(model, batch, inputs, temperature=1.0, want=Want(), own_logits=False)
    except Exception as error:  # whatever the architecture trips over, another plan serves it
        return f"{type(error).__name__}: {error}"
    window = _sliding_window(inner_model(model))
    if inputs.layout is not None and window is not None and window not in inputs.layout.windows:
        return f"its layers do not tell attention their sliding_window={window}"
    difference = (scored.scores.logprobs - truth).abs()
    largest, mean = difference.max().item(), difference.mean().item()
    allowed_largest, allowed_mean = _TOLERANCES[scored.compute_dtype]
    if largest <= allowed_largest and mean <= allowed_mean:
        return None
    return f"its log-probs differ from the plain forward's by up to {largest:.2g} nats"
