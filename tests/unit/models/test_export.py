from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from prefrl.errors import ConfigError
from prefrl.generation.base import WeightSource
from prefrl.models.adapters import lora_config
from prefrl.models.export import PolicyWeights
from prefrl.models.load import load_model
from tests.assets import tiny_model

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

QV = ["q_proj", "v_proj"]
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def saved(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def check_equal(found: Iterable[tuple[str, Tensor]], expected: dict[str, Tensor]) -> None:
    pairs = list(found)
    names = [name for name, _ in pairs]
    assert sorted(names) == sorted(expected)
    for name, tensor in pairs:
        assert tensor.dtype == expected[name].dtype
        assert tensor.equal(expected[name]), name
        assert not tensor.requires_grad


def adapted(model: PreTrainedModel, options: dict[str, Any], seed: int = 1) -> PreTrainedModel:
    """With an adapter whose every parameter has moved, as after training."""
    with warnings.catch_warnings():  # of tied weights
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        model = load_model(model, peft_config=lora_config(**({"target_modules": QV, "r": 4} | options)), seed=0)
    move(model, seed)
    return model


def move(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 25)[None]).logits


def loaded(weights: Iterable[tuple[str, Tensor]], like: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A model read from a checkpoint with these weights."""
    like.save_pretrained(folder, state_dict=dict(weights), save_original_format=False)
    return AutoModelForCausalLM.from_pretrained(folder)


PLAIN = [
    pytest.param("qwen2", TIED, 26, id="qwen2 tied"),
    pytest.param("qwen2", UNTIED, 27, id="qwen2 untied"),
    pytest.param("gpt2", {}, 28, id="gpt2"),
    pytest.param("llama", UNTIED, 21, id="llama"),
    pytest.param("qwen3_moe", EXPERTS, 45, id="qwen3_moe"),
    pytest.param("mixtral", {"num_local_experts": 4}, 41, id="mixtral"),
]


@pytest.mark.parametrize(("architecture", "options", "count"), PLAIN)
def test_names_and_values_are_those_of_the_checkpoint(
    architecture: str, options: dict[str, Any], count: int, tmp_path: Path
) -> None:
    model = tiny_model(architecture, **options)
    weights = PolicyWeights(model)
    check_equal(weights, saved(model, tmp_path))
    check_equal(weights.base(), saved(model, tmp_path))
    assert len(list(weights)) == count
    assert not weights.has_adapter


@pytest.mark.parametrize(("architecture", "options", "count"), PLAIN)
def test_a_model_from_a_checkpoint_keeps_its_names(
    architecture: str, options: dict[str, Any], count: int, tmp_path: Path
) -> None:
    expected = saved(tiny_model(architecture, **options), tmp_path)
    check_equal(PolicyWeights(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_what_no_checkpoint_has_is_left_out(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.model.register_buffer("kept", torch.ones(2))
    model.model.register_buffer("dropped", torch.ones(2), persistent=False)
    model.model.register_buffer("ignored", torch.ones(2))
    model._keys_to_ignore_on_save = {"model.ignored"}
    names = [name for name, _ in PolicyWeights(model)]
    assert sorted(names) == sorted(saved(model, tmp_path))
    assert [name for name in names if name.endswith(("kept", "dropped", "ignored"))] == ["model.kept"]


def test_layers_come_one_after_the_other() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=12, **EXPERTS, **UNTIED)
    names = [name for name, _ in PolicyWeights(model)]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert set(layers) == set(range(12))
    assert names[0] == "model.embed_tokens.weight"
    assert set(names[-2:]) == {"model.norm.weight", "lm_head.weight"}


def test_a_dense_model_is_not_copied() -> None:
    model = tiny_model("llama", **UNTIED)
    parameters = dict(model.named_parameters())
    assert all(tensor.data_ptr() == parameters[name].data_ptr() for name, tensor in PolicyWeights(model))


@pytest.mark.parametrize(
    ("model", "options"), [("llama", {"target_modules": "all-linear"}), ("qwen3_moe", {"target_modules": QV})]
)
def test_a_layer_is_let_go_of_when_the_next_one_is_made(model: str, options: dict[str, Any]) -> None:
    policy = adapted(tiny_model(model, num_hidden_layers=4, **(EXPERTS if model == "qwen3_moe" else {})), options)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    copies: dict[str, list[Any]] = {}
    for name, tensor in PolicyWeights(policy):
        layer = name.split(".")[2] if ".layers." in name else ""
        if tensor.untyped_storage().data_ptr() not in parameters:
            copies.setdefault(layer, []).append(StorageWeakRef(tensor.untyped_storage()))
        del tensor
        alive = {layer for layer, tensors in copies.items() if not all(t.expired() for t in tensors)}
        assert alive <= {layer}
    assert {"0", "1", "2", "3"} <= copies.keys()


MERGED = [
    pytest.param("llama", {}, {}, id="lora"),
    pytest.param("llama", {}, {"target_modules": "all-linear"}, id="all-linear"),
    pytest.param("llama", {}, {"use_rslora": True}, id="rslora"),
    pytest.param("llama", {}, {"use_dora": True}, id="dora"),
    pytest.param("gpt2", {}, {"target_modules": ["c_attn"], "fan_in_fan_out": True}, id="conv1d"),
    pytest.param("qwen2", {}, {"bias": "lora_only"}, id="bias"),
    pytest.param("llama", UNTIED, {"target_modules": ["embed_tokens"]}, id="embeddings"),
    pytest.param("llama", UNTIED, {"target_modules": ["embed_tokens"], "use_dora": True}, id="embeddings with dora"),
    pytest.param("llama", UNTIED, {"target_modules": ["lm_head"]}, id="head"),
    pytest.param("llama", UNTIED, {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}, id="modules_to_save"),
    pytest.param(
        "qwen2", TIED, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, id="tied modules_to_save"
    ),
    pytest.param("llama", UNTIED, {"trainable_token_indices": [3, 5]}, id="tokens"),
    pytest.param("llama", TIED, {"trainable_token_indices": [3, 5]}, id="tied tokens"),
    pytest.param(
        "qwen3_moe",
        EXPERTS,
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        id="parameters of experts",
    ),
]


@pytest.mark.parametrize(("architecture", "model_options", "options"), MERGED)
def test_adapters_are_merged_as_peft_merges_them(
    architecture: str, model_options: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    policy = adapted(tiny_model(architecture, **model_options), options)
    expected = saved(copy.deepcopy(policy).merge_and_unload(), tmp_path)
    check_equal(PolicyWeights(policy), expected)
    before = saved(tiny_model(architecture, **model_options), tmp_path)
    assert any(not expected[name].equal(before[name]) for name in before)


@pytest.mark.parametrize(("architecture", "model_options", "options"), MERGED)
def test_a_model_with_the_exported_weights_computes_what_the_policy_does(
    architecture: str, model_options: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    policy = adapted(tiny_model(architecture, **model_options), options)
    served = loaded(PolicyWeights(policy), tiny_model(architecture, **model_options), tmp_path)
    torch.testing.assert_close(logits(served), logits(policy), rtol=0, atol=1e-4)


# peft's own merge adds this adapter to the one weight twice.
def test_an_adapter_on_tied_embeddings_is_merged_once(tmp_path: Path) -> None:
    options = {"target_modules": [*QV, "embed_tokens"], "ensure_weight_tying": True}
    policy = adapted(tiny_model("qwen2", **TIED), options)
    served = loaded(PolicyWeights(policy), tiny_model("qwen2", **TIED), tmp_path)
    torch.testing.assert_close(logits(served), logits(policy), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("architecture", "model_options", "options"), MERGED)
def test_the_base_is_the_model_below_the_adapter(
    architecture: str, model_options: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    weights = PolicyWeights(adapted(tiny_model(architecture, **model_options), options))
    expected = saved(tiny_model(architecture, **model_options), tmp_path)
    if options.get("bias") == "lora_only":  # trained in place
        assert not weights.has_adapter
        expected = {name: tensor for name, tensor in expected.items() if not name.endswith("bias")}
    else:
        assert weights.has_adapter
    base = weights.base()
    for _ in range(2):
        check_equal(((name, tensor) for name, tensor in base if name in expected), expected)


@pytest.mark.parametrize(("architecture", "model_options", "options"), MERGED)
def test_exporting_leaves_weights_and_gradients_as_they_are(
    architecture: str, model_options: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    policy = adapted(tiny_model(architecture, **model_options), options)
    policy(input_ids=torch.arange(5, 25)[None], labels=torch.arange(5, 25)[None]).loss.backward()
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    needs_gradient = {name: p.requires_grad for name, p in policy.named_parameters()}
    assert gradients
    source = PolicyWeights(policy)
    for name, tensor in [*source, *source.base()]:
        assert tensor.grad is None, name
    source.save_adapter(tmp_path)
    after = policy.state_dict()
    assert after.keys() == weights.keys()
    assert all(after[name].equal(tensor) for name, tensor in weights.items())
    parameters = dict(policy.named_parameters())
    assert {name for name, p in parameters.items() if p.grad is not None} == gradients.keys()
    assert all(parameters[name].grad.equal(gradient) for name, gradient in gradients.items())
    assert {name: p.requires_grad for name, p in parameters.items()} == needs_gradient


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["norm"]}])
def test_each_iteration_reads_the_weights_anew(options: dict[str, Any], tmp_path: Path) -> None:
    policy = adapted(tiny_model("llama"), options)
    weights = PolicyWeights(policy)
    first = {name: tensor.clone() for name, tensor in weights}
    move(policy, seed=2)
    check_equal(weights, saved(copy.deepcopy(policy).merge_and_unload(), tmp_path))
    assert any(not tensor.equal(first[name]) for name, tensor in weights)


def test_an_adapter_that_is_switched_off_for_a_moment_is_still_merged() -> None:
    policy = adapted(tiny_model("llama"), {"modules_to_save": ["norm"]})
    expected = dict(PolicyWeights(policy))
    with policy.disable_adapter():
        check_equal(PolicyWeights(policy), expected)


def test_the_active_adapter_is_the_one_that_counts(tmp_path: Path) -> None:
    policy = adapted(tiny_model("llama"), {"modules_to_save": ["norm"]})
    policy.add_adapter("other", lora_config(target_modules=QV, r=2, task_type="CAUSAL_LM"))
    policy.set_adapter("other")
    move(policy, seed=3)
    check_equal(PolicyWeights(policy), saved(copy.deepcopy(policy).merge_and_unload(), tmp_path / "merged"))
    PolicyWeights(policy).save_adapter(tmp_path / "adapter")
    reloaded = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "adapter")
    torch.testing.assert_close(logits(reloaded), logits(policy), rtol=0, atol=1e-5)
    policy.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigError, match=r"2 adapters are active: \['default', 'other'\]"):
        PolicyWeights(policy).save_adapter(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "model_options", "options"),
    [*(case for case in MERGED if case.id != "bias"), pytest.param("llama", {}, {"r": 2}, id="r")],
)
def test_an_adapter_that_was_saved_gives_equal_outputs(
    architecture: str, model_options: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    policy = adapted(tiny_model(architecture, **model_options), options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PolicyWeights(policy).save_adapter(tmp_path)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {file.name for file in tmp_path.iterdir()}
    assert not any(name.endswith("base_layer.weight") for name in load_file(tmp_path / "adapter_model.safetensors"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        reloaded = peft.PeftModel.from_pretrained(tiny_model(architecture, **model_options), tmp_path)
    torch.testing.assert_close(logits(reloaded), logits(policy), rtol=0, atol=1e-5)


def test_an_adapter_of_a_model_from_the_hub_is_saved_offline(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.name_or_path = model.config._name_or_path = "nobody/no-such-model"
    policy = adapted(model, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PolicyWeights(policy).save_adapter(tmp_path)
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == 8  # layers, q and v, A and B


def test_a_model_without_an_adapter_has_none_to_save(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM without an adapter"):
        PolicyWeights(tiny_model("llama")).save_adapter(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"target_modules": ["lm_head"]}, id="head"),
        pytest.param({"target_modules": ["embed_tokens"]}, id="embeddings"),
        pytest.param({"modules_to_save": ["lm_head"]}, id="modules_to_save"),
        pytest.param({"modules_to_save": ["lm_head", "embed_tokens"]}, id="both, each on its own"),
    ],
)
def test_two_values_of_one_tied_weight_are_an_error(options: dict[str, Any], tmp_path: Path) -> None:
    policy = adapted(tiny_model("llama", **TIED), options)
    with pytest.raises(
        ConfigError, match=r"lm_head.weight and model.embed_tokens.weight .* tie_word_embeddings=False"
    ):
        iter(PolicyWeights(policy))
    check_equal(PolicyWeights(policy).base(), saved(tiny_model("llama", **TIED), tmp_path))


def test_an_adapter_that_is_no_change_of_weights_is_an_error() -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    policy = peft.get_peft_model(tiny_model("llama"), config)
    with pytest.raises(ConfigError, match="type PROMPT_TUNING does not change layers"):
        iter(PolicyWeights(policy))


def test_an_adapter_that_peft_cannot_merge_is_an_error() -> None:
    policy = adapted(tiny_model("llama"), {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"})
    with pytest.raises(ConfigError, match=r"peft cannot merge the adapter: .*Set weight_sync='adapter'"):
        list(PolicyWeights(policy))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_policy_is_sent_as_an_adapter_alone(bits: int, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    policy = load_model(
        tmp_path / "model",
        quantization_config=BitsAndBytesConfig(**{f"load_in_{bits}bit": True}),
        peft_config=lora_config(target_modules=QV, r=4),
    )
    weights = PolicyWeights(policy)
    assert weights.has_adapter
    assert weights.is_quantized
    assert not PolicyWeights(tiny_model("llama")).is_quantized
    for read in (weights.__iter__, weights.base):
        with pytest.raises(ConfigError, match=r"the policy is quantized: .* Set weight_sync='adapter'"):
            read()
    weights.save_adapter(tmp_path / "adapter")
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == 8


def test_it_is_what_generators_take() -> None:
    source: WeightSource = PolicyWeights(tiny_model())
    assert {"base", "has_adapter", "save_adapter", "__iter__"} <= set(dir(source))
