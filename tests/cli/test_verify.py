"""`prefrl verify` for functions of a user's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prefrl.errors import ConfigError
from prefrl.scripts.oracle.command import main

MODULE = """
from prefrl.losses.advantage.estimators import Advantages
from prefrl.losses.policy.tokens import TokenLoss

NUMBER = 3

def surrogate(tokens, *, scale):
    return TokenLoss(-scale * tokens.log_ratio.exp() * tokens.advantages, {})

def all_tokens(tokens):
    sums = tokens.logprobs.new_zeros(tokens.num_rows).index_add(0, tokens.row_index, tokens.logprobs)
    return TokenLoss(-sums[tokens.row_index] * tokens.advantages, {})

def best_of_group(scored):
    values = scored.totals()
    return Advantages(values=values - values.max(), totals=values)

def centered(scored, *, factor):
    values = scored.totals()
    same = (scored.groups[:, None] == scored.groups[None, :]) & ~values.isnan()[None, :]
    mean = (same * values.nan_to_num(nan=0.0)).sum(1) / same.sum(1).clamp(min=1)
    return Advantages(values=((values - mean) * factor).nan_to_num(nan=0.0), totals=values)

def others(scored, *, share):
    values = scored.totals()
    known = values.nan_to_num(nan=0.0)
    same = (scored.groups[:, None] == scored.groups[None, :]) & ~values.isnan()[None, :]
    mean = (same * known).sum(1) / same.sum(1).clamp(min=1)
    count = same.sum(1)
    advantages = (values - mean) * share * count / (count - 1).clamp(min=1)
    return Advantages(values=advantages.nan_to_num(nan=0.0), totals=values)

def k1(logprobs, ref_logprobs):
    return logprobs - ref_logprobs

def scalar(tokens):
    return TokenLoss((-tokens.log_ratio.exp() * tokens.advantages).sum(), {})

def tensor(tokens):
    return tokens.log_ratio

def two(first, second):
    return first

def broken(tokens):
    return tokens.no_such_thing
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_losses.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "unfinished.py").write_text("def f(:\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    return tmp_path


SURROGATE = ["my_losses:surrogate", "--hyperparameters", "scale=1"]
OF_ROWS = [*SURROGATE, "--level", "sequence_sum", "--reduction", "sequence_mean"]
OTHERS = ["my_losses:others", "--kind", "advantage", "--hyperparameters"]
# Unbiased with as many completions of a prompt as make the factor N / (N - 1).
CENTERED = ["my_losses:centered", "--kind", "advantage", "--claim", "on_policy_unbiased", "--hyperparameters"]
K1 = ["my_losses:k1", "--kind", "kl"]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        pytest.param([*SURROGATE, "--claim", "on_policy_unbiased"], 0, id="on-policy"),
        pytest.param([*SURROGATE, "--claim", "unbiased"], 1, id="ratio of tokens"),
        pytest.param([*OF_ROWS, "--claim", "unbiased"], 0, id="ratio of rows"),
        pytest.param(["my_losses:surrogate", "--hyperparameters", "scale=2"], 0, id="no claim"),
        pytest.param(
            ["my_losses:surrogate", "--hyperparameters", "scale=2", "--claim", "on_policy_unbiased"], 1, id="scale"
        ),
        pytest.param([*SURROGATE, "--claim", "on_policy_unbiased", "--reduction", "token"], 1, id="reduction"),
        pytest.param(["my_losses:surrogate", "--hyperparameters", "scale=-1"], 1, id="sign"),
        pytest.param(["my_losses:all_tokens"], 1, id="reads tokens that are not trainable"),
        pytest.param([*OTHERS, "share=1", "--claim", "unbiased"], 0, id="advantage"),
        pytest.param([*CENTERED, "factor=2"], 0, id="advantage of two"),
        pytest.param([*CENTERED, "factor=2", "--group_size", "3"], 1, id="advantage of two, of three completions"),
        pytest.param([*CENTERED, "factor=1.5", "--group_size", "3"], 0, id="advantage of three"),
        pytest.param([*OTHERS, "share=0.5", "--claim", "on_policy_unbiased"], 1, id="half of an advantage"),
        pytest.param(["my_losses:best_of_group", "--kind", "advantage"], 1, id="advantage from all groups"),
        pytest.param([*K1, "--claim", "on_policy_unbiased"], 1, id="k1 as a loss"),
        pytest.param([*K1, "--claim", "unbiased", "--placement", "reward"], 0, id="k1 in the reward"),
        pytest.param(
            ["--function", "prefrl.losses.kl:k2", "--kind", "kl", "--claim", "on_policy_unbiased"],
            0,
            id="k2",
        ),
        pytest.param(
            ["prefrl.losses.advantage.tokens:gae", "--kind", "advantage", "--scored", "token", "--claim", "unbiased",
             "--hyperparameters", "gamma=1", "lam=1"], 0, id="gae",
        ),
        pytest.param(
            ["prefrl.losses.advantage.tokens:gae", "--kind", "advantage", "--scored", "token", "--claim", "unbiased"],
            1, id="gae, with its default of lam",
        ),
    ],
)  # fmt: skip
def test_exit_code_says_whether_the_claim_holds(
    argv: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    printed = capsys.readouterr().out
    assert "on-policy" in printed
    assert ("does not hold: " in printed) == (code == 1)


def test_the_report_names_what_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SURROGATE, "--claim", "unbiased"]) == 1
    printed = capsys.readouterr().out
    assert "does not hold: claim 'unbiased': small step" in printed
    assert "does not hold: claim 'unbiased': on-policy" not in printed
    assert main(["my_losses:all_tokens"]) == 1
    assert "does not hold: tokens that are not trainable are not read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["my_losses"], "must be module:function", id="no function"),
        pytest.param(["no_such:f"], "the module 'no_such' cannot be imported: ModuleNotFoundError", id="no module"),
        pytest.param(["unfinished:f"], "cannot be imported: SyntaxError", id="syntax"),
        pytest.param(["my_losses:surogate"], "has no 'surogate'. Did you mean 'surrogate'?", id="no such function"),
        pytest.param(["my_losses:NUMBER"], "is a int, not a function", id="not a function"),
        pytest.param(
            ["my_losses:surrogate"], "missing a required argument: 'scale'. A function of kind", id="missing"
        ),
        pytest.param(["my_losses:two"], "looks like function\\(tokens: PolicyTokens", id="signature"),
        pytest.param(["my_losses:k1"], "missing a required argument: 'ref_logprobs'", id="another kind"),
        pytest.param([*SURROGATE, "scal=2"], "no hyperparameter 'scal'. Did you mean 'scale'?", id="unknown"),
        pytest.param(
            ["prefrl.losses.policy.losses:aipo", "--hyperparameters", "roh=2"],
            "no hyperparameter 'roh'. Did you mean 'rho'?",
            id="unknown in a dataclass",
        ),
        pytest.param([*SURROGATE, "scale"], "hyperparameters='scale': must be NAME=VALUE", id="no value"),
        pytest.param(["my_losses:scalar"], "the loss has shape \\(\\): must be \\(17,\\)", id="shape"),
        pytest.param(["my_losses:tensor"], "returns Tensor: a policy loss returns a TokenLoss", id="type"),
        pytest.param(["my_losses:broken"], "fails with AttributeError: .*no_such_thing", id="exception"),
        pytest.param(
            [*SURROGATE, "--placement", "reward"], "placement='reward' has no effect because", id="no effect"
        ),
        pytest.param([*K1, "--level", "sequence"], "level='sequence' has no effect because kind='kl'", id="level"),
        pytest.param([*SURROGATE, "--claim", "true"], "claim", id="claim"),
        pytest.param([], "function: not given", id="nothing"),
    ],
)
def test_what_cannot_be_verified_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(argv)


def test_help_says_what_a_function_looks_like(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "--claim" in printed
    assert "PolicyTokens" in printed
