"""What answers the requests of sessions, and which options of a request it follows."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from prefrl.data.chat import ChatTemplate
from prefrl.data.tool_calls import ToolCallReader, ToolParser, tool_call_reader
from prefrl.generation.base import SamplingParams
from prefrl.options.types import ReasoningInHistory
from prefrl.rollout.gateway.formats import Asked
from prefrl.types import Completion

logger = logging.getLogger(__name__)

Sample = Callable[[Sequence[int], int, int], Awaitable[Completion]]


@dataclass(frozen=True)
class Shared:
    """What the sessions of a run have in common, so that it is found or said once."""

    readers: dict[str, ToolCallReader] = field(default_factory=dict)  # by template and tools
    told: set[str] = field(default_factory=set)  # names of sampling options of clients that are not followed
    # Renders and tokenizes. It is one, because not every tokenizer may be used by two at once.
    thread: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "prefrl-gateway"))


@dataclass(frozen=True)
class Policy:
    """What answers the requests of sessions.

    Args:
        template: The model's chat template; requests bring their own tools.
        sample: Samples a completion of at most so many tokens: ids, tokens, seed.
        max_tokens: Of a conversation beyond its first request.
        context_limit: Tokens of a request and its answer; None: no limit.
        max_turns: Of a session; None: no limit.
        reasoning: What later turns see of the thinking in earlier ones.
        sampling: How completions are sampled, whatever clients ask for; None: unknown.
        tool_parser: See `tool_call_reader`.
        shared: With other sessions.
        follow: Gives what samples as a request asks, where nothing is trained; None: `sample` samples, and options of
            a request that would change the distribution are overruled.
    """

    template: ChatTemplate
    sample: Sample
    max_tokens: int
    context_limit: int | None
    max_turns: int | None = None
    reasoning: ReasoningInHistory = "template"
    sampling: SamplingParams | None = None
    tool_parser: ToolParser | None = None
    shared: Shared = field(default_factory=Shared)
    follow: Callable[[Asked], Sample] | None = None

    def reader(self, asked: Asked) -> ToolCallReader | None:
        """Reads the calls of a request's tools; None: it has none.

        Raises:
            ConfigError: The chat template renders no calls, or no format fits.
        """
        if not asked.tools:
            return None
        readers, template = self.shared.readers, self.template
        key = json.dumps([template.name, str(template.kwargs), asked.tools], sort_keys=True)
        if key not in readers:
            schemas = {tool["function"]["name"]: tool for tool in asked.tools}
            own = replace(template, tools=asked.tools)
            readers[key] = tool_call_reader(own, schemas, tool_parser=self.tool_parser)
        return readers[key]

    def sampler(self, asked: Asked) -> Sample:
        """What samples the answer to a request.

        Raises:
            RequestError: It asks for a distribution that there is not.
        """
        if self.follow is not None:
            return self.follow(asked)
        self.overrule(asked.sampling)
        return self.sample

    def overrule(self, asked: Mapping[str, Any]) -> None:
        """Warn, once for each name in a run, of options of a request that ask for another distribution."""
        own = {} if self.sampling is None else _sampling_options(self.sampling)
        for name, value in asked.items():
            same = own.get(name, ())
            if name in self.shared.told or value in same:
                continue
            self.shared.told.add(name)
            logger.warning(
                "an agent asks for %s=%.200r, which is ignored: answers are sampled as the options of the run say%s, "
                "since the loss is about what they are sampled from. This is said once for %s.",
                name,
                value,
                f" ({name}={same[0]!r})" if same else "",
                name,
            )


def _sampling_options(sampling: SamplingParams) -> dict[str, tuple[Any, ...]]:
    """The options of requests, each with the values that mean how completions are sampled."""
    return {
        "temperature": (sampling.temperature,),
        "top_p": (sampling.top_p,),
        "top_k": (sampling.top_k,) if sampling.top_k else (None, 0, -1),
        "min_p": (sampling.min_p,) if sampling.min_p else (None, 0),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "repetition_penalty": (sampling.repetition_penalty,),
        "length_penalty": (1,),
        "min_tokens": (0,),
        "ignore_eos": (False,),
        "stop_token_ids": ([],),
        "tool_choice": ("auto",),
    }
