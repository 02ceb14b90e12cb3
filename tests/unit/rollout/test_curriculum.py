"""Which prompts are sampled next, and which are sampled again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from prefrl.errors import ConfigError, DataError, RewardError
from prefrl.metrics import Mean
from prefrl.options.rollout import CurriculumParams, CurriculumWeighting, ResamplingParams
from prefrl.rollout.collect import Collected, prompt_seed
from prefrl.rollout.curriculum import (
    Resampling,
    SuccessCurriculum,
    draw_rows,
    groups_without_any_signal,
    groups_without_signal,
    replace_groups,
    signal_values,
)
from prefrl.rollout.selection import random_generator
from prefrl.types import Completion, Episode, Rollout, Turn

NAN = math.nan


def curriculum(
    num_rows: int = 6,
    *,
    reward_bounds: tuple[float, float] = (0.0, 1.0),
    band: tuple[float, float] = (0.2, 0.8),
    weighting: CurriculumWeighting = "variance",
    floor: float = 0.0,
    momentum: float = 0.5,
) -> SuccessCurriculum:
    params = CurriculumParams(band=[*band], reward_bounds=[*reward_bounds], floor=floor, momentum=momentum)
    return SuccessCurriculum(num_rows, weighting, params)


def known(rates: list[float], **options: object) -> SuccessCurriculum:
    """Each row asked once, with these rates; NaN: never."""
    made = curriculum(len(rates), **options)  # type: ignore[arg-type]
    made.update(range(len(rates)), range(len(rates)), rates)
    return made


def test_a_rate_is_the_first_success_and_then_a_moving_average() -> None:
    made = curriculum(3, reward_bounds=(-1.0, 3.0), momentum=0.75)
    made.update([1, 1, 2], [0, 0, 1], [-1.0, 1.0, 9.0])  # mean 0 on -1 .. 3: 1/4; above the bounds: 1
    assert made.rates.tolist() == [0.0, 0.25, 1.0]
    made.update([1, 1, 2], [0, 0, 1], [3.0, 3.0, -9.0])
    assert made.rates.tolist() == [0.0, 0.75 * 0.25 + 0.25, 0.75]
    assert made.counts.tolist() == [0, 2, 2]


def test_completions_without_a_reward_say_nothing() -> None:
    made = curriculum(2)
    made.update([0, 0, 1], [0, 0, 1], [NAN, 1.0, NAN])
    assert made.rates.tolist() == [1.0, 0.0]
    assert made.counts.tolist() == [1, 0]


def test_the_order_of_ranks_makes_no_difference() -> None:
    rows, groups = [4, 4, 2, 2, 4, 4], [0, 0, 1, 1, 2, 2]
    rewards = [0.1, 0.2, 0.7, 0.3, 1.0, 0.6]
    order = [4, 5, 2, 3, 1, 0]
    one, two = curriculum(momentum=0.75), curriculum(momentum=0.75)
    one.update(rows, groups, rewards)
    two.update([rows[i] for i in order], [groups[i] for i in order], [rewards[i] for i in order])
    assert one.rates.tolist() == two.rates.tolist()
    assert one.counts[4] == 2
    assert one.rates[4] == pytest.approx(0.75 * 0.15 + 0.25 * 0.8)  # group 0 first, whatever came first


def test_weights_by_hand() -> None:
    rates = [0.0, 0.1, 0.5, 1.0, NAN]
    assert known(rates, floor=0.01).weights.tolist() == pytest.approx([0.01, 0.1, 0.26, 0.01, 0.26])
    banded = known(rates, weighting="band", band=(0.1, 0.5), floor=0.01)
    assert banded.weights.tolist() == pytest.approx([0.01, 1.01, 1.01, 0.01, 1.01])


def test_prompts_in_the_band_and_unknown_ones_stay() -> None:
    made = known([0.2, 0.8, NAN, 0.5, 0.0, 0.5])
    assert made.choose([0, 2, 1], seed=0, generation=0) == [0, 2, 1]


def test_prompts_outside_the_band_give_way_to_others() -> None:
    made = known([0.0, 1.0, 0.5, 0.5, 0.5, 0.0])
    for generation in range(50):
        chosen = made.choose([0, 2, 1], seed=0, generation=generation)
        assert chosen[1] == 2
        assert {chosen[0], chosen[2]} == {3, 4}  # not 2 again, and 5 has no weight


def test_a_prompt_stays_where_no_other_is_left() -> None:
    made = known([0.0, 1.0, 0.5, 0.0])
    assert made.choose([0, 1, 3], seed=0, generation=0) == [2, 1, 3]
    assert made.choose([2, 0], seed=0, generation=0) == [2, 0]


def test_the_floor_lets_forgotten_prompts_come_back() -> None:
    made = known([0.0, 0.0, 0.5, 0.0], floor=0.05)
    drawn = [made.choose([0], seed=0, generation=generation)[0] for generation in range(2000)]
    assert drawn.count(1) / 2000 == pytest.approx(0.05 / 0.4, abs=0.02)  # weights 0.05, 0.3, 0.05
    assert drawn.count(0) == 0


def test_replacements_depend_on_seed_and_generation_alone() -> None:
    made = known([0.0] * 4 + [0.5] * 40)
    first = made.choose([0, 1, 2, 3], seed=3, generation=7)
    assert first == made.choose([0, 1, 2, 3], seed=3, generation=7)
    assert first != made.choose([0, 1, 2, 3], seed=3, generation=8)
    assert first != made.choose([0, 1, 2, 3], seed=4, generation=7)
    assert len(set(first)) == 4


def test_rows_are_drawn_one_after_another_by_weight() -> None:
    weights = np.array([1.0, 0.0, 2.0, 5.0])
    draws = [draw_rows(weights, 2, generator=random_generator("test", i)) for i in range(8000)]
    pairs = {pair: draws.count(list(pair)) / 8000 for pair in [(0, 2), (0, 3), (2, 0), (2, 3), (3, 0), (3, 2)]}
    # P(a, then b) = w_a / 8 * w_b / (8 - w_a)
    expected = {(a, b): weights[a] / 8 * weights[b] / (8 - weights[a]) for a, b in pairs}
    assert pairs == pytest.approx(expected, abs=0.015)
    assert sum(pairs.values()) == 1
    assert sorted(draw_rows(weights, 9, generator=random_generator("test", 0))) == [0, 2, 3]
    assert draw_rows(weights, 0, generator=random_generator("test", 0)) == []


def test_state_survives_storage_bit_by_bit_and_goes_on_as_before(tmp_path: Path) -> None:
    made = known([0.1, 1 / 3, NAN, 0.7, 0.0, 0.2])
    save_file(made.state_dict(), tmp_path / "curriculum.safetensors")
    restored = curriculum()
    restored.load_state_dict(load_file(tmp_path / "curriculum.safetensors"))
    for either in (made, restored):
        either.update([1, 2], [0, 1], [0.9, 0.3])
    assert restored.rates.tolist() == made.rates.tolist()
    assert restored.counts.tolist() == made.counts.tolist() == [1, 2, 1, 1, 1, 1]
    assert restored.choose([4, 1], seed=0, generation=1) == made.choose([4, 1], seed=0, generation=1)


def test_a_state_does_not_change_with_what_is_seen_later() -> None:
    made = curriculum(2)
    state = made.state_dict()
    made.update([0], [0], [1.0])
    assert state["counts"].tolist() == [0, 0]
    restored = curriculum(2)
    restored.load_state_dict(state)
    restored.update([0], [0], [1.0])
    assert state["rates"].tolist() == [0.0, 0.0]


def test_a_state_of_another_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="knows 5 prompts, but train_dataset has 6"):
        curriculum(6).load_state_dict(curriculum(5).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_bounds": (1.0, 1.0)}, "reward_bounds"),
        ({"band": (0.6, 0.4)}, "band=.*the smaller one first"),
        ({"band": (-0.1, 0.4)}, "band=.*must be within 0"),
        ({"band": (0.1, 1.4)}, "band=.*must be within 0"),
    ],
)
def test_bounds_that_are_not_in_order_are_refused(options: dict[str, tuple[float, float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        curriculum(**options)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("metric", "expected"), [("a", [0, 2]), (["a", "b"], [2]), (["b"], [1, 2]), (None, [0, 1])])
def test_with_several_rewards_a_group_has_a_signal_if_one_of_them_differs(metric: Any, expected: list[int]) -> None:
    rollouts = [
        *(rollout(0, 1.0, a=1.0, b=0.0), rollout(0, 1.0, a=1.0, b=0.5)),
        *(rollout(1, 1.0, a=0.0, b=1.0), rollout(1, 1.0, a=1.0, b=1.0)),
        *(rollout(2, 1.0, a=0.0, b=1.0), rollout(2, 2.0, a=0.0, b=1.0)),
    ]
    metrics = ResamplingParams(reward_metric=metric).metrics
    of_ranks = [[signal_values(part, metric=name) for name in metrics] for part in (rollouts[:3], rollouts[3:])]
    assert groups_without_any_signal(of_ranks) == expected


def test_without_a_limit_passes_over_the_dataset_go_on_until_one_finds_nothing() -> None:
    state = Resampling([0, 1, 2], num_rows=5, seed=0, generation=0, is_endless=True)
    assert set(state.redraw([0, 2]).values()) == {3, 4}
    assert set(state.redraw([0]).values()) <= {0, 2, 3, 4}, "the second pass, but for the row of another slot"
    drawn = {state.rows[0]}
    while len(drawn) < 3:  # row 1 is kept by slot 1, and another one by slot 2
        drawn |= set(state.redraw([0]).values())
    with pytest.raises(RewardError, match=r"in 4 tries, a pass over all 5 prompts .* for 1 of the 3 prompts"):
        state.redraw([0])


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


def test_a_team_has_what_all_its_processes_collected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Collected([rollout(1, 1.0)], {"m": 4.0}, {"note": ["b"]}, metrics={"tries": Mean(1.0, 1.0)})
    other = Collected([rollout(2, 0.0), rollout(0, 0.0)], {"m": 1.0}, metrics={"tries": Mean(8.0, 2.0)})
    assert own.of_team() is own  # one process
    monkeypatch.setattr("prefrl.distributed.gather_in_team", lambda mine: [other, mine])
    team = own.of_team()
    assert [each.group for each in team.rollouts] == [0, 1, 2]
    assert team.rollouts[1] is own.rollouts[0]  # gets its advantage
    assert (team.logged_metrics, team.logged_columns) == ({"m": 2.0}, {"note": [None, "b", None]})
    assert team.metrics == {"tries": Mean(9.0, 3.0)}


def test_tokens_of_replaced_episodes_are_dropped() -> None:
    rollouts = [rollout(group, 1.0) for group in (0, 1, 1, 1)]
    for one, count in zip(rollouts, (5, 7, 11, 13), strict=True):
        one.episode = Episode("World", "stop", [0.0], num_sampled=count, num_dropped=1)
    both = replace_groups(Collected(rollouts[:3]), Collected(rollouts[3:]))
    told = [(one.episode.num_sampled, one.episode.num_dropped) for one in both.rollouts if one.episode]
    assert told == [(5, 1), (13 + 7 + 11, 1 + 7 + 11)]


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
