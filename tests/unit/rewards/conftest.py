"""What tests of rewards share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefrl.rewards import confinement, maths
from prefrl.rewards.math_checker import MathChecker
from tests.patience import PATIENCE


@pytest.fixture(scope="module", autouse=True)
def patient_checker() -> Iterator[None]:
    """The checker of `accuracy_reward` gives its workers time: an answer that comes late scores 0."""
    before, maths._checker = maths._checker, MathChecker(timeout=PATIENCE, budget=10 * PATIENCE, num_workers=2)
    yield
    maths._checker.close()
    maths._checker = before


@pytest.fixture(autouse=True)
def patient_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late rewards end processes of their own in these tests, see `hostile_worker`, and never the one that tests."""
    monkeypatch.setattr(confinement, "_GRACE_S", 10 * PATIENCE)
