"""Completions of a real server are those of the policy, drawn as asked."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prefrl.errors import ConfigError, GenerationError
from prefrl.generation.base import SamplingParams
from prefrl.generation.local.decoding import StopStrings
from prefrl.generation.local.generator import LocalGenerator
from prefrl.generation.vllm.requests import Guided
from prefrl.models.export import PolicyWeights
from prefrl.types import Completion
from tests.assets import tiny_tokenizer
from tests.vllm.client import PROMPTS, SEEDS, MakeGenerator, policy
from tests.vllm.faults import GENERATE, proxy_of, second_door
from tests.vllm.server import MAX_MODEL_LEN, Server

pytestmark = pytest.mark.vllm


def sampling(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"num_samples": 3, "max_tokens": 12} | changes)


def test_greedy_completions_are_those_of_local_generation(
    server: Server, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator, local = make([server.url]), LocalGenerator(model, tokenizer=tiny_tokenizer())
    generator.sync(PolicyWeights(model), version=5)
    local.sync(PolicyWeights(model), version=5)
    how = sampling(temperature=0, max_tokens=8, num_samples=2)
    prompts = [*PROMPTS, *([number] for number in range(20, 60))]
    completions = generator.generate(prompts, how, seeds=[0] * 44)
    assert completions == local.generate(prompts, how, seeds=[0] * 44)
    assert {reason for group in completions for reason in reasons(group)} == {"stop", "length"}, "one way of ending"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"temperature": 1.3, "min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"temperature": 1.0, "logprobs": "raw"},
        {"temperature": 0, "logprobs": "raw"},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_that_local_generation_samples_from(
    changes: dict[str, Any], server: Server, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator = make([server.url])
    generator.sync(PolicyWeights(model), version=1)
    how = sampling(**changes)
    groups = generator.generate(PROMPTS, how, seeds=SEEDS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            expected = logprobs_of(model, prompt, completion.token_ids, how)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_seeds_reproduce_samples_and_tell_them_apart(
    server: Server, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator = make([server.url])
    generator.sync(PolicyWeights(model), version=1)
    how = sampling(num_samples=4)
    completions = generator.generate(PROMPTS, how, seeds=SEEDS)
    assert generator.generate(PROMPTS, how, seeds=SEEDS) == completions
    assert generator.generate([PROMPTS[2]], how, seeds=[SEEDS[2]]) == [completions[2]], "depends on its neighbors"
    assert [len({tuple(c.token_ids) for c in group}) for group in completions] == [4, 4, 4, 4]
    assert generator.generate(PROMPTS[:1], how, seeds=[77]) != completions[:1]


def test_a_completion_ends_with_its_first_stop_token_or_at_its_length(
    server: Server, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator = make([server.url], stop_ids=[1, 50, 51, 52])
    generator.sync(PolicyWeights(model), version=1)
    groups = generator.generate(
        PROMPTS, sampling(num_samples=8, max_tokens=40, stop_token_ids=(60, 61, 62, 63)), seeds=SEEDS
    )
    stops = {1, 50, 51, 52, 60, 61, 62, 63}
    found = set()
    for completion in (completion for group in groups for completion in group):
        *before, last = completion.token_ids
        assert stops.isdisjoint(before)
        assert completion.finish_reason == ("stop" if last in stops else "length")
        assert last in stops or len(completion.token_ids) == 40
        found.add(last)
    assert {50, 51, 52} & found, "the generator's own stop tokens never came up"
    assert {60, 61, 62, 63} & found, "the call's stop tokens never came up"


def test_stop_strings_end_completions_where_they_do_in_local_generation(
    server: Server, model: PreTrainedModel, make: MakeGenerator
) -> None:
    tokenizer = tiny_tokenizer()
    generator = make([server.url], stop_ids=[tokenizer.eos_token_id])
    generator.sync(PolicyWeights(model), version=1)
    # Ends in the middle of a token, and at the last place of a shorter completion.
    how = sampling(num_samples=8, max_tokens=24, ignores_eos=True, stop=("nd|", "a", "Q", "7"))
    groups = generator.generate(PROMPTS, how, seeds=SEEDS)
    free = generator.generate(PROMPTS, replace(how, stop=()), seeds=SEEDS)
    ends = set()
    for prompt, group, whole in zip(PROMPTS, groups, free, strict=True):
        stops = StopStrings(tokenizer, how.stop, [prompt])
        for number, (one, long) in enumerate(zip(group, whole, strict=True)):
            found = [stops.is_complete(0, number, token) for token in long.token_ids]
            length = found.index(True) + 1 if any(found) else 24
            assert (one.token_ids, one.policy_versions) == (long.token_ids[:length], [1] * length)
            assert one.logprobs == pytest.approx(long.logprobs[:length], abs=1e-5)
            assert one.finish_reason == ("stop_string" if any(found) else "length")
            ends.add((one.finish_reason, one.token_ids[-1] == tokenizer.eos_token_id))
    assert ends >= {("stop_string", True), ("stop_string", False)}
    assert any(tokenizer.eos_token_id in one.token_ids[:-1] for whole in free for one in whole)
    (last,) = generator.generate([PROMPTS[0]], replace(how, max_tokens=len(groups[0][0].token_ids)), seeds=SEEDS[:1])
    assert last[0].finish_reason == groups[0][0].finish_reason


@pytest.mark.parametrize(
    ("guided", "stop", "pattern"),
    [
        (Guided(regex="[ab]{3}-[0-9]{2}"), (), "[ab]{3}-[0-9]{2}"),
        (Guided(regex="[ab]{3}-[0-9]{2}"), ("-", "#"), "[ab]{3}-"),
        (Guided(json={"enum": ["yes", "no"]}), (), '"(yes|no)"'),
        (Guided(json=json.dumps({"type": "boolean"})), (), "true|false"),
        (Guided(grammar='root ::= "x" | "y" root'), (), "y*x?"),
    ],
    ids=["regex", "regex and stop string", "schema", "schema as text", "grammar"],
)
def test_guided_completions_match(
    guided: Guided, stop: tuple[str, ...], pattern: str, server: Server, model: PreTrainedModel, make: MakeGenerator
) -> None:
    tokenizer = tiny_tokenizer()
    generator = make([server.url], guided=guided, stop_ids=[tokenizer.eos_token_id])
    generator.sync(PolicyWeights(model), version=1)
    groups = generator.generate(PROMPTS[:2], sampling(max_tokens=16, stop=stop), seeds=SEEDS[:2])
    assert {c.finish_reason == "stop_string" for group in groups for c in group} == {bool(stop)}
    texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for group in groups for c in group]
    assert [text for text in texts if not re.fullmatch(pattern, text)] == []


def test_versions_follow_the_weights_and_equal_ones_are_not_sent_again(
    server: Server, model: PreTrainedModel, make: MakeGenerator
) -> None:
    with proxy_of(server.url) as proxy:
        generator = make([proxy.url])
        how = sampling(temperature=0, num_samples=1)
        first = generate_with(generator, model, 7, how)
        assert generate_with(generator, model, 7, how) == first
        first_salt = proxy.last_body[GENERATE]["cache_salt"]
        assert proxy.requests["/update_weights"] == 1
        other = policy(server.model_dir, seed=2)
        second = generate_with(generator, other, 8, how)
        assert proxy.last_body[GENERATE]["cache_salt"] != first_salt, "may read what older weights computed"
        assert proxy.requests["/update_weights"] == 2
        local = LocalGenerator(other, tokenizer=tiny_tokenizer())
        local.sync(PolicyWeights(other), version=8)
        assert second == local.generate(PROMPTS, how, seeds=SEEDS)
        assert {version for group in second for c in group for version in c.policy_versions} == {8}
        generator.invalidate()
        assert generate_with(generator, model, 8, how) != second
        assert proxy.requests["/update_weights"] == 3


def test_completions_that_are_under_way_during_a_sync_say_which_weights_sampled_each_token(
    server: Server, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator = make([server.url], stop_ids=[1])
    how = sampling(num_samples=8, max_tokens=200)
    # The sync may come before the first token or after the last: a little later each time, at any machine's speed.
    for before in range(1, 52, 2):
        generator.sync(PolicyWeights(model), version=before)
        pending = generator.start(PROMPTS[:3], how, seeds=SEEDS[:3])
        time.sleep(0.03 * 1.3 ** (before // 2))
        generator.sync(PolicyWeights(model), version=before + 1)
        versions = [c.policy_versions for _, group in pending.as_completed() for c in group]
        assert all(those == sorted(those) for those in versions)
        assert {version for those in versions for version in those} <= {before, before + 1}
        if any(len(set(those)) == 2 for those in versions):
            return
    raise AssertionError("no sync fell into a request")


def test_prompts_are_spread_over_servers(server: Server, model: PreTrainedModel, make: MakeGenerator) -> None:
    with proxy_of(server.url) as one, proxy_of(server.url) as other:
        second_door(other)
        generator = make([one.url, other.url], max_concurrency=2)
        generator.sync(PolicyWeights(model), version=1)
        completions = generator.generate(PROMPTS * 3, sampling(), seeds=SEEDS * 3)
        assert completions[:4] == completions[4:8] == completions[8:]
        counts = one.requests[GENERATE], other.requests[GENERATE]
        assert sum(counts) == 12
        # The first four turns go two and two. Each of the others goes to whoever is free, so that a slow server gets
        # fewer; how turns are spread is tested in test_vllm_asker.
        assert min(counts) >= 2, counts
        assert generator.stats().requests == 12
        assert generator.stats().requests == 0, "told twice"


def test_completions_arrive_one_prompt_after_the_other(
    server: Server, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator = make([server.url], max_concurrency=1)
    generator.sync(PolicyWeights(model), version=1)
    numbers = [number for number, _ in generator.start(PROMPTS, sampling(), seeds=SEEDS).as_completed()]
    assert numbers == [0, 1, 2, 3], "not in the order in which the one connection served them"


def test_what_the_server_cannot_do_is_refused_before_it_is_asked(
    server: Server, model: PreTrainedModel, make: MakeGenerator
) -> None:
    with proxy_of(server.url) as proxy:
        generator = make([proxy.url])
        with pytest.raises(GenerationError, match="call sync before"):
            generator.generate(PROMPTS, sampling(), seeds=SEEDS)
        generator.sync(PolicyWeights(model), version=1)
        with pytest.raises(ConfigError, match=r'logprobs="raw": .* only at temperature 1 or 0'):
            generator.generate(PROMPTS, sampling(logprobs="raw", temperature=0.7), seeds=SEEDS)
        with pytest.raises(ConfigError, match=r"temperature=0.001: vLLM samples at 0.01 or above"):
            generator.generate(PROMPTS, sampling(temperature=0.001), seeds=SEEDS)
        with pytest.raises(GenerationError, match="prompt 1 is empty"):
            generator.generate([[5], []], sampling(), seeds=[1, 2])
        with pytest.raises(GenerationError, match=f"prompt 0 has 250 tokens and max_tokens=12: .* {MAX_MODEL_LEN} on"):
            generator.generate([[5] * 250], sampling(), seeds=[1])
        with pytest.raises(ValueError, match="1 seeds for 4 prompts"):
            generator.generate(PROMPTS, sampling(), seeds=[1])
        assert proxy.requests[GENERATE] == 0


def generate_with(generator: Any, model: PreTrainedModel, version: int, how: SamplingParams) -> list[list[Completion]]:
    generator.sync(PolicyWeights(model), version=version)
    completions: list[list[Completion]] = generator.generate(PROMPTS, how, seeds=SEEDS)
    return completions


def reasons(group: list[Completion]) -> list[str]:
    return [completion.finish_reason for completion in group]


def logprobs_of(model: PreTrainedModel, prompt: list[int], tokens: list[int], how: SamplingParams) -> list[float]:
    """What `LocalGenerator` reports of tokens that it happens to draw: transformers' processors, in its order."""
    ids = torch.tensor([prompt + tokens])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    processors: list[Any] = [RepetitionPenaltyLogitsProcessor(how.repetition_penalty)]
    processors += [TemperatureLogitsWarper(how.temperature)] if how.temperature else []
    processors += [TopKLogitsWarper(how.top_k)] if how.top_k else []
    processors += [TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []
    processors += [MinPLogitsWarper(how.min_p)] if how.min_p else []
    found = []
    for position, token in enumerate(tokens):
        scores = logits[None, position]
        for processor in processors:
            scores = processor(ids[:, : len(prompt) + position], scores)
        found.append(float(scores.log_softmax(-1)[0, token]))
    return found
