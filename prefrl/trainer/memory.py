"""What to tell when memory runs out: what the run was doing, and which options make it need less."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch

from prefrl.errors import OutOfMemoryError, PrefrlError

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from prefrl.types import TokenBatch

__all__ = [
    "CHECKPOINT",
    "EVALUATION",
    "GENERATION",
    "SCORING",
    "TRAINING",
    "UPDATE",
    "explained",
    "is_out_of_memory",
    "size_of",
]

# Errors of torch that have no type of their own.
_WORDS = (
    *("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory"),  # what torch does not allocate itself
)
_LENGTHS = ("max_completion_length", "max_length")
# For each kind of work the options that decide its memory, the best first. A config need not have all of them.
TRAINING = ("max_tokens_per_micro_batch", "activation_checkpointing", "activation_offloading", *_LENGTHS)
SCORING = ("max_tokens_per_micro_batch", *_LENGTHS)
GENERATION = ("cache_implementation", "max_completion_length", "per_device_train_batch_size")
EVALUATION = ("per_device_eval_batch_size", *_LENGTHS)
CHECKPOINT = ("save_only_model",)
UPDATE = ("optim",)
_MOST = 3  # options that are named
_MOST_CHARACTERS = 200  # of the error, whose whole text is that of the cause
# Options that are neither numbers nor switches: the values that need less memory, first the one to try.
_LEAN = {"cache_implementation": ("offloaded",), "optim": ("adafactor", "sgd")}
_ON_GPUS = ("activation_offloading", "cache_implementation")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or Python says that the device or the host has no memory left."""
    if isinstance(error, PrefrlError):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@contextmanager
def explained(work: Callable[[], str], args: TrainingArguments, options: Sequence[str]) -> Iterator[None]:
    """Context of work that may need more memory than there is.

    Args:
        work: Says what the work is.
        args: Options.
        options: Names of those that decide how much memory the work needs, the best first.

    Raises:
        OutOfMemoryError: Memory ran out. It says so of this work, with the options and their values.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"out of memory in {work()}: {_beginning(error)}{_remedies(args, options)}") from error


def size_of(batch: TokenBatch) -> str:
    """How much is in a batch, in words."""
    return f"{batch.num_rows} rows and {batch.num_forward_tokens:,} tokens"


def _beginning(error: BaseException) -> str:
    text = shorten(str(error).strip().partition("\n")[0], _MOST_CHARACTERS) or type(error).__name__
    return text if text.endswith((".", "]")) else f"{text}."


def _remedies(args: TrainingArguments, names: Sequence[str]) -> str:
    is_on_host = args.device.type == "cpu"
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    found = [_remedy(name, value) for name, value in given.items() if not (is_on_host and name in _ON_GPUS)]
    words = "; ".join([remedy for remedy in found if remedy][:_MOST])
    return f" To reduce it: {words}." if words else ""


def _remedy(name: str, value: Any) -> str:
    """What to do about an option; nothing if it has the value that needs least."""
    value = getattr(value, "value", value)  # of an enumeration
    now = f"(now {value})"
    if name in _LEAN:
        return "" if value in _LEAN[name] else f"set {name}={_LEAN[name][0]!r} {now}"
    if isinstance(value, bool):
        return "" if value else f"set {name}=True {now}"
    return f"{'set' if value is None else 'lower'} {name} {now}"
