"""Hidden states that are returned with log-probs are those of a plain forward pass of each row, for every plan."""

from __future__ import annotations

import pytest
import torch

from prefrl.errors import ConfigError
from prefrl.models.forward import token_logprobs
from tests.assets import ragged_batch, tiny_model
from tests.unit.models.test_forward import PLANS, square_logits

MODELS = {
    "llama": ("llama", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gemma3-window-softcap": ("gemma3_text", {"sliding_window": 8, "final_logit_softcapping": 5.0}),
}


def plain_hidden(model, batch):
    """[N, h] of the positions that predict the response tokens, 0 at tokens that are not trainable."""
    prompts = batch.prompt_ids.split(batch.prompt_lengths)
    rows = []
    for prompt, response in zip(batch.prompt_index, batch.response_ids.split(batch.response_lengths), strict=True):
        ids = torch.cat([prompts[prompt], response])[None]
        rows.append(model.base_model(input_ids=ids).last_hidden_state[0, -len(response) - 1 : -1])
    return torch.cat(rows) * batch.trainable[:, None]


def gradient(model, hidden):
    """[parameters] of a sum in which every number has its own weight; the head has no part in it."""
    model.zero_grad(set_to_none=True)
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


@pytest.mark.parametrize(("architecture", "overrides"), MODELS.values(), ids=MODELS.keys())
def test_hidden_states_and_their_gradient_are_equal_in_every_plan(architecture, overrides):
    model, batch = tiny_model(architecture, **overrides), ragged_batch()
    expected = plain_hidden(model, batch)
    expected_gradient = gradient(model, expected)
    for plan in PLANS:
        scores = token_logprobs(model, batch, plan=plan, want=("hidden",))
        assert scores.hidden.shape == (batch.num_tokens, 32)
        torch.testing.assert_close(scores.hidden, expected, rtol=1e-5, atol=1e-5)
        ours = gradient(model, scores.hidden)
        assert (ours - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
        assert torch.equal((scores.hidden == 0).all(1), ~batch.trainable)


def test_hidden_states_come_with_what_else_is_wanted_and_only_if_wanted():
    model, batch = tiny_model("llama"), ragged_batch()
    plain = token_logprobs(model, batch, want=("entropy",))
    scores = token_logprobs(model, batch, want=("entropy", "hidden"))
    assert "hidden" not in plain.wanted
    assert scores.logprobs.equal(plain.logprobs)
    assert scores.entropy.equal(plain.entropy)


def test_a_head_of_its_own_on_hidden_states_is_trained_beside_the_model():
    model, batch = tiny_model("qwen2"), ragged_batch()
    head = torch.nn.Linear(32, 1)
    scores = token_logprobs(model, batch, want=("hidden",))
    (head(scores.hidden).squeeze(1) * batch.trainable).sum().backward()
    expected = plain_hidden(model, batch).sum(0)
    torch.testing.assert_close(head.weight.grad[0], expected.detach(), rtol=1e-5, atol=1e-4)
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0


def test_no_trainable_token_gives_hidden_states_of_zero_that_are_connected():
    model, batch = tiny_model("llama"), ragged_batch()
    batch = batch.replace(trainable=torch.zeros_like(batch.trainable))
    hidden = token_logprobs(model, batch, want=("hidden",)).hidden
    assert torch.equal(hidden, torch.zeros(batch.num_tokens, 32))
    hidden.sum().backward()
    assert torch.count_nonzero(model.model.norm.weight.grad) == 0


def test_hidden_states_of_a_model_that_is_scored_through_its_own_logits_are_refused():
    model, batch = tiny_model("llama"), ragged_batch()
    square_logits(model)
    with pytest.raises(ConfigError, match=r"hidden states of LlamaForCausalLM cannot be used.*use another model"):
        token_logprobs(model, batch, want=("hidden",))
