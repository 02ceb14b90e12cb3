"""Log-probs of the same completions of SmolLM2: of the trainer, of local generation and of a vLLM server."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.real.inputs import Inputs, worked_examples
from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.http import Http
from prefrl.models.forward import token_logprobs
from prefrl.types import TokenBatch
from tests.vllm.server import KEY, Server

__all__ = ["measure"]

NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS = 8, 4, 64


def measure(inputs: Inputs) -> list[dict[str, Any]]:
    """Completions that are sampled here; a row for each pair of sources. Differences are in nats per token."""
    model, tokenizer = inputs.policy().eval(), inputs.tokenizer()
    chats = worked_examples(inputs).select(range(NUM_PROMPTS))["prompt"]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    sampling = SamplingParams(num_samples=NUM_SAMPLES, max_tokens=NUM_TOKENS)
    groups = LocalGenerator(model, tokenizer=tokenizer).generate(prompts, sampling, seeds=range(NUM_PROMPTS))
    completions = [sample.token_ids for group in groups for sample in group]
    owners = [number for number, group in enumerate(groups) for _ in group]
    local = torch.tensor([value for group in groups for sample in group for value in sample.logprobs or ()])
    with torch.no_grad():
        trainer = token_logprobs(model, _batch(prompts, completions, owners)).logprobs
    found = {
        "trainer": trainer,
        "local generation": local,
        "vLLM server": _of_server(inputs, prompts, completions, owners),
    }
    names = list(found)
    return [
        {
            "name": f"{a} and {b}",
            "tokens": len(local),
            "mean": float((found[a] - found[b]).abs().mean()),
            "largest": float((found[a] - found[b]).abs().max()),
        }
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]


def _batch(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], owners: Sequence[int]
) -> TokenBatch:
    ids = torch.tensor([token for completion in completions for token in completion])
    return TokenBatch(
        prompt_ids=torch.tensor([token for prompt in prompts for token in prompt]),
        prompt_lengths=tuple(map(len, prompts)),
        prompt_index=tuple(owners),
        response_ids=ids,
        response_lengths=tuple(map(len, completions)),
        trainable=torch.ones_like(ids, dtype=torch.bool),
        group_index=tuple(owners),
    )


def _of_server(
    inputs: Inputs, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], owners: Sequence[int]
) -> torch.Tensor:
    """[N] log-probs that a server in float32 gives for completions which it reads as the ends of prompts."""
    os.environ["VLLM_API_KEY"] = KEY
    values: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(inputs.model, folder=Path(folder), max_model_len=1024)
        http = Http(key=server.key)
        try:
            for owner, completion in zip(owners, completions, strict=True):
                ids = [*prompts[owner], *completion]
                body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
                answer = http.request("POST", server.url + "/v1/completions", json=body, timeout=300)
                scored = answer["choices"][0]["prompt_logprobs"][len(prompts[owner]) :]
                values += [entry[str(token)]["logprob"] for entry, token in zip(scored, completion, strict=True)]
        finally:
            http.close()
            server.stop()
    return torch.tensor(values)
