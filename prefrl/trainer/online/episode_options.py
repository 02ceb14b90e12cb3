"""Options of rollouts with tools and environments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from prefrl.data.next_turn import ReasoningInHistory
from prefrl.options.fields import check_no_effect, default_of, json_mapping, opt
from prefrl.options.types import Seconds
from prefrl.rollout.episodes.options import EnvironmentErrorMode, ToolErrorMode

__all__ = ["CreditOptions", "EpisodeOptions"]


@dataclass
class EpisodeOptions:
    """Episodes of several turns; they need the trainer's argument `tools` or `environment_factory`."""

    max_turns: Annotated[int, Ge(1)] | None = opt(
        None, "Maximum number of the model's turns in an episode; None: no limit."
    )
    max_tool_calling_iterations: Annotated[int, Ge(0)] | None = opt(
        None, "Maximum number of turns per episode whose tool calls are run; None: no limit."
    )
    tool_timeout: Seconds = opt(
        60.0,
        "Time limit of each call of a tool or of a method of an environment, in seconds.",
        decides=False,
    )
    episode_timeout: Seconds | None = opt(
        None, "Time limit of an episode, in seconds; it then ends with the turns that it has. None: no limit."
    )
    max_concurrent_environments: Annotated[int, Ge(1)] | None = opt(
        None,
        "Maximum number of episodes that each process runs at the same time; None: all.",
        decides=False,
    )
    tool_error: ToolErrorMode = opt(
        "tell", "What happens on an error or timeout of a tool. tell: the model is told. raise: the run ends."
    )
    environment_error: EnvironmentErrorMode = opt(
        "retry",
        "What happens on an error or timeout of an environment's own methods. retry: the episode begins again with "
        "the same seed, at most twice, and is then dropped. drop: the episode is neither trained on nor part of a "
        "baseline. raise: the run ends.",
    )
    reasoning_in_history: ReasoningInHistory = opt(
        "template",
        "How much of the reasoning in earlier turns later turns see: what the chat template renders (template), all "
        "of it (keep), or nothing (strip).",
    )
    tool_parser: dict[str, Any] | str | None = opt(
        None,
        "How tool calls are parsed: the name of a format, a response template of transformers (JSON on the command "
        "line), or, in Python, a function of the sampled text. None: the first known format that correctly parses a "
        "call rendered by the chat template.",
    )

    def forget_episodes(self) -> None:
        """Reset all options of episodes, because what they played is known and nothing is played again."""
        for field in dataclasses.fields(EpisodeOptions):
            setattr(self, field.name, default_of(field))

    def validate_episodes(self, *, has_episodes: bool) -> None:
        """Reject options of episodes if there are none, and parse the parser.

        Raises:
            ConfigError: An option has no effect.
        """
        if isinstance(self.tool_parser, str) and self.tool_parser.lstrip().startswith("{"):
            self.tool_parser = json_mapping(self.tool_parser, "tool_parser")
        for field in dataclasses.fields(EpisodeOptions) if not has_episodes else ():
            check_no_effect(
                name=field.name,
                value=getattr(self, field.name),
                unset=default_of(field),
                because="there are no episodes",
                remedy="Give the trainer tools or environment_factory, or leave it out.",
            )


@dataclass
class CreditOptions:
    """Credit assignment for the turns of an episode."""

    turn_credit: Literal["episode", "return"] = opt(
        "episode",
        "Which rewards a turn is credited with. episode: the total, the same for all turns. return: those from this "
        "turn on, compared with the same sum of the prompt's other episodes, where episodes that are over count as "
        "0. With token-level advantages (PPO, REINFORCE++), each reward belongs to the last token of its turn.",
    )
    turn_discount: Annotated[float, Ge(0), Le(1)] = opt(
        1.0, "Discount factor of rewards, per turn. Needs turn_credit='return' and completion-level advantages."
    )
