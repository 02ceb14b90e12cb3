"""Record and replay of the experts that routers choose, over families that the library does not name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefrl.data.collate import batch_of, flat_batch, parts_of_batch
from prefrl.errors import ConfigError
from prefrl.models.forward import token_logprobs
from prefrl.models.modes import checkpoint_activations
from prefrl.models.plans import ForwardPlan, lay_out, part_of
from prefrl.models.router_replay import ROUTES_KWARG, RouterReplay, Routes, unknown
from prefrl.models.routers import RouterRecord
from prefrl.models.scoring import prepare_for_scoring
from prefrl.types import IdleBatch, TokenBatch
from tests.assets import tiny_mixture, tiny_model

_OF_8 = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "topk_group": 1, "moe_intermediate_size": 16}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
# Families, and by the second name what of their routers is special.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _OF_8,
    "qwen2_moe": {**_OF_8, "shared_expert_intermediate_size": 16},
    "mixtral": _LOCAL,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": _LOCAL,
    # Two groups of experts, of which a first choice takes one; the first layer is dense.
    "deepseek_v3": {**_GROUPS, **_LATENT, "n_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "glm4_moe": {**_GROUPS, "n_group": 1, "first_k_dense_replace": 0},
    "granitemoe": _LOCAL,
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "qwen2": ({}, "no module of it chooses experts"),
    "phimoe": (_LOCAL, "no module of it chooses experts"),  # takes a maximum twice
}


def family(name: str, **more: Any) -> PreTrainedModel:
    return tiny_model(name, vocab_size=64, **FAMILIES[name], **more)


def proven(model: PreTrainedModel) -> RouterReplay:
    replay = RouterReplay()
    replay.prove(model)
    return replay


def text(count: int = 20) -> Tensor:
    return torch.randint(64, (1, count), generator=torch.Generator().manual_seed(5))


def logprobs(model: nn.Module, ids: Tensor, routes: Routes | None = None) -> Tensor:
    keywords = {} if routes is None else {ROUTES_KWARG: routes}
    found: Tensor = model(input_ids=ids, use_cache=False, **keywords).logits.log_softmax(-1)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_own_record_changes_no_bit_and_another_one_is_obeyed(name: str) -> None:
    model, ids = family(name), text()
    plain = logprobs(model, ids)
    plain.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    replay = proven(model)
    record = Routes(replay)
    assert torch.equal(logprobs(model, ids, record), plain)
    own = record.recorded()
    assert own.shape == (20, len(replay.layers), 2)
    again = Routes(replay, own)
    found = logprobs(model, ids, again)
    assert torch.equal(found, plain)
    assert again.counts.tolist() == [own[..., 0].numel(), 0]
    found.sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is None or torch.equal(parameter.grad, gradient)
    other = own.clone()
    other[7, -1] = (own[7, -1] + 3) % 8
    changed = Routes(replay, other)
    found = logprobs(model, ids, changed)
    # Products of experts are summed in another order, since one of them has another token.
    torch.testing.assert_close(found[:, :7], plain[:, :7], atol=1e-5, rtol=0)
    assert (found[:, 7] - plain[:, 7]).abs().max() > 1e-3
    assert changed.counts.tolist() == [own[..., 0].numel(), 1]


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_a_proof_is_refused_with_the_reason(name: str) -> None:
    options, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"router_replay does not work for \w+: {reason}"):
        proven(tiny_model(name, vocab_size=64, **options))


class Deaf(nn.Module):
    """A router that asks `torch.topk`, and then does as it likes."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, states: Tensor) -> Any:
        logits = nn.functional.linear(states.flatten(0, -2), self.router.weight)
        torch.topk(logits, 2, dim=-1)
        best = logits.argsort(-1, descending=True)[:, :2]
        return logits, logits.gather(-1, best).softmax(-1), best


class Restless(Deaf):
    """A router that asks twice, and mixes both answers."""

    def forward(self, states: Tensor) -> Any:
        logits = nn.functional.linear(states.flatten(0, -2), self.router.weight)
        best = torch.topk(logits, 2, dim=-1)
        weights = best.values.softmax(-1) + torch.rand(())
        return logits, weights, best.indices


@pytest.mark.parametrize(("kind", "reason"), [(Deaf, "do not change"), (Restless, "are others than without")])
def test_a_router_that_does_not_obey_or_repeat_is_found_by_trial(kind: type[Deaf], reason: str) -> None:
    model = tiny_mixture()
    for layer in model.model.layers:
        layer.mlp.gate = kind(layer.mlp.gate)
    with pytest.raises(ConfigError, match=reason):
        proven(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_without_the_keyword_argument_are_found_by_trial() -> None:
    model = tiny_mixture()
    model.model.layers[1].register_forward_pre_hook(
        lambda module, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != ROUTES_KWARG}),
        with_kwargs=True,
        prepend=True,
    )
    with pytest.raises(ConfigError, match=r"no module of the layer with model\.layers\.1\.mlp\.gate is passed"):
        proven(model)


def test_unknown_routes_are_the_routers_own_choice() -> None:
    model, ids = family("mixtral"), text()
    replay, plain = proven(model), logprobs(model, ids)
    record = Routes(replay)
    logprobs(model, ids, record)
    given = (record.recorded() + 1) % 8
    given[:10] = unknown(given.dtype)
    routes = Routes(replay, given)
    found = logprobs(model, ids, routes)
    torch.testing.assert_close(found[:, :10], plain[:, :10], atol=1e-5, rtol=0)
    assert (found[:, 10] - plain[:, 10]).abs().max() > 1e-3
    assert routes.counts[0] == 10 * 2


def test_the_layers_of_routers_are_numbered_as_the_model_does() -> None:
    assert proven(family("deepseek_v3")).layers == (1,)
    assert proven(family("mixtral")).layers == (0, 1)


def test_a_copy_of_a_prepared_model_chooses_itself_until_it_is_prepared() -> None:
    model, ids = family("qwen3_moe"), text()
    original = proven(model)
    given = torch.zeros(20, 2, 2, dtype=torch.uint8)
    given[..., 1] = 1
    other = copy.deepcopy(model)
    plain = logprobs(model, ids)
    assert not torch.equal(logprobs(model, ids, Routes(original, given)), plain)
    assert torch.equal(logprobs(other, ids, Routes(original, given)), plain)
    replay = proven(other)
    with torch.no_grad():
        other.model.layers[0].mlp.gate.weight.neg_()
    record, plain = Routes(replay), logprobs(other, ids)
    logprobs(other, ids, record)
    assert torch.equal(logprobs(other, ids, Routes(replay, record.recorded())), plain)
    assert not torch.equal(plain, logprobs(model, ids))
    assert torch.equal(logprobs(model, ids, Routes(replay, record.recorded())), logprobs(model, ids))


def test_the_gradient_of_a_router_is_that_of_fixed_experts() -> None:
    model, ids = family("qwen3_moe").double(), text()
    model.config._experts_implementation = "eager"  # the only one for float64
    replay = proven(model)
    record = Routes(replay)
    logprobs(model, ids, record)
    given = (record.recorded() + 1) % 8
    weight = model.model.layers[0].mlp.gate.weight

    def objective() -> Tensor:
        return logprobs(model, ids, Routes(replay, given))[..., 3].sum()

    objective().backward()
    assert weight.grad.norm() > 1e-3
    direction, step = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).double(), 1e-3
    with torch.no_grad():
        weight += step * direction
        above = objective()
        weight -= 2 * step * direction
        below = objective()
    expected = float((above - below) / (2 * step))
    # The router computes its softmax in float32.
    assert float((weight.grad * direction).sum()) == pytest.approx(expected, rel=1e-2)


# Routes in batches.

PLANS: tuple[ForwardPlan, ...] = ("shared_prefix", "packed", "padded")


def forest() -> TokenBatch:
    """An episode of two responses after a chain of prompts, and rows of other groups, two with the same prompt."""
    prompts = [[3, 4, 5], [3, 4, 5, 6, 7, 8, 9] * 3, [10, 11], [10, 11]]
    responses = [[20, 21, 22, 23], [24], [25, 26, 27], [28, 29, 30, 31, 32]]
    return flat_batch(prompts, responses, groups=[0, 1, 1], rows=[0, 0, 1, 2])


def with_numbered_routes(batch: TokenBatch) -> TokenBatch:
    """Each token has its own id as the only expert of the only layer."""
    return batch.replace(
        prompt_routes=batch.prompt_ids.to(torch.uint8)[:, None, None],
        response_routes=batch.response_ids.to(torch.uint8)[:, None, None],
    )


@pytest.mark.parametrize("plan", PLANS)
def test_routes_stay_with_their_tokens_in_every_batch_and_plan(plan: ForwardPlan) -> None:
    whole = with_numbered_routes(forest())
    batches = [whole, *whole.split(20), whole.select([2, 0]), TokenBatch.concat([whole.select([1]), whole])]
    batches.append(batch_of(TokenBatch, *reversed(parts_of_batch(whole, "a.")), "a."))  # type: ignore[arg-type]
    for batch in batches:
        inputs = lay_out(batch, plan)
        assert inputs.routes is not None
        is_token = inputs.routes[:, 0, 0] != unknown(torch.uint8)
        assert torch.equal(inputs.routes[is_token, 0, 0].long(), inputs.input_ids.flatten()[is_token])
        num_padding = 0 if plan != "padded" else int((inputs.attention_mask == 0).sum())
        assert (~is_token).sum() == num_padding


def test_processes_that_share_a_row_have_the_routes_of_their_parts() -> None:
    inputs = lay_out(with_numbered_routes(forest()), "packed")
    parts = [part_of(inputs, place, 3) for place in range(3)]
    routes = torch.cat([part.routes for part in parts])[:, 0, 0].long()
    ids = torch.cat([part.input_ids[0] for part in parts])
    num_tokens = inputs.input_ids.size(1)
    assert torch.equal(routes[:num_tokens], ids[:num_tokens])
    assert (routes[num_tokens:] == unknown(torch.uint8)).all()


def test_rows_without_routes_get_unknown_ones_beside_others() -> None:
    batch = TokenBatch.concat([TokenBatch.of(IdleBatch.of_token(5)), with_numbered_routes(forest())])
    assert batch.prompt_routes is not None
    assert batch.response_routes is not None
    assert batch.prompt_routes[:2].flatten().tolist() == [unknown(torch.uint8), 3]
    assert batch.response_routes[:2].flatten().tolist() == [unknown(torch.uint8), 20]


def scored(model: PreTrainedModel, batch: TokenBatch, plan: ForwardPlan) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    logprobs = token_logprobs(model, batch, plan=plan).logprobs
    logprobs.square().sum().backward()
    return logprobs.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_given_experts_give_the_same_numbers_in_every_plan_and_when_they_are_recomputed(
    plan: ForwardPlan, use_reentrant: bool | None
) -> None:
    model, batch = family("mixtral"), forest()
    state = prepare_for_scoring(model)
    plain, _ = scored(model, batch, "padded")
    state.replay = proven(model)
    generator = torch.Generator().manual_seed(2)
    routes = [
        torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(2 * count)]).view(count, 2, 2)
        for count in (len(batch.prompt_ids), batch.num_tokens)
    ]
    given = batch.replace(prompt_routes=routes[0].to(torch.uint8), response_routes=routes[1].to(torch.uint8))
    expected, gradients = scored(model, given, "padded")
    assert (expected - plain).abs().max() > 0.05
    assert model.model.layers[0].mlp.gate.weight.grad.norm() > 1e-3
    if use_reentrant is not None:
        checkpoint_activations(model, {"use_reentrant": use_reentrant})
        model.train()
    state.replay.counts = []
    found, others = scored(model, given, plan)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    for other, gradient in zip(others, gradients, strict=True):
        torch.testing.assert_close(other, gradient, atol=2e-4, rtol=1e-4)
    # Each token is counted once for each router and sequence that runs it, also if its layer is recomputed.
    (counts,) = state.replay.counts
    num_run = int((lay_out(given, plan).input_ids != 0).sum())
    assert counts[0] == 2 * num_run
    assert 0 < counts[1] < counts[0]


def test_a_model_that_is_not_asked_to_replay_chooses_itself() -> None:
    model, batch = family("mixtral"), forest()
    plain, _ = scored(model, batch, "packed")
    found, _ = scored(model, with_numbered_routes(batch), "packed")
    assert torch.equal(found, plain)


def test_the_balancing_loss_counts_the_experts_that_ran() -> None:
    model, ids = family("mixtral"), [3, 4, 5, 6, 7]
    state = prepare_for_scoring(model)
    state.replay = replay = proven(model)
    batch = flat_batch([ids[:2]], [ids[2:]])
    experts = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1], [7, 6]])[:, None].expand(-1, 2, -1).to(torch.uint8)
    batch = batch.replace(prompt_routes=experts[:2].contiguous(), response_routes=experts[2:].contiguous())
    record = RouterRecord()
    token_logprobs(model, batch, plan="packed", routers=record)
    keywords = {ROUTES_KWARG: Routes(replay, experts[:4])}
    output = model(input_ids=torch.tensor([ids[:4]]), output_router_logits=True, use_cache=False, **keywords)
    probabilities = torch.stack([logits.softmax(-1) for logits in output.router_logits]).mean((0, 1))
    fractions = torch.tensor([4, 2, 1, 1, 0, 0, 0, 0]) / 4
    assert float(record.losses[0]) == pytest.approx(float(8 * (fractions * probabilities).sum()), rel=1e-5)


@pytest.mark.parametrize("plan", PLANS)
def test_what_a_pass_chose_is_recorded_for_each_token_however_the_batch_is_cut(plan: ForwardPlan) -> None:
    model, batch = family("mixtral"), forest()
    state = prepare_for_scoring(model)
    state.replay = replay = proven(model)
    expected = {}  # by response: the experts of each of its tokens, and of those before it
    for text in batch.texts:
        record = Routes(replay)
        logprobs(model, text[None, :-1], record)
        expected[tuple(text.tolist())] = record.recorded()
    with replay.recording(batch) as record, torch.no_grad():
        for piece in reversed(record.batch.split(20)):
            token_logprobs(model, piece, plan=plan)
    prompts, responses = record.routes(replay)
    given = batch.replace(prompt_routes=prompts, response_routes=responses)
    for number, text in enumerate(batch.texts):
        of_prompts = torch.split(prompts, list(batch.prompt_lengths))
        own = torch.split(responses, list(batch.response_lengths))[number]
        whole = torch.cat([*(of_prompts[prompt] for prompt in batch.contexts[number]), own])
        assert torch.equal(whole[:-1], expected[tuple(text.tolist())])
        assert (whole[-1] == unknown(whole.dtype)).all()
    # Passes that follow replay what was recorded, and record nothing.
    state.replay.counts = []
    token_logprobs(model, given, plan=plan)
    assert state.replay.counts[0][1] == 0
