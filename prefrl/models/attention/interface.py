"""Attention over one flat row of many sequences, as functions that transformers' AttentionInterface calls.

The tokens of a flat row form a forest of segments, see `Layout`. The layout is passed as a keyword argument of the
model's forward, down to the attention function. Gradient checkpointing then passes it again when it recomputes a
layer, where a global variable would be stale. Without that argument, our functions call the implementation that they
replace. On CUDA a single kernel computes attention over the forest: the first one that supports the inputs and passed
its trial. Elsewhere it is computed segment by segment.

If the processes of a team share a row, each holds some tokens of all heads. For attention they exchange them, so that
each holds all tokens of some heads, and exchange back afterwards (Ulysses).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import gcd
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prefrl.distributed import exchange_in_team, is_main
from prefrl.models.attention import block_mask, segments, varlen
from prefrl.models.attention.segments import Layout

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)

# Largest relative error of one head at one token, compared with segment-by-segment attention in float32. A kernel that
# computes something else has an error of about 1; TF32 products are meant to pass.
_TOLERANCES = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.1}

# Two forests, since a compiled kernel may be recompiled for the second; lengths below and above a block of 128. In the
# second, queries see several whole blocks, and between the queries that see a part of a block some see all of it.
_TRIALS = (
    ((130, -1), (40, 0), (1, 0), (90, 0), (33, -1)),
    ((7, -1), (200, 0), (3, 1), (150, 2), (30, 1), (20, 0), (1, -1), (600, 6), (40, -1)),
)
_TRIAL_WINDOWS = (None, 20)
# The most copies of keys for each token that the variable-length kernel makes of deep forests.
_MOST_COPIES = 8


@dataclass(frozen=True, slots=True)
class Inputs:
    """The properties of inputs that decide whether a kernel supports them."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scaling: float | None  # included because it is compiled into kernels

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Inputs:
        """From query [1, H, T, D], key [1, KV, T, D] and value [1, KV, T, E]."""
        return cls(query.device, query.dtype, query.size(1), key.size(1), query.size(3), value.size(3), scaling)


class Attend(Protocol):
    """Flat attention without dropout; arguments as in `attention.flat_attention`."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scaling: float | None, window: int | None
    ) -> Tensor:
        """[1, T, H, E]."""
        ...


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute flat attention."""

    name: str
    attend: Attend
    serves: Callable[[Inputs], bool]
    suits: Callable[[Layout], bool] = lambda layout: True
    needs_cuda: bool = False


def _is_for_varlen(inputs: Inputs) -> bool:
    return (
        inputs.dtype in (torch.float16, torch.bfloat16)
        and inputs.key_size == inputs.value_size
        and inputs.key_size % 8 == 0
        and inputs.key_size <= 256
        and varlen.kernel() is not None
    )


def _copies_little(layout: Layout) -> bool:
    """Whether the copies of all ancestors' keys, which the variable-length kernel makes for each segment, are few.

    In a long episode each turn copies the whole history: 31 times the tokens with 50 turns. A group of completions
    copies its prompt, which has always been worth it.
    """

    def count() -> bool:
        segments = layout.segments
        is_deep = any(len(segment.ancestors) > 1 for segment in segments)
        num_keys = sum(segment.position + segment.length for segment in segments)
        return not is_deep or num_keys <= _MOST_COPIES * sum(layout.lengths)

    return layout.once("copies little", count)


def _has_fast_causal_attention(inputs: Inputs) -> bool:
    """Whether torch computes plain causal attention by cuDNN: from compute capability 9.0 on, in half precision."""
    return (
        _is_for_varlen(inputs)
        and inputs.key_size <= 128
        and torch.version.hip is None
        and torch.cuda.get_device_capability(inputs.device) >= (9, 0)
    )


def _attend_long(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scaling: float | None, window: int | None
) -> Tensor:
    attend = segments.attend if window is None else varlen.attend
    return attend(query, key, value, layout, scaling=scaling, window=window)


# In order of preference. The first two need no compilation but support half precision only: on an H200, cuDNN needs
# 60 % of FlashAttention 2's time for causal sequences of 9,216 tokens. The third is compiled at first use. The last
# launches kernels for each segment; it works everywhere and is the reference for the others.
KERNELS = (
    Kernel("long-segments", _attend_long, _has_fast_causal_attention, segments.is_long, needs_cuda=True),
    Kernel(
        "variable-length",
        varlen.attend,
        _is_for_varlen,
        lambda layout: not layout.blocks and _copies_little(layout),
        needs_cuda=True,
    ),
    Kernel("block-mask", block_mask.attend, lambda inputs: inputs.dtype in _TOLERANCES, needs_cuda=True),
    Kernel("segment-by-segment", segments.attend, lambda inputs: True),
)


def choose_kernel(inputs: Inputs, layout: Layout, kernels: Sequence[Kernel] = KERNELS) -> Kernel:
    """The first of `kernels` that supports `inputs`, suits the layout and passed its trial; the last one needs none.

    A kernel is tried once for each kind of inputs, and the trial waits for the device. A failure is logged once.
    """
    *tried, last = kernels
    if inputs.device.type != "cuda":
        tried = [kernel for kernel in tried if not kernel.needs_cuda]
    return next((k for k in tried if k.serves(inputs) and k.suits(layout) and _passes(k, inputs)), last)


@cache
def _passes(kernel: Kernel, inputs: Inputs) -> bool:
    # A fresh thread has default settings, so the context of a model's first forward pass (autocast, no_grad, gradient
    # checkpointing hooks that count saved tensors) neither affects the trial nor is affected by it.
    with ThreadPoolExecutor(1, thread_name_prefix="prefrl-trial") as pool:
        mistake = pool.submit(_mistake, kernel, inputs).result()
    if mistake is not None and is_main():
        logger.warning("Attention of flat rows does not use its %s kernel for %s: %s", kernel.name, inputs, mistake)
    return mistake is None


def _mistake(kernel: Kernel, inputs: Inputs) -> str | None:
    """What is wrong with the kernel's outputs or gradients on small random inputs; None if nothing is.

    Raises:
        OutOfMemoryError: The device is out of memory, which says nothing about the kernel.
        AcceleratorError: The kernel has left the device in a state in which no other kernel can run.
    """
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    try:
        # Compilation may draw random numbers, which must not affect the training run. Triton launches kernels on the
        # current GPU, which in a fresh thread is the first one.
        with torch.random.fork_rng(devices), torch.cuda.device(inputs.device) if devices else nullcontext():
            trials = product(_TRIALS, _TRIAL_WINDOWS)
            largest = max(error for forest, window in trials for error in _errors(kernel, inputs, forest, window))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # missing compiler, unsupported head size or chip: another kernel is used
        if devices:  # after some errors a process can use its device no more: this raises them again
            torch.cuda.synchronize(inputs.device)
        return f"{type(error).__name__}: {error}"
    if largest <= _TOLERANCES[inputs.dtype]:
        return None
    return f"it differs from segment-by-segment attention by up to {largest:.2g} of the values' size"


def _errors(
    kernel: Kernel, inputs: Inputs, forest: tuple[tuple[int, int], ...], window: int | None
) -> Iterator[float]:
    """Relative errors of the output, of the gradients, and of the output without gradients."""
    query, key, value = _random_tensors(inputs, Layout(forest))
    exact = [x.detach().float().requires_grad_() for x in (query, key, value)]
    expected = segments.attend(exact[0], exact[1], exact[2], Layout(forest), scaling=inputs.scaling, window=window)
    layout = Layout(forest)
    output = kernel.attend(query, key, value, layout, scaling=inputs.scaling, window=window)
    yield _relative_error(output, expected)
    weights = torch.linspace(-1, 1, output.size(1), device=output.device)[:, None, None]
    grads = torch.autograd.grad((output * weights).sum(), (query, key, value))
    for grad, expected_grad in zip(grads, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        yield _relative_error(grad, expected_grad)
    with torch.no_grad():
        query, key, value = (x.detach() for x in (query, key, value))
        output = kernel.attend(query, key, value, layout, scaling=inputs.scaling, window=window)
        yield _relative_error(output, expected)


def _random_tensors(inputs: Inputs, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; the heads of a token are contiguous in memory, as projections produce them."""
    generator = torch.Generator().manual_seed(0)

    def tensor(num_heads: int, size: int) -> Tensor:
        values = torch.randn(1, sum(layout.lengths), num_heads, size, generator=generator)
        return values.to(inputs.device, inputs.dtype).transpose(1, 2).requires_grad_()

    heads, kv_heads = inputs.num_heads, inputs.num_kv_heads
    return tensor(heads, inputs.key_size), tensor(kv_heads, inputs.key_size), tensor(kv_heads, inputs.value_size)


def _relative_error(vectors: Tensor, truth: Tensor) -> float:
    """Largest norm of a vector's error, relative to its norm plus the root mean square norm; infinite for NaN."""
    error = (vectors.detach().float() - truth.detach()).norm(dim=-1)
    norm = truth.detach().norm(dim=-1)
    largest = float((error / (norm + norm.square().mean().sqrt())).max())
    return largest if largest == largest else float("inf")


# The keyword argument of the model's forward that carries the layout.
LAYOUT_KWARG = "prefrl_layout"

# Attention implementation that a model was loaded with -> our replacement.
_OUR_NAME = {"sdpa": "prefrl_sdpa", "eager": "prefrl_eager"}
_REPLACED_NAME = {ours: replaced for replaced, ours in _OUR_NAME.items()}

# Arguments by which some models change what attention computes. We do not implement them.
_UNSUPPORTED_KWARGS = ("softcap", "s_aux", "position_bias", "cache", "head_mask")


def flat_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Attention over a flat row: every token sees the ancestors of its segment, and the segment up to itself.

    Args:
        query: [1, H, T, D]; if processes share the row, this process's part of the tokens.
        key: [1, KV, T, D] with KV dividing H.
        value: [1, KV, T, D].
        layout: Of all tokens of the row.
        scaling: Factor on the scores; None means D^-0.5.
        dropout: Dropout probability of the attention weights.
        window: A token sees at most this many tokens, itself included; distances are measured along the path from the
            root.
    Returns:
        [1, T, H, D].
    """
    device = query.device.type
    # Once instead of in each segment. A causal bias also needs inputs of one dtype to find its kernel.
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
    if layout.num_parts > 1:
        # If there are fewer key heads than processes, each key head is copied to all processes that read it.
        copies = layout.num_parts // gcd(layout.num_parts, key.size(1))
        key, value = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (key, value))
        query, key, value = (exchange_in_team(x, split=1, join=2) for x in (query, key, value))
    if window is not None and window >= layout.longest:
        window = None
    if dropout > 0:  # the only kernel with dropout
        output = segments.attend(query, key, value, layout, scaling=scaling, window=window, dropout=dropout)
    else:
        kernel = choose_kernel(Inputs.of(query, key, value, scaling), layout)
        output = kernel.attend(query, key, value, layout, scaling=scaling, window=window)
    return output if layout.num_parts == 1 else exchange_in_team(output, split=1, join=2)


_Attention = Callable[..., tuple["Tensor", "Tensor | None"]]


# The layout changes with every step: compiled layers call this as it is.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention_or_flat(
    replaced: Callable[[nn.Module], _Attention],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Flat attention if the model was given a layout, otherwise what is replaced in this module."""
    layout: Layout | None = kwargs.pop(LAYOUT_KWARG, None)
    is_placeholder = isinstance(attention_mask, torch.Tensor) and attention_mask.numel() == 0
    if layout is None:
        if is_placeholder:
            raise ValueError(f"{type(module).__name__} got no {LAYOUT_KWARG}: the model does not pass it on")
        return replaced(module)(module, query, key, value, attention_mask, **kwargs)
    unsupported = [name for name in _UNSUPPORTED_KWARGS if kwargs.get(name) is not None]
    if attention_mask is not None and not is_placeholder:
        unsupported.append("attention_mask")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        unsupported.append("is_causal=False")
    if unsupported:
        raise ValueError(f"{type(module).__name__} uses {', '.join(unsupported)}")
    window: int | None = kwargs.get("sliding_window")
    layout.windows.add(window)
    output = flat_attention(
        query,
        key,
        value,
        layout,
        scaling=kwargs.get("scaling"),
        dropout=kwargs.get("dropout", 0.0),
        window=window,
    )
    return output, None


_sdpa_or_flat = partial(_attention_or_flat, lambda _: ALL_ATTENTION_FUNCTIONS["sdpa"])
# Eager attention is not in the registry: each modeling file has its own function of this name.
_eager_or_flat = partial(
    _attention_or_flat, lambda module: sys.modules[type(module).__module__].eager_attention_forward
)
AttentionInterface.register(_OUR_NAME["sdpa"], _sdpa_or_flat)
AttentionInterface.register(_OUR_NAME["eager"], _eager_or_flat)
AttentionMaskInterface.register(_OUR_NAME["sdpa"], sdpa_mask)
AttentionMaskInterface.register(_OUR_NAME["eager"], eager_mask)


def install(model: PreTrainedModel) -> bool:
    """Let the model's attention understand layouts. Returns False, and changes nothing, if it is not sdpa or eager.

    Keep it installed: checkpointed layers read the implementation's name again in the backward pass.
    """
    _rename(model, _OUR_NAME)
    return reads_layouts(model)


def uninstall(model: PreTrainedModel) -> None:
    """Restore the attention implementation that the model had before `install`."""
    _rename(model, _REPLACED_NAME)


def reads_layouts(model: PreTrainedModel) -> bool:
    """Whether the model's attention understands layouts."""
    return model.config.get_text_config()._attn_implementation in _REPLACED_NAME


def _rename(model: PreTrainedModel, new_name: Mapping[str, str]) -> None:
    for config in _configs(model):
        if config._attn_implementation in new_name:
            # A dict with the key "" sets this config only; its sub-configs are set in their own iterations.
            config._attn_implementation = {"": new_name[config._attn_implementation]}


def _configs(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    """Every config object that a module reads, once, without those of a vision tower, which sees no flat rows."""
    seen: set[int] = set()
    kinds = {model.config.model_type, model.config.get_text_config().model_type}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and id(config) not in seen and config.model_type in kinds:
            seen.add(id(config))
            yield config
