"""Liger's kernels on a CUDA device give the numbers of the model without them, for every plan and trainer."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prefrl.errors import ConfigError
from prefrl.models.forward import token_logprobs, verdict_of
from prefrl.models.kernels import OffloadActivations, apply_liger, liger_options
from prefrl.models.modes import checkpoint_activations
from prefrl.registry import REGISTRY
from tests.assets import ragged_batch, tiny_model, tiny_reward_model
from tests.contract.cases import make_trainer, model_of, relative_difference, stopping_model, train_inside, update_of
from tests.contract.test_gpu import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
PLANS = ("padded", "packed", "shared_prefix")
# Relative error by norm; what a model of two layers loses in that dtype, several times over.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.02}


@pytest.fixture(autouse=True)
def rotary_functions_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other models in this process have that of Liger otherwise."""
    for architecture in ARCHITECTURES:
        code = sys.modules[type(tiny_model(architecture)).__module__]
        monkeypatch.setattr(code, "apply_rotary_pos_emb", code.apply_rotary_pos_emb)  # type: ignore[attr-defined]


@pytest.fixture
def warnings_of_prefrl(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Messages, which are there at the end."""
    messages: list[str] = []
    with caplog.at_level(logging.WARNING):
        yield messages
    messages += [record.getMessage() for record in caplog.records if record.name.startswith("prefrl")]


def scores(model: nn.Module, plan: Any, around: Any = nullcontext) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of a sum of them with weights that differ."""
    batch = ragged_batch().to(model.device)
    verdict_of(model)
    model.zero_grad(set_to_none=True)
    with around():
        logprobs = token_logprobs(model, batch, plan=plan).logprobs
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=logprobs.device)).sum().backward()
    gradient = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return logprobs.detach().float(), torch.cat(gradient)


def errors(found: Any, truth: Any) -> list[float]:
    return [relative_difference(a, b) for a, b in zip(found, truth, strict=True)]


def is_ligers(forward: Any) -> bool:
    return str(forward.__module__).startswith("liger_kernel.")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_norm_and_every_mlp_gets_its_kernel_and_nothing_else_does(architecture: str) -> None:
    model = tiny_model(architecture)
    apply_liger(model, liger_options(None))
    expected = {name for name, module in model.named_modules() if type(module).__name__.endswith(("RMSNorm", "MLP"))}
    assert {name for name, module in model.named_modules() if is_ligers(module.forward)} == expected
    assert len(expected) == 1 + 2 * (5 if architecture == "qwen3" else 3)
    code: Any = sys.modules[type(model).__module__]
    assert is_ligers(code.apply_rotary_pos_emb.fused)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_and_gradients_are_those_without_it(
    architecture: str, dtype: torch.dtype, plan: str, warnings_of_prefrl: list[str]
) -> None:
    model = tiny_model(architecture, head_dim=16).to(DEVICE)
    truth = scores(copy.deepcopy(model), plan)
    plain = errors(scores(copy.deepcopy(model).to(dtype), plan), truth)
    model = model.to(dtype)
    apply_liger(model, liger_options(None))
    found = errors(scores(model, plan), truth)
    assert verdict_of(model).reasons == {}
    assert warnings_of_prefrl == []
    for error, without in zip(found, plain, strict=True):
        assert error < 2 * without + TOLERANCES[dtype]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("moves", [False, True], ids=["checkpointed", "offloaded"])
def test_gradients_survive_what_is_computed_again_or_moved(moves: bool, autocast: bool) -> None:
    """Liger writes gradients over activations that were saved."""

    def around() -> Any:
        return OffloadActivations(DEVICE, smallest_bytes=0) if moves else nullcontext()

    model = tiny_model("qwen3", head_dim=16).to(DEVICE).train()
    apply_liger(model, liger_options(None))
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        expected = scores(model, "shared_prefix")
        if not moves:
            checkpoint_activations(model, {"use_reentrant": False})
        found = scores(model, "shared_prefix", around)
    assert errors(found, expected) == [0.0, pytest.approx(0.0, abs=1e-6)]


def test_a_kernel_that_is_wrong_for_the_model_is_refused() -> None:
    model = tiny_model("llama", hidden_act="gelu", head_dim=16).to(DEVICE)
    apply_liger(model, liger_options({"swiglu": False}))
    assert verdict_of(model).reasons == {}
    model = tiny_model("llama", hidden_act="gelu", head_dim=16).to(DEVICE)
    apply_liger(model, liger_options(None))
    with pytest.raises(ConfigError, match="hidden states of this LlamaForCausalLM change"):
        verdict_of(model)


# With what it is compared or trained beside it.
CASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "reward": {},
    "dpo": {"ref_model": lambda: tiny_model(seed=1)},
    "grpo": {"beta": 0.1},
    "ppo": {"critic": "model", "value_model": lambda: tiny_reward_model(seed=1)},
}


@pytest.mark.parametrize("algorithm", CASES)
def test_the_update_is_that_without_it(algorithm: str, tmp_path: Path) -> None:
    def update(folder: str, **options: Any) -> torch.Tensor:
        given = {name: make() if callable(make) else make for name, make in CASES[algorithm].items()}
        precision = {"use_cpu": False, "bf16": False, "tf32": False}
        model = model_of(algorithm, head_dim=16)
        return update_of(make_trainer(algorithm, tmp_path / folder, model=model, **precision, **given, **options))

    expected = update("without")
    assert relative_difference(update("with", use_liger_kernel=True), expected) < 1e-3


def test_a_model_with_an_adapter_is_trained_and_its_reference_has_the_same_kernels(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def update(folder: str, **options: Any) -> torch.Tensor:
        lora = peft.LoraConfig(target_modules=["q_proj", "down_proj"], modules_to_save=["norm"])
        trainer = make_trainer(
            "dpo", tmp_path / folder, use_cpu=False, bf16=False, tf32=False, peft_config=lora, **options
        )
        return update_of(trainer)

    expected = update("without")
    assert relative_difference(update("with", use_liger_kernel=True), expected) < 1e-3


@pytest.mark.parametrize("algorithm", REGISTRY)
def test_a_step_does_not_wait_for_the_device(algorithm: str, tmp_path: Path) -> None:
    trainer = make_trainer(algorithm, tmp_path, use_cpu=False, max_steps=3, bf16=True, use_liger_kernel=True)
    verdict_of(trainer.policy)
    assert train_inside(trainer, no_waiting) == 3


def test_sampling_draws_the_same_tokens(tmp_path: Path) -> None:
    def completions(folder: str, **options: Any) -> list[list[int]]:
        model = stopping_model(head_dim=16)
        trainer: Any = make_trainer("grpo", tmp_path / folder, model=model, use_cpu=False, bf16=False, **options)
        groups = trainer.generator.generate([[5, 6, 7], [8, 9]], trainer.args.sampling_params(), seeds=[1, 2])
        return [completion.token_ids for group in groups for completion in group]

    assert completions("without") == completions("with", use_liger_kernel=True)
