import math

import pytest
import torch

from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS, importance_weights

# Row 0 has two trainable tokens, with ratios 4 and 1/2 (product 2, geometric mean sqrt(2)); row 1 has one, with ratio
# 1/5; row 2 has none. What is not trainable is not read.
RATIOS = [4.0, math.nan, 0.5, 0.2, math.inf]
TRAINABLE = torch.tensor([True, False, True, True, False])
ROW_INDEX = torch.tensor([0, 0, 0, 1, 2])
ROOT = math.sqrt(2)


def result_of(ratios=RATIOS, **changes):
    options = {"level": "token", "bound": "truncate", "low": None, "high": None} | changes
    log_ratio = torch.tensor(ratios).log()
    return importance_weights(log_ratio, TRAINABLE, ROW_INDEX, 3, **options)


@pytest.mark.parametrize(
    ("level", "bound", "low", "high", "expected"),
    [
        ("token", "truncate", None, None, [4.0, 0, 0.5, 0.2, 0]),
        ("token", "truncate", None, 3.0, [3.0, 0, 0.5, 0.2, 0]),
        ("token", "truncate", 0.4, 3.0, [3.0, 0, 0.5, 0.4, 0]),
        ("token", "truncate", 0.4, None, [4.0, 0, 0.5, 0.4, 0]),
        ("token", "mask", None, 3.0, [0.0, 0, 0.5, 0.2, 0]),
        ("token", "mask", 0.4, 3.0, [0.0, 0, 0.5, 0.0, 0]),
        ("token", "mask", None, None, [4.0, 0, 0.5, 0.2, 0]),
        ("sequence", "truncate", None, 3.0, [2.0, 0, 2.0, 0.2, 0]),
        ("sequence", "truncate", 0.3, 1.5, [1.5, 0, 1.5, 0.3, 0]),
        ("sequence", "mask", None, 3.0, [2.0, 0, 2.0, 0.2, 0]),
        ("sequence", "mask", 0.5, 3.0, [2.0, 0, 2.0, 0.0, 0]),
        ("sequence", "mask", None, 1.9, [0.0, 0, 0.0, 0.2, 0]),
        ("geometric", "truncate", None, 1.5, [ROOT, 0, ROOT, 0.2, 0]),
        ("geometric", "truncate", 0.5, 1.2, [1.2, 0, 1.2, 0.5, 0]),
        ("geometric", "mask", 0.5, 1.5, [ROOT, 0, ROOT, 0.0, 0]),
        ("geometric", "mask", None, 1.4, [0.0, 0, 0.0, 0.2, 0]),
    ],
)
def test_weights_by_hand(level, bound, low, high, expected):
    weights = result_of(level=level, bound=bound, low=low, high=high).weights
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bound", ["truncate", "mask"])
@pytest.mark.parametrize(
    ("level", "ratios", "num_cut"),
    [("token", [4.0, 0.5, 0.2], 2), ("sequence", [2.0, 0.2], 1), ("geometric", [ROOT, 0.2], 1)],
)
def test_statistics_are_of_the_ratios_before_the_bounds(level, bound, ratios, num_cut):
    result = result_of(level=level, bound=bound, low=0.4, high=3.0)
    differences = [math.log(4), math.log(2), math.log(5)]
    expected = {
        "difference_sum": sum(differences),
        "difference_max": max(differences),
        "num_tokens": 3,
        "ratio_sum": sum(ratios),
        "ratio_square_sum": sum(r * r for r in ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "num_ratios": len(ratios),
        "num_cut": num_cut,
    }
    found = {name: getattr(result, name).item() for name in expected}
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_ratio_at_its_bound_is_not_outside():
    log_ratio = torch.tensor([math.log(3.0), math.log(0.5)])
    everything = torch.ones(2, dtype=torch.bool)
    for bound in ("truncate", "mask"):
        options = {"level": "token", "bound": bound, "low": 0.5, "high": 3.0}
        result = importance_weights(log_ratio, everything, torch.tensor([0, 1]), 2, **options)
        torch.testing.assert_close(result.weights, torch.tensor([3.0, 0.5]))
        assert result.num_cut == 0


@pytest.mark.parametrize("mode", OFF_POLICY_CORRECTIONS)
def test_the_gradient_does_not_flow_through_the_weights(mode):
    row = OFF_POLICY_CORRECTIONS[mode]
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    log_ratio = logprobs - torch.tensor([-1.5, -1.9, -0.4])
    result = importance_weights(
        log_ratio, torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1]), 2,
        level=row.level, bound=row.bound, low=None, high=1.6,
    )  # fmt: skip
    assert not any(getattr(result, name).requires_grad for name in result.__slots__)
    (result.weights * logprobs).sum().backward()
    torch.testing.assert_close(logprobs.grad, result.weights)


@pytest.mark.parametrize("mode", OFF_POLICY_CORRECTIONS)
@pytest.mark.parametrize("extreme", [1e4, -1e4, math.inf, -math.inf])
def test_extreme_log_ratios_leave_everything_finite(mode, extreme):
    row = OFF_POLICY_CORRECTIONS[mode]
    log_ratio = torch.full((5,), extreme)
    for low, high in ((None, None), (None, 3.0), (0.1, None), (0.1, 3.0)):
        result = importance_weights(
            log_ratio, TRAINABLE, ROW_INDEX, 3, level=row.level, bound=row.bound, low=low, high=high
        )
        is_over = extreme > 0
        limit = high if is_over else low
        ratio = math.exp(30 if is_over else -30)
        weight = ratio if limit is None else {"truncate": limit, "mask": 0.0}[row.bound]
        torch.testing.assert_close(result.weights, torch.tensor([weight, 0, weight, weight, 0]), rtol=1e-6, atol=0)
        assert result.ratio_min == result.ratio_max == pytest.approx(ratio)
        count = result.num_ratios.item()
        assert result.ratio_sum == pytest.approx(count * ratio)
        assert result.ratio_square_sum == pytest.approx(count * ratio**2)
        assert result.num_cut == (0 if limit is None else result.num_ratios)
        if math.isfinite(extreme):
            assert result.difference_max == 1e4


def test_a_batch_without_trainable_tokens_adds_nothing():
    for level in ("token", "sequence", "geometric"):
        result = importance_weights(
            torch.zeros(2), torch.zeros(2, dtype=torch.bool), torch.tensor([0, 1]), 2,
            level=level, bound="mask", low=None, high=3.0,
        )  # fmt: skip
        assert result.weights.tolist() == [0.0, 0.0]
        sums = ("difference_sum", "num_tokens", "ratio_sum", "ratio_square_sum", "num_ratios", "num_cut")
        assert [getattr(result, name).item() for name in sums] == [0] * 6
        extremes = (result.ratio_min, result.ratio_max, result.difference_max)
        assert [value.item() for value in extremes] == [math.inf, -math.inf, -math.inf]


def test_a_log_prob_that_is_missing_is_not_hidden():
    for level in ("token", "sequence", "geometric"):
        weights = result_of([math.nan, 1, 1, 1, 1], level=level, bound="mask", high=3.0).weights
        assert weights.isnan().any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"low": 0.0}, r"low=0.0, high=None: need 0 < low <= 1 <= high"),
        ({"low": 1.1}, "low=1.1"),
        ({"low": -1.0}, "low=-1.0"),
        ({"high": 0.9}, "high=0.9"),
        ({"high": math.inf}, "high=inf"),
    ],
)
def test_bounds_that_leave_out_a_sample_of_the_policy_itself_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        result_of(**changes)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"shapes differ: log_ratio \(3,\), trainable \(5,\)"):
        result_of([1.0, 1.0, 1.0])


def test_table_of_corrections():
    assert {name: (row.level, row.bound) for name, row in OFF_POLICY_CORRECTIONS.items()} == {
        f"{level}_{bound}": (level, bound)
        for level in ("token", "sequence", "geometric")
        for bound in ("truncate", "mask")
    }
    assert all(row.source for row in OFF_POLICY_CORRECTIONS.values())
