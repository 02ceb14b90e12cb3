"""The precision that a pass computes in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["coarsest_dtype", "of_products"]


def coarsest_dtype(model: PreTrainedModel, output: Tensor) -> torch.dtype:
    """Of those that a pass which gave `output` computed in."""
    # ZeRO-3 would gather a `weight` that is asked for by name here, and would do so in each pass from then on.
    dtypes = [output.dtype, next(model.get_input_embeddings().parameters()).dtype]
    if torch.is_autocast_enabled(output.device.type):
        dtypes.append(torch.get_autocast_dtype(output.device.type))
    coarsest: torch.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return of_products(coarsest, output.device.type)


def of_products(dtype: torch.dtype, device: str) -> torch.dtype:
    """What matrix products of tensors of this dtype round their inputs to, on a type of device.

    TensorFloat-32 keeps 10 bits of a number, as float16 does.
    """
    is_tf32 = device == "cuda" and dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return torch.float16 if is_tf32 else dtype
