"""`prefrl migrate`: scripts and configs of TRL, verl and cosmos-rl become those of prefrl, and run."""

from __future__ import annotations

import ast
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset

from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.datasets import DatasetConfig, load_part
from prefrl.scripts.main import main
from prefrl.scripts.migrate.cosmos_rl import migrate_cosmos_rl
from prefrl.scripts.migrate.python import migrate_script
from prefrl.scripts.migrate.verl import migrate_verl
from tests.parsers import parser_of

DATA = Path(__file__).parents[1] / "data" / "migrate"


def migrated(name: str) -> Any:
    """A script of the folder of data, which becomes the one beside it and then stays as it is."""
    before, after = ((DATA / f"{name}{suffix}.py.txt").read_text(encoding="utf-8") for suffix in ("", "_after"))
    result = migrate_script(before)
    assert result.text == after == migrate_script(after).text
    return result


def test_a_script_is_migrated_keeps_its_looks_and_runs(workspace: Path, model_folder: Path) -> None:
    result = migrated("script")
    assert not result.open
    assert (23, "GRPOConfig(cast_lm_head_to_fp32=...) is not needed here: ") in [
        (line, text[:57]) for line, text in result.changes
    ]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(result.text.replace("MODEL", str(model_folder)), "migrated", "exec"), names)
    assert names["STEPS"] == 1


IMPORT = "from trl import CPOConfig, GRPOConfig, KTOConfig, RewardTrainer, SFTConfig, SFTTrainer\n"
ONLINE = "gradient_checkpointing=True, bf16=True, logging_nan_inf_filter=True"
LOGS = 'logging_nan_inf_filter=True, invalid_rows="drop"'
EVERY = f"gradient_checkpointing=True, bf16=True, {LOGS}"
CALLS = [
    pytest.param("SFTConfig()", f"SFTConfig({EVERY})", id="nothing given"),
    pytest.param("SFTConfig(fp16=True)", f"SFTConfig(fp16=True, gradient_checkpointing=True, {LOGS})", id="fp16"),
    pytest.param("SFTConfig(fp16=False)", f"SFTConfig(fp16=False, {EVERY})", id="no fp16"),
    pytest.param("SFTConfig(max_seq_length=n)", f"SFTConfig(max_length=n, {EVERY})", id="renamed, not a literal"),
    pytest.param("SFTConfig(padding_free=True)", f"SFTConfig({EVERY})", id="the only keyword is removed"),
    pytest.param("SFTConfig(seed=1, padding_free=True)", f"SFTConfig(seed=1, {EVERY})", id="the last one is removed"),
    pytest.param("SFTConfig(seed=1, padding_free=1, pad_to_multiple_of=8)", f"SFTConfig(seed=1, {EVERY})", id="two"),
    pytest.param(
        "SFTConfig(\n    seed=1, padding_free=1,  # a\n    pad_to_multiple_of=8)",
        f"SFTConfig(\n    seed=1,\n    {EVERY.replace(', ', f',{chr(10)}    ')},   # a\n    )",
        id="two of two lines",
    ),
    pytest.param("SFTConfig(padding_free=True, seed=1)", f"SFTConfig(seed=1, {EVERY})", id="the first one is removed"),
    pytest.param('SFTConfig(loss_type="chunked_nll")', f'SFTConfig(loss_type="nll", {EVERY})', id="value"),
    pytest.param(
        'GRPOConfig(loss_type="cispo", epsilon_high=5.0, beta=0.1, temperature=1, max_prompt_length=9)',
        'GRPOConfig(loss_type="cispo", epsilon=1.0, epsilon_high=4.0, beta=0.1, temperature=1, max_prompt_length=9, '
        f"max_completion_length=512, {ONLINE}, use_bias_correction_kl=True)",
        id="cispo",
    ),
    pytest.param(
        "KTOConfig(bf16=False)",
        f'KTOConfig(bf16=False, train_sampling_strategy="sequential", gradient_checkpointing=True, {LOGS})',
        id="kto",
    ),
    pytest.param("training_args.max_seq_length", "training_args.max_length", id="attribute"),
    pytest.param("SFTTrainer(m, tokenizer=t)", "SFTTrainer(m, processing_class=t)", id="argument"),
]


@pytest.mark.parametrize(("call", "expected"), CALLS)
def test_calls(call: str, expected: str) -> None:
    result = migrate_script(f"{IMPORT}x = {call}\n")
    assert result.text == f"{IMPORT.replace('trl', 'prefrl')}x = {expected}\n"
    assert not result.open
    ast.parse(result.text)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "GMPOTrainer(m, f, GMPOConfig(seed=1))",
            'GRPOTrainer(m, f, GRPOConfig(seed=1, loss_type="gmpo", epsilon=0.4, ',
        ),
        ("GMPOConfig(epsilon=0.3)", 'GRPOConfig(epsilon=0.3, loss_type="gmpo", beta=0.0, '),
        ("TrlParser(GMPOConfig)", 'TrlParser(GRPOConfig)\nx.set_defaults(\n    loss_type="gmpo",\n    epsilon=0.4,\n'),
    ],
)
def test_gmpo_is_grpo_with_its_loss_and_bounds(call: str, expected: str) -> None:
    names = "GMPOConfig, GMPOTrainer, TrlParser"
    result = migrate_script(f"from trl.experimental.gmpo import {names}\nx = {call}\n")
    assert result.text.startswith(f"from prefrl import {names.replace('GMPO', 'GRPO')}\nx = {expected}")
    assert not result.open
    ast.parse(result.text)


def test_gkd_is_distillation_with_its_defaults() -> None:
    script = (
        "from trl.experimental.gkd import GKDConfig, GKDTrainer\n"
        "GKDTrainer(m, t, GKDConfig(lmbda=1.0, max_new_tokens=64, seq_kd=False))\n"
    )
    result = migrate_script(script)
    assert result.text.startswith(
        "from prefrl import DistillationConfig, DistillationTrainer\n"
        "DistillationTrainer(m, t, DistillationConfig(lmbda=1.0, max_completion_length=64, beta=0.5, temperature=0.9, "
        "learning_rate=2e-05, disable_dropout=True, "
    )
    ((line, said),) = result.open
    assert (line, said[:82]) == (
        1,
        "GKDConfig is DistillationConfig here: rows have the columns prompt and completion ",
    )
    ((_, said),) = migrate_script(script.replace("seq_kd=False", "seq_kd=True")).open[1:]
    assert said.startswith("DistillationConfig(seq_kd=...) becomes here: nothing if it is off; otherwise, put compl")
    assert said.endswith("True cannot be converted: it is on")


def test_self_distillation_has_its_teacher_and_its_lengths() -> None:
    options = (
        'distillation_mode="full_logits", teacher_model_kind="base", teacher_update_rate=0.1, distillation_alpha=1.0'
    )
    script = f"from trl.experimental.sdft import SDFTConfig\nSDFTConfig({options})\n"
    result = migrate_script(script)
    expected = 'DistillationConfig(teacher_weights="frozen", teacher_update_rate=0.1, beta=1.0, num_generations=8, '
    assert expected + "max_completion_length=256, max_prompt_length=512, " in result.text  # not TRL's of distillation
    ((_, said),) = result.open
    assert said.startswith("SDFTConfig is DistillationConfig here: set teacher_prompt to a function that puts")
    assert len(migrate_script(script.replace("full_logits", "topk_logits")).open) == 2


OPEN = [
    pytest.param("SFTConfig(is_encoder_decoder=True, **MORE)", "SFTConfig(is_encoder_decoder=...) has no", id="none"),
    pytest.param(
        "GRPOConfig(generation_kwargs=k, **MORE)", "GRPOConfig(generation_kwargs=...) becomes", id="a variable"
    ),
    pytest.param(
        "GRPOConfig(generation_kwargs={'do_sample': 1}, **MORE)", "(generation_kwargs=...) becomes", id="a key"
    ),
    pytest.param("SFTConfig(max_seq_length=1, max_length=2, **MORE)", "SFTConfig(max_seq_length=...) is", id="both"),
    pytest.param("SFTTrainer(m, model_init=f)", "SFTTrainer(model_init=...): load the model", id="an argument"),
    pytest.param("training_args.is_encoder_decoder", "training_args.is_encoder_decoder has no", id="an attribute"),
]


@pytest.mark.parametrize(("call", "words"), OPEN)
def test_what_has_no_counterpart_stays_and_is_told(call: str, words: str) -> None:
    result = migrate_script(f"{IMPORT}x = {call}\n")
    assert result.text == f"{IMPORT.replace('trl', 'prefrl')}x = {call}\n"
    assert words in result.open[0][1]
    assert result.open[0][0] == 2


def test_a_script_that_parses_its_options_is_migrated_and_runs(
    workspace: Path, model_folder: Path, reward_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = migrated("parsed_script")
    assert [(line, said.split()[0]) for line, said in result.open] == [(1, "--num_mini_batches")]
    words = f"--model_name_or_path {model_folder} --reward_model_path {reward_folder} --output_dir out --use_cpu"
    more = "--missing_eos_penalty 1 --max_completion_length 2 --max_steps 1 --per_device_train_batch_size 2"
    monkeypatch.setattr(sys, "argv", ["ppo.py", *words.split(), *more.split()])
    # Where a script runs, its module is there: dataclasses look for it.
    monkeypatch.setitem(sys.modules, "__main__", module := types.ModuleType("__main__"))
    exec(compile(result.text, "migrated", "exec"), module.__dict__)
    assert module.STEPS == 1
    args = module.training_args
    assert (args.temperature, args.max_completion_length, args.learning_rate, args.bf16) == (0.7, 2, 3e-6, True)


def test_a_parser_alone_is_replaced_and_a_block_keeps_a_statement() -> None:
    script = (
        "from transformers import HfArgumentParser\nfrom trl import BCOConfig, BCOTrainer\n"
        "(args,) = HfArgumentParser(BCOConfig).parse_args_into_dataclasses()\nif args:\n    t.generate_completions()\n"
    )
    assert migrate_script(script).text == (
        "from prefrl import ArgumentParser\nfrom prefrl import BCOConfig, BCOTrainer\n"
        "(args,) = ArgumentParser(BCOConfig).parse_args_into_dataclasses()\nif args:\n    pass\n"
    )


def test_defaults_of_a_parser_without_a_name_are_told() -> None:
    lines = ["from trl import SFTConfig, TrlParser", "a, b = TrlParser((SFTConfig, C)).parse_args_and_config()", ""]
    result = migrate_script("\n".join(lines))
    assert result.text.splitlines()[1:] == lines[1:2]
    assert "SFTConfig is parsed from options, and some defaults differ" in result.open[0][1]
    lines[1] = "x = 1\np = TrlParser(SFTConfig)  # kept"
    migrated = migrate_script("\n".join(lines)).text
    assert migrated.endswith(f"SFTConfig)\np.set_defaults({EVERY})  # kept\n")


def test_a_namesake_stays_imported_from_trl() -> None:
    script = "from trl.experimental.bema_for_ref_model import DPOTrainer\n"
    result = migrate_script(script)
    assert result.text == script
    assert [line for line, _ in result.open] == [1]


def test_imports_of_what_is_not_there_stay() -> None:
    script = 'import trl\nfrom trl import SFTTrainer, WinRateCallback\nx = trl.SFTTrainer\n# "trl"\n'
    result = migrate_script(script)
    assert result.text == (
        "import prefrl\nfrom prefrl import SFTTrainer\nfrom trl import WinRateCallback\n"
        'x = prefrl.SFTTrainer\n# "trl"\n'
    )
    assert [line for line, _ in result.open] == [2]


def test_a_script_without_trl_stays() -> None:
    script = "from other import SFTConfig\nx = SFTConfig(padding_free=True)  # trl sft --padding_free\n"
    assert migrate_script(script).text == script


VERL = (DATA / "verl_ppo.sh").read_text(encoding="utf-8")


def parsed(text: str, tmp_path: Path, command: str) -> Any:
    """The config that `prefrl` makes of a file."""
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    argv = ["--config", str(tmp_path / "run.yaml"), "--output_dir", str(tmp_path), "--use_cpu"]
    return parser_of(REGISTRY[command]).parse_args_and_config(argv)


@pytest.mark.parametrize(
    ("estimator", "command"),
    [
        ("grpo", "grpo"),
        ("gae", "ppo"),
        ("rloo", "rloo"),
        ("reinforce_plus_plus", "reinforce_plus_plus"),
        ("opo", "grpo"),
    ],
)
def test_a_verl_run_means_the_same_here(estimator: str, command: str, tmp_path: Path) -> None:
    result = migrate_verl(VERL.format(estimator=estimator, kl=True), is_command=True)
    assert result.text.startswith(f"# prefrl {command} --config FILE\n")
    assert "\nnum_processes: 2\n" in result.text
    script, config, _ = parsed(result.text, tmp_path, command)
    assert (script.dataset_name, script.lora_r, script.use_peft) == ("/data/gsm8k/train.parquet", 8, True)
    assert script.reward_model_name_or_path == "org/reward"
    assert (config.learning_rate, config.truncation_mode, config.max_completion_length) == (3e-6, "keep_end", 128)
    assert (config.epsilon, config.epsilon_high, config.delta) == (0.2, 0.28, 3.0)
    assert (config.beta, config.kl_estimator, config.kl_in) == (0.002, "k3", "loss")
    # 64 prompts with 4 completions, 2 steps of 128 on 2 processes, 8 completions at a time.
    assert (config.num_generations, config.per_device_train_batch_size) == (4, 8)
    assert (config.steps_per_generation, config.gradient_accumulation_steps) == (16, 8)
    assert config.report_to == ["wandb"]
    assert "temperature_eval" not in yaml.safe_load(result.text)  # there is no evaluation
    assert not result.open


def test_a_kl_term_of_verl_that_is_off_is_off_here(tmp_path: Path) -> None:
    off = migrate_verl(VERL.format(estimator="grpo", kl=False), is_command=True)
    assert parsed(off.text, tmp_path, "grpo")[1].beta == 0
    adaptive = "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.01\n"
    text = VERL.format(estimator="gae", kl=False).replace("$@\n", adaptive)
    config = parsed(migrate_verl(text, is_command=True).text, tmp_path, "ppo")[1]
    assert (config.beta, config.kl_estimator, config.kl_in) == (0.01, "k1", "reward")
    assert config.kl_kwargs == {"target": 0.1, "horizon": 10000}


@pytest.mark.parametrize(
    ("words", "budget"),
    [
        ("use_dynamic_bsz=True", 16384),
        ("ppo_max_token_len_per_gpu=5000 actor_rollout_ref.actor.use_dynamic_bsz=True", 5000),
        ("ppo_max_token_len_per_gpu=5000", None),
    ],
)
def test_a_budget_of_verl_counts_only_with_its_switch(words: str, budget: int | None, tmp_path: Path) -> None:
    text = VERL.format(estimator="grpo", kl=False).replace("$@", f"actor_rollout_ref.actor.{words}")
    config = parsed(migrate_verl(text, is_command=True).text, tmp_path, "grpo")[1]
    assert config.max_tokens_per_micro_batch == budget


def test_variables_of_a_script_are_put_in_and_others_are_told(tmp_path: Path) -> None:
    text = (
        "LENGTH=$((16 * 4))\nexport MODEL='org/model'\necho 'it\nis'\npython -m verl.trainer.main_ppo "
        "algorithm.adv_estimator=grpo data.max_response_length=${LENGTH} actor_rollout_ref.model.path=$MODEL "
        "data.train_files=$HOME/a.parquet trainer.nnodes=$N trainer.n_gpus_per_node=${GPUS:-1} +trainer.seed=3\n"
    )
    result = migrate_verl(text, is_command=True)
    options = yaml.safe_load(result.text)
    assert (options["max_completion_length"], options["model_name_or_path"], options["seed"]) == (64, "org/model", 3)
    assert result.text.startswith("# prefrl grpo --config FILE\n")  # on one process
    assert [said for line, said in result.open if line == 5] == [
        "data.train_files='$HOME/a.parquet': write out the value, which is not in this file",
        "trainer.nnodes='$N': write out the value, which is not in this file",
    ]


def test_yaml_of_verl_and_what_it_leaves_open(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref:\n  actor:\n    policy_loss:\n      loss_mode: clip_cov\n      clip_cov_lb: 0.5\n"
        "    fsdp_config:\n      param_offload: true\n  rollout:\n    n: 2\n    engine: x\n  model:\n    path: m\n"
        "trainer:\n  n_gpus_per_node: 1\ndata:\n  train_batch_size: 8\n  prompt_key: question\n"
        "custom_reward_function:\n  path: my/rewards.py\n  name: score\nalgorithm:\n  adv_estimator: grpo\n"
    )
    result = migrate_verl(text, is_command=False)
    (tmp_path / "data.jsonl").touch()
    script, config, _ = parsed(f"dataset_name: {tmp_path}/data.jsonl\n{result.text}", tmp_path, "grpo")
    assert (config.loss_type, config.loss_kwargs, config.delta) == ("clip_cov", {"lb": 0.5}, None)
    assert [line for line, _ in result.open] == [7, 10]
    assert yaml.safe_load(result.text)["reward_funcs"] == ["my/rewards.py:score"]
    assert script.columns == {"prompt": "question"}


def test_files_of_verl_are_splits_of_a_dataset(tmp_path: Path) -> None:
    for name, prompts in (("a", ["1"]), ("b", ["2", "3"]), ("c", ["4", "5", "6"])):
        Dataset.from_dict({"question": prompts}).to_parquet(tmp_path / f"{name}.parquet")
    a, b, c = (f"{tmp_path}/{name}.parquet" for name in "abc")
    text = f"data:\n  train_files: [{a}, {b}]\n  val_files: {c}\n  prompt_key: question\n"
    result = migrate_verl(text, is_command=False)
    (entry,) = yaml.safe_load(result.text)["datasets"]
    found = {split: load_part(DatasetConfig(**entry, split=split), streaming=False) for split in ("train", "test")}
    assert [rows["prompt"][:] for rows in found.values()] == [["1", "2", "3"], ["4", "5", "6"]]
    assert "files" not in str(result.open)
    mixed = migrate_verl(f"data:\n  train_files: {a}\n  val_files: c.jsonl\n", is_command=False)
    assert "files of several formats" in mixed.text


def test_checkpoints_of_verl(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref:\n  model:\n    path: m\n  actor:\n    checkpoint:\n"
        "      save_contents: [model, extra, hf_model]\n"
        "      load_contents: [model, extra]\n      async_save: true\n"
        "trainer:\n  save_freq: 5\n"
        "  resume_mode: auto\n  default_hdfs_dir: memory://a/b\n  remove_previous_ckpt_in_save: true\n"
        "  n_gpus_per_node: 1\ncustom_reward_function:\n  path: rewards.py\n  name: mine\n"
    )
    result = migrate_verl(text, is_command=False)
    assert yaml.safe_load(result.text)["reward_funcs"] == ["rewards.py:mine"]
    (tmp_path / "data.jsonl").touch()
    config = parsed(f"dataset_name: {tmp_path}/data.jsonl\n{result.text}", tmp_path, "ppo")[1]
    assert config.checkpoint_kwargs == {"save_optimizer": False, "load_optimizer": False}
    assert (config.resume_from_checkpoint, config.upload_to) == ("auto", "memory://a/b")
    assert (config.save_in_background, config.save_total_limit) == (True, 1)
    assert not result.open


@pytest.mark.parametrize(
    ("contents", "options"),
    [
        (["model", "optimizer", "extra"], {}),
        (["model"], {"save_only_model": True}),
        (["optimizer", "extra"], None),
    ],
)
def test_what_checkpoints_of_verl_hold(contents: list[str], options: dict[str, Any] | None) -> None:
    key = "actor_rollout_ref.actor.checkpoint.save_contents"
    result = migrate_verl(f"{key}:\n  {contents}\n".replace(":\n ", ":"), is_command=False)
    written = yaml.safe_load(result.text)
    if options is None:
        assert [text.partition(":")[0] for _, text in result.open if "checkpoint" in text] == [key]
    else:
        assert {name: written[name] for name in written if name.startswith(("save_only", "checkpoint"))} == options


def test_uploads_of_cosmos_rl(tmp_path: Path) -> None:
    place = 'enable_checkpoint = true\nupload_s3 = "final"\ns3_bucket = "b"\ns3_prefix = "p/q"\n'
    text = f'[train]\nresume = "some/checkpoint-3"\n[train.ckpt]\n{place}'
    options = yaml.safe_load(migrate_cosmos_rl(text).text)
    assert (options["upload_to"], options["upload_kwargs"]) == ("s3://b/p/q", {"checkpoints": "final"})
    assert options["resume_from_checkpoint"] == "some/checkpoint-3"
    every = yaml.safe_load(migrate_cosmos_rl(text.replace("final", "all")).text)
    assert every["upload_to"] == "s3://b/p/q"
    assert "upload_kwargs" not in every
    off = yaml.safe_load(migrate_cosmos_rl(text.replace('"final"', "false")).text)
    assert not {"upload_to", "upload_kwargs"} & off.keys()


def test_the_critic_of_verl_has_its_own_optimizer(tmp_path: Path) -> None:
    text = (
        "algorithm:\n  adv_estimator: gae\nactor_rollout_ref:\n  model:\n    path: m\n  actor:\n    optim:\n"
        "      optimizer: Adam\n      clip_grad: 0.5\ncritic:\n  grad_clip: 2.0\n  optim:\n    lr: 0.00002\n"
        "    lr_warmup_steps: 3\n    weight_decay: 0.1\n    betas: [0.9, 0.95]\n"
    )
    result = migrate_verl(text, is_command=False)
    (tmp_path / "data.jsonl").touch()
    given = f"dataset_name: {tmp_path}/data.jsonl\nreward_funcs: [think_format_reward]\n"
    config = parsed(f"{given}{result.text}", tmp_path, "ppo")[1]
    assert (config.optim, config.max_grad_norm, config.critic_learning_rate) == ("adam", 0.5, 2e-5)
    own = {"max_grad_norm": 2.0, "warmup_steps": 3, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95}
    assert (config.critic_optim_kwargs, len(result.open)) == (own, 1)  # verl's rewards


COSMOS = (DATA / "cosmos.toml").read_text(encoding="utf-8")
POLICIES = {
    "grpo": 'type = "grpo"\nreward_function = {boxed_math = 0.9, format = 0.1}\naipo_rho = 4.0\nkl_beta = 0.0\n'
    "[rollout]\nn_generation = 16\n",
    "sft": 'type = "sft"\nmini_batch = 4\nconversation_column_name = "messages"\n',
}


@pytest.mark.parametrize("command", POLICIES)
def test_a_file_of_cosmos_rl_means_the_same_here(command: str, tmp_path: Path) -> None:
    result = migrate_cosmos_rl(COSMOS + POLICIES[command])
    script, config, _ = parsed(result.text, tmp_path, command)
    assert (script.model_name_or_path, script.dataset_train_split) == ("m", "train+more")
    assert (config.num_train_epochs, config.learning_rate, config.bf16, config.report_to) == (2, 1e-6, True, [])
    assert (config.lr_scheduler_type, config.warmup_steps) == ("constant_with_warmup", 20)
    assert [line for line, _ in result.open] == [12]
    if command == "grpo":
        assert (script.reward_funcs, config.reward_weights) == (["accuracy_reward", "format_reward"], [0.9, 0.1])
        assert (config.loss_type, config.loss_kwargs, config.beta) == ("aipo", {"rho": 4.0}, 0)
        assert (config.gradient_accumulation_steps, config.steps_per_generation) == (4, 8)
        assert (config.use_vllm, config.generation_mode, config.max_staleness) == (True, "async", 4)
    else:
        assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (4, 2)


def test_a_decay_of_cosmos_rl_is_one_of_wsd(tmp_path: Path) -> None:
    """From step 10 of 20 on 0.1 + 0.9 (1 - sqrt(p)), without a warm-up."""
    decay = 'optm_warmup_steps = 0\noptm_decay_ratio = 0.5\noptm_min_lr_factor = 0.1\noptm_decay_type = "sqrt"'
    text = COSMOS.replace("optm_warmup_steps = 20", decay) + POLICIES["sft"]
    config = parsed(migrate_cosmos_rl(text).text, tmp_path, "sft")[1]
    factor = config.learning_rate_factor(20)
    assert [factor(step) for step in (0, 9)] == [1.0, 1.0]
    assert [factor(step) for step in (12, 20)] == pytest.approx([1 - 0.9 * 0.2**0.5, 0.1])


def test_files_are_written_beside_or_in_place_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = "from trl import SFTTrainer\n", "from prefrl import SFTTrainer\n"
    script, toml, beside = tmp_path / "a.py", tmp_path / "b.toml", tmp_path / "a_prefrl.py"
    script.write_text(old)
    toml.write_text(COSMOS + POLICIES["sft"])
    assert main(["migrate", str(script), "--diff"]) == 0
    assert "-from trl import SFTTrainer\n+from prefrl import SFTTrainer\n" in capsys.readouterr().out
    assert not beside.exists()
    assert main(["migrate", str(script), str(toml)]) == 3
    assert (script.read_text(), beside.read_text()) == (old, new)
    assert (tmp_path / "b_prefrl.yaml").read_text().startswith("# prefrl sft --config FILE\n")
    assert f"{toml}:12: to do: policy.parallelism.tp_size=4" in capsys.readouterr().out
    assert main(["migrate", str(script), "--output", str(tmp_path / "c.py")]) == 0
    assert (tmp_path / "c.py").read_text() == new
    assert main(["migrate", str(script), "--in_place"]) == 0
    assert (script.read_text(), (tmp_path / "a.py.orig").read_text()) == (new, old)
    assert main(["migrate", str(script)]) == 0
    assert "nothing to change" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "options", "words"),
    [
        ("a.py", "def", [], "a.py: cannot be read as .py: "),
        ("a.toml", "a = ", [], "this is not TOML"),
        ("a.yaml", "a: 1\n", ["--from", "verl"], "a.yaml: no options of verl are in this file"),
        ("a.yaml", "base_model: m\nadapter: lora\n", [], "a.yaml: this is a file of axolotl, which is not migrated"),
        ("a.yaml", f"a: {'[' * 20_000}", [], "must have at most 20 levels of nesting"),
        ("a.yaml", "- " * 20_000, [], "must have at most 20 levels of nesting"),
        ("a.yaml", "a: !!python/name:os.system x", [], "the tag '!!python/name:os.system' is not allowed"),
        ("a.toml", "a = 1", [], "no options of cosmos-rl are in this file"),
        ("a.py", "", ["--diff", "--in_place"], "diff, in_place, output: set one of them"),
        ("a.py", "", ["--from", "torchtune"], "'torchtune': must be one of trl"),
    ],
)
def test_what_cannot_be_migrated_is_an_error(
    name: str, text: str, options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["migrate", str(tmp_path / name), *options]) == 2
    assert words in capsys.readouterr().err


def test_an_older_backup_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text("import trl\n")
    (tmp_path / "a.py.orig").write_text("the first\n")
    assert main(["migrate", str(tmp_path / "a.py"), "--in_place"]) == 2
    assert (tmp_path / "a.py.orig").read_text() == "the first\n"
    assert "exists already" in capsys.readouterr().err


def test_no_file_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--diff"]) == 2
    assert "no files: the command is prefrl migrate FILE" in capsys.readouterr().err


ROWS = [
    {
        "question": f"{i}+1=",
        "answer": f"${i + 1}$",
        "turns": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "yes"}],
        "data_source": "sums",
        "reward_model": {"ground_truth": str(i + 1)},
    }
    for i in range(10)
]
CPU = ["--use_cpu", "--logging_steps", "1"]
RUNS: list[tuple[str, str, str, list[str], list[str]]] = [  # file, command, its folder, options, what is left to do
    ("verl_grpo.yaml", "grpo", "runs/sums/grpo", [], []),
    ("verl_ppo.yaml", "ppo", "runs/sums/ppo", [], []),
    ("verl_sft.yaml", "sft", "runs/sums/sft", [], []),
    ("cosmos_grpo.toml", "grpo", "runs/cosmos-grpo", ["--use_vllm", "false"], []),
    ("cosmos_sft.toml", "sft", "runs/cosmos-sft", [], []),
    (
        *("ludwig.yaml", "sft", "out"),
        ["--dataset_name", "rows", "--output_dir", "out"],
        ["Ludwig splits the rows", "set dataset_name"],
    ),
]


@pytest.fixture
def configs(workspace: Path, model_folder: Path) -> Path:
    """The working directory, with the configs and the files that they name."""
    shutil.copytree(DATA, workspace, dirs_exist_ok=True)
    (workspace / "model").symlink_to(model_folder)
    (workspace / "rows").mkdir()
    rows = Dataset.from_list(ROWS)
    for file in ("train.parquet", "test.parquet", "rows/train.parquet"):
        rows.to_parquet(workspace / file)
    (workspace / "score.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 2\n"
    )
    return workspace


@pytest.mark.parametrize(("file", "command", "folder", "options", "left"), RUNS, ids=lambda value: str(value)[:16])
def test_a_whole_config_migrates_and_trains(
    file: str, command: str, folder: str, options: list[str], left: list[str], configs: Path, capsys: Any
) -> None:
    main(["migrate", file, "--output", "run.yaml"])
    to_do = [line for line in capsys.readouterr().out.splitlines() if ": to do: " in line]
    assert len(to_do) == len(left)
    assert all(words in line for words, line in zip(left, to_do, strict=True))
    assert (configs / "run.yaml").read_text(encoding="utf-8").startswith(f"# prefrl {command} --config FILE\n")
    assert main([command, "--config", "run.yaml", *CPU, *options]) == 0
    state = json.loads((configs / folder / "checkpoint-1" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 1
    assert any(name.startswith("eval_") for entry in state["log_history"] for name in entry)
