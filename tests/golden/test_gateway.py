"""What curl is answered in each wire format is what was written down."""

from __future__ import annotations

import shutil

import pytest

from tests.golden.make_gateway import STORED, transcript


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_is_answered_as_it_was() -> None:
    assert transcript() == STORED.read_text(encoding="utf-8")
