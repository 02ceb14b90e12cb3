"""Ratios, terms of tokens, and their corrections: numbers and gradients worked out by hand."""

import math

import pytest
import torch

from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS, importance_weights
from prefrl.losses.policy.tokens import PolicyTokens, off_policy_sequence_mask, positive_nll

# Row 0 has two trainable tokens, row 1 has one, row 2 has none.
ROW_INDEX = torch.tensor([0, 0, 0, 1, 2])
TRAINABLE = torch.tensor([True, False, True, True, False])
LEVELS = ("token", "sequence", "sequence_token", "sequence_sum")


def tokens_of(log_ratio, **changes):
    logprobs = torch.tensor(log_ratio, requires_grad=True)
    fields = {
        "logprobs": logprobs,
        "old_logprobs": torch.zeros(len(log_ratio)),
        "advantages": torch.ones(len(log_ratio)),
        "trainable": TRAINABLE,
        "row_index": ROW_INDEX,
        "num_rows": 3,
    }
    return PolicyTokens(**(fields | changes))


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [0.1, 0.0, 0.3, -0.5, 0.0]),
        ("sequence", [0.2, 0.2, 0.2, -0.5, 0.0]),
        ("sequence_token", [0.2, 0.2, 0.2, -0.5, 0.0]),
        ("sequence_sum", [0.4, 0.4, 0.4, -0.5, 0.0]),
    ],
)
@pytest.mark.parametrize("unread", [9.0, math.nan, math.inf, -math.inf])
def test_log_ratio_by_hand_reads_trainable_tokens_alone(level, expected, unread):
    tokens = tokens_of([0.1, unread, 0.3, -0.5, unread], level=level)
    torch.testing.assert_close(tokens.log_ratio, torch.tensor(expected))
    (tokens.log_ratio * TRAINABLE).sum().backward()
    assert tokens.logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # Row 0 has the coefficients 1 and 3 on its trainable tokens.
        ("token", [1.0, 0.0, 3.0, 5.0, 0.0]),
        ("sequence", [2.0, 0.0, 2.0, 5.0, 0.0]),
        ("sequence_token", [1.0, 0.0, 3.0, 5.0, 0.0]),
        ("sequence_sum", [4.0, 0.0, 4.0, 5.0, 0.0]),
    ],
)
def test_where_the_gradient_of_a_level_goes(level, expected):
    tokens = tokens_of([0.1, 7.0, 0.3, -0.5, 7.0], level=level)
    (tokens.log_ratio * torch.tensor([1.0, 0.0, 3.0, 5.0, 0.0])).sum().backward()
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor(expected))


def test_a_rows_sum_stays_where_its_ratio_is_finite():
    tokens = tokens_of([150.0, 0.0, 50.0, -200.0, 0.0], level="sequence_sum")
    assert tokens.log_ratio.tolist() == [20.0, 20.0, 20.0, -20.0, 0.0]
    tokens.log_ratio.exp().sum().backward()
    assert tokens.logprobs.grad.tolist() == [0.0] * 5


def test_row_means_of_a_row_without_trainable_tokens_are_zero():
    tokens = tokens_of([0.0] * 5)
    means = tokens.row_means(torch.tensor([1.0, math.nan, 4.0, 3.0, math.nan]))
    assert means.tolist() == [2.5, 3.0, 0.0]


@pytest.mark.parametrize("level", LEVELS)
def test_the_dtype_stays(level):
    double = torch.tensor([0.1, 0.2, 0.3, -0.5, 0.0], dtype=torch.float64, requires_grad=True)
    tokens = tokens_of([0.0] * 5, logprobs=double, old_logprobs=torch.zeros(5, dtype=torch.float64), level=level)
    assert tokens.log_ratio.dtype == torch.float64
    assert tokens.trainable_logprobs.dtype == torch.float64


def test_log_probs_of_tokens_that_are_not_trainable_are_zero():
    assert tokens_of([-1.0, math.nan, -3.0, -4.0, math.nan]).trainable_logprobs.tolist() == [
        -1.0,
        0.0,
        -3.0,
        -4.0,
        0.0,
    ]


def test_old_log_probs_and_advantages_are_constants():
    constants = {name: torch.ones(5, requires_grad=True) for name in ("old_logprobs", "advantages")}
    tokens = tokens_of([0.1] * 5, **constants)
    (tokens.log_ratio * tokens.advantages).sum().backward()
    assert tokens.logprobs.grad is not None
    assert all(constant.grad is None for constant in constants.values())


@pytest.mark.parametrize("name", ["old_logprobs", "advantages", "trainable", "row_index", "cov_tokens"])
def test_shapes_that_would_broadcast_are_refused(name):
    with pytest.raises(ValueError, match=rf"shapes differ: logprobs \(5,\), .*{name} \(1,\)"):
        tokens_of([0.0] * 5, **{name: torch.zeros(1, dtype=torch.bool)})


ROWS_OF_TERMS = torch.tensor([0, 0, 0, 1, 2, 2])
TRAINABLE_TERMS = torch.tensor([True, False, True, True, False, False])
LOGPROBS = [-1.0, math.nan, -2.0, -3.0, math.nan, math.nan]
# Row 0 has moved away by 0.2 and 0.4 nats, 0.3 in the mean; row 1 has come 0.5 nearer; row 2 has no loss.
SAMPLING = torch.tensor([-0.8, math.nan, -1.6, -3.5, math.nan, math.nan])


def terms_of(advantages, dtype=torch.float32):
    logprobs = torch.tensor(LOGPROBS, dtype=dtype, requires_grad=True)
    fields = {"trainable": TRAINABLE_TERMS, "row_index": ROWS_OF_TERMS, "num_rows": 3}
    return PolicyTokens(logprobs, torch.zeros(6), torch.tensor(advantages), **fields)


@pytest.mark.parametrize(
    ("threshold", "advantages", "expected"),
    [
        (0.29, [-1.0] * 6, [0, 1, 0, 1, 1, 1]),  # the second token has no loss
        (0.31, [-1.0] * 6, [1, 1, 1, 1, 1, 1]),
        (0.29, [1.0] * 6, [1, 1, 1, 1, 1, 1]),
        (0.29, [0.0] * 6, [1, 1, 1, 1, 1, 1]),
        (0.29, [-1.0, -1.0, 1.0, -1.0, -1.0, -1.0], [0, 1, 1, 1, 1, 1]),  # A of each token decides
        (0.0, [-1.0] * 6, [0, 1, 0, 1, 1, 1]),
    ],
)
def test_only_bad_rows_that_the_policy_has_left_are_dropped(threshold, advantages, expected):
    mask = off_policy_sequence_mask(terms_of(advantages), SAMPLING, off_policy_mask_threshold=threshold)
    assert mask.tolist() == expected
    assert not mask.requires_grad


def test_a_row_with_an_unknown_log_prob_is_kept():
    sampling = SAMPLING.clone()
    sampling[0] = math.nan
    mask = off_policy_sequence_mask(terms_of([-1.0] * 6), sampling, off_policy_mask_threshold=0.0)
    assert mask.tolist() == [1.0] * 6


@pytest.mark.parametrize("threshold", [-0.1, math.nan])
def test_a_threshold_that_drops_rows_of_the_policy_itself_is_refused(threshold):
    with pytest.raises(ValueError, match=f"off_policy_mask_threshold={threshold}"):
        off_policy_sequence_mask(terms_of([-1.0] * 6), SAMPLING, off_policy_mask_threshold=threshold)


def test_positive_nll_and_its_gradient_are_of_the_marked_trainable_tokens():
    tokens = terms_of([1.0] * 6)
    loss = positive_nll(tokens, torch.tensor([True, True, True, False, True, True]))
    assert loss.tolist() == [1.0, 0.0, 2.0, 0.0, 0.0, 0.0]
    loss.sum().backward()
    assert tokens.logprobs.grad.tolist() == [-1.0, 0.0, -1.0, 0.0, 0.0, 0.0]


def test_the_dtype_of_a_term_stays():
    tokens = terms_of([-1.0] * 6, dtype=torch.float64)
    assert positive_nll(tokens, TRAINABLE_TERMS).dtype == torch.float64
    assert off_policy_sequence_mask(tokens, SAMPLING, off_policy_mask_threshold=0.1).dtype == torch.float64


def test_terms_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        off_policy_sequence_mask(terms_of([-1.0] * 6), torch.zeros(1), off_policy_mask_threshold=0.1)
    with pytest.raises(ValueError, match="shapes differ"):
        positive_nll(terms_of([-1.0] * 6), torch.ones(1, dtype=torch.bool))


# Row 0 has two trainable tokens, with ratios 4 and 1/2 (product 2, geometric mean sqrt(2)); row 1 has one, with ratio
# 1/5; row 2 has none. What is not trainable is not read.
RATIOS = [4.0, math.nan, 0.5, 0.2, math.inf]
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


def test_a_correction_of_other_shapes_is_refused():
    with pytest.raises(ValueError, match=r"shapes differ: log_ratio \(3,\), trainable \(5,\)"):
        result_of([1.0, 1.0, 1.0])


def test_table_of_corrections():
    assert {name: (row.level, row.bound) for name, row in OFF_POLICY_CORRECTIONS.items()} == {
        f"{level}_{bound}": (level, bound)
        for level in ("token", "sequence", "geometric")
        for bound in ("truncate", "mask")
    }
    assert all(row.source for row in OFF_POLICY_CORRECTIONS.values())
