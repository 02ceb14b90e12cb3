"""Names of TRL, verl and cosmos-rl: each is an option here, or the table says what it is."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import prefrl
from prefrl import ConfigError, DistillationConfig, DPOConfig, GRPOConfig, PPOConfig, SFTConfig, rewards
from prefrl.options.fields import flat_names
from prefrl.options.names import ARGUMENTS, FOREIGN_FILE, TRAINER_NAMES, advice, nearest
from prefrl.options.params import KwargsOption, kwargs_options
from prefrl.registry import REGISTRY
from prefrl.scripts.generated import LIBRARIES, foreign_text
from prefrl.scripts.migrate.edits import every_option, option_names_of
from prefrl.scripts.migrate.names import REWARDS
from prefrl.scripts.migrate.rows import DEFAULTS, TRANSFORMERS, TRL, VALUES, row_of
from prefrl.scripts.migrate.verl_keys import VERL
from prefrl.scripts.schema import options_of as schema_options
from tests.trl_defaults import CONFIGS, NOT_COMPARED, defaults_of

DATA = Path(__file__).parents[1] / "data"
NAMES = json.loads((DATA / "trl_1_16_names.json").read_text(encoding="utf-8"))
VERL_KEYS = (DATA / "verl_ppo_trainer_keys.txt").read_text(encoding="utf-8").split()


def parameters(name: str) -> set[str]:
    return set(inspect.signature(getattr(prefrl, name).__init__).parameters) - {"self"}


def command_of(config: str) -> str:
    return next(row.name for row in REGISTRY.values() if row.config.endswith(f":{config}"))


@pytest.mark.parametrize("config", CONFIGS)
def test_each_option_of_trl_is_one_here_or_in_the_table(config: str) -> None:
    counted = {*("batch_size", "mini_batch_size", "micro_batch_size", "local_batch_size", "local_mini_batch_size")}
    computed = {*counted, "world_size", "num_total_batches", "stop_token_id"} if config == "PPOConfig" else set()
    assert not defaults_of(config).keys() - option_names_of(command_of(config)) - TRL.keys() - computed


@pytest.mark.parametrize("config", CONFIGS)
def test_every_default_that_differs_is_in_the_table(config: str) -> None:
    options = [option for option in schema_options(command_of(config)) if not option.get("is_hidden")]
    ours = {option["name"]: option.get("default") for option in options}
    theirs = defaults_of(config)
    renamed = {name: row.options[0] for name, row in TRL.items() if row.kind == "renamed" and name not in ours}
    theirs |= {renamed[name]: theirs[name] for name in renamed.keys() & theirs.keys()}
    compared = ours.keys() & theirs.keys() - NOT_COMPARED
    differing = {name: theirs[name] for name in compared if theirs[name] not in (ours[name], [ours[name]])}
    no_limit = {"max_prompt_length": None} if "max_prompt_length" in ours else {}
    assert {**differing, **no_limit} == DEFAULTS[config]


FLAT = flat_names(GRPOConfig)
OF_TRL = [name for name, place in FLAT.items() if place.key is not None]


@pytest.mark.parametrize("name", sorted({*OF_TRL} - {"use_bias_correction_kl", "vllm_importance_sampling_cap"}))
def test_keys_have_the_defaults_of_trl(name: str) -> None:
    """A keyword that is not given leaves the default to the class of the key."""
    option = next(option for option in kwargs_options(GRPOConfig) if option.name == FLAT[name].option)
    fields = [field for params in option.choices.values() for field in dataclasses.fields(params)]
    defaults = [field.default for field in fields if field.name == FLAT[name].key]
    theirs = next(values[name] for values in map(defaults_of, CONFIGS) if name in values)
    assert theirs in defaults


def test_each_key_of_verl_is_one_here_or_in_the_table() -> None:
    known = every_option()
    assert not [key for key in VERL_KEYS if row_of(VERL, key) is None and key.rpartition(".")[2] not in known]


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_a_name_becomes_is_there(library: str) -> None:
    own = {"dtype"}  # of model_init_kwargs
    for name, row in LIBRARIES[library].items():
        assert {*row.options} <= every_option() | own, name
        assert row.text == row.text.strip().removesuffix("."), name


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_has_no_counterpart_names_none(library: str) -> None:
    for name, row in LIBRARIES[library].items():
        if row.kind == "not there":
            assert not {*re.findall(r"\w+_\w+", row.text)} & every_option(), name


def test_no_name_of_the_table_is_an_option_of_every_command() -> None:
    everywhere = frozenset.intersection(*(option_names_of(name) for name in REGISTRY))
    assert not everywhere & (TRL.keys() | LIBRARIES["others"].keys())


def test_keys_of_mappings_are_keys_of_these() -> None:
    listed = [one for config in (GRPOConfig, PPOConfig, DistillationConfig) for one in kwargs_options(config)]
    options: dict[str, KwargsOption[Any]] = {option.name: option for option in listed}
    for rows in LIBRARIES.values():
        for name, row in rows.items():
            if row.text.startswith("the key "):
                (option,) = row.options
                key = row.text.split("'")[1]
                assert any(key in params.names() for params in options[option].choices.values()), name


def test_values_of_trl_differ_from_ours() -> None:
    for (config, option, value), ours in VALUES.items():
        assert option in parameters(config)
        assert value != ours


def test_names_of_transformers_4_are_not_those_of_5() -> None:
    assert not TRANSFORMERS.keys() & defaults_of("SFTConfig").keys()


def test_arguments_that_are_renamed_are_not_those_of_trainers() -> None:
    trainers = [row.load_trainer() for row in REGISTRY.values()]
    accepted = {(cls.__name__, name) for cls in trainers for name in inspect.signature(cls.__init__).parameters}
    assert {pair for pair in accepted if pair[1] in TRAINER_NAMES} == {("PPOTrainer", "reward_model")}


def test_rewards_of_trl_are_there() -> None:
    assert {*REWARDS} <= {*rewards.__all__}


ADVICE = [
    (GRPOConfig, "clip_ratio", "'clip_ratio', an option of verl, is epsilon here."),
    (GRPOConfig, "kl_loss_coef", "'kl_loss_coef', an option of verl, is beta here."),
    (
        GRPOConfig,
        "use_kl_loss",
        "'use_kl_loss', an option of verl, becomes here: beta > 0, and kl_in='loss'.",
    ),
    (GRPOConfig, "kl_beta", "'kl_beta', an option of cosmos-rl, is beta here."),
    (
        SFTConfig,
        "optm_name",
        "'optm_name', an option of cosmos-rl, becomes here: optim, where AdamW is 'adamw",
    ),
    (SFTConfig, "clipvalue", "'clipvalue' is max_grad_value here."),
    (SFTConfig, "percentile_clipping", "'percentile_clipping' works differently here: use max_grad_norm"),
    (GRPOConfig, "warmup_ratio", "'warmup_ratio', an option of transformers, is warmup_steps here."),
    (DPOConfig, "use_mps_device", "'use_mps_device', an option of transformers, is not needed here: the device"),
    (
        SFTConfig,
        "modality_dropout",
        "'modality_dropout', an option of Ludwig, has no counterpart here: there are no multi",
    ),
    (SFTConfig, "fp4", "'fp4', an option of cosmos-rl, works differently here: use fp8=True to compute in 8 bits"),
    (SFTConfig, "enable_profiler", "'enable_profiler', an option of cosmos-rl, becomes here: profile=True."),
    (GRPOConfig, "clip_value", "'clip_value' is max_grad_value here."),
    (GRPOConfig, "pct_start", "'pct_start' becomes here: the key 'pct_start' of lr_scheduler_kwargs."),
    (GRPOConfig, "max_tokens", "'max_tokens' works differently here: set max_completion_length for completions"),
    (SFTConfig, "lerning_rate", "Did you mean 'learning_rate'?"),
]


@pytest.mark.parametrize(("config", "name", "words"), ADVICE, ids=lambda value: str(value)[:40])
def test_a_config_says_what_a_foreign_name_is(config: Any, name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(output_dir="x", **{name: 1})
    assert f"{config.__name__} has no option {name!r}. {words}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "known", "guess"),
    [
        ("grop", ("gspo", "grpo"), "grpo"),
        ("roh", ("rho", "beta"), "rho"),
        ("shapes", ("record_shapes", "stacks"), "record_shapes"),
        ("--seed_", ("--seed", "--speed"), "--seed"),
        ("training", ("streaming",), None),
        ("--stop", ("--top_p", "--top_k"), None),
        ("steps", ("max_steps", "save_steps"), None),
        ("???", ("max_steps",), None),
    ],
)
def test_only_a_name_that_is_near_is_suggested(name: str, known: tuple[str, ...], guess: str | None) -> None:
    assert nearest(name, known, otherwise="-") == ("-" if guess is None else f"Did you mean {guess!r}?")


def test_there_is_no_advice_where_the_option_is_not_there() -> None:
    assert advice("clip_ratio", parameters("GRPOConfig")) is not None
    assert advice("clip_ratio", parameters("SFTConfig")) is None
    assert advice("learning_rat", parameters("SFTConfig")) is None


def test_arguments_that_must_be_none_are_those_of_trl() -> None:
    assert {*ARGUMENTS} <= {name for names in NAMES["trainers"].values() for name in names}


def test_messages_read_the_tables_that_there_are_now() -> None:
    assert FOREIGN_FILE.read_text(encoding="utf-8") == foreign_text()
