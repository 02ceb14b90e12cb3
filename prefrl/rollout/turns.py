"""What the model said in one turn of a conversation, as a message."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from prefrl.data.chat import ChatTemplate
from prefrl.data.formats import Message
from prefrl.data.next_turn import said_text
from prefrl.data.tokenize import decoded_completion
from prefrl.data.tool_calls import ParsedTurn, ToolCallReader
from prefrl.types import Completion, Turn

# How many ids of the prompt's end are decoded to see whether it opens the model's thinking.
_PROMPT_END_IDS = 64


def read_turn(
    template: ChatTemplate, reader: ToolCallReader | None, turn: Turn, call_id: Callable[[int], str]
) -> tuple[ParsedTurn, Message]:
    """What the model said in a turn: read, and as a message.

    Args:
        template: The conversation's.
        reader: Reads calls; None: there are no tools.
        turn: What was sent and sampled.
        call_id: The id of each call, by its number in the turn.
    """
    tokenizer, completion = template.tokenizer, turn.completion
    if reader is None:
        parsed = ParsedTurn(str(decoded_completion(tokenizer, completion.token_ids, conversational=False)), ())
    else:
        text = tokenizer.decode(completion.token_ids, clean_up_tokenization_spaces=False)
        before = tokenizer.decode(turn.sent_ids[-_PROMPT_END_IDS:], clean_up_tokenization_spaces=False)
        parsed = reader.read(text, prompt=before)
    if any(not call.name for call in parsed.calls):  # what could not be read stays text
        return parsed, {"role": "assistant", "content": said_text(template, turn)}
    message: Message = {"role": "assistant", "content": parsed.text}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call_id(number),
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for number, call in enumerate(parsed.calls)
        ]
    return parsed, message


def call_id(turn: int, number: int) -> str:
    """Nine letters and digits, as some templates demand, that no other call of the conversation has."""
    return f"c{turn % 10**4:04}{number % 10**4:04}"


def first_tokens(turn: Turn, count: int) -> Turn:
    """The turn as if it had ended with so many tokens."""
    whole = turn.completion
    parts = whole.logprobs[:count], whole.trainable[:count], whole.policy_versions[:count]
    routes = None if whole.routes is None else whole.routes[: len(whole.routes) - len(whole.token_ids) + count]
    return Turn(turn.sent_ids, Completion(whole.token_ids[:count], "stop_string", *parts, routes))


def with_new_routes(turn: Turn, before: Turn | None) -> Turn:
    """The turn without the experts of tokens that the turn before it has run, if it continues that one.

    Otherwise, an episode would keep the experts of its first tokens as often as it has turns.
    """
    routes = turn.completion.routes
    if before is None or routes is None or before.completion.routes is None:
        return turn
    ids = [*before.sent_ids, *before.completion.token_ids]
    if turn.sent_ids[: len(ids)] != ids:
        return turn
    num_new = len(turn.sent_ids) + len(turn.completion.token_ids) - len(ids)  # with the last one of before
    return Turn(turn.sent_ids, replace(turn.completion, routes=routes[-num_new:].clone()))


def num_thought(template: ChatTemplate, turn: Turn, message: Message) -> int:
    """The tokens of a turn up to the end of its thinking."""
    thinking, ids = message.get("reasoning_content"), turn.completion.token_ids
    if not thinking or thinking not in said_text(template, turn):
        return 0
    return bisect_left(range(len(ids)), True, key=lambda n: thinking in said_text(template, first_tokens(turn, n)))
