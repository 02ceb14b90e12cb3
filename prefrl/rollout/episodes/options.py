"""How episodes are limited, and what happens when something fails in them."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.data.encode import Truncation
from prefrl.options.types import EnvironmentErrorMode, ReasoningInHistory, ToolErrorMode

__all__ = [
    "EpisodeLimits",
]


@dataclass(frozen=True)
class EpisodeLimits:
    """What each episode may take, and what follows a failure."""

    max_prompt_length: int | None  # tokens
    truncation: Truncation  # of longer prompts
    max_tokens: int  # of a context beyond the prompt: what was sampled, and what tools and the environment said
    max_characters: int  # a longer answer of a tool or the environment cannot fit into `max_tokens`
    max_turns: int | None
    max_tool_calling_iterations: int | None
    tool_timeout: float  # seconds of a call of a tool or a method of the environment
    episode_timeout: float | None  # seconds
    tool_error: ToolErrorMode
    environment_error: EnvironmentErrorMode
    reasoning_in_history: ReasoningInHistory
    max_concurrent_environments: int | None
