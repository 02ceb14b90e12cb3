"""The self-check at first use: find out by trial which plans reproduce a model's own log-probs or scores.

An architecture can ignore our attention in many ways, all of them silently wrong (linear attention, state-space
layers, sinks, windows that exist only in a mask, bidirectional attention). Before the first batch, every plan
therefore scores a few random rows, and the result is compared with one plain forward per response.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefrl.errors import ConfigError
from prefrl.models.attention import interface as attention
from prefrl.models.images import image_rules
from prefrl.models.kernels import without_fp8, without_liger
from prefrl.models.modes import coarsest_dtype, eval_mode, uncompiled
from prefrl.models.plans import FlatInputs, ForwardPlan, ModelInputs, PlanVerdict, lay_out
from prefrl.models.scoring import (
    Readout,
    ScoringRequest,
    TokenReadout,
    inner_model,
    needed_head,
    pad_token_id,
    prepare_for_scoring,
    read_out,
    score_sequences,
    sequence_readout,
    unpacked,
    user_model,
    uses_prompt_learning,
)
from prefrl.types import TokenBatch

_FLAT_PLANS: tuple[ForwardPlan, ...] = ("shared_prefix", "packed")

# Largest and mean absolute difference in nats that rounding can explain, by the coarsest dtype of the pass.
_TOKEN_TOLERANCES = {
    torch.float64: (1e-4, 1e-4),
    torch.float32: (1e-4, 1e-4),
    torch.float16: (0.1, 0.02),
    torch.bfloat16: (0.5, 0.1),
}

# The same for sequences, relative to their size: for the input of the score head, and for the scores. Scores are one
# number per row, in which much can cancel, so they only have to show that the right token is read.
_SEQUENCE_TOLERANCES = {
    torch.float64: (1e-4, 1e-3),
    torch.float32: (1e-4, 1e-3),
    torch.float16: (0.02, 0.1),
    torch.bfloat16: (0.1, 0.5),
}

_NO_EXAMPLE = "the self-check had no row with images: see set_image_example"

# The rows of the check are longer than windows up to this size. For longer windows we only check that attention
# receives them.
_LONGEST_TESTED_WINDOW = 128


def check_plans(model: nn.Module, image_example: TokenBatch | None = None) -> PlanVerdict:
    """Compare every plan with the model's plain forward; our attention stays installed if a flat plan passed.

    It runs without gradients, in eval mode, with token ids from a separate generator, so weights, modes and random
    states do not change. Every call runs the same number of forward passes, so that sharded ranks stay in step. For a
    sequence classifier that is not just a base model with a score head, only its own forward is tried. With Liger's
    kernels, the plain forward must give the same as without them. Products in 8 bits, whose errors are larger than
    what is looked for, are off. Compiled layers run only at the end: the plan that was found must give the same with
    them.

    Raises:
        ConfigError: A sequence classifier needs its own forward, but that forward reads padding; or Liger's kernels
            or torch.compile change what the model computes.
    """
    state = prepare_for_scoring(model)
    with uncompiled() if state.is_compiled else nullcontext(), without_fp8(model):
        verdict = _checked_plans(model, image_example)
    if state.is_compiled:
        _check_compiled(model, verdict)
    return verdict


def _checked_plans(model: nn.Module, image_example: TokenBatch | None) -> PlanVerdict:
    state = prepare_for_scoring(model)
    inner, scores_rows = state.model, state.is_classifier
    bare = user_model(model)  # without gradients there is nothing to synchronize
    foreign = _foreign_parts(inner) if scores_rows else None
    with eval_mode(bare), torch.no_grad():
        attention.uninstall(inner)
        batch = _random_batch(inner)
        example = None if image_example is None else image_example.to(inner.device)
        if state.liger_options is not None:
            _check_kernels(bare, batch)
        if foreign is not None:
            failures, own_logits = [dict.fromkeys(_FLAT_PLANS, foreign)] * 2, True
        else:
            kind = _SequenceProbe if scores_rows else _TokenProbe
            probes = [kind(bare, rows) for rows in (batch, example) if rows is not None]
            failures, own_logits = _compared(inner, probes, _known_limit(model))
        if scores_rows and own_logits:
            _check_own_padding(bare, batch)
    image_reasons = failures[1] if len(failures) > 1 else dict.fromkeys(_FLAT_PLANS, _NO_EXAMPLE)
    return PlanVerdict(failures[0], image_reasons, own_logits, state.fingerprint(model))


def _compared(
    model: PreTrainedModel, probes: Sequence[_Probe], limit: str | None
) -> tuple[list[dict[ForwardPlan, str]], bool]:
    """Why flat plans fail, for each probe; and whether padded rows need the model's own forward, head included.

    If some rows need it, all get it.
    """
    failures = [_failures(probe, limit) for probe in probes]
    without_plan = [probe for probe, failed in zip(probes, failures, strict=True) if len(failed) == len(_FLAT_PLANS)]
    if len(without_plan) < len(probes):
        reason = next((why for probe in without_plan if (why := _failure(probe, "padded")) is not None), None)
        if reason is None:
            return failures, False
        failures = [dict.fromkeys(_FLAT_PLANS, reason) for _ in probes]
    attention.uninstall(model)
    return failures, any(_failure(probe, "padded") is not None for probe in probes)


def _failures(probe: _Probe, limit: str | None) -> dict[ForwardPlan, str]:
    """Why flat plans fail, by plan."""
    inner = inner_model(probe.model)
    if limit is None and not attention.install(inner):
        name = inner.config.get_text_config()._attn_implementation
        limit = f'attn_implementation="{name}" has no flat form; load the model with attn_implementation="sdpa"'
    # Padded rows use the same head and, through our functions, the model's own attention and masks, which generation
    # needs too. If they fail, no flat plan can be used.
    limit = limit or _failure(probe, "padded")
    if limit is not None:
        return dict.fromkeys(_FLAT_PLANS, limit)
    failures = {plan: _failure(probe, plan) for plan in _FLAT_PLANS}
    return {plan: reason for plan, reason in failures.items() if reason is not None}


def _failure(probe: _Probe, plan: ForwardPlan) -> str | None:
    """Why `plan` does not give the model's own results; None if it does."""
    try:
        inputs = lay_out(probe.batch, plan, image_rules(inner_model(probe.model)))
        mistake = probe.mistake(inputs)
    except Exception as error:  # whatever the cause, another plan will be used for this architecture
        return f"{type(error).__name__}: {error}"
    window = _sliding_window(inner_model(probe.model))
    if isinstance(inputs, FlatInputs) and window is not None and window not in inputs.layout.windows:
        return f"its layers do not pass attention their sliding_window={window}"
    return mistake


def _known_limit(model: nn.Module) -> str | None:
    """Why the config rules out flat rows, even if the few random tokens of the check would not show it."""
    inner = inner_model(model)
    config = inner.config.get_text_config()
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other_layers:
        return f"it has layers of type {', '.join(sorted(other_layers))}"
    if getattr(inner, "_is_stateful", False):
        return "it has a recurrent state"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "it soft-caps attention scores (attn_logit_softcapping)"
    if uses_prompt_learning(model):
        return "PEFT prompt learning inserts virtual tokens at the start of each row"
    return None


def _foreign_parts(model: PreTrainedModel) -> str | None:
    """Why a sequence classifier is not just a base model with a `score` head; None if it is.

    Its forward may use anything else that it has, such as a pooler or dropout, between the two.
    """
    parts = {name for name, child in model.named_children() if child is not model.base_model}
    if parts == {"score"}:
        return None
    return f"besides its base model, it has {', '.join(sorted(parts)) or 'no head'}"


def _sliding_window(model: PreTrainedModel) -> int | None:
    """The window of the model's sliding layers; None if it has no such layers."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _random_batch(model: PreTrainedModel) -> TokenBatch:
    """Ragged rows, interleaved, longer than a small sliding window; the last one has two responses.

    They follow a chain of prompts, of which two other rows have the first.
    """
    window = _sliding_window(model)
    base = 8 if window is None or window > _LONGEST_TESTED_WINDOW else window + 3
    prompt_lengths = (base, base + 3, 5, 2)
    response_lengths = (base + 2, 1, 4, 3, base + 5, 2, 6)
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    padding = pad_token_id(model)

    def random_ids(count: int) -> Tensor:
        ids = torch.randint(vocab_size - 1, (count,), generator=generator)
        # A classifier's own forward would ignore a padding token at the end of a row, so avoid that id.
        return ids if padding is None else ids + (ids >= padding).long()

    return TokenBatch(
        prompt_ids=random_ids(sum(prompt_lengths)),
        prompt_lengths=prompt_lengths,
        prompt_parent=(-1, -1, 1, 2),
        prompt_index=(0, 1, 0, 1, 0, 2, 3),
        response_ids=random_ids(sum(response_lengths)),
        response_lengths=response_lengths,
        response_row=(0, 1, 2, 3, 4, 5, 5),
        trainable=torch.ones(sum(response_lengths), dtype=torch.bool),
        group_index=(0, 1, 0, 1, 0, 1),
    ).to(model.device)


def _sequences(batch: TokenBatch) -> Iterator[tuple[Tensor, int]]:
    """The [1, T] token ids of each response after its context, and how many of them are the response."""
    prompts = torch.split(batch.prompt_ids, list(batch.prompt_lengths))
    responses = torch.split(batch.response_ids, list(batch.response_lengths))
    for i, response in enumerate(responses):
        yield torch.cat([*(prompts[prompt] for prompt in batch.contexts[i]), response])[None], len(response)


class _Measured:
    """A readout that remembers the coarsest dtype that its pass computed in."""

    dtype: torch.dtype

    def __init__(self, readout: Readout) -> None:
        self._readout = readout

    def __call__(self, model: PreTrainedModel, rows: Tensor, request: ScoringRequest) -> dict[str, Tensor]:
        self.dtype = coarsest_dtype(model, rows)
        return self._readout(model, rows, request)


class _Probe(Protocol):
    """Rows for which the results of the model's plain forward are known."""

    model: nn.Module
    batch: TokenBatch

    def mistake(self, inputs: ModelInputs) -> str | None:
        """How the results for the batch, laid out as `inputs`, differ; None if they do not."""
        ...


class _TokenProbe:
    """Log-probs of a causal language model."""

    def __init__(self, model: nn.Module, batch: TokenBatch) -> None:
        self.model, self.batch = model, batch
        self._logprobs = _with_images(model, batch) if batch.has_images else self._of_text(model, batch)  # [N]

    def _of_text(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        logprobs = []
        for ids, length in _sequences(batch):
            log_softmax = model(input_ids=ids, use_cache=False).logits[0, -length - 1 : -1].float().log_softmax(-1)
            logprobs.append(log_softmax.gather(-1, ids[0, -length:, None]).squeeze(-1))
        return torch.cat(logprobs)

    def mistake(self, inputs: ModelInputs) -> str | None:
        readout = _Measured(TokenReadout(self.batch.response_ids))
        scores, _ = unpacked(read_out(self.model, inputs, inputs.predictors, readout, own_logits=False), ())
        difference = (scores.logprobs - self._logprobs).abs()
        largest, mean = difference.max().item(), difference.mean().item()
        allowed_largest, allowed_mean = _TOKEN_TOLERANCES[readout.dtype]
        if largest <= allowed_largest and mean <= allowed_mean:
            return None
        return f"its log-probs differ from the plain forward's by up to {largest:.2g} nats"


def _with_images(model: nn.Module, batch: TokenBatch) -> Tensor:
    """[N] log-probs from a plain forward for each row, with the images and arguments of that row alone."""
    rules, logprobs = image_rules(inner_model(model)), []
    for row in range(batch.num_rows):
        one = batch.select([row])
        inputs = lay_out(one, "padded", rules)
        log_softmax = model(**inputs.keywords, use_cache=False).logits.flatten(0, 1).float().log_softmax(-1)
        logprobs.append(log_softmax[inputs.predictors].gather(-1, one.response_ids[:, None]).squeeze(-1))
    return torch.cat(logprobs)


class _SequenceProbe:
    """Scores of a sequence classifier and the inputs of its head, since a new head returns about 0 for any input."""

    def __init__(self, model: nn.Module, batch: TokenBatch) -> None:
        self.model, self.batch = model, batch
        with self._head_inputs() as read:
            self._scores = _own_scores(model, batch)
        self._hidden = torch.cat([hidden.flatten(0, -2)[-1:] for hidden in read])  # [B, h], at each row's last token

    def mistake(self, inputs: ModelInputs) -> str | None:
        readout = _Measured(sequence_readout)
        with self._head_inputs() as read:
            scores = score_sequences(self.model, self.batch, inputs, own_logits=False, readout=readout)
        allowed_hidden, allowed_scores = _SEQUENCE_TOLERANCES[readout.dtype]
        hidden_error = _relative_error(torch.cat(read), self._hidden)
        if not hidden_error <= allowed_hidden:
            return f"its hidden states differ from the plain forward's by up to {hidden_error:.2g} of their size"
        score_error = _relative_error(scores, self._scores)
        if not score_error <= allowed_scores:
            return f"its scores differ from the plain forward's by up to {score_error:.2g} of their size"
        return None

    @contextmanager
    def _head_inputs(self) -> Iterator[list[Tensor]]:
        """Collect the inputs of the score head inside, call by call."""
        head = needed_head(inner_model(self.model))
        read: list[Tensor] = []

        def remember(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            read.append(arguments[0])

        handle = head.register_forward_pre_hook(remember)
        try:
            yield read
        finally:
            handle.remove()


def _own_scores(model: nn.Module, batch: TokenBatch) -> Tensor:
    """[B, L] from a plain forward for the last response of each row, without its marker; with images, the only one."""
    if batch.has_images:
        rules = image_rules(inner_model(model))
        rows = [lay_out(batch.select([row]), "padded", rules).keywords for row in range(batch.num_rows)]
        return torch.cat([model(**inputs, use_cache=False).logits for inputs in rows])
    sequences = [ids for ids, _ in _sequences(batch)]
    ends = [batch.responses[row][-1] for row in range(batch.num_rows)]
    return torch.cat([model(input_ids=sequences[end][:, :-1], use_cache=False).logits for end in ends])


def _check_own_padding(model: nn.Module, batch: TokenBatch) -> None:
    """Check that a classifier's own forward gives padded rows the same scores as single rows."""
    try:
        truth = _own_scores(model, batch)
        readout = _Measured(sequence_readout)
        scores = score_sequences(model, batch, lay_out(batch, "padded"), own_logits=True, readout=readout)
    except Exception:  # some pool at special tokens, which random rows lack; such models raise their own errors
        return
    error = _relative_error(scores, truth)
    if not error <= _SEQUENCE_TOLERANCES[readout.dtype][1]:
        raise ConfigError(
            f"model is a {type(inner_model(model)).__name__}, whose scores change by a relative {error:.2g} if rows "
            "are padded on the right. Use a decoder with a score head, or an encoder that reads the mask."
        )


def _check_kernels(model: nn.Module, batch: TokenBatch) -> None:
    """Check that Liger's kernels compute what the model does: they ignore parts of its config, like `hidden_act`."""
    inner = inner_model(model)
    fused = _last_hidden(model, batch)
    with without_liger(inner):
        error = _relative_error(fused, _last_hidden(model, batch))
    if not error <= _SEQUENCE_TOLERANCES[coarsest_dtype(inner, fused)][0]:
        raise ConfigError(
            f"use_liger_kernel=True: with Liger's kernels, the hidden states of this {type(inner).__name__} change "
            f"by a relative {error:.2g}. Leave it False, or leave the kernel that differs out of liger_kernel_config."
        )


def _check_compiled(model: nn.Module, verdict: PlanVerdict) -> None:
    """Check that compiled layers compute what the model does, with rows laid out as they will be.

    What is compared is the output of the layers, or of the model's own forward if that is what scores.
    """
    inner, bare = inner_model(model), user_model(model)
    batch = _random_batch(inner)
    inputs = lay_out(batch, "padded" if "packed" in verdict.reasons else "packed")
    try:
        with eval_mode(bare), torch.no_grad():
            compiled = _read_hidden(bare, inputs, own_logits=verdict.own_logits)
            with uncompiled():
                eager = _read_hidden(bare, inputs, own_logits=verdict.own_logits)
    except Exception as error:
        cause = " ".join(str(error).partition("\n\n")[0].split())  # without torch's advice to its developers
        raise ConfigError(
            f"torch_compile=True: the layers of {type(inner).__name__} cannot be compiled here: "
            f"{type(error).__name__}: {cause}. Set it to False, or choose another torch_compile_backend."
        ) from error
    change = _relative_error(compiled, eager)
    if not change <= _SEQUENCE_TOLERANCES[coarsest_dtype(inner, compiled)][0]:
        raise ConfigError(
            f"torch_compile=True: when compiled, the outputs of {type(inner).__name__} change by a relative "
            f"{change:.2g}. Set it to False, or choose another torch_compile_backend."
        )


def _read_hidden(model: nn.Module, inputs: ModelInputs, *, own_logits: bool) -> Tensor:
    """[N, h] what a pass gives to its readout, at the positions that predict responses."""

    def readout(model: PreTrainedModel, rows: Tensor, request: ScoringRequest) -> dict[str, Tensor]:
        return {"output": rows}

    hidden: Tensor = read_out(model, inputs, inputs.predictors, readout, own_logits=own_logits)["output"]
    return hidden


def _last_hidden(model: nn.Module, batch: TokenBatch) -> Tensor:
    """[tokens, h] inputs of the head, from a plain forward for each response."""
    rows: list[Tensor] = []

    def remember(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        rows.append(output.last_hidden_state[0])

    handle = inner_model(model).base_model.register_forward_hook(remember)
    try:
        for ids, _ in _sequences(batch):
            model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    return torch.cat(rows)


def _relative_error(rows: Tensor, truth: Tensor) -> float:
    """Largest norm of a row's error, relative to the root mean square norm; NaN stays NaN."""
    errors, norms = (rows.float() - truth.float()).norm(dim=1), truth.float().norm(dim=1)
    size = norms.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return float(errors.max() / size)
