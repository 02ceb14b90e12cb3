import json
import math

import pytest
import torch

from prefrl.losses.advantage.balance import (
    NASH_RIDGE,
    REWARD_BALANCES,
    RewardBalancer,
    RewardTasks,
    gram,
    squared_weights,
)
from prefrl.losses.per_token import token_weights
from prefrl.options.balance import FamoParams, GradnormParams, UncertaintyParams

HYPERPARAMETERS = {
    "fixed": {},
    "log_transform": {},
    "uncertainty": {"rate": 0.3},
    "gradnorm": {"alpha": 1.5, "rate": 0.3},
    "famo": {"rate": 2.0, "decay": 0.05},
    "nash": {},
    "pareto": {"smoothing": 0.5},
}
every_balance = pytest.mark.parametrize("balance", REWARD_BALANCES)
adaptive_balance = pytest.mark.parametrize("balance", [name for name in REWARD_BALANCES if name != "fixed"])
EQUAL = torch.eye(2)  # gradients of one length that have nothing to do with each other


def make(balance, *, reward_weights=(1.0, 1.0), **changes):
    params = REWARD_BALANCES[balance].params(**(HYPERPARAMETERS[balance] | changes))
    return RewardBalancer(balance, params, reward_weights=reward_weights)


def with_losses(*losses):
    """[10, K] rewards in 0 .. 1 whose mean is 1 - loss, 0.1 to 0.9: as 0 and 1 are there, the share left."""
    return torch.tensor([[0.0, 1.0, *[(9 - 10 * loss) / 8] * 8] for loss in losses], dtype=torch.float64).T


def close(found, expected):
    assert found.tolist() == pytest.approx([float(value) for value in expected], rel=1e-12, abs=1e-12)


def tasks(matrix=EQUAL, weights=(1.0, 1.0), losses=(0.5, 0.5), previous_losses=(0.5, 0.5), memory=(0.0, 0.0)):
    values = {"losses": losses, "previous_losses": previous_losses, "first_losses": (0.5, 0.5), "memory": memory}
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    weights = torch.tensor(weights, dtype=torch.float64)
    return RewardTasks(gram=torch.as_tensor(matrix, dtype=torch.float64), weights=weights, **values)


# The Gram matrix.


def test_gram_by_hand():
    advantages = torch.tensor([[1.0, -1.0], [-1.0, 2.0]])
    assert gram(advantages, torch.tensor([2.0, 3.0])).tolist() == [[5.0, -8.0], [-8.0, 14.0]]


def test_squared_weights_by_hand():
    lengths = torch.tensor([2, 0, 4])
    assert squared_weights(lengths, reduction="sequence_mean").tolist() == [0.5, 0.0, 0.25]
    assert squared_weights(lengths, reduction="token").tolist() == [2.0, 0.0, 4.0]


@pytest.mark.parametrize("reduction", ["token", "sequence_mean", "sequence_sum", "constant"])
def test_gram_is_that_of_the_surrogates_gradients_at_ratio_one(reduction):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 5, 1, 4])
    row_index = torch.arange(4).repeat_interleave(lengths)
    trainable = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1], dtype=torch.bool)  # row 2 has no loss
    advantages = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    weights = token_weights(trainable, row_index, 4, reduction=reduction)
    gradients = []
    for advantage in advantages.unbind(1):
        logprobs = torch.randn(13, generator=generator, dtype=torch.float64).requires_grad_()
        loss = -(logprobs - logprobs.detach()).exp() * advantage[row_index]
        gradients.append(torch.autograd.grad((weights * loss).sum(), logprobs)[0])
    gradients = torch.stack(gradients)
    trainable_lengths = torch.zeros(4).index_add(0, row_index, trainable.float())
    found = gram(advantages, squared_weights(trainable_lengths, reduction=reduction))
    torch.testing.assert_close(found, gradients @ gradients.T, rtol=1e-6, atol=1e-7)  # token_weights are float32
    by_token = gram(advantages[row_index], weights.square())
    torch.testing.assert_close(by_token, gradients @ gradients.T, rtol=1e-6, atol=1e-7)


# Each method, by hand. Gradients are of one length unless said, so the alphas sum to 2.


def test_fixed_weights_are_the_weights_whatever_their_sign():
    alphas = make("fixed", reward_weights=[2.0, -0.5]).weights(
        torch.tensor([[4.0, 1.0], [1.0, 9.0]]), with_losses(0.5, 0.4)
    )
    assert alphas.tolist() == [2.0, -0.5]


def test_log_transform_by_hand():
    close(make("log_transform").weights(EQUAL, with_losses(0.5, 0.4)), [2 * 1.4 / 2.9, 2 * 1.5 / 2.9])


def test_uncertainty_moves_from_fixed_weights_to_the_inverse_of_the_loss():
    rewards = with_losses(0.6, 0.4)
    close(make("uncertainty", rate=1.0).weights(EQUAL, rewards), [0.8, 1.2])
    slow = make("uncertainty", rate=0.5)
    for share in (0.5, 0.75, 0.875):
        ratio = 1.5**-share
        close(slow.weights(EQUAL, rewards), [2 * ratio / (1 + ratio), 2 / (1 + ratio)])


def test_uncertainty_rests_where_the_likelihood_is_greatest():
    loss = torch.tensor([0.6, 0.05], dtype=torch.float64)
    balanced = REWARD_BALANCES["uncertainty"].function(tasks(losses=loss.tolist()), UncertaintyParams(rate=1.0))
    log_scale = balanced.memory.clone().requires_grad_()
    ((-log_scale).exp() * loss + log_scale).sum().backward()
    torch.testing.assert_close(log_scale.grad, torch.zeros(2, dtype=torch.float64))


def test_uncertainty_steps_are_gradient_descent_near_rest():
    loss, rate, distance = 0.6, 0.1, 1e-4
    start = math.log(loss) + distance
    balanced = REWARD_BALANCES["uncertainty"].function(
        tasks(losses=(loss, loss), memory=(start, start)), UncertaintyParams(rate=rate)
    )
    descent = start - rate * (1 - math.exp(-start) * loss)
    assert balanced.memory[0].item() == pytest.approx(descent, abs=rate * distance**2)


def test_gradnorm_equalises_the_lengths_of_gradients():
    matrix = torch.tensor([[1.0, 0.3], [0.3, 16.0]])
    rewards = with_losses(0.5, 0.5)
    close(make("gradnorm", rate=1.0).weights(matrix, rewards), [2.5, 0.625])
    slow = make("gradnorm", rate=0.5)
    close(slow.weights(matrix, rewards), [5 / 3, 5 / 6])  # halfway, in logarithms
    for _ in range(50):
        alphas = slow.weights(matrix, rewards)
    close(alphas, [2.5, 0.625])


def test_gradnorm_weights_are_shares_of_the_gradient():
    alphas = make("gradnorm", reward_weights=[1.0, 3.0], rate=1.0).weights(
        torch.diag(torch.tensor([1.0, 16.0])), with_losses(0.5, 0.5)
    )
    close(alphas * torch.tensor([1.0, 4.0]), [13 / 4, 39 / 4])


def test_gradnorm_pulls_the_reward_that_lags_behind():
    balancer = make("gradnorm", rate=1.0, alpha=1.5)
    close(balancer.weights(EQUAL, with_losses(0.6, 0.6)), [1.0, 1.0])
    # The first has a quarter of its loss left: (1/4)^1.5 = 1/8.
    close(balancer.weights(EQUAL, with_losses(0.15, 0.6)), [2 / 9, 16 / 9])
    slow = make("gradnorm", rate=0.1)
    slow.weights(EQUAL, with_losses(0.6, 0.6))
    first, second = (slow.weights(EQUAL, with_losses(0.15, 0.6)) for _ in range(2))
    assert second[0] < first[0] < 1 < first[1] < second[1]


@pytest.mark.parametrize(
    ("norms", "losses"), [((1.0, 3.0), (0.5, 0.5)), ((1.0, 1.0), (0.2, 0.5)), ((2.0, 1.0), (0.2, 0.4))]
)
def test_gradnorm_moves_as_the_gradient_of_its_paper(norms, losses):
    memory = torch.tensor([0.2, -0.2], dtype=torch.float64)
    matrix = torch.diag(torch.tensor(norms, dtype=torch.float64).square())
    balanced = REWARD_BALANCES["gradnorm"].function(
        tasks(matrix, losses=losses, memory=memory.tolist()), GradnormParams(alpha=1.5, rate=0.1)
    )
    weights = memory.exp().requires_grad_()
    lengths = weights * torch.tensor(norms, dtype=torch.float64)
    rates = torch.tensor(losses, dtype=torch.float64) / 0.5
    target = (lengths.mean() * (rates / rates.mean()) ** 1.5).detach()
    (lengths - target).abs().sum().backward()
    # Of two weights only the proportion counts.
    moved = balanced.memory - memory
    descent = -weights.grad
    assert (moved[0] - moved[1]) * (descent[0] - descent[1]) > 0
    assert moved.sum().item() == pytest.approx(0, abs=1e-15)


def test_famo_by_hand():
    balancer = make("famo", rate=1.0, decay=0.0)
    close(balancer.weights(EQUAL, with_losses(0.6, 0.6)), [1.0, 1.0])
    # Progress log 2 of the first: x = (-1/4, 1/4) log 2, z_1 / z_2 = 2^(-1/2), and 1 / L gives a factor of 2.
    close(balancer.weights(EQUAL, with_losses(0.3, 0.6)), [2 * 2**0.5 / (1 + 2**0.5), 2 / (1 + 2**0.5)])


def test_famo_descends_on_the_progress_that_its_shares_weigh():
    memory = torch.tensor([0.3, -0.3], dtype=torch.float64, requires_grad=True)
    progress = torch.tensor([math.log(0.8 / 0.2), math.log(0.5 / 0.4)], dtype=torch.float64)
    (memory.softmax(0) * progress).sum().backward()
    balanced = REWARD_BALANCES["famo"].function(
        tasks(losses=(0.2, 0.4), previous_losses=(0.8, 0.5), memory=(0.3, -0.3)), FamoParams(rate=0.7, decay=0.1)
    )
    torch.testing.assert_close(balanced.memory, (memory - 0.7 * (memory.grad + 0.1 * memory)).detach())
    shares = balanced.memory.softmax(0)
    torch.testing.assert_close(balanced.weights, shares / torch.tensor([0.2, 0.4], dtype=torch.float64))


def test_famo_forgets_at_the_rate_of_its_decay():
    balanced = REWARD_BALANCES["famo"].function(tasks(memory=(1.0, -1.0)), FamoParams(rate=0.5, decay=0.2))
    close(balanced.memory, [0.9, -0.9])


def test_famo_counts_no_loss_of_progress_where_a_reward_breaks_its_record():
    balancer = make("famo", rate=1.0, decay=0.0)
    balancer.weights(EQUAL, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    # Both means stay at 1/2. The best of the first is 2 now, so that 3/4 of its range is left, and was before.
    alphas = balancer.weights(EQUAL, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [2.0, 1.0]]))
    assert balancer.state_dict()["memory"] == [0.0, 0.0]
    close(alphas, [0.8, 1.2])


def test_nash_bargain_of_independent_rewards_has_gradients_of_one_length():
    close(make("nash").weights(torch.diag(torch.tensor([1.0, 4.0])), with_losses(0.5, 0.5)), [1.5, 0.75])


def test_nash_powers_of_independent_rewards_act_by_their_root():
    close(make("nash", reward_weights=[1.0, 9.0]).weights(EQUAL, with_losses(0.5, 0.5)), [2.5, 7.5])


NASH_CASES = [
    ([[1.0, 0.5], [0.5, 4.0]], [1.0, 1.0]),
    ([[1.0, -1.9], [-1.9, 4.0]], [1.0, 1.0]),
    ([[1.0, -1.9], [-1.9, 4.0]], [1.0, 5.0]),
    ([[1.0, -1.0], [-1.0, 1.0]], [1.0, 5.0]),  # in full conflict
    ([[9.0, 9.0], [9.0, 9.0]], [2.0, 1.0]),  # identical
    ([[2.0, 1.0, -2.0], [1.0, 3.0, -3.0], [-2.0, -3.0, 4.0]], [1.0, 2.0, 0.5]),
    ([[1.0, -0.5, -0.5], [-0.5, 1.0, -0.5], [-0.5, -0.5, 1.0]], [1.0, 1.0, 1.0]),  # they sum to zero
    ([[1e12, 3.0, 0.0], [3.0, 1e-10, 0.0], [0.0, 0.0, 1.0]], [1.0, 1.0, 1.0]),
]


@pytest.mark.parametrize(("matrix", "reward_weights"), NASH_CASES)
def test_nash_solves_its_equation_and_every_reward_gains(matrix, reward_weights):
    matrix = torch.tensor(matrix, dtype=torch.float64)
    powers = torch.tensor(reward_weights, dtype=torch.float64)
    rewards = with_losses(*[0.5] * len(powers))
    alphas = make("nash", reward_weights=reward_weights).weights(matrix, rewards)
    with_ridge = matrix + NASH_RIDGE * torch.diag(matrix.diagonal())
    # G alpha = w / alpha, up to the factor that the length of the gradient decides.
    products = alphas * (with_ridge @ alphas) / powers
    torch.testing.assert_close(products, products.mean().expand_as(products), rtol=1e-10, atol=0.0)
    assert (alphas > 0).all()
    assert (with_ridge @ alphas > 0).all()


def test_nash_gain_is_for_real_where_rewards_do_not_cancel():
    matrix = torch.tensor([[1.0, -1.9], [-1.9, 4.0]], dtype=torch.float64)
    assert (matrix @ make("fixed").weights(matrix, with_losses(0.5, 0.5)))[0] < 0
    assert (matrix @ make("nash").weights(matrix, with_losses(0.5, 0.5)) > 0).all()


def test_pareto_by_hand():
    alphas = make("pareto", smoothing=0.5).weights(EQUAL, with_losses(0.6, 0.4))
    ratio = math.exp(0.2 / 0.5)
    close(alphas, [2 * ratio / (1 + ratio), 2 / (1 + ratio)])


def test_pareto_prefers_by_its_vector_and_ends_where_weighted_losses_are_equal():
    weights = [1.0, 3.0]  # preferences 1/2 and 3/2
    alphas = make("pareto", reward_weights=weights, smoothing=0.25).weights(EQUAL, with_losses(0.6, 0.4))
    ratio = math.exp((0.3 - 0.6) / 0.25) / 3
    close(alphas, [4 * ratio / (1 + ratio), 4 / (1 + ratio)])
    sharp = make("pareto", reward_weights=weights, smoothing=1e-3)
    close(sharp.weights(EQUAL, with_losses(0.6, 0.4)), [0.0, 4.0])
    sharp = make("pareto", reward_weights=[2.0, 1.0], smoothing=1e-3)
    close(sharp.weights(EQUAL, with_losses(0.4, 0.8)), [2.0, 1.0])


@pytest.mark.parametrize(
    ("balance", "scalarization"),
    [
        ("log_transform", lambda loss, w: (w * loss.log1p()).sum()),
        ("uncertainty", lambda loss, w: (w * loss.log()).sum()),  # s at its best: exp(-s) L + s = 1 + log L
        ("famo", lambda loss, w: (w * loss.log()).sum()),  # shares still equal
        ("pareto", lambda loss, w: 0.5 * (w / w.mean() * loss / 0.5).logsumexp(0)),
    ],
)
def test_weights_are_the_gradient_of_the_scalarization(balance, scalarization):
    loss = torch.tensor([0.35, 0.65, 0.5], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    scalarization(loss, weights).backward()
    changes = {"rate": 1.0} if balance == "uncertainty" else {}
    balancer = make(balance, reward_weights=weights.tolist(), **changes)
    alphas = balancer.weights(torch.eye(3), with_losses(*loss.tolist()))
    close(alphas, 3.5 * loss.grad / loss.grad.sum())


# What holds of every method.

MATRIX = torch.tensor([[4.0, -1.0, 0.5], [-1.0, 1.0, 0.2], [0.5, 0.2, 9.0]], dtype=torch.float64)
WEIGHTS = [1.0, 2.0, 0.5]
BATCHES = [with_losses(0.6, 0.5, 0.4), with_losses(0.5, 0.5, 0.6), with_losses(0.35, 0.6, 0.5)]


def alphas_over(balancer, batches, matrix=MATRIX):
    return torch.stack([balancer.weights(matrix, rewards) for rewards in batches])


@every_balance
def test_length_of_gradient_shared_out_is_that_of_fixed_weights(balance):
    lengths = MATRIX.diagonal().sqrt()
    for alphas in alphas_over(make(balance, reward_weights=WEIGHTS), BATCHES):
        assert (alphas * lengths).sum().item() == pytest.approx(2 + 2 + 1.5, rel=1e-12)


@adaptive_balance
def test_adaptive_weights_differ_from_fixed_ones(balance):
    alphas = alphas_over(make(balance, reward_weights=WEIGHTS), BATCHES)[-1]
    assert (alphas - torch.tensor(WEIGHTS)).abs().min() > 1e-3


@every_balance
def test_reward_alone_has_its_weight(balance):
    for alphas in alphas_over(make(balance, reward_weights=[0.7]), [b[:, :1] for b in BATCHES], MATRIX[:1, :1]):
        close(alphas, [0.7])


@every_balance
def test_identical_rewards_have_the_combined_advantage_of_fixed_weights(balance):
    advantages = torch.tensor([[-1.0], [0.5], [0.5]], dtype=torch.float64).expand(3, 2)
    matrix = gram(advantages, torch.tensor([3.0, 1.0, 2.0]))
    balancer = make(balance, reward_weights=[1.0, 3.0])
    for rewards in BATCHES:
        alphas = balancer.weights(matrix, rewards[:, :1].expand(-1, 2))
        close(advantages @ alphas, [-4.0, 2.0, 2.0])


@every_balance
def test_identical_rewards_of_equal_weight_keep_it(balance):
    balancer = make(balance, reward_weights=[0.5, 0.5])
    for rewards in BATCHES:
        close(balancer.weights(torch.full((2, 2), 4.0), rewards[:, :1].expand(-1, 2)), [0.5, 0.5])


@every_balance
def test_reward_without_gradient_leaves_the_others_alone(balance):
    extended = torch.zeros(4, 4, dtype=torch.float64)
    kept = torch.tensor([0, 1, 3])
    extended[kept[:, None], kept] = MATRIX
    balancer = make(balance, reward_weights=[*WEIGHTS[:2], 7.0, WEIGHTS[2]])
    expected = alphas_over(make(balance, reward_weights=WEIGHTS), BATCHES)
    for rewards, alphas in zip(BATCHES, expected, strict=True):
        solved = torch.cat([rewards[:, :2], torch.full((10, 1), 0.25), rewards[:, 2:]], 1)
        found = balancer.weights(extended, solved)
        assert found[2] == 7.0
        torch.testing.assert_close(found[kept], alphas, rtol=1e-12, atol=0.0)
    state = balancer.state_dict()
    assert (state["memory"][2], state["first_means"][2], state["previous_means"][2]) == (0.0, None, None)


@every_balance
def test_reward_with_nothing_to_say_rests_and_comes_back(balance):
    """Its rows of NaN are no zeros, and a batch without it moves nothing that it keeps."""
    silent = MATRIX.clone()
    silent[2], silent[:, 2] = 0.0, 0.0
    unsaid = BATCHES[1].clone()
    unsaid[:, 2] = torch.nan
    balancer = make(balance, reward_weights=WEIGHTS)
    balancer.weights(MATRIX, BATCHES[0])
    before = {name: value[2] for name, value in balancer.state_dict().items() if name != "balance"}
    assert balancer.weights(silent, unsaid)[2] == WEIGHTS[2]
    assert balancer.weights(MATRIX, unsaid)[2] == WEIGHTS[2]  # a gradient that is not of the reward does not count
    assert {name: value[2] for name, value in balancer.state_dict().items() if name != "balance"} == before
    assert balancer.weights(MATRIX, BATCHES[2]).isfinite().all()


@every_balance
def test_rows_of_nan_take_no_part(balance):
    unscored = torch.tensor([[torch.nan] * 3], dtype=torch.float64)
    plain, sparse = make(balance, reward_weights=WEIGHTS), make(balance, reward_weights=WEIGHTS)
    assert sparse.weights(torch.zeros(3, 3), unscored).tolist() == WEIGHTS  # a first batch without any reward
    far_from_zero = [rewards - 5 for rewards in BATCHES]
    expected = alphas_over(plain, far_from_zero)
    found = alphas_over(sparse, [torch.cat([rewards, unscored]) for rewards in far_from_zero])
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)


@every_balance
def test_weight_zero_is_for_watching_alone(balance):
    watched = alphas_over(make(balance, reward_weights=[1.0, 0.0, 0.5]), BATCHES)
    kept = torch.tensor([0, 2])
    without = alphas_over(
        make(balance, reward_weights=[1.0, 0.5]), [b[:, kept] for b in BATCHES], MATRIX[kept[:, None], kept]
    )
    assert watched[:, 1].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(watched[:, kept], without, rtol=1e-12, atol=0.0)


@every_balance
def test_scale_and_offset_of_rewards_change_nothing(balance):
    expected = alphas_over(make(balance, reward_weights=WEIGHTS), BATCHES)
    scale, offset = torch.tensor([1e-3, 7.0, 1e4]), torch.tensor([5.0, -3.0, 0.0])
    found = alphas_over(make(balance, reward_weights=WEIGHTS), [scale * b + offset for b in BATCHES])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)


@every_balance
def test_scale_common_to_all_gradients_changes_nothing(balance):
    expected = alphas_over(make(balance, reward_weights=WEIGHTS), BATCHES)
    found = alphas_over(make(balance, reward_weights=WEIGHTS), BATCHES, 1e6 * MATRIX)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("balance", ["nash", "gradnorm"])
def test_scale_of_one_rewards_advantages_does_not_change_its_share(balance):
    scale = torch.tensor([1.0, 100.0, 0.01], dtype=torch.float64)
    changes = {"rate": 1.0} if balance == "gradnorm" else {}
    shares = []
    for factor in (torch.ones_like(scale), scale):
        matrix = factor[:, None] * MATRIX * factor
        alphas = make(balance, reward_weights=WEIGHTS, **changes).weights(matrix, BATCHES[0])
        parts = alphas * matrix.diagonal().sqrt()
        shares.append(parts / parts.sum())
    torch.testing.assert_close(shares[0], shares[1], rtol=1e-9, atol=0.0)


@every_balance
def test_conflicting_rewards_get_finite_weights(balance):
    matrix = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    for alphas in alphas_over(make(balance), [b[:, :2] for b in BATCHES], matrix):
        assert alphas.isfinite().all()
        assert (alphas > 0).all()


def test_nash_gives_up_where_rewards_cancel_whatever_their_weights():
    matrix = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    alphas = make("nash", reward_weights=[1.0, 5.0]).weights(matrix, with_losses(0.5, 0.5))
    assert alphas.sum().item() == pytest.approx(6.0)
    assert (alphas @ matrix @ alphas).sqrt() < 3e-3


def test_loss_of_a_solved_reward_has_a_floor():
    balancer = make("uncertainty", rate=1.0)
    balancer.weights(EQUAL, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    close(balancer.weights(EQUAL, torch.tensor([[1.0, 0.0], [1.0, 1.0]])), [100 / 51, 2 / 51])


def test_reward_that_never_changed_has_everything_to_gain():
    rewards = torch.tensor([[0.0, 3.0], [1.0, 3.0]])
    close(make("uncertainty", rate=1.0).weights(EQUAL, rewards), [4 / 3, 2 / 3])


# State and errors.


@every_balance
def test_state_goes_on_bit_by_bit_through_json(balance):
    unsaid = BATCHES[0].clone()
    unsaid[:, 1] = torch.nan
    silent = MATRIX.clone()
    silent[1], silent[:, 1] = 0.0, 0.0
    balancer = make(balance, reward_weights=WEIGHTS)
    balancer.weights(silent, unsaid)
    balancer.weights(MATRIX, BATCHES[0])
    resumed = make(balance, reward_weights=WEIGHTS)
    for rewards in [0.2 + 0.5 * batch for batch in BATCHES[1:]]:  # the extremes are in the state alone
        resumed.load_state_dict(json.loads(json.dumps(balancer.state_dict(), allow_nan=False)))
        expected = balancer.weights(MATRIX, rewards)
        assert resumed.weights(MATRIX, rewards).tolist() == expected.tolist()
        assert resumed.state_dict() == balancer.state_dict()


def test_state_of_a_fresh_balancer_goes_through_json():
    resumed = make("famo")
    resumed.load_state_dict(json.loads(json.dumps(make("famo").state_dict(), allow_nan=False)))
    close(resumed.weights(EQUAL, with_losses(0.6, 0.4)), make("famo").weights(EQUAL, with_losses(0.6, 0.4)))


@pytest.mark.parametrize(("balance", "weights"), [("nash", [1.0, 1.0]), ("famo", [1.0, 1.0, 1.0])])
def test_state_of_another_method_or_number_of_rewards_is_refused(balance, weights):
    with pytest.raises(ValueError, match=r"'famo'.*resume with the rewards and the reward_balance of the checkpoint"):
        make(balance, reward_weights=weights).load_state_dict(make("famo").state_dict())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda: make("uncertainty", rate=1.1), "rate=1.1: must be a number > 0 and <= 1", id="bound"),
        pytest.param(lambda: make("famo", rate=2.0, decay=0.5), r"rate=2.0 \* decay=0.5: must be below 1", id="decay"),
        pytest.param(lambda: make("pareto", reward_weights=[1.0, -1.0]), "Change the sign", id="negative weight"),
        pytest.param(lambda: make("nash").weights(torch.eye(3), BATCHES[0]), "2 reward_weights", id="K"),
        pytest.param(lambda: make("nash").weights(EQUAL, BATCHES[0]), "2 reward_weights", id="K of rewards"),
        pytest.param(lambda: make("nash").weights(EQUAL, torch.zeros(0, 2)), "0, 2", id="no rows"),
        pytest.param(lambda: make("nash").weights(EQUAL * torch.nan, torch.ones(1, 2)), "not finite", id="NaN gram"),
        pytest.param(lambda: make("nash").weights(EQUAL, torch.full((1, 2), torch.inf)), "not finite", id="infinite"),
        pytest.param(lambda: gram(torch.ones(3, 2), torch.ones(2)), r"\[B, K\] and \[B\]", id="rows"),
        pytest.param(lambda: gram(torch.ones(3), torch.ones(3)), r"\[B, K\] and \[B\]", id="one reward as a vector"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
