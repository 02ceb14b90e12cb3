"""Differences between DDP, DeepSpeed and FSDP2 in a training step, and for models other than the trained one."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from prefrl.distributed.processes import is_distributed, num_processes
from prefrl.errors import ConfigError, require

# Attribute of a frozen model that holds its DeepSpeed engine.
_ENGINE = "_prefrl_engine"


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, backward passes accumulate gradients locally; the next one outside synchronizes them."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def announce_backward(accelerator: Any, *, is_last: bool) -> None:
    """Tell the backend whether the next backward pass is the last of an optimizer step, in which DeepSpeed updates."""
    accelerator.gradient_state._set_sync_gradients(is_last)


def updates_in_backward(accelerator: Any) -> bool:
    """Whether the optimizer's step is part of the last backward pass, so gradients cannot be changed after it."""
    return bool(accelerator.distributed_type == "DEEPSPEED")


def tell_ddp(accelerator: Any, model: Any, args: Any, idle_pass: Callable[[], torch.Tensor]) -> None:
    """Let DDP look for weights without a gradient in each pass only if there may be some, unless the user has decided.

    Layers that are dropped at random are not seen in a single pass, so DDP looks for these.

    Args:
        accelerator: The backend.
        model: The model that is trained, with all that was added to it, such as a critic.
        args: Options.
        idle_pass: The pass of a process without rows. Weights that it does not reach may have no gradient: an expert
            that few tokens choose is one of them.
    """
    handler = accelerator.ddp_handler
    is_undecided = args.ddp_find_unused_parameters is None and handler is not None and handler.find_unused_parameters
    is_random = args.torch_compile or any(getattr(module, "layerdrop", 0.0) for module in model.modules())
    if not is_undecided or is_random or not str(accelerator.distributed_type.value).startswith("MULTI_"):
        return
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # dropout would change the random state
    with accelerator.autocast():
        reached = _leaves(idle_pass())
    for module, was_training in modes:
        module.training = was_training
    handler.find_unused_parameters = any(p.requires_grad and id(p) not in reached for p in model.parameters())


def _leaves(output: torch.Tensor) -> set[int]:
    """The ids of the weights that a tensor depends on."""
    seen: set[Any] = set()
    todo: list[Any] = [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


def tell_deepspeed() -> None:
    """Initialize DeepSpeed for ZeRO-3 before a model is loaded: on CPUs accelerate creates the group without it."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled() and is_distributed():
        deepspeed = require("deepspeed", extra="deepspeed", feature="ZeRO-3")
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)


def leave_out_update(accelerator: Any, optimizer: Any, *, leaves_out: bool) -> None:
    """Decide whether the update that follows is left out: weights, optimizer and scheduler stay as they are.

    After `leave_out_update_if`, the device has decided, and it is called after the update, with the same decision.
    DeepSpeed has decided by itself: it leaves out an update whose gradient norm is not finite.
    """
    if updates_in_backward(accelerator):
        return
    vars(optimizer.optimizer).pop("found_inf", None)
    optimizer._is_overflow = leaves_out  # HuggingFace's loop then leaves the scheduler alone
    if not leaves_out:
        return
    accelerator.gradient_state._set_sync_gradients(False)  # accelerate's optimizer then does nothing
    if accelerator.scaler is not None:
        accelerator.scaler.update()  # ends the step that began with unscaling


def updates_conditionally(accelerator: Any, optimizer: Any, device: torch.device) -> bool:
    """Whether `leave_out_update_if` works: with torch's fused Adam, and with all of its weights on the device."""
    if updates_in_backward(accelerator) or accelerator.scaler is not None:
        return False
    inner = optimizer.optimizer
    if type(inner) not in (torch.optim.Adam, torch.optim.AdamW):  # others may change their state all the same
        return False
    groups = inner.param_groups
    return all(group["fused"] and {p.device for p in group["params"]} <= {device} for group in groups)


def leave_out_update_if(optimizer: Any, condition: torch.Tensor) -> None:
    """Let the device decide whether the update that follows is left out, so that the host need not know yet.

    Call `leave_out_update` after the update, once the host knows.

    Args:
        optimizer: One with which `updates_conditionally`.
        condition: [] bool.
    """
    optimizer.optimizer.found_inf = condition.float()  # the attribute through which a GradScaler tells it, too


def is_finding_scale(accelerator: Any) -> bool:
    """Whether gradients may overflow because the loss scale of float16 is still too large. Its scaler then skips."""
    if accelerator.mixed_precision != "fp16":
        return False
    scaler = accelerator.scaler
    if scaler is not None:
        return bool(scaler.get_scale() > 1.0)
    return bool(accelerator.deepspeed_engine_wrapped.engine.optimizer.loss_scale > 1.0)


def loss_scale(accelerator: Any) -> float:
    """What gradients are multiplied by until float16's scaler divides them, before clipping; 1 without float16."""
    return 1.0 if accelerator.scaler is None else float(accelerator.scaler.get_scale())


@contextmanager
def divided_update(accelerator: Any, model: nn.Module, divisor: float) -> Iterator[None]:
    """Divide all gradients of an optimizer step by `divisor` before the update.

    Run the step's last backward pass inside, if there is one left; its loss must be 0.

    Raises:
        ConfigError: The backend scales losses by itself.
    """
    announce_backward(accelerator, is_last=True)
    if not updates_in_backward(accelerator):
        yield
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        return
    # DeepSpeed divides gradients by the loss scale before clipping and the update.
    optimizer = accelerator.deepspeed_engine_wrapped.engine.optimizer
    if not hasattr(optimizer, "override_loss_scale") or accelerator.mixed_precision == "fp16":
        raise ConfigError(
            f"generation_mode='overlap': DeepSpeed's {type(optimizer).__name__} cannot divide the gradients of a "
            "whole step. Use generation_mode='async', or ZeRO-2 or ZeRO-3 without fp16."
        )
    optimizer.override_loss_scale(divisor)
    try:
        yield
    finally:
        optimizer.override_loss_scale(1.0)


def keep_outputs_exact(accelerator: Any) -> None:
    """Keep FSDP2 from rounding a model's outputs to the dtype of its parameters: log-probs and values are float32."""
    if not accelerator.is_fsdp2:
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)


def prepare_frozen(accelerator: Any, model: nn.Module) -> None:
    """Partition a frozen model in place, if the backend partitions weights. A second call changes nothing."""
    if _ENGINE in vars(model) or isinstance(model, FSDPModule):
        return
    if accelerator.distributed_type == "DEEPSPEED":
        config = _inference_config(accelerator.state.deepspeed_plugin.deepspeed_config, model)
        engine, *_ = sys.modules["deepspeed"].initialize(model=model, config=config)
        engine.eval()
        vars(model)[_ENGINE] = engine  # lives as long as the model, without being registered as a submodule
    elif accelerator.is_fsdp2:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        fsdp2_prepare_model(accelerator, model)


def _inference_config(training: dict[str, Any], model: Any) -> dict[str, Any]:
    """DeepSpeed's config for a model without an optimizer: partitioned with ZeRO-3, whole in lower stages."""
    config = copy.deepcopy(training)
    zero = config["zero_optimization"]
    if zero["stage"] != 3:
        zero = {"stage": 0}  # the engine still casts the weights to the dtype of the policy
    for name in ("optimizer", "scheduler"):
        config.pop(name, None)
    zero.pop("offload_optimizer", None)
    # The values that transformers substitutes for "auto" for the trained model.
    hidden = model.config.get_text_config().hidden_size
    sizes = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    zero |= {name: size for name, size in sizes.items() if zero.get(name) == "auto"}
    return config | {
        "zero_optimization": zero,
        "train_batch_size": num_processes(),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
    }
