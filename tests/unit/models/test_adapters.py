from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from prefrl.data.collate import flat_batch
from prefrl.errors import ConfigError
from prefrl.models.adapters import bitsandbytes_config, lora_config
from prefrl.models.forward import token_logprobs
from prefrl.models.load import load_model, load_reward_model
from prefrl.trainer.configs import SFTConfig
from prefrl.trainer.sft_trainer import SFTTrainer
from tests.assets import tiny_model, tiny_reward_model, tiny_tokenizer

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

TEXTS = Dataset.from_list([{"text": "to be"}, {"text": "or not to be"}, {"text": "that is the question"}])
QV = ("q_proj", "v_proj")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LAYERS = r"layers\.\d\.self_attn"


def trained(model: Any, peft_config: Any, folder: Path, **options: Any) -> SFTTrainer:
    """After two steps: in the first, A gets no gradient, because B is 0."""
    config = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = SFTTrainer(
        model, config, train_dataset=TEXTS, peft_config=peft_config, processing_class=tiny_tokenizer()
    )
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    trainer.moved = {name for name, p in trainer.model.named_parameters() if not p.equal(before[name])}
    trainer.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 25)[None]).logits


def trainable(model: PreTrainedModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_scores(model: PreTrainedModel) -> None:
    """The log-probs that trainers see are those of the model's plain forward."""
    ids = torch.arange(5, 25)
    plain = logits(model)[0, 3:-1].log_softmax(-1).gather(-1, ids[4:, None]).squeeze(-1)
    with torch.no_grad():
        scores = token_logprobs(model, flat_batch([ids[:4].tolist()], [ids[4:].tolist()]), temperature=1.0)
    torch.testing.assert_close(scores.logprobs, plain, rtol=0, atol=1e-5)


# Options of LoraConfig, of the model, and the names of what is trained.
FORMS = [
    pytest.param({}, {}, [rf"{LAYERS}\.[qv]_proj\.lora_[AB]"], id="lora"),
    pytest.param({"use_rslora": True}, {}, [rf"{LAYERS}\.[qv]_proj\.lora_[AB]"], id="rslora"),
    pytest.param({"use_dora": True}, {}, [rf"{LAYERS}\.[qv]_proj\.lora_([AB]|magnitude_vector)"], id="dora"),
    pytest.param(
        {"modules_to_save": ["model.norm"]},
        {},
        [rf"{LAYERS}\.[qv]_proj\.lora_[AB]", r"model\.norm\.modules_to_save"],
        id="modules_to_save",
    ),
    pytest.param(
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"tie_word_embeddings": False},
        [rf"{LAYERS}\.[qv]_proj\.lora_[AB]", r"(embed_tokens|lm_head)\.modules_to_save"],
        id="modules_to_save of embeddings",
    ),
    pytest.param(
        {"target_modules": ["lm_head"]}, {"tie_word_embeddings": True}, [r"lm_head\.lora_[AB]"], id="tied head"
    ),
    pytest.param(
        {"target_modules": ["lm_head"]}, {"tie_word_embeddings": False}, [r"lm_head\.lora_[AB]"], id="untied head"
    ),
    pytest.param(
        {"target_modules": ["lm_head"], "use_dora": True},
        {"tie_word_embeddings": True},
        [r"lm_head\.lora_([AB]|magnitude_vector)"],
        id="tied head with dora",
    ),
    pytest.param({"rank_pattern": {"q_proj": 2}}, {}, [rf"{LAYERS}\.[qv]_proj\.lora_[AB]"], id="rank_pattern"),
    pytest.param({"alpha_pattern": {"v_proj": 1}}, {}, [rf"{LAYERS}\.[qv]_proj\.lora_[AB]"], id="alpha_pattern"),
    *(
        pytest.param({"init_lora_weights": init}, {}, [rf"{LAYERS}\.[qv]_proj\.lora_[AB]"], id=init)
        for init in ("gaussian", "pissa", "olora", "orthogonal")
    ),
]


@pytest.mark.parametrize(("options", "overrides", "names"), FORMS)
def test_training_moves_exactly_the_adapter_and_what_is_saved_gives_equal_outputs(
    options: dict[str, Any], overrides: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    config = lora_config(**({"target_modules": QV, "r": 4} | options))
    trainer = trained(tiny_model("llama", **overrides), config, tmp_path)
    model = trainer.model
    assert trainer.moved == trainable(model)
    assert trainer.moved == {n for n, _ in model.named_parameters() if any(re.search(name, n) for name in names)}
    for name in names:
        assert any(re.search(name, moved) for moved in trainer.moved)
    check_scores(model)
    trainer.save_model(str(tmp_path / "saved"))
    reloaded = peft.PeftModel.from_pretrained(tiny_model("llama", **overrides), tmp_path / "saved")
    torch.testing.assert_close(logits(reloaded), logits(model), rtol=0, atol=1e-5)
    assert (logits(tiny_model("llama", **overrides)) - logits(model)).abs().max() > 0.05


def test_parameters_of_experts_get_adapters(tmp_path: Path) -> None:
    config = lora_config(target_modules=[], target_parameters=["experts.gate_up_proj"], r=4)
    trainer = trained(tiny_model("qwen3_moe", **EXPERTS), config, tmp_path)
    assert len(trainer.moved) == 2 * 2  # layers, A and B
    assert all(re.search(r"mlp\.experts\.lora_[AB]", name) for name in trainer.moved)
    trainer.save_model(str(tmp_path / "saved"))
    reloaded = peft.PeftModel.from_pretrained(tiny_model("qwen3_moe", **EXPERTS), tmp_path / "saved")
    torch.testing.assert_close(logits(reloaded), logits(trainer.model), rtol=0, atol=1e-5)


def test_patterns_give_ranks_and_scales_of_single_layers() -> None:
    config = lora_config(target_modules=QV, r=4, lora_alpha=8, rank_pattern={"q_proj": 2}, alpha_pattern={"0.*": 6})
    layers = load_model(tiny_model("llama"), peft_config=config).get_base_model().model.layers
    attention = layers[0].self_attn, layers[1].self_attn
    assert [layer.q_proj.lora_A["default"].weight.shape[0] for layer in attention] == [2, 2]
    assert [layer.v_proj.lora_A["default"].weight.shape[0] for layer in attention] == [4, 4]
    assert [layer.q_proj.scaling["default"] for layer in attention] == [6 / 2, 8 / 2]
    assert [layer.v_proj.scaling["default"] for layer in attention] == [6 / 4, 8 / 4]


def test_the_adapter_of_a_wrapped_model_is_trained(tmp_path: Path) -> None:
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"], r=4))
    trainer = trained(model, None, tmp_path)
    assert trainer.model is model
    assert trainer.moved == {name for name, _ in model.named_parameters() if "lora_" in name}


def test_an_adapter_that_was_loaded_for_inference_is_an_error(tmp_path: Path) -> None:
    load_model(tiny_model(), peft_config=lora_config(target_modules=QV)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"nothing can be trained. Load its adapter with is_trainable=True"):
        load_model(peft.PeftModel.from_pretrained(tiny_model(), tmp_path))
    assert trainable(load_model(peft.PeftModel.from_pretrained(tiny_model(), tmp_path, is_trainable=True)))


def test_an_adapter_inside_a_model_is_an_error() -> None:
    model = tiny_model()
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"model has an adapter inside.*PeftModel\.from_pretrained"):
        load_model(model)


@pytest.mark.parametrize("given", [None, "CAUSAL_LM", peft.TaskType.CAUSAL_LM])
def test_the_task_type_is_that_of_a_language_model(given: Any) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], task_type=given)
    model = load_model(tiny_model(), peft_config=config)
    assert type(model) is peft.PeftModelForCausalLM
    assert model.peft_config["default"].task_type == "CAUSAL_LM"
    assert config.task_type == given


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"task_type": "SEQ_CLS"}, "task_type=SEQ_CLS: must be CAUSAL_LM for a Qwen2ForCausalLM"),
        pytest.param({"task_type": peft.TaskType.SEQ_CLS}, "task_type=TaskType.SEQ_CLS: must be CAUSAL_LM for a"),
        pytest.param({"target_modules": ["nowhere"]}, "peft_config cannot be used with a Qwen2ForCausalLM: .*nowhere"),
        pytest.param(
            {"target_modules": ["q_proj", "proj"]}, "target_modules contains 'proj', .*look like .*self_attn.q_proj"
        ),
        pytest.param({"rank_pattern": {"v_proj": 2}}, "rank_pattern contains 'v_proj', but there is no such layer"),
        pytest.param({"alpha_pattern": {"9.*": 2}}, r"alpha_pattern contains '9\.\*', but there is no such layer"),
        pytest.param({"modules_to_save": ["heads"]}, "modules_to_save contains 'heads', but .* look like .*lm_head"),
        pytest.param({"r": 0}, "peft_config cannot be used with a Qwen2ForCausalLM: .*positive"),
        pytest.param({"init_lora_weights": "eva"}, "init_lora_weights='eva' needs data"),
        pytest.param(
            {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}},
            "and there is none. Use",
        ),
        pytest.param({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4': this decomposition .* Use 'pissa'"),
    ],
)
def test_an_adapter_that_cannot_be_as_it_is_described_is_an_error(options: dict[str, Any], message: str) -> None:
    config = peft.LoraConfig(**({"target_modules": ["q_proj"]} | options))
    with pytest.raises(ConfigError, match=message):
        load_model(tiny_model(), peft_config=config)


def test_the_head_of_a_reward_model_may_be_named_although_peft_trains_it_as_a_whole() -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "score"])
    model = load_reward_model(tiny_reward_model(), peft_config=config)
    heads = {name for name in trainable(model) if "q_proj" not in name}
    assert heads == {"base_model.model.score.modules_to_save.default.weight"}


@pytest.mark.parametrize("names", [["gate_proj", "up_proj", "down_proj"], ["q_proj", "gate_proj", "up_proj"]])
def test_names_of_experts_mean_the_parameters_that_hold_them(names: list[str]) -> None:
    model = load_model(tiny_model("qwen3_moe", **EXPERTS), peft_config=peft.LoraConfig(target_modules=names))
    assert any("experts" in name for name in trainable(model))
    assert ("q_proj" in names) == any("q_proj" in name for name in trainable(model))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["q_proj", "gate_up_proj"],
            r"'gate_up_proj', .*\.experts\.gate_up_proj is a parameter: .* target_parameters",
        ),
        (["gate_proj", "up_proj", "typo"], r"'typo', but there is no such layer.*look like .*lm_head"),
    ],
)
def test_names_of_a_mixture_of_experts_that_are_no_layers_are_errors(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(tiny_model("qwen3_moe", **EXPERTS), peft_config=peft.LoraConfig(target_modules=names))


def test_what_peft_refuses_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"peft refuses the LoRA options: .*lora_rank"):
        lora_config(lora_rank=3)


def test_all_linear_is_a_word_of_peft() -> None:
    model = load_model(tiny_model("llama"), peft_config=lora_config(target_modules=["all-linear"]))
    assert len(trainable(model)) == 2 * 7 * 2  # layers, projections, A and B


# Quantized models.

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers are as wide as bitsandbytes' blocks."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "quantization",
    [
        pytest.param(NF4, id="nf4"),
        pytest.param({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, id="fp4"),
        pytest.param(NF4 | {"bnb_4bit_use_double_quant": True}, id="nested"),
    ],
)
def test_an_adapter_is_trained_on_four_bits(quantization: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    config = BitsAndBytesConfig(**quantization)
    arguments = {"quantization_config": config}
    trainer = trained(saved, lora_config(target_modules=QV, r=4), tmp_path, model_init_kwargs=arguments)
    model = trainer.model
    assert {p.dtype for n, p in model.named_parameters() if "base_layer" in n} == {torch.uint8}
    assert all(math.isfinite(loss) for loss in trainer.losses)
    assert trainer.losses[1] < trainer.losses[0]
    assert trainer.moved == {name for name, _ in model.named_parameters() if "lora_" in name}
    check_scores(model)
    trainer.save_model(str(tmp_path / "saved"))
    base = AutoModelForCausalLM.from_pretrained(saved, quantization_config=config, dtype=torch.float32)
    reloaded = load_model(peft.PeftModel.from_pretrained(base, tmp_path / "saved", is_trainable=True))
    torch.testing.assert_close(logits(reloaded), logits(model), rtol=0, atol=1e-5)


def test_an_adapter_is_trained_on_eight_bits(saved: Path, tmp_path: Path) -> None:
    arguments = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    trainer = trained(saved, lora_config(target_modules=QV, r=4), tmp_path, model_init_kwargs=arguments)
    assert {p.dtype for n, p in trainer.model.named_parameters() if "base_layer" in n} == {torch.int8}
    assert trainer.losses[1] < trainer.losses[0]
    assert trainer.moved == {name for name, _ in trainer.model.named_parameters() if "lora_" in name}


def test_checkpointing_of_activations_does_not_change_the_update_of_a_quantized_model(
    saved: Path, tmp_path: Path
) -> None:
    arguments = {"quantization_config": BitsAndBytesConfig(**NF4)}
    plain, recomputed = (
        trained(saved, lora_config(target_modules=QV, r=4), tmp_path, model_init_kwargs=arguments, **options).model
        for options in (
            {},
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        )
    )
    assert logits(plain).equal(logits(recomputed))


def test_gradients_flow_through_four_bit_weights_after_a_pass_in_eval_mode(saved: Path) -> None:
    def gradient(*, after_eval: bool) -> torch.Tensor:
        config = lora_config(target_modules=["q_proj"], r=4)
        model = load_model(saved, quantization_config=BitsAndBytesConfig(**NF4), peft_config=config, seed=0)
        if after_eval:
            logits(model)
        model.train()(input_ids=torch.arange(5, 25)[None]).logits.square().sum().backward()
        return model.get_base_model().model.layers[0].self_attn.q_proj.lora_B["default"].weight.grad

    before = gradient(after_eval=False)
    assert before.abs().max() > 0
    assert gradient(after_eval=True).equal(before)


def test_what_is_not_quantized_is_float32_and_only_the_adapter_is_trained(saved: Path) -> None:
    model = load_model(
        saved,
        model_init_kwargs={"dtype": "bfloat16"},
        quantization_config=bitsandbytes_config(bits=4, quant_type="nf4", nested=False, compute_dtype=torch.bfloat16),
        peft_config=lora_config(target_modules=QV),
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float32}
    assert {p.dtype for n, p in model.named_parameters() if "base_layer" in n} == {torch.bfloat16}  # four bits each
    assert {p.dtype for n, p in model.named_parameters() if "norm" in n or "embed" in n} == {torch.float32}
    assert trainable(model) == {name for name, _ in model.named_parameters() if "lora_" in name}


def test_a_quantized_model_without_an_adapter_is_an_error(saved: Path) -> None:
    config = BitsAndBytesConfig(**NF4)
    message = "the model is quantized and peft_config=None: quantized weights cannot be trained. Pass a peft_config"
    with pytest.raises(ConfigError, match=message):
        load_model(saved, quantization_config=config)
    with pytest.raises(ConfigError, match=message):
        load_model(AutoModelForCausalLM.from_pretrained(saved, quantization_config=config))


def test_quantization_is_said_once_and_where_it_has_an_effect(saved: Path) -> None:
    config = BitsAndBytesConfig(**NF4)
    with pytest.raises(ConfigError, match="quantization_config is given twice"):
        load_model(saved, model_init_kwargs={"quantization_config": config}, quantization_config=config)
    with pytest.raises(ConfigError, match="quantization_config has no effect, because the model is already loaded"):
        load_model(tiny_model(), quantization_config=config)


def test_how_bits_are_told_to_bitsandbytes() -> None:
    four = bitsandbytes_config(bits=4, quant_type="fp4", nested=True, compute_dtype=torch.bfloat16)
    assert (four.load_in_4bit, four.load_in_8bit, four.bnb_4bit_quant_type) == (True, False, "fp4")
    assert four.bnb_4bit_use_double_quant
    assert four.bnb_4bit_compute_dtype == four.bnb_4bit_quant_storage == torch.bfloat16
    eight = bitsandbytes_config(bits=8, quant_type="nf4", nested=False, compute_dtype=torch.float32)
    assert (eight.load_in_4bit, eight.load_in_8bit) == (False, True)


def test_a_reward_model_on_four_bits_has_an_output_layer_in_full_precision(saved: Path) -> None:
    config = BitsAndBytesConfig(**NF4)
    adapter = lora_config(target_modules=QV)
    model = load_reward_model(saved, quantization_config=config, peft_config=adapter, seed=1)
    score = {n: p for n, p in model.named_parameters() if "score.modules_to_save" in n}
    assert [(tuple(p.shape), p.dtype, p.requires_grad) for p in score.values()] == [((1, 64), torch.float32, True)]
    assert {p.dtype for n, p in model.named_parameters() if "base_layer" in n} == {torch.uint8}
