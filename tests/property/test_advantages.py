"""Properties of advantages that hold for any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.advantage.estimators import ScoredRows, ScoredTokens, moments, whitened
from prefrl.options.policy_gradient import DiscountParams, GaeParams, ScaleParams

quick = settings(max_examples=25, deadline=None, derandomize=True)
GRPO = [("group", "sum_then_normalize"), ("batch", "sum_then_normalize"), ("none", "sum_then_normalize"),
        ("group", "normalize_then_sum")]  # fmt: skip
# Every row-level estimator: name, hyper-parameters.
ROWS = {
    **{
        f"grpo {scale} {aggregation}": (
            "grpo",
            {"scale_rewards": scale, "multi_objective_aggregation": aggregation, "advantage_epsilon": 1e-4},
        )
        for scale, aggregation in GRPO
    },
    "rloo": ("rloo", {}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
    "opo": ("opo", {}),
    "gpg": ("gpg", {"f_norm": 2.0}),
    "grpo_passk": ("grpo_passk", {"scale_rewards": "group", "advantage_epsilon": 1e-4}),
    "remax": ("remax", {}),
    "maxrl": ("maxrl", {}),
}
CENTRED = [name for name in ROWS if name not in ("opo", "grpo_passk", "remax")]
# Read the batch's spread, or the number of rows that differ: a constant for each group is not ignored by the former.
BATCH = ("grpo batch sum_then_normalize",)
TOKENS = {
    "gae": {"gamma": 0.9, "lam": 0.8},
    "reinforce_plus_plus": {"gamma": 0.9},
    "optimal_token_baseline": {"zero_tail": True},
    "optimal_token_baseline own": {"zero_tail": False},
}


@st.composite
def reward_tables(draw):
    """Rewards [B, K] >= 0 with holes, weights [K], groups [B] of any sizes, interleaved, lengths, greedy rewards."""
    num_rows, num_rewards = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    value = st.one_of(st.just(float("nan")), st.integers(0, 8).map(lambda i: i / 4))
    row = st.lists(value, min_size=num_rewards, max_size=num_rewards)
    groups = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows)))
    weights = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=num_rewards, max_size=num_rewards))
    greedy = torch.tensor(draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4)))
    return ScoredRows(
        rewards=torch.tensor(draw(st.lists(row, min_size=num_rows, max_size=num_rows)), dtype=torch.float64),
        weights=torch.tensor(weights),
        groups=groups,
        lengths=torch.tensor(draw(st.lists(st.integers(1, 9), min_size=num_rows, max_size=num_rows))),
        greedy=greedy.double()[groups],
    )


def changed(rows, **changes):
    fields = {name: getattr(rows, name) for name in ("rewards", "weights", "groups", "lengths", "greedy")}
    return ScoredRows(**(fields | changes))


def row_values(name, rows):
    estimator, hyperparameters = ROWS[name]
    row = ADVANTAGES[estimator]
    return row.function(rows, row.params(**hyperparameters)).values


def group_sums(values, rows):
    return torch.zeros(4, dtype=torch.float64).index_add(0, rows.groups, values)


def test_every_row_level_estimator_is_among_the_cases():
    assert {name for name, row in ADVANTAGES.items() if row.level == "row"} == {name for name, _ in ROWS.values()}


@pytest.mark.parametrize("name", CENTRED)
@quick
@given(rows=reward_tables())
def test_advantages_of_a_group_sum_to_zero(name, rows):
    torch.testing.assert_close(
        group_sums(row_values(name, rows), rows), torch.zeros(4, dtype=torch.float64), atol=1e-9, rtol=0
    )


@quick
@given(rows=reward_tables())
def test_optimal_reward_baseline_is_centered_over_tokens(rows):
    """Sum of length * advantage is 0."""
    values = row_values("opo", rows) * rows.lengths
    torch.testing.assert_close(group_sums(values, rows), torch.zeros(4, dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("remax", "maxrl")])
@quick
@given(rows=reward_tables(), data=st.data())
def test_advantages_ignore_a_constant_of_each_reward(name, rows, data):
    # A missing reward counts as 0 in a sum of rewards, so there a constant may be added where none is missing.
    if "normalize_then_sum" not in name:
        rows = changed(rows, rewards=rows.rewards.nan_to_num(nan=0.25))
    num_rewards = rows.rewards.shape[1]
    shift = torch.tensor(data.draw(st.lists(st.integers(-9, 9), min_size=num_rewards, max_size=num_rewards)))
    shifts = shift.double().expand_as(rows.rewards)
    if name not in BATCH:  # each group may have its own, as long as the batch's spread is not asked for
        shifts = shifts * (rows.groups[:, None] + 1)
    found = row_values(name, changed(rows, rewards=rows.rewards + shifts))
    torch.testing.assert_close(found, row_values(name, rows), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ROWS)
@quick
@given(rows=reward_tables(), data=st.data())
def test_advantages_follow_their_rows_in_any_order(name, rows, data):
    order = torch.tensor(data.draw(st.permutations(range(len(rows.groups)))))
    other = ScoredRows(
        rewards=rows.rewards[order],
        weights=rows.weights,
        groups=1000 - 7 * rows.groups[order],
        lengths=rows.lengths[order],
        greedy=rows.greedy[order],
    )
    torch.testing.assert_close(row_values(name, other), row_values(name, rows)[order], atol=1e-9, rtol=1e-9)


@quick
@given(rows=reward_tables())
def test_rloo_is_the_reward_minus_the_mean_of_the_others_that_have_one(rows):
    totals = rows.totals()
    found = row_values("rloo", rows)
    for row, total in enumerate(totals):
        others = (rows.groups == rows.groups[row]) & ~totals.isnan()
        others[row] = False
        expected = total - totals[others].mean()
        torch.testing.assert_close(found[row], expected.nan_to_num(nan=0.0), atol=1e-9, rtol=1e-9)


@quick
@given(rows=reward_tables())
def test_passk_is_the_best_with_the_row_minus_the_best_without_it(rows):
    totals = rows.totals()
    found = ADVANTAGES["grpo_passk"].function(rows, ScaleParams(scale_rewards="none")).values
    for row in range(len(totals)):
        group = (rows.groups == rows.groups[row]) & ~totals.isnan()
        others = group.clone()
        others[row] = False
        adds = totals[group].max() - totals[others].max() if group[row] and others.any() else torch.zeros(())
        assert found[row] == adds


@st.composite
def token_batches(draw):
    """Rows of 0 to 6 tokens in groups, some tokens not trainable, some rows without a reward; a list of rows."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = []
    for length in lengths:
        logprobs = -0.01 - 3 * torch.rand(length, generator=generator, dtype=torch.float64)
        rewards = torch.randn(length, generator=generator, dtype=torch.float64)
        if draw(st.integers(0, 5)) == 0:
            rewards[-1] = torch.nan
        rows.append(
            {
                "rewards": rewards,
                "trainable": torch.rand(length, generator=generator) < 0.7,
                "values": torch.randn(length, generator=generator, dtype=torch.float64),
                "logprobs": logprobs,
                "log_collision": logprobs + torch.rand(length, generator=generator, dtype=torch.float64) * -logprobs,
                "log_ratio": torch.randn(length, generator=generator, dtype=torch.float64),
                "group": draw(st.integers(0, 2)),
            }
        )
    return rows


def batch_of(rows):
    lengths = torch.tensor([len(row["rewards"]) for row in rows])
    names = ("rewards", "trainable", "values", "logprobs", "log_collision", "log_ratio")
    return ScoredTokens(
        row_index=torch.arange(len(rows)).repeat_interleave(lengths),
        num_rows=len(rows),
        groups=torch.tensor([row["group"] for row in rows]),
        **{name: torch.cat([row[name] for row in rows]) for name in names},
    )


def per_row(name, rows):
    row = ADVANTAGES[name.split()[0]]
    values = row.function(batch_of(rows), row.params(**TOKENS[name])).values
    return values.split([len(row["rewards"]) for row in rows])


def assert_equal_rows(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def scored_steps(row):
    """Rewards and values of the trainable tokens; None if one of the rewards is NaN."""
    rewards, values = row["rewards"][row["trainable"]], row["values"][row["trainable"]]
    return (None, None) if rewards.isnan().any() else (rewards, values)


@quick
@given(rows=token_batches(), gamma=st.sampled_from([0.0, 0.5, 0.97, 1.0]), lam=st.sampled_from([0.0, 0.3, 0.95, 1.0]))
def test_gae_is_its_recursion(rows, gamma, lam):
    result = ADVANTAGES["gae"].function(batch_of(rows), GaeParams(gamma=gamma, lam=lam))
    lengths = [len(row["rewards"]) for row in rows]
    for row, values, returns in zip(rows, result.values.split(lengths), result.returns.split(lengths), strict=True):
        expected, expected_returns = torch.zeros_like(values), row["values"].where(row["trainable"], 0.0)
        rewards, critic = scored_steps(row)
        if rewards is not None:
            advantages, following, running = [], 0.0, 0.0
            for reward, value in zip(rewards.flip(0).tolist(), critic.flip(0).tolist(), strict=True):
                running = reward + gamma * following - value + gamma * lam * running
                following = value
                advantages.append(running)
            expected[row["trainable"]] = torch.tensor(advantages[::-1], dtype=torch.float64)
            expected_returns = expected_returns + expected
        torch.testing.assert_close(values, expected, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(returns, expected_returns, atol=1e-9, rtol=1e-9)


@quick
@given(rows=token_batches())
def test_gae_without_discounts_is_reward_to_go_minus_value(rows):
    gae = ADVANTAGES["gae"].function(batch_of(rows), GaeParams(gamma=1.0, lam=1.0))
    to_go = ADVANTAGES["reinforce_plus_plus"].function(batch_of(rows), DiscountParams(gamma=1.0)).values
    batch = batch_of(rows)
    has_reward = batch.trainable & ~gae.totals.isnan()[batch.row_index]
    torch.testing.assert_close(gae.values, (to_go - batch.values).where(has_reward, 0.0), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(gae.returns.where(has_reward, 0.0), to_go, atol=1e-9, rtol=1e-9)


@quick
@given(rows=token_batches(), gamma=st.sampled_from([0.0, 0.5, 1.0]))
def test_gae_with_lambda_zero_is_the_error_of_one_step(rows, gamma):
    values = ADVANTAGES["gae"].function(batch_of(rows), GaeParams(gamma=gamma, lam=0.0)).values
    for row, found in zip(rows, values.split([len(row["rewards"]) for row in rows]), strict=True):
        rewards, critic = scored_steps(row)
        if rewards is not None:
            following = torch.cat([critic[1:], torch.zeros(min(1, len(critic)))])
            torch.testing.assert_close(found[row["trainable"]], rewards + gamma * following - critic)


@pytest.mark.parametrize("name", TOKENS)
@quick
@given(rows=token_batches(), data=st.data())
def test_row_order_changes_nothing(name, rows, data):
    order = data.draw(st.permutations(range(len(rows))))
    found = per_row(name, [rows[row] for row in order])
    expected = per_row(name, rows)
    assert_equal_rows(found, [expected[row] for row in order])


@pytest.mark.parametrize("name", TOKENS)
@quick
@given(rows=token_batches())
def test_rows_of_other_groups_change_nothing(name, rows):
    expected = per_row(name, rows)
    for group in (0, 1, 2):
        chosen = [i for i, row in enumerate(rows) if row["group"] == group]
        if chosen:
            assert_equal_rows(per_row(name, [rows[i] for i in chosen]), [expected[i] for i in chosen])


@pytest.mark.parametrize("name", TOKENS)
@quick
@given(rows=token_batches())
def test_tokens_that_are_not_trainable_change_nothing(name, rows):
    """Taken out, the others keep their advantages."""
    bare = [{key: value if key == "group" else value[row["trainable"]] for key, value in row.items()} for row in rows]
    expected = per_row(name, bare)
    for row, found, without in zip(rows, per_row(name, rows), expected, strict=True):
        torch.testing.assert_close(found[row["trainable"]], without, atol=1e-9, rtol=1e-9)
        assert not found[~row["trainable"]].any()


@quick
@given(rows=token_batches())
def test_optimal_baseline_is_its_formula(rows):
    found = per_row("optimal_token_baseline own", rows)
    steps = [(*scored_steps(row), row) for row in rows]
    for number, (rewards, _, row) in enumerate(steps):
        group = [s for s in steps if s[2]["group"] == row["group"] and s[0] is not None]
        for step in range(0 if rewards is None else len(rewards)):
            above, below = 0.0, 0.0
            for other_rewards, _, other in group:
                if step < len(other_rewards):
                    at = other["trainable"]
                    p, collision = other["logprobs"][at].exp(), other["log_collision"][at].exp()
                    energy = ((2 * other["log_ratio"][at]).exp() * (1 - 2 * p + collision))[: step + 1].sum()
                    above, below = above + other_rewards[step:].sum() * energy, below + energy
            expected = rewards[step:].sum() - above / below
            torch.testing.assert_close(found[number][row["trainable"]][step], expected, atol=1e-9, rtol=1e-9)


@quick
@given(rows=token_batches())
def test_the_optimal_baseline_is_centered_where_gradients_weigh(rows):
    """With equal probabilities all rows weigh the same at a step: their advantages there sum to zero."""
    rows = [row | {"logprobs": 0 * row["logprobs"] - 1, "log_collision": 0 * row["logprobs"] - 1,
                   "log_ratio": 0 * row["log_ratio"]} for row in rows]  # fmt: skip
    sums = {}
    for row, values in zip(rows, per_row("optimal_token_baseline own", rows), strict=True):
        for step, value in enumerate(values[row["trainable"]].tolist()):
            sums[row["group"], step] = sums.get((row["group"], step), 0.0) + value
    assert all(abs(total) < 1e-9 for total in sums.values())


@quick
@given(seed=st.integers(0, 2**31), num_tokens=st.integers(2, 40), cut=st.integers(0, 40))
def test_whitened_values_have_mean_0_and_deviation_1_however_they_are_shared(seed, num_tokens, cut):
    generator = torch.Generator().manual_seed(seed)
    values = 3 + 2 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(num_tokens, generator=generator) < 0.7
    mask[:2] = True
    total = moments(values[:cut], mask[:cut]) + moments(values[cut:], mask[cut:])
    result = whitened(values, mask, mean=total.mean, std=total.std, shift_mean=True, advantage_epsilon=1e-12)
    assert result[mask].mean().item() == pytest.approx(0.0, abs=1e-9)
    assert result[mask].std().item() == pytest.approx(1.0, rel=1e-9)
    assert not result[~mask].any()
