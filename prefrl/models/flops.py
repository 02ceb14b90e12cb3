"""Floating-point operations (FLOPs) of a training step: the minimum that its rows need, and those executed.

Both count matrix products only, with 2 operations for each multiply-add; element-wise operations are left out.

Take a group of rows with a prompt of P tokens, and responses of which T_i tokens are fed to the model (all but the
last, whose output is not needed) and M_i are scored. With n weights in the linear layers, hidden size h, vocabulary V,
L layers and a = heads * head size, a forward pass needs at least

    F = 2 n (P + sum T_i) + 2 h V sum M_i + 2 a L [P^2 + sum((P + T_i)^2 - P^2)]

because the prompt is computed once for all its responses, and a token attends only to tokens before it, in layers with
a sliding window only to those in the window. A prompt of L tokens that continues C others adds L tokens and
(C + L)^2 - C^2 pairs. The backward pass needs F for the gradients of inputs and F for those of
weights, where they are required: 3 F in total if everything is trained. A pass without gradients needs F.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from prefrl.distributed import is_sharded, shape_of
from prefrl.errors import ConfigError
from prefrl.models.modes import eval_mode
from prefrl.models.scoring import inner_model, is_classifier, needed_head
from prefrl.types import IdleBatch, TokenBatch

_ATTENTION = ("sdpa", "eager", "prefrl_sdpa", "prefrl_eager")
_LAYER_TYPES = ("full_attention", "sliding_attention")

# Tokens in the tracing pass, which shows which layers run and which of them have gradients.
_TRACED_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Products:
    """FLOPs of some matrix products."""

    forward: float
    backward: float  # for the gradients that are required
    recomputed: float = 0.0  # run once more by activation checkpointing


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The minimum cost of a model's matrix products."""

    token: Products  # linear layers, per token fed
    position: Products  # the head, per position scored
    # Attention, per pair of a query and a key visible to it, over all layers with that window; None: no window.
    pair: Mapping[int | None, Products]
    scores_rows: bool  # a row has one scored position instead of one per trainable token


def floor_flops(
    cost: ModelCost, batches: Sequence[TokenBatch], *, trains: bool, recomputed_share: float = 0.0
) -> float:
    """Minimum FLOPs of one pass over some rows, see the module's formula.

    Rows of one group that begin with equally long prompts count as having the same prompt, even if they are in several
    batches.

    Args:
        cost: Cost of the model.
        batches: The rows, split in any way. Idle batches need nothing.
        trains: Whether the pass has gradients.
        recomputed_share: Share of the layers that activation checkpointing recomputes in backward. The head is not
            counted again.

    Returns:
        FLOPs.
    """
    batches = [batch for batch in batches if not isinstance(batch, IdleBatch)]

    def total(products: Products) -> float:
        return products.forward + trains * (products.backward + recomputed_share * products.recomputed)

    segments = _fed_segments(batches)
    positions = sum(batch.num_rows if cost.scores_rows else batch.num_trainable for batch in batches)
    flops = sum(length for _, length in segments) * total(cost.token) + positions * total(cost.position)
    for window, products in cost.pair.items():
        pairs = sum(_pairs(before + length, window) - _pairs(before, window) for before, length in segments)
        flops += pairs * total(products)
    return flops


def _fed_segments(batches: Sequence[TokenBatch]) -> list[tuple[int, int]]:
    """The prompts, each once, and what is fed of the responses: the number of tokens before each, and its own."""
    roots: set[tuple[int, int]] = set()  # group and length
    segments: list[tuple[int, int]] = []
    for batch in batches:
        for i, (row, length) in enumerate(zip(batch.response_row, batch.response_lengths, strict=True)):
            roots.add((batch.group_index[row], batch.prompt_lengths[batch.contexts[i][0]]))
            segments.append((batch.context_lengths[i], length - 1))
        prompts = zip(batch.prompt_stops, batch.prompt_lengths, strict=True)
        segments += [(stop - length, length) for stop, length in prompts if stop > length]
    return [*((0, length) for _, length in roots), *segments]


def _pairs(length: int, window: int | None) -> float:
    """Visible query-key pairs in a sequence, to within half a pair per query; length^2 / 2 without a window."""
    inside = length if window is None else min(length, window)
    return (length - inside / 2) * inside


def recomputed_share(model: nn.Module) -> float:
    """Share of the layers under activation checkpointing."""
    layers = _layers(inner_model(model))
    return [layer.gradient_checkpointing for layer in layers].count(True) / len(layers)


def model_cost(model: nn.Module, *, with_adapter: bool = True) -> ModelCost:
    """Cost of a model's matrix products, determined from one pass over two tokens with gradients.

    The pass shows which linear layers run and which of their inputs have a gradient: none below the lowest trained
    weight. Parameters are not changed and get no gradient.

    Args:
        model: A causal language model or sequence classifier, optionally wrapped in PEFT or DDP.
        with_adapter: Count LoRA's products, too.

    Raises:
        ConfigError: The formula does not hold for the model, or the counter would miss operations.
    """
    inner = inner_model(model)
    reason = _unknown(inner)
    if reason is not None:
        raise ConfigError(
            f"log_flops=True: the minimum number of operations of a {type(inner).__name__} is unknown: {reason}. Set "
            "log_flops=False; step times are logged without it."
        )
    trace = _traced(inner, with_adapter=with_adapter)
    return ModelCost(
        token=trace.blocks,
        position=trace.head,
        pair=_attention(inner, trace.layers_with_gradient),
        scores_rows=is_classifier(inner),
    )


def num_weights(model: PreTrainedModel) -> int:
    """Number of weights outside embeddings, partitioned ones included; for quantized weights, the stored elements."""
    embedded = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    return sum(shape_of(parameter).numel() for parameter in model.parameters() if id(parameter) not in embedded)


def _unknown(model: PreTrainedModel) -> str | None:
    """Why the formula does not hold; None if it does."""
    config = model.config.get_text_config()
    if model.device.type != "cpu":
        return f"the counter does not see the attention kernels of device {model.device}"
    if is_sharded(model):
        return "its weights are partitioned over processes while it is loaded"
    if getattr(model, "is_quantized", False):
        return "its weights are quantized, and products of quantized weights are not counted"
    if config._attn_implementation not in _ATTENTION:
        return f'the counter does not see attn_implementation="{config._attn_implementation}"'
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        return "its attention looks in both directions"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "its keys and values are compressed (kv_lora_rank)"
    other_layers = set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES)
    if other_layers:
        return f"it has layers of type {', '.join(sorted(other_layers))}"
    if len(_layers(model)) != config.num_hidden_layers:
        return f"not all of its {config.num_hidden_layers} layers were found"
    return _odd_part(model.base_model)


def _odd_part(model: nn.Module) -> str | None:
    """A module whose weights are not multiplied exactly once with every token; None if there is none."""
    for name, _ in model.named_modules():
        if "experts" in name:
            return f"{name} run for some tokens only"
    for name, module in model.named_modules():
        has_matrix = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        if has_matrix and not isinstance(module, nn.Linear | nn.Embedding | Conv1D):
            return f"{name} has weights but is no linear layer"
    return None


def _layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [module for module in model.base_model.modules() if isinstance(module, GradientCheckpointingLayer)]


@dataclass
class _Trace:
    """What the tracing pass ran, in order."""

    linear: list[tuple[nn.Module, Products]] = field(default_factory=list)
    layers_with_gradient: list[bool] = field(default_factory=list)  # whether the layer's input has a gradient
    last_of_layer: set[int] = field(default_factory=set)  # indices into `linear`
    num_of_blocks: int = 0  # entries of `linear` before the head

    def note_linear(self, module: nn.Module, arguments: tuple[Tensor, ...], _: object) -> None:
        weight: Tensor = module.weight  # type: ignore[assignment]
        rows = arguments[0].numel() // (weight.shape[0] if isinstance(module, Conv1D) else weight.shape[1])
        forward = 2.0 * weight.numel() * rows / _TRACED_TOKENS
        wanted = arguments[0].requires_grad + weight.requires_grad
        self.linear.append((module, Products(forward, forward * wanted)))

    def note_start(self, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = [*arguments, *options.values()]
        self.layers_with_gradient.append(any(isinstance(x, torch.Tensor) and x.requires_grad for x in given))

    def note_end(self, *_: object) -> None:
        self.last_of_layer.add(len(self.linear) - 1)

    @property
    def blocks(self) -> Products:
        """Linear layers before the head, per token."""
        each = [products for _, products in self.linear[: self.num_of_blocks]]
        # The backward pass needs the inputs of a layer's products, so the output of the last one is not recomputed.
        again = [x.forward for i, x in enumerate(each) if i not in self.last_of_layer]
        return Products(sum(x.forward for x in each), sum(x.backward for x in each), sum(again))

    @property
    def head(self) -> Products:
        """The head, per position."""
        each = [products for _, products in self.linear[self.num_of_blocks :]]
        return Products(sum(x.forward for x in each), sum(x.backward for x in each))


def _traced(model: PreTrainedModel, *, with_adapter: bool) -> _Trace:
    trace = _Trace()
    handles = [
        module.register_forward_hook(trace.note_linear)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and (with_adapter or "lora_" not in name)
    ]
    for layer in _layers(model):
        handles.append(layer.register_forward_pre_hook(trace.note_start, with_kwargs=True))
        handles.append(layer.register_forward_hook(trace.note_end))
    head = needed_head(model)
    ids = torch.zeros(1, _TRACED_TOKENS, dtype=torch.long, device=model.device)
    try:
        with eval_mode(model), torch.enable_grad():
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            trace.num_of_blocks = len(trace.linear)
            head(hidden)
    finally:
        for handle in handles:
            handle.remove()
    return trace


def _attention(model: PreTrainedModel, has_gradient: Sequence[bool]) -> dict[int | None, Products]:
    """Attention's products of queries and keys, and of attention weights and values, by window."""
    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    forward = 4.0 * config.num_attention_heads * head_size
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or [_LAYER_TYPES[window is not None]] * len(has_gradient)
    layers: Counter[int | None] = Counter()
    trained: Counter[int | None] = Counter()
    for kind, gradient in zip(types, has_gradient, strict=True):
        key = window if kind == "sliding_attention" else None
        layers[key] += 1
        trained[key] += gradient
    return {key: Products(forward * n, 2 * forward * trained[key], forward * n) for key, n in layers.items()}


def _attention_formula(*, backward: bool) -> dict[Any, Callable[..., float]]:
    operators = torch.ops.aten
    operator = (
        operators._scaled_dot_product_flash_attention_for_cpu_backward
        if backward
        else operators._scaled_dot_product_flash_attention_for_cpu
    )
    names = [argument.name for argument in operator.default._schema.arguments]

    def formula(*arguments: Any, out_shape: object, **options: Any) -> float:
        values = dict(zip(names, arguments, strict=False)) | options
        batch, heads, num_queries, size = values["query"]
        num_keys, value_size = values["value"][-2:]
        # Queries are the last positions of the keys.
        pairs = num_queries * num_keys - (num_queries**2 / 2 if values.get("is_causal") else 0)
        # Backward recomputes the scores, then computes the gradients of weights, values, queries and keys.
        sizes = 3 * size + 2 * value_size if backward else size + value_size
        return float(2 * batch * heads * pairs * sizes)

    return {operator: formula}


def _added_product(total: object, left: Sequence[int], right: Sequence[int], **_: object) -> int:
    return 2 * left[0] * left[1] * right[1]


# Formulas that torch's registry lacks.
_FORMULAS: dict[Any, Callable[..., float]] = {
    torch.ops.aten.addmm_: _added_product,
    **_attention_formula(backward=False),
    **_attention_formula(backward=True),
}


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Counts the matrix products that run inside, including those of gradients, without changing any of them.

    It uses the formulas of torch's `FlopCounterMode`, but not that mode itself, which decomposes some operators and so
    changes the last bits of gradients. Our own formulas are added: a causal attention kernel skips what a token may
    not see, so only half of the square counts; with a mask it computes the full square.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.by_operator: dict[str, float] = {}
        self._formulas = FlopCounterMode(display=False, custom_mapping=_FORMULAS).flop_registry

    @property
    def total(self) -> float:
        """FLOPs so far."""
        return sum(self.by_operator.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Torch's hook, which is called for each operator."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            name = func.overloadpacket.__name__
            flops = formula(*args, **kwargs, out_val=output)
            self.by_operator[name] = self.by_operator.get(name, 0.0) + flops
        return output
