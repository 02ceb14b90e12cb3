"""Memory: what passes need of it, what is free, and what to tell when it runs out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import psutil
import torch

from prefrl.errors import OutOfMemoryError, PrefrlError

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from prefrl.types import TokenBatch

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


_CGROUP = Path("/sys/fs/cgroup")
_PEAK_RESET = Path("/proc/self/clear_refs")
# What training holds besides activations, in units of the trained weights: gradients, and Adam's two moments.
_GRADIENTS, _MOMENTS = 1, 2


class TrialMemory:
    """Measures passes that have gradients, and knows what the optimizer will need that has not run yet.

    Args:
        device: Where the passes run.
        share: The most that training may need of the free memory.
        trained: Bytes of the trained weights on this process.
        has_buckets: Whether data parallelism copies gradients into buckets.
    """

    def __init__(self, device: torch.device, *, share: float, trained: int, has_buckets: bool) -> None:
        self._device = device
        self._trained = trained
        self._limit = max(share * free_memory(device) - (_MOMENTS + has_buckets) * trained, 1.0)
        self._start = _used(device)

    @property
    def load(self) -> float:
        """The share of what training may need that the passes so far have needed at most."""
        return max(_peak(self._device) - self._start, 0) / self._limit

    @property
    def load_of_gradients(self) -> float:
        """The share that gradients need."""
        return _GRADIENTS * self._trained / self._limit


def free_memory(device: torch.device) -> float:
    """Bytes that this process can still allocate."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    free = min([psutil.virtual_memory().available, *_left_in_container()])
    return float(free) / int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _left_in_container() -> list[int]:
    """Bytes up to the limit of the container, if it has one."""
    try:
        limit, current = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return [int(limit) - int(current)]
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return []


def _used(device: torch.device) -> int:
    """Bytes in use, from which a new peak is measured."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    with suppress(OSError):  # Linux alone can forget what the process has needed before
        _PEAK_RESET.write_text("5", encoding="ascii")
    return int(psutil.Process().memory_info().rss)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource  # Windows has none
    except ImportError:
        return int(psutil.Process().memory_info().rss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
