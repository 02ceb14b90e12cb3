"""The policy's weights as a checkpoint has them, for engines that load checkpoints."""

from __future__ import annotations

import copy
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.models.adapters import is_peft_model

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

__all__ = ["PolicyWeights"]

# The layer of peft's that stands in the place of a layer of the model -> a layer with weights to export.
Resolve = Callable[["nn.Module"], "nn.Module"]


class PolicyWeights:
    """The weights of a policy in training, under the names and shapes that `save_pretrained` gives them.

    Weights that are tied are there once, and buffers that no checkpoint has are left out. Nothing is changed: adapters
    are merged by peft on a copy of one layer at a time, so that beyond the policy there is memory for one layer (or an
    embedding). Weights that are stored as they are trained are not copied: copy what has to outlive the next update.
    """

    def __init__(self, model: nn.Module) -> None:
        """The weights of `model`, a `PreTrainedModel` or a `PeftModel`, as they are at each iteration."""
        self._model = model

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, detached, layer by layer; adapters are merged into the layers that they are on.

        Raises:
            ConfigError: The model is quantised, or no checkpoint of its architecture can hold what the adapter makes
                of it.
        """
        return iter(_Checkpoint(self._model, _merged))

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
        return _Checkpoint(self._model, _original)

    def save_adapter(self, folder: Path) -> None:
        """Write the active adapter into `folder` as peft does: `adapter_model.safetensors`, `adapter_config.json`.

        Weights of the model under the adapter are not written, also if the adapter is on its embeddings.

        Raises:
            ConfigError: There is no adapter, or several are active.
        """
        if not is_peft_model(self._model):
            raise ConfigError(
                f"the policy is a {type(self._model).__name__} without an adapter: there is none to save. Give a "
                "peft_config, or send all weights."
            )
        with distributed.full_params(self._model) as model:
            names: list[str] = model.active_adapters  # type: ignore[assignment]  # of peft.PeftModel
            if len(names) != 1:
                raise ConfigError(
                    f"{len(names)} adapters are active: {names}. Call model.set_adapter with one of them."
                )
            # "auto" for the embeddings would ask the Hub whether they were resized.
            save: Any = model.save_pretrained
            save(str(folder), selected_adapters=names, save_embedding_layers=False)
        if names != ["default"]:  # then peft makes a folder of its own
            for file in (folder / names[0]).iterdir():
                file.replace(folder / file.name)
            (folder / names[0]).rmdir()


@dataclass(frozen=True)
class _Checkpoint:
    """A model's weights as a checkpoint has them; what stands for the layers of peft's is `resolve`'s to say."""

    model: nn.Module
    resolve: Resolve

    def __post_init__(self) -> None:
        """Refuse weights that no checkpoint could have."""
        if getattr(_base_model(self.model), "is_quantized", False):
            raise ConfigError(
                "the policy is quantised: its weights cannot be sent, because an adapter cannot be merged into them "
                "without rounding it away. Set weight_sync='adapter' and serve the same base model, or load the "
                "policy without quantization_config."
            )
        if self.resolve is _merged and is_peft_model(self.model):
            _check_merge(self.model)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Layer by layer in the order of the model."""
        with distributed.full_params(self.model) as whole:
            model = _base_model(whole)
            tensors = _tensors(model, self.resolve, only=_saved_names(model))
            for _, layer in itertools.groupby(tensors, key=lambda item: _layer_of(item[0])):
                # Where a weight of the checkpoint is made from several, they are of one layer.
                for name, tensor in revert_weight_conversion(model, dict(layer)).items():
                    yield name, tensor.detach()


def _base_model(model: nn.Module) -> PreTrainedModel:
    base: Any = model
    return base.get_base_model() if is_peft_model(model) else base


def _layer_of(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `model.layers.3`; "" for what is in no layer."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match[0] if match else ""


def _saved_names(model: PreTrainedModel) -> set[str]:
    """The model's own names for what a checkpoint has: of tied weights, one."""
    originals = dict(_tensors(model, _original))
    for name in model._keys_to_ignore_on_save or ():
        originals.pop(name, None)
    return set(remove_tied_weights_from_state_dict(originals, model))


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


def _merged(layer: nn.Module) -> nn.Module:
    """A layer that computes what the layer with its active adapter does; the layer itself stays as it is.

    Raises:
        ConfigError: peft cannot merge this kind of adapter.
    """
    if not _is_peft_layer(layer):
        return layer
    if hasattr(layer, "modules_to_save"):  # trained in full: nothing to merge, nothing to copy
        wrapper: Any = layer
        active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
        return _merged(wrapper.modules_to_save[active[0]] if active else wrapper.original_module)
    own: Any = copy.deepcopy(layer)
    try:
        with torch.no_grad():
            if hasattr(own, "unload_and_optionally_merge_module"):
                own.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                own.merge()
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(f"peft cannot merge the adapter: {error}. Set weight_sync='adapter'.") from error
    return _original(own)


def _check_merge(model: nn.Module) -> None:
    """Refuse adapters that are no change of weights, or that change one of two tied weights alone."""
    peft = sys.modules["peft"]
    if not isinstance(model.base_model, peft.tuners.tuners_utils.BaseTuner):
        raise ConfigError(
            f"an adapter of the kind {model.active_peft_config.peft_type.value} cannot be merged into weights. Use "  # type: ignore[union-attr]
            "LoRA, or set weight_sync='adapter'."
        )
    base = _base_model(model)
    layers = _peft_layers(base, "")
    for one, other in base.all_tied_weights_keys.items():
        if _made_from(one, base, layers) != _made_from(other, base, layers):
            raise ConfigError(
                f"{one} and {other} are one weight in a checkpoint, and the adapter makes two of it. Take both out "
                "of the adapter, adapt both with ensure_weight_tying=True, load the model with "
                "tie_word_embeddings=False, or set weight_sync='adapter'."
            )


def _made_from(name: str, model: nn.Module, layers: Mapping[str, nn.Module]) -> set[int]:
    """Where in memory the tensors are that a weight of the policy is made from."""
    layer = next((layers[parent] for parent in _parents(name) if parent in layers), None)
    tensors = list(layer.parameters()) if layer is not None else [model.get_parameter(name)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
