from __future__ import annotations

import math

import pytest
import torch

from prefrl.generation.base import SamplingParams
from prefrl.generation.local.decoding import TokenSampler, uniform_numbers

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
