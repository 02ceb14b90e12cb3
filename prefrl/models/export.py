"""The policy's weights as a checkpoint has them, for engines that load checkpoints."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.models.adapters import is_peft_model

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

__all__ = ["CRITIC", "PolicyWeights", "whole_state"]

# The name under which a critic is a part of the model that is trained.
CRITIC = "prefrl_critic"
# The layer of peft's that stands in the place of a layer of the model -> a layer with weights to export.
Resolve = Callable[["nn.Module"], "nn.Module"]


class PolicyWeights:
    """The weights of a policy in training, under the names and shapes that `save_pretrained` gives them.

    Weights that are tied are there once; buffers that no checkpoint has, and a critic, are left out. Nothing is
    changed: adapters are merged by peft on a copy of one layer at a time, and weights that are partitioned over ranks
    are made whole for one layer (or an embedding) at a time, so that beyond the policy there is memory for one.
    Weights that are stored as they are trained are not copied: copy what has to outlive the next update.

    Where weights are partitioned, they are read in a task of `lead`, or by all ranks in the same order.
    """

    def __init__(self, model: nn.Module) -> None:
        """The weights of `model`, a `PreTrainedModel` or a `PeftModel`, as they are at each iteration."""
        self._model = model
        self._read = distributed.Reader(model)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, detached, layer by layer; adapters are merged into the layers that they are on.

        Raises:
            ConfigError: The model is quantised, or no checkpoint of its architecture can hold what the adapter makes
                of it.
        """
        return iter(_Checkpoint(self._model, self._read, merges=True))

    def lead(self, task: Callable[[], None]) -> None:
        """Run `task` on the main process, which may read the weights in it; the others take part in that.

        All processes must call it. What the task raises is raised on the main process alone.
        """
        self._read.lead(task)

    @property
    def has_adapter(self) -> bool:
        """Whether there is an adapter, and nothing else is trained."""
        if not is_peft_model(self._model):
            return False
        base = _base_model(self._model)
        return not any(tensor.requires_grad for _, tensor in _tensors(base, _original))

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are rounded to few bits, so that only an adapter on them can be exported."""
        return bool(getattr(_base_model(self._model), "is_quantized", False))

    def base(self) -> _Checkpoint:
        """As the policy itself, without its adapter: to be iterated any number of times.

        Raises:
            ConfigError: The model is quantised.
        """
        return _Checkpoint(self._model, self._read, merges=False)

    def save_adapter(self, folder: Path) -> None:
        """Write the active adapter into `folder` as peft does: `adapter_model.safetensors`, `adapter_config.json`.

        Weights of the model under the adapter are neither written nor gathered, also if the adapter is on its
        embeddings.

        Raises:
            ConfigError: There is no adapter of layers, or several are active.
        """
        if not is_peft_model(self._model):
            raise ConfigError(
                f"the policy is a {type(self._model).__name__} without an adapter: there is none to save. Give a "
                "peft_config, or send all weights."
            )
        _check_is_of_layers(self._model)
        model: Any = self._model
        names: list[str] = model.active_adapters
        if len(names) != 1:
            raise ConfigError(f"{len(names)} adapters are active: {names}. Call model.set_adapter with one of them.")
        # "auto" for the embeddings would ask the Hub whether they were resized.
        options: dict[str, Any] = {"save_embedding_layers": False}
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        chosen = sys.modules["peft"].get_peft_model_state_dict(model, state, adapter_name=names[0], **options)
        own = {id(tensor) for tensor in chosen.values()}
        state = {name: self._read(tensor).detach() if id(tensor) in own else tensor for name, tensor in state.items()}
        model.save_pretrained(str(folder), selected_adapters=names, state_dict=state, **options)
        if names != ["default"]:  # then peft makes a folder of its own
            for file in (folder / names[0]).iterdir():
                file.replace(folder / file.name)
            (folder / names[0]).rmdir()


@dataclass(frozen=True)
class _Checkpoint:
    """A model's weights as a checkpoint has them, with its adapter merged or without it."""

    model: nn.Module
    read: distributed.Reader
    merges: bool

    def __post_init__(self) -> None:
        """Refuse weights that no checkpoint could have."""
        if getattr(_base_model(self.model), "is_quantized", False):
            raise ConfigError(
                "the policy is quantised: its weights cannot be sent, because an adapter cannot be merged into them "
                "without rounding it away. Set weight_sync='adapter' and serve the same base model, or load the "
                "policy without quantization_config."
            )
        if self.merges and is_peft_model(self.model):
            _check_merge(self.model)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Layer by layer in the order of the model."""
        model = _base_model(self.model)
        saved = _saved_names(model)
        order = [name for name, _ in _tensors(model, _original, only=saved)]
        for _, names in itertools.groupby(order, key=_unit_of):
            # What a layer is held by ends with its own iterator, before the next layer is read.
            yield from self._layer(model, set(names))

    def _layer(self, model: PreTrainedModel, names: Set[str]) -> Iterator[tuple[str, Tensor]]:
        """One layer; where a weight of the checkpoint is made from several, they are of one."""
        resolve = self._merged if self.merges else _original
        layer = {name: self.read(tensor) for name, tensor in _tensors(model, resolve, only=names)}
        for name, tensor in revert_weight_conversion(model, layer).items():
            yield name, tensor.detach()

    def _merged(self, layer: nn.Module) -> nn.Module:
        """A layer that computes what the layer with its active adapter does; the layer itself stays as it is.

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


def _unit_of(name: str) -> str:
    """What is gathered together: the layer, or the module of what is in no layer."""
    return _layer_of(name) or name.rpartition(".")[0]


def _base_model(model: nn.Module) -> PreTrainedModel:
    base: Any = model
    return base.get_base_model() if is_peft_model(model) else base


def _layer_of(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `model.layers.3`; "" for what is in no layer."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match[0] if match else ""


def _saved_names(model: PreTrainedModel) -> set[str]:
    """The model's own names for what a checkpoint has: of tied weights, one."""
    memory = {name: distributed.memory_of(tensor) for name, tensor in _tensors(model, _original)}
    ignored = model._keys_to_ignore_on_save or ()
    tied = {one for one, other in model.all_tied_weights_keys.items() if memory.get(one) == memory.get(other)}
    return {name for name in memory if name not in {*ignored, *tied} and not name.startswith(f"{CRITIC}.")}


def _tensors(
    module: nn.Module, resolve: Resolve, *, prefix: str = "", only: Set[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under the model's own names, as if peft had changed no layer.

    Args:
        module: The model, or what stands in it under `prefix`.
        resolve: Gives the layer to read in the place of one of peft's.
        prefix: Of the names.
        only: Names to give; None: all. A layer without any is not resolved.
    """
    state = module.state_dict(prefix=prefix, keep_vars=True)
    layers = _peft_layers(module, prefix)
    # A layer of peft's stands for all names below it.
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
    """Whether peft has put it in the place of a module of the model."""
    peft = sys.modules.get("peft")
    if peft is None:
        return False
    return isinstance(module, (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper))


def _peft_layers(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """What peft has put in the place of modules below `module`, by name."""
    return {f"{prefix}{name}": child for name, child in module.named_modules() if name and _is_peft_layer(child)}


def _original(layer: nn.Module) -> nn.Module:
    """The model's own layer below those of peft."""
    while _is_peft_layer(layer):
        below: Any = layer
        layer = below.get_base_layer() if hasattr(layer, "get_base_layer") else below.original_module
    return layer


def _check_is_of_layers(model: nn.Module) -> None:
    """Refuse adapters that are no change of layers."""
    peft = sys.modules["peft"]
    if not isinstance(model.base_model, peft.tuners.tuners_utils.BaseTuner):
        raise ConfigError(
            f"an adapter of the kind {model.active_peft_config.peft_type.value} is no change of layers, and servers "  # type: ignore[union-attr]
            "take no other. Use LoRA."
        )


def _check_merge(model: nn.Module) -> None:
    """Refuse adapters that are no change of weights, or that change one of two tied weights alone."""
    _check_is_of_layers(model)
    base = _base_model(model)
    layers = _peft_layers(base, "")
    for one, other in base.all_tied_weights_keys.items():
        if _made_from(one, base, layers) != _made_from(other, base, layers):
            raise ConfigError(
                f"{one} and {other} are one weight in a checkpoint, and the adapter makes two of it. Take both out "
                "of the adapter, adapt both with ensure_weight_tying=True, load the model with "
                "tie_word_embeddings=False, or set weight_sync='adapter'."
            )


def _made_from(name: str, model: nn.Module, layers: Mapping[str, nn.Module]) -> set[tuple[str, int]]:
    """Where in memory the tensors are that a weight of the policy is made from."""
    layer = next((layers[parent] for parent in _parents(name) if parent in layers), None)
    tensors = list(layer.parameters()) if layer is not None else [model.get_parameter(name)]
    return {distributed.memory_of(tensor) for tensor in tensors}


def whole_state(model: PreTrainedModel, *, keep: bool) -> dict[str, Tensor] | None:
    """Whole weights for `save_pretrained`, under the model's own names, tied ones under each of theirs.

    Of a model with an adapter, those of the base model that are not trained are left out; its embeddings are not,
    because peft may save them, too. All ranks must call it; see `distributed.whole_on_host` for memory.

    Args:
        model: What is trained, without what a back-end puts around it.
        keep: Whether this rank writes; the others get {}.

    Returns:
        None if the model is not partitioned: `save_pretrained` needs nothing then.
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
