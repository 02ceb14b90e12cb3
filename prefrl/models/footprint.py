"""What shapes alone tell of a model: its outline, and how much memory a training needs. No weight is read.

With n weights of w bytes, n_t of them trained, and a step of micro-batches of N tokens,

    weights      n w
    gradients    n_t w
    optimizer    n_t times the bytes of the optimizer's state
    activations  what autograd keeps of a forward pass over N tokens, and the workspace of the head
    cache        keys and values of the completions that are sampled at once

Activations are counted by running a model of one and of two layers with fake tensors: what autograd keeps is linear in
the number of layers. Attention is counted as a kernel that keeps queries, keys, values and output, but no scores.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, GenerationConfig
from transformers.modeling_utils import AttentionInterface

from prefrl.distributed import shape_of
from prefrl.errors import cause_of
from prefrl.losses import logprobs
from prefrl.models.adapters import add_adapter
from prefrl.models.load import CAUSAL, REWARD, auto_class_of, check_dtype, load_error, repository_arguments
from prefrl.models.modes import hub_or_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import PeftConfig
    from torch import Tensor, nn
    from transformers import PreTrainedModel


def outline_of(
    name: str | os.PathLike[str], *, model_init_kwargs: Mapping[str, Any] | None = None, is_classifier: bool = False
) -> PreTrainedModel:
    """The model on the meta device, as the trainer would load it. Its weights are not read.

    Args:
        name: Name on the Hub or path.
        model_init_kwargs: For `from_pretrained`.
        is_classifier: Whether it is a reward model; otherwise it is a language model.

    Raises:
        ConfigError: The config cannot be read, no class is known for it, or torch has no such dtype.
    """
    kind, given = REWARD if is_classifier else CAUSAL, {**(model_init_kwargs or {})}
    check_dtype(given)
    of_class = {key: given[key] for key in ("trust_remote_code", "attn_implementation") if key in given}
    places = repository_arguments(given) | {key: given[key] for key in ("subfolder",) if key in given}
    try:
        with hub_or_cache(name):
            config = AutoConfig.from_pretrained(name, **places)
        dtype = given.get("dtype", kind.arguments["dtype"])
        dtype = getattr(config, "dtype", None) if dtype == "auto" else dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        if is_classifier:
            config.num_labels = 1
        with torch.device("meta"):
            model: PreTrainedModel = auto_class_of(kind, name, given).from_config(
                config, dtype=dtype or torch.float32, **of_class
            )
    except (OSError, ValueError, AttributeError, ImportError) as error:
        raise load_error(kind, name, given, error) from cause_of(error)
    if not is_classifier:
        with suppress(OSError), hub_or_cache(name):  # not every repository has the file
            model.generation_config = GenerationConfig.from_pretrained(name, **places)
    return model


_ATTENTION = "prefrl_outline"
_SCORE_BYTES = 4  # of a logit or probability in the head
# Numbers of the optimizer's state for each trained weight, in the weights' dtype; others are taken for Adam.
_STATES = {"sgd": 0, "adafactor": 0, "lion_32bit": 1, "muon": 1, "rmsprop": 1}
_ADAM = 2


@dataclass(frozen=True)
class Weights:
    """Numbers of weights, and their bytes."""

    count: int
    num_trained: int
    total: int  # bytes
    trained: int  # bytes
    head: int  # bytes of the trained weights of the largest matrix at the end, whose gradient comes first


@dataclass(frozen=True)
class Activations:
    """Bytes that autograd keeps of a forward pass."""

    layer: int  # of each layer
    rest: int  # of embeddings and the last norm
    hidden: int  # the input of a layer
    backward: int  # gradients of the two widest activations of a layer, while it is differentiated
    num_layers: int

    def peak(self, head: int, *, checkpointed: bool) -> int:
        """Bytes at most, with the head's workspace, which is freed before a layer is differentiated."""
        if checkpointed:
            return self.rest + self.num_layers * self.hidden + max(self.layer + self.backward, head)
        return self.rest + self.num_layers * self.layer + max(self.backward, head)


@dataclass(frozen=True)
class Footprint:
    """Bytes on one process."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    cache: int
    first_gradients: int  # those that are there before activations are freed
    copies: int = 0  # what a backend keeps a second time from step to step
    gathered: int = 0  # of the largest layer that a backend has whole for a while

    @property
    def peak(self) -> int:
        """Bytes at most: in training, or while completions are sampled."""
        training = max(self.activations + self.first_gradients, self.gradients) + self.gathered
        return self.weights + self.optimizer + self.reference + self.copies + max(training, self.cache)


def weights_of(model: PreTrainedModel) -> Weights:
    """The weights of a model, whole if it is partitioned; it may be an outline, and have an adapter."""
    sizes = [(shape_of(each).numel(), each.element_size(), each.requires_grad) for each in model.parameters()]
    head: Any = model.get_output_embeddings()
    has_head = head is not None and head.weight.requires_grad
    return Weights(
        count=sum(count for count, *_ in sizes),
        num_trained=sum(count for count, _, is_trained in sizes if is_trained),
        total=sum(count * size for count, size, _ in sizes),
        trained=sum(count * size for count, size, is_trained in sizes if is_trained),
        head=shape_of(head.weight).numel() * head.weight.element_size() if has_head else 0,
    )


def optimizer_bytes(weights: Weights, optim: str) -> int:
    """Bytes of the optimizer's state; `optim` is the name of the option, which says whether it is in 8 bits."""
    states = _STATES.get(optim, _ADAM)
    return states * (weights.num_trained if "8bit" in optim else weights.trained)


def activations_of(
    model: PreTrainedModel,
    num_tokens: int,
    *,
    peft_config: PeftConfig | None = None,
    autocast: torch.dtype | None = None,
) -> Activations:
    """What autograd keeps of one forward pass through all layers.

    Args:
        model: The outline of the model, without an adapter.
        num_tokens: Tokens of the micro-batch.
        peft_config: The adapter that is trained; None: all weights are.
        autocast: The dtype of mixed precision; None: it is off.

    Raises:
        Exception: Some models cannot be run without data; the error is theirs.
    """
    config = model.config.get_text_config()
    one, two = (
        _kept_bytes(model, layers, num_tokens, peft_config=peft_config, autocast=autocast) for layers in (1, 2)
    )
    size = num_tokens * model.dtype.itemsize
    widest = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return Activations(
        layer=two - one,
        rest=2 * one - two,
        hidden=size * config.hidden_size,
        backward=2 * size * widest,
        num_layers=config.num_hidden_layers,
    )


def head_bytes(model: PreTrainedModel, num_scored: int, *, device: torch.device) -> int:
    """Bytes of the chunked head: probabilities or two chunks of logits, and the inputs twice."""
    config = model.config.get_text_config()
    kept = num_scored * config.vocab_size * _SCORE_BYTES
    chunk = min(logprobs.default_chunk_size(device), num_scored) * config.vocab_size * _SCORE_BYTES
    inputs = 2 * num_scored * config.hidden_size * _SCORE_BYTES
    return int(inputs + (kept if kept <= logprobs.KEPT_BYTES else 2 * chunk))


def cache_bytes(model: PreTrainedModel, *, num_rows: int, num_tokens: int) -> int:
    """Bytes of the keys and values of rows that are sampled at once.

    Args:
        model: The outline of the model.
        num_rows: Rows.
        num_tokens: Tokens of each.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = config.num_hidden_layers
    return int(2 * layers * heads * size * num_rows * num_tokens * model.dtype.itemsize)


def _kept_bytes(
    outline: PreTrainedModel,
    num_layers: int,
    num_tokens: int,
    *,
    peft_config: PeftConfig | None,
    autocast: torch.dtype | None,
) -> int:
    """What autograd keeps of a pass through the same kind of model with so many layers and no image tower."""
    config = copy.deepcopy(outline.config.get_text_config())
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    # Autocast does not see the meta device, and fake tensors take longer; peft cannot move fake tensors, so adapters
    # are cast as a whole instead.
    is_mixed = autocast is not None and peft_config is None
    with FakeTensorMode() if is_mixed else torch.device("meta"):
        model: Any = type(outline)._from_config(config, dtype=outline.dtype)
        if peft_config is not None:
            add_adapter(model, peft_config, task_type="CAUSAL_LM", seed=None)  # changes the model in place
            model.to(autocast or outline.dtype)
        model.train()
        model.config._attn_implementation = _ATTENTION
        ids = torch.zeros(1, num_tokens, dtype=torch.long)
        mixed = torch.autocast("cpu", autocast) if is_mixed else nullcontext()
        with _counting(model) as kept, mixed:
            model.base_model(input_ids=ids, use_cache=False)
        return sum(kept().values())


@contextmanager
def _counting(model: nn.Module) -> Iterator[Callable[[], dict[int, int]]]:
    """Gives the bytes of each storage that autograd has kept, weights left out."""
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    alive: dict[int, Tensor] = {}  # so that no two storages have one address

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()._cdata
        if place not in own:
            alive.setdefault(place, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: {place: tensor.untyped_storage().nbytes() for place, tensor in alive.items()}


class _Attend(torch.autograd.Function):
    """Keeps what a fused attention kernel keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pragma: no cover - only forward passes are counted
        raise NotImplementedError


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    output: Tensor = _Attend.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attend)
