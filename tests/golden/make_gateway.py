"""Writes gateway.txt: what curl is answered in each wire format, by a policy whose answers are written down.

python -m tests.golden.make_gateway
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.unit.rollout.episodes.scripted import call
from tests.unit.rollout.gateway.served import Served

STORED = Path(__file__).with_name("gateway.txt")
QUESTION = [{"role": "user", "content": "What is 2 * 37?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
BEARER, ANTHROPIC = "Authorization: Bearer $OPENAI_API_KEY", "x-api-key: $ANTHROPIC_API_KEY"
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "$OPENAI_BASE_URL/chat/completions": (
        BEARER,
        {
            "model": "policy",
            "messages": QUESTION,
            "tools": [{"type": "function", "function": {"name": "multiply", "parameters": SCHEMA}}],
        },
    ),
    "$OPENAI_BASE_URL/responses": (
        BEARER,
        {
            "model": "policy",
            "input": QUESTION,
            "tools": [{"type": "function", "name": "multiply", "parameters": SCHEMA}],
        },
    ),
    "$ANTHROPIC_BASE_URL/v1/messages": (
        ANTHROPIC,
        {
            "model": "policy",
            "max_tokens": 100,
            "messages": QUESTION,
            "tools": [{"name": "multiply", "input_schema": SCHEMA}],
        },
    ),
}


def say(turn: int) -> str:
    """A call, also when it is asked again for a stream; and an answer that is cut."""
    return f"I multiply.{call('multiply', a=2, b=37)}"


def commands() -> list[str]:
    """The command lines: an answer, the same one streamed, and a request that is refused, in each format."""
    lines = []
    for url, (header, body) in FORMATS.items():
        for change in ({}, {"stream": True}, {"tools": [{}]}):
            lines.append(f"curl -sS {url} -H \"{header}\" -d '{json.dumps({**body, **change})}'")
    return [*lines, f'curl -sS $OPENAI_BASE_URL/models -H "{BEARER}"']


def transcript() -> str:
    """The commands with their answers, whose times are 0."""
    parts = []
    with Served() as served:
        for line in commands():
            with served.session(say) as (client, _):
                environment = {**os.environ, "NO_PROXY": "*", **client.environment}
                done = subprocess.run(
                    line, shell=True, env=environment, capture_output=True, text=True, check=True, timeout=60
                )
            parts.append(f"$ {line}\n{done.stdout.strip()}\n")
    return re.sub(r'("created(?:_at)?": ?)\d+', r"\g<1>0", "\n".join(parts))


if __name__ == "__main__":
    STORED.write_text(transcript(), encoding="utf-8")
