from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from prefrl.errors import ConfigError, RewardError
from prefrl.rewards import RewardRunner
from prefrl.rewards.model import ModelReward
from tests.assets import tiny_model, tiny_tokenizer


def reward_model(architecture: str = "qwen2", *, num_labels: int = 1, **overrides: Any) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(architecture, **(sizes | {"num_labels": num_labels} | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.2)
    return model


def one_by_one(model: PreTrainedModel, rows: list[list[int]]) -> list[float]:
    with torch.no_grad():
        return [float(model.eval()(input_ids=torch.tensor([row])).logits[0, 0]) for row in rows]


TEXTS = ["a", "bc" * 9, "d" * 5, "", "some words", *("x" * n for n in range(1, 18))]


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "bert"])  # a pooled last token; the same; a first token
def test_batches_with_padding_score_like_rows_on_their_own(architecture: str) -> None:
    model, tokenizer = reward_model(architecture), tiny_tokenizer()
    expected = one_by_one(model, [tokenizer(f"prompt {text}")["input_ids"] for text in TEXTS])
    assert ModelReward(model, tokenizer=tokenizer)(["prompt "] * len(TEXTS), TEXTS) == pytest.approx(
        expected, abs=1e-5
    )
    assert len(set(expected)) == len(TEXTS)


def test_messages_are_rendered_by_the_template_of_the_reward_models_tokenizer() -> None:
    model, tokenizer = reward_model(), tiny_tokenizer()
    scores = ModelReward(model, tokenizer=tokenizer)(
        [[{"role": "user", "content": "hi"}]], [[{"role": "assistant", "content": "yes"}]]
    )
    ids = tokenizer("<|user|>hi<|end|><|assistant|>yes<|end|>")["input_ids"]
    assert scores == pytest.approx(one_by_one(model, [ids]), abs=1e-5)


def test_special_tokens_are_added_to_texts_but_not_to_what_a_template_rendered() -> None:
    model, tokenizer = reward_model(), tiny_tokenizer()
    start = tokenizer.convert_tokens_to_ids("<|system|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", start)]
    )
    reward = ModelReward(model, tokenizer=tokenizer)
    text = tokenizer("hiyes", add_special_tokens=False)["input_ids"]
    chat = tokenizer("<|user|>hi<|end|><|assistant|>yes<|end|>", add_special_tokens=False)["input_ids"]
    scores = reward(["hi", [{"role": "user", "content": "hi"}]], ["yes", [{"role": "assistant", "content": "yes"}]])
    assert scores == pytest.approx(one_by_one(model, [[start, *text], chat]), abs=1e-5)


def test_model_scores_in_eval_mode_without_gradients_and_is_left_as_it_was() -> None:
    model = reward_model(attention_dropout=0.5).train()
    reward = ModelReward(model, tokenizer=tiny_tokenizer())
    assert reward(["p"], ["abc"]) == reward(["p"], ["abc"])
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_padding_falls_back_to_the_end_of_sequence_token() -> None:
    model, tokenizer = reward_model(), tiny_tokenizer()
    tokenizer.pad_token = None
    model.config.pad_token_id = None
    expected = one_by_one(model, [tokenizer("pa")["input_ids"], tokenizer("pbcd")["input_ids"]])
    assert ModelReward(model, tokenizer=tokenizer)(["p", "p"], ["a", "bcd"]) == pytest.approx(expected, abs=1e-5)
    assert tokenizer.pad_token == tokenizer.eos_token


def test_model_and_tokenizer_are_loaded_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "my-reward-model"
    model = reward_model()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    runner = RewardRunner([str(folder), folder], device="cpu")
    assert runner.names == ["my-reward-model", "my-reward-model_2"]
    scores = runner.score(["p", "p"], ["abc", "d"], [[1], [1]], {"answer": [1, 2]})
    expected = one_by_one(model, [tiny_tokenizer()(text)["input_ids"] for text in ("pabc", "pd")])
    assert scores.by_name["my-reward-model"] == pytest.approx(expected, abs=1e-5)
    assert scores.by_name["my-reward-model_2"] == scores.by_name["my-reward-model"]


def test_model_without_a_trained_score_head_is_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.config.num_labels = 1
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no trained weights for \['score\.weight'\]"):
        RewardRunner(str(tmp_path))


def test_two_labels_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_labels=2"):
        RewardRunner(reward_model(num_labels=2), processing_classes=tiny_tokenizer())


def test_name_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        RewardRunner(str(tmp_path / "nothing"))


def test_instance_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="reward_processing_classes"):
        RewardRunner(reward_model())


def test_tokenizer_without_anything_to_pad_with_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="neither pad_token nor eos_token"):
        RewardRunner(reward_model(), processing_classes=tokenizer)


def test_messages_need_a_chat_template() -> None:
    reward = ModelReward(reward_model(), tokenizer=tiny_tokenizer(chat_template=None))
    with pytest.raises(ConfigError, match="has no chat template"):
        reward([[{"role": "user", "content": "hi"}]], [[{"role": "assistant", "content": "yes"}]])


def test_text_longer_than_the_model_reads_is_refused_not_cut() -> None:
    reward = ModelReward(reward_model(), tokenizer=tiny_tokenizer())
    reward(["p"], ["x" * 63])
    with pytest.raises(RewardError, match=r"row 1: 65 tokens, and the model reads at most 64"):
        reward(["p", "p"], ["x", "x" * 64])


@pytest.mark.parametrize(
    ("tokenizers", "message"),
    [
        ([None], "1 entries for 2 rewards"),
        (["tokenizer", "tokenizer"], r"reward_processing_classes\[1\] has no effect"),
    ],
)
def test_tokenizers_belong_to_models(tokenizers: list[Any], message: str) -> None:
    given = [tiny_tokenizer() if entry else None for entry in tokenizers]
    with pytest.raises(ConfigError, match=message):
        RewardRunner([reward_model(), lambda completions: [0.0] * len(completions)], processing_classes=given)


def test_tokenizer_without_a_model_has_no_effect_and_is_refused() -> None:
    with pytest.raises(ConfigError, match="none of reward_funcs is a model"):
        RewardRunner(lambda completions: [0.0] * len(completions), processing_classes=tiny_tokenizer())


def test_one_tokenizer_serves_every_model() -> None:
    model = reward_model()
    runner = RewardRunner([lambda completions: [0.5] * len(completions), model], processing_classes=tiny_tokenizer())
    assert runner.names == ["<lambda>", "Qwen2ForSequenceClassification"]
    assert runner.score(["p"], ["a"], [[1]], {}).matrix()[0][0] == 0.5
