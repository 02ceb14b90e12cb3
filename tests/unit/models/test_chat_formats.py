"""Chat templates by name, and the tokens that they need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prefrl.errors import ConfigError
from prefrl.models.adapters import add_adapter, lora_config
from prefrl.models.footprint import outline_of
from prefrl.models.load import load_tokenizer
from prefrl.models.tokenizer_changes import CHAT_FORMATS, TokenizerChanges
from prefrl.trainer.configs import DPOConfig, RewardConfig, SFTConfig
from tests.assets import tiny_model, tiny_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "+1?"},
]
RENDERED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n+1?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "llama-3": (
        "<|bos|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n+1?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "gemma": (
        "<|bos|><start_of_turn>user\nBe brief.\n\n1+1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
        "<start_of_turn>user\n+1?<end_of_turn>\n<start_of_turn>model\n"
    ),
    "mistral": "<|bos|>[INST] Be brief.\n\n1+1? [/INST] 2<|end|>[INST] +1? [/INST]",
    "zephyr": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\n1+1?<|end|>\n<|assistant|>\n2<|end|>\n"
        "<|user|>\n+1?<|end|>\n<|assistant|>\n"
    ),
}


@pytest.mark.parametrize("name", CHAT_FORMATS)
def test_a_named_template_writes_the_format_of_its_name(name: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    model = tiny_model(vocab_size=len(tokenizer))
    changes = TokenizerChanges(chat_template_path=name, adds_tokens=True)
    load_tokenizer(model, tokenizer, changes=changes)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == RENDERED[name]
    turn = tokenizer.apply_chat_template(CHAT[:3], tokenize=False).rpartition("2")[2].strip()
    assert turn == tokenizer.eos_token
    assert len(tokenizer(turn, add_special_tokens=False)["input_ids"]) == 1


def test_tokens_that_the_vocabulary_lacks_are_added_with_embeddings() -> None:
    embeddings = []
    for _ in range(2):
        tokenizer, model = tiny_tokenizer(), tiny_model(vocab_size=len(tiny_tokenizer()))
        before = model.get_input_embeddings().weight.clone()
        torch.rand(1)
        TokenizerChanges(chat_template_path="chatml", adds_tokens=True, seed=3).apply(tokenizer, model)
        weight = model.get_input_embeddings().weight
        assert len(weight) == 128  # the next multiple of 64
        assert torch.equal(weight[: len(before)], before)
        embeddings.append(weight[len(before) :])
    assert torch.equal(*embeddings)  # whatever was drawn before
    assert embeddings[0][:2].isfinite().all()


def test_spare_embeddings_are_used_and_none_are_removed() -> None:
    tokenizer, model = tiny_tokenizer(), tiny_model(vocab_size=300)
    TokenizerChanges(chat_template_path="chatml", adds_tokens=True).apply(tokenizer, model)
    assert len(model.get_input_embeddings().weight) == 300
    assert "<|im_end|>" in tokenizer.get_vocab()


def test_an_outline_grows_like_the_model(tmp_path: Path) -> None:
    tiny_model(vocab_size=len(tiny_tokenizer())).save_pretrained(tmp_path)
    outline = outline_of(tmp_path)
    TokenizerChanges(chat_template_path="chatml", adds_tokens=True).apply(tiny_tokenizer(), outline)
    assert outline.get_input_embeddings().weight.shape[0] == 128


def test_a_template_of_a_model_brings_its_tokens_and_its_end(tmp_path: Path) -> None:
    source, tokenizer, model = tiny_tokenizer(), tiny_tokenizer(), tiny_model(vocab_size=300)
    TokenizerChanges(chat_template_path="llama-3", adds_tokens=True).apply(source, tiny_model(vocab_size=300))
    source.add_tokens(["<unused>"])
    source.save_pretrained(tmp_path)
    TokenizerChanges(chat_template_path=str(tmp_path), adds_tokens=True).apply(tokenizer, model)
    assert tokenizer.eos_token == "<|eot_id|>"
    assert "<unused>" not in tokenizer.get_vocab()
    TokenizerChanges(chat_template_path=str(tmp_path), eos_token="~").apply(tokenizer, model)
    assert tokenizer.eos_token == "~"


def test_only_trainers_without_references_add_tokens(tmp_path: Path) -> None:
    adds = {
        cls: cls(output_dir=str(tmp_path), use_cpu=True, chat_template_path="chatml").tokenizer_changes.adds_tokens
        for cls in (SFTConfig, RewardConfig, DPOConfig)
    }
    assert adds == {SFTConfig: True, RewardConfig: True, DPOConfig: False}
    with pytest.raises(ConfigError, match=r"'chatml': the vocabulary lacks '<\|im_start\|>', .*Train with sft"):
        TokenizerChanges(chat_template_path="chatml").apply(tiny_tokenizer(), tiny_model())


def test_an_adapter_is_refused_where_tokens_are_added() -> None:
    model = add_adapter(tiny_model(), lora_config(target_modules=["q_proj"]), task_type="CAUSAL_LM", seed=0)
    with pytest.raises(ConfigError, match=r"embeddings untrained\. Train the embeddings first.*freeze=\['layers'\]"):
        TokenizerChanges(chat_template_path="chatml", adds_tokens=True).apply(tiny_tokenizer(), model)
    TokenizerChanges(chat_template_path="mistral").apply(tiny_tokenizer(), model)
