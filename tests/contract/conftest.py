from __future__ import annotations

from tests.plans import checked_once  # noqa: F401 - of all tests here
