"""Products in 8 bits: where, how exact, and that the layout does not matter. Emulated, on the CPU."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torchao.float8.float8_linear import Float8Linear

from prefrl import ConfigError
from prefrl.models.forward import token_logprobs, verdict_of
from prefrl.models.kernels import compute_in_fp8
from prefrl.models.plans import ForwardPlan
from tests.assets import ragged_batch, tiny_model


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def scores(model: nn.Module, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of their sum."""
    model.zero_grad()
    logprobs = token_logprobs(model, ragged_batch(), plan=plan).logprobs
    logprobs.sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


def test_the_linear_modules_of_layers_are_converted_and_keep_their_weights() -> None:
    model = tiny_model()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    compute_in_fp8(model, emulate=True)
    assert len(converted(model)) == 2 * 7
    assert all(".layers." in name for name in converted(model))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


def test_a_copy_of_a_converted_model_stays_as_it_is() -> None:
    model = tiny_model()
    compute_in_fp8(model, emulate=True)
    copied = copy.deepcopy(model)
    compute_in_fp8(copied, emulate=True)
    assert converted(copied) == converted(model)
    for ours, expected in zip(scores(copied, "packed"), scores(model, "packed"), strict=True):
        assert torch.equal(ours, expected)


def test_adapters_are_left_out() -> None:
    model = get_peft_model(tiny_model(), LoraConfig(r=16, target_modules=["q_proj", "up_proj"]))
    compute_in_fp8(model, emulate=True)
    assert len(converted(model)) == 2 * 7
    assert not [name for name in converted(model) if "lora_" in name]


def test_log_probs_are_near_and_do_not_depend_on_the_layout() -> None:
    exact, rounded = tiny_model().train(), tiny_model().train()
    compute_in_fp8(rounded, emulate=True)
    assert not verdict_of(rounded).reasons
    found = {plan: scores(rounded, plan) for plan in get_args(ForwardPlan)}
    for i in range(2):
        expected = scores(exact, "packed")[i]
        assert 0.005 < error(found["packed"][i], expected) < 0.3
        assert error(found["padded"][i], found["packed"][i]) < 1e-5
    shared, packed = found["shared_prefix"], found["packed"]
    assert error(shared[0], packed[0]) < 1e-5
    # The gradients of a shared prompt are added before they are rounded.
    assert error(shared[1], packed[1]) < 0.5 * error(packed[1], scores(exact, "packed")[1])


def test_the_self_check_runs_without_the_error_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any) -> Tensor:
        raise AssertionError("computes in 8 bits")

    model = tiny_model()
    compute_in_fp8(model, emulate=True)
    monkeypatch.setattr(Float8Linear, "forward", forward)
    verdict = verdict_of(model)
    assert not verdict.reasons
    assert not verdict.own_logits
    assert len(converted(model)) == 2 * 7


def test_layers_without_fitting_modules_are_refused() -> None:
    with pytest.raises(ConfigError, match="fp8=True: the layers of GPT2LMHeadModel have no linear modules"):
        compute_in_fp8(tiny_model("gpt2"), emulate=True)
