"""References of online trainers, and streams of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file

from prefrl import OnlineDPOConfig, OnlineDPOTrainer, PPOConfig, PPOTrainer
from prefrl.errors import ConfigError
from tests.assets import tiny_tokenizer
from tests.contract import episodes
from tests.contract.cases import dataset_of, make_trainer, ragged_reward, stopping_model, update_of


@pytest.mark.parametrize("name", ["online_dpo", "ppo"])
def test_the_given_reference_is_the_one_that_is_compared_with(name: str, tmp_path: Path) -> None:
    def update(**given: Any) -> torch.Tensor:
        return update_of(make_trainer(name, tmp_path, model=stopping_model(), beta=0.5, **given))

    of_itself, other = update(), update(ref_model=stopping_model(seed=5))
    assert torch.equal(update(ref_model=stopping_model()), of_itself)
    assert (other - of_itself).norm() > 1e-2 * of_itself.norm()
    stopping_model(seed=5).save_pretrained(tmp_path / "reference")
    assert torch.equal(update(ref_model=str(tmp_path / "reference")), other)


def test_the_order_of_trl_works_in_online_dpo(tmp_path: Path) -> None:
    config = OnlineDPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    train, test, tokenizer = dataset_of("online_dpo"), dataset_of("online_dpo", 4), tiny_tokenizer()
    reference = stopping_model(seed=5)
    trainer = OnlineDPOTrainer(stopping_model(), reference, ragged_reward, config, None, train, test, tokenizer)
    assert trainer.args is config
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (len(train), len(test))
    assert trainer.processing_class is tokenizer
    assert trainer.ref_model is reference


def test_a_reward_in_the_place_of_the_reference_is_refused(tmp_path: Path) -> None:
    wrong: Any = ragged_reward
    order = r"OnlineDPOTrainer\(model, ref_model, reward_funcs, args, data_collator, train_dataset"
    with pytest.raises(ConfigError, match=rf"ref_model=function: must be a name.*{order}"):
        OnlineDPOTrainer(stopping_model(), wrong, OnlineDPOConfig(output_dir=str(tmp_path), use_cpu=True))


@pytest.mark.parametrize("name", ["online_dpo", "ppo"])
def test_the_policy_is_no_reference_of_itself(name: str, tmp_path: Path) -> None:
    model = stopping_model()
    with pytest.raises(ConfigError, match="ref_model is the model that is trained"):
        make_trainer(name, tmp_path, model=model, ref_model=model, beta=0.1)


def test_a_run_does_not_resume_with_another_reference(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "beta": 0.1}
    make_trainer("online_dpo", tmp_path, **options, ref_model=stopping_model(seed=5)).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(ConfigError, match="reference"):
        make_trainer("online_dpo", tmp_path, **options).train(resume_from_checkpoint=checkpoint)
    whole = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    resumed = make_trainer("online_dpo", tmp_path, **options, ref_model=stopping_model(seed=5))
    resumed.train(resume_from_checkpoint=checkpoint)
    assert all(torch.equal(value, whole[key]) for key, value in resumed.model.state_dict().items() if key in whole)


def test_the_reward_model_of_ppo_is_a_reward_by_another_name(tmp_path: Path) -> None:
    config = PPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    arguments: dict[str, Any] = {
        "args": config,
        "processing_class": tiny_tokenizer(),
        "train_dataset": dataset_of("ppo"),
    }
    trainer = PPOTrainer(model=stopping_model(), reward_model=ragged_reward, **arguments)
    assert trainer.rewards.names == ["ragged_reward"]
    with pytest.raises(ConfigError, match="Pass all of them in reward_funcs"):
        PPOTrainer(model=stopping_model(), reward_model=ragged_reward, reward_funcs=ragged_reward, **arguments)


@pytest.mark.parametrize("name", ["grpo", "ppo", "online_dpo"])
def test_a_stream_of_prompts_gives_the_update_of_the_dataset(name: str, tmp_path: Path) -> None:
    options = {"shuffle_dataset": False, "max_steps": 2, "steps_per_generation": 1}
    plain = update_of(make_trainer(name, tmp_path, **options))
    assert plain.norm() > 1e-3
    assert torch.equal(update_of(make_trainer(name, tmp_path, **options, streams=True)), plain)


@pytest.mark.parametrize("keep", [0, 100])
def test_a_resumed_run_reads_on_where_it_was_in_its_second_epoch(keep: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3, "journal_keep": keep}

    def update(checkpoint: str | None = None) -> torch.Tensor:
        stream = dataset_of("grpo", 5).to_iterable_dataset().shuffle(seed=3, buffer_size=5)  # 2 prompts in a step
        trainer = make_trainer("grpo", tmp_path, **options, train_dataset=stream)
        return update_of(trainer, resume_from_checkpoint=checkpoint)

    whole = update()
    assert torch.equal(update(str(tmp_path / "checkpoint-3")), whole)


def test_a_stream_is_evaluated_like_the_dataset(tmp_path: Path) -> None:
    rows = dataset_of("grpo", 5)
    trainer = make_trainer("grpo", tmp_path, per_device_eval_batch_size=8)
    plain, streamed = (
        {name: value for name, value in trainer.evaluate(data).items() if "/" in name and "time" not in name}
        for data in (rows, rows.to_iterable_dataset())
    )
    assert "eval_completions/mean_length" in plain
    assert streamed == plain


def test_environments_fill_the_empty_prompts_of_a_stream(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Noted(episodes.Talk):
        def reset(self, prompt: Any = None, **row: Any) -> str:
            seen.append(row["number"])
            return super().reset(prompt)

    stream = IterableDataset.from_generator(lambda: ({"number": number} for number in range(10)))
    options = {"talks": "faithful", "environment": Noted, "max_steps": 2}
    make_trainer("grpo", tmp_path, **options, train_dataset=stream).train()
    assert sorted(seen) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curriculum": "variance"}, "curriculum='variance' with an IterableDataset: it chooses among all prompts"),
        ({"dynamic_sampling": True}, "dynamic_sampling=True with an IterableDataset"),
        ({"max_steps": -1}, "max_steps=-1 with an IterableDataset"),
        ({"stop_at_first_limit": True}, "stop_at_first_limit=True with an IterableDataset"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer("grpo", tmp_path, **options, train_dataset=Dataset.from_list([{"prompt": "a"}]), streams=True)
