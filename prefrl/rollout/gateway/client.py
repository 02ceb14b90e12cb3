"""What an agent asks the policy with. Other than the server, it needs no package of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from prefrl.errors import EpisodeError

MODEL = "policy"


@dataclass(frozen=True)
class Client:
    """What an agent needs to ask the policy."""

    root: str  # the URL without a path, as Anthropic's client takes it
    api_key: str = field(repr=False)  # of this episode
    model: str = MODEL
    credit: Callable[[float], None] | None = field(default=None, repr=False, compare=False)

    def reward(self, value: float) -> None:
        """Add to the reward of the policy's last turn. The episode's is the sum of these and what the agent returns.

        Args:
            value: `turn_credit` says what it means for the turns before.
        Raises:
            EpisodeError: The policy has not answered yet, or the value is not finite.
        """
        if self.credit is None:
            raise EpisodeError("client.reward: nothing is learned from this client's answers")
        self.credit(value)

    @property
    def base_url(self) -> str:
        """The URL as OpenAI's client takes it."""
        return f"{self.root}/v1"

    @property
    def openai(self) -> dict[str, str]:
        """Arguments of `openai.OpenAI` and `openai.AsyncOpenAI`."""
        return {"base_url": self.base_url, "api_key": self.api_key}

    @property
    def anthropic(self) -> dict[str, str]:
        """Arguments of `anthropic.Anthropic` and `anthropic.AsyncAnthropic`."""
        return {"base_url": self.root, "api_key": self.api_key}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that clients read, and an identifier of the episode."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.root,
            "ANTHROPIC_API_KEY": self.api_key,
            "PREFRL_SESSION": hashlib.sha256(self.api_key.encode()).hexdigest()[:16],
        }
