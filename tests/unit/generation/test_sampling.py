"""The parts of local generation: parameters, choice of tokens, cache, packed products."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from prefrl.errors import ConfigError
from prefrl.generation.base import SamplingParams
from prefrl.generation.local import decoding
from prefrl.generation.local.decoding import TokenSampler, keep_rows, packed_linears, rows_of_cache, uniform_numbers
from tests.assets import tiny_model


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"num_samples": 0}, "num_samples=0: must be at least 1"),
        pytest.param({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        pytest.param({"temperature": -0.1}, "temperature=-0.1: must be at least 0"),
        pytest.param({"temperature": float("inf")}, "temperature=inf"),
        pytest.param({"temperature": float("nan")}, "temperature=nan"),
        pytest.param({"top_p": 0.0}, r"top_p=0.0: must be in \(0, 1\]"),
        pytest.param({"top_p": 1.1}, "top_p=1.1"),
        pytest.param({"top_k": -1}, "top_k=-1: must be at least 1; None switches it off"),
        pytest.param({"min_p": -0.1}, "min_p=-0.1"),
        pytest.param({"min_p": 1.5}, "min_p=1.5"),
        pytest.param({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be above 0"),
        pytest.param({"logprobs": "top"}, "logprobs='top': must be one of"),
    ],
)
def test_a_value_outside_its_range_names_field_value_and_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**({"num_samples": 1, "max_tokens": 1} | values))


def test_the_ends_of_the_ranges_are_allowed() -> None:
    SamplingParams(num_samples=1, max_tokens=1, temperature=0, top_p=1, top_k=0, min_p=0.0)
    SamplingParams(num_samples=1, max_tokens=1, top_p=1e-6, top_k=1, min_p=1.0)


LOGITS = torch.tensor([[-math.inf, math.log(0.5), -math.inf, math.log(0.3), math.log(0.2), -math.inf]])
LARGEST = 1 - 2.0**-53


def draw(logits: torch.Tensor, u: float, **sampling: float) -> tuple[int, float]:
    sampler = TokenSampler(SamplingParams(num_samples=1, max_tokens=1, **sampling))  # type: ignore[arg-type]
    result = sampler.draw(logits, torch.full((len(logits),), u, dtype=torch.float64), None)
    return int(result.tokens[0]), float(result.logprobs[0])


@pytest.mark.parametrize(
    ("u", "token", "probability"),
    [(0.0, 1, 0.5), (0.49, 1, 0.5), (0.51, 3, 0.3), (0.79, 3, 0.3), (0.81, 4, 0.2), (LARGEST, 4, 0.2)],
)
def test_a_number_picks_the_token_whose_share_of_the_unit_interval_holds_it(
    u: float, token: int, probability: float
) -> None:
    drawn, logprob = draw(LOGITS, u)
    assert drawn == token
    assert logprob == pytest.approx(math.log(probability), abs=1e-6)


@pytest.mark.parametrize("u", [0.0, 0.3, 0.999999, LARGEST])
def test_a_token_of_probability_zero_is_never_drawn(u: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (7, 1000, 40_000):
        logits = torch.randn(20, size, generator=generator) * 3
        logits[:, :3] = -math.inf
        logits[:, -3:] = -math.inf
        sampler = TokenSampler(SamplingParams(num_samples=1, max_tokens=1, top_k=5))
        result = sampler.draw(logits, torch.full((20,), u, dtype=torch.float64), None)
        assert result.logprobs.isfinite().all()
        assert (logits.gather(1, result.tokens[:, None]) > -math.inf).all()


def test_rare_tokens_of_a_large_vocabulary_keep_their_share() -> None:
    for u in torch.rand(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist():
        assert abs(draw(torch.zeros(1, 100_000), u)[0] - u * 100_000) < 1.01


def test_the_largest_number_is_safe_where_probabilities_do_not_sum_to_one() -> None:
    # Rounded to float32, equal shares sum to as much as 1 +- 3e-8.
    for size in range(2, 200):
        token, logprob = draw(torch.cat([torch.zeros(1, size), torch.full((1, 2), -math.inf)], dim=1), LARGEST)
        assert token == size - 1
        assert math.isfinite(logprob)


@pytest.mark.parametrize("number", range(0, 512, 3))
def test_shares_end_exactly_where_they_should(number: int) -> None:
    # 512 tokens of probability 2^-9: every number below is exact.
    logits = torch.zeros(1, 512)
    assert draw(logits, number / 512)[0] == number
    assert draw(logits, (number + 1) / 512 - 2.0**-50)[0] == number


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000, 50_257])
def test_the_drawn_token_is_the_one_of_the_cumulative_sum(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(1, size, generator=generator)
    cumulative = logits.softmax(dim=-1)[0].double().cumsum(0)
    sampler = TokenSampler(SamplingParams(num_samples=1, max_tokens=1))
    numbers = torch.rand(300, generator=generator, dtype=torch.float64)
    result = sampler.draw(logits.expand(300, -1), numbers, None)
    target = numbers * cumulative[-1]
    # Sums of 128 numbers are rounded to float32.
    assert (cumulative[result.tokens] >= target - 2e-7).all()
    assert (cumulative[result.tokens] - logits.softmax(dim=-1)[0, result.tokens] <= target + 2e-7).all()
    assert len(result.tokens.unique()) > min(size, 100) / 2
    torch.testing.assert_close(result.logprobs, logits.log_softmax(dim=-1)[0, result.tokens], atol=1e-5, rtol=0)


def test_sums_over_a_large_vocabulary_are_not_rounded_to_float32() -> None:
    size = 3 * 2**18
    # Two hundredths of a token's share are the rounding of float32 numbers near 1.
    sampler = TokenSampler(SamplingParams(num_samples=1, max_tokens=1))
    first = torch.arange(3079, 6144, 255) * 128  # of a block
    for distance, expected in [(0.005, first), (-0.005, first - 1)]:
        numbers = (first.double() + distance) / size
        assert sampler.draw(torch.zeros(1, 1).expand(len(first), size), numbers, None).tokens.equal(expected)


@pytest.mark.parametrize("u", [0.0, 0.5, 0.5 - 2.0**-40, LARGEST])
def test_blocks_without_probability_are_stepped_over(u: float) -> None:
    logits = torch.full((1, 1100), -math.inf)
    logits[0, [300, 700]] = 0.0
    assert draw(logits, u) == (300 if u < 0.5 else 700, pytest.approx(math.log(0.5), abs=1e-6))


def test_no_rounding_leads_out_of_a_block() -> None:
    generator = torch.Generator().manual_seed(0)
    sampler = TokenSampler(SamplingParams(num_samples=1, max_tokens=1, top_k=40))
    logits = torch.randn(2000, 700, generator=generator) * 3
    probabilities = logits.softmax(dim=-1).double()
    # Numbers at the very ends of blocks, to either side.
    ends = probabilities.cumsum(dim=-1)[:, 127::128]
    for end in range(ends.shape[1]):
        for distance in (-1e-7, -1e-16, 0.0, 1e-16, 1e-7):
            result = sampler.draw(logits, (ends[:, end] + distance).clamp(0, LARGEST), None)
            assert result.logprobs.isfinite().all()
            assert (result.tokens < 700).all()


def test_temperature_sharpens_before_truncation() -> None:
    # Probabilities 0.5, 0.3, 0.2 squared and normalized: 0.25, 0.09, 0.04 over 0.38.
    assert draw(LOGITS, 0.0, temperature=0.5)[1] == pytest.approx(math.log(0.25 / 0.38), abs=1e-6)
    # Of these, the smallest set with at least 0.8 of the mass is the first two.
    assert draw(LOGITS, LARGEST, temperature=0.5, top_p=0.8) == (3, pytest.approx(math.log(0.09 / 0.34), abs=1e-6))


@pytest.mark.parametrize(
    ("option", "token", "probability"),
    [
        ({"top_k": 2}, 3, 0.3 / 0.8),
        ({"top_p": 0.6}, 3, 0.3 / 0.8),
        ({"min_p": 0.5}, 3, 0.3 / 0.8),
        ({"top_k": 1}, 1, 1.0),
    ],
)
def test_truncation_renormalizes(option: dict[str, float], token: int, probability: float) -> None:
    assert draw(LOGITS, LARGEST, **option) == (token, pytest.approx(math.log(probability), abs=1e-6))


def test_repetition_penalty_counts_each_token_of_the_history_once() -> None:
    sampler = TokenSampler(SamplingParams(num_samples=1, max_tokens=1, repetition_penalty=2.0, temperature=0))
    result = sampler.draw(torch.tensor([[1.0, 3.0, 2.0]]), torch.zeros(1), torch.tensor([[1, 1, 1]]))
    assert result.tokens.tolist() == [2]  # 3 / 2 < 2; the penalty of a token seen three times is the same
    result = sampler.draw(torch.tensor([[1.0, 5.0, 2.0]]), torch.zeros(1), torch.tensor([[1, 1, 1]]))
    assert result.tokens.tolist() == [1]


def test_raw_logprobs_ignore_temperature_and_truncation() -> None:
    sampler = TokenSampler(SamplingParams(num_samples=1, max_tokens=1, temperature=0.5, top_k=1, logprobs="raw"))
    result = sampler.draw(LOGITS, torch.tensor([0.4], dtype=torch.float64), None)
    assert float(result.logprobs) == pytest.approx(math.log(0.5), abs=1e-6)


def test_a_greedy_token_is_certain() -> None:
    assert draw(LOGITS, 0.9, temperature=0) == (1, 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_distribution_are_flagged_in_their_row_only(bad: float, temperature: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = bad
    sampler = TokenSampler(SamplingParams(num_samples=1, max_tokens=1, temperature=temperature))
    assert sampler.draw(logits, torch.full((3,), 0.5, dtype=torch.float64), None).is_valid.tolist() == [
        True,
        False,
        True,
    ]


def test_a_bad_row_of_many_blocks_is_flagged_too() -> None:
    logits = torch.zeros(3, 1024)
    logits[1, 900] = math.nan
    result = TokenSampler(SamplingParams(num_samples=1, max_tokens=1)).draw(
        logits, torch.full((3,), 0.5, dtype=torch.float64), None
    )
    assert result.is_valid.tolist() == [True, False, True]
    assert result.tokens.tolist() == [512, 0, 512]


def test_random_numbers_belong_to_seed_and_sample() -> None:
    numbers = uniform_numbers(3, 1, 50)
    assert numbers.equal(uniform_numbers(3, 1, 50))
    for seed, sample in [(3, 2), (4, 1), (1, 3), (31, 1), (-3, 1), (2**63 + 3, 1)]:
        assert not numbers.equal(uniform_numbers(seed, sample, 50))
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1


def test_random_numbers_of_many_samples_are_uniform() -> None:
    first = torch.stack([uniform_numbers(0, sample, 2) for sample in range(4000)])
    counts = torch.histc(first[:, 0], bins=10, min=0, max=1)
    assert float(((counts - 400) ** 2 / 400).sum()) < 27.9  # chi-squared, 9 degrees of freedom, p = 0.001
    assert abs(float(torch.corrcoef(first.T)[0, 1])) < 0.05


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


LARGE = (512, 1024)  # [in, out]: the smallest that is packed


def layer(sizes: tuple[int, int] = LARGE, *, bias: bool = True, **options: torch.dtype) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(*sizes, bias=bias, **options)


def is_packed(module: nn.Module) -> bool:
    return "forward" in vars(module)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (8, 1), (33, 1), (3, 70)])
def test_a_packed_layer_computes_the_same(shape: tuple[int, int], bias: bool) -> None:
    module = layer(bias=bias)
    rows = torch.randn(*shape, 512, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), packed_linears(module):
        assert is_packed(module)
        output = module(rows)
    # Of numbers below 4 in size, summed in another order.
    torch.testing.assert_close(output, module(rows), atol=4e-6, rtol=0)


def test_weights_of_now_are_packed_each_time() -> None:
    module, rows = layer(bias=False), torch.randn(2, 512)
    for factor in (1.0, 3.0):
        module.weight.data *= factor
        with torch.inference_mode(), packed_linears(module):
            torch.testing.assert_close(module(rows), linear(rows, module.weight), atol=1e-5, rtol=0)


def test_layers_are_their_own_again_after_an_error_too() -> None:
    module = layer()
    with packed_linears(module):
        assert is_packed(module)
    assert not is_packed(module)
    with pytest.raises(KeyError), packed_linears(module):
        raise KeyError
    assert not is_packed(module)
    module(torch.randn(2, 512)).sum().backward()
    assert module.weight.grad is not None


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_only_large_plain_fp32_layers_are_packed() -> None:
    hooked = layer()
    hooked.forward = lambda input: torch.zeros(())  # type: ignore[method-assign, assignment]  # as backends do
    others = nn.ModuleList([layer((512, 1023)), layer(dtype=torch.bfloat16), Scaled(*LARGE), hooked])
    forward = hooked.forward
    model = nn.ModuleList([layer(), others])
    with packed_linears(model):
        assert is_packed(model[0])
        assert [is_packed(module) for module in others] == [False, False, False, True]
        assert hooked.forward is forward
    assert hooked.forward is forward


def test_the_last_layers_are_packed_as_far_as_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_MEMORY", 2 * 4 * math.prod(LARGE))
    model = nn.Sequential(*(layer() for _ in range(3)))
    with packed_linears(model):
        assert [is_packed(module) for module in model] == [False, True, True]


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # torch's own, on switching back
def test_nothing_is_packed_where_onednn_is_switched_off() -> None:
    module = layer()
    with torch.backends.mkldnn.flags(enabled=False), packed_linears(module):
        assert not is_packed(module)


def test_autocast_decides_the_dtype_as_ever() -> None:
    module, rows = layer(), torch.randn(2, 512)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = module(rows)
        with packed_linears(module):
            output = module(rows)
    assert output.dtype == torch.bfloat16
    assert output.equal(expected)


def test_rows_of_another_dtype_are_refused_as_ever() -> None:
    with packed_linears(module := layer()), pytest.raises(RuntimeError, match="same dtype"):
        module(torch.randn(2, 512, dtype=torch.float64))


def test_hooks_of_a_packed_layer_run() -> None:
    module = layer()
    module.register_forward_hook(lambda module, args, output: output + 1)
    with torch.inference_mode(), packed_linears(module):
        assert is_packed(module)
        assert module(torch.zeros(1, 512)).equal(module.bias[None] + 1)
