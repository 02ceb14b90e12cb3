"""The answer of a generation server to `GET /prefrl/info`. Server and trainer both import this: it must stay light."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from prefrl.errors import GenerationError

__all__ = ["INFO_PATH", "PROTOCOL", "ServerInfo", "vocabulary_fingerprint"]

INFO_PATH = "/prefrl/info"
# Increased when a server and a trainer of different releases can no longer work together.
PROTOCOL = 2


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's versions, model and limits."""

    protocol: int
    prefrl: str  # versions
    vllm: str
    torch: str
    transformers: str
    model: str  # the model name to use in requests
    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    tokenizer: str  # `vocabulary_fingerprint`
    dtype: str
    max_model_len: int  # tokens of prompt and completion
    logprobs_mode: str
    max_lora_rank: int | None  # None: the server takes no adapters
    num_workers: int  # processes that hold weights: tensor * pipeline * data parallel

    @classmethod
    def from_json(cls, url: str, answer: Any) -> ServerInfo:
        """Read the answer of the server at `url`.

        Raises:
            GenerationError: The answer does not follow this protocol.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(answer, dict) or answer.get("protocol") != PROTOCOL or not names <= answer.keys():
            raise GenerationError(
                f"{url}{INFO_PATH} answered {answer!r:.200}: this server was not started with `prefrl vllm-serve` "
                f"of a compatible version (protocol {PROTOCOL}). Start it with the trainer's version of prefrl."
            )
        return cls(**{name: answer[name] for name in names})


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 of the tokens and their ids; it does not depend on the version of transformers."""
    entries = json.dumps(sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0])))
    return hashlib.sha256(entries.encode()).hexdigest()
