"""The checks find the faults that they look for, and the tables are those of the docs."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.advantage.estimators import Advantages
from prefrl.losses.kl import KL_ESTIMATORS
from prefrl.losses.policy.losses import POLICY_LOSSES, clip_cov, clipped_surrogate
from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS
from prefrl.losses.policy.tokens import TokenLoss
from prefrl.options.policy_gradient import AdvantageParams
from prefrl.scripts.oracle.checks import check_advantages, check_kl, check_policy_loss
from prefrl.scripts.oracle.tables import HYPERPARAMETERS, TABLES, params_of


def bind(name, row):
    params = params_of(name, row.params)
    return lambda values: row.function(values, params)


def failed(checks):
    return {check.name for check in checks if not check.holds}


EXTREMES = "is finite at ratios of e^100 and e^-100"
SIGN = "raises tokens with a positive advantage, lowers the others"
ORDER = "the order of rows does not matter"
CUT = "the split of rows into batches does not matter"
UNTRAINABLE = "tokens that are not trainable are not read"
GROUPS = "groups do not affect each other"
NO_REWARD = "a row without a reward gets 0 and does not affect other rows"
SPREAD = "is finite where all rewards are equal"


@pytest.mark.parametrize(("name", "level"), [(n, level) for n, row in POLICY_LOSSES.items() for level in row.levels])
def test_every_policy_loss_passes(name, level):
    found = failed(check_policy_loss(bind(name, POLICY_LOSSES[name]), level=level))
    # Without a bound the surrogate of a large ratio has none either; the ratio of a row is bounded by itself.
    is_unbounded = POLICY_LOSSES[name].function in (clipped_surrogate, clip_cov) and level != "sequence_sum"
    assert found == ({EXTREMES} if is_unbounded else set())


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_every_advantage_passes(name):
    found = failed(check_advantages(bind(name, ADVANTAGES[name]), level=ADVANTAGES[name].level))
    assert found <= {GROUPS}


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_every_kl_estimate_passes(name):
    assert not failed(check_kl(KL_ESTIMATORS[name].function))


def surrogate(tokens):
    return -tokens.log_ratio.exp() * tokens.advantages


def first_row_counts_twice(tokens):
    return TokenLoss(surrogate(tokens) * (1 + (tokens.row_index == 0)), {})


def mean_over_the_batch(tokens):
    return TokenLoss(surrogate(tokens) / len(tokens.logprobs), {})


def ratio_over_all_tokens(tokens):
    d = tokens.logprobs - tokens.old_logprobs
    sums = torch.zeros(tokens.num_rows, dtype=d.dtype).index_add(0, tokens.row_index, d)
    return TokenLoss(-sums[tokens.row_index].exp() * tokens.advantages, {})


def wrong_sign(tokens):
    return TokenLoss(-surrogate(tokens), {})


def raises_everything(tokens):
    return TokenLoss(-tokens.log_ratio.exp() * tokens.advantages.abs(), {})


def gradient_grows_with_the_batch(tokens):
    loss = surrogate(tokens)
    return TokenLoss(loss.detach() + tokens.num_rows * (loss - loss.detach()), {})


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (raises_everything, {SIGN, EXTREMES}),
        (gradient_grows_with_the_batch, {CUT, EXTREMES}),
        (first_row_counts_twice, {ORDER, CUT, EXTREMES}),
        (mean_over_the_batch, {CUT, EXTREMES}),
        (ratio_over_all_tokens, {UNTRAINABLE, EXTREMES}),
        (wrong_sign, {SIGN, EXTREMES}),
    ],
)
def test_a_wrong_policy_loss_is_found(function, found):
    assert failed(check_policy_loss(function, level="token")) == found


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda tokens: surrogate(tokens), "returns Tensor: a policy loss returns a TokenLoss"),
        (lambda tokens: TokenLoss(surrogate(tokens).sum(), {}), r"the loss has shape \(\): must be \(17,\)"),
        (lambda tokens: TokenLoss(surrogate(tokens).float(), {}), "the loss has dtype torch.float32: must be"),
        (lambda tokens: TokenLoss(surrogate(tokens).detach(), {}), "the loss has no gradient"),
    ],
)
def test_what_is_no_loss_is_refused(function, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check_policy_loss(function, level="token")


def advantages_of(change):
    def function(scored):
        row = ADVANTAGES["rloo"].function(scored, AdvantageParams())
        return dataclasses.replace(row, values=change(scored, row.values))

    return function


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda scored, values: values + torch.arange(len(values)), {ORDER, GROUPS, NO_REWARD}),
        (lambda scored, values: values / values.std(), {GROUPS, SPREAD}),
        (lambda scored, values: values + 1, {NO_REWARD}),
        (lambda scored, values: values - scored.totals().nansum(), {GROUPS, NO_REWARD}),
        (lambda scored, values: values / values.abs().max(), {GROUPS, SPREAD}),
    ],
)
def test_a_wrong_advantage_is_found(change, found):
    assert failed(check_advantages(advantages_of(change), level="row")) >= found


def test_a_token_advantage_that_reads_other_tokens_is_found():
    def to_go(scored):
        sums = torch.zeros(scored.num_rows, dtype=scored.rewards.dtype).index_add(0, scored.row_index, scored.rewards)
        return Advantages(values=sums[scored.row_index], totals=sums)

    assert UNTRAINABLE in failed(check_advantages(to_go, level="token"))


def test_a_wrong_kl_estimate_is_found():
    assert failed(check_kl(lambda p, q: (p - q) ** 2 + 1)) == {"is 0 where the policies agree"}
    assert failed(check_kl(lambda p, q: (p - q) - (p - q).mean())) == {"tokens do not affect each other"}
    assert failed(check_kl(lambda p, q: (q - p).expm1() - (q - p))) == {EXTREMES}


DOCS = Path(__file__).parents[3] / "docs"


def pages() -> str:
    return "".join((DOCS / name).read_text(encoding="utf-8") for name in ("oracle.md", "losses.md"))


def test_tables_of_the_docs_are_what_is_computed_now():
    """Else run `python docs/make_oracle.py`."""
    text = pages()
    for name, table in TABLES.items():
        assert f"<!-- oracle: {name} -->\n\n{table.markdown()}\n\n<!-- end of oracle -->" in text
    for name, values in HYPERPARAMETERS.items():
        assert f"`{name}`: {', '.join(f'`{key}={value}`' for key, value in values.items())}" in text


def test_every_name_of_every_table_of_losses_is_in_the_docs():
    text = pages()
    parts = dict(re.findall(r"<!-- oracle: (\w+) -->(.*?)<!-- end of oracle -->", text, re.S))
    for part, names in (("advantages", ADVANTAGES), ("policy", POLICY_LOSSES), ("kl", KL_ESTIMATORS)):
        assert all(f"`{name}`" in parts[part] for name in names)
    assert all(f"`{name}`" in parts["corrections"] for name in OFF_POLICY_CORRECTIONS)


def test_hyperparameters_of_the_tables_are_those_of_their_rows():
    rows = {**POLICY_LOSSES, **ADVANTAGES}
    for name, values in HYPERPARAMETERS.items():
        params = params_of(name, rows[name].params)
        assert {key: getattr(params, key) for key in values} == values
