from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from prefrl.generation.local.decoding import keep_rows, rows_of_cache
from tests.assets import tiny_model

CPU = torch.device("cpu")


def states(rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, 2, length, 8, generator=generator).unbind()
    return keys, values


@pytest.fixture(params=["qwen2", "gemma2"])
def prefilled(request: pytest.FixtureRequest) -> DynamicCache:
    """Two prompts of 5 tokens in two layers; one of gemma2's sees 4 tokens only."""
    options = {"sliding_window": 4} if request.param == "gemma2" else {}
    cache = DynamicCache(config=tiny_model(request.param, **options).config)
    for layer in range(2):
        cache.update(*states(2, 5, seed=layer), layer)
    return cache


@pytest.mark.parametrize("offloads", [False, True])
def test_rows_and_tokens_are_those_of_a_cache_that_copies(prefilled: DynamicCache, offloads: bool) -> None:
    expected = copy.deepcopy(prefilled)
    expected.reorder_cache(torch.tensor([0, 0, 0, 1, 1]))
    cache = rows_of_cache(prefilled, torch.tensor([0, 0, 0, 1, 1]), room=6, offloads=offloads)
    rows = [0, 4, 2]  # 1 and 3 leave, 4 fills the gap
    for step in range(6):
        if step == 2:
            keep_rows(cache, rows, CPU)
            expected.reorder_cache(torch.tensor(rows))
        for layer in range(2):
            new = states(3 if step >= 2 else 5, 1, seed=10 * step + layer)
            for ours, theirs in zip(cache.update(*new, layer), expected.update(*new, layer), strict=True):
                assert ours.equal(theirs)
        assert cache.get_seq_length() == expected.get_seq_length() == 6 + step


def test_the_original_stays_for_other_rows(prefilled: DynamicCache) -> None:
    before = [layer.keys.clone() for layer in prefilled.layers]
    for rows in ([0, 0, 1], [1, 0]):
        cache = rows_of_cache(prefilled, torch.tensor(rows), room=1)
        for layer in range(2):
            assert cache.layers[layer].keys.equal(before[layer][rows])
            cache.update(*states(len(rows), 1, seed=3), layer)
        keep_rows(cache, [1], CPU)
        assert prefilled.get_seq_length() == 5
        assert all(layer.keys.equal(keys) for layer, keys in zip(prefilled.layers, before, strict=True))


def test_neither_new_tokens_nor_leaving_rows_copy_those_that_stay() -> None:
    prefilled = DynamicCache(config=tiny_model("qwen2").config)
    for layer in range(2):
        prefilled.update(*states(1, 5, seed=layer), layer)
    cache = rows_of_cache(prefilled, torch.tensor([0, 0, 0]), room=2)
    memory = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    for layer in range(2):
        cache.update(*states(3, 1, seed=3), layer)
    keep_rows(cache, [0, 2], CPU)
    for layer in range(2):
        cache.update(*states(2, 1, seed=4), layer)
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == memory


def test_recurrent_states_of_copied_rows_are_their_own() -> None:
    layer, filled = LinearAttentionLayer(), torch.arange(12.0).reshape(2, 3, 2)
    layer.update_conv_state(filled)
    prefilled = DynamicCache()
    prefilled.layers = [layer]
    first, second = (rows_of_cache(prefilled, torch.tensor(rows), room=1).layers[0] for rows in ([0, 0, 1], [1]))
    assert torch.equal(first.conv_states[0], filled[[0, 0, 1]])
    assert torch.equal(second.conv_states[0], filled[[1]])
    assert torch.equal(layer.conv_states[0], filled)
