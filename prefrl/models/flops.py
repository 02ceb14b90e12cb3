"""Floating-point operations of a training step: the fewest that its rows need, and those that run.

Both count matrix products, 2 operations for each multiplication with its addition; element-wise work is left out.

For one group of rows with a prompt of P tokens and responses of which T_i tokens are fed (all but the last, whose
output nothing reads) and M_i scored, with n weights in the linear layers, hidden size h, vocabulary V, L layers and
a = heads * head size, a forward pass needs at least

    F = 2 n (P + sum T_i) + 2 h V sum M_i + 2 a L [P^2 + sum((P + T_i)^2 - P^2)]

because the prompt is run once for all its responses and a token attends to those before it alone, to at most the
window's where the layer has one. The backward pass needs F once for the gradients of inputs and once for those of
weights, where they are wanted: 3 F in all if everything is trained. A pass without gradients needs F.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from prefrl.distributed import is_sharded, shape_of
from prefrl.errors import ConfigError
from prefrl.models.modes import eval_mode
from prefrl.models.scoring import inner_model, is_classifier, output_head

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from prefrl.types import TokenBatch

__all__ = ["FlopCounter", "ModelCost", "Products", "floor_flops", "model_cost", "num_weights", "recomputed_share"]

_ATTENTION = ("sdpa", "eager", "prefrl_sdpa", "prefrl_eager")
_LAYER_TYPES = ("full_attention", "sliding_attention")

# Tokens of the pass that shows which layers run, and which of them have gradients.
_TRACED_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Products:
    """FLOPs of some matrix products."""

    forward: float
    backward: float  # of the gradients that are wanted
    recomputed: float = 0.0  # what activation checkpointing runs once more


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a model's matrix products cost at least."""

    token: Products  # linear layers, for each token fed
    position: Products  # the head, for each position scored
    # Attention, for each pair of a query and a key that it may see, over all layers with that window; None: no window.
    pair: Mapping[int | None, Products]
    scores_rows: bool  # a row has one scored position, not one for each trainable token


def floor_flops(
    cost: ModelCost, batches: Sequence[TokenBatch], *, trains: bool, recomputed_share: float = 0.0
) -> float:
    """FLOPs that one pass over some rows needs at least, see the module's formula.

    Rows of one group whose prompts are equally long have one prompt, also if the rows are in several batches.

    Args:
        cost: Of the model.
        batches: The rows, cut in any way. Idle ones need nothing.
        trains: The pass has gradients.
        recomputed_share: Share of the layers that activation checkpointing runs once more in backward. The head is not
            counted again.

    Returns:
        FLOPs.
    """
    batches = [batch for batch in batches if not batch.is_idle]

    def total(products: Products) -> float:
        return products.forward + trains * (products.backward + recomputed_share * products.recomputed)

    rows = [
        (batch.prompt_lengths[prompt], length - 1)
        for batch in batches
        for prompt, length in zip(batch.prompt_index, batch.response_lengths, strict=True)
    ]
    groups = [group for batch in batches for group in batch.group_index]
    prompts = [prompt for _, prompt in {(group, row[0]) for group, row in zip(groups, rows, strict=True)}]
    tokens = sum(prompts) + sum(fed for _, fed in rows)
    positions = len(rows) if cost.scores_rows else sum(batch.num_trainable for batch in batches)
    flops = tokens * total(cost.token) + positions * total(cost.position)
    for window, products in cost.pair.items():
        pairs = sum(_pairs(prompt, window) for prompt in prompts)
        pairs += sum(_pairs(prompt + fed, window) - _pairs(prompt, window) for prompt, fed in rows)
        flops += pairs * total(products)
    return flops


def _pairs(length: int, window: int | None) -> float:
    """Pairs of a query and a key before it in a sequence, up to half a pair for each query: length^2 / 2."""
    inside = length if window is None else min(length, window)
    return (length - inside / 2) * inside


def recomputed_share(model: nn.Module) -> float:
    """Share of the layers under activation checkpointing."""
    layers = _layers(inner_model(model))
    return [layer.gradient_checkpointing for layer in layers].count(True) / len(layers)


def model_cost(model: nn.Module, *, with_adapter: bool = True) -> ModelCost:
    """Cost of a model's matrix products, from one pass over two tokens with gradients.

    The pass shows which linear layers run, and which of their inputs have a gradient: below the lowest trained weight
    none has. Parameters stay as they are and get no gradient.

    Args:
        model: A causal language model or sequence classifier, with PEFT or DDP around it if wanted.
        with_adapter: Count LoRA's products, too.

    Raises:
        ConfigError: The formula does not hold for the model, or the counter would not see all that runs.
    """
    inner = inner_model(model)
    reason = _unknown(inner)
    if reason is not None:
        raise ConfigError(
            f"log_flops=True: how many operations a {type(inner).__name__} needs at least is not known: {reason}. Set "
            "log_flops=False; the times of a step are logged without it."
        )
    trace = _traced(inner, with_adapter=with_adapter)
    return ModelCost(
        token=trace.blocks,
        position=trace.head,
        pair=_attention(inner, trace.layers_with_gradient),
        scores_rows=is_classifier(inner),
    )


def num_weights(model: PreTrainedModel) -> int:
    """Weights outside embeddings, also where they are partitioned; of quantized ones as many as are stored."""
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
        return "its weights are quantised, whose products are not counted"
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
    """What has weights that not every token is multiplied by, once; None if nothing has."""
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
    """What a pass ran, in order."""

    linear: list[tuple[nn.Module, Products]] = field(default_factory=list)
    layers_with_gradient: list[bool] = field(default_factory=list)  # its input has one
    last_of_layer: set[int] = field(default_factory=set)  # indices of `linear`
    num_of_blocks: int = 0  # the rest is the head

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
        """For each token."""
        each = [products for _, products in self.linear[: self.num_of_blocks]]
        # The backward pass reads the inputs of a layer's products: the output of the last one is not made again.
        again = [x.forward for i, x in enumerate(each) if i not in self.last_of_layer]
        return Products(sum(x.forward for x in each), sum(x.backward for x in each), sum(again))

    @property
    def head(self) -> Products:
        """For each position."""
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
    head = output_head(model)
    assert head is not None
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
    """Products of queries and keys, and of weights and values."""
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
        # Queries are the last of the keys.
        pairs = num_queries * num_keys - (num_queries**2 / 2 if values.get("is_causal") else 0)
        # Backward makes the scores again, then the gradients of weights, values, queries and keys.
        sizes = 3 * size + 2 * value_size if backward else size + value_size
        return float(2 * batch * heads * pairs * sizes)

    return {operator: formula}


def _added_product(total: object, left: Sequence[int], right: Sequence[int], **_: object) -> int:
    return 2 * left[0] * left[1] * right[1]


# What torch's registry lacks.
_FORMULAS: dict[Any, Callable[..., float]] = {
    torch.ops.aten.addmm_: _added_product,
    **_attention_formula(backward=False),
    **_attention_formula(backward=True),
}


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Counts the matrix products that run inside, those of gradients included, and changes none of them.

    The formulas are those of torch's `FlopCounterMode`, which takes some operators apart and so changes the last bits
    of gradients, and of ours: a causal attention kernel skips what a token may not see, so that half of a square is
    counted; with a mask it computes all of it.
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
        """Torch's hook, called for each operator."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            name = func.overloadpacket.__name__
            flops = formula(*args, **kwargs, out_val=output)
            self.by_operator[name] = self.by_operator.get(name, 0.0) + flops
        return output
