"""Shows an episode in the terminal while it is played: turns, tokens, calls, rewards, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from prefrl.data.tools import signature_of
from prefrl.errors import printable
from prefrl.rollout.episodes.play import Played, Player
from prefrl.types import Episode, StopReason, Turn

_STYLES = {"assistant": "bold green", "tool": "bold magenta"}


class EpisodeView:
    """Shows an episode while it is played.

    Args:
        console: Where.
        has_tokens: Whether tokens are those of a model, so that they are counted.
        is_typed: Whether the terminal has what the assistant says.
    """

    def __init__(self, console: Console, *, has_tokens: bool, is_typed: bool) -> None:
        self._console, self._has_tokens, self._is_typed = console, has_tokens, is_typed
        self._num_messages = self._num_turns = 0  # that were shown

    def begin(self, player: Player) -> None:
        """Say what can be called."""
        kind = player.seat.kind
        calls = [signature_of(schema) for schema in kind.schemas.values()]
        if calls:
            self._note(f"{kind.name}: the model can call {', '.join(calls)}")

    def show(self, played: Played, token_ids: Sequence[int] | None) -> None:
        """Show what is new.

        Args:
            played: The episode until now.
            token_ids: What the next turn sees; None: the episode is over.
        """
        if not played.turns:
            for message in played.prompt:
                self._message(message)
            self._tokens(f"{len(token_ids or ())} tokens of context")
        for message in played.said[self._num_messages :]:
            self._message(message)
            if message["role"] == "assistant":
                self._sampled(played.turns[self._num_turns])
                self._num_turns += 1
        self._num_messages = len(played.said)
        if not played.turns:
            return
        if played.turn_rewards[-1]:
            self._note(f"reward {played.turn_rewards[-1]:+g}")
        if token_ids is not None:
            last = played.turns[-1]
            row = [*last.sent_ids, *last.completion.token_ids]
            is_longer = list(token_ids[: len(row)]) == row
            more = f"{len(token_ids) - len(row)} more" if is_longer else f"rendered anew: {len(token_ids)}"
            self._tokens(f"{more} tokens of context")

    def _message(self, message: Mapping[str, Any]) -> None:
        role = str(message["role"])
        name = f" {message['name']}" if message.get("name") else ""
        style = _STYLES.get(role, "bold blue")
        if role != "assistant" or not self._is_typed:
            self._console.print(f"[{style}]{role}{escape(name)}>[/] {self._text(message)}", soft_wrap=True)
        for call in message.get("tool_calls") or ():
            function = call["function"]
            words = ", ".join(f"{key}={json.dumps(value)}" for key, value in function["arguments"].items())
            self._note(f"calls {function['name']}({words})")

    def _text(self, message: Mapping[str, Any]) -> str:
        content = message["content"]
        if isinstance(content, list):
            content = "".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
        reasoning = message.get("reasoning_content")
        thought = f"[dim]{escape(printable(str(reasoning)))}[/dim]\n" if reasoning else ""
        return thought + escape(printable(str(content)))

    def _sampled(self, turn: Turn) -> None:
        count, trained = len(turn.completion.token_ids), sum(turn.completion.trainable)
        self._tokens(f"{count} tokens sampled, {trained} of them trained on")

    def _tokens(self, text: str) -> None:
        if self._has_tokens:
            self._note(text)

    def _note(self, text: str) -> None:
        self._console.print(f"  [dim]{escape(printable(text))}[/dim]", soft_wrap=True)

    def end(self, played: Played, episode: Episode, scores: Mapping[str, tuple[float | None, float]]) -> float:
        """Say how it ended, and what it is worth.

        Returns:
            The reward.
        """
        turns = f"{len(played.turns)} turn{'' if len(played.turns) == 1 else 's'}"
        self._console.print(f"ended after {turns}: {_words(episode.stop_reason)}", soft_wrap=True)
        if episode.num_calls:
            self._note(f"{episode.num_calls} calls, of which {episode.num_failed_calls} failed")
        for name, (value, weight) in scores.items():
            if len(scores) > 1:
                self._note(f"{name}: {value if value is None else format(value, 'g')}, weight {weight:g}")
        if any(episode.turn_rewards):
            self._note(f"rewards of the turns: {', '.join(f'{value:g}' for value in episode.turn_rewards)}")
        for name, part in episode.rewards.items():
            self._note(f"get_reward: {name} {part:g}")
        total = sum(value * weight for value, weight in scores.values() if value is not None)
        self._console.print(f"reward {total:g}" if scores else "no reward")
        return total


def _words(reason: StopReason) -> str:
    words: dict[StopReason, str] = {
        "stop": "the model called no tool, and nothing replied",
        "max_turns": "the turns that max_turns or max_tool_calling_iterations allow are used up",
        "max_tokens": "the tokens that max_completion_length allows are used up",
        "context": "the model's context is full",
        "tool_done": "a tool or the environment said that it is over",
        "parse_error": "a limit was reached right after a call that could not be read or run",
        "timeout": "the seconds that episode_timeout allows are used up",
    }
    return f"{reason} ({words[reason]})"
