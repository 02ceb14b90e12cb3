"""The part that runs inside vLLM's workers: loads a trainer's weights, all of them or none.

vLLM finds `register` by its entry point. One `/update_weights` call is a whole update: requests may run between two
calls, and none of them may see a model that is only partly updated.
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

from prefrl.generation.weights import process_group, wire
from prefrl.generation.weights.delta import HostCopy, is_delta, together
from prefrl.generation.weights.store import Link, follow
from prefrl.generation.weights.wire import Named

BACKEND = "prefrl"
_SHOWN_NAMES = 8
# An initial count of loaded elements so low that vLLM never considers a layer complete.
_NEVER = -(1 << 60)


def register() -> None:
    """Register the backend. vLLM calls this in each of its processes, in some of them more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, Engine.__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`process_group.Invitation` in vLLM's form. With "shm" there is no group, and the other fields are not set."""

    transport: Literal["nccl", "gloo", "ipc", "shm"]
    host: str = ""
    port: int = 0
    tag: str = ""
    world_size: int = 0
    timeout_s: float = 0.0
    rank_offset: int = 1


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are: in a folder of safetensors files, or sent through the group with the seals of a key."""

    path: str | None = None
    key: str | None = None  # hexadecimal
    chain: list[tuple[int, int, str]] | None = None  # `store.Link`s: the path is that of a store with these messages

    def __post_init__(self) -> None:
        """Check that exactly one is given."""
        if (self.path is None) == (self.key is None):
            raise ValueError("update_info: must have either path or key")


class Engine(WeightTransferEngine):  # type: ignore[type-arg, unused-ignore]
    """Receives all weights, into host memory or beside the model, checks them, and only then changes the model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: process_group.Group | None = None
        self._copy = HostCopy()  # of the model's weights, if changes of them may follow
        if vllm_config.lora_config is not None:
            _load_adapters_once()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group, and leave an earlier one."""
        self.shutdown()
        if init_info.transport == "shm":
            return
        invitation = process_group.Invitation(**vars(init_info))
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = process_group.join(invitation, worker=worker)

    def start_weight_update(self) -> None:
        """No-op: `update_weights` is the whole update."""

    def finish_weight_update(self) -> None:
        """No-op: `update_weights` is the whole update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load all weights. In each of the cases below, the model keeps the old weights.

        Raises:
            ValueError: The weights do not come from the trainer, do not fit the model, or are not finite.
            RuntimeError: The connection broke, or there is no group.
            TimeoutError: The trainer stopped sending.
        """
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._copy.clear()
            self.shutdown()  # at once, so that a trainer that is still sending does not wait for its deadline
            raise

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive, check and load the weights; see `update_weights`."""
        if update_info.chain is not None:
            changed = follow(self._copy, str(update_info.path), [Link(*link) for link in update_info.chain])
            weights = list(self._copy.weights.items())
        else:
            weights = self._received(update_info)
            _check_unique([name for name, _ in weights])
            message = dict(weights)
            if is_delta(message):
                changed = self._copy.apply([message])
                weights = list(self._copy.weights.items())
            else:
                changed = list(message)
                self._copy.clear()
        is_changed = set(changed)
        _check_finite([(name, tensor) for name, tensor in weights if name in is_changed])
        needed = together(changed, _check_fit(self.model, weights))
        _load(self.model, [(name, tensor) for name, tensor in weights if name in needed], self.model_config)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _received(self, update_info: UpdateInfo) -> list[Named]:
        if update_info.key is None:
            return list(_read(Path(str(update_info.path))))
        if self._group is None:
            raise RuntimeError("there is no group to receive weights from: call /init_weight_transfer_engine first")
        return wire.receive(self._group, bytes.fromhex(update_info.key))

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _read(folder: Path) -> Iterator[Named]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no safetensors files. Trainer and server must see the same folder")
    for file in files:
        yield from load_file(file).items()


def _check_unique(names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"weights were sent more than once: {_shortened(twice)}")


def _check_finite(weights: list[Named]) -> None:
    bad = [name for name, tensor in weights if not _is_finite(tensor)]
    if bad:
        raise ValueError(f"weights are not finite: {_shortened(bad)}")


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:
        tensor = tensor.float()
    # Minimum and maximum propagate NaN, and need no mask as large as the weights.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _check_fit(model: Any, weights: list[Named]) -> list[set[str]]:
    """A dry run: the model's own loaders run on tensors without memory, and vLLM counts what they would write.

    Returns:
        For each of the model's modules, the names of the weights that it is loaded from, which it can only take
        together: those of queries, keys and values are one matrix, and quantizing a matrix takes all of it.

    Raises:
        ValueError: A name is unknown, a shape is wrong, a layer would keep old weights, or tied weights come twice.
    """
    # Zeros without memory: only names, dtypes and shapes matter here.
    blanks = [(name, tensor.new_zeros(()).expand(tensor.shape)) for name, tensor in weights]
    with _reloading(model) as reloading:
        for module in model.modules():
            get_layerwise_info(module).load_numel = _NEVER
        try:
            model.load_weights(iter(blanks))
        except Exception as error:
            raise ValueError(f"the model cannot take these weights: {type(error).__name__}: {error}") from error
        names = {_memory_of(blank): name for name, blank in blanks}
        sources = [_sources(module, names) for module in model.modules()]
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
        raise ValueError(f"these layers share their weights, so send them once: {_shortened(twice)}")
    if missing:
        raise ValueError(f"the weights are incomplete: these layers would keep old ones: {_shortened(missing)}")
    return sources


def _sources(module: nn.Module, names: Mapping[int, str]) -> set[str]:
    """The names of the weights that a module was loaded from in the dry run; `names` has them by `_memory_of`."""
    found = set[str]()
    for _, call in get_layerwise_info(module).loaded_weights:
        memory = {_memory_of(value) for value in call.arguments.values() if isinstance(value, Tensor)}
        if memory.isdisjoint(names):  # the model computed it, of one weight or several
            return set(names.values())
        found |= {names[place] for place in memory & names.keys()}
    return found


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()  # also of a part of a tensor


def _keeps_old_weights(module: nn.Module) -> bool:
    """Whether the dry run left some elements of the module's own parameters unwritten."""
    if is_deferred_attention_layer(module):  # its scales are set by some checkpoints only
        return False
    info = get_layerwise_info(module)
    own = {name: p for name, p in module._parameters.items() if p is not None and name not in SKIP_LOAD_TENSORS}
    if not own.keys() <= {name for name, _ in info.loaded_weights}:
        return True
    # Loaders fill a parameter of one element instead of copying into it, and vLLM does not count that.
    needed = sum(get_tensor_load_numel(p) for p in own.values() if p.numel() > 1)
    return bool(own) and info.load_numel - _NEVER < needed - _padding(module, own)


def _padding(module: nn.Module, own: Mapping[str, Tensor]) -> int:
    """The number of elements in embedding rows that belong to no token."""
    if not isinstance(module, VocabParallelEmbedding):
        return 0
    rows, shard = module.num_embeddings_per_partition, module.shard_indices
    unused: int = rows - shard.num_org_elements - shard.num_added_elements
    return sum(p.numel() // rows * unused for p in own.values())


def _load(model: Any, weights: list[Named], model_config: Any) -> None:
    """Load weights that passed the dry run. Only a lack of memory can still fail; it leaves a mixture that runs."""
    with _reloading(model) as reloading:
        model.load_weights(iter(weights))
        reloading.finish(model_config)
    for module in model.modules():
        # On a CPU, the head keeps a packed copy of its weights, even if they are tied to the embedding.
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


class _Reloading:
    """A model in vLLM's layer-wise reload: its layers wait for weights outside of their own memory."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_finished = False
        initialize_layerwise_reload(model)
        # Biases keep their memory during the reload: loaders write into them at once.
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
        """Other modules that share a parameter with `module`, such as the embedding that a head is tied to."""
        sharers = (self._sharers[id(parameter)] for parameter in self._kept(module))
        return set().union(*sharers) - {module}

    def finish(self, model_config: Any) -> None:
        """Make the loaded weights those of the model; a layer for which there were none keeps its own."""
        for module in self._model.modules():
            info = get_layerwise_info(module)
            if info.can_load() and not info.loaded_weights and not is_deferred_attention_layer(module):
                _place_kernel_tensors(module, info)
                info.reset()
        finalize_layerwise_reload(self._model, model_config)
        self._is_finished = True

    def end(self) -> None:
        """Restore the old weights, unless `finish` was called."""
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
    """Make vLLM read the files of an adapter only when it is loaded, not in every step that uses it.

    A request for an adapter that was loaded with `load_inplace` carries this flag into each of its steps. There, vLLM
    would read the files again, and its engine would fail once they are removed.
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
    """The first few names, and how many more there are."""
    names = sorted(names)
    rest = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")
