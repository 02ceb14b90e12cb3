"""Weights that are partitioned over ranks: DeepSpeed ZeRO-3's parameters and FSDP2's DTensors.

A ZeRO-3 parameter is empty between the passes that use it. DeepSpeed keeps this rank's part in `ds_tensor`, and
`ds_status` tells whether the whole parameter is available. An FSDP2 parameter is a DTensor, whose `to_local()` is this
rank's part.

Every rank has to take part in every pass of the others. If all ranks start together, they pad to the same number of
passes, see `missing_passes`; otherwise they take turns, see `in_company`.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from prefrl.distributed.processes import (
    gather_objects,
    max_over_ranks,
    min_over_ranks,
    num_processes,
    world_size,
)

M = TypeVar("M", bound=nn.Module)

# An attribute that only ZeRO-3 parameters have.
_ZERO3 = "ds_id"
_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)


def unwrap(model: nn.Module) -> nn.Module:
    """The model that the user passed, without a backend's wrappers."""
    deepspeed = sys.modules.get("deepspeed")
    engines = (DistributedDataParallel,) if deepspeed is None else (DistributedDataParallel, deepspeed.DeepSpeedEngine)
    return model.module if isinstance(model, engines) else model


def class_of(module: nn.Module) -> Any:
    """The class that a module was made with: FSDP2 puts one of its own in its place."""
    classes = cast("tuple[type[nn.Module], ...]", type(module).__mro__)
    return next(kind for kind in classes if not issubclass(kind, FSDPModule))


def _zero3(tensor: torch.Tensor) -> Any:
    """The tensor if it is a ZeRO-3 parameter, with the attributes that DeepSpeed adds; else None."""
    return tensor if hasattr(tensor, _ZERO3) else None


def _is_absent(tensor: torch.Tensor) -> bool:
    """Whether it is a ZeRO-3 parameter that is empty now. Persistent and not yet released parameters are whole."""
    status = getattr(tensor, "ds_status", None)
    return status is not None and status.name == "NOT_AVAILABLE"


def is_sharded(model: nn.Module) -> bool:
    """Whether its parameters are partitioned over ranks, so all ranks have to take part in each forward pass."""
    # FSDP2 may leave weights whole after a pass and reshard them later.
    has_shards = any(isinstance(module, FSDPModule) for module in model.modules())
    return has_shards or any(hasattr(p, _ZERO3) or isinstance(p, DTensor) for p in model.parameters())


def is_zero3(model: nn.Module) -> bool:
    """Whether it is ZeRO-3 that partitions the weights."""
    return any(hasattr(parameter, _ZERO3) for parameter in model.parameters())


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """The shape of the whole parameter."""
    parameter = _zero3(tensor)
    shape: torch.Size = tensor.shape if parameter is None else parameter.ds_shape
    return shape


def memory_of(tensor: torch.Tensor) -> tuple[str, int]:
    """An identifier that is equal for tensors that share memory, even if this rank holds none of it."""
    parameter = _zero3(tensor)
    if parameter is not None:
        return "zero3", parameter.ds_id
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return ("pointer", local.data_ptr()) if local.numel() else ("empty", id(tensor))


def num_local_elements(tensor: torch.Tensor) -> int:
    """Number of elements of the parameter that this rank keeps between passes."""
    return _local_part(tensor).numel()


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank keeps of the parameter between passes."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    parameter = _zero3(tensor)
    part: torch.Tensor = tensor if parameter is None else parameter.ds_tensor
    return part


def _local_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """`_local_part` without the padding of ZeRO-3, whose memory DeepSpeed never writes."""
    part, parameter = _local_part(tensor).detach(), _zero3(tensor)
    if parameter is None:
        return part
    start = part.numel() * torch.distributed.get_rank(parameter.ds_process_group)
    return part[: max(0, parameter.ds_numel - start)]


def part_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """This rank's numbers of a partitioned parameter, flat, and the place of the first among all of them.

    None on all ranks if it is not divided among all processes into one run of numbers for each, or is whole now.
    """
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.shape != (num_processes(),) or tuple(tensor.placements) != (Shard(0),):
            return None
        rows = -(-tensor.shape[0] // num_processes())  # of each rank, fewer for the last ones
        start = min(rows * tensor.device_mesh.get_local_rank(), tensor.shape[0]) * tensor.shape[1:].numel()
    elif _is_absent(tensor) and torch.distributed.get_world_size(_zero3(tensor).ds_process_group) == num_processes():
        start = _local_part(tensor).numel() * torch.distributed.get_rank(_zero3(tensor).ds_process_group)
    else:
        return None
    return _local_numbers(tensor).reshape(-1), start


def first_non_finite(model: nn.Module, device: torch.device) -> str | None:
    """Name of the first trained weight that holds NaN or infinity, on this rank or another; None: all are finite.

    Frozen weights are not looked at: numbers of four bits are kept in floats that mean nothing. All processes must
    call it.

    Args:
        model: Its parameters may be partitioned.
        device: For the communication.
    """
    parts = [(name, _local_numbers(p)) for name, p in unwrap(model).named_parameters() if p.requires_grad]
    parts = [(name, part) for name, part in parts if part.numel()]
    largest = [torch.linalg.vector_norm(part, float("inf")).float().to(device) for _, part in parts]
    are_finite = torch.stack(largest).isfinite().tolist() if largest else []
    names = [name for (name, _), is_finite in zip(parts, are_finite, strict=True) if not is_finite]
    (is_any,) = max_over_ranks([bool(names)], device)
    if not is_any:
        return None
    return next((of_rank[0] for of_rank in gather_objects(names) if of_rank), "a weight of another process")


def is_backend_hook(hook: Callable[..., Any]) -> bool:
    """Whether a backend registered the hook, to gather and release weights."""
    return (getattr(hook, "__module__", None) or "").startswith(("deepspeed.", "torch.distributed."))


# Single tensors.


@contextmanager
def gathered(parameters: Iterable[torch.Tensor], *, modifier_rank: int | None = None) -> Iterator[None]:
    """Inside, the ZeRO-3 parameters among these are whole on every rank. All ranks must enter.

    FSDP2 parameters are not gathered: see `whole`.

    Args:
        parameters: Any parameters; those that are whole already or not ZeRO-3's are ignored.
        modifier_rank: The rank whose changes to the parameters all ranks receive at the end; None: no changes.
    """
    absent = [p for p in parameters if _is_absent(p)]
    if not absent:
        yield
        return
    with sys.modules["deepspeed"].zero.GatheredParameters(absent, modifier_rank=modifier_rank):
        yield


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a whole copy gathered from all ranks. All ranks must call it, in the same order."""
    if isinstance(tensor, DTensor):
        full: torch.Tensor = tensor.full_tensor()
        is_copy = full.data_ptr() != tensor.to_local().data_ptr()  # False if one rank holds the whole tensor
        return full if is_copy else full.clone()
    if _is_absent(tensor):
        with gathered([tensor]):
            return tensor.detach().clone()
    return tensor


def load_whole(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole tensor into one that may be partitioned. All ranks must call it with the same values."""
    parameter = _zero3(target)
    with torch.no_grad():
        if isinstance(target, DTensor):
            part = distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
            target.to_local().copy_(part.to_local())
        elif parameter is None:
            target.data.copy_(value)
        elif _is_absent(target):
            with gathered([target], modifier_rank=0):
                target.data.copy_(value)
        else:  # persistent, or not released since the last pass: the rank's part must be updated, too
            target.data.copy_(value)
            parameter.partition(has_been_updated=True)
            if parameter.ds_persist:
                parameter.all_gather()


def mix(weight: torch.Tensor, other: torch.Tensor, alpha: float) -> None:
    """Set weight = alpha * other + (1 - alpha) * weight, each whole or partitioned. All ranks must call it.

    Args:
        weight: Changed in place.
        other: Has the same whole shape; if both are DTensors, they are partitioned in the same way.
        alpha: Between 0 and 1.
    """
    if isinstance(weight, DTensor) and isinstance(other, DTensor):
        local = weight.to_local()
        local.lerp_(other.to_local().detach().to(local), alpha)
    elif _zero3(weight) is not None:
        mixed = torch.lerp(whole(weight).detach(), whole(other).detach().to(weight.dtype), alpha)
        load_whole(weight, mixed)
    else:
        weight.lerp_(whole(other).detach().to(weight), alpha)


def assign(weight: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a tensor of any dtype into a weight, both whole or partitioned in the same way, but not by ZeRO-3."""
    with torch.no_grad():
        _local_part(weight).copy_(_local_part(value))


# Whole models.


@contextmanager
def unpartitioned() -> Iterator[None]:
    """Models that transformers creates inside are whole, even if it would partition them for ZeRO-3."""
    import transformers.integrations.deepspeed as settings

    before = settings._hf_deepspeed_config_weak_ref
    settings.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        settings._hf_deepspeed_config_weak_ref = before


def bare_copy(module: nn.Module, read: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A copy that is independent of the backend: with its own whole parameters, and without hooks.

    Args:
        module: Its parameters may be partitioned.
        read: Returns a parameter itself if it is whole, else a whole copy.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        tensor = read(parameter)
        own = tensor.detach().clone() if tensor is parameter else tensor.detach()
        memo[id(parameter)] = nn.Parameter(own, requires_grad=parameter.requires_grad)
    copied: nn.Module = _bare_copy(module, memo)
    return copied


def _bare_copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    if id(module) in memo:
        return memo[id(module)]
    kind = class_of(module)  # FSDP2's own cannot be copied
    own: Any = kind.__new__(kind)
    nn.Module.__init__(own)
    memo[id(module)] = own
    if isinstance(module, FSDPModule):
        memo[id(module._get_fsdp_state())] = None
    state = {name: value for name, value in vars(module).items() if name not in _HOOKS}
    parts, parameters = state.pop("_modules"), state.pop("_parameters")
    own._modules = {name: None if part is None else _bare_copy(part, memo) for name, part in parts.items()}
    own._parameters = {name: memo.get(id(parameter)) for name, parameter in parameters.items()}
    vars(own).update(copy.deepcopy(state, memo))
    return own


def copy_of(model: M) -> M:
    """A copy with its own weights, made one weight at a time. All ranks must call it.

    The copy is partitioned if the model is.
    """
    clone = copy.deepcopy(model)
    for weight, own in zip(model.parameters(), clone.parameters(), strict=True):
        parameter = _zero3(weight)
        if parameter is not None:  # deepcopy made an empty copy
            own.data = whole(weight).detach().clone()
            parameter.convert_to_zero_parameters(param_list=[own])
    return clone


@contextmanager
def full_params(model: nn.Module) -> Iterator[nn.Module]:
    """The model with all parameters whole on this rank. All ranks must enter; inside, each may run different code."""
    inner = unwrap(model)
    with ExitStack() as stack:
        parameters = [p for p in inner.parameters() if hasattr(p, _ZERO3)]
        if parameters:
            stack.enter_context(gathered(parameters))
            # These hooks would release weights, and coordinate the ranks in each pass.
            stack.enter_context(_without_backend_hooks(inner))
        for module in inner.modules():
            if isinstance(module, FSDPModule):
                stack.enter_context(_unsharded(module))
        yield inner


@contextmanager
def _without_backend_hooks(model: nn.Module) -> Iterator[None]:
    tables = [table for module in model.modules() for table in (module._forward_pre_hooks, module._forward_hooks)]
    before = [(table, OrderedDict(table)) for table in tables if any(map(is_backend_hook, table.values()))]
    for table, hooks in before:
        for key, hook in hooks.items():
            if is_backend_hook(hook):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


@contextmanager
def _unsharded(module: FSDPModule) -> Iterator[None]:
    groups = module._get_fsdp_state()._fsdp_param_groups
    before = [group.post_forward_mesh_info for group in groups]
    module.set_reshard_after_forward(False, recurse=False)
    module.unshard()
    try:
        yield
    finally:
        for group, info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = info
        module.reshard()


def release(model: nn.Module) -> None:
    """Reshard weights that forward-only passes left whole: FSDP2 keeps its last layers whole for a backward pass."""
    for module in unwrap(model).modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def usable(model: nn.Module) -> AbstractContextManager[object]:
    """Make forward passes work inside, even before training starts, when no hooks gather a ZeRO-3 model's weights."""
    inner = unwrap(model)
    is_hooked = any("pre_bwd_fn" in vars(module) for module in inner.modules())
    needs_all = not is_hooked and any(hasattr(p, _ZERO3) for p in inner.parameters())
    return full_params(model) if needs_all else nullcontext()


# A model, and a function that runs one idle pass of it, without a result.
Scorer = tuple[nn.Module, Callable[[], object]]


def missing_passes(model: nn.Module, num_passes: int, device: torch.device) -> int:
    """Number of extra passes of a partitioned model that this rank has to run; 0 for any other model.

    All ranks must call it before the first pass, each with its own number of passes.
    """
    if world_size() == 1 or not is_sharded(unwrap(model)):
        return 0
    return int(max_over_ranks([num_passes], device)[0]) - num_passes


@contextmanager
def in_company(models: Sequence[Scorer], device: torch.device) -> Iterator[None]:
    """Inside, ranks may run different numbers of no-grad forward passes of partitioned models.

    All ranks must enter.

    Before each pass the ranks agree which model runs: the first in `models` that any rank requests. A rank that did
    not request it runs the model's idle pass, without a result, and requests again. A rank that has finished runs idle
    passes until all ranks have finished.

    If a rank raises inside, its process must end, and the launcher ends the others: the failing rank cannot know which
    passes they wait for.

    Args:
        models: Each with its idle pass, in the same order on all ranks. Models that are not partitioned are ignored.
        device: Device for the communication between ranks.
    """
    sharded = [(unwrap(model), idle) for model, idle in models if is_sharded(unwrap(model))]
    if world_size() == 1 or not sharded:
        yield
        return
    turns = _Turns([idle for _, idle in sharded], device)
    handles = [
        model.register_forward_pre_hook(turns.hook_of(number), prepend=True)
        for number, (model, _) in enumerate(sharded)
    ]
    try:
        yield
        turns.wait_for(len(sharded))
    finally:
        for handle in handles:
            handle.remove()
        for model, _ in sharded:
            release(model)


class _Turns:
    """Lets ranks agree on the model that runs next: the smallest number that any rank requests."""

    def __init__(self, idle_passes: Sequence[Callable[[], object]], device: torch.device) -> None:
        self._idle_passes = idle_passes
        self._device = device
        self._is_idle = False

    def hook_of(self, number: int) -> Callable[..., None]:
        """A hook that waits for the model's turn before each of its passes."""

        def hook(*_: object) -> None:
            if not self._is_idle:
                self.wait_for(number)

        return hook

    def wait_for(self, wanted: int) -> None:
        """Take part in passes of others until it is `wanted`'s turn; the number of models means until all finish."""
        while (turn := int(min_over_ranks([wanted], self._device)[0])) != wanted:
            self._is_idle = True
            try:
                self._idle_passes[turn]()
            finally:
                self._is_idle = False
