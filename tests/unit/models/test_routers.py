"""The balancing loss of a mixture's routers is the model's own, for each sequence of a batch in any layout."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from prefrl.errors import ConfigError
from prefrl.models import routers
from prefrl.models.classifier import sequence_scores
from prefrl.models.forward import token_logprobs, verdict_of
from prefrl.models.modes import checkpoint_activations
from prefrl.models.plans import lay_out, part_of
from prefrl.models.routers import RouterRecord, router_loss_coef
from prefrl.types import TokenBatch
from tests.assets import EXPERTS, tiny_mixture, tiny_model, tiny_reward_model
from tests.unit.models.test_forward import PLANS, ragged_batch, square_logits

FAMILIES = {
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    # Only one of its layers has experts.
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
}


def history():
    """Two rows of two responses each, on a tree of prompts; one response has a single token."""
    generator = torch.Generator().manual_seed(3)
    prompt_lengths, response_lengths = (6, 4, 3), (3, 5, 1, 2)
    return TokenBatch(
        prompt_ids=torch.randint(2, 120, (sum(prompt_lengths),), generator=generator),
        prompt_lengths=prompt_lengths,
        prompt_parent=(-1, 0, 0),
        prompt_index=(0, 1, 0, 2),
        response_ids=torch.randint(2, 120, (sum(response_lengths),), generator=generator),
        response_lengths=response_lengths,
        response_row=(0, 0, 1, 1),
        trainable=torch.ones(sum(response_lengths), dtype=torch.bool),
        group_index=(0, 0),
    )


BATCHES = {"ragged": ragged_batch, "history": history}


def sequences(batch):
    """The [1, T] ids of each response after its context, without its last token."""
    prompts, responses = batch.prompt_ids.split(batch.prompt_lengths), batch.response_ids.split(batch.response_lengths)
    for i, response in enumerate(responses):
        yield torch.cat([*(prompts[prompt] for prompt in batch.contexts[i]), response[:-1]])[None]


def own_losses(model, batch):
    """[R] from transformers, one sequence at a time."""
    return torch.stack([model(input_ids=ids, output_router_logits=True).aux_loss for ids in sequences(batch)])


def losses_of(model, batch, plan="auto"):
    record = RouterRecord()
    token_logprobs(model, batch, plan=plan, routers=record)
    return record.losses


def gradient(model, losses):
    """[parameters] of a sum in which every sequence has its own weight."""
    model.zero_grad(set_to_none=True)
    (losses * torch.linspace(-1, 2, len(losses))).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_the_models_own(family, kind, plan):
    model, batch = tiny_model(family, **FAMILIES[family]), BATCHES[kind]()
    expected = own_losses(model, batch)
    expected_gradient = gradient(model, expected)
    found = losses_of(model, batch, plan)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient(model, found), expected_gradient)


def test_a_model_that_only_pads_has_it_too():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    model, batch = tiny_model("gpt_oss", layer_types=["full_attention", "sliding_attention"], **sizes), ragged_batch()
    torch.testing.assert_close(losses_of(model, batch), own_losses(model, batch))


def test_a_model_that_is_scored_through_its_own_logits_has_it_too():
    model, batch = tiny_mixture(), ragged_batch()
    square_logits(model)
    expected = own_losses(model, batch)
    torch.testing.assert_close(losses_of(model, batch), expected)
    assert verdict_of(model).own_logits


def test_a_classifier_has_it_too():
    model, batch = tiny_reward_model(architecture="qwen3_moe", **EXPERTS), ragged_batch()
    record = RouterRecord()
    sequence_scores(model, batch, routers=record)
    logits = [model.model(input_ids=ids, output_router_logits=True).router_logits for ids in sequences(batch)]
    expected = torch.stack([load_balancing_loss_func(found, 4, 2) for found in logits])
    torch.testing.assert_close(record.losses, expected)


def test_checkpoints_do_not_change_the_gradient():
    model, batch = tiny_mixture().train(), ragged_batch()
    expected = gradient(model, losses_of(model, batch))
    checkpoint_activations(model, {"use_reentrant": False})
    torch.testing.assert_close(gradient(model, losses_of(model, batch)), expected)


def test_an_adapter_learns_from_it():
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model, batch = peft.get_peft_model(tiny_mixture(), adapter), ragged_batch()
    expected = gradient(model, own_losses(model, batch))
    assert expected.norm() > 0
    torch.testing.assert_close(gradient(model, losses_of(model, batch)), expected)


def test_virtual_tokens_do_not_count():
    peft = pytest.importorskip("peft")
    adapter = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, batch = peft.get_peft_model(tiny_mixture(), adapter), ragged_batch()
    logits = [model(input_ids=ids, output_router_logits=True).router_logits for ids in sequences(batch)]
    expected = [load_balancing_loss_func(tuple(layer[3:] for layer in found), 4, 2) for found in logits]
    torch.testing.assert_close(losses_of(model, batch), torch.stack(expected))


@pytest.mark.parametrize("plan", ["shared_prefix", "packed"])
def test_processes_that_share_rows_add_up_their_parts(plan, monkeypatch):
    model, whole = tiny_mixture(), lay_out(ragged_batch(), plan)
    width, num_parts = whole.input_ids.size(1), 5
    parts = [part_of(whole, place, num_parts) for place in range(num_parts)]
    part_width = parts[0].input_ids.size(1)
    assert part_width * num_parts > width, "there is padding at the end"
    logits = torch.randn(part_width * num_parts, 4, generator=torch.Generator().manual_seed(0))
    sums: list[torch.Tensor] = []
    monkeypatch.setattr(routers, "sum_over_team", lambda part: sums.append(part) or sum(sums))
    for part in parts:
        record = RouterRecord()
        record.add(part, model, {"router_logits": [logits[part.start : part.start + part_width]]}, part_width)
    expected = RouterRecord()
    expected.add(whole, model, {"router_logits": [logits[:width]]}, width)
    torch.testing.assert_close(record.losses, expected.losses)


def test_logits_that_are_not_those_of_the_tokens_are_refused():
    model, inputs = tiny_mixture(), lay_out(ragged_batch(), "packed")
    width = inputs.input_ids.size(1)
    message = "the router logits of Qwen3MoeForCausalLM cannot be read.*Set router_aux_loss_coef=0.0"
    for output in ({}, {"router_logits": ()}, {"router_logits": [torch.zeros(2, width, 4)]}):
        with pytest.raises(ConfigError, match=message):
            RouterRecord().add(inputs, model, output, width)


def test_the_weight_is_the_configs_or_the_given_one():
    model = tiny_mixture(router_aux_loss_coef=0.02)
    assert router_loss_coef(model, None) == 0.02
    assert router_loss_coef(model, 0.5) == 0.5
    assert router_loss_coef(model, 0.0) == 0.0


def test_other_models_have_no_such_loss():
    dense = tiny_model()
    assert router_loss_coef(dense, None) == router_loss_coef(dense, 0.1) == 0.0
