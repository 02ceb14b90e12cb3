"""Shows an episode in the terminal while it is played: turns, tokens, calls, rewards, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from prefrl.data.chat import common_prefix_length
from prefrl.data.tools import Schema, signature_of
from prefrl.errors import printable
from prefrl.rollout.episodes.agent import AgentPlayer
from prefrl.rollout.episodes.play import Played, Player
from prefrl.rollout.gateway.session import Session
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
        self._name = self._calls = ""
        self._rewards: list[float] = []  # of the turns of an agent that were shown

    def begin(self, player: Player | AgentPlayer) -> None:
        """Say what can be called."""
        self._name = player.seat.kind.name
        self._callable([*player.seat.kind.schemas.values()])

    def _callable(self, tools: Sequence[Schema]) -> None:
        calls = ", ".join(map(signature_of, tools))
        if calls != self._calls:
            self._calls = calls
            self._note(f"{self._name}: the model can call {calls or 'nothing'}")

    def show(self, player: Player | AgentPlayer, token_ids: Sequence[int] | None) -> None:
        """Show what is new.

        Args:
            player: Plays the episode.
            token_ids: What the next turn sees; None: the episode is over.
        """
        if not isinstance(player, AgentPlayer):
            self._show_played(player.played, token_ids)
        elif player.session is not None:
            self._show_session(player.session, token_ids)

    def _show_played(self, played: Played, token_ids: Sequence[int] | None) -> None:
        if not played.turns:
            for message in played.prompt:
                self._message(message)
            self._tokens(f"{len(token_ids or ())} tokens of context")
        for message in played.said[self._num_messages :]:
            self._message(message, is_typed=self._is_typed and message["role"] == "assistant")
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

    def _show_session(self, session: Session, token_ids: Sequence[int] | None) -> None:
        """Show the answers and rewards since the last request, and what is new in this one."""
        for number in range(len(self._rewards), len(session.turns)):
            self._message(session.conversations[number][-1], is_typed=self._is_typed)
            self._sampled(session.turns[number])
            self._rewards.append(0.0)
        for number, reward in enumerate(session.turn_rewards):
            if reward != self._rewards[number]:
                self._note(f"turn {number + 1}: reward {reward - self._rewards[number]:+g}")
                self._rewards[number] = reward
        if token_ids is None or session.asked is None:
            return
        self._callable(session.asked.tools)
        messages = session.asked.messages
        num_known = max((common_prefix_length(messages, seen) for seen in session.conversations), default=0)
        if session.conversations and num_known < len(session.conversations[-1]):
            self._note(f"another request, of which the first {num_known} messages were seen before")
        for message in messages[num_known:]:
            self._message(message)
        self._tokens(f"{len(token_ids)} tokens of context")

    def _message(self, message: Mapping[str, Any], *, is_typed: bool = False) -> None:
        role = str(message["role"])
        name = f" {message['name']}" if message.get("name") else ""
        style = _STYLES.get(role, "bold blue")
        if not is_typed:
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
        reason, is_agent = _words(episode.stop_reason), bool(episode.said)
        if is_agent and episode.stop_reason == "stop":
            reason = "stop (the agent came to its end)"
        self._console.print(f"ended after {turns}: {reason}", soft_wrap=True)
        if episode.num_calls:
            self._note(f"{episode.num_calls} calls, of which {episode.num_failed_calls} failed")
        for name, (value, weight) in scores.items():
            if len(scores) > 1:
                self._note(f"{name}: {value if value is None else format(value, 'g')}, weight {weight:g}")
        if any(episode.turn_rewards):
            self._note(f"rewards of the turns: {', '.join(f'{value:g}' for value in episode.turn_rewards)}")
        for name, part in episode.rewards.items():
            self._note(f"{'returned' if is_agent else 'get_reward'}: {name} {part:g}")
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
