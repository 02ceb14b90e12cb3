"""What may be shown, and what is masked."""

from __future__ import annotations

import functools
import time

import pytest

from prefrl.errors import ConfigError, GenerationError, masked, plain, printable, reason_of, without_secrets

HOSTILE = {
    "\x1b]52;c;ZXZpbA==\x07": r"\x1b]52;c;ZXZpbA==\x07",  # sets the clipboard
    "a\x00b": r"a\x00b",
    "\x9b2J": r"\x9b2J",  # C1: clears the screen
    "\u202egnp.exe": r"\u202egnp.exe",  # written from right to left
    "\ud800": r"\ud800",
    "over\rwritten": r"over\rwritten",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_control_characters_are_shown_and_not_sent(text: str) -> None:
    assert printable(text) == HOSTILE[text]


def test_words_lines_and_emoji_stay_as_they_are() -> None:
    text = "na\u00efve\n\t\u6f22\u5b57 :smile: [red] \U0001f600"
    assert printable(text, max_characters=len(text), max_lines=2) == text


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_characters": 3}, "a\nb\n... (4 more characters)"),
        ({"max_lines": 2}, "a\nb\n... (4 more characters)"),
        ({"max_characters": 5, "max_lines": 2}, "a\nb\n... (4 more characters)"),
    ],
)
def test_a_text_is_cut_off_visibly(limits: dict[str, int], expected: str) -> None:
    assert printable("a\nb\nc\nd", **limits) == expected


def test_what_is_cut_off_costs_nothing() -> None:
    started = time.process_time()
    printable("\n" * 10**6 + "x" * 10**7, max_characters=1000, max_lines=10)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model_init_kwargs={'token': 'abc', 'dtype': 'x'}", "model_init_kwargs={'token': '***', 'dtype': 'x'}"),
        ('{"hub_token": "abc", "a": 1}', '{"hub_token": "***", "a": 1}'),
        ("password='it\"s'", "password='***'"),
        ("http://user:p@ss@host:1/x", "http://***@host:1/x"),
        ("401 for hf_abcdefghijklmnopqrst!", "401 for ***!"),
        ("Authorization: Bearer abcdefghijklmnop.qr", "Authorization: Bearer ***"),
    ],
)
def test_secrets_in_texts_are_masked(text: str, expected: str) -> None:
    assert without_secrets(text) == expected


@pytest.mark.parametrize(
    "text", ["pad_token='<pad>'", "max_tokens='3'", "mail me@host", "http://host/a@b", "hf_model"]
)
def test_other_words_are_not_masked(text: str) -> None:
    assert without_secrets(text) == text


def test_secrets_in_options_are_masked_at_any_depth() -> None:
    options = {
        "hub_token": "s",
        "token": True,
        "kwargs": {"api_key": "s", "urls": ("http://u:s@h",)},
        "pad_token": "p",
    }
    assert masked(options) == {
        "hub_token": "***",
        "token": True,
        "kwargs": {"api_key": "***", "urls": ("http://***@h",)},
        "pad_token": "p",
    }
    assert options["hub_token"] == "s", "the options themselves were changed"


def test_errors_quote_options_without_secrets_and_servers_without_commands() -> None:
    assert str(ConfigError("model_init_kwargs={'token': 'abc'}")) == "model_init_kwargs={'token': '***'}"
    assert str(GenerationError("it says \x1b[2J")) == r"it says \x1b[2J"


def test_an_error_of_other_code_is_told_in_one_line_without_secrets() -> None:
    error = ConnectionError("no route to\n  https://me:secret@host\x1b[2J.\n")
    assert reason_of(error) == r"ConnectionError: no route to https://***@host\x1b[2J"


class Reads:
    def __call__(self, text: str) -> str:
        return text


def test_what_can_be_called_is_written_by_its_name() -> None:
    assert plain(plain) == plain(functools.partial(plain)) == "prefrl.errors.plain"
    assert plain(Reads()) == f"{__name__}.Reads"
    assert plain("text") == "text"
