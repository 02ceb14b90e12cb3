"""Attention over one flat row of many sequences, as functions that transformers' AttentionInterface calls.

The tokens of a flat row form a forest of segments, see `Layout`. The layout is passed as a keyword argument of the
model's forward, down to the attention function. Gradient checkpointing then passes it again when it recomputes a
layer, where a global variable would be stale. Without that argument, our functions call the implementation that they
replace. On CUDA a single kernel computes attention over the forest where one is available, see `kernels`; elsewhere it
is computed segment by segment.

If the processes of a team share a row, each holds some tokens of all heads. For attention they exchange them, so that
each holds all tokens of some heads, and exchange back afterwards (Ulysses).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prefrl.distributed import exchange_in_team
from prefrl.models.attention import segments
from prefrl.models.attention.choice import Inputs, choose_kernel
from prefrl.models.attention.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["LAYOUT_KWARG", "Layout", "install", "is_installed", "mask_placeholder", "uninstall"]

# The keyword argument of the model's forward that carries the layout.
LAYOUT_KWARG = "prefrl_layout"

# Attention implementation that a model was loaded with -> our replacement.
_OUR_NAME = {"sdpa": "prefrl_sdpa", "eager": "prefrl_eager"}
_REPLACED_NAME = {ours: replaced for replaced, ours in _OUR_NAME.items()}

# Arguments by which some models change what attention computes. We do not implement them.
_UNSUPPORTED_KWARGS = ("softcap", "s_aux", "position_bias", "cache", "head_mask")


def mask_placeholder(device: torch.device) -> Tensor:
    """An empty 4D mask. transformers uses a 4D mask as given, so it does not build its own mask of size T x T."""
    return torch.empty(1, 1, 1, 0, dtype=torch.bool, device=device)


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


_AttentionResult = tuple["Tensor", "Tensor | None"]


def _attention_or_flat(
    replaced: Callable[..., _AttentionResult],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> _AttentionResult:
    layout: Layout | None = kwargs.pop(LAYOUT_KWARG, None)
    is_placeholder = isinstance(attention_mask, torch.Tensor) and attention_mask.numel() == 0
    if layout is None:
        if is_placeholder:
            raise ValueError(f"{type(module).__name__} got no {LAYOUT_KWARG}: the model does not pass it on")
        return replaced(module, query, key, value, attention_mask, **kwargs)
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


def _sdpa_or_flat(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> _AttentionResult:
    replaced = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return _attention_or_flat(replaced, module, query, key, value, attention_mask, kwargs)


def _eager_or_flat(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> _AttentionResult:
    # Eager attention is not in the registry: each modeling file has its own function of this name.
    replaced = sys.modules[type(module).__module__].eager_attention_forward
    return _attention_or_flat(replaced, module, query, key, value, attention_mask, kwargs)


# The layout changes with every step: compiled layers call these functions as they are.
AttentionInterface.register(_OUR_NAME["sdpa"], torch.compiler.disable(_sdpa_or_flat))  # type: ignore[no-untyped-call]
AttentionInterface.register(_OUR_NAME["eager"], torch.compiler.disable(_eager_or_flat))  # type: ignore[no-untyped-call]
AttentionMaskInterface.register(_OUR_NAME["sdpa"], sdpa_mask)
AttentionMaskInterface.register(_OUR_NAME["eager"], eager_mask)


def install(model: PreTrainedModel) -> bool:
    """Let the model's attention understand layouts. Returns False, and changes nothing, if it is not sdpa or eager.

    Keep it installed: checkpointed layers read the implementation's name again in the backward pass.
    """
    _rename(model, _OUR_NAME)
    return is_installed(model)


def uninstall(model: PreTrainedModel) -> None:
    """Restore the attention implementation that the model had before `install`."""
    _rename(model, _REPLACED_NAME)


def is_installed(model: PreTrainedModel) -> bool:
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
