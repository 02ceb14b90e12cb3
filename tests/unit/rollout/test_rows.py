"""From turns to the rows of a batch, and from completions to rollouts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from prefrl.errors import EpisodeError
from prefrl.rewards.runner import RewardRunner
from prefrl.rollout.batches import responses_of, sampled_batch, token_counts, turn_index, turn_rewards
from prefrl.rollout.collect import Collector, Request
from prefrl.rollout.turns import first_tokens, with_new_routes
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
    counts = token_counts(rollouts, sampled_batch(rollouts, mask_truncated=False), num_trained=0)
    assert counts["episodes/mean_tokens"].value() == ((20 + 3) + (22 + 1) + (20 + 1)) / 2
    assert counts["episodes/mean_forward_tokens"].value() == (20 + 2 + 3 + 1 + 1) / 2
    alone = [Rollout([turn(prompt, [50])], {}, 0)]
    assert token_counts(alone, sampled_batch(alone, mask_truncated=False), num_trained=1) == {}


@dataclass
class Ready:
    """Rollouts that are there, and their sampler."""

    completions: list[Completion]
    released: list[Rollout] = field(default_factory=list)

    def as_completed(self) -> Iterator[tuple[int, list[Rollout]]]:
        yield 0, [Rollout([Turn([7], one)], ROW, 0, prompt="a", text="b") for one in self.completions]

    def cancel(self) -> None: ...

    def start(self, *_: object) -> Ready:
        return self

    def release(self, rollouts: Sequence[Rollout]) -> None:
        assert all(rollout.reward == rollout.reward for rollout in rollouts), "released before they were scored"
        self.released += rollouts

    def close(self) -> None: ...


ROW = {"prompt": "a", "prompt_ids": [7]}


def collected(rewards: RewardRunner, completions: list[Completion], seed: int) -> list[Rollout]:
    ready = Ready(completions)
    collector = Collector(rewards, ready, trainer_state=lambda: None, clock=lambda: 0.0)
    rollouts = collector.collect(Request(1, ready, [seed])).rollouts
    assert ready.released == rollouts
    return rollouts


def length(completion_ids: list[list[int]], **_: object) -> list[float | None]:
    return [float(len(ids)) for ids in completion_ids]


def only_short(completion_ids: list[list[int]], **_: object) -> list[float | None]:
    return [1.0 if len(ids) == 1 else None for ids in completion_ids]


def test_the_total_is_the_weighted_sum_of_the_rewards_that_there_are() -> None:
    rewards = RewardRunner(
        [length, only_short], weights=[0.5, -3.0], timeout=None, processing_classes=None, device=torch.device("cpu")
    )
    samples = [Completion([5] * n, "stop", [-1.0] * n, [True] * n, [0] * n) for n in (1, 4)]
    rollouts = collected(rewards, samples, 1)
    assert [rollout.reward for rollout in rollouts] == pytest.approx([0.5 * 1 - 3.0, 0.5 * 4])


def test_what_rewards_draw_follows_from_the_seed_of_the_first_prompt() -> None:
    def draw(completions: list[str]) -> list[float | None]:
        return [random.random()]

    samples = [Completion([5], "stop", [-1.0], [True], [0])]
    first, second, other = (collected(RewardRunner(draw), samples, seed)[0].reward for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_rows_are_the_ids_that_were_sent_and_those_that_came_back() -> None:
    def rollout(sent: list[int], ids: list[int], reason: FinishReason, trainable: list[bool]) -> Rollout:
        completion = Completion(ids, reason, [-float(token) for token in ids], trainable, [3] * len(ids))
        return Rollout([Turn(sent, completion)], {}, group=4)

    rollouts = [rollout([7, 8], [5, 6], "length", [True, True]), rollout([7, 8], [9, 4], "stop", [False, True])]
    assert [(r.prompt_ids, r.sampled_ids, r.finish_reason, r.policy_versions) for r in rollouts] == [
        ([7, 8], [5, 6], "length", [3, 3]),
        ([7, 8], [9, 4], "stop", [3, 3]),
    ]
    batch = sampled_batch(rollouts, mask_truncated=True)
    assert (batch.prompt_ids.tolist(), batch.prompt_index, batch.group_index) == ([7, 8], (0, 0), (4, 4))
    assert batch.response_ids.tolist() == [5, 6, 9, 4]
    assert batch.sampling_logprobs.tolist() == [-5.0, -6.0, -9.0, -4.0]
    assert batch.trainable.tolist() == [False, False, False, True]
    assert sampled_batch(rollouts, mask_truncated=False).trainable.tolist() == [True, True, False, True]


def test_an_episode_that_failed_is_not_scored() -> None:
    def count(
        completions: list[object], environments: list[str], log_extra: object, **_: object
    ) -> list[float | None]:
        log_extra("world", environments)  # type: ignore[operator]
        return [float(len(completions))] * len(completions)

    class Episodes(Ready):
        def as_completed(self) -> Iterator[tuple[int, list[Rollout]]]:
            turn = Turn([7], self.completions[0])
            reasons = ("stop", "environment_error", "timeout")
            worlds = {"stop": "first", "timeout": "third"}
            yield (
                0,
                [
                    Rollout(
                        [turn], ROW, 0, "a", [], episode=Episode("W", r, [0.0], reward=0.5, environment=worlds.get(r))
                    )
                    for r in reasons
                ],
            )

        def release(self, rollouts: Sequence[Rollout]) -> None:
            self.released += rollouts

    ready = Episodes([Completion([5], "stop", [-1.0], [True], [0])])
    collector = Collector(
        RewardRunner(count, environments={"W": object}), ready, trainer_state=lambda: None, clock=lambda: 0.0
    )
    collected = collector.collect(Request(1, ready, [1]))
    rollouts = collected.rollouts
    assert [one.rewards for one in rollouts] == [
        {"count": 2.0, "W": 0.5},
        {"count": None, "W": None},
        {"count": 2.0, "W": 0.5},
    ]
    assert [rollouts[0].reward, rollouts[2].reward] == [2.5, 2.5]
    assert math.isnan(rollouts[1].reward)
    assert collected.logged_columns == {"world": ["first", None, "third"]}
    assert ready.released == rollouts


@pytest.mark.parametrize("by_group", [False, True])
def test_a_batch_whose_environments_all_failed_ends_the_run(by_group: bool) -> None:
    def group(*reasons: StopReason) -> list[Rollout]:
        turn = Turn([7], Completion([5], "stop", [-1.0], [True], [0]))
        return [Rollout([turn], ROW, 0, "a", [], episode=Episode("W", reason, [0.0])) for reason in reasons]

    @dataclass
    class Groups(Ready):
        groups: Sequence[list[Rollout]] = ()

        def as_completed(self) -> Iterator[tuple[int, list[Rollout]]]:
            yield from enumerate(self.groups)

        def release(self, rollouts: Sequence[Rollout]) -> None: ...

    def collect(*groups: list[Rollout]) -> None:
        ready = Groups([], groups=groups)
        collector = Collector(RewardRunner(length), ready, trainer_state=lambda: None, clock=lambda: 0.0)
        request = Request(len(groups), ready, [1] * len(groups))
        _ = list(collector.by_group(request)) if by_group else collector.collect(request)

    failed = group("environment_error", "environment_error")
    with pytest.raises(EpisodeError, match="environments of all 4 episodes failed, so there is nothing to learn from"):
        collect(failed, failed)
    collect(failed, group("stop", "environment_error"))
    collect()


# The experts of a mixture.


def routes(*numbers: int) -> Tensor:
    """[T, 1, 1] numbers of experts."""
    return torch.tensor(numbers, dtype=torch.uint8)[:, None, None]


def routed_turn(sent: list[int], sampled: list[int], *numbers: int) -> Turn:
    one = turn(sent, sampled)
    return replace(one, completion=replace(one.completion, routes=routes(*numbers)))


def test_a_token_has_the_experts_of_the_turn_that_ran_it_first() -> None:
    # The last token of a turn is run in the next one only; what was run before is kept.
    one = rollout(routed_turn([1, 2], [3, 4], 11, 12, 13), routed_turn([1, 2, 3, 4, 5], [7, 8], 0, 0, 0, 14, 15, 17))
    (response,) = responses_of(one)
    assert response.routes is not None
    assert response.routes.flatten().tolist() == [11, 12, 13, 14, 15, 17, 255]


def test_a_turn_that_continues_another_one_keeps_only_its_new_experts() -> None:
    first = routed_turn([1, 2], [3, 4], 11, 12, 13)
    second = routed_turn([1, 2, 3, 4, 5], [7, 8], 0, 0, 0, 14, 15, 17)
    kept = with_new_routes(second, first)
    found = kept.completion.routes
    assert found is not None
    assert found.flatten().tolist() == [14, 15, 17]
    assert found.untyped_storage().nbytes() == 3  # no part of a longer record
    (response,) = responses_of(rollout(first, kept))
    assert response.routes is not None
    assert response.routes.flatten().tolist() == [11, 12, 13, 14, 15, 17, 255]
    cut = first_tokens(kept, 1).completion.routes
    assert cut is not None
    assert cut.flatten().tolist() == [14, 15]
    # What begins anew, or follows a turn without a record, needs all of its own.
    for before in (None, turn([1, 2], [3, 4]), routed_turn([1, 2], [3, 9], 0, 0, 0)):
        assert with_new_routes(second, before) is second


def test_turns_without_a_record_are_unknown() -> None:
    one = rollout(turn([1, 2], [3]), routed_turn([1, 2, 3], [4], 0, 0, 13), turn([1, 2, 3, 4, 5], [6]))
    (response,) = responses_of(one)
    assert response.routes is not None
    assert response.routes.flatten().tolist() == [255, 255, 13, 255, 255, 255]


def test_a_shared_prompt_has_the_experts_of_its_first_response() -> None:
    rollouts = [
        Rollout([routed_turn([1, 2], [3], 11, 12)], {}, 0),
        Rollout([routed_turn([1, 2], [4, 5], 21, 22, 24)], {}, 0),
        Rollout([turn([6], [7])], {}, 1),
    ]
    batch = sampled_batch(rollouts, mask_truncated=False)
    assert batch.prompt_routes is not None
    assert batch.response_routes is not None
    assert batch.prompt_ids.tolist() == [1, 2, 6]
    assert batch.prompt_routes.flatten().tolist() == [11, 12, 255]
    assert batch.response_routes.flatten().tolist() == [255, 24, 255, 255]
    assert sampled_batch(rollouts[2:], mask_truncated=False).prompt_routes is None


def test_a_turn_that_is_cut_keeps_the_experts_of_its_tokens() -> None:
    found = first_tokens(routed_turn([1, 2], [3, 4, 5], 11, 12, 13, 14), 2).completion.routes
    assert found is not None
    assert found.flatten().tolist() == [11, 12, 13]
