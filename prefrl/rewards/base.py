"""The protocol of a reward function, and the text that rewards read."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

__all__ = ["RewardFunction", "RewardSource", "completion_text", "message_text"]


class RewardFunction(Protocol):
    """`f(prompts, completions, completion_ids, **columns)`: one number, or None, for each completion.

    All arguments are passed by name, and only those that the signature accepts. `prompts` and `completions` are B
    texts, or B lists of messages if the dataset is conversational; `completion_ids` are B lists of token ids. Any
    other name is a dataset column with B values, or one of `trainer_state`, `log_metric` and `log_extra`. None means
    that the reward does not apply to a row. An object may also have a method `setup()`, which is called once before
    training and raises if the reward cannot work.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[float | None] | Awaitable[Sequence[float | None]]:
        """Score B completions."""
        ...


# A function, or a sequence-classification model: its name, its folder or an instance.
RewardSource = RewardFunction | str | os.PathLike[str] | nn.Module


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion. If it is a list of messages, the text of the last assistant message.

    Args:
        completion: A text, or messages. If the content is a list of blocks, its text blocks are used.
    """
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return message_text(said[-1]) if said else ""


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message. If its content is a list of blocks, their texts; without content, nothing."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(block.get("text") or "" for block in content)
    return content or ""
