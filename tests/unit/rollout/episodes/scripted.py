"""Episodes whose turns are written down: what the model says is a text for each turn."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefrl.data.chat import ChatTemplate
from prefrl.data.encode import row_encoder
from prefrl.data.formats import Format
from prefrl.data.tool_calls import tool_call_reader
from prefrl.generation.base import SamplingParams
from prefrl.generation.local.turns import LocalTurns, TurnRequest
from prefrl.rollout.episodes.driver import EpisodeSampler
from prefrl.rollout.episodes.environment import EnvironmentKind, Seat, environment_kinds
from prefrl.rollout.episodes.play import EpisodeLimits, Player, Task
from prefrl.rollout.episodes.threads import MainThread
from prefrl.types import Completion, Episode, Rollout
from tests.patience import PATIENCE
from tests.unit.data.tool_templates import HERMES, tool_template

ASK = {"role": "user", "content": "hi"}
END = "<|im_end|>"
# What a tool says is the message of a user, so that tools need ids.
NEEDS_IDS = HERMES.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('id') }}{% endif %}",
    1,
)
hermes = functools.cache(lambda: tool_template(HERMES))


def call(name: str, **arguments: Any) -> str:
    """A turn that calls a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def limits(**changes: Any) -> EpisodeLimits:
    options = {
        "max_prompt_length": None,
        "truncation": "left",
        "max_tokens": 5000,
        "max_characters": 20_000,
        "max_turns": None,
        "max_tool_calling_iterations": None,
        "tool_timeout": PATIENCE,
        "episode_timeout": None,
        "tool_error": "tell",
        "environment_error": "raise",
        "reasoning_in_history": "template",
        "max_concurrent_environments": None,
    }
    return EpisodeLimits(**{**options, **changes})  # type: ignore[arg-type]


def kind_of(*tools: Callable[..., Any], factory: Any = None) -> EnvironmentKind:
    (kind,) = environment_kinds(list(tools), factory).values()
    return kind


def completion(template: ChatTemplate, text: str, max_tokens: int, *, version: int = 0) -> Completion:
    """A sampled text and the token that ends a turn, cut off at a number of tokens."""
    ids = template.tokenizer(f"{text}{END}", add_special_tokens=False)["input_ids"]
    reason = "stop" if len(ids) <= max_tokens else "length"
    ids = ids[:max_tokens]
    return Completion(ids, reason, [-0.5] * len(ids), [True] * len(ids), [version] * len(ids))  # type: ignore[arg-type]


def row(*, prompt: Sequence[Mapping[str, Any]] = (ASK,), template: ChatTemplate | None = None, **more: Any) -> dict:
    """A dataset row."""
    template = template or hermes()
    text = template.render(list(prompt), add_generation_prompt=True)
    return {
        "prompt": list(prompt),
        "prompt_ids": template.tokenizer(text, add_special_tokens=False)["input_ids"],
        **more,
    }


class Played:
    """An episode that was played, or how it failed.

    Args:
        kind: Its tools and environment.
        answers: What the model says, turn by turn; a function is awaited, and may return a completion.
        columns: Of the dataset row.
    """

    def __init__(
        self,
        kind: EnvironmentKind,
        *answers: Any,
        template: ChatTemplate | None = None,
        columns: Mapping[str, Any] | None = None,
        context_limit: int | None = None,
        **options: Any,
    ) -> None:
        self.template = template or hermes()
        self.sent: list[tuple[list[int], int, int]] = []  # ids, limit, seed
        self._answers = list(answers)
        reader = tool_call_reader(self.template, kind.schemas) if kind.schemas else None
        self.row = {**row(template=self.template), **(columns or {})}
        task = Task(
            self.row,
            self.template,
            reader,
            seed=lambda *_: 100 + len(self.sent),
            environment_seed=7,
            sample=self._sample,
            context_limit=context_limit,
        )
        self.error: Exception | None = None
        self.episode: Episode
        asyncio.run(self._play(task, kind, limits(**options)))

    async def _play(self, task: Task, kind: EnvironmentKind, options: EpisodeLimits) -> None:
        self.seat = Seat(kind, MainThread())
        player = Player(task, self.seat, options)
        try:
            self.episode = await player.play()
        except Exception as error:
            self.error = error
        self.played = player.played
        await self.seat.close(1)

    async def _sample(self, ids: Sequence[int], max_tokens: int, seed: int) -> Completion:
        self.sent.append((list(ids), max_tokens, seed))
        answer = self._answers.pop(0)
        if not isinstance(answer, str):
            return await answer()
        return completion(self.template, answer, max_tokens)

    @property
    def rollout(self) -> Rollout:
        return Rollout(
            self.played.turns, {}, 0, prompt=self.played.prompt, text=self.played.said, episode=self.episode
        )

    def text(self, turn: int) -> str:
        """What was sent for a turn."""
        return self.template.tokenizer.decode(self.sent[turn][0])

    @property
    def told(self) -> list[str]:
        """What tools and the environment said."""
        return [message["content"] for message in self.played.said if message["role"] != "assistant"]


class Scripted:
    """A generator that takes no time.

    Args:
        answer: `answer(conversation, seed)` is what the model says.
    """

    def __init__(self, answer: Callable[[str, int], str], *, context_limit: int | None = None) -> None:
        self._answer = answer
        self.context_limit = context_limit
        self.requests: list[TurnRequest] = []

    def turns(self, sampling: SamplingParams) -> LocalTurns:
        return LocalTurns(self._generate)

    def _generate(self, wave: Sequence[TurnRequest]) -> list[Completion]:
        self.requests += wave
        texts = (self._answer(hermes().tokenizer.decode(list(one.prompt)), one.seed) for one in wave)
        return [completion(hermes(), text, one.max_tokens) for text, one in zip(texts, wave, strict=True)]


def sampler(generator: Any, *tools: Callable[..., Any], factory: Any = None, **options: Any) -> EpisodeSampler:
    """A sampler of episodes."""
    kinds = environment_kinds(list(tools), factory)
    schemas = {name: list(kind.schemas.values()) for name, kind in kinds.items()}
    encoder = row_encoder(Format("prompt_only", ("prompt",), "conversational"), hermes().tokenizer, None, schemas)
    readers = {
        name: tool_call_reader(hermes(), kind.schemas) if kind.schemas else None for name, kind in kinds.items()
    }
    return EpisodeSampler(kinds, readers, encoder=encoder, generator=lambda: generator, limits=limits(**options))


def params(num_samples: int) -> SamplingParams:
    return SamplingParams(num_samples=num_samples, max_tokens=10)
