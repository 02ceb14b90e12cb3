from __future__ import annotations

import pytest

from prefrl.models import forward
from tests import plans


@pytest.fixture
def checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test trains models that are built alike, and nothing about their first use matters to it."""
    monkeypatch.setattr(forward, "check_plans", plans.check_plans)
