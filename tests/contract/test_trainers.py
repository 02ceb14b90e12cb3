"""What every trainer of the registry does."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from prefrl.errors import CheckpointError, NonFiniteError
from prefrl.models.modes import dropout_rates
from prefrl.registry import REGISTRY
from prefrl.types import TokenBatch
from tests.assets import tiny_model, tiny_reward_model, tiny_tokenizer
from tests.contract.cases import (
    ONLINE,
    OPTIONS,
    REPRESENTATIVES,
    dataset_of,
    make_trainer,
    model_of,
    relative_difference,
    stopping_model,
    update_of,
    weights_of,
)

NAMES = list(REGISTRY)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_leaves_training_alone(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 3, "learning_rate": 0.05}
    plain = update_of(make_trainer(name, tmp_path, **settings))
    evaluated = make_trainer(
        name, tmp_path, **settings, eval_strategy="steps", eval_steps=1, eval_dataset=dataset_of(name, 5)
    )
    assert torch.equal(update_of(evaluated), plain)
    values = [entry["eval_loss"] for entry in evaluated.state.log_history if "eval_loss" in entry]
    assert len(values) == 3
    assert all(value == value for value in values)


def test_evaluation_has_no_dropout(tmp_path: Path) -> None:
    rows = dataset_of("sft", 5)
    plain, dropping = (
        make_trainer("sft", tmp_path, model=stopping_model(attention_dropout=rate).train()) for rate in (0.0, 0.5)
    )
    assert dropping.evaluate(rows)["eval_loss"] == pytest.approx(plain.evaluate(rows)["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_users_model_is_trained_in_place_and_gives_equal_outputs_when_saved(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    trainer = make_trainer(name, tmp_path, model=model)
    trainer.train()
    assert trainer.model is model
    assert trainer.args.gradient_accumulation_steps == 1  # the config is left alone
    trainer.save_model(str(tmp_path / "saved"))
    auto_class = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    reloaded = auto_class.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    ids = torch.tensor([[7, 20, 33, 41]])
    assert torch.equal(reloaded(ids).logits, trainer.model.eval()(ids).logits)
    assert f"prefrl\n- {name}" in (tmp_path / "saved" / "README.md").read_text()


# And those with a reference or a teacher of their own.
@pytest.mark.parametrize("name", [*REPRESENTATIVES, "online_dpo", "distillation"])
def test_lora_moves_the_adapter_alone(name: str, tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = make_trainer(name, tmp_path, peft_config=config)
    before = weights_of(trainer.model)
    trainer.train()
    changed = {key for key, value in weights_of(trainer.model).items() if not torch.equal(value, before[key])}
    trained = ("lora_", ".score.modules_to_save", "prefrl_critic.")
    assert changed == {key for key in before if any(part in key for part in trained)}
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize("name", NAMES)
def test_row_order_changes_nothing(name: str, tmp_path: Path) -> None:
    trainer = (
        make_trainer(name, tmp_path, gradient_accumulation_steps=1, beta=0.1)
        if name in ONLINE
        else make_trainer(name, tmp_path)
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    items, count = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))
    batch = TokenBatch.concat(items[-1].micro_batches)
    gradients = []
    for rows in (range(batch.num_rows), reversed(range(batch.num_rows))):
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, batch.select(list(rows)), num_items_in_batch=count)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))
    assert relative_difference(gradients[1], gradients[0]) < 1e-5


@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_the_order_of_rows_comes_from_data_seed_or_else_from_seed(name: str, tmp_path: Path) -> None:
    def order(**options: Any) -> list[list[int]]:
        trainer = make_trainer(name, tmp_path, **options)
        if name == "grpo":
            return [trainer.prompts._rows_of_generation(number) for number in range(2)]
        return list(trainer.get_train_dataloader().batch_sampler)

    assert order(seed=3) != order(seed=4)
    assert order(seed=4, data_seed=3) == order(seed=3)


def test_workers_of_the_loader_are_forks_whatever_the_default_of_python_is(tmp_path: Path) -> None:
    def tokens(**options: Any) -> list[list[int]]:
        return [
            batch.response_ids.tolist() for batch in make_trainer("sft", tmp_path, **options).get_train_dataloader()
        ]

    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)  # as in Python 3.14
    try:
        assert tokens(dataloader_num_workers=2) == tokens()
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("name", [*REPRESENTATIVES, "online_dpo"])
def test_rows_left_over_at_the_end_of_an_epoch(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(name, tmp_path, rows=11, max_steps=-1, num_train_epochs=2)
    trainer.train()
    # Offline: steps of 8 and 3 rows. Online: 8 / num_generations prompts for each step, or 8 where they are counted;
    # those left over wait for the next epoch's order.
    prompts = 8 if name == "online_dpo" else 8 // OPTIONS[name].get("num_generations", 1)
    assert trainer.state.global_step == (2 * (11 // prompts) if name in ONLINE else 4)


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_nan_loss_is_logged_as_nan(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(name, tmp_path, max_steps=1)
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda *a, **k: compute_loss(*a, **k) * float("nan")  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match="step 1: the loss is nan"):
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] != losses[0]


def test_nothing_is_sent_or_opened_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise the Hub is not asked in tests, whatever the code does.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    seen: list[str] | None = []

    def notes(event: str, arguments: tuple[Any, ...]) -> None:
        if seen is not None and event in ("socket.connect", "socket.bind", "socket.getaddrinfo"):
            seen.append(event)

    sys.addaudithook(notes)  # for as long as this process lives
    model_of("grpo").save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"model": str(tmp_path / "model"), "save_strategy": "steps"}
    trainer = make_trainer("grpo", tmp_path / "run", **options)
    trainer.train()
    trainer.save_model()
    found, seen = seen, None
    assert found == []


def test_save_model_replaces_the_model_of_another_run_only_if_it_is_told_to(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    make_trainer("sft", tmp_path / "a").save_model(folder)
    other = make_trainer("sft", tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"holds a model of another run.*saved in .*/b/saved-"):
        other.save_model(folder)
    other.save_model(folder, overwrite=True)
    other.save_model(folder)


def test_dropout_of_online_trainers_can_be_switched_off(tmp_path: Path) -> None:
    def rates(**options: Any) -> list[Any]:
        model = tiny_model(attention_dropout=0.5)
        return list(dropout_rates(make_trainer("grpo", tmp_path, model=model, **options).policy))

    assert rates()
    assert not rates(disable_dropout=True)


def test_online_dpo_scores_with_the_reward_model_of_its_config(tmp_path: Path) -> None:
    tiny_reward_model().save_pretrained(tmp_path / "rm")
    tiny_tokenizer().save_pretrained(tmp_path / "rm")
    named = {"reward_model_path": str(tmp_path / "rm")}
    trainer = make_trainer("online_dpo", tmp_path / "named", reward=None, **named)
    trainer.train()
    assert "rewards/rm/mean" in trainer.state.log_history[0]
    given = make_trainer("online_dpo", tmp_path / "given", **named)
    given.train()
    assert "rewards/ragged_reward/mean" in given.state.log_history[0]
    assert "rewards/rm/mean" not in given.state.log_history[0]


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_packing_that_cuts_rows_keeps_what_is_behind_max_length(strategy: str, tmp_path: Path) -> None:
    def num_tokens(**options: Any) -> int:
        texts = Dataset.from_dict({"text": ["one two three four five six seven"] * 6})
        trainer = make_trainer("sft", tmp_path, train_dataset=texts, **options)
        return sum(len(ids) for ids in trainer.train_dataset["input_ids"])

    whole = num_tokens(max_length=None)
    packed = num_tokens(packing=True, packing_strategy=strategy, max_length=4)
    assert num_tokens(packing=True, max_length=4) == 6 * 4
    assert whole - 6 <= packed <= whole  # a token that is a piece of its own has no loss


def test_rows_are_shuffled_before_they_are_packed(tmp_path: Path) -> None:
    def packs(**options: Any) -> list[list[int]]:
        data = dataset_of("sft", 12)
        trainer = make_trainer("sft", tmp_path, train_dataset=data, packing=True, max_length=64, **options)
        return [list(ids) for ids in trainer.train_dataset["input_ids"]]

    plain, shuffled = packs(), packs(shuffle_dataset=True)
    assert plain != shuffled
    assert sorted(token for pack in plain for token in pack) == sorted(token for pack in shuffled for token in pack)
    assert shuffled == packs(shuffle_dataset=True)
    assert shuffled != packs(shuffle_dataset=True, seed=7)
