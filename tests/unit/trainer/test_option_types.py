"""A number or a switch that is given as a string, or as something else, is refused before anything reads it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from transformers import HfArgumentParser, TrainingArguments

from prefrl import ConfigError, GRPOConfig, SFTConfig
from prefrl.registry import REGISTRY, Algorithm
from prefrl.trainer.base_config import BaseConfig


def config(cls: Any = SFTConfig, **options: Any) -> Any:
    return cls(output_dir="runs/x", use_cpu=True, report_to="none", **options)


CASES: list[Any] = [
    pytest.param(
        SFTConfig,
        {"learning_rate": "1e-5"},
        r"^learning_rate='1e-5': must be a number >= 0\. Write 1\.0e-05 without .*YAML reads 1e-5 as a string",
        id="text of HuggingFace's option",
    ),
    pytest.param(
        GRPOConfig, {"beta": "0.1"}, r"beta='0\.1': must be a number >= 0\. Write 0\.1 ", id="text of our option"
    ),
    pytest.param(SFTConfig, {"warmup_steps": "10"}, "warmup_steps='10': must be a number", id="HuggingFace compares"),
    pytest.param(SFTConfig, {"max_steps": "10"}, "max_steps='10': must be an integer >= -1. Write 10 ", id="integer"),
    pytest.param(SFTConfig, {"max_steps": 1e3}, r"max_steps=1000\.0: must be an integer", id="float as integer"),
    pytest.param(
        SFTConfig,
        {"weight_decay": "much"},
        r"weight_decay='much': must be a number >= 0 and <= 1000\.$",
        id="no number",
    ),
    pytest.param(SFTConfig, {"learning_rate": True}, "learning_rate=True: must be a number", id="switch as number"),
    pytest.param(SFTConfig, {"learning_rate": None}, "learning_rate=None: must be a number", id="None"),
    pytest.param(SFTConfig, {"max_length": "9"}, "max_length='9': must be an integer", id="text of an optional one"),
    pytest.param(GRPOConfig, {"reward_weights": ["1"]}, r"reward_weights=\['1'\]: must be a list, each", id="list"),
    pytest.param(GRPOConfig, {"reward_weights": 1.0}, r"reward_weights=1\.0: must be a list", id="no list"),
    pytest.param(
        SFTConfig,
        {"packing": "false"},
        "packing='false': must be True or False. Write False .*in YAML false",
        id="switch",
    ),
]


@pytest.mark.parametrize(("cls", "options", "message"), CASES)
def test_another_type_is_an_error_with_field_value_and_remedy(cls: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(cls, **options)


def test_numbers_of_numpy_and_integers_for_floats_are_numbers() -> None:
    made = config(
        learning_rate=np.float32(0.5), max_steps=np.int64(3), weight_decay=0, eval_steps=None, bf16=np.False_
    )
    assert (made.learning_rate, made.max_steps) == (0.5, 3)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in REGISTRY.values()])
def test_defaults_are_of_their_types(row: Algorithm) -> None:
    made = config(row.load_config())
    assert dataclasses.replace(made, max_steps=3).max_steps == 3  # with what HuggingFace has made of the others


def test_the_parsers_of_command_lines_read_numbers_as_before(tmp_path: Path) -> None:
    parser: Any = HfArgumentParser(SFTConfig)
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--learning_rate", "1e-5", "--max_steps", "3"]
    (made,) = parser.parse_args_into_dataclasses(words)
    assert (made.learning_rate, made.max_steps) == (1e-5, 3)
    path = tmp_path / "config.yaml"
    options = "output_dir: runs/x\nuse_cpu: true\nreport_to: none\nlearning_rate: "
    path.write_text(f"{options}1.0e-5\n")
    assert parser.parse_yaml_file(path)[0].learning_rate == 1e-5
    path.write_text(f"{options}1e-5\n")
    assert yaml.safe_load(path.read_text())["learning_rate"] == "1e-5"
    with pytest.raises(ConfigError, match=r"1\.0e-05"):
        parser.parse_yaml_file(path)


def test_no_base_of_the_config_hides_what_another_one_declares() -> None:
    found = {field.name: field for field in dataclasses.fields(BaseConfig)}
    bases = [base for base in BaseConfig.__mro__[1:-1] if base is not TrainingArguments]
    for base in bases:
        declared = {field.name: field for field in dataclasses.fields(base) if field.name in base.__annotations__}
        assert all(found[name] is field for name, field in declared.items()), base.__name__
    assert bases
    assert next(iter(found)) == "output_dir"
