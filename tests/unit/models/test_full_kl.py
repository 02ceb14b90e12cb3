"""The divergence over the vocabulary, from a reference's stored hidden states, against all logits of both models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefrl.errors import ConfigError
from prefrl.losses.kl import ReferenceLogits
from prefrl.models.forward import Scoring, token_logprobs
from prefrl.models.reference import Reference
from prefrl.types import TokenBatch
from tests.assets import ragged_batch, tiny_model
from tests.unit.models.test_forward import PLANS, plain_logits
from tests.unit.models.test_reference import made, train

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")

TEMPERATURE = 0.7


BATCH = ragged_batch()


def dense_kl(policy: nn.Module, ref_logits: Tensor) -> Tensor:
    """[N] from all logits of both, 0 at tokens that are not trainable."""
    log_p = (plain_logits(policy, BATCH) / TEMPERATURE).log_softmax(1)
    log_q = (ref_logits / TEMPERATURE).log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1) * BATCH.trainable


def lora(*, trained: bool = False, base: str = "llama", **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = peft.LoraConfig(**({"target_modules": "all-linear", "lora_dropout": 0.5, "r": 4} | options))
    model = peft.get_peft_model(tiny_model(base), config).eval()
    if trained:
        train(model)
    return model  # type: ignore[no-any-return]


def lora_with_frozen_head() -> PreTrainedModel:
    """A trained adapter whose part on the head is frozen, so that only the trunk is swapped."""
    model = lora(trained=True, target_modules=["q_proj", "lm_head"])
    model.get_base_model().lm_head.requires_grad_(False)
    return model


HEAD = ["q_proj", "lm_head"]
CASES: dict[str, Callable[[], PreTrainedModel]] = {
    "untied": lambda: tiny_model("qwen2"),
    "tied": lambda: tiny_model("qwen2", tie_word_embeddings=True),
    "gpt2": lambda: tiny_model("gpt2"),
    "logit scale": lambda: tiny_model("cohere", logit_scale=0.25),
    "logits scaling": lambda: tiny_model("granite", logits_scaling=3.0),
    "softcap": lambda: tiny_model("gemma3_text", sliding_window=8, final_logit_softcapping=5.0),
    "adapter off": lora,
    "adapter off, also on the head": lambda: lora(target_modules=HEAD),
    "adapter off, on embeddings that are tied": lambda: lora(base="gpt2", target_modules=["wte", "c_attn"]),
    "swapped": lambda: lora(trained=True),
    "swapped, also on the head": lambda: lora(trained=True, target_modules=HEAD),
    "swapped, with a saved head": lambda: lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "swapped, with a frozen head": lora_with_frozen_head,
    "swapped pissa on the head": lambda: lora(target_modules=HEAD, init_lora_weights="pissa"),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def policy(request: pytest.FixtureRequest) -> PreTrainedModel:
    return request.param()  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False, kw_only=True)
class HiddenBatch(TokenBatch):
    ref_hidden: Tensor
    ref_logprobs: Tensor


def with_hidden(reference: Reference, **options: Any) -> HiddenBatch:
    scores = reference.scores(BATCH, Scoring(TEMPERATURE), want=("hidden",), **options)
    assert not scores.hidden.requires_grad
    return HiddenBatch.of(BATCH, ref_hidden=scores.hidden, ref_logprobs=scores.logprobs)


def full_kl(policy: nn.Module, batch: HiddenBatch, reference: Reference, plan: Any = "auto") -> Tensor:
    of_reference = ReferenceLogits(batch.ref_hidden, reference.logits)
    return token_logprobs(
        policy, batch, temperature=TEMPERATURE, plan=plan, reference=of_reference, want=("entropy",)
    ).divergence


def gradient(model: nn.Module, values: Tensor) -> Tensor:
    """[parameters] of a sum in which every token has its own weight."""
    model.zero_grad(set_to_none=True)
    (values * torch.linspace(-1, 2, len(values))).sum().backward()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_same_gradient(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).norm() <= 1e-4 * expected.norm()


def test_equals_the_dense_divergence_and_its_gradient_in_every_plan(policy: PreTrainedModel) -> None:
    reference = made(policy)
    with torch.no_grad():
        ref_logits = plain_logits(policy, BATCH)
    train(policy)
    expected = dense_kl(policy, ref_logits)
    expected_gradient = gradient(policy, expected)
    assert expected.max() > 0.1
    batch = with_hidden(reference)
    for plan in PLANS:
        divergence = full_kl(policy, batch, reference, plan)
        torch.testing.assert_close(divergence, expected, rtol=1e-5, atol=5e-5)
        assert_same_gradient(gradient(policy, divergence), expected_gradient)


def test_the_policy_does_not_diverge_from_itself(policy: PreTrainedModel) -> None:
    reference = made(policy)
    assert full_kl(policy, with_hidden(reference), reference).abs().max() < 1e-5


def test_dropout_and_the_policys_state_are_left_alone(policy: PreTrainedModel) -> None:
    reference = made(policy)
    batch = with_hidden(reference)
    with torch.no_grad():
        before = reference.logits(batch.ref_hidden)
    train(policy.train())
    modes = [module.training for module in policy.modules()]
    required = [parameter.requires_grad for parameter in policy.parameters()]
    weights = [parameter.detach().clone() for parameter in policy.parameters()]
    identities = [(id(parameter), parameter.data_ptr()) for parameter in policy.parameters()]
    after = reference.logits(batch.ref_hidden)
    assert after.equal(before)
    assert not after.requires_grad
    full_kl(policy, batch, reference).sum().backward()
    assert [module.training for module in policy.modules()] == modes
    assert [parameter.requires_grad for parameter in policy.parameters()] == required
    assert [(id(parameter), parameter.data_ptr()) for parameter in policy.parameters()] == identities
    assert all(a.equal(b) for a, b in zip(policy.parameters(), weights, strict=True))


@pytest.mark.parametrize("given", [lambda: tiny_model("llama", hidden_size=16), lambda: lora(trained=True)])
def test_a_given_reference_may_be_another_model(given: Callable[[], PreTrainedModel]) -> None:
    policy, model = tiny_model("qwen2"), given()
    reference = made(policy, given=model)
    with torch.no_grad():
        ref_logits = plain_logits(model, BATCH)
    batch = with_hidden(reference)
    divergence = full_kl(policy, batch, reference)
    expected = dense_kl(policy, ref_logits)
    torch.testing.assert_close(divergence, expected, rtol=1e-5, atol=5e-5)
    assert_same_gradient(gradient(policy, divergence), gradient(policy, expected))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("trained", [False, True])
def test_pieces_and_the_order_of_rows_change_nothing(trained: bool) -> None:
    policy = lora(trained=trained)
    reference = made(policy)
    train(policy)
    batch = with_hidden(reference)
    for max_tokens in (1, 9, 12):
        pieces = with_hidden(reference, max_tokens=max_tokens)
        torch.testing.assert_close(pieces.ref_hidden, batch.ref_hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pieces.ref_logprobs, batch.ref_logprobs, rtol=1e-5, atol=1e-5)
    whole = full_kl(policy, batch, reference)
    order = [3, 0, 4, 2, 1]
    by_row = torch.split(whole, list(batch.response_lengths))
    turned = full_kl(policy, batch.select(order), reference)
    torch.testing.assert_close(turned, torch.cat([by_row[row] for row in order]), rtol=1e-5, atol=5e-5)
    expected = gradient(policy, whole)
    weights = torch.split(torch.linspace(-1, 2, len(whole)), list(batch.response_lengths))
    policy.zero_grad()
    for row in order:
        (full_kl(policy, batch.select([row]), reference) * weights[row]).sum().backward()
    summed = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    assert_same_gradient(summed, expected)


def test_scores_and_log_probs_of_the_reference_are_of_one_pass() -> None:
    reference = made(tiny_model("qwen2"))
    scores = reference.scores(BATCH, Scoring(TEMPERATURE), want=("hidden",))
    assert scores.logprobs.equal(reference.logprobs(BATCH, Scoring(TEMPERATURE)))
    assert reference.scores(BATCH, Scoring(TEMPERATURE)).wanted == {}
    # The head gives the log-probs back from the hidden states.
    log_softmax = (reference.logits(scores.hidden) / TEMPERATURE).log_softmax(1)
    again = log_softmax.gather(1, BATCH.response_ids[:, None]).squeeze(1) * BATCH.trainable
    torch.testing.assert_close(again.detach(), scores.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("build", [lambda: tiny_model("qwen2"), lambda: lora(trained=True, target_modules=HEAD)])
def test_a_reference_that_was_moved_to_the_policy_does_not_diverge(build: Callable[[], PreTrainedModel]) -> None:
    policy = build()
    reference = made(policy, moves=True)
    train(policy)
    assert full_kl(policy, with_hidden(reference), reference).max() > 0.1
    reference.mix(policy, 1.0)
    assert full_kl(policy, with_hidden(reference), reference).abs().max() < 1e-5


def test_a_policy_that_is_scored_through_its_own_logits_has_a_divergence_but_cannot_be_the_reference() -> None:
    policy, given = tiny_model("llama"), tiny_model("llama", seed=1)
    plain = type(policy).forward

    def squared_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = output.logits.square() / 20
        return output

    policy.forward = squared_logits.__get__(policy)
    copied = copy.deepcopy(policy)
    reference = made(policy, given=given)
    with torch.no_grad():
        ref_logits = plain_logits(given, BATCH)
    divergence = full_kl(policy, with_hidden(reference), reference)
    expected = dense_kl(policy, ref_logits)
    torch.testing.assert_close(divergence, expected, rtol=1e-5, atol=5e-5)
    assert_same_gradient(gradient(policy, divergence), gradient(policy, expected))
    with pytest.raises(ConfigError, match="hidden states of LlamaForCausalLM cannot be used"):
        with_hidden(made(copied))


def test_an_idle_batch_has_a_divergence_of_zero_that_is_connected() -> None:
    policy = tiny_model("qwen2")
    reference = made(policy)
    idle = with_hidden(reference).replace(trainable=torch.zeros_like(BATCH.trainable))
    divergence = full_kl(policy, idle, reference)
    assert divergence.equal(torch.zeros(BATCH.num_tokens))
    assert torch.count_nonzero(gradient(policy, divergence)) == 0


@pytest.mark.parametrize("build", [lambda: tiny_model("qwen2"), lambda: lora(trained=True, target_modules=HEAD)])
def test_autocast_gives_the_divergence_up_to_its_rounding(build: Callable[[], PreTrainedModel]) -> None:
    policy = build()
    reference = made(policy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        batch = with_hidden(reference)
        itself = full_kl(policy, batch, reference)
    assert itself.abs().max() < 1e-3
    train(policy)
    exact = full_kl(policy, with_hidden(reference), reference)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        divergence = full_kl(policy, batch, reference)
    assert divergence.dtype == torch.float32
    assert (divergence - exact).norm() <= 0.05 * exact.norm()
    ours, theirs = gradient(policy, divergence), gradient(policy, full_kl(policy, with_hidden(reference), reference))
    assert (ours - theirs).norm() <= 0.15 * theirs.norm()
