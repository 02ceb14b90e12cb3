"""Losses, KL terms and advantages on plain tensors: those of the trainers and of the oracle, and no `Trainer`."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prefrl import GRPOConfig, PPOConfig, ReinforcePlusPlusConfig
from prefrl.errors import ConfigError
from prefrl.library import (
    ADVANTAGES,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    TokenRows,
    advantages,
    covariance_tokens,
    kl,
    policy_loss,
    reduction_of,
    sampling_weights,
    summed,
)
from prefrl.losses.per_token import TokenScores
from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS
from prefrl.rewards.runner import RewardRunner
from prefrl.rollout.batches import sampled_batch
from prefrl.scripts.oracle.exact import Samples, estimate, every_batch
from prefrl.scripts.oracle.recipe import Recipe, selection, two_prompts
from prefrl.scripts.oracle.recipe import sampling_weights as weights_of_oracle
from prefrl.trainer.online.policy_gradient import PolicyGradient
from prefrl.trainer.online.policy_objective import PolicyObjective
from prefrl.trainer.scorer import Scores
from prefrl.types import Completion, Rollout, Turn
from tests.unit.trainer.test_policy_objective import batch_of

# Rows of 3, 1, 0 and 4 tokens that have a loss, one with a hole.
MASK = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
EVERY = [(name, level) for name, row in POLICY_LOSSES.items() for level in row.levels]
CONSTANT = 6


def padded(seed: int, *, around: float = -1.5) -> Tensor:
    """Numbers where there is a loss, and what must not be read elsewhere: NaN and infinity."""
    values = around + torch.randn(MASK.shape, generator=torch.manual_seed(seed), dtype=torch.float64) / 2
    poison = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64).repeat(8).view(MASK.shape)
    return values.where(MASK, poison)


LOGPROBS, OLD, SAMPLING, REFERENCE = (padded(seed) for seed in range(4))
ADVANTAGE = padded(4, around=0.0)
COV = torch.rand(MASK.shape, generator=torch.manual_seed(5)) < 0.5


def chosen(name: str) -> dict[str, Any]:
    return {"cov_tokens": COV} if POLICY_LOSSES[name].selection else {}  # type: ignore[index]


def objective_of(folder: Path, **options: Any) -> tuple[PolicyObjective, Any]:
    """The objective of GRPO, and its batch of the same tokens, without padding but with the hole."""
    args = GRPOConfig(output_dir=str(folder), use_cpu=True, max_completion_length=CONSTANT, **options)
    stands = MASK.clone()
    stands[0, 2] = stands[2, 0] = True  # tokens of a tool
    fields = {name: values.masked_fill(~MASK, 0)[stands] for name, values in SCORES.items()}
    batch = batch_of(stands.sum(1).tolist(), trainable=MASK[stands], **fields)
    return PolicyObjective(args), batch


SCORES = {
    "old_logprobs": OLD,
    "sampling_logprobs": SAMPLING,
    "ref_logprobs": REFERENCE,
    "advantages": ADVANTAGE,
    "cov_tokens": COV,
}


def of_trainer(objective: PolicyObjective, batch: Any) -> tuple[Tensor, Tensor]:
    """The sum of the loss divided by its items, and its gradient at the tokens that have a loss."""
    stands = MASK.clone()
    stands[0, 2] = stands[2, 0] = True
    leaf = LOGPROBS.masked_fill(~MASK, 0)[stands].requires_grad_()
    output = objective(batch, TokenScores.of(leaf, entropy=torch.zeros(len(leaf))))
    loss = output.total / objective.row_items(batch).sum()
    return loss.detach(), torch.autograd.grad(loss, leaf)[0][MASK[stands]]


def of_library(rows: TokenRows, leaf: Tensor, token_loss: Tensor, loss_type: str) -> tuple[Tensor, Tensor]:
    constant = CONSTANT if reduction_of(loss_type) == "constant" else None
    found = summed(rows, token_loss, reduction_of(loss_type), constant=constant)
    loss = found.total / found.items
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert (gradient[~MASK] == 0).all(), "padding has a gradient"
    return loss.detach(), gradient[MASK]


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "level"), EVERY)
def test_every_policy_loss_is_that_of_the_trainer(name: str, level: Any, tmp_path: Path) -> None:
    leaf, rows = LOGPROBS.clone().requires_grad_(), TokenRows(MASK)
    losses = policy_loss(name, rows, leaf, OLD, ADVANTAGE, level=level, **chosen(name)).loss
    options = {"loss_type": name, "importance_sampling_level": level, "beta": 0.0}
    check(of_library(rows, leaf, losses, name), of_trainer(*objective_of(tmp_path, **options)))


@pytest.mark.parametrize("name", [*KL_ESTIMATORS, "sequence"])
@pytest.mark.parametrize("corrects", [False, True])
def test_every_kl_term_is_that_of_the_trainer(name: str, corrects: bool, tmp_path: Path) -> None:
    leaf, rows = LOGPROBS.clone().requires_grad_(), TokenRows(MASK)
    given: dict[str, Any] = {"weight_cap": 2.0} if name == "sequence" else {"bias_correction": True}
    given = given if corrects else {}
    sampler = {"sampling_logprobs": OLD} if corrects or name == "sequence" else {}
    term = kl(name, rows, leaf, REFERENCE, **sampler, **given)
    losses = policy_loss("reinforce", rows, leaf, OLD, ADVANTAGE).loss + 0.3 * term
    options = {"loss_type": "reinforce", "beta": 0.3, "kl_estimator": name, "kl_kwargs": given}
    check(of_library(rows, leaf, losses, "reinforce"), of_trainer(*objective_of(tmp_path, **options)))


@pytest.mark.parametrize("mode", OFF_POLICY_CORRECTIONS)
def test_every_sampling_correction_is_that_of_the_trainer(mode: str, tmp_path: Path) -> None:
    leaf, rows = LOGPROBS.clone().requires_grad_(), TokenRows(MASK)
    weights = sampling_weights(mode, rows, OLD, SAMPLING, low=0.7, high=1.4).weights
    losses = weights * policy_loss("dapo", rows, leaf, OLD, ADVANTAGE).loss
    bounds = {"vllm_importance_sampling_clip_min": 0.7, "vllm_importance_sampling_clip_max": 1.4}
    options = {"use_vllm": True, "beta": 0.0, "vllm_importance_sampling_mode": mode, **bounds}
    check(of_library(rows, leaf, losses, "dapo"), of_trainer(*objective_of(tmp_path, **options)))


@pytest.mark.parametrize(("name", "level"), EVERY)
def test_flat_and_padded_tensors_have_the_same_losses(name: str, level: Any) -> None:
    rows = TokenRows(MASK)
    flat = TokenRows(MASK[MASK], rows.row_index.view(MASK.shape)[MASK], len(MASK))
    one = policy_loss(name, rows, LOGPROBS, OLD, ADVANTAGE, level=level, **chosen(name))
    some = {key: values[MASK] for key, values in chosen(name).items()}
    other = policy_loss(name, flat, LOGPROBS[MASK], OLD[MASK], ADVANTAGE[MASK], level=level, **some)
    torch.testing.assert_close(one.loss[MASK], other.loss)
    assert (one.loss[~MASK] == 0).all()
    for key, values in one.stats.items():
        torch.testing.assert_close(values[MASK], other.stats[key])


# The oracle: the expected gradient over all batches of its small problem.


def rows_of(samples: Samples) -> TokenRows:
    return TokenRows(samples.trainable, samples.row_index, samples.num_rows)


@pytest.mark.parametrize(("name", "level"), EVERY)
def test_every_policy_loss_has_the_expected_gradient_of_the_oracle(name: str, level: Any) -> None:
    row = POLICY_LOSSES[name]  # type: ignore[index]
    params, reduction = row.params(), reduction_of(name)
    constant = 2.0 if reduction == "constant" else None
    recipe = Recipe(
        policy=lambda tokens: row.function(tokens, params),
        level=level,
        reduction=reduction,
        constant=constant,
        selected=selection(row, params) if row.selection else None,
        weights=weights_of_oracle("token_truncate", high=1.5),
        term=lambda samples: 0.1 * KL_ESTIMATORS["k3"].function(samples.logprobs, samples.logprobs_of(reference)),
    )
    samples = every_batch(two_prompts().moved(sampler=0.4, old=0.2), group_size=1)
    reference = samples.problem.reference

    def loss(part: Samples) -> Tensor:
        rows, old = rows_of(part), part.logprobs_of(part.problem.old)
        given = {} if recipe.selected is None else {"cov_tokens": recipe.selected(recipe.tokens(part))}
        rewards = part.rewards[part.row_index]
        losses = policy_loss(name, rows, part.logprobs, old, rewards, level=level, **given).loss
        losses = losses * sampling_weights("token_truncate", rows, old, part.sampling_logprobs, high=1.5).weights
        losses = losses + 0.1 * kl("k3", rows, part.logprobs, part.logprobs_of(reference))
        found = summed(rows, losses, reduction, constant=constant)
        return (found.total / found.items)[None]

    found, expected = estimate(samples, loss, stacked=False), estimate(samples, recipe, stacked=False)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.variance, expected.variance, rtol=1e-8, atol=1e-12)


# Advantages, of the learner that all policy-gradient trainers have.

GROUPS = [0, 0, 0, 1, 1, 1]
LENGTHS = [2, 4, 1, 3, 2, 5]
REWARDS = [1.0, 0.0, 0.5, 2.0, 0.25, 0.75]
GREEDY = [0.6, 0.6, 0.6, 1.0, 1.0, 1.0]


def rollouts() -> list[Rollout]:
    found = []
    for group, length, reward, greedy in zip(GROUPS, LENGTHS, REWARDS, GREEDY, strict=True):
        completion = Completion([*range(length)], "stop", [-1.0] * length, [True] * length, [0] * length)
        found.append(
            Rollout([Turn([1], completion)], {}, group, rewards={"f": reward}, reward=reward, greedy_reward=greedy)
        )
    return found


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_estimator_is_that_of_the_trainer(name: str, normalizes: bool, tmp_path: Path) -> None:
    row, num_tokens = ADVANTAGES[name], sum(LENGTHS)
    config: Any = PPOConfig if name == "gae" else ReinforcePlusPlusConfig if "plus_plus" in name else GRPOConfig
    chosen = {} if name == "gae" else {"advantage_estimator": name, "num_generations": 2}
    normalizes = normalizes and row.whitened
    options = {"beta": 0.0, "normalize_advantages": normalizes, "advantage_kwargs": {"clip_range": [-1.0, 0.9]}}
    args = config(output_dir=str(tmp_path), use_cpu=True, **chosen, **options)
    numbers = torch.linspace(-1.0, -0.1, num_tokens)
    scores = {"old_logprobs": numbers, "values": numbers.cos(), "log_collision": numbers / 2}
    learner = PolicyGradient(args, RewardRunner([], environments={"f": object}))
    batch = sampled_batch(rollouts(), mask_truncated=False)
    ready = learner.advantages(batch, Scores(scores), rollouts(), num_parts=1, step=0, over_ranks=False)  # type: ignore[arg-type]

    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    wide = {key: torch.full(mask.shape, math.nan).masked_scatter(mask, each) for key, each in scores.items()}
    known = {"greedy": torch.tensor(GREEDY), **wide, "logprobs": wide["old_logprobs"]}
    found = advantages(
        name,
        TokenRows(mask),
        torch.tensor(REWARDS),
        torch.tensor(GROUPS),
        whiten=normalizes,
        scores={key: known[key] for key in row.needs},
        clip_range=[-1.0, 0.9],
        **({"gamma": args.gamma} if hasattr(args, "gamma") and "gamma" in row.params.names() else {}),
        **({"lam": args.lam} if name == "gae" else {}),
    )
    torch.testing.assert_close(found.values[mask], ready.batch.advantages)
    assert (found.values[~mask] == 0).all()
    if name == "gae":
        assert found.returns is not None
        torch.testing.assert_close(found.returns[mask], ready.batch.returns)  # type: ignore[attr-defined]


def test_covariance_tokens_are_the_most_covariant_ones() -> None:
    """Of 8 tokens a quarter: the two where log-prob and advantage are both highest."""
    values = torch.zeros(MASK.shape)
    values[0, 0], values[3, 2] = 3.0, 2.0
    found = covariance_tokens("kl_cov", TokenRows(MASK), values, values, row_seeds=range(4), ratio=0.25)
    assert found.nonzero().tolist() == [[0, 0], [3, 2]]


# What is refused.

RIGHT = (TokenRows(MASK), LOGPROBS, OLD, ADVANTAGE)
REFUSED: dict[str, tuple[Any, str]] = {
    "loss": (lambda: policy_loss("dapa", *RIGHT), "loss_type='dapa' is not known. Did you mean 'dapo'?"),
    "level": (
        lambda: policy_loss("gmpo", *RIGHT, level="sequence"),
        "level='sequence': with loss_type='gmpo', allowed are token.",
    ),
    "hyperparameter": (
        lambda: policy_loss("dapo", *RIGHT, epsilon_hihg=0.3),
        "epsilon_hihg=0.3 is not a hyperparameter of loss_type='dapo'. Did you mean 'epsilon_high'?",
    ),
    "bound": (lambda: policy_loss("dapo", *RIGHT, epsilon=-1.0), "epsilon=-1.0: must be a number >= 0"),
    "term": (
        lambda: policy_loss("dapo", *RIGHT, positive_nll_coef=0.1),
        "positive_nll_coef=0.1 has no effect here: it is a term beside the loss, or a selection of tokens.",
    ),
    "selection": (lambda: policy_loss("kl_cov", *RIGHT), "cov_tokens=None"),
    "dtype": (lambda: TokenRows(MASK.long()), "mask has dtype torch.int64: needs to be bool. Use mask.bool()."),
    "flat": (lambda: TokenRows(MASK[0]), "needs to be [B, T] alone, or [N] with row_index [N] and num_rows."),
    "shape": (
        lambda: policy_loss("dapo", RIGHT[0], LOGPROBS[:, :5], OLD, ADVANTAGE),
        "shapes differ: mask (4, 6), logprobs (4, 5)",
    ),
    "full": (lambda: kl("full", RIGHT[0], LOGPROBS, OLD), "estimator='full' compares whole distributions"),
    "weight": (
        lambda: kl("k3", RIGHT[0], LOGPROBS, OLD, target=0.1),
        "target=0.1 has no effect here: the weight of the KL term is the caller's.",
    ),
    "sampler": (
        lambda: kl("k3", RIGHT[0], LOGPROBS, OLD, sampling_logprobs=OLD),
        "sampling_logprobs=given: estimator='sequence' and bias_correction=True need it, and others ignore it.",
    ),
    "reduction": (
        lambda: summed(RIGHT[0], OLD, "mean"),  # type: ignore[arg-type]
        "reduction='mean' is not known: allowed are token, sequence_mean, sequence_sum, constant.",
    ),
    "estimator": (
        lambda: advantages("grop", RIGHT[0], OLD[:, 0], torch.zeros(4)),
        "estimator='grop' is not known. Did you mean 'grpo'?",
    ),
    "missing score": (
        lambda: advantages("gae", RIGHT[0], torch.zeros(4), torch.zeros(4)),
        "scores=[]: estimator='gae' takes values.",
    ),
    "useless score": (
        lambda: advantages("rloo", RIGHT[0], torch.zeros(4), torch.zeros(4), scores={"values": OLD}),
        "scores=['values']: estimator='rloo' takes none.",
    ),
    "no selection": (
        lambda: covariance_tokens("dapo", *RIGHT[:3], row_seeds=range(4)),
        "loss_type='dapo' selects no tokens: only 'clip_cov' and 'kl_cov' do.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_act_is_refused(case: str) -> None:
    call, text = REFUSED[case]
    with pytest.raises((ConfigError, ValueError)) as error:
        call()
    assert text in str(error.value)


def test_the_library_imports_no_trainer_and_no_engine() -> None:
    code = (
        "import sys, prefrl, prefrl.library\n"
        "banned = {'transformers.trainer', 'datasets', 'peft', 'deepspeed', 'verl', 'prime_rl', 'nemo_rl', "
        "'torchtitan', 'ray', 'prefrl.trainer.loop', 'prefrl.integrations'}\n"
        "print(sorted(banned & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
