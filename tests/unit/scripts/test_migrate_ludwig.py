"""Ludwig's configs of language models, and references between the keys of a file."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from prefrl import ConfigError
from prefrl.scripts.migrate.edits import every_option
from prefrl.scripts.migrate.ludwig import LUDWIG_KEYS, migrate_ludwig
from prefrl.scripts.migrate.values import library_of, of_yaml

HEAD = """\
model_type: llm
base_model: org/model
input_features: [{name: question, type: text}]
output_features: [{name: answer, type: text}]
"""


def migrated(text: str) -> tuple[dict[str, Any], str]:
    """The options, and what is left to do."""
    result = migrate_ludwig(HEAD + text)
    return yaml.safe_load(result.text), "\n".join(text for _, text in result.open)


def test_what_a_key_becomes_is_there() -> None:
    for name, row in LUDWIG_KEYS.items():
        assert {*row.options} <= every_option(), name


def test_a_run_that_says_nothing_gets_the_defaults_of_ludwig() -> None:
    options, left = migrated("trainer: {type: finetune}\n")
    assert options == {
        "optim": "adam",
        "learning_rate": 1e-5,
        "num_train_epochs": 100,
        "max_grad_norm": 0.5,
        "early_stopping_patience": 5,
        "lr_scheduler_type": "constant_with_warmup",
        "model_name_or_path": "org/model",
        "columns": {"prompt": "question", "completion": "answer"},
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "load_best_model_at_end": True,
        "dataset_train_split": "train[:70%]",
        "dataset_test_split": "train[70%:80%]",
    }
    assert "set dataset_name" in left


COLUMNS = [
    ("type: finetune", "", {"prompt": "question", "completion": "answer"}, None),
    ("type: dpo, rejected_column: worse", "", {"prompt": "question", "chosen": "answer", "rejected": "worse"}, None),
    ("type: kto", "", {"prompt": "question", "completion": "answer"}, None),
    ("type: finetune", "prompt: {template: 'Q: {question}'}\n", {"completion": "answer"}, "Q: {question}"),
    (
        "type: finetune",
        "prompt: {task: Add, template: '{__task__}: {__sample__}'}\n",
        {"completion": "answer"},
        "Add: {question}",
    ),
]


@pytest.mark.parametrize(("trainer", "prompt", "columns", "template"), COLUMNS)
def test_features_are_columns(trainer: str, prompt: str, columns: dict[str, str], template: str | None) -> None:
    options, _ = migrated(f"trainer: {{{trainer}}}\n{prompt}")
    assert (options["columns"], options.get("prompt_template")) == (columns, template)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("{learning_rate_scheduler: {decay: one_cycle, pct_start: 0.2}}", {"lr_scheduler_kwargs": {"pct_start": 0.2}}),
    ("{learning_rate_scheduler: {decay: cosine, pct_start: 0.2}}", {"lr_scheduler_type": "cosine"}),
    ("{learning_rate_scheduler: {decay: cosine, t_0: 5}}", {"lr_scheduler_type": "cosine_warm_restarts"}),
    ("{learning_rate_scheduler: {warmup_fraction: 0.1}}", {"warmup_steps": 0.1}),
    ("{gradient_clipping: {clipvalue: 0.5}}", {"max_grad_value": 0.5}),
    ("{optimizer: {type: paged_adamw_8bit, eps: 1e-6}}", {"optim": "paged_adamw_8bit", "adam_epsilon": 1e-6}),
    ("{steps_per_checkpoint: 10}", {"save_steps": 10, "eval_steps": 10, "eval_strategy": "steps"}),
    ("{checkpoints_per_epoch: 4}", {"save_epochs": 0.25, "eval_epochs": 0.25, "save_strategy": "epoch"}),
    ("{batch_size: auto, max_batch_size: 8}", {"auto_size_kwargs": {"max_batch_size": 8}}),
    ("{train_steps: 7, layers_to_freeze_regex: emb}", {"max_steps": 7, "freeze": ["emb"]}),
    ("{profiler: {wait: 2}, enable_profiling: true}", {"profile": True, "profile_kwargs": {"wait": 2}}),
]


@pytest.mark.parametrize(("trainer", "expected"), OPTIONS)
def test_options_of_the_trainer(trainer: str, expected: dict[str, Any]) -> None:
    options, _ = migrated(f"trainer: {{type: finetune, {trainer[1:]}\n")
    assert expected.items() <= options.items()


ABSENT = [
    ("{batch_size: 4, max_batch_size: 8}", "auto_size_kwargs"),
    ("{effective_batch_size: auto, gradient_accumulation_steps: auto}", "gradient_accumulation_steps"),
    ("{regularization_type: l2, regularization_lambda: 0}", "regularization_type"),
    ("{skip_all_evaluation: true}", "early_stopping_patience"),
    ("{early_stop: -1}", "early_stopping_patience"),
    ("{learning_rate_scheduler: {decay: cosine, pct_start: 0.2}}", "lr_scheduler_kwargs"),
]


@pytest.mark.parametrize(("trainer", "name"), ABSENT)
def test_what_would_have_no_effect_is_left_out(trainer: str, name: str) -> None:
    assert name not in migrated(f"trainer: {{type: finetune, {trainer[1:]}\n")[0]


def test_adapters_and_quantization() -> None:
    options, _ = migrated("trainer: {type: finetune}\nadapter: {type: lora, alpha: 32}\nquantization: {bits: 4}\n")
    assert {"use_peft": True, "lora_r": 8, "lora_alpha": 32, "load_in_4bit": True}.items() <= options.items()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: {type: grpo}\n", "set reward_funcs"),
        ("trainer: {type: finetune, validation_metric: bleu}\n", "'bleu' cannot be converted"),
        ("trainer: {type: finetune}\nbackend: {type: deepspeed}\n", "set num_processes and accelerate_config"),
        ("trainer: {type: finetune}\npreprocessing: {split: {type: fixed}}\n", "name the rows"),
        ("trainer: {type: finetune}\nprompt: {template: '{__context__}'}\n", "in the place of {__...__}"),
        ("trainer: {type: finetune}\ninput_features: [{name: a, type: image}]\n", "only texts can be migrated"),
    ],
)
def test_what_is_left_to_do_is_said(text: str, words: str) -> None:
    assert words in migrated(text)[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("input_features: []\ntrainer: {epochs: 3}\n", "model_type='ecd': only language models"),
        ("model_type: llm\ntrainer: {type: none}\n", "trainer.type='none': nothing is trained"),
        (f"{HEAD}trainer: {{type: finetune}}\ninput_features: [a]\n", "must be a list of features with names."),
    ],
)
def test_what_trains_no_language_model_is_refused_with_the_guide(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"{words}.* See docs/migrating_from_ludwig.md"):
        migrate_ludwig(text)


@pytest.mark.parametrize(
    ("text", "library"),
    [
        (HEAD, "ludwig"),
        ("actor_rollout_ref: {model: {path: m}}\n", "verl"),
        ("data: {train_files: a}\nmodel: {partial_pretrain: m}\n", "verl"),
        ("data: {train_files: a}\ntrainer: {total_epochs: 1}\n", "verl"),
        ("model_name_or_path: m\n", None),
        ("", None),
    ],
)
def test_a_file_tells_its_library(text: str, library: str | None) -> None:
    assert library_of(text) == library


FILE = """\
run:
  name: gsm8k
  folder: runs/${run.name}/${..project}
  lr: 1e-6
project: maths
same: ${run.lr}
size: 8
again: ${same}
files: ["${run.folder}/a", b]
above:
  own: ${.other}
  other: [1, 2]
"""
RESOLVED = [
    ("run.folder", "runs/gsm8k/maths"),
    ("again", 1e-6),
    ("files", ["runs/gsm8k/maths/a", "b"]),
    ("above.own", [1, 2]),
]


@pytest.mark.parametrize(("path", "value"), RESOLVED)
def test_references_to_keys_of_the_file_are_put_in(path: str, value: Any) -> None:
    assert of_yaml(FILE, ())[path][1] == value


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("${oc.select:size}", 8),
        ("${oc.select:missing,3}", 3),
        ("${oc.select:missing}", "${oc.select:missing}"),
        ("${oc.env:HOME}/a", "${oc.env:HOME}/a"),
        ("${missing}", "${missing}"),
        ("${x}", "${x}"),  # itself
        ("a${size", "a${size"),
    ],
)
def test_what_the_file_does_not_have_stays(reference: str, value: Any) -> None:
    assert of_yaml(f"{FILE}x: {reference}\n", ())["x"][1] == value


def test_references_in_a_circle_end() -> None:
    assert "${" in of_yaml("a: ${b}\nb: ${a}\n", ())["a"][1]


def test_references_that_multiply_are_refused() -> None:
    lines = [f"a{i}: ${{a{i + 1}}}${{a{i + 1}}}" for i in range(30)]
    with pytest.raises(ConfigError, match="has more than 4096 characters with its references put in"):
        of_yaml("\n".join([*lines, "a30: xxxxxxxx"]), ())


def test_arguments_are_one_value_unless_their_names_are_known() -> None:
    text = "a_kwargs: {x: 1}\nb_kwargs: {x: 1}\n"
    assert of_yaml(text, ["b_kwargs.x"]) == {"a_kwargs": (1, {"x": 1}), "b_kwargs.x": (2, 1)}


def test_a_number_that_python_does_not_read_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a\.b: this value cannot be read"):
        of_yaml(f"a:\n  b: {'9' * 20_000}\n", ())
