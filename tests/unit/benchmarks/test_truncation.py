from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import prefrl_side
from benchmarks.truncation import FORMS, SAMPLING, cells, workload_of
from prefrl.losses.truncation import Truncation
from tests.unit.benchmarks.conftest import measured
from tests.unit.benchmarks.test_sides import setup_of


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
def test_both_forms_sample_alike_and_score_differently(sampling: dict[str, Any], tmp_path: Path) -> None:
    softmax, exact = (prefrl_side.config_of(setup_of(workload_of(512, sampling, form), tmp_path)) for form in FORMS)
    assert softmax.sampling_params() == exact.sampling_params()  # type: ignore[attr-defined]
    cuts = {name: value for name, value in sampling.items() if name != "temperature"}
    assert (softmax.scoring_truncation, exact.scoring_truncation) == (None, Truncation(**cuts))


def test_ratios_are_of_consecutive_turns() -> None:
    softmax = measured([1.0, 2.0, 4.0], num_tokens=3, peak_mib=1000.0).turns
    exact = measured([3.0, 3.0, 4.0], num_tokens=3, peak_mib=2000.0).turns
    assert cells(softmax, exact) == [
        "2.00 (1.00 to 4.00)",
        "3.00 (3.00 to 4.00)",
        "1.50 (1.00 to 3.00)",
        "1,000",
        "2,000",
    ]
