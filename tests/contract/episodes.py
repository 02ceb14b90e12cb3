"""A world in which a random model has episodes of several turns, with rewards, calls and edited history."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from prefrl import Environment, Observation
from prefrl.http import httpx
from tests.assets import tiny_tokenizer

# What the model says in earlier turns is cut down to its first two characters, as other templates drop thinking.
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content[:2] if m.role == 'assistant' and not loop.last else m.content }}"
    "{% for c in m.tool_calls %}!{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FAITHFUL = FORGETFUL.replace("m.content[:2]", "m.content")


def tokenizer(*, forgets: bool) -> PreTrainedTokenizerBase:
    """The characters of `tiny_tokenizer`; earlier turns are printed as they were, or cut down."""
    return tiny_tokenizer(chat_template=FORGETFUL if forgets else FAITHFUL)


def parsed(text: str) -> dict[str, Any]:
    """A turn of an even number of characters calls the tool."""
    said = text.split("<|end|>")[0]
    calls = [{"function": {"name": "count", "arguments": {"length": len(said)}}}] if len(said) % 2 == 0 else []
    return {"content": said, "tool_calls": calls}


class Talk(Environment):
    """Answers with what it heard, at most three times."""

    def reset(self, prompt: Any, **row: Any) -> str:
        self.heard: list[str] = []
        return f" ({self.seed % 10})"

    def count(self, length: int) -> Observation:
        """Count.

        Args:
            length: A number.
        """
        return Observation(f"{length}", reward=length % 5 / 2)

    async def respond(self, message: Any) -> Observation | None:
        self.heard.append(message["content"])
        if len(self.heard) == 3:
            return None
        heard = sum(map(ord, message["content"]))
        return Observation(f"{heard % 10}{'?' * (heard % 3)}", reward=heard % 7 / 3)

    def get_reward(self) -> float:
        return sum(map(len, self.heard)) / 4


def prompts(num_rows: int) -> list[dict[str, Any]]:
    """Rows of a dataset."""
    return [{"prompt": [{"role": "user", "content": "?" * (i % 3 + 1) + str(i)}]} for i in range(num_rows)]


# Tasks that a random model can learn: the first character of a turn decides what the turn does.


def action(text: str, count: int) -> int:
    """What a turn does, 0 .. count - 1."""
    said = text.split("<|end|>")[0]
    return ord(said[0]) % count if said else 0


def act(text: str) -> dict[str, Any]:
    """Action 0 looks up the secret; the others are the answers 1 to 3."""
    number = action(text, 4)
    calls = [{"function": {"name": "look_up", "arguments": {}}}] if number == 0 else []
    return {"content": text.split("<|end|>")[0], "tool_calls": calls}


class LookUp:
    """The answer has to be looked up first. As in TRL, it does not derive from `prefrl.Environment`."""

    def reset(self, secret: int, **row: Any) -> None:
        self.secret = secret
        self.has_looked = False

    def look_up(self) -> str:
        """Look up the secret."""
        self.has_looked = True
        return str(self.secret)


def looked_up(completions: list[Any], environments: list[LookUp], **_: Any) -> list[float]:
    """1 for the answer that was looked up, a little for looking it up alone, nothing for a guess."""
    answers = [action(messages[-1]["content"], 4) for messages in completions]
    return [
        float(e.has_looked and answer == e.secret) * 0.8 + 0.2 * e.has_looked
        for e, answer in zip(environments, answers, strict=True)
    ]


class Guess(Environment):
    """Guess a number from 0 to 2 in two turns; after a wrong guess the game says in which direction it is."""

    def reset(self, secret: int, **row: Any) -> None:
        self.secret, self.is_right = secret - 1, False

    def respond(self, message: Any) -> Observation:
        guess = action(message["content"], 3)
        self.is_right = guess == self.secret
        return Observation("+" if guess < self.secret else "-", done=self.is_right)

    def get_reward(self) -> float:
        return float(self.is_right)


def secrets(num_rows: int) -> list[dict[str, Any]]:
    """Rows of a dataset: equal prompts with the secrets 1 to 3."""
    return [{"prompt": [{"role": "user", "content": "?"}], "secret": i % 3 + 1} for i in range(num_rows)]


# Agents: programs that ask over a chat API.


async def ask(http: httpx.AsyncClient, client: Any, messages: Sequence[Any], **body: Any) -> str:
    """What the policy says."""
    answer = await http.post(
        f"{client.base_url}/chat/completions",
        headers={"authorization": f"Bearer {client.api_key}"},
        json={"model": client.model, "messages": list(messages), **body},
    )
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def answer_to(text: str) -> str:
    """What the other side says."""
    return f"{sum(map(ord, text)) % 10}{'?' * (len(text) % 3)}"


class Echo(Environment):
    """Answers twice; the reward depends on all that was said."""

    def reset(self, **row: Any) -> None:
        self.said: list[str] = []

    def respond(self, message: Any) -> Observation | None:
        self.said.append(message["content"])
        if len(self.said) == 3:
            return None
        return Observation(answer_to(message["content"]), reward=len(message["content"]) % 3)

    def get_reward(self) -> float:
        return sum(map(ord, "".join(self.said))) % 17 / 4


async def echo(row: Any, client: Any) -> float:
    """The same as an agent."""
    messages, said = list(row["prompt"]), []
    async with httpx.AsyncClient(verify=False, timeout=60) as http:
        while True:
            said.append(await ask(http, client, messages))
            if len(said) == 3:
                return sum(map(ord, "".join(said))) % 17 / 4
            client.reward(len(said[-1]) % 3)
            messages += [
                {"role": "assistant", "content": said[-1]},
                {"role": "user", "content": answer_to(said[-1])},
            ]


async def wander(row: Any, client: Any, *, in_parallel: bool = True) -> float:
    """Goes on, branches off, summarizes, asks in parallel and edits what was said."""
    begun, more = list(row["prompt"]), {"role": "user", "content": "!"}
    async with httpx.AsyncClient(verify=False, timeout=60) as http:
        first = {"role": "assistant", "content": await ask(http, client, begun)}
        second = {"role": "assistant", "content": await ask(http, client, [*begun, first, more])}
        histories = [
            [*begun, first, more, second, more],
            [*begun, first, {"role": "user", "content": "another"}],
            [{"role": "system", "content": "so far"}, second, more],
            [*begun, {"role": "assistant", "content": "edited"}, more],
            begun,
        ]
        client.reward(0.5)
        asks = [ask(http, client, messages, max_tokens=9) for messages in histories]
        said = await asyncio.gather(*asks) if in_parallel else [await one for one in asks]
    return sum(map(ord, "".join(said))) % 11 / 3


async def stray(row: Any, client: Any) -> float:
    """The same one after another: on a machine that stalls, requests in parallel may not meet."""
    return await wander(row, client, in_parallel=False)
