"""Which prompts are sampled next."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from prefrl.errors import ConfigError, DataError
from prefrl.options.rollout import CurriculumParams, CurriculumWeighting
from prefrl.rollout.curriculum import SuccessCurriculum, draw_rows
from prefrl.rollout.selection import random_generator

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
