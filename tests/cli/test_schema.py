"""The parser of the command, which reads its options from the schema."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

from prefrl.errors import ConfigError
from prefrl.options.algorithms import PRESETS
from prefrl.registry import REGISTRY
from prefrl.run.checkpoints import WRITER, seal
from prefrl.scripts.arguments.command import Given, reward_entries
from prefrl.scripts.inputs import check_files, read
from prefrl.scripts.main import OTHERS
from prefrl.scripts.parsing.argument_parser import ArgumentParser
from prefrl.scripts.schema import HUGGINGFACE_FILE, SchemaParser, options_of
from prefrl.trainer.configs import GRPOConfig

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


@pytest.mark.parametrize(("word", "meant"), [("False", "none"), ("True", "group"), ("batch", "batch")])
def test_a_switch_among_the_choices_is_read_as_in_python(word: str, meant: str, tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--scale_rewards"]
    for spelling in dict.fromkeys((word, word.lower())):
        for given in (parse(tmp_path, "", words[-1], spelling), parse(tmp_path, f"scale_rewards: {spelling}\n")):
            assert SchemaParser("grpo").check(given).scale_rewards == meant
        assert ArgumentParser(GRPOConfig).parse_args_and_config([*words, spelling])[0].scale_rewards == meant
    assert HfArgumentParser(GRPOConfig).parse_args_into_dataclasses([*words, word])[0].scale_rewards == meant


# What a reader of a help text would stop at: "None: no limit", "auto: that of the files", "Of the model".
NO_SENTENCE = re.compile(r"\b(None|True|False|-?\d+(\.\d+)?): |(^|[.;] )'?[a-z_0-9]+'?: |(^|\. )Of ")


def test_help_is_written_in_sentences() -> None:
    others = json.loads(HUGGINGFACE_FILE.read_text(encoding="utf-8"))["options"]
    foreign = {option["name"] for option in others if "help" in option}
    helps = {
        (option["name"], option["help"])
        for name in REGISTRY
        for option in options_of(name)
        if option.get("help") and option["name"] not in foreign
    }
    for listed in OTHERS.values():
        module, _, function = listed.module.partition(":")
        command = getattr(importlib.import_module(f"prefrl.scripts.{module}"), function or "main")
        fields = [field for cls in getattr(command, "options", ()) for field in dataclasses.fields(cls)]
        helps |= {(field.name, field.metadata["help"]) for field in fields if "help" in field.metadata}
    assert len(helps) > 300
    for name, text in sorted(helps):
        assert not NO_SENTENCE.search(text), (name, text)
        assert text[0] in "'{" or text[0].isupper(), (name, text)
        assert text.endswith((".", ")")), (name, text)


@pytest.mark.parametrize("null", ["null", "None"])
def test_null_on_the_command_line_unsets_an_option_of_the_file(tmp_path: Path, null: str) -> None:
    given = parse(tmp_path, f"top_k: 5\nfreeze: [a]\nmax_prompt_length: {null}\n", "--top_k", null, "--freeze", null)
    assert [given.values[name] for name in ("top_k", "freeze", "max_prompt_length")] == [None, None, None]
    with pytest.raises(ConfigError, match=f"seed='{null}': must be a whole number"):
        parse(tmp_path, "", "--seed", null)


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
    given = parse(tmp_path, text, "--log_completions", "false", "--num_completions_to_print", "2")
    assert given.values["num_completions_to_print"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_generation: 4", "run.yaml:4: unknown option 'num_generation'. Did you mean 'num_generations'"),
        ("max_seq_length: 9", "run.yaml:4: unknown option 'max_seq_length'"),
        ("base_model: m", "run.yaml:4: unknown option 'base_model'. 'base_model', an option of axolotl,"),
        ("packing: true", "run.yaml:4: unknown option .packing.. It is an option of sft"),
        ("seed: x", "run.yaml:4: seed='x': must be a whole number"),
        ("dtype: int8", "run.yaml:4: dtype='int8': must be one of auto, bfloat16"),
        ("temperature: -1", r"run.yaml:4: temperature=-1.0: must be a number >= 0.001"),
        ("preset: dapoo", "run.yaml:4: preset='dapoo': must be one of deepseekmath"),
        ("lora_r: 4", "run.yaml:4: lora_r=4 has no effect because use_peft=False"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path, text)


# Values of options whose defaults cannot be changed by arithmetic.
OTHER_VALUES = {
    "vllm_kwargs": {"sync_timeout": 1.0},
    "vllm_importance_sampling_kwargs": {"clip_max": 3.0},
    "liger_kernel_config": {"rope": True},
    "activation_checkpointing_kwargs": {"use_reentrant": True},
    "vllm_server_base_url": ["http://h:1"],
    "vllm_server_host": "h",
    "vllm_guided_decoding_regex": "a",
    "vllm_importance_sampling_mode": "token_mask",
    "weight_sync": "shm",
    "generation_mode": "async",
}


def other_value(option: dict[str, Any]) -> Any:
    if option["name"] in OTHER_VALUES:
        return OTHER_VALUES[option["name"]]
    default = option.get("default", False)
    if isinstance(default, bool):
        return not default if option["kind"] == "bool" else 3
    return default + 1 if option["kind"] == "int" else default / 2


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_options_of_a_switch_are_refused_without_it_by_the_configs_too(name: str, tmp_path: Path) -> None:
    config_class = REGISTRY[name].load_config()
    known = {field.name for field in dataclasses.fields(config_class)}
    by_name = {option["name"]: option for option in options_of(name)}
    for option in sorted(known - {"vllm_mode"}):  # its other value is TRL's default, which scripts write out
        for switch in set(by_name[option].get("needs", ())) & known:
            values = {"strict_options": True, switch: False, option: other_value(by_name[option])}
            with pytest.raises(ConfigError, match=rf"{option}=.* has no effect because"):
                config_class(output_dir=str(tmp_path), use_cpu=True, **values)


def test_a_preset_is_an_option_of_the_command(tmp_path: Path) -> None:
    given = parse(tmp_path, "preset: dapo\nper_device_train_batch_size: 16\n")
    assert given.values["preset"] == "dapo"
    assert GRPOConfig.preset(
        "dapo", output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=16
    ).dynamic_sampling


def test_defaults_are_those_of_the_config(tmp_path: Path) -> None:
    values = SchemaParser("grpo").read(["--model_name_or_path", "m"])[0]
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    for name in ("num_generations", "temperature", "use_vllm", "vllm_server_port", "seed"):
        assert values[name] == getattr(config, name)


def test_the_suggestion_for_a_typo_of_one_edit_is_nearly_always_right() -> None:
    parser = SchemaParser("grpo")
    names = [option["name"] for option in options_of("grpo")]
    known = {f"--{name}" for name in names}
    is_right = []
    for place, name in enumerate(names[::8]):
        i = place % len(name)
        swapped = name[:i] + name[i + 1 : i + 2] + name[i : i + 1] + name[i + 2 :]
        for typo in {name[:i] + name[i + 1 :], f"{name[:i]}x{name[i:]}", f"{name[:i]}x{name[i + 1 :]}", swapped}:
            if typo not in names:
                is_right.append(parser.remedy(f"--{typo}", known) == f"Did you mean '--{name}'?")
    assert len(is_right) > 120
    assert sum(is_right) / len(is_right) >= 0.95


def test_rewards_of_a_file_may_be_mappings(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model_name_or_path: m\ndataset_name: d\nreward_funcs:\n  - numeric_reward\n"
        "  - {name: length_reward, target_len: 8}\n",
        encoding="utf-8",
    )
    given = read(REGISTRY["grpo"], [str(path)])
    assert reward_entries(given.values["reward_funcs"]) == ["numeric_reward", "length_reward(target_len=8)"]


def test_a_mistake_within_a_list_is_told_with_its_own_line(tmp_path: Path) -> None:
    text = "datasets:\n  - path: a.jsonl\n  - path: b.jsonl\n    prompt_template: '{'\n"
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: m\n" + text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run.yaml:5: datasets\[1\].prompt_template='{': cannot be read"):
        read(REGISTRY["sft"], [str(path)])
    path.write_text(REQUIRED.replace("[numeric", "\n- a\n- 3\n#"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run.yaml:5: reward_funcs\[1\]=3: must be a name, or a mapping"):
        read(REGISTRY["grpo"], [str(path)])


def test_a_checkpoint_that_cannot_be_resumed_from_is_told_with_its_line(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    line = f"resume_from_checkpoint: {folder}\n"
    with pytest.raises(ConfigError, match=r"run.yaml:4: resume_from_checkpoint='.*-1': there is no such folder"):
        check_files(parse(tmp_path, line))
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"run.yaml:4: resume_from_checkpoint='.*-1' has no written_by.json"):
        check_files(parse(tmp_path, line))
    (folder / WRITER).write_text("{}")
    with pytest.raises(ConfigError, match=r"run.yaml:4: .*manifest.json is missing or damaged"):
        check_files(parse(tmp_path, line))
    seal(folder, run="r", step=1, resumable=True)
    check_files(parse(tmp_path, line))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"run.yaml:4: .*model.safetensors has 0 bytes instead of 7"):
        check_files(parse(tmp_path, line))


@pytest.mark.parametrize("value", ["true", "auto", "disable", "s3://bucket/run"])
def test_words_and_places_elsewhere_are_no_folders_to_resume_from(value: str, tmp_path: Path) -> None:
    check_files(parse(tmp_path, f"resume_from_checkpoint: {value}\n"))


def test_only_the_first_of_several_machines_has_to_see_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    check_files(parse(tmp_path, f"resume_from_checkpoint: {tmp_path / 'none'}\n"))


def test_a_missing_file_of_rewards_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    text = REQUIRED.replace("[numeric_reward]", f"\n  - numeric_reward\n  - {tmp_path}/mine.py:f(scale=2)")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run.yaml:5: reward_funcs\[1\]='.*': there is no file '.*/mine.py'"):
        check_files(read(REGISTRY["grpo"], [str(path)]))
    (tmp_path / "mine.py").write_text("raise ValueError('is not run')")
    check_files(read(REGISTRY["grpo"], [str(path)]))


def test_rewards_of_evaluations_have_weights_and_files_of_their_own(tmp_path: Path) -> None:
    given = parse(tmp_path, "", "--eval_reward_funcs", "numeric_reward=2", "b.py:f")
    assert given.values["eval_reward_funcs"] == ["numeric_reward", "b.py:f"]
    assert given.values["eval_reward_weights"] == [2.0, 1.0]
    with pytest.raises(ConfigError, match=r"^eval_reward_funcs\[1\]='b.py:f': there is no file 'b.py'"):
        check_files(given)
    with pytest.raises(ConfigError, match=r"^eval_reward_weights=\[1.0\]: eval_reward_funcs already gives weights"):
        parse(tmp_path, "eval_reward_funcs: {numeric_reward: 2}\neval_reward_weights: [1.0]\n")


SERVER = {"use_vllm": True}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"upload_to": "~/runs/${trainer.experiment_name}"}),
    ("sft", {"adam_beta1": 1.0}),
    ("sft", {"max_steps": -2}),
    ("sft", {"optim": "adamw_torc"}),
    ("sft", {"lr_scheduler_type": "cosin"}),
    ("sft", {"early_stopping_kwargs": {"threshold": 0.1}}),
    ("sft", {"on_spike": "rollback", "spike_kwargs": {"treshold": 1.0}}),
    ("dpo", {"loss_type": ["hinge"], "label_smoothing": 0.1}),
    ("grpo", {"loss_kwargs": {"rho": 4.0}}),
    ("grpo", {"loss_type": "aipo", "loss_kwargs": {"rho": 0.5}}),
    ("grpo", {"loss_kwargs": {"temperature_pos": 1.0}}),
    ("grpo", {"beta": 0.0, "kl_kwargs": {"target": 0.1}}),
    ("ppo", {"critic_optim_kwargs": {"lr": 1.0}}),
    # Hyperparameters and options.
    ("grpo", {"reward_balance": "nash", "reward_shaping_kwargs": {"normalize": True}}),
    ("grpo", {"generation_mode": "overlap", "loss_kwargs": {"positive_nll_coef": 0.1}, **SERVER}),
    ("grpo", {"chat_template_kwargs": "{a"}),
    # Optimizers and schedules.
    ("sft", {"optim": "lbfgs"}),
    ("sft", {"optim": "adam", "optim_args": "amsgrad"}),
    ("sft", {"learning_rates": {"(": 1.0}}),
    ("sft", {"reduce_on_plateau_kwargs": {"patience": 2}}),
]


def check(name: str, options: dict[str, Any]) -> Any:
    return SchemaParser(name).check(Given(options, places={}))


@pytest.mark.parametrize(("name", "options"), REFUSED, ids=lambda value: json.dumps(value).replace('"', ""))
def test_the_command_refuses_what_the_config_refuses_in_the_same_words(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as by_config:
        REGISTRY[name].load_config()(output_dir=str(tmp_path), use_cpu=True, strict_options=True, **options)
    with pytest.raises(ConfigError) as by_command:
        check(name, {"use_cpu": True, "strict_options": True, **options})
    assert str(by_command.value) == str(by_config.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("output_dir", "checkpoints/${trainer.project_name}"),
        ("model_name_or_path", "${oc.env:HOME}/model"),
        ("dataset_name", "${data"),
        ("reward_model_name_or_path", "models/${name}"),
        ("datasets", ['{"path": "json", "data_files": {"train": "${data}/a.json"}}']),
    ],
)
def test_a_path_with_a_reference_is_refused(option: str, value: Any) -> None:
    options: dict[str, Any] = {"model_name_or_path": "m", "output_dir": "o", "reward_funcs": "format_reward"}
    options |= {"dataset_name": "d"} if option != "datasets" else {}
    words = [word for name, given in (options | {option: value}).items() for word in (f"--{name}", given)]
    argv = [part for word in words for part in (word if isinstance(word, list) else [word])]
    with pytest.raises(ConfigError, match=rf"^{option}.*the reference \$\{{.* is not replaced .* Write out the path"):
        read(REGISTRY["grpo"], argv)


@pytest.mark.parametrize("name", REGISTRY)
def test_defaults_exclude_nothing(name: str) -> None:
    check(name, {})


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_exclude_nothing(preset: str) -> None:
    check("grpo", {"preset": preset})


def test_a_warmup_that_is_counted_in_evaluations_is_one() -> None:
    options = {"warmup_evaluations": 2, "eval_strategy": "steps", "eval_steps": 3, "warmup_start_factor": 0.5}
    assert check("sft", options).warmup_steps == 6


def test_what_a_gpu_can_do_is_not_refused_before_the_device_is_known() -> None:
    check("sft", {"activation_offloading": True, "fp16": True, "use_liger_kernel": True})


def test_own_options_take_precedence_over_a_preset() -> None:
    config = check("grpo", {"preset": "pods", "selection_kwargs": {}, "num_generations": 8})
    assert (config.num_generations, config.selection_kwargs) == (8, {"num_selected": 4})
    with pytest.raises(ConfigError, match=r"vespo_k_pos=2.0 and loss_kwargs=.*: given both ways"):
        check("grpo", {"vespo_k_pos": 2.0, "loss_kwargs": {"k_pos": 4.0}, "loss_type": "vespo"})


def test_every_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be a multiple of num_generations=16"):
        check("grpo", {"num_generations": 16})
    monkeypatch.setenv("WORLD_SIZE", "2")
    check("grpo", {"num_generations": 16})


def test_sizes_are_left_to_the_processes_that_train() -> None:
    words = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "r", "--num_generations", "16"]
    with pytest.raises(ConfigError, match="must be a multiple of num_generations=16"):
        read(REGISTRY["grpo"], words)
    read(REGISTRY["grpo"], [*words, "--num_processes", "2"])
    read(REGISTRY["grpo"], words, is_launched=True)
