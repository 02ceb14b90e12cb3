"""What a trainer says about a run before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefrl import distributed
from prefrl.models.adapters import is_peft_model
from prefrl.trainer.base.trial_memory import free_memory
from prefrl.trainer.progress.banner import quantity

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerState

    from prefrl.trainer.base.config import BaseConfig

__all__ = ["facts_of"]


def facts_of(
    args: BaseConfig, policy: PreTrainedModel, state: TrainerState, rows: Any, *, algorithm: str
) -> dict[str, str]:
    """The model, the data, the rows of a step, the number of steps, the plan and the memory, each in a few words.

    Args:
        args: Options.
        policy: The model that is trained.
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
        "forward plan": args.forward_plan,
        "memory": _memory(args, policy),
        "output": str(args.output_dir),
    }


def _weights(policy: PreTrainedModel) -> str:
    counts = [(distributed.shape_of(p).numel(), p.requires_grad) for p in policy.parameters()]
    trained, total = sum(n for n, trains in counts if trains), sum(n for n, _ in counts)
    if trained == total:
        return f"{quantity(total)}, all of them trained"
    where = " in an adapter" if is_peft_model(policy) else ""
    return f"{quantity(total)}, of which {quantity(trained)}{where} ({trained / max(total, 1):.2%}) are trained"


def _memory(args: BaseConfig, policy: PreTrainedModel) -> str:
    """Bytes of the weights and of the gradients to come, over all processes, and what is free on this one."""
    held = [(distributed.shape_of(p).numel() * p.element_size(), p.requires_grad) for p in policy.parameters()]
    weights, gradients = sum(n for n, _ in held), sum(n for n, trains in held if trains)
    return (
        f"{quantity(weights, 'B')} of weights and {quantity(gradients, 'B')} of gradients, besides optimizer and "
        f"activations; {quantity(free_memory(args.device), 'B')} free on {args.device}"
    )
