"""Liger's kernels are in all of a model, in no other model, and change no numbers. A stand-in patches like Liger."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils.import_utils import is_liger_kernel_available

from prefrl import ConfigError, SFTConfig
from prefrl.models.forward import token_logprobs, verdict_of
from prefrl.models.kernels import apply_liger, liger_options, without_liger
from prefrl.models.scoring import prepare_for_scoring
from prefrl.models.selfcheck import check_plans
from prefrl.options import run
from prefrl.trainer import base_config
from tests.assets import ragged_batch, tiny_model, tiny_reward_model
from tests.contract.cases import ROOT, make_trainer, relative_difference, update_of

NO_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}
QWEN2: Any = sys.modules[type(tiny_model()).__module__]


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, and afterwards the code of the architecture as it was."""
    monkeypatch.syspath_prepend(ROOT / "tests/stand_ins")
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("apply_rotary_pos_emb", "Qwen2RMSNorm", "Qwen2MLP"):
        monkeypatch.setattr(QWEN2, name, getattr(QWEN2, name))
    is_liger_kernel_available.cache_clear()
    yield importlib.import_module("liger_kernel.transformers.monkey_patch")
    is_liger_kernel_available.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def patched(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module.forward.__module__.startswith("liger_kernel.")]


def logprobs(model: nn.Module, plan: Any = "auto") -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model, ragged_batch(), plan=plan).logprobs


def names_of_code() -> list[str]:
    return [name for name, value in vars(QWEN2).items() if "liger_kernel" in str(getattr(value, "__module__", ""))]


def test_options_are_the_users_without_the_losses() -> None:
    assert liger_options(None) == NO_LOSSES
    given = {"rope": False, "cross_entropy": False}
    assert liger_options(given) == {**NO_LOSSES, "rope": False}
    assert given == {"rope": False, "cross_entropy": False}
    assert liger_options(liger_options(given)) == liger_options(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fused_linear_cross_entropy": True}, "'fused_linear_cross_entropy' must be False.*replace the forward"),
        ({"cross_entropy": True}, "'cross_entropy' must be False"),
        ({"rope": "no"}, "'rope' must be True or False"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        liger_options(options)


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize("make", [tiny_model, tiny_reward_model])
def test_the_model_is_patched_and_no_other_is(make: Any) -> None:
    other, model = make(), make()
    apply_liger(model, liger_options(None))
    mlps_and_norms = {f"model.layers.{i}.{name}" for i in (0, 1) for name in ("mlp", "input_layernorm")}
    mlps_and_norms |= {f"model.layers.{i}.post_attention_layernorm" for i in (0, 1)} | {"model.norm"}
    assert set(patched(model)) == mlps_and_norms
    assert patched(other) == patched(make()) == []
    assert [type(module).__module__ for module in make().modules()] == [type(m).__module__ for m in other.modules()]
    assert names_of_code() == []


def test_liger_may_be_called_on_the_whole_process_between_two_calls(liger: Any) -> None:
    model, classes = tiny_model(), (QWEN2.Qwen2RMSNorm, QWEN2.Qwen2MLP)
    apply_liger(model, liger_options(None))
    rotary = QWEN2.apply_rotary_pos_emb
    liger._apply_liger_kernel_to_instance(model, **NO_LOSSES)
    assert QWEN2.Qwen2MLP is liger.LigerSwiGLUMLP
    apply_liger(model, liger_options(None))
    assert (QWEN2.Qwen2RMSNorm, QWEN2.Qwen2MLP) == classes
    assert rotary == QWEN2.apply_rotary_pos_emb


def test_the_rotary_function_is_ligers_for_all_but_the_cpu(liger: Any) -> None:
    model = tiny_model()
    apply_liger(model, liger_options(None))
    logprobs(model)
    assert liger.NUM_ROTATIONS == 0
    x = torch.empty(1, 4, 3, 8, device="meta")
    angles = torch.empty(1, 3, 8, device="meta")
    QWEN2.apply_rotary_pos_emb(x, x, angles, angles)
    with without_liger(model):
        QWEN2.apply_rotary_pos_emb(x, x, angles, angles)
    QWEN2.apply_rotary_pos_emb(x, x, angles, angles)
    assert liger.NUM_ROTATIONS == 2


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize("plan", ["shared_prefix", "packed", "padded"])
def test_log_probs_stay_and_no_plan_is_lost(plan: str) -> None:
    model = tiny_model()
    expected = logprobs(model, plan)
    apply_liger(model, liger_options(None))
    assert torch.allclose(logprobs(model, plan), expected, atol=1e-5)
    assert verdict_of(model).reasons == {}


@pytest.mark.usefixtures("liger")
def test_a_copy_has_the_kernels_with_weights_of_its_own() -> None:
    model = tiny_model()
    apply_liger(model, liger_options(None))
    expected, twin = logprobs(model), copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.mul_(0.5)
    assert patched(twin) == patched(model)
    assert prepare_for_scoring(twin).liger_options == NO_LOSSES
    assert torch.equal(logprobs(model), expected)
    assert not torch.allclose(logprobs(twin), expected, atol=1e-2)


@pytest.mark.usefixtures("liger")
def test_inside_without_liger_the_model_is_as_it_was() -> None:
    model = tiny_model()
    apply_liger(model, liger_options(None))
    before = patched(model)
    with without_liger(model):
        assert patched(model) == []
    assert patched(model) == before


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize("make", [tiny_model, tiny_reward_model])
def test_a_kernel_that_computes_something_else_is_found_at_the_first_use(make: Any) -> None:
    model = make(hidden_act="gelu")
    verdict_of(model)
    apply_liger(model, liger_options({"swiglu": False}))
    verdict_of(model)
    model = make(hidden_act="gelu")
    verdict_of(model)  # does not outlive the patch
    apply_liger(model, liger_options(None))
    with pytest.raises(ConfigError, match=r"hidden states of this Qwen2For.* change by a relative .*leave the kernel"):
        verdict_of(model)


def test_a_nan_is_no_agreement(liger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger.LigerRMSNorm, "forward", lambda self, hidden: hidden * torch.nan)
    liger.LigerRMSNorm.forward.__module__ = liger.__name__
    model = tiny_model()
    apply_liger(model, liger_options(None))
    with pytest.raises(ConfigError, match="change by a relative nan"):
        check_plans(model)


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        (
            "gpt2",
            None,
            r"has no effect: Liger has no kernels for model_type='gpt2' .*, only for gemma3_text, llama, qwen2\.",
        ),
        (
            "qwen2",
            {"geglu": True},
            "Liger has no 'geglu' for model_type='qwen2'. Choose from 'rope', 'rms_norm', 'swiglu'",
        ),
        ("qwen2", {"rope": False, "rms_norm": False, "swiglu": False}, "has no effect with .*turns off every kernel"),
        ("gemma3_text", None, "Liger fails on a Gemma3ForCausalLM: The model must be"),
        ("llama", None, "Liger fails on a LlamaForCausalLM: cannot import name 'LlamaOutput'"),
    ],
)
def test_a_model_that_cannot_have_them_is_refused(architecture: str, options: Any, message: str) -> None:
    model = tiny_model(architecture)
    with pytest.raises(ConfigError, match=message):
        apply_liger(model, liger_options(options))
    assert prepare_for_scoring(model).liger_options is None


@pytest.mark.usefixtures("liger")
def test_kernels_are_not_exchanged_for_others() -> None:
    model = tiny_model()
    apply_liger(model, liger_options(None))
    message = r"'rope': False.*Liger's kernels were already applied.*Load the model again"
    with pytest.raises(ConfigError, match=message):
        apply_liger(model, liger_options({"rope": False}))


# Trainers.


@pytest.fixture
def allowed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_lacks_gpu", lambda options: False)
    monkeypatch.setattr(base_config, "require", lambda *_, **__: None)


CASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"ref_model": lambda: tiny_model(seed=1)},
    "grpo": {"beta": 0.1},
    "ppo": {"critic": "model", "value_model": lambda: tiny_reward_model(seed=1)},
}


@pytest.mark.usefixtures("liger", "allowed_on_the_cpu")
@pytest.mark.parametrize("algorithm", CASES)
def test_every_model_of_a_trainer_has_the_kernels_and_the_update_is_that_without(
    algorithm: str, tmp_path: Path
) -> None:
    def trainer_of(**options: Any) -> Any:
        given = {name: make() if callable(make) else make for name, make in CASES[algorithm].items()}
        return make_trainer(algorithm, tmp_path, **given, **options)

    expected = update_of(trainer_of())
    trainer = trainer_of(use_liger_kernel=True)
    models = [trainer.policy]
    models += [] if trainer.reference is None else [trainer.reference._model]
    models += [trainer.critic.module] if algorithm == "ppo" else []
    counts = {"sft": [7], "dpo": [7, 7], "grpo": [7, 7], "ppo": [7 + 7, 7, 7]}  # the critic is inside the policy
    assert [len(patched(model)) for model in models] == counts[algorithm]
    assert relative_difference(update_of(trainer), expected) < 1e-4
    assert names_of_code() == []  # HuggingFace's loop has called Liger by then


@pytest.mark.usefixtures("liger")
def test_a_config_on_a_gpu_leaves_the_losses_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    config.use_liger_kernel, config.liger_kernel_config = True, '{"rope": false}'
    monkeypatch.setattr(SFTConfig, "device", torch.device("cuda"))
    config.validate()
    config.check_machine()
    assert config.liger_kernel_config == {**NO_LOSSES, "rope": False}
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ImportError, match=r"use_liger_kernel=True needs liger_kernel: pip install 'prefrl\[liger\]'"):
        config.check_machine()
