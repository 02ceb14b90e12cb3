"""Reward models that read images: their scores are those that the trainer of reward models computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from prefrl.data.collate import reward_batch
from prefrl.data.images import ImageReader, file_bytes
from prefrl.data.preference import prepare_reward_dataset
from prefrl.errors import ConfigError, RewardError
from prefrl.models.classifier import sequence_scores
from prefrl.rewards import RewardRunner
from prefrl.rewards import model as rewards_model
from prefrl.rewards.model import ModelReward
from tests.assets import tiny_tokenizer
from tests.unit.rewards.test_model import reward_model
from tests.vlms import FAMILIES, forget_classifiers, image, tiny_vision_judge

PICTURES = [image(seed=1), image(seed=2, size=(40, 70)), image((255, 0, 0))]
# The shortest text, the first in a batch of similar lengths, is the one without images.
QUESTIONS = ["Which color?", "And these two?", "No", "Is this one red?"]
OWN = [PICTURES[:1], PICTURES[1:], [], PICTURES[2:]]
SIDES = [("red", "blue or green"), ("yes", "no"), ("The", "is"), ("a", "b c d")]


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def trained_scores(judge: Any, processor: Any) -> list[float]:
    """[2 P] scores as the trainer computes them, of the chosen and the rejected side of each question."""
    rows = [
        {"prompt": asked(question), "chosen": said(good), "rejected": said(bad), "images": own}
        for question, (good, bad), own in zip(QUESTIONS, SIDES, OWN, strict=True)
    ]
    prepared = prepare_reward_dataset(Dataset.from_list(rows), processor, max_length=None, invalid_rows="error")
    reader = ImageReader(processor)
    batch = reward_batch([reader.attach(row) for row in prepared], padding_id=processor.tokenizer.pad_token_id)
    with torch.no_grad():
        return sequence_scores(judge, batch, plan="padded").squeeze(1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_and_without_images_score_as_in_training(family: str) -> None:
    judge, processor = tiny_vision_judge(family)
    tokenizer = processor.tokenizer
    # A tokenizer may begin a text with a token. What a template has rendered has it already.
    start = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{start[0]} $A", special_tokens=[start])
    judge.config.get_text_config().pad_token_id = None  # the tokenizer knows it
    expected = trained_scores(judge, processor)
    assert len({round(score, 3) for score in expected}) == len(expected)
    runner = RewardRunner(judge, processing_classes=processor)
    prompts = [asked(question) for question in QUESTIONS for _ in range(2)]
    stored = [[{"bytes": file_bytes(one), "path": None} for one in own] for own in OWN for _ in range(2)]
    completions = [said(text) for pair in SIDES for text in pair]
    scores = runner.score(prompts, completions, [[1]] * 8, {"images": stored}).by_name[runner.names[0]]
    assert scores == pytest.approx(expected, abs=1e-4)


def test_images_may_stand_in_the_messages() -> None:
    judge, processor = tiny_vision_judge("llava")
    reward = ModelReward(judge, tokenizer=processor)
    block = {"type": "image", "image": {"bytes": file_bytes(PICTURES[0]), "path": None}}
    prompt = [{"role": "user", "content": [block, {"type": "text", "text": "Which color?"}]}]
    apart = reward([asked("Which color?")], [said("red")], images=[PICTURES[:1]])
    assert reward([prompt], [said("red")]) == pytest.approx(apart, abs=1e-6)
    assert reward([asked("Which color?")], [said("red")]) != pytest.approx(apart, abs=1e-3)


def test_a_model_of_text_reads_the_text_of_prompts_with_images() -> None:
    reward = ModelReward(reward_model(), tokenizer=tiny_tokenizer())
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
    assert reward([prompt], [said("yes")], images=[PICTURES[:1]]) == reward([asked("hi")], [said("yes")])


def test_what_cannot_be_scored_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    judge, processor = tiny_vision_judge("llava")
    reward = ModelReward(judge, tokenizer=processor)
    with pytest.raises(RewardError, match="a prompt that is a text has 1 images"):
        reward(["hi"], ["yes"], images=[PICTURES[:1]])
    judge.config.text_config.max_position_embeddings = 24
    with pytest.raises(RewardError, match=r"row 1: 2[0-9] tokens, but the model reads at most 24"):
        reward([asked("a")] * 2, [said("a"), said("bcd")], images=[[], PICTURES[:1]])
    monkeypatch.setattr(rewards_model, "is_sharded", lambda model: True)
    with pytest.raises(ConfigError, match="reads images, and its weights are partitioned"):
        reward([asked("a")], [said("b")])
    judge.save_pretrained(tmp_path / "judge")
    forget_classifiers(monkeypatch)
    with pytest.raises(ConfigError, match=r"its processor cannot be loaded: .*or its tokenizer to score text alone"):
        ModelReward(tmp_path / "judge")
