"""Unmodified clients of seven packages: each asks, calls a tool and answers; and what each does to its history.

What the policy says is written down. Its log-probs are those of a model with which a `LocalGenerator` draws these ids.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from prefrl.generation.base import SamplingParams
from prefrl.generation.local import decoding
from prefrl.generation.local.generator import LocalGenerator
from prefrl.rollout.batches import responses_of, sampled_batch
from prefrl.rollout.gateway.formats import Client
from prefrl.types import Completion, Rollout, Turn
from tests.unit.rollout.episodes.scripted import call

QUESTION = "What is 2 * 37?"
ANSWER = "The answer is 74."
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def openai_chat(client: Client, *, is_streamed: bool = False) -> str:
    import openai

    function = {"name": "multiply", "description": "Multiply.", "parameters": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(**client.openai, max_retries=0) as api:
        while True:
            asked: Any = {"model": client.model, "messages": messages}
            asked["tools"] = [{"type": "function", "function": function}]
            if is_streamed:
                with api.chat.completions.stream(**asked) as stream:
                    said: Any = stream.get_final_completion().choices[0].message
            else:
                said = api.chat.completions.create(**asked).choices[0].message
            if not said.tool_calls:
                return str(said.content)
            messages.append({"role": "assistant", "content": said.content, "tool_calls": [_plain(said.tool_calls[0])]})
            for made in said.tool_calls:
                product = _product(json.loads(made.function.arguments))
                messages.append({"role": "tool", "tool_call_id": made.id, "content": product})


def _plain(made: Any) -> dict[str, Any]:
    function = {"name": made.function.name, "arguments": made.function.arguments}
    return {"id": made.id, "type": "function", "function": function}


def _product(arguments: Any) -> str:
    return str(arguments["a"] * arguments["b"])


def openai_responses_stream(client: Client) -> str:
    import openai

    tool: Any = {"type": "function", "name": "multiply", "parameters": SCHEMA, "strict": False}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(**client.openai, max_retries=0) as api:
        while True:
            text = ""
            with api.responses.stream(model=client.model, input=items, tools=[tool]) as stream:
                for event in stream:
                    text += event.delta if event.type == "response.output_text.delta" else ""
                said = stream.get_final_response()
            items += said.output
            calls = [item for item in said.output if item.type == "function_call"]
            if not calls:
                assert said.output_text == text
                return text
            for made in calls:
                product = _product(json.loads(made.arguments))
                items.append({"type": "function_call_output", "call_id": made.call_id, "output": product})


def anthropic_messages(client: Client, *, is_streamed: bool = False) -> str:
    import anthropic

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(**client.anthropic, max_retries=0) as api:
        while True:
            asked: Any = {"model": client.model, "max_tokens": 100, "messages": messages, "system": "Be brief."}
            asked["tools"] = [{"name": "multiply", "description": "Multiply.", "input_schema": SCHEMA}]
            if is_streamed:
                with api.messages.stream(**asked) as stream:
                    said = stream.get_final_message()
            else:
                said = api.messages.create(**asked)
            if said.stop_reason != "tool_use":
                return "".join(block.text for block in said.content if block.type == "text")
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": _product(block.input)}
                for block in said.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": results}]


def openai_agents(client: Client, *, is_chat: bool = False, is_streamed: bool = False) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def multiply(a: int, b: int) -> str:
        """Multiply."""
        return str(a * b)

    kind = agents.OpenAIChatCompletionsModel if is_chat else agents.OpenAIResponsesModel

    async def run() -> str:
        async with openai.AsyncOpenAI(**client.openai, max_retries=0) as api:
            model = kind(model=client.model, openai_client=api)
            agent = agents.Agent(name="agent", instructions="Be brief.", tools=[multiply], model=model)
            if not is_streamed:
                return str((await agents.Runner.run(agent, QUESTION)).final_output)
            result = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    return asyncio.run(run())


def pydantic_ai(client: Client) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel(client.model, provider=OpenAIProvider(**client.openai)), system_prompt="Be brief.")

    @agent.tool_plain
    def multiply(a: int, b: int) -> str:
        """Multiply."""
        return str(a * b)

    return str(asyncio.run(agent.run(QUESTION)).output)


def langgraph(client: Client) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    def multiply(a: int, b: int) -> str:
        """Multiply."""
        return str(a * b)

    model = ChatOpenAI(model=client.model, **client.openai, max_retries=0)  # type: ignore[arg-type]
    result = create_agent(model, [multiply]).invoke({"messages": [("user", QUESTION)]})  # type: ignore[arg-type]
    return str(result["messages"][-1].content)


def smolagents(client: Client) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def multiply(a: int, b: int) -> str:
        """Multiply.

        Args:
            a: The first number.
            b: The second number.
        """
        return str(a * b)

    model = OpenAIServerModel(client.model, api_base=client.base_url, api_key=client.api_key)
    return str(ToolCallingAgent(tools=[multiply], model=model, max_steps=3, verbosity_level=0).run(QUESTION))


def _with(run: Callable[..., str], **options: bool) -> Callable[[Client], str]:
    return lambda client: run(client, **options)


@dataclass(frozen=True)
class Kind:
    """A client, and what it speaks."""

    run: Callable[[Client], str]
    api: str
    num_rows: int = 1
    last: str = ANSWER  # what the policy says at the end

    @property
    def said(self) -> list[str]:
        """What the policy says, turn by turn."""
        return [call("multiply", a=2, b=37), self.last]


CLIENTS = {
    "openai": Kind(openai_chat, "chat completions"),
    "openai, streamed": Kind(_with(openai_chat, is_streamed=True), "chat completions"),
    "openai, streamed responses": Kind(openai_responses_stream, "responses"),
    "anthropic": Kind(anthropic_messages, "messages"),
    "anthropic, streamed": Kind(_with(anthropic_messages, is_streamed=True), "messages"),
    "openai-agents": Kind(openai_agents, "responses"),
    "openai-agents, streamed": Kind(_with(openai_agents, is_streamed=True), "responses"),
    "openai-agents, `OpenAIChatCompletionsModel`": Kind(_with(openai_agents, is_chat=True), "chat completions"),
    "pydantic-ai": Kind(pydantic_ai, "chat completions"),
    "LangGraph with langchain-openai": Kind(langgraph, "chat completions"),
    # It writes its own calls as text.
    "smolagents, `ToolCallingAgent`": Kind(smolagents, "chat completions", 2, call("final_answer", answer=ANSWER)),
}


@dataclass(frozen=True)
class History:
    """How many turns and rows an episode has, and their tokens."""

    num_turns: int
    num_rows: int
    num_separate: int  # tokens of all requests and answers
    num_forward: int  # tokens in a forward pass

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> History:
        """That of an episode."""
        rollout = Rollout(list(turns), {}, 0)
        separate = sum(len(turn.sent_ids) + len(turn.completion.token_ids) for turn in turns)
        forward = sampled_batch([rollout], mask_truncated=False).num_forward_tokens
        return cls(len(turns), len(responses_of(rollout)), separate, forward)

    def row(self, name: str) -> str:
        """A row of the table in docs/agents.md."""
        saved = 100 * (1 - self.num_forward / self.num_separate)
        cells = (name, CLIENTS[name].api, self.num_turns, self.num_rows, f"{self.num_separate:,}")
        return f"| {' | '.join(map(str, cells))} | {self.num_forward:,} | {saved:.0f} % |"


class Weights:
    """A model that says what is written down, as its sampler would.

    Args:
        model: Gives the log-probs.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._generator = LocalGenerator(model)

    def said(self, prompt: Sequence[int], told: Completion) -> Completion:
        """The completion with the log-probs with which the sampler draws its ids."""
        left = iter(told.token_ids)

        def drawn(probabilities: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([next(left)]), torch.tensor([True])

        sampling = SamplingParams(num_samples=1, max_tokens=len(told.token_ids), ignores_eos=True)
        with mock.patch.object(decoding, "_invert", drawn):
            ((found,),) = self._generator.generate([list(prompt)], sampling, seeds=[0])
        assert found.token_ids == told.token_ids
        return Completion(told.token_ids, told.finish_reason, found.logprobs, told.trainable, told.policy_versions)
