"""Tiny tokenizer, models and batches that tests make on the spot; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from prefrl.types import TokenBatch

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def tiny_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character and newline; `<|end|>` ends a text, `<|pad|>` pads."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, "<|unk|>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL_TOKENS[2:],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(
    architecture: str = "qwen2", *, seed: int = 0, vocab_size: int = 128, **overrides: Any
) -> PreTrainedModel:
    """A random model of two layers and hidden size 32, in float32, in eval mode; weights depend on `seed` alone."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
    }
    if architecture == "gpt2":
        sizes = {"vocab_size": vocab_size, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes |= {"num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1} | overrides
    return _random_model(AutoModelForCausalLM, AutoConfig.for_model(architecture, **sizes), seed)


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def tiny_mixture(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """`tiny_model` with four experts in each layer, of which each token uses two."""
    return tiny_model("qwen3_moe", seed=seed, **EXPERTS, **overrides)


def tiny_reward_model(*, seed: int = 0, num_labels: int = 1, **overrides: Any) -> PreTrainedModel:
    """`tiny_model` with a score head in the place of its language-model head."""
    config = tiny_model(**overrides).config
    config.num_labels = num_labels
    return _random_model(AutoModelForSequenceClassification, config, seed)


def _random_model(auto_class: Any, config: Any, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto_class.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # larger than usual, so that outputs differ clearly between tokens
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.2)
    return model.eval()  # type: ignore[no-any-return]


def ragged_batch() -> TokenBatch:
    """Rows of 3 prompts, not in the order of the prompts, with tokens that are not trainable."""
    generator = torch.Generator().manual_seed(0)
    prompt_lengths, response_lengths, prompt_index = (3, 7, 1), (4, 1, 6, 2, 5), (1, 0, 1, 2, 0)
    num_tokens = sum(response_lengths)
    return TokenBatch(
        prompt_ids=torch.randint(2, 120, (sum(prompt_lengths),), generator=generator),
        prompt_lengths=prompt_lengths,
        prompt_index=prompt_index,
        response_ids=torch.randint(2, 120, (num_tokens,), generator=generator),
        response_lengths=response_lengths,
        trainable=torch.rand(num_tokens, generator=generator) < 0.8,
        group_index=prompt_index,
    )
