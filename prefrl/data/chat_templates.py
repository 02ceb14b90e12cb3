"""Look at the chat template of a tokenizer, or give it another one; look at and convert single rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import TemplateError
from transformers import AddedToken, AutoTokenizer
from transformers.utils.chat_parsing.response_templates import load_response_template

from prefrl.data.chat import ChatTemplate, common_prefix_length, last_special, prompt_text, special_tokens
from prefrl.data.formats import convert_message
from prefrl.data.images import tokenizer_of
from prefrl.data.tool_calls import tool_call_reader
from prefrl.data.tools import CALLS, TEXT, known_formats
from prefrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from prefrl.data.chat import ProcessingClass
    from prefrl.data.formats import Message

_TEXTS = ("prompt", "chosen", "rejected", "completion", "messages")
_SIDES = ("chosen", "rejected", "completion")
# The columns of a row that a chat template can be applied to.
_KINDS = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "completion", "label"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
)
_ROLES = ("system", "user", "assistant", "tool")


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether one of the columns that prefrl reads holds messages with a role, and not text."""
    return any(_has_keys(example.get(column), "role") for column in _TEXTS)


def is_conversational_from_value(example: Mapping[str, Any]) -> bool:
    """Whether the column `conversations` holds messages with the keys from/value."""
    return _has_keys(example.get("conversations"), "from", "value")


def maybe_convert_to_chatml(example: Mapping[str, Any]) -> dict[str, Any]:
    """The row with `{"from": "human", "value": ...}` written as `{"role": "user", "content": ...}`.

    A column `conversations` is renamed to `messages`. Other columns, and messages with a role, stay as they are; the
    row that is given is not changed.
    """
    converted = {
        name: [convert_message(message) for message in value]
        if name in (*_TEXTS, "conversations") and isinstance(value, list)
        else value
        for name, value in example.items()
    }
    if "conversations" in converted:
        converted["messages"] = converted.pop("conversations")
    return converted


def apply_chat_template(
    example: Mapping[str, Any],
    processing_class: ProcessingClass,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """The texts of a conversational row.

    The prompt ends with the header of an assistant turn, or, if its last message is the assistant's, within that
    message. The completion is everything after the prompt. `messages` become `text`.

    Args:
        example: A row with `messages`; with `prompt`; with `prompt`, `completion` and perhaps `label`; or with
            `chosen`, `rejected` and perhaps `prompt`. `chat_template_kwargs` of the row go to the template, too. Other
            columns are left out.
        processing_class: Tokenizer or processor with the chat template.
        tools: Functions or JSON schemas that the template describes to the model.
        template_kwargs: For the chat template.

    Raises:
        DataError: The row has other columns, or the template refuses the conversation.
    """
    columns = {*_TEXTS, "label"} & example.keys()
    if columns not in _KINDS:
        allowed = "; ".join(", ".join(sorted(kind)) for kind in _KINDS)
        raise DataError(f"columns {sorted(columns)}: a chat template needs one of these sets: {allowed}")
    kwargs = {**(example.get("chat_template_kwargs") or {}), **template_kwargs}
    template = ChatTemplate(processing_class, (), tools, kwargs)
    prompt: Sequence[Message] = example.get("prompt", [])
    sides = {name: template.render([*prompt, *example[name]]) for name in _SIDES if name in columns}
    texts: dict[str, Any] = {"text": template.render(example["messages"])} if "messages" in columns else {}
    if "prompt" in columns:
        opening = prompt_text(template, prompt)
        # Some templates end a prompt with a tag that the whole conversation does not have.
        for text in sides.values():
            opening = opening[: common_prefix_length(opening, text)]
        texts["prompt"] = opening
        sides = {name: text[len(opening) :] for name, text in sides.items()}
    label = {"label": example["label"]} if "label" in columns else {}
    return {**texts, **sides, **label}


def maybe_apply_chat_template(
    example: Mapping[str, Any],
    processing_class: ProcessingClass,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    **template_kwargs: Any,
) -> Mapping[str, Any]:
    """Apply `apply_chat_template` to a conversational row, and return any other row unchanged.

    Raises:
        DataError: See `apply_chat_template`.
    """
    if not is_conversational(example):
        return example
    return apply_chat_template(example, processing_class, tools, **template_kwargs)


def prepare_multimodal_messages(messages: Sequence[Message], images: Sequence[Any] | None = None) -> list[Message]:
    """Messages whose contents are lists of parts, with the images in their places.

    Texts become parts of type "text". The images go to the parts `{"type": "image"}` that have none, in order. If the
    first user message is a text, one such part for each image is put before it. What is given is not changed.

    Args:
        messages: A conversation; a message with tool calls may have no content.
        images: Images of the whole conversation.

    Raises:
        DataError: There are more or fewer places than images, or a message has another role.
    """
    given = list(images or [])
    prepared = [dict(message) for message in messages]
    users = [message for message in prepared if message["role"] == "user" and isinstance(message["content"], str)]
    for message in prepared:
        if message["role"] not in _ROLES:
            raise DataError(f"role {message['role']!r}: must be one of {', '.join(_ROLES)}")
        if isinstance(message.get("content"), str):
            places = [{"type": "image"} for _ in given] if users and message is users[0] else []
            message["content"] = [*places, {"type": "text", "text": message["content"]}]
    written = [message for message in prepared if message.get("content") and message["role"] != "tool"]
    num_places = sum(_is_place(part) for message in written for part in message["content"])
    if num_places != len(given):
        raise DataError(
            f"{len(given)} images for {num_places} places: the messages need one part "
            '{"type": "image"} for each image'
        )
    left = iter(given)
    for message in written:
        message["content"] = [
            {**part, "image": next(left)} if _is_place(part) else part for part in message["content"]
        ]
    return prepared


def _is_place(part: Mapping[str, Any]) -> bool:
    return part["type"] == "image" and "image" not in part


def _has_keys(messages: object, *keys: str) -> bool:
    if not isinstance(messages, list) or not messages:
        return False
    first = messages[0]
    return isinstance(first, dict) and all(key in first for key in keys)


_T = TypeVar("_T", bound="PreTrainedTokenizerBase | ProcessorMixin")
# Texts that no template writes by itself.
_NAME, _KEY, _VALUE, _RESULT = "prefrl_probe_name", "prefrl_probe_key", "prefrl_probe_value", "prefrl_probe_result"
_ASKED, _SAID = "prefrlProbeQuestion", "prefrlProbeAnswer"


def clone_chat_template(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source_tokenizer_path: str,
    resize_to_multiple_of: int | None = 64,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    """Give a model and its tokenizer the chat template of another tokenizer, with the tokens that it needs.

    The added tokens and the end-of-sequence token of the source are taken over, too. The embeddings of the model grow
    to the new size of the vocabulary, and the tokenizer gets a token `<extra_id_...>` for each row without one.

    Args:
        model: Changed in place.
        tokenizer: Changed in place.
        source_tokenizer_path: The tokenizer that has the template: its name on the Hub, or its folder.
        resize_to_multiple_of: The number of embeddings is rounded up to a multiple of this.

    Returns:
        The model, the tokenizer, and the ids of all tokens that were added.

    Raises:
        ConfigError: The source has no chat template.
    """
    source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    if source.chat_template is None:
        raise ConfigError(f"source_tokenizer_path={source_tokenizer_path!r}: this tokenizer has no chat template")
    vocabulary = tokenizer.get_vocab()
    added = [token for token in source.added_tokens_decoder.values() if token.content not in vocabulary]
    tokenizer.chat_template = source.get_chat_template()
    tokenizer.add_tokens(added)
    tokenizer.eos_token = source.eos_token
    model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    if model.can_generate():  # a classifier may have no generation config
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    names = (f"<extra_id_{number}>" for number in range(model.vocab_size + len(tokenizer)))
    while len(tokenizer) < model.vocab_size:
        token = AddedToken(next(names))
        if tokenizer.add_tokens(token):  # 0: there is one of this name
            added.append(token)
    return model, tokenizer, tokenizer.convert_tokens_to_ids([token.content for token in added])


def get_training_chat_template(processing_class: ProcessingClass) -> None:
    """Always None, because no chat template has to be patched for training.

    prefrl finds the assistant's turns in what the model's own template renders, with or without `{% generation %}`
    markers, and never renders again what was sampled.

    Raises:
        ConfigError: There is no chat template.
    """
    _check_has_template(processing_class)


def has_generation_markers(chat_template: str | Mapping[str, str]) -> bool:
    """Whether a chat template marks what the assistant writes by `{% generation %}`.

    Args:
        chat_template: The template. If there are several by name, the one named `default` is used.
    """
    text = chat_template if isinstance(chat_template, str) else chat_template["default"]
    return re.search(r"{%[-+]?\s*generation\s*[-+]?%}", text) is not None


def is_chat_template_prefix_preserving(processing_class: ProcessingClass) -> bool:
    """Whether a turn with a tool call has the same tokens when the tool's result and a new turn follow.

    Training with tools does not need such a template. False also if the template renders no tool calls.

    Raises:
        ConfigError: There is no chat template.
    """
    _check_has_template(processing_class)
    template, tokenizer = ChatTemplate(processing_class, ()), tokenizer_of(processing_class)
    for turns in _tool_turns(template):
        texts = template.try_render(turns[:2]), template.try_render(turns, add_generation_prompt=True)
        if None not in texts:
            called, answered = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
            return common_prefix_length(called, answered) == len(called)
    return False


def is_chat_template_stop_token_trained(processing_class: ProcessingClass, chat_template: str | None = None) -> bool:
    """Whether the `{% generation %}` markers of a template include the token that ends an assistant's turn.

    prefrl's trainers do not need them; see `get_training_chat_template`. False also if there are no markers.

    Args:
        processing_class: The tokenizer or processor.
        chat_template: The template. The default is the tokenizer's.
    """
    tokenizer: Any = tokenizer_of(processing_class)
    if chat_template is None:
        chat_template = processing_class.get_chat_template() if processing_class.chat_template else ""
    if not has_generation_markers(chat_template):
        return False
    # Some templates end a turn only where the next one begins.
    turns = [*_said_turns(ChatTemplate(processing_class, ())), {"role": "user", "content": _ASKED}]
    try:
        found = tokenizer.apply_chat_template(
            turns, chat_template=chat_template, return_dict=True, return_assistant_tokens_mask=True
        )
    except (TemplateError, TypeError, ValueError):
        return False
    marked = [token for token, mask in zip(found["input_ids"], found["assistant_masks"], strict=True) if mask]
    visible = [token for token in marked if tokenizer.decode([token]).strip()]
    return bool(visible) and visible[-1] in tokenizer.get_added_vocab().values()


def parse_response(
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    prefix: list[int] | None = None,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
) -> Message:
    """Parse a completion into a message with the tokenizer's `response_template`; see `add_response_schema`.

    Args:
        tokenizer: Has a response template.
        ids: The tokens of the completion.
        prefix: The tokens of the prompt.
        tools: Functions or JSON schemas, whose types the arguments of a call get.

    Returns:
        The message, with `content`, and `tool_calls` if there are some. If it cannot be read, as when a tool call is
        malformed or has no name: the whole text as the content.
    """
    reader: Any = tokenizer
    try:
        given = {} if prefix is None else {"prefix": prefix, "tools": tools}
        message: Message = dict(reader.parse_response(ids, **given) or {})
        for call in message.get(CALLS) or []:
            called = call.get("function", call)
            if not isinstance(called["name"], str):
                raise ValueError("a tool call without a name")
            called["arguments"] = called.get("arguments") or {}
        if not message:
            raise ValueError("nothing was read")
    except (ValueError, TypeError, LookupError, AttributeError):
        return {"role": "assistant", TEXT: tokenizer.decode(ids, skip_special_tokens=True)}
    content = message.get(TEXT) or ""
    return {**message, TEXT: content.removesuffix(str(tokenizer.eos_token)) if isinstance(content, str) else content}


def supports_tool_calling(processing_class: ProcessingClass) -> bool:
    """Whether the chat template renders tool calls and results: name, arguments, and the text of the result."""
    if processing_class.chat_template is None:
        return False
    template = ChatTemplate(processing_class, ())
    rendered = [template.try_render(turns) or "" for turns in _tool_turns(template)]
    return any(all(part in text for part in (_NAME, _KEY, _VALUE, _RESULT)) for text in rendered)


def add_response_schema(processing_class: _T) -> _T:
    """Set `response_template` of the tokenizer, with which `tokenizer.parse_response` reads tool calls.

    Training with tools does not need this function: it finds the format by itself. This function uses the same check:
    the format must parse what the chat template renders.

    Args:
        processing_class: A tokenizer, or a processor, whose tokenizer is changed.

    Returns:
        The tokenizer or processor that was given.

    Raises:
        ConfigError: There is no chat template, it renders no tool calls, or no known format reads them.
    """
    _check_has_template(processing_class)
    tokenizer: Any = getattr(processing_class, "tokenizer", processing_class)
    template = ChatTemplate(processing_class, special_tokens(tokenizer))
    name = tool_call_reader(template, {}).name
    if name not in known_formats():
        return processing_class  # the tokenizer's own response template has passed the proof
    before = getattr(tokenizer, "response_template", None)
    tokenizer.response_template = _with_borders(known_formats()[name], template)
    if not _is_read_back(tokenizer, template):
        tokenizer.response_template = before
        raise ConfigError(
            f"tokenizer.parse_response cannot read the tool calls of {template.name!r}, whose format is {name!r}. Set "
            "tokenizer.response_template yourself. Training with tools can read them, and needs no response template."
        )
    return processing_class


def _with_borders(response_template: Any, template: ChatTemplate) -> dict[str, Any]:
    """A response template that starts behind the header of a turn and stops at the token that ends one."""
    ask, said = _said_turns(template)
    prompt = template.render([ask], add_generation_prompt=True)
    header = prompt[common_prefix_length(prompt, template.render([ask])) :]
    fields = load_response_template(response_template).fields.values()
    opens = [match.start() for field in fields if field.open_re for match in field.open_re.finditer(header)]
    tail = template.render([ask, said]).rpartition(_SAID)[2]
    end = last_special(tail, template.special_tokens)
    spans = {name: {**field} for name, field in response_template["fields"].items()}
    if end is not None:
        ends = rf"\s*{re.escape(tail[end.start : end.stop])}\s*"
        if "close" not in spans[CALLS]:
            known = spans[CALLS].get("close_pattern")
            spans[CALLS]["close_pattern"] = ends if known is None else f"{known}|{ends}"
        if not {"open", "open_pattern"} & spans[TEXT].keys():
            spans[TEXT] = {**spans[TEXT], "close_pattern": ends}
            spans[TEXT].pop("close", None)
    about = {key: value for key, value in response_template.items() if not key.startswith("start_anchor")}
    return {**about, "start_anchor": header[: min(opens, default=len(header))], "fields": spans}


def _is_read_back(tokenizer: Any, template: ChatTemplate) -> bool:
    """Whether the tokenizer reads a turn with a call, and one without, as they were before they were rendered."""

    def read(turns: list[Message]) -> Message:
        prompt, rendered = template.render(turns[:1], add_generation_prompt=True), template.try_render(turns) or ""
        start = common_prefix_length(prompt, rendered)
        try:
            return dict(tokenizer.parse_response(rendered[start:], prefix=prompt[:start]))
        except Exception:  # the parser and the transforms of a format may raise anything
            return {}

    called = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    calls = [read(turns[:2]).get(CALLS) for turns in _tool_turns(template)]
    return [{"type": "function", "function": called}] in calls and read(_said_turns(template)).get(TEXT) == _SAID


def _said_turns(template: ChatTemplate) -> list[Message]:
    return _in_its_form(template, [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}])


def _tool_turns(template: ChatTemplate) -> Iterator[list[Message]]:
    """A conversation with a tool: with its arguments as a mapping and, as some templates need them, as JSON text."""
    for arguments in ({_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}'):
        call = {"type": "function", "function": {"name": _NAME, "arguments": arguments}}
        turns: list[Message] = [
            {"role": "user", "content": _ASKED},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": _NAME, "content": _RESULT},
        ]
        yield _in_its_form(template, turns)


def _in_its_form(template: ChatTemplate, turns: list[Message]) -> list[Message]:
    is_processor = hasattr(template.tokenizer, "tokenizer")  # its template reads contents as lists of parts
    return prepare_multimodal_messages(turns) if is_processor else turns


def _check_has_template(processing_class: ProcessingClass) -> None:
    if processing_class.chat_template is None:
        raise ConfigError(
            "the tokenizer has no chat template. Set tokenizer.chat_template, or use the tokenizer of an "
            "instruction-tuned model."
        )
