"""Attention over one flat row of many sequences, as functions that transformers' AttentionInterface calls.

The tokens of a flat row form trees: a trunk that attends to itself, then branches that each attend to the trunk and to
themselves, never to each other. A tree without branches is an ordinary sequence. The trees travel as a `Layout` in a
keyword argument of the model's forward, down to the attention function: gradient checkpointing passes it again when it
recomputes a layer, where a global variable would be stale. Without that argument our functions are the implementation
that they replace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["LAYOUT_KWARG", "Layout", "Tree", "install", "is_installed", "mask_placeholder", "uninstall"]

# The keyword argument of the model's forward that carries the layout.
LAYOUT_KWARG = "prefrl_layout"

# Implementation that a model was loaded with -> ours, which replaces it.
_OUR_NAME = {"sdpa": "prefrl_sdpa", "eager": "prefrl_eager"}
_REPLACED_NAME = {ours: replaced for replaced, ours in _OUR_NAME.items()}

# Arguments with which some models change what attention computes; we do not implement them.
_UNSUPPORTED_KWARGS = ("softcap", "s_aux", "position_bias", "cache", "head_mask")

# Queries that share one explicit mask: bounds a mask's memory to this many rows.
_ROWS_PER_MASK = 512


@dataclass(frozen=True, slots=True)
class Tree:
    """Lengths, in flat order: a trunk, then branches that each attend to the trunk and themselves."""

    trunk: int
    branches: tuple[int, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of all segments, trunk first."""
        return (self.trunk, *self.branches)


@dataclass(frozen=True, eq=False)
class Layout:
    """The trees of a flat row, end to end."""

    trees: tuple[Tree, ...]
    # Sliding windows that attention layers asked for: what the self-check reads.
    windows: set[int | None] = field(default_factory=set)
    _masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        """Of all segments, in flat order."""
        return [length for tree in self.trees for length in tree.lengths]

    @property
    def longest(self) -> int:
        """Keys that a query can see at most: trunk and longest branch."""
        return max(tree.trunk + max(tree.branches, default=0) for tree in self.trees)

    def mask(self, rows: int, keys: int, window: int | None, like: Tensor) -> Tensor:
        """[rows, keys] to add to scores of the last `rows` of `keys` positions; a view of one for all segments."""
        before, key = self.longest, (window, like.dtype, like.device)
        if key not in self._masks:
            most_rows = min(before, _ROWS_PER_MASK)
            distance = torch.arange(most_rows)[:, None] - torch.arange(-before, most_rows)
            distance = distance.to(like.device, non_blocking=True)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            zeros = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self._masks[key] = zeros.masked_fill_(hidden, float("-inf"))
        return self._masks[key][:rows, before - (keys - rows) : before + rows]


def mask_placeholder(device: torch.device) -> Tensor:
    """An empty 4D mask: transformers takes a 4D mask as it is, so it builds none of its own, which would be T x T."""
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
    """Attention of a flat row: every token sees its own segment up to itself and, in a branch, the trunk before it.

    Args:
        query: [1, H, T, D].
        key: [1, KV, T, D] with KV dividing H.
        value: [1, KV, T, D].
        layout: Trees of T tokens together.
        scaling: Factor on the scores; None is D^-0.5.
        dropout: Probability, on the attention weights.
        window: A token sees at most this many tokens, itself included; distances run along trunk and branch.
    Returns:
        [1, T, H, D].
    """
    lengths = layout.lengths
    query, key, value = (_as_autocast_would(x) for x in (query, key, value))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        pieces = _visible(q, k, v, layout, window)
        return [_sdpa(*piece, scale=scaling, dropout=dropout).transpose(1, 2) for piece in pieces]

    outputs: list[Tensor] = []
    segments = zip(*(torch.split(x, lengths, dim=2) for x in (query, key, value)), strict=True)
    for tree in layout.trees:
        q, trunk_key, trunk_value = next(segments)
        outputs += attend(q, trunk_key, trunk_value)
        for _ in tree.branches:
            q, own_key, own_value = next(segments)
            outputs += attend(q, torch.cat([trunk_key, own_key], 2), torch.cat([trunk_value, own_value], 2))
    return torch.cat(outputs, dim=1)


def _as_autocast_would(tensor: Tensor) -> Tensor:
    """Cast once, not in each segment; and a causal bias needs inputs of one dtype to find its kernel."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


_Piece = tuple["Tensor", "Tensor", "Tensor", "Tensor | None"]


def _visible(q: Tensor, k: Tensor, v: Tensor, layout: Layout, window: int | None) -> Iterator[_Piece]:
    """The queries, in order, with the keys and values that they may see; the mask is None for plain causal attention.

    Queries are the last positions of the keys.
    """
    num_queries, num_keys = q.size(2), k.size(2)
    if window is not None and window >= num_keys:
        window = None
    if window is None and num_queries == num_keys:
        yield q, k, v, None
    elif window is None and q.is_cuda:
        yield q, k, v, causal_lower_right(num_queries, num_keys)
    else:
        first = num_keys - num_queries
        for rows in torch.split(q, _ROWS_PER_MASK, dim=2):
            last = first + rows.size(2)
            start = 0 if window is None else max(0, first + 1 - window)
            visible = slice(start, last)
            yield rows, k[:, :, visible], v[:, :, visible], layout.mask(rows.size(2), last - start, window, q)
            first = last


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None, dropout: float) -> Tensor:
    if q.is_cuda and mask is not None and k.size(1) != q.size(1):
        # CUDA's fast kernels take a mask or grouped heads, not both.
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=k.size(1) != q.size(1),
    )


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


AttentionInterface.register(_OUR_NAME["sdpa"], _sdpa_or_flat)
AttentionInterface.register(_OUR_NAME["eager"], _eager_or_flat)
AttentionMaskInterface.register(_OUR_NAME["sdpa"], sdpa_mask)
AttentionMaskInterface.register(_OUR_NAME["eager"], eager_mask)


def install(model: PreTrainedModel) -> bool:
    """Let the model's attention understand layouts; False if it is neither sdpa nor eager, and then left as it is.

    It is meant to stay: checkpointed layers read the implementation's name again in the backward pass.
    """
    _rename(model, _OUR_NAME)
    return is_installed(model)


def uninstall(model: PreTrainedModel) -> None:
    """Give the model the attention back that it had before `install`."""
    _rename(model, _REPLACED_NAME)


def is_installed(model: PreTrainedModel) -> bool:
    """Whether the model's attention understands layouts."""
    return model.config.get_text_config()._attn_implementation in _REPLACED_NAME


def _rename(model: PreTrainedModel, new_name: Mapping[str, str]) -> None:
    for config in _configs(model):
        if config._attn_implementation in new_name:
            # The dict with the key "" sets this config and leaves its sub-configs to their own turn.
            config._attn_implementation = {"": new_name[config._attn_implementation]}


def _configs(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    """Every config object that a module reads, once."""
    seen: set[int] = set()
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and id(config) not in seen:
            seen.add(id(config))
            yield config
