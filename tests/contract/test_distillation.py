"""What distillation does beyond what every trainer does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from prefrl import ConfigError, DataError, DistillationConfig, DistillationTrainer
from prefrl.losses.top_logprobs import TopLogprobs
from prefrl.trainer import distillation_trainer
from prefrl.types import TokenBatch
from tests.assets import tiny_model, tiny_tokenizer
from tests.contract import episodes
from tests.contract.cases import (
    assert_same_weights,
    dataset_of,
    make_trainer,
    ragged_reward,
    relative_difference,
    stopping_model,
    update_of,
    with_pictures,
)
from tests.vlms import tiny_vlm

GIVEN: dict[str, Any] = {"num_generations": 1, "train_dataset": dataset_of("sft")}
ITSELF: dict[str, Any] = {"teacher_model": None, "teacher_prompt": "hint"}
WIDE = {"wide": tiny_model(seed=9, hidden_size=24)}


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


def hint(row: dict[str, Any]) -> str:
    """What a teacher sees instead of a row's prompt."""
    return f"Say {len(row['prompt'])}: {row['prompt']}"


def answer_of(row: dict[str, Any], most: int = 12) -> list[int]:
    """The tokens of a completion of the dataset that are learned."""
    tokenizer = tiny_tokenizer()
    return [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id][:most]


def log_probs(model: PreTrainedModel, prompt: str, answer: list[int]) -> Tensor:
    """[n, V] at each token of an answer, by the model's own forward pass."""
    ids = [*tiny_tokenizer()(prompt)["input_ids"], *answer]
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits[-len(answer) - 1 : -1].log_softmax(1)


class Served:
    """Servers of a model that return the log-probs of all tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def top_logprobs(self, batch: TokenBatch) -> TopLogprobs:
        with torch.no_grad():
            texts = [self.model(text[None]).logits[0].log_softmax(1) for text in batch.texts]
        parts = [found[-length - 1 : -1] for found, length in zip(texts, batch.response_lengths, strict=True)]
        top = torch.cat(parts).topk(128)
        return TopLogprobs(top.indices, top.values)

    def close(self) -> None: ...


@pytest.mark.parametrize("weights", ["given", "served", "frozen", "live"])
def test_a_teacher_sees_its_own_prompt(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, student, is_other = dataset_of("sft", 8), stopping_model().double(), weights in ("given", "served")
    teacher = tiny_model(seed=9, hidden_size=24).double() if is_other else stopping_model().double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        answer = answer_of(row)
        own, other = log_probs(student, row["prompt"], answer), log_probs(teacher, hint(row), answer).detach()
        total, count = total + (own.exp() * (own - other)).sum(), count + len(answer)
    (total / count).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in student.parameters()])
    options: dict[str, Any] = {"teacher_model": teacher if weights == "given" else None}
    if weights == "served":
        monkeypatch.setattr(distillation_trainer, "served_teacher", lambda trainer: Served(teacher))
        options["teacher_server_base_url"] = ["http://host:1"]
    elif weights != "given":
        options["teacher_weights"] = weights
    options |= {"teacher_prompt": hint, "train_dataset": rows, "num_generations": 1, "on_policy_fraction": 0.0}
    trainer = make_trainer("distillation", tmp_path, model=stopping_model().double(), learning_rate=1.0, **options)
    assert relative_difference(-update_of(trainer), expected) < 1e-6  # norms of the model are in float32
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(total / count), abs=1e-6)


def test_two_teachers_by_column_are_two_runs_added(tmp_path: Path) -> None:
    teachers = {
        "wide": tiny_model(seed=9, hidden_size=40).double(),
        "narrow": tiny_model(seed=8, hidden_size=16).double(),
    }
    rows = dataset_of("sft", 8).add_column(
        "teacher", ["narrow", "wide", "wide", "narrow", "wide", "wide", "wide", "wide"]
    )

    def gradient_sum(name: str, teacher: Any) -> Tensor:
        part = rows.filter(lambda row: name in ("both", row["teacher"]))
        options = {"train_dataset": part, "num_generations": 1, "on_policy_fraction": 0.0, "learning_rate": 1.0}
        options |= {"teacher_model": teacher, "per_device_train_batch_size": len(part)}
        trainer = make_trainer("distillation", tmp_path / name, model=stopping_model().double(), **options)
        return update_of(trainer) * sum(len(answer_of(row)) for row in part)

    alone = [gradient_sum(name, teacher) for name, teacher in teachers.items()]
    assert relative_difference(gradient_sum("both", teachers), sum(alone)) < 1e-6
    assert relative_difference(gradient_sum("both", {**teachers, "wide": teachers["narrow"]}), sum(alone)) > 0.1


@pytest.mark.parametrize("beta", [1.0, 0.0])
def test_the_student_learns_nothing_from_itself_with_the_same_prompt(beta: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "teacher_model": None,
        "teacher_prompt": "copy",
        "teacher_weights": "live",
        "beta": beta,
    }
    rows = dataset_of("distillation")
    options["train_dataset"] = rows.add_column("copy", rows["prompt"])
    trainer = make_trainer("distillation", tmp_path, **options)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.0, abs=1e-6)
    assert trainer.state.log_history[0]["grad_norm"] < 1e-5


@pytest.mark.parametrize(("params", "same"), [({"update_rate": 1.0}, "live"), ({"sync_steps": 4}, "frozen")])
def test_a_moving_teacher_is_between_live_and_frozen(params: dict[str, Any], same: str, tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {"teacher_weights": "ema", "teacher_weights_kwargs": params},
        {"teacher_weights": same},
        {"teacher_weights": "ema"},
    ]
    trainers = [
        make_trainer("distillation", tmp_path / str(number), **ITSELF, **each, max_steps=3)
        for number, each in enumerate(options)
    ]
    updates = [update_of(trainer) for trainer in trainers]
    assert relative_difference(updates[1], updates[0]) < 1e-6 < relative_difference(updates[2], updates[0])


def test_teachers_are_chosen_and_prompted_for_rows_of_a_stream(tmp_path: Path) -> None:
    options: dict[str, Any] = {"several": True, "shuffle_dataset": False, "max_steps": 2, "save_strategy": "steps"}
    options |= {"teacher_prompt": lambda row: hint(row), "save_steps": 2}  # no pickle can have it
    trainers = [make_trainer("distillation", tmp_path / str(flag), **options, streams=flag) for flag in (True, False)]
    assert relative_difference(*(update_of(trainer) for trainer in trainers)) < 1e-6


def named(*names: str) -> dict[str, Any]:
    """Rows with a column `teacher`."""
    return {"train_dataset": dataset_of("distillation").add_column("teacher", [*names, *["wide"] * (24 - len(names))])}


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    (
        {"teacher_model": WIDE, **named("wide", "old")},
        "row 1: column 'teacher' is 'old': the teachers are 'wide'. Correct them, or give teachers of these names",
    ),
    (
        {"teacher_model": WIDE},
        "names the one of each row: its columns are prompt, hint, prompt_ids. Add it, or give one teacher",
    ),
    (
        {"teacher_prompt": "hnt"},
        "teacher_prompt='hnt': beside the student's prompts, the dataset has no such column, only hint. Name",
    ),
    ({"teacher_prompt": "prompt_ids"}, "teacher_prompt='prompt_ids': beside the student's prompts, the dataset has"),
    (
        {"teacher_prompt": "hint", "train_dataset": dataset_of("sft").add_column("student_prompt", ["a"] * 24)},
        "column 'student_prompt' is reserved",
    ),
    (
        {"teacher_prompt": lambda row: row["hnt"]},
        "teacher_prompt raised KeyError: 'hnt', for row 0 of the dataset. Correct it",
    ),
    (
        {"teacher_prompt": lambda row: None},
        "teacher_prompt: column 'teacher_prompt', which is read like column 'prompt': row 0",
    ),
    (
        {**ITSELF, "model": tiny_model("gpt2", n_positions=36), "max_prompt_length": 20},
        "Lower max_prompt_length or max_completion_length, so that rows have at most 36 tokens",
    ),
]


@pytest.mark.parametrize(("options", "message"), UNUSABLE, ids=[message[:40] for _, message in UNUSABLE])
def test_rows_without_their_teacher_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        make_trainer("distillation", tmp_path, **options)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"teacher_model": None},
        "teacher_model=None: there is nothing to learn from. Give a model with the student's vocabulary, set ",
    ),
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
    ({"teacher_model": {}}, "teacher_model=dict: must be a name, a path, a model, a mapping of names to these"),
    ({"teacher_model": {**WIDE, "small": tiny_model(vocab_size=64)}, **named()}, "teacher_model['small'] has a"),
    ({"teacher_prompt": "hint", "teacher_weights": "ema"}, "teacher_weights='ema' with teacher_model: only a teacher"),
    ({"teacher_prompt": "hint", "talks": "faithful"}, "with episodes: what tools and environments add to a prompt"),
    ({"teacher_prompt": "hint", "pictures": "llava"}, "which reads images: only prompts of text can be exchanged"),
    (
        {**ITSELF, "teacher_model_init_kwargs": {"revision": "a"}},
        "has no effect because the student teaches itself. Leave it out",
    ),
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
    with pytest.raises(
        DataError, match=r"no columns 'prompt' and 'completion'.*its columns are prompt, hint\. Add them"
    ):
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
