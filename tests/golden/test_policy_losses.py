"""Policy losses against values of TRL 1.16.0 and verl 0.9.1, stored by `python -m tests.golden.make_policy_losses`.

Equal are the loss and its gradient with respect to every token, over ragged rows with holes. Different on purpose:

- cispo: `epsilon_high` is relative to 1, in TRL the bound itself, whose default 0.2 shrinks every gradient. And
  `cispo_clip_ratio` counts every clipped weight, in TRL those of A > 0 alone.
- bnpo: the mean is over the tokens of the optimizer step; in TRL over those of a micro-batch.
- vespo: `vespo/phi_seq_mean` stands on each token; TRL's mean is over rows.
- A row without a trainable token counts as a row whose loss is 0. verl's losses leave it out if they count rows
  themselves; in TRL's GMPO its loss is -A, a constant.
- verl bounds log-ratios by -20 and 20, GSPO's by 10, and adds 1e-8 to counts of tokens.
- clip_cov, kl_cov: verl selects in each micro-batch, from the log-probs of the update, with the global random state.
  prefrl selects once for each generation batch, from its first log-probs, so that the cut of a step changes nothing.
- kl_cov's default penalty is 1 in verl's code and 0.1 in its configuration.

Left out are verl's dppo_tv, dppo_kl and dro, which prefrl does not have, and bypass_mode, which calls the others.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefrl.losses.policy.losses import POLICY_LOSSES
from tests.golden.policy_cases import PEER_CASES, prefrl_values

DOCUMENT = json.loads((Path(__file__).parent / "policy_losses.json").read_text(encoding="utf-8"))
STORED = DOCUMENT["values"]


def test_every_case_is_stored() -> None:
    assert (DOCUMENT["trl"], DOCUMENT["verl"]) == ("1.16.0", "0.9.1")
    assert STORED.keys() == PEER_CASES.keys()
    # aipo has no peer with the paper's gradient: cosmos-rl's flows through the bound.
    assert POLICY_LOSSES.keys() - {case.loss for case in PEER_CASES.values()} == {"aipo"}


@pytest.mark.parametrize("name", PEER_CASES)
def test_loss_and_gradient_are_those_of_the_peer(name: str) -> None:
    case, stored = PEER_CASES[name], STORED[name]
    values = prefrl_values(case)
    assert values["loss"] + case.peer_adds == pytest.approx(stored["loss"], rel=case.tolerance)
    assert values["gradient"] == pytest.approx(stored["gradient"], rel=case.tolerance, abs=1e-15)


@pytest.mark.parametrize("name", ["trl grpo", "trl dr_grpo", "trl gmpo"])
def test_shares_of_clipped_tokens_are_those_of_trl(name: str) -> None:
    stats, metrics = prefrl_values(PEER_CASES[name])["stats"], STORED[name]["metrics"]
    assert {f"{key}_mean": value for key, value in stats.items()} == pytest.approx(
        {key: metrics[key] for key in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")}
    )


def test_share_of_clipped_weights_is_that_of_verl() -> None:
    share = prefrl_values(PEER_CASES["verl cispo"])["stats"]["cispo_clip_ratio"]
    assert share == pytest.approx(STORED["verl cispo"]["metrics"]["actor/pg_clipfrac"], rel=1e-7)


def test_the_inputs_reach_every_branch() -> None:
    """Clips, the dual clip, the selection, the off-policy mask and both signs change something."""
    grpo = STORED["trl grpo"]
    assert 0 < grpo["metrics"]["clip_ratio/low_mean"] < 0.5
    assert 0 < grpo["metrics"]["clip_ratio/high_mean"] < 0.5
    for other in ("trl grpo delta", "trl gspo", "trl grpo off-policy mask"):
        assert STORED[other]["loss"] != pytest.approx(grpo["loss"], rel=1e-3)
    assert STORED["verl dual clip"]["loss"] != pytest.approx(STORED["verl vanilla"]["loss"], rel=1e-3)
    assert STORED["verl clip_cov"]["loss"] != pytest.approx(STORED["verl vanilla"]["loss"], rel=1e-3)
    assert 0 < STORED["verl clip_cov"]["metrics"]["actor/pg_clipfrac"] < 0.5
    assert 0 < STORED["verl cispo"]["metrics"]["actor/pg_clipfrac"] < 1
