"""A tiny model with random weights, and a tokenizer of a few words, for examples that learn on a CPU in a minute.

python examples/tiny.py FOLDER WORD ... saves both in a folder.
"""

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<end>", "<system>", "<user>", "<assistant>", "<tool>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}"
    "{% for value in call.function.arguments.values() %} {{ value }}{% endfor %}{% endfor %} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tiny_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """One token for each word; words are written with spaces between them."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, "<unknown>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unknown>",
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, family: str = "qwen2") -> PreTrainedModel:
    """Two layers of width 64, in float32. To load it by name, use llama: transformers replaces tokenizers of qwen2."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=128,
        max_position_embeddings=128,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def main(folder: str, words: list[str]) -> None:
    """Save model and tokenizer, which can be loaded by the folder's name."""
    tokenizer = tiny_tokenizer(words)
    tiny_model(tokenizer, family="llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
