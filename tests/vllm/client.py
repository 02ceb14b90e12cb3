"""Generators on real servers, which may share a busy machine with the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from prefrl.generation.vllm import asking, handshake
from prefrl.generation.vllm.client import VLLMGenerator
from prefrl.generation.vllm.handshake import Requirements
from prefrl.generation.weights.sync import WeightSync
from prefrl.http import Http
from tests.assets import tiny_tokenizer
from tests.patience import PATIENCE

PROMPTS = [[40, 41, 42], [50, 51, 52, 53, 54, 55, 56], [60], list(range(30, 70))]
SEEDS = [2**63 - 1, 2, 3, 4]
STOP_IDS = [1, *range(10, 128, 7)]  # many, so that completions stop at different lengths


def policy(model_dir: Path, *, seed: int = 1) -> PreTrainedModel:
    """A model like the server's with other weights, which it has to be sent."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = STOP_IDS
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.1)
    return model


def be_patient(assign: Callable[[object, str, float], object] = setattr) -> None:
    """Take no server for dead that stalls for some seconds: its prompts would be requested again, and be counted."""
    for module in (asking, handshake):
        assign(module, "PROBE_SECONDS", PATIENCE)


MakeGenerator = Callable[..., VLLMGenerator]


@contextmanager
def generators(
    model: PreTrainedModel, folder: Path, *, key: str | None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Iterator[MakeGenerator]:
    """`make(urls, **options)`, closed at the end of the block."""
    made: list[VLLMGenerator] = []
    own = tokenizer or tiny_tokenizer()

    def make(urls: Sequence[str], **options: Any) -> VLLMGenerator:
        http = Http(key=options.pop("key", key))
        weight_sync = WeightSync(http, method="shm", folder=folder, timeout=PATIENCE)
        changes = options.pop("requirements", {})
        requirements = Requirements.of(model, own, has_adapters=changes.pop("has_adapters", False))
        defaults: dict[str, Any] = {"stop_ids": STOP_IDS, "server_timeout": PATIENCE, "request_timeout": PATIENCE}
        generator = VLLMGenerator(
            urls, http=http, weight_sync=weight_sync, requirements=requirements, **defaults | options
        )
        made.append(generator)
        return generator

    try:
        yield make
    finally:
        for generator in made:
            generator.close()
