"""Names of TRL, verl and cosmos-rl: each is an option here, or the table says what it is."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import prefrl
from prefrl import ConfigError, DPOConfig, GRPOConfig, PPOConfig, SFTConfig
from prefrl.options.foreign import ARGUMENTS, LIBRARIES, advice, row_of
from prefrl.options.foreign.trl import DEFAULTS, TRL, VALUES
from prefrl.options.foreign.verl import VERL
from prefrl.registry import REGISTRY
from prefrl.scripts.migrate.edits import every_option, options_of
from prefrl.trainer.base.options.kwargs import KwargsOption

NAMES = json.loads((Path(__file__).parents[1] / "data" / "trl_1_16_names.json").read_text(encoding="utf-8"))
VERL_KEYS = (Path(__file__).parents[1] / "data" / "verl_ppo_trainer_keys.txt").read_text(encoding="utf-8").split()


def parameters(name: str) -> set[str]:
    return set(inspect.signature(getattr(prefrl, name).__init__).parameters) - {"self"}


@pytest.mark.parametrize("config", NAMES["configs"])
def test_each_option_of_trl_is_one_here_or_in_the_table(config: str) -> None:
    known = options_of(next(row.name for row in REGISTRY.values() if row.config.endswith(f":{config}")))
    assert not {*NAMES["configs"][config]} - known - TRL.keys()


def test_each_key_of_verl_is_one_here_or_in_the_table() -> None:
    known = every_option()
    assert not [key for key in VERL_KEYS if row_of(VERL, key) is None and key.rpartition(".")[2] not in known]


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_a_name_becomes_is_there(library: str) -> None:
    own = {"dtype"}  # of model_init_kwargs
    for name, row in LIBRARIES[library].items():
        assert {*row.options} <= every_option() | own, name
        assert row.text == row.text.strip().removesuffix("."), name


@pytest.mark.parametrize("library", ["verl", "cosmos-rl", "Ludwig", "axolotl"])
def test_what_has_no_counterpart_names_none(library: str) -> None:
    for name, row in LIBRARIES[library].items():
        if row.kind == "not there":
            assert not {*re.findall(r"\w+_\w+", row.text)} & every_option(), name


def test_no_name_of_the_table_is_an_option_of_every_command() -> None:
    everywhere = frozenset.intersection(*(options_of(name) for name in REGISTRY))
    assert not everywhere & (TRL.keys() | LIBRARIES["others"].keys())


def test_keys_of_mappings_are_keys_of_these() -> None:
    listed = (*GRPOConfig.kwargs_options, *PPOConfig.kwargs_options)
    options: dict[str, KwargsOption[Any]] = {option.name: option for option in listed}
    for rows in LIBRARIES.values():
        for name, row in rows.items():
            if row.text.startswith("the key "):
                (option,) = row.options
                key = row.text.split("'")[1]
                assert any(key in params.names() for params in options[option].choices.values()), name


def test_defaults_and_values_of_trl_differ_from_ours() -> None:
    for config, values in DEFAULTS.items():
        made = getattr(prefrl, config)(output_dir="x", use_cpu=True)
        assert all(getattr(made, option) != value for option, value in values.items()), config
    for (config, option, value), ours in VALUES.items():
        assert option in parameters(config)
        assert value != ours


ADVICE = [
    (SFTConfig, "padding_free", "'padding_free', an option of TRL, is not needed here: batches are laid out"),
    (GRPOConfig, "vllm_mode", "'vllm_mode', an option of TRL, belongs to prefrl vllm-serve here: completions"),
    (GRPOConfig, "clip_ratio", "'clip_ratio', an option of verl, is epsilon here."),
    (GRPOConfig, "kl_loss_coef", "'kl_loss_coef', an option of verl, is beta here."),
    (
        GRPOConfig,
        "use_kl_loss",
        "'use_kl_loss', an option of verl, becomes here: beta > 0, and kl_in='loss'.",
    ),
    (GRPOConfig, "kl_beta", "'kl_beta', an option of cosmos-rl, is beta here."),
    (SFTConfig, "optm_name", "'optm_name', an option of cosmos-rl, becomes here: optim: AdamW is 'adamw_torch_fused'"),
    (SFTConfig, "clipvalue", "'clipvalue' is max_grad_value here."),
    (SFTConfig, "percentile_clipping", "'percentile_clipping' has no counterpart here: bitsandbytes has removed it"),
    (GRPOConfig, "warmup_ratio", "'warmup_ratio' is warmup_steps here."),
    (DPOConfig, "group_by_length", "'group_by_length' is not needed here: nothing is padded"),
    (
        SFTConfig,
        "modality_dropout",
        "'modality_dropout', an option of Ludwig, has no counterpart here: there are no multi",
    ),
    (SFTConfig, "fp4", "'fp4', an option of cosmos-rl, works differently here: use fp8=True to compute in 8 bits"),
    (SFTConfig, "enable_profiler", "'enable_profiler', an option of cosmos-rl, becomes here: profile=True."),
    (SFTConfig, "lerning_rate", "Did you mean 'learning_rate'?"),
]


@pytest.mark.parametrize(("config", "name", "words"), ADVICE, ids=lambda value: str(value)[:40])
def test_a_config_says_what_a_foreign_name_is(config: Any, name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(output_dir="x", **{name: 1})
    assert f"{config.__name__} has no option {name!r}. {words}" in str(caught.value)


def test_there_is_no_advice_where_the_option_is_not_there() -> None:
    assert advice("clip_ratio", parameters("GRPOConfig")) is not None
    assert advice("clip_ratio", parameters("SFTConfig")) is None
    assert advice("learning_rat", parameters("SFTConfig")) is None


def test_arguments_that_must_be_none_are_those_of_trl() -> None:
    assert {*ARGUMENTS} <= {name for names in NAMES["trainers"].values() for name in names}
