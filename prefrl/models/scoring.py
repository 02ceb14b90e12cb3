"""A causal language model whose forward can return the log-probs of given tokens instead of logits.

The whole computation, head included, runs inside the model's own forward: whatever wraps the model (DDP, mixed
precision, PEFT) sees one ordinary forward pass, and its hooks fire. Logits are made for a chunk of trainable tokens at
a time.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from prefrl.errors import ConfigError
from prefrl.losses.logprobs import Head, TokenScores, chunked_logprobs, module_logprobs
from prefrl.models.attention import LAYOUT_KWARG, Layout, mask_placeholder

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeIs

    from prefrl.models.plans import ModelInputs
    from prefrl.models.selfcheck import Verdict
    from prefrl.types import TokenBatch

__all__ = [
    "ScoredTokens",
    "ScoringState",
    "Want",
    "inner_model",
    "logit_transform",
    "prepare_for_scoring",
    "score_tokens",
    "user_model",
]

_STATE = "_prefrl_scoring_state"


@dataclass(frozen=True, slots=True)
class Want:
    """What to compute beside log-probs."""

    entropy: bool = False
    correct: bool = False


@dataclass(frozen=True, eq=False)
class ScoringRequest:
    """The M tokens to score, each predicted at a position of the flattened input_ids."""

    predictors: Tensor  # [M] int64
    targets: Tensor  # [M] int64
    width: int  # tokens in a row of input_ids
    temperature: float
    want: Want
    layout: Layout | None  # of a flat row; None: the model's own attention and masks
    own_logits: bool  # through the model's own logits, for heads that we cannot reproduce


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """The M trainable tokens of a batch, scored."""

    scores: TokenScores
    positions: Tensor  # [M] int64: which of the N response tokens they are
    compute_dtype: torch.dtype  # the coarsest that the pass used


@dataclass(eq=False)
class ScoringState:
    """What a prepared model remembers. A copy of the model starts without a verdict: it may be changed."""

    original_forward: Callable[..., Any]
    verdict: Verdict | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A state whose forward is bound to the copied model."""
        return type(self)(copy.deepcopy(self.original_forward, memo))


def user_model(model: nn.Module) -> nn.Module:
    """The transformers or PEFT model inside DDP and torch.compile wrappers.

    Raises:
        ConfigError: There is none.
    """
    inner = model
    while not (isinstance(inner, PreTrainedModel) or hasattr(type(inner), "get_base_model")):
        children = inner._modules
        wrapped = children.get("module") or children.get("_orig_mod")
        if wrapped is None:
            raise ConfigError(
                f"model is a {type(model).__name__}: needs a transformers PreTrainedModel, or PEFT or DDP around one. "
                "Load it with AutoModelForCausalLM."
            )
        inner = wrapped
    return inner


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The causal language model inside all wrappers, PEFT included.

    Raises:
        ConfigError: There is none, or it has no language-model head.
    """
    inner: Any = user_model(model)
    if not isinstance(inner, PreTrainedModel):
        inner = inner.get_base_model()
    if inner.base_model is inner or inner.get_output_embeddings() is None:
        raise ConfigError(
            f"model is a {type(inner).__name__}, which has no language-model head. Load it with AutoModelForCausalLM."
        )
    return inner


def prepare_for_scoring(model: nn.Module) -> ScoringState:
    """Teach the model's forward to score tokens; in every other call it stays as it was.

    Call it before the model is wrapped (mixed precision, DDP). A second call changes nothing.

    Raises:
        ConfigError: There is no causal language model inside, or accelerate wrapped it before.
    """
    inner = inner_model(model)
    state: ScoringState | None = vars(inner).get(_STATE)
    if state is None:
        if "_original_forward" in vars(inner):
            raise ConfigError(
                f"{type(inner).__name__} was prepared by accelerate before prepare_for_scoring, so mixed precision "
                "would not reach the log-probs. Call prepare_for_scoring(model) before accelerator.prepare(model)."
            )
        state = ScoringState(inner.forward)
        setattr(inner, _STATE, state)
        inner.forward = MethodType(_scoring_forward(inner.forward), inner)
    return state


def _scoring_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function of the model, so that a deep copy of the model binds it to the copy."""

    def forward(self: PreTrainedModel, *args: Any, prefrl_scoring: ScoringRequest | None = None, **kwargs: Any) -> Any:
        state: ScoringState = getattr(self, _STATE)
        if prefrl_scoring is None:
            return state.original_forward(*args, **kwargs)
        return _score(self, state, prefrl_scoring, *args, **kwargs)

    # HF's Trainer and generate() read the signature. Not through `__wrapped__`: accelerate unwraps along it, past us.
    myself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(original)
    forward.__signature__ = signature.replace(parameters=[myself, *signature.parameters.values()])  # type: ignore[attr-defined]
    return forward


def score_tokens(
    model: nn.Module, batch: TokenBatch, inputs: ModelInputs, *, temperature: float, want: Want, own_logits: bool
) -> ScoredTokens:
    """Run the (prepared, possibly wrapped) model on `inputs` and score the trainable tokens of `batch`."""
    # The one place that waits for the device: how many tokens are trainable decides the shapes.
    positions = batch.trainable.nonzero().squeeze(1)
    request = ScoringRequest(
        predictors=inputs.predictors[positions],
        targets=batch.response_ids[positions],
        width=inputs.input_ids.size(1),
        temperature=temperature,
        want=want,
        layout=inputs.layout,
        own_logits=own_logits,
    )
    extras = {"position_ids": inputs.position_ids, "attention_mask": inputs.attention_mask}
    given = {name: tensor for name, tensor in extras.items() if tensor is not None}
    output = model(input_ids=inputs.input_ids, **given, prefrl_scoring=request)
    scores = TokenScores(output["logprobs"], output.get("entropy"), output.get("correct"))
    return ScoredTokens(scores, positions, output["compute_dtype"])


def _score(model: PreTrainedModel, state: ScoringState, request: ScoringRequest, **inputs: Any) -> dict[str, Any]:
    """The scores as a dict: wrappers look for tensors in dicts, not in classes of ours."""
    inputs = {name: value for name, value in inputs.items() if value is not None}
    if request.own_logits:
        logits = state.original_forward(**inputs, use_cache=False).logits
        rows, head = _predicting(logits, request), None
    else:
        rows, head = _predicting(_hidden_states(model, request, inputs), request), model.get_output_embeddings()
    scores = _scores(model, head, rows, request)
    named = {"logprobs": scores.logprobs, "entropy": scores.entropy, "correct": scores.correct}
    tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
    return {**tensors, "compute_dtype": _coarsest_dtype(model, rows)}


def _hidden_states(model: PreTrainedModel, request: ScoringRequest, inputs: dict[str, Any]) -> Tensor:
    """[rows, width, h] from the model without its head."""
    if request.layout is not None:
        mask = mask_placeholder(inputs["position_ids"].device)
        inputs = {**inputs, "attention_mask": mask, LAYOUT_KWARG: request.layout}
    hidden: Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden


def _predicting(output: Tensor, request: ScoringRequest) -> Tensor:
    """[M, ...] outputs at the predicting positions. PEFT may have put virtual tokens in front of each row."""
    return output[:, -request.width :].flatten(0, 1)[request.predictors]


def _scores(model: PreTrainedModel, head: nn.Module | None, rows: Tensor, request: ScoringRequest) -> TokenScores:
    options: dict[str, Any] = {
        "temperature": request.temperature,
        "want_entropy": request.want.entropy,
        "want_correct": request.want.correct,
    }
    if head is None:
        return module_logprobs(rows, request.targets, _identity, **options)
    scale, softcap = logit_transform(model)
    if _is_bare_linear(head):
        linear = Head(head.weight, head.bias, scale=scale, softcap=softcap)
        return chunked_logprobs(rows, request.targets, linear, **options)

    def transformed_head(hidden: Tensor) -> Tensor:
        logits: Tensor = head(hidden) * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    return module_logprobs(rows, request.targets, transformed_head, **options)


def _is_bare_linear(head: nn.Module) -> TypeIs[nn.Linear]:
    """Whether the head is no more than its weight and bias: hooks, LoRA and quantisation live in the module's call."""
    return (
        type(head) is nn.Linear
        and not head._forward_pre_hooks
        and not head._forward_hooks
        and "forward" not in vars(head)
    )


def _identity(logits: Tensor) -> Tensor:
    return logits


def logit_transform(model: PreTrainedModel) -> tuple[float, float | None]:
    """(scale, softcap) that the model's own forward applies to the head's output, as its config says.

    Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, Gemma caps at `final_logit_softcapping`.
    """
    config = model.config.get_text_config()
    scale: float = getattr(config, "logit_scale", None) or 1.0
    divisor: float = getattr(config, "logits_scaling", None) or 1.0
    softcap: float | None = getattr(config, "final_logit_softcapping", None)
    return scale / divisor, softcap


def _coarsest_dtype(model: PreTrainedModel, rows: Tensor) -> torch.dtype:
    dtypes = [rows.dtype, model.get_input_embeddings().weight.dtype]
    if torch.is_autocast_enabled(rows.device.type):
        dtypes.append(torch.get_autocast_dtype(rows.device.type))
    coarsest: torch.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return coarsest
