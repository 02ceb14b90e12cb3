from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModel,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MinPLogitsWarper,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prefrl.errors import ConfigError, GenerationError
from prefrl.generation.base import Home, SamplingParams
from prefrl.generation.local.decoding import StopStrings, uniform_numbers
from prefrl.generation.local.generator import LocalGenerator
from prefrl.models.modes import checkpoint_activations
from prefrl.models.router_replay import ROUTES_KWARG, RouterReplay, Routes
from tests.assets import tiny_mixture, tiny_model, tiny_tokenizer

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [7], [9, 10, 11, 12, 100, 101, 33], [60, 61] * 10]
ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {}),
    ("gemma2", {"sliding_window": 4}),
    ("mistral", {"sliding_window": 6}),
    ("gpt2", {}),
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen2", seed=1)


def sampled(max_tokens: int = 12, num_samples: int = 3, **options: Any) -> SamplingParams:
    return SamplingParams(num_samples=num_samples, max_tokens=max_tokens, **options)


def greedy_by_transformers(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@contextmanager
def forward_arguments(model: PreTrainedModel) -> Iterator[list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        calls.append(kwargs)

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


@contextmanager
def forward_shapes(model: PreTrainedModel) -> Iterator[list[tuple[int, ...]]]:
    shapes: list[tuple[int, ...]] = []
    with forward_arguments(model) as calls:
        yield shapes
    shapes += [tuple(arguments["input_ids"].shape) for arguments in calls]


@pytest.mark.parametrize(("architecture", "options"), ARCHITECTURES)
def test_greedy_equals_transformers_token_by_token(architecture: str, options: dict[str, Any]) -> None:
    model = tiny_model(architecture, **options)
    # A token that the second prompt reaches in the middle: rows of other lengths end at other times.
    model.generation_config.eos_token_id = [1, greedy_by_transformers(model, PROMPTS[1], 24)[9]]
    expected = [greedy_by_transformers(model, prompt, 24) for prompt in PROMPTS]
    assert len(expected[1]) <= 10
    for max_rows in (1, 3, 64):
        generator = LocalGenerator(model, max_rows=max_rows)
        together = generator.generate(PROMPTS, sampled(24, 2, temperature=0), seeds=[0] * 4)
        assert [[sample.token_ids for sample in samples] for samples in together] == [[ids, ids] for ids in expected]
    alone = [generator.generate([prompt], sampled(24, 1, temperature=0), seeds=[0])[0] for prompt in PROMPTS]
    assert [[sample.token_ids for sample in samples] for samples in alone] == [[ids] for ids in expected]


def test_greedy_with_repetition_penalty_equals_transformers(model: PreTrainedModel) -> None:
    completions = LocalGenerator(model).generate(
        PROMPTS, sampled(16, 1, temperature=0, repetition_penalty=1.7), seeds=[0] * 4
    )
    for prompt, (completion,) in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(ids, do_sample=False, max_new_tokens=16, repetition_penalty=1.7, pad_token_id=0)
        assert completion.token_ids == output[0, len(prompt) :].tolist()


# peft 0.21 asks transformers 5.23 by the old name.
def test_greedy_of_a_lora_model_equals_transformers() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("qwen2", seed=1)
    plain = greedy_by_transformers(model, PROMPTS[0], 16)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    expected = [greedy_by_transformers(adapted.eval(), prompt, 16) for prompt in PROMPTS]
    completions = LocalGenerator(adapted).generate(PROMPTS, sampled(16, 1, temperature=0), seeds=[0] * 4)
    assert [samples[0].token_ids for samples in completions] == expected
    assert expected[0] != plain


TRUNCATED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3}


def full_forward(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """[T, V] logits, each of the token at the same place of the completion."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def test_sampled_logprobs_are_of_the_distribution_after_all_processors(model: PreTrainedModel) -> None:
    # In vLLM's order.
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            MinPLogitsWarper(0.02),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
        ]
    )
    completions = LocalGenerator(model).generate(PROMPTS, sampled(**TRUNCATED), seeds=range(4))
    for prompt, samples in zip(PROMPTS, completions, strict=True):
        for sample in samples:
            logits = full_forward(model, prompt, sample.token_ids)
            for t, (token, logprob) in enumerate(zip(sample.token_ids, sample.logprobs or [], strict=True)):
                history = torch.tensor([[*prompt, *sample.token_ids[:t]]])
                expected = processors(history, logits[t : t + 1]).log_softmax(dim=-1)[0, token]
                assert logprob == pytest.approx(float(expected), abs=1e-5)


def test_raw_logprobs_are_untruncated_at_temperature_one(model: PreTrainedModel) -> None:
    completions = LocalGenerator(model).generate(PROMPTS, sampled(logprobs="raw", **TRUNCATED), seeds=range(4))
    same_ids = LocalGenerator(model).generate(PROMPTS, sampled(**TRUNCATED), seeds=range(4))
    for prompt, samples, others in zip(PROMPTS, completions, same_ids, strict=True):
        for sample, other in zip(samples, others, strict=True):
            assert sample.token_ids == other.token_ids
            expected = full_forward(model, prompt, sample.token_ids).log_softmax(dim=-1)
            chosen = expected.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), chosen, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, TRUNCATED], ids=["plain", "truncated"])
def test_a_sample_does_not_depend_on_what_else_is_drawn(model: PreTrainedModel, options: dict[str, Any]) -> None:
    sampling, seeds = sampled(20, 4, stop_token_ids=tuple(range(2, 10)), **options), [11, 5, 5, 2**40]
    together = LocalGenerator(model).generate(PROMPTS, sampling, seeds=seeds)
    ids = [[sample.token_ids for sample in samples] for samples in together]
    assert len({len(sample) for samples in ids for sample in samples}) > 3  # rows left at different steps
    for max_rows in (1, 3, 5):
        again = LocalGenerator(model, max_rows=max_rows).generate(PROMPTS, sampling, seeds=seeds)
        assert [[sample.token_ids for sample in samples] for samples in again] == ids
    for prompt, seed, expected in zip(PROMPTS, seeds, ids, strict=True):
        (alone,) = LocalGenerator(model).generate([prompt], sampling, seeds=[seed])
        assert [sample.token_ids for sample in alone] == expected
    (fewer,) = LocalGenerator(model).generate(
        PROMPTS[:1], sampled(20, 2, stop_token_ids=tuple(range(2, 10)), **options), seeds=seeds[:1]
    )
    assert [sample.token_ids for sample in fewer] == ids[0][:2]


def test_samples_seeds_and_repeated_prompts_differ(model: PreTrainedModel) -> None:
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1]]
    first, second, other = LocalGenerator(model).generate(prompts, sampled(), seeds=[0, 1, 0])
    assert len({tuple(sample.token_ids) for sample in [*first, *second, *other]}) == 9


def test_first_tokens_follow_the_softmax(model: PreTrainedModel) -> None:
    (samples,) = LocalGenerator(model, max_rows=4000).generate(
        [PROMPTS[0]], sampled(1, 4000, temperature=0.5), seeds=[7]
    )
    counts = torch.bincount(torch.tensor([sample.token_ids[0] for sample in samples]), minlength=128)
    expected = (full_forward(model, PROMPTS[0], [0])[0] / 0.5).softmax(dim=-1)
    variation = float((counts / 4000 - expected).abs().sum() / 2)
    # The mean of |count / n - p| is sqrt(2 p (1 - p) / (pi n)) for a right sampler.
    noise = float((2 * expected * (1 - expected) / (math.pi * 4000)).sqrt().sum() / 2)
    assert variation < 1.25 * noise
    assert float((expected - (full_forward(model, PROMPTS[0], [0])[0]).softmax(-1)).abs().sum() / 2) > 3 * noise


def test_every_token_has_a_random_number_of_its_own() -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    model.lm_head.weight.data.zero_()  # 128 tokens of equal probability
    (samples,) = LocalGenerator(model).generate([PROMPTS[0]], sampled(10, 3), seeds=[9])
    for number, sample in enumerate(samples):
        expected = (uniform_numbers(9, number, 10) * 128).floor().int().tolist()
        assert sample.token_ids == expected[: len(sample.token_ids)]


def test_a_stop_token_belongs_to_its_completion_and_ends_it(model: PreTrainedModel) -> None:
    stop_ids = (40, 41, 42, 43, 44, 45, 46, 47, 48)
    samples = LocalGenerator(model).generate([PROMPTS[0]], sampled(30, 16, stop_token_ids=stop_ids), seeds=[0])[0]
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        stops = [token in (*stop_ids, model.generation_config.eos_token_id) for token in sample.token_ids]
        assert not any(stops[:-1])
        assert stops[-1] == (sample.finish_reason == "stop")
        assert (len(stops) == 30) or stops[-1]
        assert len(sample.logprobs or []) == len(sample.trainable) == len(sample.policy_versions) == len(stops)
        assert all(sample.trainable)


def test_a_stop_token_at_the_last_place_is_a_stop(model: PreTrainedModel) -> None:
    (full,) = LocalGenerator(model).generate([PROMPTS[0]], sampled(6, 1, temperature=0), seeds=[0])[0]
    place = full.token_ids.index(full.token_ids[-1]) + 1
    (cut,) = LocalGenerator(model).generate(
        [PROMPTS[0]], sampled(place, 1, temperature=0, stop_token_ids=(full.token_ids[-1],)), seeds=[0]
    )[0]
    assert full.finish_reason == "length"
    assert (cut.finish_reason, cut.token_ids) == ("stop", full.token_ids[:place])


@pytest.mark.parametrize("max_rows", [2, 64])
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(model: PreTrainedModel, max_rows: int) -> None:
    tokenizer, stops = tiny_tokenizer(), ("nd|", "E0F", "ystem|>.", "x")
    generator, prompts = LocalGenerator(model, tokenizer=tokenizer, max_rows=max_rows), [[5, 6, 7], [9, 10, 11, 12]]
    free = generator.generate(prompts, sampled(30, 3, ignores_eos=True), seeds=[1, 2])
    cut = generator.generate(prompts, sampled(30, 3, ignores_eos=True, stop=stops), seeds=[1, 2])
    assert any(tokenizer.eos_token_id in one.token_ids[:-1] for one in chain(*free))
    reasons = []
    for whole, one in zip(chain(*free), chain(*cut), strict=True):
        texts = [tokenizer.decode(whole.token_ids[:length]) for length in range(1, 31)]
        lengths = [length for length, text in enumerate(texts, 1) if any(stop in text for stop in stops)]
        reasons.append("stop_string" if lengths else "length")
        length = min(lengths, default=30)
        assert (one.finish_reason, one.token_ids) == (reasons[-1], whole.token_ids[:length])
        assert one.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
        assert len(one.trainable) == len(one.policy_versions) == length
    assert set(reasons) == {"stop_string", "length"}


def test_a_stop_string_may_be_spread_over_bytes_and_does_not_begin_in_the_prompt() -> None:
    backend = Tokenizer(BPE({char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.decoder = ByteLevelDecoder()
    tokenizer, prompts = PreTrainedTokenizerFast(tokenizer_object=backend), [[backend.token_to_id("z")], [7]]
    stops = StopStrings(tokenizer, ["!\u00e9", "zz"], prompts)
    one = [backend.token_to_id(char) for char in "!\u00c3\u00a9?"]  # the bytes of an e with an accent
    assert [stops.is_complete(1, 0, token) for token in one] == [False, False, True, False]
    other = [backend.token_to_id(char) for char in "z\u00c3\u00c3\u00ff\u00c3zz"]  # bytes that are no text
    assert [stops.is_complete(0, 0, token) for token in other] == [False] * 6 + [True]


def test_stop_strings_need_a_tokenizer_that_decodes_token_by_token(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"stop=\['x'\]: .* NoneType is none"):
        LocalGenerator(model).generate([[5]], sampled(stop=("x",)), seeds=[0])


@pytest.mark.parametrize("source", ["config list", "config", "tokenizer", "sampling"])
def test_stop_tokens_of_every_source_count(source: str) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    free = LocalGenerator(model).generate([PROMPTS[0]], sampled(8, 1, temperature=0), seeds=[0])[0][0].token_ids
    generator = LocalGenerator(model, tokenizer=tokenizer)  # it reads them when it generates
    stop_ids: tuple[int, ...] = ()
    if source.startswith("config"):
        model.generation_config.eos_token_id = [1, free[2]] if source == "config list" else free[2]
    elif source == "tokenizer":
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(free[2])
    else:
        stop_ids = (free[2],)
    (cut,) = generator.generate([PROMPTS[0]], sampled(8, 1, temperature=0, stop_token_ids=stop_ids), seeds=[0])[0]
    assert cut.token_ids == free[: free.index(free[2]) + 1]


def test_a_prompt_is_computed_once_and_finished_rows_leave(model: PreTrainedModel) -> None:
    sampling = sampled(25, 6, stop_token_ids=tuple(range(2, 12)))
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[0]]  # two distinct ones
    with forward_shapes(model) as shapes:
        completions = LocalGenerator(model).generate(prompts, sampling, seeds=[0, 1, 2])
    lengths = [len(sample.token_ids) for samples in completions for sample in samples]
    longest = max(lengths)
    assert min(lengths) < longest
    assert shapes[0] == (2, 11)
    # The token at place t is fed if its row goes on after it.
    assert shapes[1:] == [(sum(length > t for length in lengths), 1) for t in range(1, longest)]


def test_only_rows_with_padding_have_a_mask_and_all_have_their_positions(model: PreTrainedModel) -> None:
    with forward_arguments(model) as calls:
        LocalGenerator(model).generate([[5, 6, 7], [8, 9, 10]], sampled(4, 2), seeds=[0, 1])
    assert [arguments["attention_mask"] for arguments in calls] == [None] * 4
    assert calls[0]["position_ids"].tolist() == [[0, 1, 2]] * 2
    assert [arguments["position_ids"].tolist() for arguments in calls[1:]] == [[[3]] * 4, [[4]] * 4, [[5]] * 4]
    with forward_arguments(model) as calls:
        LocalGenerator(model).generate([[5], [8, 9, 10]], sampled(3, 1), seeds=[0, 1])
    assert [arguments["attention_mask"].tolist() for arguments in calls] == [
        [[0, 0, 1], [1, 1, 1]],
        [[0, 0, 1, 1], [1, 1, 1, 1]],
        [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
    ]
    assert [arguments["position_ids"].tolist() for arguments in calls] == [
        [[0, 0, 0], [0, 1, 2]],
        [[1], [3]],
        [[2], [4]],
    ]


# The sizes of the head make it large enough to be packed.
@pytest.fixture(scope="module")
def wide_model() -> PreTrainedModel:
    return tiny_model("qwen2", vocab_size=2**14)


@contextmanager
def packed_heads(model: PreTrainedModel) -> Iterator[list[bool]]:
    is_packed: list[bool] = []
    handle = model.lm_head.register_forward_pre_hook(lambda head, args: is_packed.append("forward" in vars(head)))
    try:
        yield is_packed
    finally:
        handle.remove()


@pytest.mark.parametrize(("max_tokens", "is_packed"), [(15, False), (16, True)])
def test_weights_are_packed_where_it_pays(wide_model: PreTrainedModel, max_tokens: int, is_packed: bool) -> None:
    with packed_heads(wide_model) as packed:
        LocalGenerator(wide_model).generate([PROMPTS[0]], sampled(max_tokens, 2), seeds=[0])
    assert packed == [is_packed] * max_tokens
    assert "forward" not in vars(wide_model.lm_head)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # torch's own, on switching back
def test_samples_of_packed_weights_are_the_policys(wide_model: PreTrainedModel) -> None:
    completions = LocalGenerator(wide_model).generate(PROMPTS, sampled(20, 3), seeds=range(4))
    with torch.backends.mkldnn.flags(enabled=False):
        assert [
            [sample.token_ids for sample in samples]
            for samples in LocalGenerator(wide_model).generate(PROMPTS, sampled(20, 3), seeds=range(4))
        ] == [[sample.token_ids for sample in samples] for samples in completions]
    for prompt, samples in zip(PROMPTS, completions, strict=True):
        for sample in samples:
            expected = full_forward(wide_model, prompt, sample.token_ids).log_softmax(dim=-1)
            chosen = expected.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), chosen, atol=1e-5, rtol=0)


# peft 0.21 asks transformers 5.23 by the old name.
def test_greedy_with_an_adapter_around_a_packed_layer_equals_transformers() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama", vocab_size=2**14, tie_word_embeddings=False)
    plain = greedy_by_transformers(model, PROMPTS[0], 16)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    expected = [greedy_by_transformers(adapted.eval(), prompt, 16) for prompt in PROMPTS]
    head = adapted.get_base_model().lm_head.base_layer
    is_packed: list[bool] = []
    head.register_forward_pre_hook(lambda module, args: is_packed.append("forward" in vars(module)))
    completions = LocalGenerator(adapted).generate(PROMPTS, sampled(16, 1, temperature=0), seeds=[0] * 4)
    assert [samples[0].token_ids for samples in completions] == expected
    assert is_packed == [True] * 16
    assert expected[0] != plain


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_bfloat16_equals_transformers(architecture: str) -> None:
    model = tiny_model(architecture).to(torch.bfloat16)
    for prompt in PROMPTS[::2]:
        (completion,) = LocalGenerator(model).generate([prompt], sampled(16, 1, temperature=0), seeds=[0])[0]
        assert completion.token_ids == greedy_by_transformers(model, prompt, 16)


def test_waves_of_one_prompt_share_its_computation(model: PreTrainedModel) -> None:
    with forward_shapes(model) as shapes:
        LocalGenerator(model, max_rows=2).generate([PROMPTS[0]], sampled(3, 5), seeds=[0])
    assert shapes == [(1, 11), (2, 1), (2, 1), (2, 1), (2, 1), (1, 1), (1, 1)]


def test_prompts_of_like_length_run_together(model: PreTrainedModel) -> None:
    prompts = [[5] * 20, [6], [5] * 19, [7, 8]]
    with forward_shapes(model) as shapes:
        LocalGenerator(model, max_rows=2).generate(prompts, sampled(1, 1), seeds=[0] * 4)
    assert shapes == [(2, 2), (2, 20)]


def test_global_random_state_and_modes_are_left_alone(model: PreTrainedModel) -> None:
    model = tiny_model("qwen2", attention_dropout=0.5)
    checkpoint_activations(model)
    model.config.use_cache = False
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    first = LocalGenerator(model).generate(PROMPTS, sampled(), seeds=range(4))
    assert torch.get_rng_state().equal(state)
    assert [module.training for module in model.modules()] == modes
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert model.config.use_cache is False
    torch.manual_seed(123)
    assert LocalGenerator(model.eval()).generate(PROMPTS, sampled(), seeds=range(4)) == first  # no dropout


def test_the_model_can_be_trained_after_generating() -> None:
    model = tiny_model("llama").train()
    LocalGenerator(model).generate(PROMPTS, sampled(), seeds=range(4))
    model(torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_completions_carry_the_version_of_the_weights(model: PreTrainedModel) -> None:
    generator = LocalGenerator(model)
    before = generator.generate([PROMPTS[1]], sampled(2, 1), seeds=[0])[0][0]
    generator.sync(iter(()), version=17)
    after = generator.generate([PROMPTS[1]], sampled(2, 1), seeds=[0])[0][0]
    generator.close()
    assert (before.policy_versions, after.policy_versions) == ([0, 0], [17, 17])


def test_logits_that_are_not_finite_stop_the_run() -> None:
    model = tiny_model("gpt2").train()
    model.transformer.wte.weight.data[0, 10] = math.nan  # tied: the logit of token 0 is NaN
    generator = LocalGenerator(model)
    generator.sync(iter(()), version=3)
    with pytest.raises(GenerationError, match="sample 0, token 0: the logits of weight version 3 are NaN"):
        generator.generate(PROMPTS, sampled(), seeds=range(4))
    assert model.training


def test_one_bad_prompt_is_named() -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    model.model.embed_tokens.weight.data[33] = math.nan  # token 33 ends prompt 2
    with pytest.raises(GenerationError, match="prompt 2, sample 0, token 0"):
        LocalGenerator(model).generate([PROMPTS[0], PROMPTS[1], PROMPTS[2]], sampled(4, 2), seeds=range(3))


def test_a_table_of_positions_limits_prompt_and_completion() -> None:
    generator = LocalGenerator(tiny_model("gpt2", n_positions=24))
    with pytest.raises(
        GenerationError, match=r"prompt 3 has 20 tokens and max_tokens=5: together must be at most 24 for GPT2"
    ):
        generator.generate(PROMPTS, sampled(5), seeds=range(4))
    assert len(generator.generate(PROMPTS, sampled(4, 1, temperature=0), seeds=range(4))[3][0].token_ids) == 4


def test_computed_positions_have_no_limit() -> None:
    generator = LocalGenerator(tiny_model("llama", max_position_embeddings=24))
    assert len(generator.generate(PROMPTS, sampled(30, 1, temperature=0), seeds=range(4))[3][0].token_ids) > 4


def test_architectures_without_a_usable_cache_are_refused_by_name() -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=128, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(GenerationError, match="MambaForCausalLM cannot generate in this process"):
        LocalGenerator(mamba)
    with pytest.raises(GenerationError, match="OpenAIGPTLMHeadModel cannot generate in this process: its"):
        LocalGenerator(OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=128, n_embd=16, n_layer=1, n_head=2)))
    sizes = {"vocab_size": 32, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    with pytest.raises(GenerationError, match="T5Model cannot generate in this process: it is an encoder"):
        LocalGenerator(AutoModel.from_config(AutoConfig.for_model("t5", **sizes)))


def test_bad_calls_are_named(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="max_rows=0"):
        LocalGenerator(model, max_rows=0)
    with pytest.raises(ValueError, match="1 seeds for 2 prompts"):
        LocalGenerator(model).generate(PROMPTS[:2], sampled(), seeds=[0])
    with pytest.raises(GenerationError, match="prompt 1 is empty"):
        LocalGenerator(model).generate([[5], []], sampled(), seeds=[0, 0])
    assert LocalGenerator(model).generate([], sampled(), seeds=[]) == []


@pytest.mark.parametrize("max_rows", [2, 64])
def test_a_row_with_a_limit_of_its_own_is_what_it_is_alone(model: PreTrainedModel, max_rows: int) -> None:
    generator, limits, seeds = LocalGenerator(model, max_rows=max_rows), [1, 9, 4, 17], [3, 1, 4, 1]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1], PROMPTS[3]]  # two rows with one prompt have other limits
    together = generator.generate(prompts, sampled(99, 2), seeds=seeds, limits=limits)
    for prompt, seed, limit, completions in zip(prompts, seeds, limits, together, strict=True):
        (alone,) = generator.generate([prompt], sampled(limit, 2), seeds=[seed])
        assert [one.token_ids for one in completions] == [one.token_ids for one in alone]
        assert [one.finish_reason for one in completions] == [one.finish_reason for one in alone]
        assert max(len(one.token_ids) for one in completions) <= limit
    assert {len(one.token_ids) for one in together[3]} == {17}


def test_turns_have_the_limits_of_their_requests(model: PreTrainedModel) -> None:
    class Once:
        is_over = is_waiting = has_news = lambda self: all(answer.done() for answer in answers)

        def attend(self) -> None: ...

    generator = LocalGenerator(model)
    turns = generator.turns(sampled(99, 3))
    answers = [turns.ask(PROMPTS[0], max_tokens=limit, seed=limit, home=Home()) for limit in (3, 6)]
    turns.serve(Once())
    for answer, limit in zip(answers, (3, 6), strict=True):
        ((alone,),) = generator.generate([PROMPTS[0]], sampled(limit, 1), seeds=[limit])
        assert answer.result().token_ids == alone.token_ids


@pytest.mark.parametrize("max_rows", [3, 64])
def test_completions_have_the_experts_of_every_token_that_was_run(max_rows: int) -> None:
    model, replay = tiny_mixture(seed=3), RouterReplay()
    generator = LocalGenerator(model, max_rows=max_rows, replay=replay)
    # Some rows stop early, so that others move to their places.
    completions = generator.generate(PROMPTS, sampled(stop_token_ids=tuple(range(2, 128, 8))), seeds=range(4))
    assert len({len(one.token_ids) for group in completions for one in group}) > 3
    for prompt, group in zip(PROMPTS, completions, strict=True):
        for one in group:
            record = Routes(replay)
            ids = torch.tensor([[*prompt, *one.token_ids[:-1]]])
            with torch.no_grad():
                model(input_ids=ids, use_cache=False, **{ROUTES_KWARG: record})
            assert one.routes is not None
            assert torch.equal(one.routes, record.recorded())
    plain = LocalGenerator(model).generate(PROMPTS, sampled(), seeds=range(4))
    assert all(one.routes is None for group in plain for one in group)
