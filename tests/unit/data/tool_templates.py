"""Chat templates that render tool calls, one for each format. Headers are the same for most of them."""

from __future__ import annotations

from prefrl.data.chat import ChatTemplate, special_tokens
from tests.unit.data.templates import chat_tokenizer

HEADER, GENERATION = "<|im_start|>{{ m.role }}\n", "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
JSON = '"arguments": {{ f.arguments | tojson }}'


def template(call: str, *, start: str = "", between: str = "", stop: str = "", end: str = "<|im_end|>") -> str:
    """A template whose calls are rendered as `call`, of a function `f`; `start` and `stop` stand around all calls."""
    calls = (
        f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{{% if not loop.last %}}{between}{{% endif %}}"
    )
    return (
        f"{{% for m in messages %}}{HEADER}{{{{ m.content }}}}"
        f"{{% if m.tool_calls %}}{start}{calls}{{% endfor %}}{stop}{{% endif %}}{end}\n{{% endfor %}}{GENERATION}"
    )


def arguments(one: str) -> str:
    """Renders each argument of a function as `one`, of its key `k` and its value as text `v`."""
    value = "{% set v = value if value is string else value | tojson %}"
    return f"{{% for k, value in f.arguments.items() %}}{value}{one}{{% endfor %}}"


def deepseek(text: str) -> str:
    """Underscores between lower bars are those of a token's name."""
    return text.replace("<|", "<\uff5c").replace("|>", "\uff5c>").replace("_", "\u2581")


HERMES = template('\n<tool_call>\n{"name": "{{ f.name }}", ' + JSON + "}\n</tool_call>")
PYTHON_VALUE = "{{ k }}={% if value is string %}'{{ value }}'{% else %}{{ value }}{% endif %}"
OPEN, CLOSE = "{{ '{' }}", "{{ '}' }}"
SPACED = arguments('<x:parameter name="{{ k }}">{{ v }}</x:parameter>')
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{% if m.content %}<|channel|>analysis<|message|>{{ m.content }}<|end|><|start|>assistant{% endif %}"
    " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
RECIPIENTS = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.role == 'user' %}<|message|>{% elif m.content %} to=user<|message|>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{% set f = c.function %}"
    "{% if m.content or not loop.first %}<|eom|><|start|>assistant{% endif %} to={{ f.name }}<|message|>"
    '<x:invoke name="{{ f.name }}">' + SPACED + "</x:invoke>{% endfor %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
BARE = (  # one call, and no text beside it
    "{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    '{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)

# The format that reads a template's calls.
FORMATS = {
    "qwen2": HERMES,
    "qwen3_5": template(
        "\n<tool_call>\n<function={{ f.name }}>\n"
        + arguments("<parameter={{ k }}>\n{{ v }}\n</parameter>\n")
        + "</function>\n</tool_call>"
    ),
    "gemma4": template(
        "<|tool_call>call:{{ f.name }}"
        + OPEN
        + "{% for k, v in f.arguments.items() %}{{ k }}:{{ v | tojson | replace('\"', '<|\"|>') }}"
        + "{% if not loop.last %},{% endif %}{% endfor %}"
        + CLOSE
        + "<tool_call|>"
    ),
    "llama3": BARE,
    "mistral": template(
        '{"name": "{{ f.name }}", ' + JSON + ', "id": "{{ c.id }}"}', start="[TOOL_CALLS] [", between=", ", stop="]"
    ),
    "mistral_args": template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "deepseek_v3": template(
        deepseek("<|tool_call_begin|>function<|tool_sep|>{{ f.name }}\n```json\n")
        + "{{ f.arguments | tojson }}"
        + deepseek("\n```<|tool_call_end|>"),
        start=deepseek("<|tool_calls_begin|>"),
        between="\n",
        stop=deepseek("<|tool_calls_end|>"),
    ),
    "glm4_moe": template(
        "\n<tool_call>{{ f.name }}\n"
        + arguments("<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n")
        + "</tool_call>"
    ),
    "muse": RECIPIENTS,
    "lfm2": template(
        "{{ f.name }}({% for k, value in f.arguments.items() %}"
        + PYTHON_VALUE
        + "{% if not loop.last %}, {% endif %}{% endfor %})",
        start="<|tool_call_start|>[",
        between=", ",
        stop="]<|tool_call_end|>",
    ),
    "gpt_oss": HARMONY,
}
# Arguments are added to a text, as those that are JSON already.
DEEPSEEK_NEW = template(
    deepseek("<|tool_call_begin|>{{ f.name }}<|tool_sep|>{{ '' + f.arguments }}<|tool_call_end|>"),
    start=deepseek("<|tool_calls_begin|>"),
    stop=deepseek("<|tool_calls_end|>"),
).replace("{{ '' + f.arguments }}".replace("_", "\u2581"), "{{ '' + f.arguments }}")


def tool_template(jinja: str) -> ChatTemplate:
    tokenizer = chat_tokenizer(jinja)
    return ChatTemplate(tokenizer, (*special_tokens(tokenizer), "<|call|>", "<|return|>", "<|eom|>"))
