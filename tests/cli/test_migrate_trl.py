"""`prefrl migrate` of TRL's scripts, YAML files and commands: nothing changes in silence."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefrl.errors import ConfigError
from prefrl.registry import REGISTRY
from prefrl.scripts.main import main
from prefrl.scripts.migrate.edits import accepted, option_names_of
from prefrl.scripts.migrate.python import migrate_script
from prefrl.scripts.migrate.rows import DEFAULTS
from prefrl.scripts.migrate.trl import (
    NAMES,
    config_name_of,
    migrate_commands,
    migrate_trl_yaml,
    missing_defaults,
    steps_of,
)
from prefrl.scripts.schema import SchemaParser, options_of
from tests.parsers import parser_of
from tests.trl_defaults import NOT_COMPARED, defaults_of

ONLINE = "--gradient_checkpointing true --bf16 true --logging_nan_inf_filter true"
SFT = f"{ONLINE} --invalid_rows drop"
GRPO = f"--beta 0.0 --max_completion_length 512 --temperature 1.0 --max_prompt_length null {ONLINE}"
IMPORT = "from trl import DPOConfig, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer\n"

# Defaults that differ are written out.


def test_a_yaml_file_gets_the_defaults_of_trl(tmp_path: Path) -> None:
    result = migrate_trl_yaml("# a run\nbeta: 0.1\nreward_funcs: [accuracy_reward]\noutput_dir: o  # here", "grpo")
    assert result.text.startswith("# a run\nbeta: 0.1\nreward_funcs: [accuracy_reward]\noutput_dir: o  # here\n#")
    options = yaml.safe_load(result.text)
    assert (options["beta"], options["use_bias_correction_kl"]) == (0.1, True)
    assert (options["temperature"], options["max_completion_length"]) == (1.0, 512)
    assert migrate_trl_yaml(result.text, "grpo").text == result.text


def test_bf16_that_is_written_is_said_to_need_a_gpu() -> None:
    needs_gpu = [migrate_script(f"{IMPORT}x = SFTConfig({given})\n").changes[1][1] for given in ("", "use_cpu=True")]
    assert ["bf16 needs a GPU" in said for said in needs_gpu] == [True, False]


def test_options_of_features_that_are_off_are_not_written() -> None:
    off = missing_defaults("GRPOConfig", {"log_completions": False}).keys()
    on = missing_defaults("GRPOConfig", {"log_completions": True, "use_vllm": True}).keys()
    assert on - off == {"num_completions_to_print", "vllm_server_timeout", "vllm_mode"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reward_funcs: [accuracy_reward]\n", "they may be those of grpo, rloo, ppo, online_dpo"),
        ("packing: true\nreward_funcs: [accuracy_reward]\n", "no algorithm has all of them"),
        ("unheard: 1\n", "no options of TRL are in this file"),
        ("{beta: 0.1}\n", "must have an option in each line"),
    ],
)
def test_an_algorithm_that_cannot_be_told_is_asked_for(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        migrate_trl_yaml(text)


def test_options_of_one_algorithm_tell_it() -> None:
    assert yaml.safe_load(migrate_trl_yaml("desirable_weight: 2.0\n").text)["train_sampling_strategy"] == "sequential"


RUNS = {
    "grpo": {
        **{"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["accuracy_reward"], "output_dir": "o"},
        **{"learning_rate": 2e-6, "per_device_train_batch_size": 8, "num_generations": 4, "epsilon_high": 0.28},
        **{"warmup_ratio": 0.1, "loss_type": "dr_grpo", "log_completions": True, "use_vllm": True},
        **{"vllm_mode": "server", "vllm_gpu_memory_utilization": 0.3, "pad_to_multiple_of": 8, "use_peft": True},
    },
    "sft": {
        **{"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "packing": True, "padding_free": True},
        **{"max_seq_length": 2048, "assistant_only_loss": True, "gradient_accumulation_steps": 4, "fp16": True},
        **{"packing_strategy": "bfd_split", "loss_type": "chunked_nll", "eval_strategy": "steps", "eval_steps": 50},
    },
    "kto": {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "desirable_weight": 1.5},
}
OURS = {"warmup_ratio": "warmup_steps", "max_seq_length": "max_length", "chunked_nll": "nll"}


def yaml_options(command: str, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a migrated YAML file sets, and the defaults of prefrl."""
    result = migrate_trl_yaml(yaml.safe_dump(given), command)
    assert not result.open
    (folder / "run.yaml").write_text(result.text)
    return SchemaParser(command).read(["--config", str(folder / "run.yaml")])[0]


def shell_options(command: str, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same of a command."""
    words = [f"--{name} {json.dumps(value).strip('[]')}" for name, value in given.items()]
    result = migrate_commands(f"trl {command} {' '.join(words)}")
    assert not result.open
    return SchemaParser(command).read(shlex.split(result.text)[2:])[0]


def script_options(command: str, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same of a config in a script."""
    name = config_name_of(command)
    words = [f"{key}={value!r}" for key, value in given.items() if key in accepted(name) | NAMES.keys()]
    result = migrate_script(f"from trl import {name}\nx = {name}({', '.join(words)})\n")
    assert not result.open
    call = ast.parse(result.text).body[1].value  # type: ignore[attr-defined]
    made = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    return {option["name"]: option.get("default") for option in options_of(command)} | made


@pytest.mark.parametrize("migrated", [yaml_options, shell_options, script_options])
@pytest.mark.parametrize("command", RUNS)
def test_a_migrated_run_has_the_options_that_it_has_in_trl(command: str, migrated: Any, tmp_path: Path) -> None:
    given = RUNS[command]
    ours = migrated(command, given, tmp_path)
    theirs = {**defaults_of(config_name_of(command)), "bf16": "fp16" not in given}
    theirs |= {OURS.get(name, name): OURS.get(str(value), value) for name, value in given.items() if name in theirs}
    theirs |= {OURS[name]: value for name, value in given.items() if name in OURS}
    compared = ours.keys() & theirs.keys() - NOT_COMPARED
    assert {name: ours[name] for name in compared} == {name: theirs[name] for name in compared}


# Each option that prefrl refuses is changed or told.


def test_options_in_yaml() -> None:
    text = (
        "# a run\nmax_seq_length: 512  # tokens\nremove_unused_columns: true\npacking_strategy: bfd_split\n"
        "pad_to_multiple_of:\n  8\nlog_completions_hub_repo: x\nwarmup_ratio: 0.1\nunheard: 2\n"
        "evaluation_strategy: 'no'\n"
    )
    result = migrate_trl_yaml(text, "sft")
    assert result.text.startswith(
        "# a run\nmax_length: 512  # tokens\npacking_strategy: bfd_split\nlog_completions_hub_repo: x\n"
        "warmup_steps: 0.1\nunheard: 2\neval_strategy: 'no'\n# TRL's defaults"
    )
    assert [line for line, _ in result.open] == [7, 9]
    assert "unheard is no option of SFTConfig" in result.open[1][1]


def test_the_comment_of_the_next_option_stays_in_yaml() -> None:
    text = "transformers_continuous_batching_config:\n  a: 1\n\n# which seed\nseed: 1\n"
    assert migrate_trl_yaml(text, "grpo").text.startswith("\n# which seed\nseed: 1\n")


def test_an_option_that_most_runs_do_not_need_becomes_a_comment() -> None:
    yaml_file = migrate_trl_yaml("max_prompt_length:\n  512\nld_alpha: 0.5\n")
    reason = "max_prompt_length works differently here: use max_length, which bounds prompt and completion together"
    assert yaml_file.text.startswith(f"# to do: {reason}\n# max_prompt_length:\n#   512\nld_alpha: 0.5\n")
    shell = migrate_commands("cd x\nA=1 \\\n  trl dpo --beta 1 --max_prompt_length 512 \\\n  --seed 1\n")
    assert shell.text == (
        f"cd x\n# to do: --max_prompt_length 512 {reason.removeprefix('max_prompt_length ')}\n"
        f"A=1 \\\n  prefrl dpo \\\n  {SFT} --beta 1 \\\n  --seed 1\n"
    )
    script = migrate_script(f"{IMPORT}x = DPOConfig(beta=1,\n    max_prompt_length=n + 1,  # tokens\n    seed=1)\n")
    assert "x = DPOConfig(beta=1,\n    # to do: max_prompt_length=n + 1 works differently" in script.text
    assert "\n    seed=1,\n    gradient_checkpointing=True," in script.text
    assert [len(result.open) for result in (yaml_file, shell, script)] == [1, 1, 1]
    compile(script.text, "script", "exec")


@pytest.mark.parametrize(
    ("call", "start"),
    [
        ("SFTConfig(warmup_ratio=0.1)", "SFTConfig(warmup_steps=0.1, "),
        ("SFTConfig(warmup_ratio=r)", "SFTConfig(warmup_steps=r, "),
        ("SFTConfig(adafactor=True)", 'SFTConfig(optim="adafactor", '),
        ("SFTConfig(remove_unused_columns=True)", "SFTConfig(gradient"),
        (
            "GRPOConfig(use_vllm=True, vllm_mode='server', vllm_enable_sleep_mode=True)",
            "GRPOConfig(use_vllm=True, vllm_mode='server', beta=0.0, ",
        ),
        ("GRPOConfig(vllm_mode='colocate')", "GRPOConfig(vllm_mode='colocate', beta=0.0, "),
        (
            "GRPOConfig(loss_type='cispo', epsilon=0.2, epsilon_high=5.0)",
            "GRPOConfig(loss_type='cispo', epsilon=1.0, epsilon_high=4.0, ",
        ),
    ],
)
def test_keywords(call: str, start: str) -> None:
    result = migrate_script(f"{IMPORT}x = {call}\n")
    assert result.text.splitlines()[1].startswith(f"x = {start}")
    assert not result.open


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("SFTConfig(warmup_ratio=1.0)", "is warmup_steps here; 1.0 cannot be converted: only a fraction"),
        ("SFTConfig(adafactor=x)", "becomes here: optim='adafactor'"),
        ("SFTConfig(unheard=1)", "SFTConfig(unheard=...) is no option of SFTConfig"),
        (
            "GRPOConfig(use_vllm=True)",
            "use_vllm=...) with vllm_mode 'colocate', TRL's default: before the script, start",
        ),
        ("GRPOConfig(use_vllm=True, vllm_mode='colocate')", "start prefrl vllm-serve --enable_sleep_mode on the same"),
        ("GRPOConfig(use_vllm=x)", "start prefrl vllm-serve --enable_sleep_mode on the same GPU"),
        ("GRPOTrainer(rollout_func=f)", "GRPOTrainer(rollout_func=...): give an agent"),
        ("SFTTrainer(max_seq_length=3)", "SFTTrainer(max_seq_length=...): an option of SFTConfig"),
    ],
)
def test_what_is_left_to_do(call: str, words: str) -> None:
    ((line, said),) = migrate_script(f"{IMPORT}x = {call}\n").open
    assert line == 2
    assert words in said


def test_comments_stay_where_they_are() -> None:
    lines = ["x = SFTConfig(", "    seed=1,  # the seed", "    bf16=False  # as before", ")  # the end", ""]
    text = migrate_script(IMPORT + "\n".join(lines)).text
    assert "    bf16=False,  # as before\n    gradient_checkpointing=True,\n" in text
    assert text.endswith('    invalid_rows="drop",\n)  # the end\n')


# Commands.


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("trl sft --seed 1", f"prefrl sft {SFT} --seed 1"),
        ("A=1 trl grpo --seed 1 && ls", f"A=1 prefrl grpo {GRPO} --seed 1 && ls"),
        ("python -m trl sft", f"python -m prefrl.scripts.main sft {SFT}"),
        ("python -m trl.scripts.sft", f"python -m prefrl.scripts.main sft {SFT}"),
        ("python trl/scripts/sft.py", f"python -m prefrl.scripts.main sft {SFT}"),
        (
            "accelerate launch --num_processes 2 -m trl.scripts.grpo",
            f"accelerate launch --num_processes 2 -m prefrl.scripts.main grpo {GRPO}",
        ),
        ("accelerate launch x/trl/scripts/grpo.py", f"accelerate launch -m prefrl.scripts.main grpo {GRPO}"),
        ("trl sft --warmup_ratio 0.1 > log", f"prefrl sft {SFT} --warmup_steps 0.1 > log"),
        ("trl sft \\\n    --padding_free \\\n    --fp16 # 16 bits", None),
        ("trl vllm-serve --model m --vllm-model-impl vllm", "prefrl vllm-serve --model m --model-impl vllm"),
        ("trl env", "prefrl env"),
        ("pip install trl[peft,vllm]==1.16.0", "pip install prefrl[peft]"),
        ('pip install "trl>=1"', 'pip install "prefrl"'),
        (". envs/trl/bin/activate", ". envs/trl/bin/activate"),
        ("accelerate launch x.py --seed 1", "accelerate launch x.py --seed 1"),
    ],
)
def test_commands_of_shell_scripts(old: str, new: str | None) -> None:
    if new is None:
        new = f"prefrl sft \\\n    {SFT.replace(' --bf16 true', '')} \\\n    --fp16 # 16 bits"
    result = migrate_commands(f"{old}\n")
    assert result.text == f"{new}\n"
    assert not result.open
    assert migrate_commands(result.text).text == result.text


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bin/trl sft", "trl is still named here"),
        ("trl gold --x", "trl is still named here"),
        ("trl sft $ARGS", "options in variables were not looked at"),
        ("trl sft --config run.yaml --seed 1", "prefrl migrate run.yaml --algorithm sft writes TRL's defaults"),
        ("trl sft --unheard 1", "--unheard is no option of SFTConfig"),
        ("trl grpo --use_vllm $VLLM --seed 1", "--use_vllm without vllm_mode is 'colocate' in TRL: set vllm_mode"),
        ("accelerate launch x.py --padding_free", "--padding_free is not needed here"),
    ],
)
def test_commands_that_leave_something_to_do(command: str, words: str) -> None:
    ((line, said),) = migrate_commands(f"#!/bin/bash\n{command}\n").open
    assert line == 2
    assert words in said


def test_options_of_a_file_are_not_overridden_by_defaults() -> None:
    text = migrate_commands("trl sft --config run.yaml --seed 1\n").text
    assert text == "prefrl sft --config run.yaml --seed 1\n"


@pytest.mark.parametrize("config", DEFAULTS)
def test_the_written_defaults_are_taken(config: str, tmp_path: Path) -> None:
    written = missing_defaults(config, {})
    (tmp_path / "run.yaml").write_text(f"output_dir: {tmp_path}\nuse_cpu: true\n{yaml.safe_dump(written)}")
    row = next(row for row in REGISTRY.values() if row.config.endswith(f":{config}"))
    rewards = ["--reward_funcs", "accuracy_reward"] if "max_prompt_length" in written else []
    words = ["--config", str(tmp_path / "run.yaml"), "--model_name_or_path", "m", "--dataset_name", "d", *rewards]
    parsed = parser_of(row).parse_args_and_config(words)[1]
    assert {option: getattr(parsed, option) for option in written} == written


def test_no_default_is_written_for_an_option_that_is_given_by_its_name_in_trl() -> None:
    assert "max_completion_length" in missing_defaults("OnlineDPOConfig", {})
    given = {"max_new_tokens": 32, "max_length": 512}
    assert "max_completion_length" not in missing_defaults("OnlineDPOConfig", given)
    assert steps_of("OnlineDPOConfig", option_names_of("online_dpo"), given) == []


# The command.


@pytest.mark.parametrize("words", [["--in_place", "true"], ["--in_place"], ["--in-place=yes", "--source", "trl"]])
def test_options_may_come_before_files(words: list[str], tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text("from trl import SFTTrainer\n")
    assert main(["migrate", *words, str(script)]) == 0
    assert script.read_text() == "from prefrl import SFTTrainer\n"


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("trl sft --seed 1\n", 0, "written out"),
        ("ls\n", 0, "nothing to change"),
        ("bin/trl sft\n", 3, "to do: trl is still named"),
    ],
)
def test_the_exit_code_tells_whether_something_is_left(
    text: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.sh").write_text(text)
    assert main(["migrate", str(tmp_path / "a.sh"), "--diff"]) == code
    out = capsys.readouterr().out
    assert words in out
    assert (words == "nothing to change") == ("nothing to change" in out)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", f"x = {'-' * 20_000}1\n"),
        ("a.py", f"from trl import SFTConfig\nx = SFTConfig(seed={'-' * 3_000}1)\n"),
        ("a.py", f"x = a{'.b' * 20_000}\n"),
        ("a.yaml", f"beta: {'[' * 5_000}\n"),
        ("a.toml", f"a = {'[' * 5_000}\n"),
    ],
)
def test_deep_nesting_is_an_error(name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text(text)
    assert main(["migrate", str(tmp_path / name)]) == 2
    assert re.search("nested too deeply|at most 20 levels of nesting", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "algorithm", "words"),
    [("a.yaml", "gpro", "Did you mean 'grpo'"), ("a.py", "grpo", "only YAML files of TRL need it")],
)
def test_an_algorithm_that_is_none_or_not_needed(
    name: str, algorithm: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("beta: 0.1\n" if name == "a.yaml" else "import trl\n")
    assert main(["migrate", str(tmp_path / name), "--algorithm", algorithm]) == 2
    assert words in capsys.readouterr().err


def test_an_algorithm_may_be_named_beside_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("trl grpo\n")
    (tmp_path / "a.yaml").write_text("beta: 0.1\n")
    assert main(["migrate", str(tmp_path / "a.sh"), str(tmp_path / "a.yaml"), "--algorithm", "grpo"]) == 0


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"{IMPORT}from trl.rewards import accuracy_reward\nx = SFTConfig(beta=1)\n")
    (tmp_path / "a.sh").write_text("trl sft\n")
    (tmp_path / "a.yaml").write_text("ld_alpha: 1.0\n")
    program = (
        "import sys; from prefrl.scripts.main import main; main(['migrate', 'a.py', 'a.sh', 'a.yaml']);"
        "print({'torch', 'transformers', 'datasets', 'numpy'} & sys.modules.keys() or 'light')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.splitlines()[-1] == "light"
