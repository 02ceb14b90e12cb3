"""Record and replay of the experts that routers choose, over families that the library does not name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefrl.errors import ConfigError
from prefrl.models.router_replay import ROUTES_KWARG, RouterReplay, Routes, unknown
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
    replay, record = proven(model), Routes()
    assert torch.equal(logprobs(model, ids, record), plain)
    own = record.recorded(replay.num_experts)
    assert own.shape == (20, len(replay.layers), 2)
    again = Routes(own)
    found = logprobs(model, ids, again)
    assert torch.equal(found, plain)
    assert again.counts.tolist() == [own[..., 0].numel(), 0]
    found.sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is None or torch.equal(parameter.grad, gradient)
    other = own.clone()
    other[7, -1] = (own[7, -1] + 3) % 8
    changed = Routes(other)
    found = logprobs(model, ids, changed)
    # Products of experts are summed in another order, since one of them has another token.
    torch.testing.assert_close(found[:, :7], plain[:, :7], atol=1e-5, rtol=0)
    assert (found[:, 7] - plain[:, 7]).abs().max() > 1e-3
    assert changed.counts.tolist() == [own[..., 0].numel(), 1]


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_a_proof_is_refused_with_the_reason(name: str) -> None:
    options, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"router_replay=True does not work for \w+: {reason}"):
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
    with pytest.raises(ConfigError, match=r"does not pass keyword arguments to the layer of model\.layers\.1\.mlp"):
        proven(model)


def test_unknown_routes_are_the_routers_own_choice() -> None:
    model, ids, record = family("mixtral"), text(), Routes()
    replay, plain = proven(model), logprobs(model, ids)
    logprobs(model, ids, record)
    given = (record.recorded(replay.num_experts) + 1) % 8
    given[:10] = unknown(given.dtype)
    routes = Routes(given)
    found = logprobs(model, ids, routes)
    torch.testing.assert_close(found[:, :10], plain[:, :10], atol=1e-5, rtol=0)
    assert (found[:, 10] - plain[:, 10]).abs().max() > 1e-3
    assert routes.counts[0] == 10 * 2


def test_the_layers_of_routers_are_numbered_as_the_model_does() -> None:
    assert proven(family("deepseek_v3")).layers == (1,)
    assert proven(family("mixtral")).layers == (0, 1)


def test_a_copy_of_a_prepared_model_replays_with_its_own_weights() -> None:
    model, ids, record = family("qwen3_moe"), text(), Routes()
    replay = proven(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.gate.weight.neg_()
    plain = logprobs(other, ids)
    logprobs(other, ids, record)
    assert torch.equal(logprobs(other, ids, Routes(record.recorded(replay.num_experts))), plain)
    assert not torch.equal(plain, logprobs(model, ids))


def test_the_gradient_of_a_router_is_that_of_fixed_experts() -> None:
    model, ids = family("qwen3_moe").double(), text()
    model.config._experts_implementation = "eager"  # the only one for float64
    replay, record = proven(model), Routes()
    logprobs(model, ids, record)
    given = (record.recorded(replay.num_experts) + 1) % 8
    weight = model.model.layers[0].mlp.gate.weight

    def objective() -> Tensor:
        return logprobs(model, ids, Routes(given))[..., 3].sum()

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
