from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from prefrl.errors import ConfigError
from prefrl.options.policy import EntropyParams
from prefrl.trainer.online.policy_terms import AdaptiveEntropy, AdaptiveKL

VERL = json.loads((Path(__file__).parents[2] / "golden" / "verl_kl_0_9_1.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 100 / 1000),
        (5.4, 1 - 0.1 * 100 / 1000),
        (60.0, 1 + 0.2 * 100 / 1000),
        (math.inf, 1 + 0.2 * 100 / 1000),
        (0.0, 1 - 0.2 * 100 / 1000),
        (-3.0, 1 - 0.2 * 100 / 1000),  # an estimate may be negative
    ],
)
def test_the_kl_weight_moves_in_proportion_to_the_error_up_to_a_fifth(kl, factor):
    controller = AdaptiveKL(0.2, 6.0, 1000)
    controller.update(kl, 100)
    assert controller.value == pytest.approx(0.2 * factor, rel=1e-12)


def test_the_kl_weight_is_that_of_verl():
    stored = VERL["adaptive_kl"]
    controller = AdaptiveKL(stored["value"], stored["target"], stored["horizon"])
    for kl, num_completions, value in stored["updates"]:
        controller.update(kl, num_completions)
        assert controller.value == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize("name", ["value", "target", "horizon"])
@pytest.mark.parametrize("number", [0.0, -1.0, math.inf, math.nan])
def test_a_number_of_the_kl_weight_that_is_not_positive_is_refused(name, number):
    arguments = {"value": 0.1, "target": 6.0, "horizon": 1000} | {name: number}
    with pytest.raises(ConfigError, match=f"{name}={number} of an adaptive KL weight: needs to be positive"):
        AdaptiveKL(**arguments)


def test_more_completions_at_once_than_the_horizon_bears_are_refused():
    controller = AdaptiveKL(0.1, 6.0, 10)
    controller.update(0.0, 49)
    assert controller.value == pytest.approx(0.1 * 0.02)
    with pytest.raises(ConfigError, match=r"horizon=10 .* the 50 completions of an update"):
        controller.update(0.0, 50)


def test_nan_is_refused_and_changes_nothing():
    kl, entropy = (
        AdaptiveKL(0.1, 6.0, 1000),
        AdaptiveEntropy(0.1, EntropyParams(min=0.0, max=1.0, delta=0.01, target=0.5)),
    )
    with pytest.raises(ValueError, match="kl=nan"):
        kl.update(math.nan, 8)
    with pytest.raises(ValueError, match="entropy=nan"):
        entropy.update(math.nan)
    assert kl.value == 0.1
    assert entropy.coef == 0.1


def test_the_entropy_coefficient_rises_and_is_applied_at_and_below_the_target_alone():
    controller = AdaptiveEntropy(0.02, EntropyParams(min=0.0, max=0.05, delta=0.01, target=0.5))
    assert (controller.coef, controller.value) == (0.02, 0.0)  # no entropy is known yet
    seen = []
    for entropy in (0.4, 0.5, 0.6, 0.7, 0.1):
        controller.update(entropy)
        seen.append((controller.coef, controller.value))
    assert seen == [
        (pytest.approx(0.03), pytest.approx(0.03)),
        (pytest.approx(0.04), pytest.approx(0.04)),
        (pytest.approx(0.03), 0.0),
        (pytest.approx(0.02), 0.0),
        (pytest.approx(0.03), pytest.approx(0.03)),
    ]


def test_the_entropy_coefficient_stays_within_its_bounds():
    controller = AdaptiveEntropy(0.02, EntropyParams(min=0.015, max=0.035, delta=0.01, target=0.5))
    coefs = []
    for entropy in (0.1, 0.1, 0.1, 0.9, 0.9, 0.9):
        controller.update(entropy)
        coefs.append(controller.coef)
    assert coefs == pytest.approx([0.03, 0.035, 0.035, 0.025, 0.015, 0.015])
    assert coefs[1] == 0.035
    assert coefs[-1] == 0.015


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coef": -0.1, "min": -0.2}, "min=-0.2: must be a number >= 0"),
        ({"coef": 0.005}, r"coef=0.005 of an adaptive entropy bonus: must be in 0.01 \.\. 1.0"),
        ({"max": 0.05}, r"coef=0.1 .* must be in 0.01 \.\. 0.05"),
        ({"max": math.inf}, "max=inf: must be a number > 0 and <= 1e\\+38"),
        ({"delta": 0.0}, "delta=0.0: must be a number > 0"),
    ],
)
def test_bounds_of_the_entropy_coefficient_that_cannot_be_are_refused(changes, message):
    values = {"coef": 0.1, "min": 0.01, "max": 1.0, "delta": 0.01, "target": 0.5} | changes
    with pytest.raises(ConfigError, match=message):
        AdaptiveEntropy(values.pop("coef"), EntropyParams(**values))


def test_states_survive_json_bit_by_bit():
    kl, entropy = (
        AdaptiveKL(0.1, 6.0, 1000),
        AdaptiveEntropy(0.1, EntropyParams(min=0.0, max=1.0, delta=0.001, target=0.5)),
    )
    for i in range(20):
        kl.update(6.0 + math.sin(i), 7)
        entropy.update(0.4 + 0.1 * math.sin(i))
    others = AdaptiveKL(0.5, 6.0, 1000), AdaptiveEntropy(0.5, EntropyParams(min=0.0, max=1.0, delta=0.001, target=0.5))
    for controller, other in zip((kl, entropy), others, strict=True):
        state = controller.state_dict()
        assert all(type(number) is float for number in state.values())
        other.load_state_dict(json.loads(json.dumps(state, allow_nan=False)))
        assert [n.hex() for n in other.state_dict().values()] == [n.hex() for n in state.values()]
        assert other.value.hex() == controller.value.hex()


def test_a_state_before_the_first_update_survives_json():
    used, fresh = (AdaptiveEntropy(0.1, EntropyParams(min=0.0, max=1.0, delta=0.01, target=0.5)) for _ in range(2))
    used.update(0.2)
    used.load_state_dict(json.loads(json.dumps(fresh.state_dict(), allow_nan=False)))
    assert (used.coef, used.value) == (0.1, 0.0)
