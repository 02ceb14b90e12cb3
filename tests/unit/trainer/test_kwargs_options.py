"""Options that map names to hyperparameters: what they read, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from prefrl import ConfigError, GRPOConfig, PPOConfig, RLOOConfig
from prefrl.options.params import kwargs_options
from prefrl.options.policy import ClipCovParams, VespoParams
from prefrl.registry import REGISTRY
from prefrl.trainer.online.policy_objective import PolicyObjective


def made(tmp_path: Path, cls: Any = GRPOConfig, **options: Any) -> Any:
    return cls(output_dir=str(tmp_path), report_to="none", **options)


def test_hyperparameters_are_those_of_the_choice_with_the_options_of_their_own(tmp_path: Path) -> None:
    vespo = made(tmp_path, loss_type="vespo", loss_kwargs={"k_pos": 1.5})
    assert vespo.loss_params == VespoParams(k_pos=1.5)
    cov = made(tmp_path, loss_type="clip_cov", epsilon_high=0.3, delta=1.5, loss_kwargs='{"ub": 9.0}')
    assert cov.loss_params == ClipCovParams(epsilon_high=0.3, delta=1.5, ub=9.0)
    assert made(tmp_path, PPOConfig, lam=0.5).advantage_params.lam == 0.5


def test_what_is_changed_before_the_trainer_reads_it_counts(tmp_path: Path) -> None:
    config = made(tmp_path)
    config.epsilon = 0.1
    assert config.loss_params.epsilon == PolicyObjective(config).loss_params.epsilon == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"loss_type": "aipo", "loss_kwargs": {"roh": 2.0}},
            "loss_kwargs: roh=2.0 is not known with loss_type='aipo'. Did you mean 'rho'?",
            id="misspelled",
        ),
        pytest.param(
            {"loss_kwargs": {"rho": 2.0}},
            "loss_kwargs: rho=2.0 is not known with loss_type='dapo'. It goes with loss_type='aipo'.",
            id="key of another choice",
        ),
        pytest.param(
            {"loss_type": "aipo", "loss_kwargs": {"rho": "1e1"}},
            "loss_kwargs: rho='1e1': must be a number >= 1. Write 10.0 without quotation marks",
            id="text",
        ),
        pytest.param(
            {"loss_type": "aipo", "loss_kwargs": {"rho": 0.5}},
            "loss_kwargs: rho=0.5: must be a number >= 1",
            id="range",
        ),
        pytest.param(
            {"dynamic_sampling": True, "dynamic_sampling_kwargs": {"reward_metric": 3}},
            "dynamic_sampling_kwargs: reward_metric=3: must be a string",
            id="no text",
        ),
        pytest.param(
            {"advantage_kwargs": {"multi_objective_aggregation": "sum"}},
            "advantage_kwargs: multi_objective_aggregation='sum': must be one of 'sum_then_normalize', 'norm",
            id="closed set",
        ),
        pytest.param(
            {"advantage_kwargs": {"multi_objective_aggregation": None}},
            "multi_objective_aggregation=None: must be one of",
            id="None in a closed set",
        ),
        pytest.param(
            {"loss_kwargs": {"epsilon": 0.1}},
            "loss_kwargs: epsilon=0.1 is a separate option. Set epsilon=0.1.",
            id="is a separate option",
        ),
        pytest.param(
            {"loss_type": "aipo", "epsilon": 0.1},
            "epsilon=0.1 has no effect because loss_type='aipo'. It goes with loss_type='grpo' or 'bnpo' or",
            id="option that the choice does not read",
        ),
        pytest.param({"delta": 1.1}, "delta=1.1: must be above 1 + epsilon_high", id="together, no key"),
        pytest.param(
            {"balance_kwargs": {"alpha": 0.1}},
            "balance_kwargs={'alpha': 0.1} has no effect because reward_balance=None. It goes with "
            "reward_balance='gradnorm'.",
            id="part that is off",
        ),
        pytest.param(
            {"beta": 0.0, "kl_kwargs": {"target": 0.1}},
            "kl_kwargs={'target': 0.1} has no effect because beta=0.0: there is no KL term. Set beta > 0.",
            id="no KL term",
        ),
        pytest.param(
            {"vllm_importance_sampling_kwargs": {"clip_max": 2.0}},
            "has no effect because sampling is not corrected. Leave vllm_importance_sampling_correction None",
            id="no correction",
        ),
        pytest.param(
            {"rollout_selection": "max_min", "selection_kwargs": {"x": 1}},
            "selection_kwargs: x=1 is not known with rollout_selection='max_min'. It has no keys.",
            id="no keys",
        ),
        pytest.param({"loss_kwargs": {1: 2}}, "loss_kwargs={1: 2}: must be a mapping such as", id="number"),
        pytest.param({"loss_kwargs": [1]}, 'loss_kwargs=[1]: must be a mapping such as {"key": 1}', id="list"),
        pytest.param({"loss_kwargs": "{rho"}, "loss_kwargs='{rho': must be a JSON object", id="JSON"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        made(tmp_path, **options)


def test_an_estimator_that_the_config_does_not_choose_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"f_norm=2\.0 is not known with advantage_estimator='rloo'"):
        made(tmp_path, RLOOConfig, advantage_kwargs={"f_norm": 2.0})


@pytest.mark.parametrize("name", REGISTRY)
def test_defaults_are_allowed_and_options_of_their_own_have_the_same(name: str) -> None:
    config = REGISTRY[name].load_config()
    for option in kwargs_options(config):
        for params in option.choices.values():
            values = params()
            for own in option.own_options:
                if own in params.names() and hasattr(config, own):
                    assert getattr(values, own) == getattr(config, own)
