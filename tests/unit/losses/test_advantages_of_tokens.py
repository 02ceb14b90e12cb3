"""Advantages of tokens and of turns, against numbers worked out by hand."""

import math

import pytest
import torch

from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.advantage.estimators import ScoredTokens
from prefrl.losses.advantage.tokens import turn_advantages
from prefrl.options.policy_gradient import BaselineParams, DiscountParams, GaeParams

NAN = math.nan


def scored(rewards, *, trainable=None, lengths=None, groups=None, dtype=torch.float64, **optional):
    """Rows of `lengths` tokens; one row of all tokens by default, a group of its own each."""
    lengths = [len(rewards)] if lengths is None else lengths
    return ScoredTokens(
        rewards=torch.tensor(rewards, dtype=dtype),
        trainable=torch.ones(len(rewards), dtype=torch.bool) if trainable is None else torch.tensor(trainable),
        row_index=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long)),
        num_rows=len(lengths),
        groups=torch.arange(len(lengths)) if groups is None else torch.tensor(groups),
        **{name: torch.tensor(values, dtype=dtype) for name, values in optional.items()},
    )


def gae(tokens, gamma=1.0, lam=1.0):
    return ADVANTAGES["gae"].function(tokens, GaeParams(gamma=gamma, lam=lam))


def reinforce(tokens, gamma=1.0):
    return ADVANTAGES["reinforce_plus_plus"].function(tokens, DiscountParams(gamma=gamma))


def baseline(tokens, *, zero_tail=False):
    return ADVANTAGES["optimal_token_baseline"].function(tokens, BaselineParams(zero_tail=zero_tail))


def check(tensor, expected):
    torch.testing.assert_close(
        tensor, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12, equal_nan=True
    )


def test_gae_by_hand():
    # delta_3 = 8 - 2 = 6; delta_2 = 1 + .5 * 2 - 4 = -2; delta_1 = 0 + .5 * 4 - 1 = 1. gamma lam = 1/8:
    # A_3 = 6; A_2 = -2 + 6/8 = -1.25; A_1 = 1 - 1.25/8 = .84375.
    result = gae(scored([0.0, 1.0, 8.0], values=[1.0, 4.0, 2.0]), gamma=0.5, lam=0.25)
    check(result.values, [0.84375, -1.25, 6.0])
    check(result.returns, [1.84375, 2.75, 8.0])
    check(result.totals, [9.0])


def test_gae_ends_at_the_end_of_each_row():
    result = gae(
        scored([0.0, 2.0, 0.0, 0.0, 4.0], lengths=[2, 3], values=[1.0, 1.5, 3.0, 2.0, 1.0]), gamma=0.5, lam=1.0
    )
    # Row 1: 2 - 1.5, 2/2 - 1. Row 2: 4 - 1, 4/2 - 2, 4/4 - 3.
    check(result.values, [0.0, 0.5, -2.0, 0.0, 3.0])


def test_tokens_that_were_not_chosen_are_no_steps():
    """Their rewards and values are not read, and no discount is paid for them."""
    bare = gae(scored([0.5, 1.0, 8.0], values=[1.0, 4.0, 2.0]), gamma=0.5, lam=0.25)
    tools = scored(
        [9.0, 0.5, 9.0, NAN, 1.0, 8.0, 9.0],
        values=[7.0, 1.0, 7.0, 7.0, 4.0, 2.0, NAN],
        trainable=[False, True, False, False, True, True, False],
    )
    result = gae(tools, gamma=0.5, lam=0.25)
    for with_tools, without in ((result.values, bare.values), (result.returns, bare.returns)):
        assert torch.equal(with_tools[[1, 4, 5]], without)
        assert with_tools[[0, 2, 3, 6]].tolist() == [0.0] * 4
    check(result.totals, [9.5])


def test_a_row_without_a_reward_has_advantage_zero_and_teaches_the_critic_nothing():
    result = gae(scored([1.0, NAN, 0.0, 3.0], lengths=[2, 2], groups=[0, 0], values=[5.0, 6.0, 1.0, 2.0]))
    check(result.values, [0.0, 0.0, 2.0, 1.0])
    check(result.returns, [5.0, 6.0, 3.0, 3.0])
    check(result.totals, [NAN, 3.0])


def test_a_critic_that_is_nan_is_not_hidden():
    assert gae(scored([1.0, 2.0], values=[NAN, 1.0])).values[0].isnan()


def test_totals_are_those_of_the_rows():
    result = reinforce(scored([1.0, 0.0, 2.0, 5.0], lengths=[1, 2, 1], groups=[4, 4, 2]))
    check(result.totals, [1.0, 2.0, 5.0])


def test_a_row_without_a_trainable_token_has_no_total():
    result = reinforce(scored([1.0, 2.0, 3.0], lengths=[1, 2], groups=[0, 0], trainable=[True, False, False]))
    check(result.values, [1.0, 0.0, 0.0])
    check(result.totals, [1.0, NAN])


def test_reward_to_go_is_discounted_for_each_step():
    # 8; 4 + 8/2; -1 + 8/2. Second row: 6; 0 + 6/2.
    result = reinforce(scored([-1.0, 4.0, 8.0, 0.0, 6.0], lengths=[3, 2]), gamma=0.5)
    check(result.values, [3.0, 8.0, 8.0, 3.0, 6.0])
    assert result.returns is None


def test_discount_zero_leaves_the_reward_of_each_step():
    check(reinforce(scored([-1.0, 4.0, 8.0]), gamma=0.0).values, [-1.0, 4.0, 8.0])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 1000])
def test_a_reward_reaches_the_start_of_a_row_of_any_length(length):
    result = reinforce(scored([0.0] * (length - 1) + [1.0] + [5.0], lengths=[length, 1]), gamma=0.999)
    torch.testing.assert_close(result.values[:length], 0.999 ** torch.arange(length - 1, -1, -1).double())


def test_rows_without_a_reward_do_not_reach_their_neighbors():
    result = reinforce(scored([1.0, 2.0, NAN, 0.0, 4.0, 8.0], lengths=[2, 2, 2]))
    check(result.values, [3.0, 2.0, 0.0, 0.0, 12.0, 8.0])


# Two rows of a group with p = (1/2, 1/4) and (1/2), and sum p^2 = 1/2 everywhere:
# energies 1 - 1 + 1/2 = 1/2, 1 - 1/2 + 1/2 = 1 and 1/2, so W = (1/2, 3/2) and (1/2).
PAIR = {
    "lengths": [2, 1],
    "groups": [3, 3],
    "logprobs": [math.log(0.5), math.log(0.25), math.log(0.5)],
    "log_collision": [math.log(0.5)] * 3,
}


def test_optimal_baseline_by_hand():
    # Step 1: G = 4 and 1, equal weights: B = 2.5. Step 2: the first row alone.
    check(baseline(scored([1.0, 3.0, 1.0], **PAIR)).values, [1.5, 0.0, -1.5])


def test_optimal_baseline_weighs_by_the_energy_up_to_the_step():
    # Two rows of two steps; p = (1/2, 1/4) and (1/2, 1/2): W_2 = 3/2 and 1. B_2 = (3/2 * 3 + 1 * 8) / (5/2) = 5.
    tokens = scored(
        [0.0, 3.0, 0.0, 8.0],
        lengths=[2, 2],
        groups=[0, 0],
        logprobs=[math.log(0.5), math.log(0.25), math.log(0.5), math.log(0.5)],
        log_collision=[math.log(0.5)] * 4,
    )
    check(baseline(tokens).values, [-2.5, -2.0, 2.5, 3.0])


def test_importance_weights_enter_the_energy_squared():
    # rho = 2 of the first row at step 1: weights 4/2 and 1/2, B = (4 * 4 + 1) / 5 = 3.4.
    tokens = scored([1.0, 3.0, 1.0], **PAIR, log_ratio=[math.log(2.0), 0.0, 0.0])
    check(baseline(tokens).values, [0.6, 0.0, -2.4])


def test_a_masked_importance_weight_takes_its_row_out_of_the_baseline():
    tokens = scored([1.0, 3.0, 1.0], **PAIR, log_ratio=[-math.inf, 0.0, 0.0])
    check(baseline(tokens).values, [3.0, 0.0, 0.0])


def test_large_importance_weights_do_not_overflow():
    tokens = scored([1.0, 3.0, 1.0], **PAIR, dtype=torch.float32, log_ratio=[80.0, 80.0, 80.0])
    torch.testing.assert_close(baseline(tokens).values, torch.tensor([1.5, 0.0, -1.5]))


def test_zero_tail_takes_the_baseline_from_a_row_that_goes_on_alone():
    check(baseline(scored([1.0, 3.0, 1.0], **PAIR), zero_tail=True).values, [1.5, 3.0, -1.5])


def test_zero_tail_counts_only_rows_with_a_reward():
    check(baseline(scored([1.0, 3.0, NAN], **PAIR), zero_tail=True).values, [4.0, 3.0, 0.0])
    check(baseline(scored([1.0, 3.0, NAN], **PAIR), zero_tail=False).values, [0.0, 0.0, 0.0])


def test_optimal_baseline_compares_within_the_group_and_at_the_same_step():
    one = {"logprobs": [math.log(0.5)] * 4, "log_collision": [math.log(0.5)] * 4, "lengths": [1] * 4}
    check(baseline(scored([1.0, 10.0, 3.0, 30.0], groups=[5, 9, 5, 9], **one)).values, [-1.0, -10.0, 1.0, 10.0])


def test_steps_are_counted_without_tokens_that_were_not_chosen():
    """The second row's first trainable token stands third, and is compared with the first of the others."""
    tools = scored(
        [1.0, 3.0, 7.0, NAN, 1.0],
        lengths=[2, 3],
        groups=[3, 3],
        trainable=[True, True, False, False, True],
        logprobs=[*PAIR["logprobs"][:2], NAN, NAN, PAIR["logprobs"][2]],
        log_collision=[PAIR["log_collision"][0]] * 5,
    )
    check(baseline(tools).values, [1.5, 0.0, 0.0, 0.0, -1.5])


def test_equal_returns_give_exactly_zero_and_certain_tokens_no_nan():
    tokens = scored(
        [0.0, 0.1, 0.0, 0.1],
        lengths=[2, 2],
        groups=[0, 0],
        dtype=torch.float32,
        logprobs=[0.0, -1e-7, 0.0, -2.3],
        log_collision=[0.0, -2e-7, 0.0, -1.0],
    )
    assert baseline(tokens).values.tolist() == [0.0] * 4


def test_energies_of_very_unlikely_tokens_are_finite():
    """p = 0: energies 1 + 1/2 and 1/2 of the first steps, so B = (3/2 * 4 + 1/2 * 1) / 2 = 3.25."""
    tokens = PAIR | {"logprobs": [-90.0, math.log(0.25), math.log(0.5)]}
    result = baseline(scored([1.0, 3.0, 1.0], **tokens, dtype=torch.float32))
    torch.testing.assert_close(result.values, torch.tensor([0.75, 0.0, -2.25]))


def test_a_collision_that_rounding_puts_below_p_squared_weighs_nothing():
    """The first row's only energy is (1 - p)^2 = 1/4, that of the second 1 / 2: B = (4 / 4 + 1 / 2) / (3 / 4) = 2."""
    tokens = PAIR | {"log_collision": [2 * math.log(0.5) - 0.1, math.log(0.5), math.log(0.5)]}
    check(baseline(scored([1.0, 3.0, 1.0], **tokens)).values, [2.0, 0.0, -1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_have_the_dtype_of_the_rewards(dtype):
    tokens = scored([1.0, 3.0, 1.0], **PAIR, values=[0.0, 0.0, 0.0], dtype=dtype)
    for result in (gae(tokens), reinforce(tokens), baseline(tokens)):
        assert {result.values.dtype, result.totals.dtype} == {dtype}
    assert gae(tokens).returns.dtype == dtype


def test_nothing_to_score_has_no_advantages():
    empty = scored([], lengths=[], groups=[], values=[], logprobs=[], log_collision=[])
    for result in (gae(empty), reinforce(empty), baseline(empty)):
        assert result.values.shape == result.totals.shape == (0,)
    untrained = scored([1.0], trainable=[False], values=[1.0], logprobs=[-1.0], log_collision=[-1.0])
    for result in (gae(untrained), reinforce(untrained), baseline(untrained)):
        assert result.values.tolist() == [0.0]


def test_advantages_are_constants():
    tokens = scored([1.0, 3.0, 1.0], **PAIR, values=[0.0, 0.0, 0.0])
    for tensor in (tokens.rewards, tokens.values, tokens.logprobs, tokens.log_collision):
        tensor.requires_grad_()
    for result in (gae(tokens), reinforce(tokens), baseline(tokens)):
        assert not result.values.requires_grad


def test_the_table_says_what_each_estimator_needs():
    rows = {name: row for name, row in ADVANTAGES.items() if row.level == "token"}
    hyperparameters = {
        "gae": {"gamma", "lam"},
        "reinforce_plus_plus": {"gamma"},
        "optimal_token_baseline": {"zero_tail"},
    }
    assert {name: {*row.params.names()} - {"clip_range"} for name, row in rows.items()} == hyperparameters
    assert {name for name, row in rows.items() if row.whitened} == {"gae", "reinforce_plus_plus"}
    assert rows["gae"].needs == {"values"}
    assert rows["optimal_token_baseline"].needs == {"logprobs", "log_collision"}
    for name, message in (("gae", "values of a critic"), ("optimal_token_baseline", "logprobs and log_collision")):
        with pytest.raises(ValueError, match=message):
            rows[name].function(scored([1.0]), rows[name].params())


@pytest.mark.parametrize("options", [{"gamma": 1.01}, {"gamma": -0.1}, {"lam": 2.0}, {"lam": NAN}])
def test_shares_outside_0_to_1_are_refused(options):
    with pytest.raises(ValueError, match="must be a number >= 0 and <= 1"):
        gae(scored([1.0], values=[0.0]), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": [0.0]}, r"shapes differ: rewards \(2,\), trainable \(2,\), row_index \(2,\), values \(1,\)"),
        ({"groups": [0, 0]}, r"groups \(2,\): needs one entry for each of 1 rows"),
        ({"rewards": [1.0, -math.inf]}, "infinite"),
    ],
)
def test_tokens_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        scored(**({"rewards": [1.0, 2.0]} | changes))


def test_rows_that_are_not_laid_end_to_end_are_refused():
    with pytest.raises(ValueError, match="row_index decreases"):
        ScoredTokens(torch.zeros(3), torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 0]), 2, torch.tensor([0, 0]))


UNSCORED = float("nan")


def advantages(episodes, groups, *, discount=1.0, epsilon=None, dtype=torch.float64):
    """Advantages of each episode's turns, from lists of their rewards."""
    lengths = [len(rewards) for rewards in episodes]
    found = turn_advantages(
        torch.tensor([reward for rewards in episodes for reward in rewards], dtype=dtype),
        torch.arange(len(episodes)).repeat_interleave(torch.tensor(lengths)),
        torch.tensor(groups),
        discount=discount,
        epsilon=epsilon,
    )
    assert found.dtype == dtype
    return [turns.tolist() for turns in found.split(lengths)]


def check_turns(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-12)


def test_an_episode_that_is_over_counts_as_0_in_the_baselines_of_later_turns():
    # Returns: (7, 6, 4), (5, 3) and (1); the baseline of turn 2 of the first is (3 + 0) / 2, of turn 3 it is 0.
    found = advantages([[1.0, 2.0, 4.0], [2.0, 3.0], [1.0]], [5, 5, 5])
    check_turns(found, [[7 - 6 / 2, 6 - 3 / 2, 4.0], [5 - 8 / 2, 3 - 6 / 2], [1 - 12 / 2]])


def test_later_rewards_are_discounted_for_each_turn():
    # Returns: (1 + 2 / 2 + 4 / 4, 2 + 4 / 2, 4) and (2 + 3 / 2, 3).
    found = advantages([[1.0, 2.0, 4.0], [2.0, 3.0]], [0, 0], discount=0.5)
    check_turns(found, [[3 - 3.5, 4.0 - 3, 4.0], [3.5 - 3, 3 - 4.0]])


@pytest.mark.parametrize("dropped", [[9.0, UNSCORED, 9.0], [UNSCORED], []])
def test_an_episode_without_a_reward_gets_0_and_enters_no_baseline(dropped):
    found = advantages([[1.0, 2.0], dropped, [4.0], [8.0]], [0, 0, 0, 1])
    check_turns(found, [[3.0 - 4.0, 2.0], [0.0] * len(dropped), [4.0 - 3.0], [0.0]])


def test_an_episode_whose_group_has_no_other_reward_gets_0():
    assert advantages([[1.0, 2.0], [UNSCORED, 1.0], [5.0]], [0, 0, 1]) == [[0.0, 0.0], [0.0, 0.0], [0.0]]


def test_half_precision_is_only_the_precision_of_the_result():
    """2048 + 1 is not a number of float16, 2049 - 2048 is."""
    assert advantages([[2048.0, 1.0], [2048.0]], [0, 0], dtype=torch.float16) == [[1.0, 1.0], [-1.0]]


def test_no_turns_have_no_advantages():
    assert advantages([[], []], [0, 0]) == [[], []]


@pytest.mark.parametrize(
    ("rewards", "episodes", "num_episodes", "message"),
    [
        ([1.0, 2.0], [0], 1, r"rewards \(2,\), episode_index \(1,\)"),
        ([[1.0], [2.0]], [[0], [1]], 2, r"rewards \(2, 1\), groups \(2,\): need to be \[U\] and \[B\]"),
        ([1.0, 2.0], [1, 0], 2, "episode_index decreases"),
        ([1.0, 2.0], [0, 2], 2, "episode_index from 0 to 2: needs to be in 0 .. 1"),
        ([1.0, 2.0], [-1, 0], 2, "episode_index from -1 to 0: needs to be in 0 .. 1"),
        ([1.0, float("inf")], [0, 1], 2, "infinite"),
    ],
)
def test_turns_that_do_not_fit_are_errors(rewards, episodes, num_episodes, message):
    groups = torch.zeros(num_episodes, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        turn_advantages(torch.tensor(rewards), torch.tensor(episodes), groups, discount=1.0)


def test_the_scale_is_the_deviation_around_the_means_of_the_turns():
    # Returns: (3, 1), (1) and (2, 2); around the means 2 and 1 the squares are 1 + 1 + 0 and 0 + 1 + 1, of 2 + 2 free.
    scaled = advantages([[2.0, 1.0], [1.0], [0.0, 2.0]], [5, 5, 5], epsilon=0.5)
    check_turns(scaled, [[1.5 / 1.5, 0.0], [-1.5 / 1.5], [0.0, 1.5 / 1.5]])


def test_one_turn_is_scaled_like_a_completion():
    found = advantages([[1.0], [2.0], [6.0]], [5, 5, 5], epsilon=1e-4)
    std = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64).std().item()
    check_turns(found, [[x * 1.5 / (std + 1e-4)] for x in (-2.0, -1.0, 3.0)])


def test_the_scale_of_a_group_does_not_depend_on_longer_episodes_of_others():
    alone = advantages([[1.0, 2.0], [2.0]], [0, 0], epsilon=1e-4)
    check_turns(advantages([[1.0, 2.0], [2.0], [1.0] * 9, [2.0]], [0, 0, 1, 1], epsilon=1e-4)[:2], alone)
    check_turns(advantages([[1.0, 2.0], [2.0], [UNSCORED] * 9], [0, 0, 0], epsilon=1e-4)[:2], alone)


def test_equal_totals_of_episodes_of_different_lengths_have_bounded_advantages():
    found = advantages([[0.0, 1.0], [1.0], [1.0]], [5, 5, 5], epsilon=1e-4)
    assert max(abs(value) for turns in found for value in turns) < 3
    assert advantages([[1.0, 0.0], [1.0], [1.0]], [5, 5, 5], epsilon=1e-4) == [[0.0, 0.0], [0.0], [0.0]]
