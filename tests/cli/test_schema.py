"""The parser of the command, which reads its options from the schema."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from prefrl.errors import ConfigError
from prefrl.options.switches import SWITCHES
from prefrl.registry import REGISTRY
from prefrl.scripts.schema import Given, SchemaParser, options_of
from prefrl.scripts.train import read
from prefrl.trainer.grpo_config import GRPOConfig

REQUIRED = "model_name_or_path: m\ndataset_name: d\nreward_funcs: [numeric_reward]\n"


def parse(tmp_path: Path, text: str, *argv: str) -> Given:
    path = tmp_path / "run.yaml"
    path.write_text(REQUIRED + text, encoding="utf-8")
    return read(REGISTRY["grpo"], [str(path), *argv])


def test_only_what_is_given_is_handed_on_in_its_type(tmp_path: Path) -> None:
    given = parse(
        tmp_path, "learning_rate: 1e-5\nbeta: 0\nlog_completions: no\n", "--seed", "3", "--no_shuffle_dataset"
    )
    assert given.values == {
        "model_name_or_path": "m",
        "dataset_name": "d",
        "reward_funcs": ["numeric_reward"],
        "learning_rate": 1e-5,
        "beta": 0.0,
        "log_completions": False,
        "seed": 3,
        "shuffle_dataset": False,
    }


def test_null_on_the_command_line_unsets_an_option_of_the_file(tmp_path: Path) -> None:
    given = parse(tmp_path, "top_k: 5\nfreeze: [a]\n", "--top_k", "null", "--freeze", "null")
    assert (given.values["top_k"], given.values["freeze"]) == (None, None)
    with pytest.raises(ConfigError, match="invalid int value: 'null'"):
        parse(tmp_path, "", "--seed", "null")


def test_a_feature_that_is_switched_off_takes_its_options_of_the_file_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "log_completions: true\nnum_completions_to_print: 4\n"
    given = parse(tmp_path, text, "--log_completions", "false")
    assert "num_completions_to_print" not in given.values
    assert (
        "run.yaml:5: num_completions_to_print is left out, because the command line switches"
        in capsys.readouterr().err
    )
    assert parse(tmp_path, text).values["num_completions_to_print"] == 4
    with pytest.raises(ConfigError, match=r"^num_completions_to_print=2 has no effect because log_completions=False"):
        parse(tmp_path, text, "--log_completions", "false", "--num_completions_to_print", "2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_generation: 4", "run.yaml:4: unknown option 'num_generation'. Did you mean 'num_generations'"),
        ("max_seq_length: 4", "run.yaml:4: unknown option 'max_seq_length'. 'max_seq_length', an option of TRL,"),
        ("sequence_len: 4", "run.yaml:4: unknown option 'sequence_len'"),
        ("packing: true", "It is an option of sft"),
        ("seed: x", "run.yaml:4: seed='x': must be of type int"),
        ("dtype: int8", "run.yaml:4: dtype='int8': must be one of auto, bfloat16"),
        ("temperature: -1", r"run.yaml:4: temperature=-1.0: must be a number > 0"),
        ("max_staleness: 2", "run.yaml:4: max_staleness=2 has no effect because use_vllm=False"),
        ("preset: dapoo", "run.yaml:4: preset='dapoo': must be one of deepseekmath"),
        ("lora_r: 4", "run.yaml:4: lora_r=4 has no effect because use_peft=False"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path, text)


@pytest.mark.parametrize("name", REGISTRY)
def test_options_of_a_switch_are_refused_without_it_by_the_classes_too(name: str, tmp_path: Path) -> None:
    config_class = REGISTRY[name].load_config()
    parameters = inspect.signature(config_class).parameters
    values = {"vllm_kwargs": {"sync_timeout": 1.0}, "vllm_importance_sampling_kwargs": {"clip_max": 3.0}}
    values |= {"liger_kernel_config": {"rope": True}, "activation_checkpointing_kwargs": {"use_reentrant": True}}
    values |= {"vllm_server_base_url": ["http://h:1"], "vllm_guided_decoding_regex": "a"}
    values |= {"vllm_importance_sampling_correction": False, "weight_sync": "shm", "generation_mode": "async"}
    values |= {"vllm_server_host": "h", "vllm_importance_sampling_mode": "token_mask"}
    by_name = {option["name"]: option for option in options_of(name)}
    for switch, options in SWITCHES.items():
        for option in options:
            if option not in parameters:
                continue
            default = by_name[option].get("default")
            value = values.get(option, not default if isinstance(default, bool) else (default or 0) + 0.25)
            value = (default or 0) + 1 if by_name[option]["kind"] == "int" else value
            with pytest.raises(ConfigError, match="has no effect|load_in"):
                config_class(output_dir=str(tmp_path), use_cpu=True, **{switch: False, option: value})


def test_a_preset_is_an_option_of_the_command(tmp_path: Path) -> None:
    given = parse(tmp_path, "preset: dapo\n")
    assert given.values["preset"] == "dapo"
    assert GRPOConfig.preset("dapo", output_dir=str(tmp_path), use_cpu=True).dynamic_sampling


def test_defaults_are_those_of_the_config(tmp_path: Path) -> None:
    values = SchemaParser("grpo").values(["--model_name_or_path", "m"])
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    for name in ("num_generations", "temperature", "use_vllm", "vllm_server_port", "seed"):
        assert values[name] == getattr(config, name)
