"""The reward and the questions of the demo with a real model."""

from __future__ import annotations

import re

import pytest

from prefrl.scripts.demo import gives_number, is_right, make_chat_questions


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
