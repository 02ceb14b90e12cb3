"""The requests to vLLM, and the checks of its answers."""

from __future__ import annotations

import base64
import copy
import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from prefrl.errors import ConfigError, GenerationError
from prefrl.generation.base import SamplingParams
from prefrl.generation.vllm.requests import (
    Aborted,
    BadAnswer,
    Expected,
    Guided,
    OtherWeights,
    PromptRequest,
    answer_limit,
    check_sampling,
    check_token_prompts,
    completions_of,
    request_body,
    version_name,
)
from prefrl.models.router_replay import RouterReplay
from prefrl.types import Completion, Images
from tests.assets import tiny_model

EXPECTED = Expected(request_id="r7", run="run", vocab_size=10, stop_ids=frozenset({1, 2}), is_guided=False)


def answered(answer: Any, asked: PromptRequest, expected: Expected) -> list[Completion]:
    return completions_of(answer, asked, expected, newest_step=7)


def prompt(**changes: Any) -> PromptRequest:
    return PromptRequest(0, [5, 6], 40, SamplingParams(**{"num_samples": 2, "max_tokens": 3} | changes), 6)


def choice(index: int, tokens: list[int], reason: str, *spans: tuple[str, int, int]) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": tokens,
        "finish_reason": reason,
        "logprobs": {"content": [{"token_id": t, "logprob": -t / 10, "top_logprobs": []} for t in tokens]},
        "weight_versions": [{"version": version, "start": start, "end": end} for version, start, end in spans],
    }


def answer() -> dict[str, Any]:
    """Choices in the wrong order, the second over a change of weights."""
    return {
        "request_id": "generate-tokens-r7",
        "choices": [
            choice(1, [3, 4, 5], "length", ("run:6", 0, 1), ("run:7", 1, 3)),
            choice(0, [9, 1], "stop", ("run:6", 0, 2)),
        ],
    }


def body(asked: PromptRequest, guided: Guided | None = None) -> dict[str, Any]:
    return request_body(asked, EXPECTED, model="tiny", salt="run:6", guided=guided)


def test_the_request_says_everything_that_decides_a_sample() -> None:
    sampling: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2}
    assert body(prompt(**sampling)) == {
        "request_id": "r7",
        "token_ids": [5, 6],
        "model": "tiny",
        "cache_salt": "run:6",
        "sampling_params": {
            "n": 2,
            "max_tokens": 3,
            **sampling,
            "seed": 40,
            "logprobs": 0,
            "stop_token_ids": [1, 2],
            "ignore_eos": True,
            "detokenize": False,
        },
    }


def test_stop_strings_are_compared_with_the_text_of_special_tokens_too() -> None:
    parameters = body(prompt(stop=("</a>", "<|end|>")))["sampling_params"]
    assert [parameters[name] for name in ("stop", "skip_special_tokens", "detokenize")] == [
        ["</a>", "<|end|>"],
        False,
        True,
    ]


def with_image() -> PromptRequest:
    """Token 5 stands for an image, and becomes three tokens."""
    picture = Image.new("RGB", (2, 1), (250, 10, 20))
    images = Images({}, ((0, 3),), pictures=(picture,), unexpanded_ids=(5, 6))
    return PromptRequest(0, [5, 5, 5, 6], 40, SamplingParams(num_samples=2, max_tokens=3), 6, images=images)


def test_images_are_sent_without_loss_with_one_placeholder_for_each() -> None:
    sent = body(with_image())
    assert sent["token_ids"] == [5, 6]
    (part,) = sent["content_parts"]
    header, _, data = part["url"].partition(",")
    assert (part["type"], header) == ("image_url", "data:image/png;base64")
    assert list(Image.open(io.BytesIO(base64.b64decode(data))).getdata()) == [(250, 10, 20)] * 2


def test_the_prompt_that_comes_back_must_be_the_trainers() -> None:
    echo = {"prompt_token_ids": [5, 5, 5, 6]}
    assert answered(answer() | echo, with_image(), EXPECTED) == answered(answer(), prompt(), EXPECTED)
    for wrong, words in (([5, 5, 6], "3 tokens on the server and 4 .* token 2 on"), ([5, 5, 5], "token 3 on")):
        with pytest.raises(BadAnswer, match=words):
            answered(answer() | {"prompt_token_ids": wrong}, with_image(), EXPECTED)
    with pytest.raises(BadAnswer, match="a field is missing"):
        answered(answer(), with_image(), EXPECTED)


def test_forbidden_tokens_are_made_improbable_and_not_believed() -> None:
    expected = replace(EXPECTED, never=(4,))
    sent = request_body(prompt(), expected, model="tiny", salt="run:6", guided=None)
    assert sent["sampling_params"]["logit_bias"] == {"4": -100.0}
    with pytest.raises(BadAnswer, match=r"placeholders of images, one of \[4\]"):
        answered(answer(), prompt(), expected)


def test_what_is_switched_off_is_0_and_greedy_samples_are_asked_for_once() -> None:
    parameters = body(prompt(temperature=0, top_k=None, min_p=None))["sampling_params"]
    assert (parameters["top_k"], parameters["min_p"], parameters["n"]) == (0, 0.0, 1)


def test_a_seed_leaves_room_for_those_of_all_samples() -> None:
    asked = PromptRequest(0, [5], 2**63 - 1, SamplingParams(num_samples=4, max_tokens=3), 6)
    seed = body(asked)["sampling_params"]["seed"]
    assert seed == 2**62 - 1
    assert seed + 4 < 2**63


def test_completions_are_in_the_order_of_their_samples_with_the_step_behind_each_token() -> None:
    first, second = answered(answer(), prompt(), EXPECTED)
    assert (first.token_ids, first.finish_reason, first.logprobs) == ([9, 1], "stop", [-0.9, -0.1])
    assert first.policy_versions == [6, 6]
    assert first.trainable == [True, True]
    assert (second.token_ids, second.finish_reason) == ([3, 4, 5], "length")
    assert second.policy_versions == [6, 7, 7]


def test_a_greedy_completion_is_every_sample_and_certain() -> None:
    one = answer() | {"choices": [answer()["choices"][1]]}
    completions = answered(one, prompt(temperature=0, num_samples=3), EXPECTED)
    assert [completion.token_ids for completion in completions] == [[9, 1]] * 3
    assert [completion.logprobs for completion in completions] == [[0.0, 0.0]] * 3
    (raw,) = answered(one, prompt(temperature=0, num_samples=1, logprobs="raw"), EXPECTED)
    assert raw.logprobs == [-0.9, -0.1]


def test_guided_completions_may_end_without_a_stop_token() -> None:
    one = answer() | {"choices": [choice(0, [9, 8], "stop", ("run:6", 0, 2))]}
    guided = Expected("r7", "run", 10, frozenset({1, 2}), is_guided=True)
    (completion,) = answered(one, prompt(num_samples=1), guided)
    assert (completion.token_ids, completion.finish_reason) == ([9, 8], "stop")


def test_only_a_requested_stop_string_ends_a_completion_without_a_stop_token() -> None:
    one = answer() | {"choices": [choice(0, [9, 8], "stop", ("run:6", 0, 2)) | {"stop_reason": "</a>"}]}
    (completion,) = answered(one, prompt(num_samples=1, stop=("</a>",)), EXPECTED)
    assert (completion.token_ids, completion.logprobs) == ([9, 8], [-0.9, -0.8])
    assert completion.finish_reason == "stop_string"
    with pytest.raises(BadAnswer, match="finish_reason 'stop' with the last token 8"):
        answered(one, prompt(num_samples=1, stop=("</b>",)), EXPECTED)
    ended = answer() | {"choices": [choice(0, [9, 1], "stop", ("run:6", 0, 2)) | {"stop_reason": 1}]}
    assert answered(ended, prompt(num_samples=1, stop=("</a>",)), EXPECTED)[0].finish_reason == "stop"


def setter(number: int, **fields: Any) -> Callable[[Any], None]:
    return lambda answer: answer["choices"][number].update(fields)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda a: a["choices"].append(choice(2, [1], "stop", ("run:6", 0, 1))),
            r"choices \[1, 0, 2\], but each of 0..1",
        ),
        (lambda a: a["choices"].append(a["choices"][0]), r"choices \[1, 0, 1\], but each of 0..1"),
        (setter(0, index=0), r"choices \[0, 0\]"),
        (setter(0, token_ids=[3, 4]), "the log-probs are for the tokens|cut off after 2 tokens"),
        (setter(0, token_ids=[]), r"has 0 tokens, but 1\.\."),
        (setter(0, token_ids=[3] * 99), r"has 99 tokens, but 1\.\."),
        (setter(0, logprobs=None), "a field is missing or malformed"),
        (setter(0, token_ids=[3, 4, 10]), r"\[10\] are outside the vocabulary, 0..9"),
        (setter(0, token_ids=[3, 4, -1]), r"\[-1\] are outside the vocabulary"),
        (setter(0, token_ids=[3, 4, 5.0]), r"\[5.0\] are outside the vocabulary"),
        (setter(0, token_ids=[3, 1, 5]), r"tokens follow a stop token \(one of \[1, 2\]\)"),
        (setter(0, finish_reason="stop"), "finish_reason 'stop' with the last token 5"),
        (setter(1, finish_reason="length"), "finish_reason 'length' with the last token 1"),
        (setter(0, finish_reason=None), "finish_reason None is not one of"),
        (setter(0, weight_versions=[]), "cover 0 of 3 tokens"),
        *(
            (setter(0, weight_versions=[{"version": "run:6", "start": 0, "end": end}]), "within the 3 tokens")
            for end in (10**11, 10**30)  # a list of so many numbers would not fit into memory
        ),
        (
            lambda a: a["choices"][0]["weight_versions"].reverse(),
            "weight versions are not consecutive and within the 3 tokens",
        ),
        (lambda a: a["choices"][0]["logprobs"]["content"].pop(), "the log-probs are for the tokens"),
        (lambda a: a["choices"][0]["logprobs"]["content"][1].update(logprob=float("inf")), "token 1 is inf"),
        (lambda a: a["choices"][0]["logprobs"]["content"][1].update(logprob=-9999.0), r"token 1 is -9999\.0"),
        (lambda a: a["choices"][0]["logprobs"]["content"][1].update(logprob="-1.0"), "token 1 is '-1.0': must be a"),
        (
            lambda a: a["choices"][0]["logprobs"]["content"][1].update(logprob=0.01),
            "token 1 is 0.01: must be a number",
        ),
        (lambda a: a["choices"][0]["logprobs"]["content"][1].update(logprob=False), "token 1 is False: must be a"),
        (lambda a: a.update(request_id="generate-tokens-r8"), "to another request, 'generate-tokens-r8'"),
        (lambda a: a.update(choices=7), "malformed"),
    ],
)
def test_a_wrong_answer_is_not_believed(edit: Callable[[Any], None], words: str) -> None:
    wrong = copy.deepcopy(answer())
    edit(wrong)
    with pytest.raises(BadAnswer, match=words):
        answered(wrong, prompt(), EXPECTED)


@pytest.mark.parametrize("nothing", [None, [], "text", 7])
def test_an_answer_that_is_no_object_is_not_believed(nothing: object) -> None:
    with pytest.raises(BadAnswer, match="a field is missing"):
        answered(nothing, prompt(), EXPECTED)


def test_a_completion_shorter_than_asked_for_is_not_taken_for_a_long_one() -> None:
    cut = answer() | {"choices": [choice(0, [3, 4], "length", ("run:6", 0, 2))]}
    with pytest.raises(BadAnswer, match="cut off after 2 tokens, before max_tokens=3"):
        answered(cut, prompt(num_samples=1), EXPECTED)


@pytest.mark.parametrize("version", ["default", "updating", "other:6", "run", "run:", "run:x", ""])
def test_tokens_of_other_weights_are_told_apart(version: str) -> None:
    other = answer() | {"choices": [choice(0, [9, 1], "stop", ("run:6", 0, 1), (version, 1, 2))]}
    with pytest.raises(OtherWeights, match=f"calls {version!r}, not run:<step>"):
        answered(other, prompt(num_samples=1), EXPECTED)


def test_an_answer_may_be_as_long_as_what_was_requested() -> None:
    longest = prompt(num_samples=8, max_tokens=512)
    entry = {
        "token": "x" * 64,
        "token_id": 123456,
        "logprob": -12.345678901234567,
        "rank": 123456,
        "bytes": [255] * 16,
    }
    size = 8 * 512 * len(json.dumps(entry | {"top_logprobs": [entry]}))
    assert size < answer_limit(longest) < 16 * size


def test_an_aborted_request_is_told_apart_even_without_tokens() -> None:
    aborted = answer()
    aborted["choices"][0] |= {"finish_reason": "abort", "token_ids": []}
    with pytest.raises(Aborted, match="after 0 tokens"):
        answered(aborted, prompt(), EXPECTED)


def test_a_version_is_named_after_run_and_step() -> None:
    assert version_name("run", 7) == "run:7"


@pytest.mark.parametrize(
    ("guided", "expected"),
    [
        (Guided(regex="a+"), {"regex": "a+"}),
        (Guided(grammar='root ::= "x"'), {"grammar": 'root ::= "x"'}),
        (Guided(json={"type": "object"}), {"json": {"type": "object"}}),
        (Guided(json='{"type": "object"}'), {"json": {"type": "object"}}),
    ],
)
def test_a_guide_is_sent_as_structured_outputs(guided: Guided, expected: dict[str, Any]) -> None:
    parameters = body(prompt(), guided)["sampling_params"]
    assert parameters["structured_outputs"] == expected
    assert "structured_outputs" not in body(prompt())["sampling_params"]


@pytest.mark.parametrize(
    ("guides", "words"),
    [
        ({}, "with nothing: set exactly one"),
        ({"regex": "a", "grammar": "b"}, r"with \['regex', 'grammar'\]: set exactly one"),
        ({"json": "{"}, "is not valid JSON"),
        ({"json": "[]"}, "must be a JSON schema, which is an object"),
    ],
)
def test_a_guide_is_exactly_one(guides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Guided(**guides)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"temperature": 0, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_raw_logprobs_are_refused_where_the_servers_are_others(changes: dict[str, Any]) -> None:
    check_sampling(prompt(**changes).sampling, None)
    with pytest.raises(ConfigError, match=r'logprobs="raw"'):
        check_sampling(prompt(**changes, logprobs="raw").sampling, None)


def test_raw_logprobs_are_the_servers_where_nothing_changes_the_distribution() -> None:
    check_sampling(prompt(logprobs="raw", top_k=0, min_p=0).sampling, None)
    check_sampling(prompt(logprobs="raw", temperature=0, top_p=0.5).sampling, None)
    with pytest.raises(ConfigError, match="guided decoding"):
        check_sampling(prompt(logprobs="raw").sampling, Guided(regex="a"))


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    check_sampling(prompt(temperature=0.01).sampling, None)
    with pytest.raises(ConfigError, match=r"temperature=0\.009: vLLM samples at 0\.01 or above"):
        check_sampling(prompt(temperature=0.009).sampling, None)


def test_prompts_have_to_fit_with_their_completions() -> None:
    check_token_prompts([[1] * 6, [1]], 4, 10)
    with pytest.raises(GenerationError, match="prompt 1 has 7 tokens and max_tokens=4: together must be at most 10"):
        check_token_prompts([[1], [1] * 7], 4, 10)
    with pytest.raises(GenerationError, match="prompt 0 is empty"):
        check_token_prompts([[]], 4, 10)


# The experts of a mixture. vLLM's builds for CPUs cannot return them, so this stands in for such a server: it writes
# the field `routed_experts` as the code of vLLM 0.32 does.


def as_vllm_writes(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


@pytest.fixture(scope="module")
def replay() -> RouterReplay:
    """Two of eight experts, in the second of two layers."""
    sizes = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "topk_group": 1, "moe_intermediate_size": 16}
    more = {"n_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    found = RouterReplay()
    found.prove(tiny_model("deepseek_v3", **sizes, **experts, **more))
    return found


def experts_of(num_tokens: int, dtype: Any = np.uint8) -> Any:
    """[T, 2, 2], of a dense layer, which vLLM leaves 0, and of a mixture."""
    array = np.zeros((num_tokens, 2, 2), dtype)
    array[:, 1] = np.arange(2 * num_tokens).reshape(-1, 2) % 8
    return array


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_completions_get_the_experts_of_the_layers_that_have_some(dtype: Any, replay: RouterReplay) -> None:
    found = answer()
    for one, num_run in zip(found["choices"], (4, 3), strict=True):
        one["routed_experts"] = as_vllm_writes(experts_of(num_run, dtype))
    first, second = answered(found, prompt(), replace(EXPECTED, replay=replay))
    assert first.routes is not None
    assert first.routes.tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert first.routes.dtype == torch.uint8
    assert second.routes is not None
    assert second.routes.shape == (4, 1, 2)
    assert answered(found, prompt(), EXPECTED)[0].routes is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "it has no routed_experts, which router_replay=True needs"),
        ("?", "a field is missing or malformed"),
        (as_vllm_writes(experts_of(5)), "it has the experts of 5 tokens, but 4 were run"),
        (as_vllm_writes(experts_of(4)[..., :1]), r"shape \[4, 2, 1\]: must be 2 experts"),
        (as_vllm_writes(experts_of(4)[:, :1]), r"shape \[4, 1, 2\]: must be 2 experts"),
        (as_vllm_writes(experts_of(4) + 8), r"experts are outside 0\.\.7"),
    ],
)
def test_experts_that_do_not_fit_are_refused(text: str | None, message: str, replay: RouterReplay) -> None:
    found = answer()
    found["choices"] = [choice(0, [3, 4, 5], "length", ("run:6", 0, 3)) | {"routed_experts": text}]
    with pytest.raises(BadAnswer, match=message):
        answered(found, prompt(num_samples=1), replace(EXPECTED, replay=replay))


def test_an_answer_may_be_longer_by_its_experts() -> None:
    assert answer_limit(prompt(), num_experts=10) - answer_limit(prompt()) == 6 * 10 * 2 * (2 + 3)
    assert len(as_vllm_writes(np.zeros((10**4, 4, 2), np.int32))) < 6 * 10**4 * 8
