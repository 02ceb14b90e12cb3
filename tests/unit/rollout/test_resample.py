"""Groups without a signal are replaced by groups of other prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from prefrl.errors import ConfigError
from prefrl.rollout.collect import Collected, prompt_seed
from prefrl.rollout.resample import Resampling, groups_without_signal, replace_groups, signal_values
from prefrl.types import Completion, Rollout, Turn

NAN = math.nan


def rollout(group: int, reward: float, token: int = 5, **rewards: float | None) -> Rollout:
    completion = Completion([token], "stop", [-1.0], [True], [0])
    return Rollout([Turn([1], completion)], {}, group, rewards=rewards, reward=reward)


def resampling(rows: Sequence[int] = (0, 1, 2, 3), *, num_rows: int = 20, generation: int = 0) -> Resampling:
    return Resampling(list(rows), num_rows=num_rows, seed=0, generation=generation)


def test_groups_with_equal_rewards_have_no_signal() -> None:
    values = [(4, 1.0), (4, 1.0), (2, 0.0), (2, 1e-300), (7, 0.5), (3, -1.0), (3, -1.0)]
    assert groups_without_signal(values) == [3, 4, 7]
    assert groups_without_signal([]) == []


def test_a_missing_reward_is_no_signal() -> None:
    assert groups_without_signal([(0, NAN), (0, NAN), (1, NAN), (1, 1.0), (2, NAN), (2, 1.0), (2, 0.0)]) == [0, 1]


def test_the_total_or_a_named_reward_decides() -> None:
    rollouts = [rollout(1, 2.5, right=1.0, form=None), rollout(1, 3.5, right=1.0, form=0.5)]
    assert signal_values(rollouts, metric=None) == [(1, 2.5), (1, 3.5)]
    assert signal_values(rollouts, metric="right") == [(1, 1.0), (1, 1.0)]
    group, value = signal_values(rollouts, metric="form")[0]
    assert (group, math.isnan(value)) == (1, True)


def test_an_unknown_reward_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward_metric='acc': .* \['form', 'right'\], or None"):
        signal_values([rollout(0, 1.0, right=1.0, form=0.0)], metric="acc")


def test_no_prompt_of_the_batch_is_asked_again() -> None:
    state = resampling()
    seen = {0, 1, 2, 3}
    for _ in range(4):
        new = state.redraw([3, 0, 1])
        assert list(new) == [0, 1, 3]
        assert len(set(new.values()) - seen) == 3
        seen |= set(new.values())
        assert state.rows == [new[0], new[1], 2, new[3]]
    assert state.tries == 4


def test_a_spent_dataset_repeats_the_prompt_with_other_samples() -> None:
    state = resampling([0, 1, 2], num_rows=4)
    assert sorted(state.redraw([0, 1]).items()) == [(0, 3), (1, 1)]
    seeds = [state.sample_seed(1)]
    assert state.redraw([1]) == {1: 1}
    seeds.append(state.sample_seed(1))
    assert len({*seeds, prompt_seed(0, 0, 1)}) == 3


def test_prompts_do_not_depend_on_how_many_are_drawn_at_once() -> None:
    for generation in range(5):
        one_by_one, together = resampling(generation=generation), resampling(generation=generation)
        for slot in (0, 1, 3):
            one_by_one.redraw([slot])
        together.redraw([3, 0, 1])
        assert one_by_one.rows == together.rows


def test_prompts_are_drawn_by_weight() -> None:
    weights = np.zeros(20)
    weights[[2, 11, 17]] = 1.0
    assert set(resampling().redraw([0, 1], weights=weights).values()) == {11, 17}
    assert weights.sum() == 3


def test_prompts_are_drawn_evenly_without_weights() -> None:
    drawn = [resampling(num_rows=8, generation=i).redraw([2])[2] for i in range(2000)]
    assert np.bincount(drawn, minlength=8) / 2000 == pytest.approx([0.0] * 4 + [0.25] * 4, abs=0.03)


def test_draws_and_seeds_depend_on_seed_generation_try_and_slot() -> None:
    def outcome(seed: int, generation: int, num_tries: int) -> tuple[int, ...]:
        state = Resampling(list(range(8)), num_rows=1000, seed=seed, generation=generation)
        for _ in range(num_tries):
            new = state.redraw(range(8))
        return (*new.values(), *(state.sample_seed(slot) for slot in range(8)))

    outcomes = [outcome(*key) for key in ((0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2))]
    assert len({number for numbers in outcomes for number in numbers[8:]}) == 32
    assert len({numbers[:8] for numbers in outcomes}) == 4
    assert outcome(0, 0, 2) == outcomes[3]
    assert all(0 <= number < 2**63 for number in outcomes[0][8:])


def test_metrics_count_each_group_once_over_ranks() -> None:
    state = resampling()
    state.redraw([0, 2])
    state.redraw([2])
    ranks = [state.metrics(slots, [2, 3]) for slots in ([0, 1], [2, 3])]
    values = {name: metric.merge(ranks[1][name]).value() for name, metric in ranks[0].items()}  # type: ignore[arg-type]
    assert values == {
        "dynamic_sampling/tries": 2.0,
        "dynamic_sampling/replaced_ratio": 0.5,
        "dynamic_sampling/no_signal_ratio": 0.5,
    }
    assert state.metrics([0, 1], [2, 3])["dynamic_sampling/no_signal_ratio"].value() == 0.0


def test_replaced_groups_bring_their_columns_along() -> None:
    old = Collected([rollout(0, 1.0), rollout(1, 1.0), rollout(2, 1.0)], {"m": 4.0}, {"note": ["a", "b", "c"]}, 1.0)
    new = Collected([rollout(1, 2.0, token=9)], {"m": 1.0}, {"note": ["B"]}, 0.5)
    both = replace_groups(old, new)
    assert [(r.group, r.reward) for r in both.rollouts] == [(0, 1.0), (1, 2.0), (2, 1.0)]
    assert both.logged_metrics == {"m": 3.0}
    assert both.logged_columns == {"note": ["a", "B", "c"]}
    assert both.reward_s == 1.5


def test_columns_stay_with_their_rollouts() -> None:
    old = Collected([rollout(g, 0.0) for g in (0, 0, 1, 1, 2, 2)], {}, {"id": ["0a", "0b", "1a", "1b", "2a", "2b"]})
    new = Collected([rollout(1, 1.0), rollout(1, 0.0)], {"m": 3.0}, {"id": ["1c", "1d"], "more": [7, 8]})
    both = replace_groups(old, new)
    assert both.logged_columns["more"] == [None, None, 7, 8, None, None]
    assert both.logged_metrics == {"m": 3.0}
    assert [(r.group, name) for r, name in zip(both.rollouts, both.logged_columns["id"], strict=True)] == [
        (0, "0a"),
        (0, "0b"),
        (1, "1c"),
        (1, "1d"),
        (2, "2a"),
        (2, "2b"),
    ]


def test_none_or_all_groups_can_be_replaced() -> None:
    old = Collected([rollout(0, 1.0)], {"m": 4.0}, {"note": ["a"]}, 1.0)
    new = Collected([rollout(0, 2.0)], {"m": 1.0}, {"note": ["b"]}, 0.5)
    assert replace_groups(old, Collected([], reward_s=0.25)) == Collected(
        old.rollouts, {"m": 4.0}, {"note": ["a"]}, 1.25
    )
    assert replace_groups(old, new) == Collected(new.rollouts, {"m": 1.0}, {"note": ["b"]}, 1.5)


def filled(*, world_size: int, max_tries: int) -> tuple[list[tuple[int, float]], list[int], int]:
    """The loop of the module's text, over ranks that share 8 groups; a completion's reward is its seed's."""

    def samples(group: int, row: int, seed: int) -> list[Rollout]:
        generator = np.random.default_rng([row, seed])
        # Rows below 30 are never solved.
        return [rollout(group, float(row >= 30 and generator.random() < 0.5), token=row) for _ in range(2)]

    rows = list(range(26, 34))
    slots = [list(range(rank * 8 // world_size, (rank + 1) * 8 // world_size)) for rank in range(world_size)]
    state = [Resampling(rows, num_rows=60, seed=5, generation=3) for _ in range(world_size)]
    collected = [Collected([r for g in mine for r in samples(g, rows[g], g)]) for mine in slots]
    while True:
        everyone = [pair for part in collected for pair in signal_values(part.rollouts, metric=None)]
        unused = groups_without_signal(everyone)
        if not unused or state[0].tries == max_tries:
            break
        for rank, mine in enumerate(slots):
            new = state[rank].redraw(unused)
            again = {group: state[rank].sample_seed(group) for group in mine if group in new}
            rollouts = [r for group, seed in again.items() for r in samples(group, new[group], seed)]
            collected[rank] = replace_groups(collected[rank], Collected(rollouts))
    final = [(r.sampled_ids[0], r.reward) for part in collected for r in part.rollouts]
    return final, unused, state[0].tries


def test_the_batch_is_filled_the_same_way_by_any_number_of_ranks() -> None:
    batch, unused, tries = filled(world_size=1, max_tries=50)
    assert unused == []
    assert 1 < tries < 50
    assert all(row >= 30 for row, _ in batch)
    assert {reward for _, reward in batch} == {0.0, 1.0}
    for world_size in (2, 4, 8):
        assert filled(world_size=world_size, max_tries=50) == (batch, [], tries)


def test_tries_are_bounded() -> None:
    _, unused, tries = filled(world_size=2, max_tries=1)
    assert tries == 1
    assert unused != []
