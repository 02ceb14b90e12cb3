"""Heavy imports without the garbage collector."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest

from prefrl.scripts.startup import uncollected


def test_what_is_imported_is_not_collected_meanwhile_nor_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    frozen = gc.get_freeze_count()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_objects_of_a_program_that_has_imported_transformers_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    frozen = gc.get_freeze_count()
    with uncollected():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
