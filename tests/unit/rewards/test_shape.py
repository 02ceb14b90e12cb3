from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.rewards import (
    REWARD_FUNCTIONS,
    format_reward,
    get_cosine_scaled_reward,
    get_length_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    think_format_reward,
)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>2 + 2</think><answer>4</answer>", 1.0),
        ("\n<think>\n2 + 2\n</think>\n<answer>\n4\n</answer>\n", 1.0),
        ("Well. <think>2 + 2</think><answer>4</answer>", 0.0),
        ("<think>2 + 2</think> so <answer>4</answer>", 0.0),
        ("<think>2 + 2</think><answer>4</answer> ok?", 0.0),
        ("<think> </think><answer>4</answer>", 0.0),
        ("<think>2 + 2</think><answer></answer>", 0.0),
        ("<think>2 <think>+ 2</think><answer>4</answer>", 0.0),
        ("<think>2</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<answer>4</answer><think>2 + 2</think>", 0.0),
        ("<think>2 + 2<answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_is_strict(text: str, score: float) -> None:
    assert format_reward([text, "x"]) == [score, 0.0]
    assert format_reward([[{"role": "assistant", "content": text}]]) == [score]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>2 + 2</think>4", 1.0),
        ("<think></think>", 1.0),
        (" <think>2 + 2</think>4", 0.0),
        ("<think>2 <think>+ 2</think>4", 0.0),
        ("<think>2 + 2", 0.0),
        ("4", 0.0),
    ],
)
def test_think_format(text: str, score: float) -> None:
    assert think_format_reward([text]) == [score]


def test_text_is_that_of_the_assistants_last_message() -> None:
    messages = [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "<think>no</think>"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "<think>a"}, {"type": "text", "text": "</think>b"}],
        },
        {"role": "tool", "content": "no"},
    ]
    assert think_format_reward([messages]) == [1.0]


def tokens(*lengths: int) -> list[list[int]]:
    return [list(range(length)) for length in lengths]


def test_soft_overlong_punishment_grows_over_the_last_tokens() -> None:
    reward = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    assert reward(tokens(0, 80, 81, 90, 100, 101)) == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0]
    assert get_soft_overlong_punishment(100, 0)(tokens(100, 101)) == [0.0, -1.0]


def test_repetition_counts_ngrams_of_tokens_that_stood_before() -> None:
    reward = get_repetition_penalty_reward(ngram_size=2, max_penalty=-2.0)
    # 5 5 5 5 5: 4 bigrams, 1 distinct. 1 2 1 2: 3 bigrams, 2 distinct.
    assert reward([[1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2, 1, 2], [1], []]) == pytest.approx([0, -1.5, -2 / 3, 0, 0])


def test_length_reward_is_a_tent_around_the_target() -> None:
    assert get_length_reward(10)(tokens(0, 5, 10, 14, 20, 40)) == pytest.approx([0, 0.5, 1, 0.6, 0, 0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_length_reward(0), "target_len=0"),
        (lambda: get_soft_overlong_punishment(0, 0), "max_completion_len=0"),
        (lambda: get_soft_overlong_punishment(10, 11), "soft_punish_cache=11: needs to be in 0..10"),
        (lambda: get_soft_overlong_punishment(10, -1), "soft_punish_cache=-1"),
        (lambda: get_repetition_penalty_reward(0), "ngram_size=0"),
        (lambda: get_repetition_penalty_reward(3, 0.5), "max_penalty=0.5"),
        (lambda: get_repetition_penalty_reward(3, float("nan")), "max_penalty=nan"),
        (lambda: get_cosine_scaled_reward(0), "max_len=0"),
        (
            lambda: get_cosine_scaled_reward(9, min_value_wrong=0.0),
            "min_value_wrong=0.0 is above max_value_wrong=-0.5",
        ),
        (lambda: get_cosine_scaled_reward(9, max_value_correct=0.0), "swap them"),
    ],
)
def test_bad_numbers_are_refused_at_construction(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        *[(reward, name) for name, reward in REWARD_FUNCTIONS.items()],
        (get_length_reward(5), "length_reward"),
        (get_soft_overlong_punishment(10, 5), "soft_overlong_punishment_reward"),
        (get_cosine_scaled_reward(10), "cosine_scaled_reward"),
    ],
)
def test_built_in_rewards_can_be_pickled_and_have_a_name(reward: Any, name: str) -> None:
    copy = pickle.loads(pickle.dumps(reward))
    assert copy.__name__ == reward.__name__ == name
    ids = [[1, 1, 1, 1, 1, 1, 1], [1, 2]]
    if name.endswith(("length_reward", "punishment_reward", "penalty_reward")):
        assert copy(completion_ids=ids) == reward(completion_ids=ids) != [0.0, 0.0]
