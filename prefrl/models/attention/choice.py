"""Choose the kernel for flat attention: the first one that supports the inputs and passed its trial."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Protocol

import torch

from prefrl.distributed import is_main
from prefrl.models.attention import block_mask, segments, varlen
from prefrl.models.attention.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KERNELS", "Inputs", "Kernel", "choose_kernel"]

logger = logging.getLogger(__name__)

# Largest relative error of one head at one token, compared with segment-by-segment attention in float32. A kernel that
# computes something else has an error of about 1; TF32 products are meant to pass.
_TOLERANCES = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.1}

# Two forests, since a compiled kernel may be recompiled for the second; lengths below and above a block of 128. In the
# second, queries see several whole blocks, and between the queries that see a part of a block some see all of it.
_TRIALS = (
    ((130, -1), (40, 0), (1, 0), (90, 0), (33, -1)),
    ((7, -1), (200, 0), (3, 1), (150, 2), (30, 1), (20, 0), (1, -1), (600, 6), (40, -1)),
)
_TRIAL_WINDOWS = (None, 20)
# The most copies of keys for each token that the variable-length kernel makes of deep forests.
_MOST_COPIES = 8


@dataclass(frozen=True, slots=True)
class Inputs:
    """The properties of inputs that decide whether a kernel supports them."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scaling: float | None  # included because it is compiled into kernels

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Inputs:
        """From query [1, H, T, D], key [1, KV, T, D] and value [1, KV, T, E]."""
        return cls(query.device, query.dtype, query.size(1), key.size(1), query.size(3), value.size(3), scaling)


class Attend(Protocol):
    """Flat attention without dropout; arguments as in `attention.flat_attention`."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scaling: float | None, window: int | None
    ) -> Tensor:
        """[1, T, H, E]."""
        ...


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute flat attention."""

    name: str
    attend: Attend
    serves: Callable[[Inputs], bool]
    suits: Callable[[Layout], bool] = lambda layout: True
    needs_cuda: bool = False


def _is_for_varlen(inputs: Inputs) -> bool:
    return (
        inputs.dtype in (torch.float16, torch.bfloat16)
        and inputs.key_size == inputs.value_size
        and inputs.key_size % 8 == 0
        and inputs.key_size <= 256
        and varlen.kernel() is not None
    )


def _copies_little(layout: Layout) -> bool:
    """Whether the copies of all ancestors' keys, which the variable-length kernel makes for each segment, are few.

    In a long episode each turn copies the whole history: 31 times the tokens with 50 turns. A group of completions
    copies its prompt, which has always been worth it.
    """

    def count() -> bool:
        segments = layout.segments
        is_deep = any(len(segment.ancestors) > 1 for segment in segments)
        num_keys = sum(segment.position + segment.length for segment in segments)
        return not is_deep or num_keys <= _MOST_COPIES * sum(layout.lengths)

    return layout.once("copies little", count)


# In order of preference. The first needs no compilation but supports half precision only. The second is compiled at
# first use. The last launches kernels for each segment; it works everywhere and is the reference for the others.
KERNELS = (
    Kernel(
        "variable-length",
        varlen.attend,
        _is_for_varlen,
        lambda layout: not layout.blocks and _copies_little(layout),
        needs_cuda=True,
    ),
    Kernel("block-mask", block_mask.attend, lambda inputs: inputs.dtype in _TOLERANCES, needs_cuda=True),
    Kernel("segment-by-segment", segments.attend, lambda inputs: True),
)


def choose_kernel(inputs: Inputs, layout: Layout, kernels: Sequence[Kernel] = KERNELS) -> Kernel:
    """The first of `kernels` that supports `inputs`, suits the layout and passed its trial; the last one needs none.

    A kernel is tried once for each kind of inputs, and the trial waits for the device. A failure is logged once.
    """
    *tried, last = kernels
    if inputs.device.type != "cuda":
        tried = [kernel for kernel in tried if not kernel.needs_cuda]
    return next((k for k in tried if k.serves(inputs) and k.suits(layout) and _passes(k, inputs)), last)


@cache
def _passes(kernel: Kernel, inputs: Inputs) -> bool:
    # A fresh thread has default settings, so the context of a model's first forward pass (autocast, no_grad, gradient
    # checkpointing hooks that count saved tensors) neither affects the trial nor is affected by it.
    with ThreadPoolExecutor(1, thread_name_prefix="prefrl-trial") as pool:
        mistake = pool.submit(_mistake, kernel, inputs).result()
    if mistake is not None and is_main():
        logger.warning("Attention of flat rows does not use its %s kernel for %s: %s", kernel.name, inputs, mistake)
    return mistake is None


def _mistake(kernel: Kernel, inputs: Inputs) -> str | None:
    """What is wrong with the kernel's outputs or gradients on small random inputs; None if nothing is.

    Raises:
        OutOfMemoryError: The device is out of memory, which says nothing about the kernel.
        AcceleratorError: The kernel has left the device in a state in which no other kernel can run.
    """
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    try:
        # Compilation may draw random numbers, which must not affect the training run. Triton launches kernels on the
        # current GPU, which in a fresh thread is the first one.
        with torch.random.fork_rng(devices), torch.cuda.device(inputs.device) if devices else nullcontext():
            trials = product(_TRIALS, _TRIAL_WINDOWS)
            largest = max(error for forest, window in trials for error in _errors(kernel, inputs, forest, window))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # missing compiler, unsupported head size or chip: another kernel is used
        if devices:  # after some errors a process can use its device no more: this raises them again
            torch.cuda.synchronize(inputs.device)
        return f"{type(error).__name__}: {error}"
    if largest <= _TOLERANCES[inputs.dtype]:
        return None
    return f"it differs from segment-by-segment attention by up to {largest:.2g} of the values' size"


def _errors(
    kernel: Kernel, inputs: Inputs, forest: tuple[tuple[int, int], ...], window: int | None
) -> Iterator[float]:
    """Relative errors of the output, of the gradients, and of the output without gradients."""
    query, key, value = _random_tensors(inputs, Layout(forest))
    exact = [x.detach().float().requires_grad_() for x in (query, key, value)]
    expected = segments.attend(exact[0], exact[1], exact[2], Layout(forest), scaling=inputs.scaling, window=window)
    layout = Layout(forest)
    output = kernel.attend(query, key, value, layout, scaling=inputs.scaling, window=window)
    yield _relative_error(output, expected)
    weights = torch.linspace(-1, 1, output.size(1), device=output.device)[:, None, None]
    grads = torch.autograd.grad((output * weights).sum(), (query, key, value))
    for grad, expected_grad in zip(grads, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        yield _relative_error(grad, expected_grad)
    with torch.no_grad():
        query, key, value = (x.detach() for x in (query, key, value))
        output = kernel.attend(query, key, value, layout, scaling=inputs.scaling, window=window)
        yield _relative_error(output, expected)


def _random_tensors(inputs: Inputs, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; the heads of a token are contiguous in memory, as projections produce them."""
    generator = torch.Generator().manual_seed(0)

    def tensor(num_heads: int, size: int) -> Tensor:
        values = torch.randn(1, sum(layout.lengths), num_heads, size, generator=generator)
        return values.to(inputs.device, inputs.dtype).transpose(1, 2).requires_grad_()

    heads, kv_heads = inputs.num_heads, inputs.num_kv_heads
    return tensor(heads, inputs.key_size), tensor(kv_heads, inputs.key_size), tensor(kv_heads, inputs.value_size)


def _relative_error(vectors: Tensor, truth: Tensor) -> float:
    """Largest norm of a vector's error, relative to its norm plus the root mean square norm; infinite for NaN."""
    error = (vectors.detach().float() - truth.detach()).norm(dim=-1)
    norm = truth.detach().norm(dim=-1)
    largest = float((error / (norm + norm.square().mean().sqrt())).max())
    return largest if largest == largest else float("inf")
