"""From turns to the rows of a batch."""

from __future__ import annotations

import math

import pytest
import torch

from prefrl.rollout.batches import responses_of, sampled_batch, token_counts, turn_index, turn_rewards
from prefrl.types import Completion, Episode, FinishReason, Rollout, StopReason, Turn


def turn(sent: list[int], sampled: list[int], *, reason: FinishReason = "stop") -> Turn:
    trainable = [token != 99 for token in sampled]
    return Turn(sent, Completion(sampled, reason, [-float(i) for i in sampled], trainable, [0] * len(sampled)))


def rollout(*turns: Turn, group: int = 0, reason: StopReason = "stop", rewards: list[float] | None = None) -> Rollout:
    return Rollout([*turns], {}, group, episode=Episode("X", reason, rewards or [0.0] * len(turns)))


GROWING = rollout(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5, 6], [7]), turn([1, 2, 3, 4, 5, 6, 7], [8, 99]))
# The second turn does not see all of the first; the third goes on with the second.
EDITED = rollout(turn([1, 2], [3, 4]), turn([1, 2, 4, 5], [6]), turn([1, 2, 4, 5, 6, 9], [7, 8]), group=1)


def test_turns_are_one_response_as_long_as_each_sends_all_that_came_before() -> None:
    (response,) = responses_of(GROWING)
    assert (response.prompt_ids, response.token_ids) == ([1, 2], [3, 4, 5, 6, 7, 8, 99])
    assert response.trainable == [True, True, False, False, True, True, False]
    assert response.logprobs == [-3.0, -4.0, 0.0, 0.0, -7.0, -8.0, -99.0]
    assert response.turn == [0, 0, 0, 0, 1, 2, 2]
    first, second = responses_of(EDITED)
    assert (first.prompt_ids, first.token_ids, first.turn) == ([1, 2], [3, 4], [0, 0])
    assert (second.prompt_ids, second.token_ids, second.turn) == ([1, 2, 4, 5], [6, 9, 7, 8], [1, 1, 2, 2])
    assert second.trainable == [True, False, True, True]


@pytest.mark.parametrize("sent", [[1, 2, 3], [1, 2, 3, 5], [1, 9, 3, 4, 5], [2, 3, 4]])
def test_anything_else_is_a_response_of_its_own(sent: list[int]) -> None:
    assert [one.prompt_ids for one in responses_of(rollout(turn([1, 2], [3, 4]), turn(sent, [7])))] == [[1, 2], sent]


def test_what_was_sent_and_sampled_is_not_changed() -> None:
    before = repr(GROWING)
    responses_of(GROWING)
    sampled_batch([GROWING, EDITED], mask_truncated=True)
    assert repr(GROWING) == before


def test_a_rollout_is_a_row_however_many_responses_it_has() -> None:
    batch = sampled_batch([GROWING, EDITED], mask_truncated=False)
    assert (batch.num_rows, batch.response_row, batch.group_index) == (2, (0, 1, 1), (0, 1))
    assert batch.response_ids.tolist() == [3, 4, 5, 6, 7, 8, 99, 3, 4, 6, 9, 7, 8]
    assert batch.sampling_logprobs.tolist() == [-3, -4, 0, 0, -7, -8, -99, -3, -4, -6, 0, -7, -8]
    assert batch.trainable.tolist() == [True, True, False, False, True, True, False, *[True] * 3, False, True, True]
    assert batch.trainable_counts == (4, 5)
    assert turn_index([GROWING, EDITED]).tolist() == [0, 0, 0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize(
    ("reason", "is_masked"),
    [
        *[(reason, True) for reason in ("max_tokens", "context", "timeout")],
        *[(reason, False) for reason in ("stop", "max_turns", "tool_done", "parse_error")],
    ],
)
def test_episodes_that_were_cut_off_can_be_left_out(reason: StopReason, is_masked: bool) -> None:
    cut = rollout(*EDITED.turns, reason=reason)
    assert sampled_batch([GROWING, cut], mask_truncated=True).trainable_counts == (4, 0 if is_masked else 5)
    assert sampled_batch([GROWING, cut], mask_truncated=False).trainable_counts == (4, 5)


def test_the_last_turn_has_what_the_observations_do_not() -> None:
    rollouts = [
        rollout(*GROWING.turns, rewards=[0.5, 0.0, 0.25]),
        rollout(turn([1], [2])),
        rollout(*EDITED.turns, rewards=[1.0, 0.0, 0.0]),
        Rollout([turn([1], [2])], {}, 0),  # no episode at all
    ]
    rewards, of = turn_rewards(rollouts, torch.tensor([2.0, 3.0, math.nan, 4.0]))
    assert of.tolist() == [0, 0, 0, 1, 2, 2, 2, 3]
    assert rewards.tolist()[:6] == [0.5, 0.0, 1.5, 3.0, 1.0, 0.0]
    assert rewards[6].isnan()
    assert rewards.tolist()[7:] == [4.0]
    assert rollouts[0].episode is not None
    assert rollouts[0].episode.turn_rewards == [0.5, 0.0, 0.25]


def test_tokens_are_counted_alone_and_shared() -> None:
    prompt = [*range(20)]
    stripped = rollout(turn(prompt, [30, 31, 32]), turn([*prompt, 32, 40], [33]))
    rollouts = [stripped, rollout(turn(prompt, [50]))]
    counts = token_counts(rollouts, sampled_batch(rollouts, mask_truncated=False))
    assert counts["episodes/mean_tokens"].value() == ((20 + 3) + (22 + 1) + (20 + 1)) / 2
    assert counts["episodes/mean_forward_tokens"].value() == (20 + 2 + 3 + 1 + 1) / 2
    alone = [Rollout([turn(prompt, [50])], {}, 0)]
    assert token_counts(alone, sampled_batch(alone, mask_truncated=False)) == {}
