"""Precisions that a device does not have, and what torch.compile cannot do here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from prefrl import ConfigError, SFTConfig
from prefrl.losses.truncation import cumsum_permitted
from prefrl.models.modes import of_products


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp8": True, "bf16": True}, "fp8=True on CPU: 8-bit products need a GPU of compute capability 8.9"),
        ({"tf32": True}, "tf32 requires Ampere"),
        ({"torch_compile_backend": "inductr"}, "torch_compile_backend='inductr': unknown. Did you mean 'inductor'?"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SFTConfig(output_dir="x", use_cpu=True, **options)


def test_fp8_is_an_option_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match="Remove it, and set fp8=True with bf16=True"):
        SFTConfig(output_dir="x", use_cpu=True)


def test_tensor_float_32_is_as_coarse_as_float16_on_gpus_alone() -> None:
    assert of_products(torch.float32, "cuda") == torch.float32
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert of_products(torch.float32, "cuda") == torch.float16
        assert of_products(torch.float32, "cpu") == torch.float32
        assert of_products(torch.bfloat16, "cuda") == torch.bfloat16
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("is_on", [False, True])
def test_cumulative_sums_are_permitted_only_inside(is_on: bool) -> None:
    refused = torch.zeros(3)  # put_ without accumulate has no deterministic form on any device
    try:
        torch.use_deterministic_algorithms(is_on)
        with cumsum_permitted():
            assert torch.are_deterministic_algorithms_enabled() is is_on
            refused.put_(torch.tensor([0]), torch.tensor([1.0]))
        assert torch.are_deterministic_algorithms_enabled() is is_on
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
