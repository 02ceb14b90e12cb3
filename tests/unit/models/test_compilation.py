"""Compiled layers compute what the model does, for all lengths and layouts, and are compiled once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from prefrl import ConfigError
from prefrl.models import selfcheck
from prefrl.models.forward import token_logprobs, verdict_of
from prefrl.models.kernels import compile_layers
from prefrl.models.modes import checkpoint_activations
from prefrl.models.plans import ForwardPlan
from prefrl.types import TokenBatch
from tests.assets import ragged_batch, tiny_mixture, tiny_model


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_compiled() -> int:
    return int(counters["stats"]["unique_graphs"])


def pair(model: Any) -> tuple[nn.Module, nn.Module]:
    """A model, and itself compiled: traced, that is, since compilers are torch's matter."""
    compiled = copy.deepcopy(model)
    compile_layers(compiled, backend="eager", mode=None)
    return model.train(), compiled.train()


def scores(model: nn.Module, batch: TokenBatch, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of a weighted sum of them."""
    model.zero_grad()
    logprobs = token_logprobs(model, batch, plan=plan).logprobs
    (logprobs * torch.arange(1, len(logprobs) + 1)).sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def longer(batch: TokenBatch) -> TokenBatch:
    """Other prompts with the same responses."""
    lengths = tuple(3 * length for length in batch.prompt_lengths)
    return TokenBatch(
        prompt_ids=batch.prompt_ids.repeat(3),
        prompt_lengths=lengths,
        prompt_index=batch.prompt_index,
        response_ids=batch.response_ids,
        response_lengths=batch.response_lengths,
        trainable=batch.trainable,
        group_index=batch.group_index,
    )


def test_log_probs_and_gradients_are_those_of_the_model_in_all_plans() -> None:
    plain, compiled = pair(tiny_model())
    for plan in get_args(ForwardPlan):
        for ours, expected in zip(
            scores(compiled, ragged_batch(), plan), scores(plain, ragged_batch(), plan), strict=True
        ):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert num_compiled() > 0


@pytest.mark.parametrize("checkpoints", [False, True])
def test_what_is_compiled_serves_all_layers_lengths_and_flat_layouts(checkpoints: bool) -> None:
    _, compiled = pair(tiny_model(num_hidden_layers=3))
    if checkpoints:
        checkpoint_activations(compiled, {"use_reentrant": False})  # type: ignore[arg-type]
    scores(compiled, ragged_batch(), "shared_prefix")
    known = num_compiled()
    assert known > 0
    for batch in (ragged_batch(), longer(ragged_batch())):
        for plan in ("shared_prefix", "packed"):
            scores(compiled, batch, plan)
    assert num_compiled() == known


def test_the_layers_of_a_mixture_of_experts_are_compiled() -> None:
    plain, compiled = pair(tiny_mixture())
    for ours, expected in zip(
        scores(compiled, ragged_batch(), "packed"), scores(plain, ragged_batch(), "packed"), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert num_compiled() > 0


def test_neither_generation_nor_a_copy_is_compiled() -> None:
    _, compiled = pair(tiny_model())
    ids = torch.tensor([[5, 6, 7]])
    compiled.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    scores(copy.deepcopy(compiled), ragged_batch(), "packed")
    assert num_compiled() == 0


def test_the_self_check_finds_compiled_layers_that_compute_something_else() -> None:
    def wrong(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        return lambda *inputs: [
            1.01 * x if isinstance(x, Tensor) and x.is_floating_point() else x for x in graph(*inputs)
        ]

    model = tiny_model()
    compile_layers(model, backend=wrong, mode=None)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="torch_compile=True: when compiled, the outputs of Qwen2ForCausalLM change by"
    ):
        verdict_of(model)


def test_a_compiler_that_fails_is_named() -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    model = tiny_model()
    compile_layers(model, backend=failing, mode=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"layers of Qwen2ForCausalLM cannot be compiled here: .*no compiler"):
        verdict_of(model)


def test_a_model_without_known_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(model, "get_decoder", nn.Module)
    with pytest.raises(ConfigError, match="torch_compile=True: Qwen2ForCausalLM has no known layers"):
        compile_layers(model, backend="eager", mode=None)


def test_the_self_check_itself_is_not_changed_by_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, compiled = pair(tiny_model())
    monkeypatch.setattr(selfcheck, "_check_compiled", lambda *_: None)
    assert verdict_of(compiled).reasons == verdict_of(plain).reasons
    assert num_compiled() == 0
