"""Look at and convert single dataset rows; for `Dataset.map` and for one's own scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prefrl.data.chat import ChatTemplate, common_length, prompt_text
from prefrl.data.formats import convert_message
from prefrl.errors import DataError

if TYPE_CHECKING:
    from prefrl.data.chat import ProcessingClass
    from prefrl.data.formats import Message

__all__ = [
    "apply_chat_template",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "prepare_multimodal_messages",
]

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

    A prompt ends with the header of an assistant's turn, or inside its last message if the assistant wrote that. A
    completion is what the whole conversation has behind the prompt. `messages` become `text`.

    Args:
        example: `messages`; `prompt`; `prompt` and `completion`, and maybe `label`; or `chosen` and `rejected`, and
            maybe `prompt`. `chat_template_kwargs` of the row go to the template, too. Other columns are left out.
        processing_class: Has the chat template.
        tools: Functions or JSON schemas that the template describes to the model.
        template_kwargs: For the chat template.

    Raises:
        DataError: The columns are none of those, or the template refuses the conversation.
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
            opening = opening[: common_length(opening, text)]
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
    """`apply_chat_template` of a conversational row; any other row as it is.

    Raises:
        DataError: See `apply_chat_template`.
    """
    if not is_conversational(example):
        return example
    return apply_chat_template(example, processing_class, tools, **template_kwargs)


def prepare_multimodal_messages(messages: Sequence[Message], images: Sequence[Any] | None = None) -> list[Message]:
    """Messages whose contents are lists of parts, with the images in their places.

    Texts become parts of type "text". The images go to the parts `{"type": "image"}` that have none, in order. If the
    first user message is a text, such a part for each image is put before it. What is given is not changed.

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
