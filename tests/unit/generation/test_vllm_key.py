"""Who has the key of a user's servers."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from prefrl.errors import ConfigError
from prefrl.generation.server import check_key, key_file, key_of_user


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Environment variables of a user without a key."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


def test_server_and_trainer_of_a_user_have_the_same_key_which_nobody_else_can_read(home: dict[str, str]) -> None:
    key = key_of_user(home)
    assert len(key) == 64
    assert key_of_user(home) == key
    path = key_file(home)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path], "a draft is left"


def test_another_user_has_another_key(home: dict[str, str], tmp_path: Path) -> None:
    assert key_of_user(home) != key_of_user({"XDG_CONFIG_HOME": str(tmp_path / "other")})


def test_the_variable_wins_and_no_file_is_made(home: dict[str, str]) -> None:
    assert key_of_user(home | {"VLLM_API_KEY": "k" * 40}) == "k" * 40
    assert not key_file(home).exists()


def test_a_file_that_others_can_read_or_that_is_a_link_is_refused(home: dict[str, str], tmp_path: Path) -> None:
    key_of_user(home)
    path = key_file(home)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"vllm_api_key: other users can read or change this key\. Remove the file"):
        key_of_user(home)
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="VLLM_API_KEY is not set, and there is no file for a key"):
        key_of_user(home)


@pytest.mark.parametrize("key", ["pass word" * 5, "secret\n" * 8, "schl\u00fcssel" * 5, "a" * 31])
def test_a_key_that_is_short_or_fits_no_header_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError, match=r"Set another key|has 31 characters, but must have at least 32") as caught:
        check_key(key)
    assert key not in str(caught.value)
