"""Liger's real Triton kernels give the numbers of the model without them, in Triton's interpreter on the CPU."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.kernels_worker import CANNOT, CASES, Finding
from tests.interpreter import PACKAGES, environment
from tests.launch import run

# The first test waits for all that were asked for.
_SECONDS = 5400
pytestmark = pytest.mark.timeout(_SECONDS + 60)
# The one that continuous integration runs; `make kernels` runs all.
FIRST = "llama"
# Relative differences by norm, in float32.
LOGPROBS, GRADIENT = 1e-6, 2e-5


def params(names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name == FIRST else pytest.mark.kernels) for name in names]


@pytest.fixture(scope="module")
def findings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    """Of all cases that are asked for, from one process: to import everything takes longer than most cases."""
    if not PACKAGES.is_dir():
        pytest.skip(f"{PACKAGES} has Triton and Liger after `make kernels`")
    items = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items if isinstance(item, pytest.Function)]
    result = tmp_path_factory.mktemp("kernels") / "kernels.json"
    command = [sys.executable, "-m", "tests.contract.kernels_worker", str(result), *names]
    run(command, seconds=_SECONDS, environment=environment() | {"OMP_NUM_THREADS": "1"})
    text = json.loads(result.read_text(encoding="utf-8"))
    if "PREFRL_KERNELS_JSON" in os.environ:  # for docs/make_tables.py
        kept = {name: finding for name, finding in text["findings"].items() if not finding["error"]}
        figures = json.dumps(text | {"findings": kept}, indent=1) + "\n"
        Path(os.environ["PREFRL_KERNELS_JSON"]).write_text(figures, encoding="utf-8")
    return {name: Finding(**finding) for name, finding in text["findings"].items()}


@pytest.mark.parametrize("name", params(CASES))
def test_log_probs_and_gradients_are_those_without_it(name: str, findings: dict[str, Finding]) -> None:
    found = findings[name]
    assert found.error == ""
    assert found.kernels == CASES[name].kernels
    assert found.lost == []
    assert "padded" in found.differences
    for plan, (logprobs, gradient) in found.differences.items():
        assert logprobs < LOGPROBS, plan
        assert gradient < GRADIENT, plan


@pytest.mark.parametrize("name", params(CANNOT))
def test_what_does_not_run_in_the_interpreter_still_does_not(name: str, findings: dict[str, Finding]) -> None:
    """If it begins to run, it belongs to the cases above."""
    assert re.search(CANNOT[name].cannot, findings[name].error)
