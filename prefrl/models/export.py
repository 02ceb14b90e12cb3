"""The policy's weights for others: servers, files; and an adapter with its base model as one checkpoint."""

from __future__ import annotations

import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.peft_utils import find_adapter_config_file

from prefrl import distributed
from prefrl.distributed import Differences
from prefrl.errors import ConfigError, require
from prefrl.models.adapters import is_peft_model
from prefrl.models.load import load_model, load_reward_model, load_tokenizer

# Maps a peft layer that wraps a layer of the model to a layer with the weights to export.
Resolve = Callable[["nn.Module"], "nn.Module"]
# The dtype in which a weight of a dtype and a number of dimensions is compared.
Rounded = Callable[[torch.dtype, int], torch.dtype]


class PolicyWeights:
    """The weights of a policy in training, under the names and shapes that `save_pretrained` gives them.

    Tied weights appear once; what `save_pretrained` leaves out is left out, too. The model is not changed: peft merges
    adapters into a copy of one layer at a time, and partitioned weights are gathered one layer (or embedding) at a
    time, so that the extra memory is that of one layer. Weights that are exported exactly as they are trained are not
    copied: copy what has to outlive the next update.

    Partitioned weights must be read in a task of `lead`, or by all ranks in the same order.
    """

    def __init__(self, model: nn.Module) -> None:
        """Export `model`, a `PreTrainedModel` or a `PeftModel`; each iteration reads its current weights."""
        self._model = model
        self._read = distributed.Reader(model)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, detached, layer by layer, with adapters merged into their layers.

        Raises:
            ConfigError: The model is quantized, or no checkpoint of its architecture can hold the merged weights.
        """
        return iter(_Checkpoint(self._model, self._read, merges=True))

    def changes(self, rounded: Rounded, *, is_first: bool) -> Iterator[tuple[str, Tensor | Differences]]:
        """See `WeightSource`. Ranks do not compare where adapters are merged, or weights combined or cut."""
        return _Checkpoint(self._model, self._read, merges=True).changes(rounded, is_first=is_first)

    def lead(self, task: Callable[[], None]) -> None:
        """Run `task` on the main process. It may read the weights, and the other processes take part in that.

        All processes must call it. Errors of the task are raised on the main process only.
        """
        self._read.lead(task)

    @property
    def has_adapter(self) -> bool:
        """Whether there is an adapter and nothing else is trained."""
        if not is_peft_model(self._model):
            return False
        base = _base_model(self._model)
        return not any(tensor.requires_grad for _, tensor in _tensors(base, _original))

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are quantized, so that only an adapter on them can be exported."""
        return bool(getattr(_base_model(self._model), "is_quantized", False))

    def base(self) -> _Checkpoint:
        """The weights of the policy without its adapter; can be iterated any number of times.

        Raises:
            ConfigError: The model is quantized.
        """
        return _Checkpoint(self._model, self._read, merges=False)

    def save_adapter(self, folder: Path) -> None:
        """Write the active adapter into `folder` as peft does: `adapter_model.safetensors`, `adapter_config.json`.

        The base model's weights are neither written nor gathered, even if the adapter is on its embeddings.

        Raises:
            ConfigError: There is no adapter, it does not change layers, or several are active.
        """
        if not is_peft_model(self._model):
            raise ConfigError(
                f"the policy is a {type(self._model).__name__} without an adapter, so none can be saved. Give a "
                "peft_config, or send all weights."
            )
        _check_is_of_layers(self._model)
        model: Any = self._model
        names: list[str] = model.active_adapters
        if len(names) != 1:
            raise ConfigError(f"{len(names)} adapters are active: {names}. Call model.set_adapter with one of them.")
        # "auto" would ask the Hub whether the embeddings were resized.
        options: dict[str, Any] = {"save_embedding_layers": False}
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        chosen = sys.modules["peft"].get_peft_model_state_dict(model, state, adapter_name=names[0], **options)
        own = {id(tensor) for tensor in chosen.values()}
        state = {name: self._read(tensor).detach() if id(tensor) in own else tensor for name, tensor in state.items()}
        model.save_pretrained(str(folder), selected_adapters=names, state_dict=state, **options)
        if names != ["default"]:  # peft then writes into a subfolder
            for file in (folder / names[0]).iterdir():
                file.replace(folder / file.name)
            (folder / names[0]).rmdir()


@dataclass(frozen=True)
class _Checkpoint:
    """A model's weights in checkpoint format, with its adapter merged or left out."""

    model: nn.Module
    read: distributed.Reader
    merges: bool

    def __post_init__(self) -> None:
        """Reject weights that no checkpoint could hold."""
        if getattr(_base_model(self.model), "is_quantized", False):
            raise ConfigError(
                "the policy is quantized: its weights cannot be sent, because an adapter cannot be merged into them "
                "without rounding it away. Set weight_sync='adapter' and serve the same base model, or load the "
                "policy without quantization_config."
            )
        if self.merges and is_peft_model(self.model):
            _check_merge(self.model)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights layer by layer, in the order of the model."""
        model = _base_model(self.model)
        saved = _saved_names(model)
        order = [name for name, _ in _tensors(model, _original, only=saved)]
        for _, names in itertools.groupby(order, key=_unit_of):
            # The layer's own iterator holds the gathered weights, so they are freed before the next layer is read.
            yield from self._layer(model, set(names))

    def changes(self, rounded: Rounded, *, is_first: bool) -> Iterator[tuple[str, Tensor | Differences]]:
        """See `PolicyWeights.changes`."""
        model = _base_model(self.model)
        is_adapted = tuple(f"{name}." for name in _peft_layers(model, ""))
        saved = _saved_names(model)
        order = [name for name, _ in _tensors(model, _original, only=saved)]
        for _, group in itertools.groupby(order, key=_unit_of):
            names = set(group)
            own = None if any(name.startswith(is_adapted) for name in names) else _unconverted(model, names)
            if own is None:
                yield from self._layer(model, names)
                continue
            for name, tensor in own.items():
                dtype = rounded(tensor.dtype, len(distributed.shape_of(tensor)))
                found = self.read.compare(tensor, dtype, is_first=is_first)
                yield name, found.detach() if isinstance(found, Tensor) else found

    def _layer(self, model: PreTrainedModel, names: Set[str]) -> Iterator[tuple[str, Tensor]]:
        """One layer. If a checkpoint weight is combined from several weights, all of these are in the same layer."""
        resolve = self._merged if self.merges else _original
        layer = {name: self.read(tensor) for name, tensor in _tensors(model, resolve, only=names)}
        for name, tensor in revert_weight_conversion(model, layer).items():
            yield name, tensor.detach()

    def _merged(self, layer: nn.Module) -> nn.Module:
        """A layer that computes the same as the layer with its active adapter; the layer itself is not changed.

        Raises:
            ConfigError: peft cannot merge this kind of adapter.
        """
        if not _is_peft_layer(layer):
            return layer
        if hasattr(layer, "modules_to_save"):  # trained in full: nothing to merge, nothing to copy
            wrapper: Any = layer
            active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
            return self._merged(wrapper.modules_to_save[active[0]] if active else wrapper.original_module)
        own: Any = distributed.bare_copy(layer, self.read)
        try:
            with torch.no_grad():
                if hasattr(own, "unload_and_optionally_merge_module"):
                    own.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
                else:
                    own.merge()
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(f"peft cannot merge the adapter: {error}. Set weight_sync='adapter'.") from error
        return _original(own)


def _unconverted(model: PreTrainedModel, names: Set[str]) -> dict[str, Tensor] | None:
    """The weights of one layer, under their names in a checkpoint; None: there, some are combined or cut."""
    own = dict(_tensors(model, _original, only=names))
    blanks = {name: torch.empty(distributed.shape_of(tensor), device="meta") for name, tensor in own.items()}
    names_of = {id(blank): name for name, blank in blanks.items()}
    saved = {name: names_of.get(id(blank)) for name, blank in revert_weight_conversion(model, blanks).items()}
    return {new: own[name] for new, name in saved.items() if name is not None} if None not in saved.values() else None


def _unit_of(name: str) -> str:
    """The unit that a weight is gathered with: its layer, or its module if it is outside all layers."""
    return _layer_of(name) or name.rpartition(".")[0]


def _base_model(model: nn.Module) -> PreTrainedModel:
    base: Any = model
    return base.get_base_model() if is_peft_model(model) else base


def _layer_of(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `model.layers.3`; "" for a weight outside all layers."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match[0] if match else ""


def _saved_names(model: PreTrainedModel) -> set[str]:
    """The model's own names of the weights in a checkpoint; tied weights appear under one of their names."""
    memory = {name: distributed.memory_of(tensor) for name, tensor in _tensors(model, _original)}
    ignored = model._keys_to_ignore_on_save or ()
    tied = {one for one, other in model.all_tied_weights_keys.items() if memory.get(one) == memory.get(other)}
    return {name for name in memory if name not in {*ignored, *tied}}


def _tensors(
    module: nn.Module, resolve: Resolve, *, prefix: str = "", only: Set[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under the model's own names, as if peft had not wrapped any layer.

    Args:
        module: The model, or its submodule under `prefix`.
        resolve: Returns the layer to read in place of a peft layer.
        prefix: Prefix of the names.
        only: Names to yield; None: all. A layer without any of them is not resolved.
    """
    state = module.state_dict(prefix=prefix, keep_vars=True)
    layers = _peft_layers(module, prefix)
    # A peft layer represents all names below it.
    for name in dict.fromkeys(next((p for p in _parents(name) if p in layers), name) for name in state):
        if name not in layers:
            if only is None or name in only:
                yield name, state[name]
        elif only is None or any(wanted.startswith(f"{name}.") for wanted in only):
            yield from _tensors(resolve(layers[name]), resolve, prefix=f"{name}.", only=only)


def _parents(name: str) -> Iterator[str]:
    """`a.b.c` -> `a`, `a.b`."""
    return (name[: dot.start()] for dot in re.finditer(r"\.", name))


def _is_peft_layer(module: nn.Module) -> bool:
    """Whether it is a peft layer that replaced a module of the model."""
    peft = sys.modules.get("peft")
    if peft is None:
        return False
    return isinstance(module, (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper))


def _peft_layers(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """The peft layers below `module`, by name."""
    return {f"{prefix}{name}": child for name, child in module.named_modules() if name and _is_peft_layer(child)}


def _original(layer: nn.Module) -> nn.Module:
    """The model's own layer inside peft's wrappers."""
    while _is_peft_layer(layer):
        below: Any = layer
        layer = below.get_base_layer() if hasattr(layer, "get_base_layer") else below.original_module
    return layer


def _check_is_of_layers(model: nn.Module) -> None:
    """Reject adapters that do not change layers."""
    peft = sys.modules["peft"]
    if not isinstance(model.base_model, peft.tuners.tuners_utils.BaseTuner):
        raise ConfigError(
            f"an adapter of type {model.active_peft_config.peft_type.value} does not change layers, but servers "  # type: ignore[union-attr]
            "take only adapters that do. Use LoRA."
        )


def _check_merge(model: nn.Module) -> None:
    """Reject adapters that cannot be merged into weights, or that change only one of two tied weights."""
    _check_is_of_layers(model)
    base = _base_model(model)
    layers = _peft_layers(base, "")
    for one, other in base.all_tied_weights_keys.items():
        if _made_from(one, base, layers) != _made_from(other, base, layers):
            raise ConfigError(
                f"{one} and {other} are a single weight in a checkpoint, but the adapter would make them differ. "
                "Remove both from the adapter, adapt both with ensure_weight_tying=True, load the model with "
                "tie_word_embeddings=False, or set weight_sync='adapter'."
            )


def _made_from(name: str, model: nn.Module, layers: Mapping[str, nn.Module]) -> set[tuple[str, int]]:
    """Memory locations of the tensors that a weight of the policy is computed from."""
    layer = next((layers[parent] for parent in _parents(name) if parent in layers), None)
    tensors = list(layer.parameters()) if layer is not None else [model.get_parameter(name)]
    return {distributed.memory_of(tensor) for tensor in tensors}


def whole_state(model: PreTrainedModel, *, keep: bool) -> dict[str, Tensor] | None:
    """Whole weights for `save_pretrained`, under the model's own names; tied weights under all of their names.

    For a model with an adapter, the frozen weights of the base model are left out, except its embeddings, because peft
    may save these, too. All ranks must call it; see `distributed.whole_on_host` for memory.

    Args:
        model: The trained model, without a backend's wrappers.
        keep: Whether this rank writes; the others get {}.

    Returns:
        The weights, or None if the model is not partitioned: `save_pretrained` does not need them then.
    """
    if not distributed.is_sharded(model):
        return None
    state = model.state_dict(keep_vars=True)
    if is_peft_model(model):
        embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
        kept = {id(p) for layer in embeddings if layer is not None for p in layer.parameters()}
        base = {id(t) for _, t in _tensors(_base_model(model), _original) if not t.requires_grad} - kept
        state = {name: tensor for name, tensor in state.items() if id(tensor) not in base}
    return distributed.whole_on_host(state, keep=keep)


logger = logging.getLogger(__name__)


def is_adapter(name: str) -> bool:
    """Whether a folder, or a repository on the Hub, holds an adapter and not a model."""
    try:
        return find_adapter_config_file(name) is not None
    except (OSError, ValueError):  # the model's own error is better
        return False


def load_merged(name: str, *, dtype: str = "auto") -> PreTrainedModel:
    """The model in a folder or on the Hub; an adapter is merged into its base model: W + scale * B A.

    The sum is computed in float32 and rounded once.

    Args:
        name: Of a language model, a reward model's adapter, or an adapter.
        dtype: Type of the weights; auto: that of the files, and of the base model's for an adapter.

    Raises:
        ConfigError: It cannot be loaded or merged.
        ImportError: It is an adapter, and peft is not installed.
    """
    if not is_adapter(name):
        return load_model(name, model_init_kwargs={"dtype": dtype})
    peft: Any = require("peft", extra="peft", feature="an adapter")
    config = peft.PeftConfig.from_pretrained(name)
    base_name = config.base_model_name_or_path
    if not base_name:
        raise ConfigError(f"adapter {name!r}: base_model_name_or_path in its adapter_config.json is empty. Set it.")
    load = load_reward_model if config.task_type == "SEQ_CLS" else load_model
    try:
        base = load(base_name, model_init_kwargs={"dtype": "float32"})
    except ConfigError as error:
        raise ConfigError(
            f"adapter {name!r}: its base model {base_name!r} cannot be loaded. If it was moved, correct "
            f"base_model_name_or_path in adapter_config.json: {error}"
        ) from error
    target = base.config.dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        merged = peft.PeftModel.from_pretrained(base, name).merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, AttributeError) as error:  # what peft says of adapters that have no sum
        raise ConfigError(f"adapter {name!r} cannot be merged into {base_name!r}: {error}") from error
    model: PreTrainedModel = merged.to(target or torch.float32)
    return model


def tokenizer_of_checkpoint(name: str, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved with a model or adapter; without one, that of the base model."""
    saved = saved_tokenizer(name)
    if saved is None and Path(name).is_dir():
        logger.warning("%s has no tokenizer: the base model's tokenizer is used", name)
    return load_tokenizer(model, saved)


def saved_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer that was saved with a model or adapter; None: there is none."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None
    return tokenizer
