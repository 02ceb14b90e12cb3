"""Chat templates taken over, and what they can render."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from prefrl.data.chat_templates import (
    add_response_schema,
    clone_chat_template,
    get_training_chat_template,
    supports_tool_calling,
)
from prefrl.errors import ConfigError
from tests.assets import tiny_model, tiny_tokenizer
from tests.unit.data import templates
from tests.unit.data.templates import chat_tokenizer
from tests.unit.data.tool_templates import DEEPSEEK_NEW, FORMATS, HERMES

ASK = {"role": "user", "content": "hi"}
NAMES = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
)
ARGUMENTS = {"a": 3, "b": "x y"}


@pytest.fixture
def source(tmp_path: Path) -> str:
    chat_tokenizer(templates.CHATML).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(("multiple", "size"), [(64, 192), (None, 128), (100, 200)])
def test_a_cloned_template_brings_its_tokens_and_every_embedding_has_one(
    source: str, multiple: int | None, size: int
) -> None:
    # 103 tokens here, of which the model has embeddings for 128, and 6 more in the source.
    model, tokenizer = tiny_model(vocab_size=len(tiny_tokenizer())), tiny_tokenizer()
    before, embeddings = len(tokenizer), model.get_input_embeddings().weight.clone()
    model, tokenizer, added = clone_chat_template(model, tokenizer, source, resize_to_multiple_of=multiple)
    needed = before + 6
    size = needed if multiple is None else -(-needed // multiple) * multiple
    assert model.vocab_size == len(tokenizer) == size
    assert added == list(range(before, size))
    assert tokenizer.convert_ids_to_tokens(added[:2]) == ["<|bos|>", "<|im_start|>"]
    assert torch.equal(model.get_input_embeddings().weight[:before], embeddings)
    assert tokenizer.chat_template == templates.CHATML
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_the_end_of_a_turn_is_cloned_into_model_and_tokenizer(tmp_path: Path) -> None:
    other = chat_tokenizer(templates.CHATML)
    other.eos_token = "<|im_end|>"
    other.save_pretrained(tmp_path)
    model, tokenizer, _ = clone_chat_template(tiny_model(), tiny_tokenizer(), str(tmp_path))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == end


def test_a_source_without_a_template_is_refused(tmp_path: Path) -> None:
    chat_tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="this tokenizer has no chat template"):
        clone_chat_template(tiny_model(), tiny_tokenizer(), str(tmp_path))


def test_no_template_has_to_be_patched_but_there_must_be_one() -> None:
    assert get_training_chat_template(chat_tokenizer(templates.THINKING)) is None
    for function in (get_training_chat_template, add_response_schema):
        with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
            function(chat_tokenizer(None))


@pytest.mark.parametrize(
    ("template", "supports"),
    [
        (templates.CHATML, False),  # prints contents alone
        (templates.STRICT, False),  # refuses the role of a tool
        (NAMES, False),  # does not print the arguments
        (HERMES, True),
        (DEEPSEEK_NEW, True),  # takes arguments as text
        (None, False),
    ],
    ids=["contents", "strict", "names", "hermes", "deepseek", "none"],
)
def test_tools_are_supported_if_call_and_result_are_rendered(template: str | None, supports: bool) -> None:
    assert supports_tool_calling(chat_tokenizer(template)) is supports


@pytest.mark.parametrize(
    ("template", "arguments"),
    [(HERMES, ARGUMENTS), (FORMATS["llama3"], ARGUMENTS), (DEEPSEEK_NEW, json.dumps(ARGUMENTS))],
    ids=["hermes", "llama", "deepseek"],
)
def test_a_response_schema_reads_calls_and_text(template: str, arguments: object) -> None:
    tokenizer = chat_tokenizer(template)
    assert add_response_schema(tokenizer) is tokenizer
    written = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    prompt = tokenizer.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False)

    def read(**turn: object) -> dict[str, object]:
        whole = tokenizer.apply_chat_template([ASK, {"role": "assistant", **turn}], tokenize=False)
        message: dict[str, object] = tokenizer.parse_response(whole.removeprefix(prompt), prefix=prompt)
        return message

    call = {"type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    assert read(content="", tool_calls=[written])["tool_calls"] == [call]
    assert read(content="Hello.") == {"role": "assistant", "content": "Hello."}


def test_calls_that_the_parser_of_transformers_cannot_read_are_refused() -> None:
    tokenizer = chat_tokenizer(FORMATS["lfm2"])
    with pytest.raises(ConfigError, match=r"parse_response cannot read the tool calls .* format is 'lfm2'"):
        add_response_schema(tokenizer)
    assert getattr(tokenizer, "response_template", None) is None
    with pytest.raises(ConfigError, match="renders no tool calls"):
        add_response_schema(chat_tokenizer(templates.CHATML))
