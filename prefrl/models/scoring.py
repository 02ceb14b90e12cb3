"""Make a model's forward return chosen results at some positions, instead of logits everywhere.

The whole computation, head included, runs inside the model's own forward. Whatever wraps the model (DDP, mixed
precision, PEFT) therefore sees one ordinary forward pass, and its hooks fire. A `Readout` defines what is computed:
token log-probs of a causal language model, whose logits are computed for one chunk of trainable tokens at a time, or
row scores of a sequence classifier.

On the way of a pass are `score_tokens`, `read_out`, the model's call, inside it `_scoring_forward` and `_score`, which
run the layers, then `TokenReadout`, the head's call, and inside that `_in_head`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MethodType
from typing import Any, Protocol, Self, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefrl.distributed import is_backend_hook, is_sharded, max_over_ranks, sum_over_team
from prefrl.errors import ConfigError
from prefrl.losses.logprobs import Head, chunked_logprobs
from prefrl.losses.module_logprobs import module_logprobs, num_chunks_of
from prefrl.losses.per_token import ScoreName, TokenScores, WantName
from prefrl.losses.top_logprobs import ReferenceDistribution
from prefrl.losses.truncation import TokenTruncation
from prefrl.models.attention.interface import LAYOUT_KWARG
from prefrl.models.attention.segments import Layout
from prefrl.models.modes import uncompiled
from prefrl.models.plans import FlatInputs, ModelInputs, PlanVerdict, padded_with
from prefrl.models.router_replay import ROUTES_KWARG, RouterReplay, Routes
from prefrl.models.routers import RouterRecord
from prefrl.types import TokenBatch


def is_classifier(model: PreTrainedModel) -> bool:
    """Whether the model returns one vector of scores per sequence."""
    return any(parent.__name__.endswith("ForSequenceClassification") for parent in type(model).__mro__)


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """The module that maps hidden states to logits: the language-model head or, in a sequence classifier, `score`."""
    head: nn.Module | None = model._modules.get("score") if is_classifier(model) else model.get_output_embeddings()
    return head


def needed_head(model: PreTrainedModel) -> nn.Module:
    """`output_head` of a model that needs one.

    Raises:
        ConfigError: The model has none.
    """
    head = output_head(model)
    if head is None:
        raise ConfigError(f"model is a {type(model).__name__}, whose scores do not come from a separate head.")
    return head


def pad_token_id(model: PreTrainedModel) -> int | None:
    """The token that a classifier's own forward treats as padding when it looks for a row's last token."""
    token: int | None = model.config.get_text_config().pad_token_id
    return token


def logit_transform(model: PreTrainedModel) -> tuple[float, float | None]:
    """(scale, softcap) that the model's own forward applies to the head's output, according to its config.

    Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, Gemma caps at `final_logit_softcapping`.
    """
    config = model.config.get_text_config()
    scale: float = getattr(config, "logit_scale", None) or 1.0
    divisor: float = getattr(config, "logits_scaling", None) or 1.0
    softcap: float | None = getattr(config, "final_logit_softcapping", None)
    return scale / divisor, softcap


_STATE = "_prefrl_scoring_state"
# Attribute that holds the original forward of a head that can run a readout.
HEAD_FORWARD = "_prefrl_original_forward"


class Readout(Protocol):
    """A computation at the end of the model's forward, inside the model's call."""

    def __call__(self, model: PreTrainedModel, rows: Tensor, request: ScoringRequest) -> dict[str, Tensor]:
        """Named results, from the last hidden states [M, h] at the positions, or the model's own logits [M, V] there.

        Of a sequence classifier, its own scores [R, L] of whole sequences.
        """
        ...


@dataclass(frozen=True, eq=False)
class ScoringRequest:
    """M positions of the flattened input_ids, and what to compute there."""

    predictors: Tensor  # [M] int64
    held: Tensor | None  # [M] int64: indices of these positions among all requested ones; None: all of them
    width: int  # tokens in a row of input_ids
    layout: Layout | None  # of a flat row; None: the model's own attention and masks
    own_logits: bool  # read the model's own logits, because we cannot reproduce how they are computed
    readout: Readout
    routers: Callable[[PreTrainedModel, Any, int], None] | None  # `RouterRecord.add` with its first argument
    routes: Routes | None = None  # of routers that may replay; None: they choose


@dataclass(eq=False)
class ScoringState:
    """What is known of a prepared model. A copy of the model starts without a verdict, because it may be changed."""

    model: PreTrainedModel  # without any wrapper
    original_forward: Callable[..., Any]
    is_classifier: bool  # whether it returns one vector of scores per sequence
    transform: tuple[float, float | None]  # `logit_transform`
    head: nn.Module | None = None  # `output_head`, when the model was last prepared
    liger_options: dict[str, bool] | None = None  # with which Liger's kernels were put into it; None: it has none
    verdict: PlanVerdict | None = None
    image_example: TokenBatch | None = None  # rows with images, for the self-check
    is_inside: bool = False  # whether a task is running inside the model's call
    is_compiled: bool = False  # whether passes that score run compiled layers
    replay: RouterReplay | None = None  # of routers that use the routes of batches; None: they choose

    def fingerprint(self, model: nn.Module) -> tuple[object, ...]:
        """What a verdict depends on: the kind of head, of PEFT, of attention and of kernels; `model` has wrappers."""
        attention_name = self.model.config.get_text_config()._attn_implementation
        return type(self.head), uses_prompt_learning(model), attention_name, self.liger_options

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A state whose forward is bound to the copied model."""
        model, forward = (copy.deepcopy(part, memo) for part in (self.model, self.original_forward))
        kept = {name: getattr(self, name) for name in ("is_classifier", "transform", "liger_options", "image_example")}
        return type(self)(model, forward, **kept)


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
                "Load it with AutoModelForCausalLM or AutoModelForSequenceClassification."
            )
        inner = wrapped
    return inner


def uses_prompt_learning(model: nn.Module) -> bool:
    """Whether PEFT puts virtual tokens in front of each row."""
    peft_config = getattr(user_model(model), "active_peft_config", None)
    return bool(getattr(peft_config, "is_prompt_learning", False))


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The causal language model or sequence classifier inside all wrappers, PEFT included.

    Raises:
        ConfigError: There is none, or it has no head.
    """
    inner: Any = user_model(model)
    if not isinstance(inner, PreTrainedModel):
        inner = inner.get_base_model()
    if _STATE in vars(inner):  # it was checked when it was prepared
        return inner
    if inner.base_model is inner or not (is_classifier(inner) or output_head(inner) is not None):
        raise ConfigError(
            f"model is a {type(inner).__name__}, which has no language-model head and does not classify sequences. "
            "Load it with AutoModelForCausalLM or AutoModelForSequenceClassification."
        )
    return inner


def prepare_for_scoring(model: nn.Module) -> ScoringState:
    """Extend the model's forward so that it can score tokens or sequences; all other calls work as before.

    Call it before the model is wrapped (mixed precision, DDP). A second call changes nothing.

    Raises:
        ConfigError: There is no model inside that can score, or accelerate has already wrapped it.
    """
    inner = inner_model(model)
    state: ScoringState | None = vars(inner).get(_STATE)
    if state is None:
        if "_original_forward" in vars(inner):
            raise ConfigError(
                f"{type(inner).__name__} was prepared by accelerate before prepare_for_scoring, so mixed precision "
                "would not reach the scores. Call prepare_for_scoring(model) before accelerator.prepare(model)."
            )
        state = ScoringState(inner, inner.forward, is_classifier(inner), logit_transform(inner))
        setattr(inner, _STATE, state)
        inner.forward = MethodType(_scoring_forward(inner.forward), inner)
    # LoRA and new tokens may have put another one there.
    state.head = head = output_head(inner) if state.is_classifier else inner.get_output_embeddings()
    if head is not None and not state.is_classifier and HEAD_FORWARD not in vars(head):
        setattr(head, HEAD_FORWARD, head.forward)
        head.forward = MethodType(_reading_forward, head)
    return state


def _reading_forward(
    self: nn.Module, *args: Any, prefrl_readout: Callable[[nn.Module, Tensor], Any] | None = None, **kwargs: Any
) -> Any:
    """The head's own forward, or a readout inside the head's call: only there are partitioned weights whole."""
    if prefrl_readout is None:
        return getattr(self, HEAD_FORWARD)(*args, **kwargs)
    return prefrl_readout(self, *args)


def _scoring_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The new forward, a plain function of the model, so that a deep copy of the model binds it to the copy."""

    def forward(
        self: PreTrainedModel,
        *args: Any,
        prefrl_scoring: ScoringRequest | None = None,
        prefrl_task: Callable[[], dict[str, Tensor]] | None = None,
        **kwargs: Any,
    ) -> Any:
        state: ScoringState = getattr(self, _STATE)
        if prefrl_task is not None:
            state.is_inside = True
            try:
                return prefrl_task()
            finally:
                state.is_inside = False
        if prefrl_scoring is not None:
            return _score(self, state, prefrl_scoring, *args, **kwargs)
        with uncompiled() if state.is_compiled else nullcontext():
            return state.original_forward(*args, **kwargs)

    # HF's Trainer and generate() read the signature. Not via `__wrapped__`: accelerate would unwrap our function.
    myself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(original)
    forward.__signature__ = signature.replace(parameters=[myself, *signature.parameters.values()])  # type: ignore[attr-defined]
    return forward


def inside(model: nn.Module, task: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Run `task` inside one call of the (wrapped) model, so that backends see its parts as one pass.

    The task may run the model, and modules that were added to it, each at most once.
    """
    device = next(model.parameters()).device.type
    is_enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    try:
        output: dict[str, Tensor] = model(prefrl_task=task)
    finally:
        # accelerate enters one autocast instance around each call of the model. A call inside another one overwrites
        # what the instance restores at its end, and mixed precision would stay on.
        torch.set_autocast_enabled(device, is_enabled)
        torch.set_autocast_dtype(device, dtype)
    return output


def score_tokens(  # noqa: PLR0913 - what describes the distribution, and how it is computed
    model: nn.Module,
    batch: TokenBatch,
    inputs: ModelInputs,
    *,
    temperature: float,
    want: Collection[WantName],
    own_logits: bool,
    truncation: TokenTruncation | None = None,
    reference: ReferenceDistribution | None = None,
    routers: RouterRecord | None = None,
) -> TokenScores:
    """[N] scores of `batch`, laid out as `inputs`, by a causal language model; 0 or False where it is not trainable.

    Raises:
        ConfigError: Hidden states are wanted, but the model's log-probs come from its own logits.
    """
    if own_logits and "hidden" in want:
        raise ConfigError(
            f"the hidden states of {type(inner_model(model)).__name__} cannot be used: its head does more than its "
            "config says, so log-probs are computed from its own logits. A critic on the policy's trunk and a KL "
            'divergence over the whole vocabulary ("full") read hidden states: use another model for them.'
        )
    positions = batch.trainable_positions
    if reference is not None:
        reference = reference[positions]
    readout = TokenReadout(batch.response_ids[positions], temperature, want, truncation, reference)
    where, num_tokens = inputs.predictors[positions], batch.num_tokens
    output = read_out(model, inputs, where, readout, own_logits=own_logits, routers=routers)
    scores, _ = unpacked(output, {*want, *(() if reference is None else ("divergence",))})
    return scores.map(lambda found: found.new_zeros(num_tokens, *found.shape[1:]).index_copy(0, positions, found))


def score_sequences(
    model: nn.Module,
    batch: TokenBatch,
    inputs: ModelInputs,
    *,
    own_logits: bool,
    routers: RouterRecord | None = None,
    readout: Readout | None = None,
) -> Tensor:
    """[B, L] float32 scores of the rows of `batch`, laid out as `inputs` and read up to their last token.

    Args:
        model: A sequence classifier.
        batch: B rows.
        inputs: Its layout.
        own_logits: Whether the model's own forward scores.
        routers: See `token_logprobs`.
        readout: What reads the scores; None: `sequence_readout`.
    """
    if own_logits:
        inputs = padded_with(inputs, pad_token_id(inner_model(model)))  # by which the model finds the rows' ends
    # The last token of a response is not fed, so the position that would predict it is the last one that is fed.
    markers = torch.tensor([stop - 1 for stop in accumulate(batch.row_lengths)])
    predictors = inputs.predictors[markers.to(batch.device, non_blocking=True)]
    readout = readout or sequence_readout
    scores = read_out(model, inputs, predictors, readout, own_logits=own_logits, routers=routers)["scores"]
    if own_logits:  # one score for each response
        scores = scores[batch.on_device([batch.responses[row][-1] for row in range(batch.num_rows)])]
    return scores


def read_out(
    model: nn.Module,
    inputs: ModelInputs,
    predictors: Tensor,
    readout: Readout,
    *,
    own_logits: bool,
    routers: RouterRecord | None = None,
) -> dict[str, Tensor]:
    """Run the (prepared, possibly wrapped) model on `inputs`; returns the results of `readout`.

    Processes that share a row each read out at the positions of their own part, and all get the combined results.
    """
    width = inputs.input_ids.size(1)
    held, count = None, len(predictors)
    layout = inputs.layout if isinstance(inputs, FlatInputs) else None
    if isinstance(inputs, FlatInputs) and inputs.layout.num_parts > 1:
        predictors = predictors - inputs.start
        held = ((predictors >= 0) & (predictors < width)).nonzero().squeeze(1)
        predictors = predictors[held]
    record = None if routers is None else partial(routers.add, inputs)
    state: ScoringState = getattr(inner_model(model), _STATE)
    routes = None if state.replay is None else state.replay.routes(inputs.routes)
    request = ScoringRequest(predictors, held, width, layout, own_logits, readout, record, routes)
    call = user_model(model).forward if state.is_inside else model
    output: dict[str, Tensor] = call(**inputs.keywords, prefrl_scoring=request)
    if state.replay is not None and routes is not None:
        state.replay.keep(routes)
    if held is None:
        return output
    return {  # [count, ...] at all positions, from the [M, ...] of each process
        name: sum_over_team(found.new_zeros(count, *found.shape[1:]).index_copy(0, held, found))
        for name, found in output.items()
    }


def _score(model: PreTrainedModel, state: ScoringState, request: ScoringRequest, **inputs: Any) -> dict[str, Tensor]:
    """The results as a dict, because wrappers look for tensors in dicts but not in our classes."""
    inputs = {name: value for name, value in inputs.items() if value is not None}
    if request.layout is not None:
        # Empty and 4D: transformers uses a 4D mask as given, so it does not build its own mask of size T x T.
        mask = torch.empty(1, 1, 1, 0, dtype=torch.bool, device=inputs["position_ids"].device)
        inputs = {**inputs, "attention_mask": mask, LAYOUT_KWARG: request.layout}
    if request.routes is not None:
        inputs[ROUTES_KWARG] = request.routes
    options = {"use_cache": False} if request.routers is None else {"use_cache": False, "output_router_logits": True}
    found = (state.original_forward if request.own_logits else model.base_model)(**inputs, **options)
    output: Tensor = found.logits if request.own_logits else found.last_hidden_state
    if request.routers is not None:
        request.routers(model, found, output.shape[:-1].numel())
    if output.dim() == 3:  # PEFT may have put virtual tokens in front of each row
        output = output[:, -request.width :].flatten(0, 1)[request.predictors]
    return request.readout(model, output, request)


@dataclass(frozen=True, eq=False)
class TokenReadout:
    """Log-probs of the tokens that follow the positions."""

    targets: Tensor  # [M] int64, for all requested positions
    temperature: float = 1.0
    want: Collection[WantName] = ()
    cuts: TokenTruncation | None = None
    reference: ReferenceDistribution | None = None

    def __call__(self, model: PreTrainedModel, rows: Tensor, request: ScoringRequest) -> dict[str, Tensor]:
        """See `Readout`; `packed` log-probs, and what is wanted."""
        targets, held = self.targets, request.held
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "want": self.want,
            "truncation": self.cuts,
            "reference": self.reference,
        }
        if held is not None:
            targets = targets[held]
            options |= {name: options[name] and options[name][held] for name in ("truncation", "reference")}
        head: nn.Module | None = None if request.own_logits else getattr(model, _STATE).head
        if head is None:
            return packed(module_logprobs(rows, targets, lambda logits: logits, **options))
        hooks = (*head._forward_pre_hooks.values(), *head._forward_hooks.values())
        # Hooks that are not a backend's expect logits: they must run in a call per chunk.
        if HEAD_FORWARD not in vars(head) or not all(map(is_backend_hook, hooks)):
            return packed(module_logprobs(rows, targets, partial(head_logits, model, head), **options))
        # One call for any number of chunks, so that ranks that gather weights for it make equally many calls.
        scores: dict[str, Tensor] = head(rows, prefrl_readout=partial(_in_head, model, targets, options))
        return scores


def _in_head(
    model: PreTrainedModel, targets: Tensor, options: Mapping[str, Any], head: nn.Module, rows: Tensor
) -> dict[str, Tensor]:
    """What `TokenReadout` computes inside the call of the head."""
    forward = getattr(head, HEAD_FORWARD)
    # Just a weight and a bias: LoRA and quantization have a forward of their own.
    if isinstance(head, nn.Linear) and getattr(forward, "__func__", None) is nn.Linear.forward:
        scale, softcap = getattr(model, _STATE).transform
        linear = Head(head.weight, head.bias, scale=scale, softcap=softcap)
        return packed(chunked_logprobs(rows, targets, linear, **options))
    # Modules inside the head gather their own weights, chunk by chunk.
    num_chunks = int(max_over_ranks([num_chunks_of(rows)], rows.device)[0]) if is_sharded(head) else 1
    return packed(
        module_logprobs(rows, targets, partial(head_logits, model, forward), min_chunks=num_chunks, **options)
    )


def packed(scores: TokenScores, **more: Tensor) -> dict[str, Tensor]:
    """The scores as one tensor [M, K], with the hidden states separate.

    Backends put hooks on the tensors that a call returns, and ZeRO-3 requires that the backward pass reaches equally
    many of them on all ranks. One tensor that every loss reads ensures this, also on ranks without rows.
    """
    columns = [*(found for name, found in scores.wanted.items() if name != "hidden"), *more.values()]
    output = {"packed": torch.stack([scores.logprobs, *(tensor.to(scores.logprobs.dtype) for tensor in columns)], 1)}
    return {**output, "hidden": scores.hidden} if "hidden" in scores.wanted else output


def unpacked(output: Mapping[str, Tensor], want: Collection[str], *more: str) -> tuple[TokenScores, list[Tensor]]:
    """Undo `packed`; `want` names the scores besides log-probs, `more` the tensors that were packed after them."""
    names = [name for name in get_args(ScoreName) if name in want and name != "hidden"]
    columns = dict(zip(["logprobs", *names, *more], output["packed"].unbind(1), strict=True))
    rest = [columns.pop(name) for name in more]
    if "correct" in columns:
        columns["correct"] = columns["correct"] > 0.5
    if "predicted" in columns:
        columns["predicted"] = columns["predicted"].long()
    constants = {"mean_logit", "log_collision", *([] if "entropy_gradient" in want else ["entropy"])}
    for name in constants & columns.keys():
        columns[name] = columns[name].detach()
    return TokenScores.of(**columns, hidden=output.get("hidden")), rest


def head_logits(model: PreTrainedModel, head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """[m, V] logits before temperature: `head` followed by the model's own scaling and softcap."""
    scale, softcap = getattr(model, _STATE).transform
    logits = head(hidden)
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def sequence_readout(model: PreTrainedModel, rows: Tensor, request: ScoringRequest) -> dict[str, Tensor]:
    """See `Readout`; the head's scores at the positions, or the scores of the model's own forward."""
    return {"scores": (rows if request.own_logits else needed_head(model)(rows)).float()}
