"""The part that runs inside vLLM's workers: takes weights from a trainer, all of them or none.

vLLM finds `register` by its entry point. One `/update_weights` call is the whole update: between two calls requests
may run, and none of them must meet a model that is half new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from prefrl.generation.weights import wire
from prefrl.generation.weights.wire import Named

__all__ = ["BACKEND", "Engine", "InitInfo", "UpdateInfo", "register"]

BACKEND = "prefrl"
_SHOWN_NAMES = 8
# A count of loaded elements that no layer reaches, so that vLLM never takes a layer for complete.
_NEVER = -(1 << 60)


def register() -> None:
    """Make the backend known. vLLM calls this in each of its processes, in some of them more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, Engine.__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`wire.Invitation` as vLLM wants it. With "shm" there is nobody to meet and the rest is not set."""

    transport: Literal["nccl", "gloo", "shm"]
    host: str = ""
    port: int = 0
    tag: str = ""
    world_size: int = 0
    timeout_s: float = 0.0
    rank_offset: int = 1


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are: a folder of safetensors files, or None: they come through the group."""

    path: str | None = None


class Engine(WeightTransferEngine):  # type: ignore[type-arg, unused-ignore]
    """Receives everything into the memory of the host, checks it, and only then touches the model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: wire.Group | None = None
        if vllm_config.lora_config is not None:
            _load_adapters_once()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group, instead of an earlier one if there was one."""
        self.shutdown()
        if init_info.transport == "shm":
            return
        invitation = wire.Invitation(**vars(init_info))
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = wire.join(invitation, worker=worker)

    def start_weight_update(self) -> None:
        """Nothing: `update_weights` does it all."""

    def finish_weight_update(self) -> None:
        """Nothing: `update_weights` does it all."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load.

        Raises:
            ValueError: The weights are not those of the model; it still has the old ones.
            RuntimeError: The connection broke; likewise.
            TimeoutError: The trainer fell silent; likewise.
        """
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.shutdown()  # at once: a trainer that is still sending shall not wait for its deadline
            raise

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See `update_weights`."""
        if update_info.path is not None:
            weights = list(_read(Path(update_info.path)))
        elif self._group is not None:
            weights = wire.receive(self._group)
        else:
            raise RuntimeError("no group to receive weights from: /init_weight_transfer_engine was not called")
        _check_unique([name for name, _ in weights])
        _check_finite(weights)
        _check_fit(self.model, weights)
        _load(self.model, weights, self.model_config)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _read(folder: Path) -> Iterator[Named]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no safetensors files; do trainer and server see the same folder?")
    for file in files:
        yield from load_file(file).items()


def _check_unique(names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"sent more than once: {_shortened(twice)}")


def _check_finite(weights: list[Named]) -> None:
    bad = [name for name, tensor in weights if not _is_finite(tensor)]
    if bad:
        raise ValueError(f"not finite: {_shortened(bad)}")


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:
        tensor = tensor.float()
    # Both propagate NaN, and neither needs a mask as large as the weights.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _check_fit(model: Any, weights: list[Named]) -> None:
    """A rehearsal: the model's own loaders run on tensors without memory, and what they would write is counted.

    Raises:
        ValueError: A name is unknown, a shape is wrong, a layer would keep old weights, or a tied one comes twice.
    """
    # Zeros without memory: nothing but names, dtypes and shapes counts here.
    blanks = ((name, tensor.new_zeros(()).expand(tensor.shape)) for name, tensor in weights)
    with _reloading(model) as reloading:
        for module in model.modules():
            get_layerwise_info(module).load_numel = _NEVER
        try:
            model.load_weights(blanks)
        except Exception as error:
            raise ValueError(f"the model cannot take these weights: {type(error).__name__}: {error}") from error
        loaded = {module for module in model.modules() if get_layerwise_info(module).loaded_weights}
        twice = [
            name for name, module in model.named_modules() if module in loaded and reloading.twins(module) & loaded
        ]
        missing = [
            name
            for name, module in model.named_modules()
            if not (reloading.twins(module) & loaded and module not in loaded) and _keeps_old_weights(module)
        ]
    if twice:
        raise ValueError(f"these layers share their weights, send them once: {_shortened(twice)}")
    if missing:
        raise ValueError(f"the weights are not complete, these layers would keep old ones: {_shortened(missing)}")


def _keeps_old_weights(module: nn.Module) -> bool:
    """Whether a rehearsal did not write every element of the module's own parameters."""
    if is_deferred_attention_layer(module):  # has scales, which only some checkpoints set
        return False
    info = get_layerwise_info(module)
    own = {name: p for name, p in module._parameters.items() if p is not None and name not in SKIP_LOAD_TENSORS}
    if not own.keys() <= {name for name, _ in info.loaded_weights}:
        return True
    # Loaders fill a parameter of one element instead of copying into it, which is not counted.
    needed = sum(get_tensor_load_numel(p) for p in own.values() if p.numel() > 1)
    return bool(own) and info.load_numel - _NEVER < needed - _padding(module, own)


def _padding(module: nn.Module, own: Mapping[str, Tensor]) -> int:
    """Elements of rows that stand for no token."""
    if not isinstance(module, VocabParallelEmbedding):
        return 0
    rows, shard = module.num_embeddings_per_partition, module.shard_indices
    unused: int = rows - shard.num_org_elements - shard.num_added_elements
    return sum(p.numel() // rows * unused for p in own.values())


def _load(model: Any, weights: list[Named], model_config: Any) -> None:
    """Load what a rehearsal took. Only lack of memory can still fail, and leaves a mixture that runs."""
    with _reloading(model) as reloading:
        model.load_weights(iter(weights))
        reloading.finish(model_config)
    for module in model.modules():
        # On a CPU, a head has a packed copy of its own even where its weights are the embedding's.
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


class _Reloading:
    """A model whose layers wait for weights, outside of their memory, by vLLM's layer-wise reload."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_finished = False
        initialize_layerwise_reload(model)
        # Biases are not parted from their memory: loaders write into them at once.
        live = (t for t in chain(model.parameters(), model.buffers()) if not t.is_meta)
        self._before = [(tensor, tensor.detach().clone()) for tensor in live]
        self._sharers: dict[int, set[nn.Module]] = {}
        for module in model.modules():
            for parameter in self._kept(module):
                self._sharers.setdefault(id(parameter), set()).add(module)

    def _kept(self, module: nn.Module) -> list[Tensor]:
        kernel_tensors = get_layerwise_info(module).kernel_tensors
        return [] if kernel_tensors is None else list(kernel_tensors[0].values())

    def twins(self, module: nn.Module) -> set[nn.Module]:
        """Other modules that share a parameter with `module`: a head and the embedding that it is tied to."""
        sharers = (self._sharers[id(parameter)] for parameter in self._kept(module))
        return set().union(*sharers) - {module}

    def finish(self, model_config: Any) -> None:
        """What was loaded is the model from now on."""
        finalize_layerwise_reload(self._model, model_config)
        self._is_finished = True

    def end(self) -> None:
        """Without `finish`: put the old weights back."""
        if self._is_finished:
            return
        self._model._do_torchao_reload = self._model._original_do_torchao_reload
        for module in self._model.modules():
            info = get_layerwise_info(module)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(module, info)
            info.reset()
        for tensor, before in self._before:
            tensor.data.copy_(before)


@contextmanager
def _reloading(model: Any) -> Iterator[_Reloading]:
    reloading = _Reloading(model)
    try:
        yield reloading
    finally:
        reloading.end()


def _load_adapters_once() -> None:
    """Read an adapter that replaces another one when it is loaded, not again in every step that uses it.

    A request for an adapter that was loaded with `load_inplace` carries that flag into each of its steps, where vLLM
    would read the files anew, and end the engine when they are gone.
    """
    apply_adapters = LRUCacheWorkerLoRAManager._apply_adapters
    if getattr(apply_adapters, "__module__", None) == __name__:
        return

    def apply_loaded(self: LRUCacheWorkerLoRAManager, requests: Iterable[Any]) -> None:
        for request in requests:
            request.load_inplace = False
        apply_adapters(self, requests)

    LRUCacheWorkerLoRAManager._apply_adapters = apply_loaded


def _shortened(names: Iterable[str]) -> str:
    """The first few names."""
    names = sorted(names)
    rest = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")
