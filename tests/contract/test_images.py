"""Training on images: it learns what only the image tells, resumes exactly, and keeps what it was given."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from prefrl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from prefrl.errors import ConfigError, DataError
from prefrl.generation.base import SamplingParams
from prefrl.models.forward import token_logprobs
from prefrl.rewards import ModelReward
from prefrl.rollout.batches import sampled_batch
from prefrl.types import Rollout, Turn
from tests.assets import tiny_model, tiny_tokenizer
from tests.contract.cases import (
    assert_same_weights,
    dataset_of,
    make_trainer,
    update_of,
    whole_and_resumed,
    with_pictures,
)
from tests.vlms import FAMILIES, forget_classifiers, image, tiny_vision_judge, tiny_vlm

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
QUIET: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True,
    "lr_scheduler_type": "constant",
}
PROMPT = [{"role": "user", "content": "What color is the image?"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def squares(count: int, *, seed: int) -> Dataset:
    """Squares of a color; the question is always the same."""
    draw = random.Random(seed)
    colors = [draw.choice(list(COLORS)) for _ in range(count)]
    others = [draw.choice([name for name in COLORS if name != color]) for color in colors]
    return Dataset.from_list(
        [
            {"prompt": PROMPT, "color": color, "other": other, "images": [image(COLORS[color], size=(56, 56))]}
            for color, other in zip(colors, others, strict=True)
        ]
    )


def color_pairs(seed: int) -> Dataset:
    """Squares, with the name of the color and of another one."""
    rows = squares(64, seed=seed).map(lambda row: {"chosen": said(row["color"]), "rejected": said(row["other"])})
    return rows.remove_columns(["color", "other"])


def names_color(completions: list[Any], color: list[str], **_: Any) -> list[float]:
    return [float(messages[0]["content"] == name) for messages, name in zip(completions, color, strict=True)]


def test_grpo_learns_to_name_the_color_of_a_square(tmp_path: Path) -> None:
    model, processor = tiny_vlm("qwen2_5_vl")
    draw = random.Random(2)
    guesses = squares(96, seed=1).map(lambda row: {"completion": said(draw.choice(list(COLORS)))})
    args = SFTConfig(tmp_path, max_steps=40, per_device_train_batch_size=24, learning_rate=3e-3, **QUIET)
    guesses = guesses.remove_columns(["color", "other"])
    SFTTrainer(model, args, train_dataset=guesses, processing_class=processor).train()
    config = GRPOConfig(
        tmp_path,
        max_steps=40,
        per_device_train_batch_size=48,
        num_generations=8,
        max_completion_length=4,
        learning_rate=1e-3,
        beta=0.0,
        temperature=1.0,
        top_k=0,
        num_generations_eval=1,
        per_device_eval_batch_size=48,
        **QUIET,
    )
    trainer = GRPOTrainer(model, names_color, config, squares(96, seed=3), squares(48, seed=4), processor)
    assert trainer.evaluate()["eval_reward"] < 0.5
    trainer.train()
    assert trainer.evaluate()["eval_reward"] > 0.9


def test_dpo_learns_which_color_is_right(tmp_path: Path) -> None:
    model, processor = tiny_vlm("idefics3")
    config = DPOConfig(tmp_path, max_steps=30, per_device_train_batch_size=16, learning_rate=1e-3, beta=0.5, **QUIET)

    trainer = DPOTrainer(
        model, None, config, train_dataset=color_pairs(1), eval_dataset=color_pairs(2), processing_class=processor
    )
    trainer.train()
    assert trainer.evaluate()["eval_rewards/accuracies"] > 0.9


def test_a_reward_model_learns_which_color_is_right_and_rewards_it(tmp_path: Path) -> None:
    judge, processor = tiny_vision_judge("llava")
    judge.config.get_text_config().pad_token_id = None
    config = RewardConfig(tmp_path, max_steps=24, per_device_train_batch_size=16, learning_rate=2e-3, **QUIET)
    trainer = RewardTrainer(
        judge, config, train_dataset=color_pairs(1), eval_dataset=color_pairs(2), processing_class=processor
    )
    assert judge.config.get_text_config().pad_token_id == processor.tokenizer.pad_token_id
    assert trainer.evaluate()["eval_accuracy"] < 0.8
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.9
    trainer.save_model(str(tmp_path / "judge"))

    held_out = squares(24, seed=5)
    stored = [row["images"] for row in held_out]
    reward = ModelReward(tmp_path / "judge")
    right, wrong = (
        reward([PROMPT] * 24, [said(row[column]) for row in held_out], images=stored) for column in ("color", "other")
    )
    assert sum(good > bad for good, bad in zip(right, wrong, strict=True)) > 21
    grpo = make_trainer("grpo", tmp_path / "grpo", pictures="llava", reward=str(tmp_path / "judge"))
    grpo.train()
    assert "rewards/judge/mean" in grpo.state.log_history[0]


def test_an_adapter_of_a_reward_model_rewards_images_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = tiny_vlm("llava")
    model.save_pretrained(tmp_path / "llava")
    processor.save_pretrained(tmp_path / "llava")
    rows = with_pictures(dataset_of("reward", 4))
    config = RewardConfig(tmp_path, max_steps=2, learning_rate=0.05, max_length=None, **QUIET)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")
    trainer: Any = RewardTrainer(str(tmp_path / "llava"), config, train_dataset=rows, peft_config=lora)
    trainer.train()
    trainer.save_model(str(tmp_path / "judge"))
    with torch.no_grad():
        expected = trainer.rewards(trainer.model.eval(), trainer.collate(list(trainer.train_dataset))).tolist()
    assert len({round(value, 3) for value in expected}) == 8
    twice = {name: [row[name] for row in rows for _ in range(2)] for name in ("prompt", "images")}
    sides = [row[side] for row in rows for side in ("chosen", "rejected")]
    forget_classifiers(monkeypatch)
    reward = ModelReward(tmp_path / "judge")
    assert reward(twice["prompt"], sides, images=twice["images"]) == pytest.approx(expected, abs=1e-4)


def test_a_resumed_reward_model_with_images_is_bit_exact(tmp_path: Path) -> None:
    settings = {"pictures": "qwen2_5_vl", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole, resumed = whole_and_resumed("reward", tmp_path, 1, **settings)
    assert_same_weights(resumed, whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probs_are_those_of_the_trainer(family: str, tmp_path: Path) -> None:
    options = {"pictures": family, "per_device_train_batch_size": 12, "num_generations": 2, "rows": 6}
    trainer: Any = make_trainer("grpo", tmp_path, **options)
    rows = list(trainer.train_dataset)  # prompts without, with one and with two images, of different lengths
    sampling = SamplingParams(num_samples=2, max_tokens=5)
    images = [trainer.images.of_prompt(row) for row in rows]
    prompts = [row["prompt_ids"] for row in rows]
    completions = trainer.generator.generate(prompts, sampling, seeds=range(6), images=images)
    rollouts = [Rollout([Turn(prompts[i], completion)], rows[i], i) for i in range(6) for completion in completions[i]]
    batch = sampled_batch(rollouts, mask_truncated=False, reader=trainer.images)
    assert [one is None for one in batch.images] == [not row["images"] for row in rows]
    logprobs = token_logprobs(trainer.policy, batch).logprobs
    torch.testing.assert_close(logprobs, batch.sampling_logprobs, rtol=1e-4, atol=1e-4)


def test_placeholders_are_never_sampled(tmp_path: Path) -> None:
    trainer: Any = make_trainer("grpo", tmp_path, pictures="llava", rows=6)
    head = trainer.policy.get_output_embeddings()
    with torch.no_grad():
        head.weight[3] *= 50.0  # in about half of all contexts it is the likeliest token by far
    row = trainer.train_dataset[1]
    ask = {"seeds": [0], "images": [trainer.images.of_prompt(row)]}
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(num_samples=8, max_tokens=8, temperature=temperature)
        (completions,) = trainer.generator.generate([row["prompt_ids"]], sampling, **ask)
        assert not any(3 in completion.token_ids for completion in completions)


def test_a_resumed_run_with_images_is_bit_exact(tmp_path: Path) -> None:
    settings = {
        "pictures": "qwen2_5_vl",
        "max_steps": 6,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole, resumed = whole_and_resumed("grpo", tmp_path, 3, **settings)
    assert_same_weights(resumed, whole)
    assert (tmp_path / "checkpoint-3" / "processor_config.json").exists()


def test_the_journal_holds_the_images_of_each_group_and_training_goes_on_from_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"pictures": "llava", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole = make_trainer("grpo", tmp_path, **settings)
    whole.train()
    table = pq.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pylist()
    with_pictures = [row["rollout"] for row in table if row["images"] is not None]
    assert set(with_pictures) <= {0, 4}, "only the first rollout of a group has them"
    assert with_pictures
    # What was journaled and not learned from is read, not sampled again.
    resumed: Any = make_trainer("grpo", tmp_path, **settings)
    resumed.prompts.collect = lambda *_: pytest.fail("sampled again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same_weights(resumed, whole)


def test_a_frozen_vision_tower_stays_as_it_was(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, pictures="llava", freeze=["vision_tower"])
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    changed = {
        name for name, parameter in trainer.model.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert not any("vision_tower" in name for name in changed)
    assert any("multi_modal_projector" in name for name in changed)
    assert any("language_model" in name for name in changed)


def test_an_adapter_learns_from_images(tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer("dpo", tmp_path, pictures="qwen2_5_vl", peft_config=lora)
    assert float(update_of(trainer).norm()) > 0


def test_saved_models_with_images_load_by_name(tmp_path: Path) -> None:
    model, processor = tiny_vlm("llava")
    model.save_pretrained(tmp_path / "llava")
    processor.save_pretrained(tmp_path / "llava")
    rows = with_pictures(dataset_of("sft", 8))
    config = SFTConfig(tmp_path, max_steps=1, **QUIET)
    trainer = SFTTrainer(str(tmp_path / "llava"), config, train_dataset=rows)
    assert type(trainer.model) is type(model)
    assert type(trainer.processing_class) is type(processor)
    trainer.train()


def test_wrong_pairs_of_model_data_and_processor_are_refused(tmp_path: Path) -> None:
    rows, processor = with_pictures(dataset_of("sft", 8)), tiny_vlm("llava")[1]
    config = SFTConfig(tmp_path, max_steps=1, **QUIET)
    with pytest.raises(DataError, match="processing_class is a tokenizer, which reads text only"):
        SFTTrainer(tiny_model(), config, train_dataset=rows, processing_class=tiny_tokenizer())
    with pytest.raises(ConfigError, match="processing_class=LlavaProcessor: the model is a Qwen2ForCausalLM"):
        SFTTrainer(tiny_model(), config, train_dataset=rows, processing_class=processor)
    with pytest.raises(DataError, match="which tools and environments do not take yet"):
        make_trainer("grpo", tmp_path, pictures="llava", environment=type("Room", (), {"reset": lambda self: None}))
