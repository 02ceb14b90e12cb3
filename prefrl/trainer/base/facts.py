"""What a trainer says about a run before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefrl import distributed
from prefrl.models.adapters import is_peft_model
from prefrl.models.footprint import optimizer_bytes, weights_of
from prefrl.models.forward import plan_in_words
from prefrl.trainer.memory import free_memory
from prefrl.trainer.progress.history import quantity

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerState

    from prefrl.trainer.base_config import BaseConfig

__all__ = ["facts_of"]


def facts_of(
    args: BaseConfig,
    policy: PreTrainedModel,
    ref_model: PreTrainedModel | None,
    state: TrainerState,
    rows: Any,
    *,
    algorithm: str,
) -> dict[str, str]:
    """The model, the data, the rows of a step, the number of steps, the plan and the memory, each in a few words.

    Args:
        args: Options.
        policy: The model that is trained.
        ref_model: The reference, if it is a model of its own.
        state: HuggingFace's state at the start of training.
        rows: The training set.
        algorithm: Its name.
    """
    start = f", from {state.global_step + 1:,} on" if state.global_step else ""
    return {
        "algorithm": algorithm,
        "model": f"{policy.name_or_path or type(policy).__name__}, {policy.dtype}".replace("torch.", ""),
        "weights": _weights(policy),
        "data": f"{len(rows):,} rows" if hasattr(rows, "__len__") else "a stream of rows",
        "a step": args.rows_in_words,
        "steps": f"{state.max_steps:,}{start}, at a learning rate of {args.learning_rate:g}",
        "forward plan": _plan(args, policy),
        "memory": _memory(args, policy, ref_model),
        "output": str(args.output_dir),
    }


def _weights(policy: PreTrainedModel) -> str:
    counts = [(distributed.shape_of(p).numel(), p.requires_grad) for p in policy.parameters()]
    trained, total = sum(n for n, trains in counts if trains), sum(n for n, _ in counts)
    if trained == total:
        return f"{quantity(total)}, all of them trained"
    where = " in an adapter" if is_peft_model(policy) else ""
    return f"{quantity(total)}, of which {quantity(trained)}{where} ({trained / max(total, 1):.2%}) are trained"


def _plan(args: BaseConfig, policy: PreTrainedModel) -> str:
    # Only the main process asks, and with several of them the self-check is a matter of all.
    return plan_in_words(policy, args.forward_plan) if distributed.num_processes() == 1 else args.forward_plan


def _memory(args: BaseConfig, policy: PreTrainedModel, ref_model: PreTrainedModel | None) -> str:
    """Bytes that do not depend on the rows, over all processes, and what is free on this one."""
    weights = weights_of(policy)
    parts = {
        "weights": weights.total,
        "gradients": weights.trained,
        "optimizer": optimizer_bytes(weights, str(getattr(args.optim, "value", args.optim))),
        "reference": 0 if ref_model is None else weights_of(ref_model).total,
    }
    named = ", ".join(f"{name} {quantity(size, 'B')}" for name, size in parts.items() if size)
    return (
        f"{quantity(sum(parts.values()), 'B')} ({named}) and the activations; "
        f"{quantity(free_memory(args.device), 'B')} free on {args.device}"
    )
