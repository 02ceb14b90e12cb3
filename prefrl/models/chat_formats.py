"""Chat templates for base models, by name."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHAT_FORMATS", "ChatFormat"]


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation is written.

    Args:
        template: The Jinja template.
        tokens: Special tokens that it writes, besides those that begin and end a text.
        eos_token: The one of them that ends a turn of the assistant; None: the tokenizer's own end of a text does.
    """

    template: str
    tokens: tuple[str, ...] = ()
    eos_token: str | None = None


# Formats without a system role put its text in front of the first user's.
_SYSTEM_FIRST = (
    "{% set text = namespace(system='') %}{% for m in messages %}"
    "{% if m.role in ('system', 'developer') %}{% set text.system = m.content + '\n\n' %}{% else %}"
)
_USER = "{% set user = text.system + m.content %}{% set text.system = '' %}"

CHAT_FORMATS: dict[str, ChatFormat] = {
    "chatml": ChatFormat(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        tokens=("<|im_start|>", "<|im_end|>"),
        eos_token="<|im_end|>",
    ),
    "llama-3": ChatFormat(
        "{{ bos_token or '' }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        eos_token="<|eot_id|>",
    ),
    "gemma": ChatFormat(
        "{{ bos_token or '' }}" + _SYSTEM_FIRST + "{% if m.role == 'assistant' %}<start_of_turn>model\n"
        "{{ m.content | trim }}{% else %}" + _USER + "<start_of_turn>user\n{{ user | trim }}{% endif %}"
        "<end_of_turn>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        tokens=("<start_of_turn>", "<end_of_turn>"),
        eos_token="<end_of_turn>",
    ),
    "mistral": ChatFormat(
        "{{ bos_token or '' }}"
        + _SYSTEM_FIRST
        + "{% if m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
        "{% else %}" + _USER + "[INST] {{ user | trim }} [/INST]{% endif %}{% endif %}{% endfor %}"
    ),
    "zephyr": ChatFormat(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
}
