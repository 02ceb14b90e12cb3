"""A world in which a random model has episodes of several turns, with rewards, calls and edited history."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from prefrl import Environment, Observation
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
