"""Chat templates of several shapes, and a tokenizer that has their special tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from tests.assets import tiny_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
# Thinking stands only in the last turn, as Qwen3 does; an empty block stands where generation must not think.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].strip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The generation prompt opens the thinking that the template takes out of every turn, as DeepSeek-R1 does.
OPENS_THINKING = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content.split('</think>')[-1] }}{% if m.role == 'assistant' %}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# An end of text that is there only while nothing follows, and starts as the next header does, as Phi-3 does.
ENDS_TEXT = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|end|>{% endif %}"
)
# Another name for the assistant, no system role, turns that must alternate, as Gemma does.
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
# Only the last turn has a block of thinking, even an empty one; a turn may be nothing but a call of a tool.
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% if m.tool_calls %}{% if m.content %}\n\n{% endif %}<call>{{ m.tool_calls[0].name }}</call>{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n{% endif %}{% endif %}"
)
# Tokens that end a turn are the next header, as GLM does; another one follows a call than an answer.
HEADERS_END = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if not m.tool_calls }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    " {{ k }}={{ v }}{% endfor %}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A call ends with a token of its own, and an answer with another one where nothing follows, as GPT-OSS does.
CALLS_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: "
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}<|eot|>"
    "{% elif loop.last and m.role == 'assistant' and not add_generation_prompt %}{{ m.content }}<|end|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
# The result of a tool goes on in the turn that called it, before the content of that turn, as Gemma 4 does.
ONE_TURN = (
    "{% for m in messages if m.role != 'tool' %}<|header|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}<|eot|>{% endfor %}"
    "{% if m.tool_calls %}{% for t in messages if t.role == 'tool' %}<|tool|>{{ t.content }}{% endfor %}{% endif %}"
    "{{ m.content }}{% if not m.tool_calls %}<|/header|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|header|>assistant\n{% endif %}"
)
# Thinking has a field of its own, and stays in every turn.
KEEPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SHOUTS = (  # neither a prefix nor the content survives in a longer conversation
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content if loop.last or m.role == 'user' else m.content | upper }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with `<|bos|>`, which it does not add by itself, and the templates' tokens."""
    tokenizer = tiny_tokenizer(chat_template=chat_template)
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    names = ["<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>"]
    tokenizer.add_tokens(names, special_tokens=True)
    return tokenizer


def trained_text(row: dict[str, list], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The runs of tokens that have a loss, as text."""
    runs, last = [], False
    for token, is_trained in zip(tokenizer.convert_ids_to_tokens(row["input_ids"]), row["trainable"], strict=True):
        if is_trained:
            runs[-1:] = [runs[-1] + token] if last else [*runs[-1:], token]
        last = is_trained
    return runs
