"""Estimates of memory against what is allocated."""

from __future__ import annotations

import torch

from prefrl.models.footprint import cache_bytes
from tests.assets import tiny_model


def test_the_cache_of_grouped_queries_is_what_the_model_keeps() -> None:
    model = tiny_model()
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    kept = model(torch.zeros(5, 7, dtype=torch.long), use_cache=True).past_key_values
    tensors = [tensor for layer in kept.layers for tensor in (layer.keys, layer.values)]
    assert cache_bytes(model, num_rows=5, num_tokens=7) == sum(tensor.nbytes for tensor in tensors)
