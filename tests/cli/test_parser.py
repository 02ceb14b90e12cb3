"""YAML and the command line together."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.scripts.arguments.command import CommandArguments, RewardArguments
from prefrl.scripts.arguments.datasets import DatasetConfig, DatasetMixtureConfig, ScriptArguments
from prefrl.scripts.arguments.model_config import ModelConfig, lora_options
from prefrl.scripts.parsing.argument_parser import ArgumentParser, TrlParser
from prefrl.trainer.configs import GRPOConfig, SFTConfig

REQUIRED = "model_name_or_path: m\ndataset_name: d\n"


def parse(tmp_path: Path, text: str, *argv: str) -> tuple[CommandArguments, SFTConfig]:
    return _parse(tmp_path, REQUIRED + text, (CommandArguments, SFTConfig), argv)


def _parse(tmp_path: Path, text: str, classes: tuple[type, ...], argv: tuple[str, ...]) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    output = ["--output_dir", str(tmp_path / "out"), "--use_cpu"]
    return ArgumentParser(classes).parse_args_and_config(["--config", str(path), *output, *argv])


def test_the_file_overrides_defaults_and_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    text = "learning_rate: 1e-3\nmax_length: 77\nfreeze: [embed, norm]\npacking: true\n"
    script, config = parse(tmp_path, text, "--max_length", "88", "--freeze", "head")
    assert script.model_name_or_path == "m"
    assert (config.learning_rate, config.max_length, config.freeze, config.packing) == (1e-3, 88, ["head"], True)
    assert config.weight_decay == 0.0  # in neither


def test_the_command_line_wins_wherever_config_stands(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(REQUIRED + "max_length: 77\n", encoding="utf-8")
    argv = ["--max_length", "88", "--use_cpu", "--output_dir", str(tmp_path), f"--config={path}"]
    _, config = ArgumentParser((CommandArguments, SFTConfig)).parse_args_and_config(argv)
    assert config.max_length == 88


def test_scalars_mean_what_they_mean_on_the_command_line(tmp_path: Path) -> None:
    # YAML 1.1 reads 1e-3 as a text and no as false.
    text = "learning_rate: 1e-3\neval_strategy: no\nuse_peft: yes\nlora_target_modules: all-linear\nrun_name: 2024\n"
    script, config = parse(tmp_path, text)
    assert config.learning_rate == 1e-3
    assert config.eval_strategy == "no"
    assert config.run_name == "2024"
    assert script.use_peft is True
    assert script.lora_target_modules == ["all-linear"]


@pytest.mark.parametrize("value", ["true", "false"])
def test_an_option_that_is_on_by_default_can_be_set_both_ways(tmp_path: Path, value: str) -> None:
    text = REQUIRED + f"reward_funcs: [a]\nshuffle_dataset: {value}\n"
    _, config = _parse(tmp_path, text, (RewardArguments, GRPOConfig), ())
    assert config.shuffle_dataset is (value == "true")


def test_null_and_mappings_keep_their_types(tmp_path: Path) -> None:
    text = "max_length: null\nmodel_init_kwargs: {dtype: bfloat16, nested: {k: 1}}\n"
    _, config = parse(tmp_path, text)
    assert config.max_length is None
    assert config.model_init_kwargs == {"dtype": "bfloat16", "nested": {"k": 1}}


def test_json_on_the_command_line_is_a_mapping(tmp_path: Path) -> None:
    _, config = parse(tmp_path, "", "--model_init_kwargs", '{"dtype": "bfloat16"}')
    assert config.model_init_kwargs == {"dtype": "bfloat16"}


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 18))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "freeze: !!python/object/apply:os.system [touch x]\n",
            "run.yaml:3: the tag '!!python/object/apply:os.system'",
        ),
        ("seed: !env SEED\n", "run.yaml:3: the tag '!env' is not allowed"),
        ("model_init_kwargs:\n  a: {b: !!binary eA==}\n", "run.yaml:4: the tag '!!binary' is not allowed"),
        ("model_init_kwargs: " + "{a: " * 30 + "1" + "}" * 30, "run.yaml:3: must have at most 20 levels"),
        ("freeze: " + "[" * 1000 + "]" * 1000, "must have at most 20 levels"),
        ("freeze: &self [*self]\n", "must have at most 20 levels"),
        (BOMB, "must have at most 10000 values, counted where an alias repeats them"),
        ("# " + "x" * 2**18, "has more than 262144 characters"),
        ("seed: \udcff\n", "is not YAML"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_more_than_plain_values_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(REQUIRED + text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=re.escape(words)):
        ArgumentParser((CommandArguments, SFTConfig)).parse_args_and_config(["--config", str(path)])


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = "lora_target_modules: &names [q_proj, v_proj]\nuse_peft: true\nfreeze: *names\n"
    script, config = parse(tmp_path, text)
    assert script.lora_target_modules == config.freeze == ["q_proj", "v_proj"]


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    required = ("--model_name_or_path", "m", "--dataset_name", "d")
    _, config = _parse(tmp_path, "# nothing\n", (CommandArguments, SFTConfig), required)
    assert config.max_length == SFTConfig.max_length


def test_two_runs_of_the_parser_do_not_influence_each_other(tmp_path: Path) -> None:
    parse(tmp_path, "max_length: 77\nfreeze: [a]\n")
    _, config = parse(tmp_path, "")
    assert config.max_length == SFTConfig.max_length
    assert config.freeze is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "\nlearnin_rate: 1", r"run.yaml:4: unknown option 'learnin_rate'. Did you mean 'learning_rate'\?"
        ),
        pytest.param("num_generations: 4", r"run.yaml:3: unknown option 'num_generations'"),
        pytest.param("max_length: long", r"run.yaml:3: max_length='long': must be a whole number"),
        pytest.param("max_length: 1.5", r"run.yaml:3: max_length='1.5': must be a whole number"),
        pytest.param(
            "training:\n  learning_rate: 1e-5",
            r"run.yaml:3: unknown option 'training'. Options are not in sections: write learning_rate",
        ),
        pytest.param("packing: perhaps", r"run.yaml:3: packing='perhaps': must be true or false"),
        pytest.param("loss_type: mse", r"run.yaml:3: loss_type='mse': must be one of nll, dft"),
        pytest.param("packing: null", r"run.yaml:3: packing='null': null is not allowed"),
        pytest.param("max_length: [1, 2]", r"run.yaml:3: max_length=sequence: a list is not allowed"),
        pytest.param("freeze:\n  - [a, b]", r"run.yaml:3: freeze=sequence: a list of lists"),
        pytest.param("max_length: {a: 1}", r"run.yaml:3: max_length=mapping: a mapping is not allowed"),
        pytest.param("seed: 1\nseed: 2", r"run.yaml:4: seed was already set in line 3"),
        pytest.param("max_length: 0", r"max_length=0: must be a number >= 2"),
        pytest.param("seed: [", r"run.yaml:3: is not YAML: "),
        pytest.param("env:\n\tA: 1", r"run.yaml:4: is not YAML: .* in column 1. YAML has no tabs"),
    ],
)
def test_a_bad_entry_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path, text)


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.yaml:1: must be a mapping"):
        _parse(tmp_path, "- 1\n", (CommandArguments, SFTConfig), ())


def test_what_huggingface_refuses_is_a_config_error_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_strategy"):
        parse(tmp_path, "load_best_model_at_end: true\neval_strategy: epoch\nsave_strategy: steps\n")


def test_rewards_are_options_of_grpo(tmp_path: Path) -> None:
    text = REQUIRED + "reward_funcs: [a, b]\nreward_weights: [1, 0.5]\n"
    script, config = _parse(tmp_path, text, (RewardArguments, GRPOConfig), ())
    assert script.reward_funcs == ["a", "b"]
    assert config.reward_weights == [1.0, 0.5]


MIXTURE = "model_name_or_path: m\ndatasets:\n"


def mixture(tmp_path: Path, text: str, *argv: str) -> CommandArguments:
    script, _ = _parse(tmp_path, text, (CommandArguments, SFTConfig), argv)
    assert isinstance(script, CommandArguments)
    return script


def test_a_mixture_is_a_list_of_datasets(tmp_path: Path) -> None:
    text = MIXTURE + (
        "  - {path: a.jsonl, weight: 2}\n"
        "  - {path: hub/b, name: en, data_dir: d, data_files: {train: [x, y]}, split: test, columns: [c],"
        " weight: .5}\n"
    )
    assert mixture(tmp_path, text).datasets == [
        DatasetConfig("a.jsonl", weight=2),
        DatasetConfig("hub/b", "en", "d", {"train": ["x", "y"]}, "test", ["c"], weight=0.5),
    ]


def test_a_mixture_may_be_json_on_the_command_line(tmp_path: Path) -> None:
    model = "model_name_or_path: m\n"
    argv = ("--datasets", '[{"path": "a", "split": "test"}]')
    assert mixture(tmp_path, model, *argv).datasets == [DatasetConfig("a", split="test")]
    argv = ("--datasets", '{"path": "a", "name": "x"}', "b.jsonl")
    assert mixture(tmp_path, model, *argv).datasets == [DatasetConfig("a", "x"), DatasetConfig("b.jsonl")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("model_name_or_path: m\n", "dataset_name, datasets: not given. Set one of them", id="neither"),
        pytest.param(MIXTURE + "- path: a\ndataset_name: b\n", "dataset_name, datasets: both are given", id="both"),
        pytest.param(MIXTURE + "- 1\n", r"datasets\[0\]=1: must be a mapping with at least a path", id="number"),
        pytest.param(MIXTURE + "- {name: a}\n", "must be a mapping with at least a path", id="no path"),
        pytest.param(
            MIXTURE + "- {path: a}\n- {path: a, colums: [b]}\n",
            r"datasets\[1\]: unknown key 'colums'. Did you mean 'columns'\?",
            id="unknown",
        ),
        pytest.param(MIXTURE + "- {path: a, fraction: 0}\n", "fraction=0: must be a number > 0", id="fraction"),
        pytest.param(
            MIXTURE + "- {path: a, fraction: 1}\n- path: b\n", "some have a fraction and others do not", id="some"
        ),
        pytest.param(
            MIXTURE + "- {path: a, fraction: 1, weight: 1}\n", "fraction and weight are given", id="two shares"
        ),
        pytest.param(
            MIXTURE + "- {path: a, fraction: 1}\nstreaming: true\n", "streaming=True and fraction", id="stream"
        ),
        pytest.param(
            MIXTURE + "- path: a\nstreaming: true\ntest_split_size: 0.1\n",
            "streaming=True and test_split_size",
            id="split of a stream",
        ),
        pytest.param(REQUIRED + "streaming: true\n", "streaming=True has no effect", id="stream of one"),
        pytest.param(
            REQUIRED + "test_split_size: 0.1\neval_datasets: [b.jsonl]\n",
            "both say what to evaluate on",
            id="two tests",
        ),
        pytest.param(
            REQUIRED + "test_split_size: 0.1\ndataset_test_split: train\n",
            "dataset_test_split='train' has no",
            id="held",
        ),
        pytest.param(
            REQUIRED + "test_split_size: 0.1\ndataset_streaming: true\n", "no rows can be held out", id="held stream"
        ),
        pytest.param(REQUIRED + "test_split_size: 1.5\n", "a whole number of rows", id="no whole number"),
        pytest.param(
            REQUIRED + "eval_datasets: [{path: a, colums: b}]\n", r"eval_datasets\[0\]: unknown key", id="eval key"
        ),
        pytest.param(
            REQUIRED + "eval_datasets: [{path: a, weight: 1}]\n", "weight are for mixtures", id="eval weight"
        ),
        pytest.param(MIXTURE + "- {path: 3}\n", r"datasets\[0\].path=3: must be a string", id="path"),
        pytest.param(MIXTURE + "- {path: a, columns: b}\n", "columns='b': must be a list of names", id="columns"),
        pytest.param(
            MIXTURE + "- {path: a, prompt_template: '{}'}\n", r"\[0\].prompt_template='{}': {} is no", id="template"
        ),
        pytest.param(
            MIXTURE + "- path: a\nsystem_prompt: s\n", "system_prompt='s' has no effect because datasets", id="system"
        ),
        pytest.param(MIXTURE + "- {path: a, weight: 0}\n", "weight=0: must be a number > 0", id="weight"),
        pytest.param(MIXTURE + "- {path: a, weight: much}\n", "weight='much': must be a number > 0", id="no number"),
        pytest.param(
            MIXTURE + "- path: a\ndataset_train_split: test\n",
            "dataset_train_split='test' has no effect because datasets is set. Set it for each dataset",
            id="split",
        ),
        pytest.param(MIXTURE + "- path: a\ndataset_config: en\n", "dataset_config='en' has no effect", id="config"),
        pytest.param("model_name_or_path: m\ndatasets: '[a'\n", r"='\[a': must be a path, or JSON such as", id="json"),
        pytest.param("model_name_or_path: m\ndatasets: '{}'\n", r"datasets\[0\]=\{\}: must be a mapping", id="empty"),
    ],
)
def test_a_mixture_that_cannot_be_read_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixture(tmp_path, text)


def test_patterns_are_mappings_in_the_file_and_json_on_the_command_line(tmp_path: Path) -> None:
    argv = ("--lora_alpha_pattern", '{"v_proj": 4}')
    script, _ = parse(tmp_path, "use_peft: true\nlora_rank_pattern: {q_proj: 2}\nlora_init: pissa\n", *argv)
    assert lora_options(script) == {
        "task_type": "CAUSAL_LM",
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"v_proj": 4},
        "init_lora_weights": "pissa",
        "use_rslora": False,
        "use_dora": False,
    }


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("lora_init: false", {"init_lora_weights": False}),
        ("lora_init: 'true'", {"init_lora_weights": True}),
        (
            "lora_init: loftq\nloftq_config: {loftq_bits: 8}",
            {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 8, "loftq_iter": 1}},
        ),
    ],
)
def test_initializations_of_adapters_are_those_of_peft(
    tmp_path: Path, text: str, arguments: dict[str, object]
) -> None:
    options = lora_options(parse(tmp_path, f"use_peft: true\n{text}\n")[0])
    assert {
        name: value for name, value in options.items() if name in ("init_lora_weights", "loftq_config")
    } == arguments


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            pytest.param(
                f"{name}: {value}", f"{name}=.* has no effect because use_peft=False. Set use_peft=True", id=name
            )
            for name, value in {
                "lora_r": 4,
                "lora_alpha": 4,
                "lora_dropout": 0.5,
                "lora_target_modules": "q_proj",
                "lora_target_parameters": "experts",
                "lora_modules_to_save": "lm_head",
                "lora_rank_pattern": "{a: 1}",
                "lora_alpha_pattern": "{a: 1}",
                "lora_init": "pissa",
                "lora_task_type": "SEQ_CLS",
                "use_rslora": "true",
                "use_dora": "true",
            }.items()
        ),
        pytest.param("use_peft: true\nlora_r: 0", "lora_r=0: must be a number >= 1", id="rank"),
        pytest.param("use_peft: true\nlora_init: eva", "lora_init='eva': it needs data", id="eva"),
        pytest.param("use_peft: true\nlora_init: pissa_niter_4", "is random, .* Use pissa", id="pissa_niter"),
        pytest.param("use_peft: true\nlora_init: pisa", "lora_init='pisa': must be one of 'gaussian'", id="init"),
        pytest.param(
            "use_peft: true\nloftq_config: {loftq_bits: 4}", "has no effect because lora_init=None", id="no loftq"
        ),
        pytest.param(
            "use_peft: true\nlora_init: loftq\nloftq_config: {loftq_bits: 2}",
            "loftq_bits=2: must be 4 or 8",
            id="bits",
        ),
        pytest.param(
            "use_peft: true\nlora_rank_pattern: a", "lora_rank_pattern='a': must be a JSON object", id="json"
        ),
        pytest.param(
            "use_peft: true\nlora_target_parameters: [experts]",
            "lora_dropout=0.05: must be 0 with lora_target_parameters",
            id="dropout",
        ),
        pytest.param("load_in_4bit: true", "load_in_4bit=True and use_peft=False: quantized weights", id="4 bits"),
        pytest.param("load_in_8bit: true", "load_in_8bit=True and use_peft=False: quantized weights", id="8 bits"),
        pytest.param(
            "use_peft: true\nload_in_8bit: true\nload_in_4bit: true",
            "load_in_8bit=True: set one of them",
            id="12 bits",
        ),
        pytest.param("dtype: int8", "dtype='int8': must be one of auto, bfloat16", id="dtype"),
        pytest.param(
            "ignore_bias_buffers: true", "ignore_bias_buffers=True.* Set ddp_broadcast_buffers=False", id="buffers"
        ),
        pytest.param(
            "bnb_4bit_quant_storage: uint8", "storage='uint8' has no effect because load_in_4bit", id="storage"
        ),
        pytest.param("bnb_4bit_quant_type: fp4", "='fp4' has no effect because load_in_4bit=False", id="type"),
        pytest.param(
            "use_peft: true\nload_in_8bit: true\nuse_bnb_nested_quant: true",
            "use_bnb_nested_quant=True has no effect because load_in_4bit=False",
            id="nested",
        ),
    ],
)
def test_an_option_of_adapters_or_quantization_without_effect_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path, text)


@dataclasses.dataclass
class Run:
    steps: int
    name: str = "alpha"
    is_long: bool = True
    sizes: list[int] | None = None


@dataclasses.dataclass
class Place:
    folder: str = "here"


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_scripts_own_classes_are_parsed_with_a_file(tmp_path: Path) -> None:
    config = written(tmp_path, "steps: 3\nsizes: [1, 2]\nfolder: there\n")
    argv = ["--config", config, "--name", "beta", "--no_is_long"]
    assert TrlParser((Run, Place)).parse_args_and_config(argv) == (Run(3, "beta", False, [1, 2]), Place("there"))
    assert TrlParser(Run).parse_args_and_config(["--steps", "1"]) == (Run(1),)
    assert TrlParser([Run]).parse_args_into_dataclasses(["--steps", "1"]) == (Run(1),)


def test_without_arguments_the_command_line_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script.py", "--steps", "5"])
    assert TrlParser(Run).parse_args_and_config() == (Run(5),)


def test_env_of_the_file_sets_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFRL_TEST_VALUE", raising=False)
    config = written(tmp_path, "steps: 1\nenv: {PREFRL_TEST_VALUE: no}\n")
    assert TrlParser(Run).parse_args_and_config(["--config", config]) == (Run(1),)
    assert os.environ["PREFRL_TEST_VALUE"] == "no"
    monkeypatch.delenv("PREFRL_TEST_VALUE")
    for value in ("text", "[a]", "{a: [b]}", "null"):
        with pytest.raises(ConfigError, match="env: must be a mapping of environment variables"):
            TrlParser(Run).parse_args_and_config(["--config", written(tmp_path, f"env: {value}\n")])


def test_unknown_options_are_refused_ignored_or_returned(tmp_path: Path) -> None:
    argv = ["--config", written(tmp_path, "steps: 1\nother: true\n"), "--more", "2"]
    parser = TrlParser(Run)
    with pytest.raises(ConfigError, match="unknown option 'other'"):
        parser.parse_args_and_config(argv)
    with pytest.raises(ConfigError, match="unknown option '--more'"):
        parser.parse_args_and_config(argv, fail_with_unknown_args=False)
    assert parser.parse_args_and_config(argv[:2], fail_with_unknown_args=False) == (Run(1),)
    words = (["--other", "True"], ["--more", "2"])
    assert parser.parse_args_and_config(argv, return_remaining_strings=True) == (Run(1), words[0] + words[1])
    separate = parser.parse_args_and_config(argv, return_remaining_strings=True, separate_remaining_strings=True)
    assert separate == (Run(1), *words)


def test_a_file_gives_defaults_to_commands_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = TrlParser(prog="script")
    commands = parser.add_subparsers(dest="command")
    for command, cls in (("run", Run), ("again", Run), ("place", Place)):
        commands.add_parser(command, dataclass_types=[cls])
    file = ["--config", written(tmp_path, "steps: 2\nname: beta\n")]
    for command in ("run", "again"):
        (values,) = parser.parse_args_and_config([command, "--sizes", "1", *file])
        assert (values.command, values.steps, values.name, values.sizes) == (command, 2, "beta", [1])
    with pytest.raises(ConfigError, match=r"unknown option 'nam'\. Did you mean 'name'"):
        parser.parse_args_and_config(["run", "--config", written(tmp_path, "steps: 2\nnam: beta\n")])
    with pytest.raises(SystemExit):
        parser.parse_args_and_config(["place", "--help"])
    assert "--folder text" in capsys.readouterr().out


def test_defaults_reach_commands_and_options_that_had_to_be_given() -> None:
    parser = TrlParser()
    commands = parser.add_subparsers(dest="command")
    for command in ("run", "again"):
        commands.add_parser(command, dataclass_types=[Run])
    assert parser.set_defaults_with_config(steps=2, name="beta", other=3) == ["--other", "3"]
    for command in ("run", "again"):
        (values,) = parser.parse_args_and_config([command, "--name", "gamma"])
        assert (values.command, values.steps, values.name) == (command, 2, "gamma")


def test_options_of_add_argument_come_back_in_a_namespace(tmp_path: Path) -> None:
    parser = TrlParser(Run)
    parser.add_argument("--extra", type=int, default=3)
    config = written(tmp_path, "steps: 1\nextra: 4\n")
    assert parser.parse_args_and_config(["--steps", "1"]) == (Run(1), argparse.Namespace(extra=3))
    assert parser.parse_args_and_config(["--config", config]) == (Run(1), argparse.Namespace(extra=4))


def test_configs_with_names_that_are_no_fields_come_back_alone(tmp_path: Path) -> None:
    argv = ["--output_dir", str(tmp_path), "--use_cpu", "--model_name_or_path", "m"]
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig))
    script, config, model, data = parser.parse_args_into_dataclasses(argv)
    assert isinstance(config, GRPOConfig)
    assert (script, model, data) == (ScriptArguments(), ModelConfig("m"), DatasetMixtureConfig())


def test_a_class_with_an_option_config_is_refused() -> None:
    @dataclasses.dataclass
    class Taken:
        config: str = ""

    with pytest.raises(ConfigError, match=r"Taken\.config: this option names the YAML file"):
        TrlParser(Taken)
