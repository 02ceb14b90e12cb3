from __future__ import annotations

from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.generation.base import SamplingParams


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"num_samples": 0}, "num_samples=0: must be at least 1"),
        pytest.param({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        pytest.param({"temperature": -0.1}, "temperature=-0.1: must be at least 0"),
        pytest.param({"temperature": float("inf")}, "temperature=inf"),
        pytest.param({"temperature": float("nan")}, "temperature=nan"),
        pytest.param({"top_p": 0.0}, r"top_p=0.0: must be in \(0, 1\]"),
        pytest.param({"top_p": 1.1}, "top_p=1.1"),
        pytest.param({"top_k": -1}, "top_k=-1: must be at least 1; None switches it off"),
        pytest.param({"min_p": -0.1}, "min_p=-0.1"),
        pytest.param({"min_p": 1.5}, "min_p=1.5"),
        pytest.param({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be above 0"),
        pytest.param({"logprobs": "top"}, "logprobs='top': must be one of"),
    ],
)
def test_a_value_outside_its_range_names_field_value_and_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**({"num_samples": 1, "max_tokens": 1} | values))


def test_the_ends_of_the_ranges_are_allowed() -> None:
    SamplingParams(num_samples=1, max_tokens=1, temperature=0, top_p=1, top_k=0, min_p=0.0)
    SamplingParams(num_samples=1, max_tokens=1, top_p=1e-6, top_k=1, min_p=1.0)
