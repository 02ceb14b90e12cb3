"""What decides the updates of a run is part of its identity, so that a resumed run with another value is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
from datasets import Dataset

from prefrl.trainer.facts import model_fingerprint
from tests.assets import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from tests.contract.cases import dataset_of, make_trainer, model_of

TURNS = Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}]}] * 24)
LOUD = tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("<|end|>", "!<|end|>"))


@pytest.mark.parametrize(
    ("algorithm", "options", "names"),
    [
        ("sft", {"seed": 7}, ["seed"]),
        ("sft", {"optim": "adamw_torch", "weight_decay": 0.1}, ["optim", "weight_decay"]),
        ("sft", {"max_grad_norm": 1.0}, ["max_grad_norm"]),
        ("sft", {"lr_scheduler_type": "linear"}, ["lr_scheduler_type", "max_steps", "num_train_epochs"]),
        ("sft", {"model": tiny_model(hidden_size=64)}, ["model"]),
        ("sft", {"peft_config": peft.LoraConfig(target_modules=["q_proj"])}, ["model"]),
        ("sft", {"train_dataset": dataset_of("sft").select(range(23, -1, -1))}, ["data"]),
        ("grpo", {"train_dataset": TURNS, "processing_class": LOUD}, ["data"]),
        ("grpo", {"temperature": 0.5}, ["temperature"]),
        ("grpo", {"num_generations": 2}, ["num_generations", "prompts_per_generation"]),
        ("grpo", {"num_iterations": 2}, ["num_iterations", "steps_of_a_generation"]),
        ("dpo", {"loss_type": "ipo"}, ["loss_type"]),
        ("ppo", {"critic_learning_rate": 0.2}, ["critic_learning_rate"]),
    ],
    ids=str,
)
def test_what_decides_the_updates_is_in_the_identity(
    algorithm: str, options: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    usual = {"train_dataset": TURNS} if options.get("train_dataset") is TURNS else {}
    # An adapter changes the model that it is put into.
    before, after = (
        make_trainer(algorithm, tmp_path, **{"model": model_of(algorithm), **given}).decisive()
        for given in (usual, options)
    )
    assert [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)] == names


def test_what_does_not_decide_them_is_not(tmp_path: Path) -> None:
    free = {
        "save_steps": 7,
        "logging_steps": 3,
        "max_steps": 9,
        "max_tokens_per_micro_batch": 60,
        "save_total_limit": 2,
    }
    cut = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    assert make_trainer("sft", tmp_path).decisive() == make_trainer("sft", tmp_path, **free, **cut).decisive()


def test_special_tokens_that_the_loop_aligns_do_not_decide_them() -> None:
    # HuggingFace's loop gives the model the tokenizer's ids when training begins, and so after the identity was read.
    aligned = tiny_model(eos_token_id=7, pad_token_id=9, bos_token_id=3)
    assert model_fingerprint(aligned) == model_fingerprint(tiny_model())
