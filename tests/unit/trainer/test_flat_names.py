"""Fields that fill keys of other options: names of TRL."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

import prefrl
from prefrl import ConfigError, GRPOConfig
from prefrl.options.fields import flat_names
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.command import RewardArguments
from prefrl.scripts.parsing.argument_parser import ArgumentParser
from tests.trl_defaults import CONFIGS, defaults_of

SERVER = {"use_vllm": True, "use_cpu": True}
SAPO, VESPO = {"loss_type": "sapo"}, {"loss_type": "vespo"}
FLAT = flat_names(GRPOConfig)
ENTROPY = {"use_adaptive_entropy": True, "entropy_coef": 0.5}
# Name -> a value, the options that it needs, and the option and the value that it gives.
PLACES: dict[str, tuple[Any, dict[str, Any], str, Any]] = {
    "sapo_temperature_pos": (2.0, SAPO, "loss_kwargs", {"temperature_pos": 2.0}),
    "sapo_temperature_neg": (2.0, SAPO, "loss_kwargs", {"temperature_neg": 2.0}),
    "vespo_k_pos": (1.0, VESPO, "loss_kwargs", {"k_pos": 1.0}),
    "vespo_lambda_pos": (1.0, VESPO, "loss_kwargs", {"lambda_pos": 1.0}),
    "vespo_k_neg": (1.0, VESPO, "loss_kwargs", {"k_neg": 1.0}),
    "vespo_lambda_neg": (1.0, VESPO, "loss_kwargs", {"lambda_neg": 1.0}),
    "off_policy_mask_threshold": (0.1, {}, "loss_kwargs", {"off_policy_mask_threshold": 0.1}),
    "entropy_coef_min": (0.1, ENTROPY, "entropy_kwargs", {"min": 0.1}),
    "entropy_coef_max": (0.9, ENTROPY, "entropy_kwargs", {"max": 0.9}),
    "entropy_coef_delta": (0.1, ENTROPY, "entropy_kwargs", {"delta": 0.1}),
    "entropy_target": (0.1, ENTROPY, "entropy_kwargs", {"target": 0.1}),
    "multi_objective_aggregation": (
        "normalize_then_sum",
        {},
        "advantage_kwargs",
        {"multi_objective_aggregation": "normalize_then_sum"},
    ),
    "use_bias_correction_kl": (True, {}, "kl_kwargs", {"bias_correction": True}),
    "vllm_importance_sampling_clip_min": (0.5, SERVER, "vllm_importance_sampling_kwargs", {"clip_min": 0.5}),
    "vllm_importance_sampling_clip_max": (
        None,
        {**SERVER, "vllm_importance_sampling_mode": "token_truncate"},
        "vllm_importance_sampling_kwargs",
        {"clip_max": None},
    ),
    "vllm_structured_outputs_regex": ("a+", SERVER, "vllm_guided_decoding_regex", "a+"),
    "vllm_importance_sampling_cap": (2.0, SERVER, "vllm_importance_sampling_kwargs", {"clip_max": 2.0}),
    "reward_clip_range": ([-1.0, 1.0], {}, "reward_shaping_kwargs", {"clip_range": [-1.0, 1.0]}),
    "missing_eos_penalty": (1.0, {}, "reward_shaping_kwargs", {"missing_eos_penalty": 1.0}),
}


# What happens anyway.
ANYWAY = {
    **{"group_by_length": False, "overwrite_output_dir": True, "save_safetensors": True, "padding_free": True},
    "accelerator_config": {"dispatch_batches": False, "even_batches": False},
}


def made(tmp_path: Path, **options: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), report_to="none", **options)


@pytest.mark.parametrize("name", PLACES)
def test_a_name_fills_its_place(name: str, tmp_path: Path) -> None:
    value, others, option, expected = PLACES[name]
    assert getattr(made(tmp_path, **others, **{name: value}), option) == expected


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "PPOConfig"])  # whose options had other names
def test_each_option_of_a_config_of_trl_is_one_here_and_its_default_is_taken_in_silence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("prefrl.options.fields._warn_once", said.append)
    config = getattr(prefrl, name)
    theirs = defaults_of(name)
    assert theirs.keys() <= {field.name for field in dataclasses.fields(config)}
    config(**{**theirs, **ANYWAY, "output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"})
    assert said == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ({"top_k": 5, "max_new_tokens": 9, "do_sample": True}, {"top_k": 5, "max_completion_length": 9}),
        ('{"min_p": 0.1}', {"min_p": 0.1}),
        ({"num_beams": 4}, "generation_kwargs: num_beams=4 has no counterpart here. Known: temperature, "),
        ({"temperature": 0.5}, "generation_kwargs: temperature=0.5 and temperature=0.7: given both ways"),
    ],
)
def test_keys_of_generation_kwargs_are_options(given: Any, expected: Any, tmp_path: Path) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            made(tmp_path, generation_kwargs=given, temperature=0.7)
        return
    config = made(tmp_path, generation_kwargs=given, temperature=0.7)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.generation_kwargs is None


@pytest.mark.parametrize(("text", "value"), [("False", "none"), ("True", "group"), ("batch", "batch")])
def test_rewards_are_scaled_as_a_word_says(text: str, value: str, tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--scale_rewards", text]
    for parser in (HfArgumentParser(GRPOConfig), ArgumentParser(GRPOConfig)):
        (parsed,) = parser.parse_args_into_dataclasses(words)
        assert parsed.scale_rewards == value


def test_the_word_none_is_none_where_a_parser_lets_it_pass(tmp_path: Path) -> None:
    texts = ["--output_dir", str(tmp_path), "--stop", "None", "--chat_template_kwargs", "None"]
    lengths = ["--max_completion_length", "None"]
    for parser, words in ((HfArgumentParser(GRPOConfig), texts), (ArgumentParser(GRPOConfig), [*texts, *lengths])):
        (parsed,) = parser.parse_args_into_dataclasses(words)
        assert (parsed.stop, parsed.chat_template_kwargs) == (None, None)
    assert parsed.max_completion_length is None


def test_every_name_is_shown_above() -> None:
    assert PLACES.keys() == FLAT.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"loss_type": "vespo", "vespo_k_pos": 2.0, "loss_kwargs": {"k_pos": 3.0}},
            r"vespo_k_pos=2.0 and loss_kwargs={'k_pos': 3.0}: given both ways. Remove vespo_k_pos",
            id="key",
        ),
        pytest.param(
            {"vllm_structured_outputs_regex": "a", "vllm_guided_decoding_regex": "b", **SERVER},
            "vllm_structured_outputs_regex='a' and vllm_guided_decoding_regex='b': given both ways",
            id="option",
        ),
        pytest.param(
            {"vespo_k_pos": 1.0}, "loss_kwargs: k_pos=1.0 is not known with loss_type='dapo'. It goes with", id="loss"
        ),
        pytest.param({"loss_kwargs": ["k_pos"], "vespo_k_pos": 2.0}, "loss_kwargs=.*must be a mapping", id="a list"),
        pytest.param({"sapo_temperature_pos": "1e-5", "loss_type": "sapo"}, r"YAML reads 1e-5 as a string", id="text"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, **options)


def test_names_join_keys_that_are_there_and_leave_the_mapping_of_the_user_alone(tmp_path: Path) -> None:
    given = {"temperature_neg": 3.0}
    config = made(tmp_path, loss_type="sapo", loss_kwargs=given, sapo_temperature_pos=2.0)
    assert config.loss_kwargs == {"temperature_neg": 3.0, "temperature_pos": 2.0}
    assert given == {"temperature_neg": 3.0}


def test_a_config_is_copied_stored_and_listed_with_what_was_filled(tmp_path: Path) -> None:
    config = made(tmp_path, loss_type="sapo", sapo_temperature_pos=2.0)
    again = GRPOConfig(
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    )
    for copy in (dataclasses.replace(config, learning_rate=0.5), pickle.loads(pickle.dumps(config)), again):
        assert copy.loss_kwargs == {"temperature_pos": 2.0}
        assert copy.loss_params == config.loss_params
    assert config.to_dict()["loss_kwargs"] == {"temperature_pos": 2.0}
    assert "sapo_temperature_pos" not in config.to_dict()


def test_names_of_a_user_win_over_the_keys_of_a_preset(tmp_path: Path) -> None:
    plain = GRPOConfig.preset("deepseek_v32", output_dir=str(tmp_path))
    assert plain.loss_kwargs == {"off_policy_mask_threshold": 1.0}
    changed = GRPOConfig.preset("deepseek_v32", output_dir=str(tmp_path), off_policy_mask_threshold=0.5)
    assert changed.loss_kwargs == {"off_policy_mask_threshold": 0.5}
    more = GRPOConfig.preset("deepseek_v32", output_dir=str(tmp_path), loss_kwargs='{"positive_nll_coef": 0.1}')
    assert more.loss_kwargs == {"off_policy_mask_threshold": 1.0, "positive_nll_coef": 0.1}


def parse(tmp_path: Path, text: str, *argv: str) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text(f"model_name_or_path: m\ndataset_name: d\nreward_funcs: [a]\n{text}", encoding="utf-8")
    parser = ArgumentParser((RewardArguments, GRPOConfig))
    return parser.parse_args_and_config(["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", *argv])[-1]


def test_files_and_command_lines_take_names_and_mappings(tmp_path: Path) -> None:
    config = parse(tmp_path, "loss_type: sapo\nsapo_temperature_pos: 1e-1\nkl_kwargs: {target: 0.2, horizon: 50}\n")
    assert config.loss_kwargs == {"temperature_pos": 0.1}
    assert config.kl_kwargs == {"target": 0.2, "horizon": 50}
    config = parse(tmp_path, "", "--loss_type", "sapo", "--sapo_temperature_pos", "3", "--kl_kwargs", '{"target": 1}')
    assert config.loss_kwargs == {"temperature_pos": 3.0}
    assert config.kl_kwargs == {"target": 1}
    assert parse(tmp_path, "").loss_kwargs is None
    with pytest.raises(ConfigError, match=r"'sapo_temperature_ps'\. Did you mean 'sapo_temperature_pos'"):
        parse(tmp_path, "sapo_temperature_ps: 1\n")


def test_the_help_shows_keys_and_not_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ArgumentParser((RewardArguments, GRPOConfig)).parse_args_and_config(["--help_all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "sapo: temperature_pos=1.0, temperature_neg=1.05" in text
    assert "clip_cov: ratio=0.0002, lb=1.0, ub=5.0" in text
    assert "SUPPRESS" not in text
    assert not [name for name in FLAT if f"--{name} " in text]


def test_plain_parsers_of_huggingface_take_names(tmp_path: Path) -> None:
    words = [
        "--output_dir",
        str(tmp_path),
        "--loss_type",
        "vespo",
        "--vespo_k_pos",
        "4",
        "--reward_clip_range",
        "-1",
        "1",
    ]
    (parsed,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(words)
    assert (parsed.loss_kwargs, parsed.reward_shaping_kwargs) == ({"k_pos": 4.0}, {"clip_range": [-1.0, 1.0]})


@pytest.mark.parametrize("algorithm", REGISTRY)
def test_a_config_is_derived_as_any_dataclass_is(algorithm: str, tmp_path: Path) -> None:
    base: Any = REGISTRY[algorithm].load_config()

    @dataclasses.dataclass
    class Mine(base):  # type: ignore[misc]
        extra: int = 3
        temporary: dataclasses.InitVar[int] = 4

        def __post_init__(self, temporary: int) -> None:
            self.learning_rate = self.extra * temporary / 100
            super().__post_init__()

    (parsed,) = HfArgumentParser(Mine).parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--extra", "5"])
    assert (parsed.extra, parsed.learning_rate) == (5, 0.2)
