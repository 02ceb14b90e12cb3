"""What distillation does beyond what every trainer does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from prefrl import ConfigError, DataError, DistillationConfig, DistillationTrainer
from tests.assets import tiny_model, tiny_tokenizer
from tests.contract import episodes
from tests.contract.cases import (
    assert_same_weights,
    dataset_of,
    make_trainer,
    ragged_reward,
    stopping_model,
    with_pictures,
)
from tests.vlms import tiny_vlm

GIVEN: dict[str, Any] = {"num_generations": 1, "train_dataset": dataset_of("sft")}


def saved(folder: Path, **overrides: Any) -> str:
    """A teacher on disk."""
    tiny_model(seed=9, hidden_size=24, **overrides).save_pretrained(folder)
    return str(folder)


def test_the_order_of_trl_works_and_rewards_need_not_be_given(tmp_path: Path) -> None:
    config = DistillationConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=1)
    train, test, tokenizer = dataset_of("distillation"), dataset_of("distillation", 4), tiny_tokenizer()
    trainer = DistillationTrainer(stopping_model(), tiny_model(seed=9), config, train, test, tokenizer, [])
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged["loss"] == pytest.approx(logged["divergence"])
    assert not [name for name in logged if name.startswith(("reward", "frac_", "health"))]
    assert trainer.ref_model is not None
    assert trainer.ref_model.config.hidden_size == 32
    with pytest.raises(
        ConfigError, match=r"teacher_model=DistillationConfig: must be a name.*model, teacher_model, a"
    ):
        DistillationTrainer(stopping_model(), config)  # type: ignore[arg-type]


SAME: list[dict[str, Any]] = [
    {},
    {"beta": 0.5},
    {"beta": 0.0},
    {"later_tokens": True, "peft_config": LoraConfig(target_modules=["q_proj"])},
    {"talks": "forgetful", "eval_dataset": Dataset.from_list(episodes.prompts(4))},
    {"pictures": "llava", "model": None, "eval_dataset": with_pictures(dataset_of("distillation", 4))},
]


@pytest.mark.parametrize("options", SAME, ids=lambda options: " ".join(map(str, options)) or "reverse")
def test_a_teacher_that_is_the_student_teaches_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    teacher = tiny_vlm("llava")[0] if "pictures" in options else stopping_model()
    more = {"model": stopping_model(), "teacher_model": teacher, "eval_dataset": dataset_of("distillation", 4)}
    trainer = make_trainer("distillation", tmp_path, **(more | options))
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.0, abs=1e-6)
    assert trainer.state.log_history[0]["grad_norm"] < 1e-4
    assert trainer.state.log_history[0]["num_tokens"] > 0
    assert trainer.evaluate()["eval_divergence"] < 1e-6


def test_a_teacher_by_name_is_that_model(tmp_path: Path) -> None:
    teacher = saved(tmp_path / "teacher")
    by_name: dict[str, Any] = {
        "teacher_model_name_or_path": teacher,
        "teacher_model_init_kwargs": '{"dtype": "float32"}',
    }
    trainers = [
        make_trainer("distillation", tmp_path / "a", teacher_model=None, **by_name),
        make_trainer("distillation", tmp_path / "b", teacher_model=tiny_model(seed=9, hidden_size=24)),
    ]
    for trainer in trainers:
        trainer.train()
    assert_same_weights(*trainers)


@pytest.mark.parametrize(("fraction", "given"), [(0.0, 8), (0.5, 2), (1.0, 0)])
def test_a_fraction_of_the_completions_is_sampled(fraction: float, given: int, tmp_path: Path) -> None:
    trainer = make_trainer("distillation", tmp_path, **GIVEN, on_policy_fraction=fraction, max_completion_length=6)
    collected = trainer._collect(0)  # type: ignore[attr-defined]
    found = [rollout for rollout in collected.rollouts if not rollout.policy_versions]
    assert len(found) == given
    tokenizer = tiny_tokenizer()
    for rollout in found:
        whole = tokenizer(rollout.row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        assert rollout.sampled_ids == whole[:6]
        assert rollout.prompt_ids == rollout.row["prompt_ids"]
        assert rollout.finish_reason == ("stop" if len(whole) <= 6 else "length")
        assert rollout.reward == pytest.approx(ragged_reward([rollout.row["completion"]])[0])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"teacher_model": None}, "teacher_model=None: there is nothing to learn from. Set it, or the option"),
    ({"teacher_model_name_or_path": "m"}, "teacher_model_name_or_path='m' and the argument teacher_model: both name"),
    ({"teacher_model_init_kwargs": {"revision": "a"}}, "has no effect because teacher_model is an instance. Leave it"),
    (
        {"teacher_model": tiny_model(vocab_size=64)},
        "teacher_model has a vocabulary of 64 tokens, but the model has 128",
    ),
    (
        {**GIVEN, "on_policy_fraction": 0.5, "streams": True},
        "on_policy_fraction=0.5 with an IterableDataset, tools or",
    ),
    ({"teacher_model_init_kwargs": "[1]"}, "teacher_model_init_kwargs='[1]': must be a JSON object"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_trainer("distillation", tmp_path, **options)


def test_a_student_is_not_its_own_teacher(tmp_path: Path) -> None:
    model = stopping_model()
    with pytest.raises(ConfigError, match="teacher_model is the model that is trained, so it would change"):
        make_trainer("distillation", tmp_path, model=model, teacher_model=model)


def test_prompts_without_completions_cannot_be_learned_from(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no columns 'prompt' and 'completion'.*its columns are prompt\. Add them"):
        make_trainer("distillation", tmp_path, num_generations=1, on_policy_fraction=0.0)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    teacher = saved(tmp_path / "teacher")
    tiny_tokenizer().save_pretrained(teacher)
    options: dict[str, Any] = {"teacher_model": teacher, "processing_class": AutoTokenizer.from_pretrained(teacher)}
    make_trainer("distillation", tmp_path / "same", **options)
    other = AutoTokenizer.from_pretrained(teacher)
    other.add_tokens(["What"])
    other.save_pretrained(teacher)
    with pytest.raises(ConfigError, match=r"makes \[.*\] of 'What.*', and the student's makes \["):
        make_trainer("distillation", tmp_path / "other", **options)


def test_rows_of_one_group_are_in_one_micro_batch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"later_tokens": True, "num_generations": 2, "mask_truncated_completions": True}
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    trainer = make_trainer("distillation", tmp_path, **options, **sizes)
    trainer.create_optimizer()
    items, _ = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 4, trainer.args.device)
    groups = [{*batch.group_index} for batch in items[-1].micro_batches]
    assert any(batch.num_rows % 2 for batch in items[-1].micro_batches)  # rows that are masked are left out
    assert sum(map(len, groups)) == len(set().union(*groups)) > 4
