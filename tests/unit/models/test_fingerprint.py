from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from prefrl.errors import ConfigError
from prefrl.models import fingerprint as fingerprint_module
from prefrl.models.fingerprint import rows_fingerprint, weights_fingerprint
from prefrl.models.scoring import prepare_for_scoring
from tests.assets import tiny_model

ARCHITECTURES = ["qwen2", "llama", "gpt2"]


def lora(*, seed: int = 0, trained: bool = True, **options: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = peft.LoraConfig(**({"target_modules": ["q_proj", "lm_head"], "r": 4} | options))
    model = peft.get_peft_model(tiny_model("llama"), config)
    if trained:
        train(model)
    return model  # type: ignore[no-any-return]


def train(model: PreTrainedModel, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equal_weights_give_an_equal_digest_whatever_the_object(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    expected = weights_fingerprint(model)
    assert weights_fingerprint(copy.deepcopy(model)) == expected
    assert weights_fingerprint(tiny_model(architecture)) == expected
    model.save_pretrained(tmp_path)
    assert weights_fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path)) == expected
    prepare_for_scoring(model)
    model.train().requires_grad_(False)
    assert weights_fingerprint(model) == expected
    assert weights_fingerprint(torch.nn.ModuleDict({"module": model})) == expected  # how DDP holds it


@pytest.mark.parametrize(
    "build", [*(lambda a=a: tiny_model(a) for a in ARCHITECTURES), lora], ids=[*ARCHITECTURES, "lora"]
)
def test_any_one_weight_changes_the_digest(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    seen = {weights_fingerprint(model)}
    names = dict(model.named_parameters())
    for parameter in names.values():
        last = parameter.data.view(-1)[-1:]
        before = last.clone()
        last.copy_(torch.nextafter(before, torch.tensor(float("inf"))))
        seen.add(weights_fingerprint(model))
        last.copy_(before)
    assert len(seen) == 1 + len(names)
    assert weights_fingerprint(model) in seen


def test_dtypes_shapes_and_names_count() -> None:
    seen = {weights_fingerprint(tiny_model())}
    seen.add(weights_fingerprint(tiny_model().bfloat16()))
    zeros = tiny_model()
    for parameter in zeros.parameters():
        parameter.data.zero_()
    seen.add(weights_fingerprint(zeros))
    norm = zeros.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.data[None])
    seen.add(weights_fingerprint(zeros))
    exchanged = tiny_model()
    first, second = (layer.self_attn.q_proj for layer in exchanged.model.layers)
    first.weight, second.weight = second.weight, first.weight
    seen.add(weights_fingerprint(exchanged))
    assert len(seen) == 5
    assert weights_fingerprint(tiny_model("llama")) != weights_fingerprint(tiny_model("mistral"))


def test_the_layout_in_memory_and_the_size_of_pieces_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    expected = weights_fingerprint(model)
    head = model.lm_head.weight
    head.data = head.data.t().contiguous().t()
    assert not head.is_contiguous()
    assert weights_fingerprint(model) == expected
    monkeypatch.setattr(fingerprint_module, "_BYTES_PER_PIECE", 7)
    assert weights_fingerprint(model) == expected


def test_buffers_count() -> None:
    assert weights_fingerprint(tiny_model()) != weights_fingerprint(
        tiny_model(rope_parameters={"rope_theta": 5000.0, "rope_type": "default"})
    )
    model = tiny_model()
    model.model.norm.register_buffer("scale", torch.ones(2))
    before = weights_fingerprint(model)
    model.model.norm.scale[1] = 2.0
    assert weights_fingerprint(model) != before
    renamed = tiny_model()
    renamed.model.norm.register_buffer("shift", torch.ones(2))
    assert weights_fingerprint(renamed) != before


def test_a_dynamic_rope_keeps_its_digest_after_a_long_text() -> None:
    rope = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}
    model = tiny_model("llama", max_position_embeddings=16, rope_parameters=rope)
    before = weights_fingerprint(model)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model(input_ids=torch.ones(1, 40, dtype=torch.long))
    assert not model.model.rotary_emb.inv_freq.equal(frequencies)
    assert weights_fingerprint(model) == before


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a transformers PreTrainedModel"):
        weights_fingerprint(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("options", [{}, {"target_modules": "all-linear"}, {"target_modules": ["embed_tokens"]}])
def test_an_adapter_that_changes_nothing_has_the_digest_of_its_base_model(options: dict[str, Any]) -> None:
    base = weights_fingerprint(tiny_model("llama"))
    assert weights_fingerprint(lora(trained=False, **options)) == base
    assert weights_fingerprint(lora(trained=False, seed=1, r=2, **options)) == base
    trained = lora(**options)
    assert weights_fingerprint(trained) != base
    with trained.disable_adapter():
        assert weights_fingerprint(trained) == base


def test_modules_to_save_and_magnitudes_belong_to_the_adapter() -> None:
    base = weights_fingerprint(tiny_model("llama"))
    for options in ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, {"use_dora": True}):
        model = lora(**options)
        assert weights_fingerprint(model) != base
        with model.disable_adapter():
            assert weights_fingerprint(model) == base


def test_what_an_adapter_makes_of_its_weights_counts() -> None:
    options: list[dict[str, Any]] = [{}, {"lora_alpha": 16}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}]
    assert len({weights_fingerprint(lora(**each)) for each in options}) == 4
    # Where it comes from does not.
    model = lora()
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.inference_mode, config.revision = "somewhere", True, "main"
    assert weights_fingerprint(model) == weights_fingerprint(lora())


def test_a_saved_adapter_has_the_same_digest(tmp_path: Path) -> None:
    model = lora()
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    loaded = peft.PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path), adapter_name="other")
    assert weights_fingerprint(loaded) == weights_fingerprint(model)


def test_only_active_adapters_count() -> None:
    model = lora()
    before = weights_fingerprint(model)
    model.add_adapter("ref", peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2))
    assert weights_fingerprint(model) == before
    model.set_adapter("ref")
    train(model, seed=2)
    with_ref = weights_fingerprint(model)
    assert with_ref != before
    model.set_adapter("default")
    assert weights_fingerprint(model) == before


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(task_type="CAUSAL_LM"),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5]),
        peft.VeraConfig(target_modules=["q_proj"], r=2),
    ],
    ids=lambda config: type(config).__name__ + str(bool(getattr(config, "trainable_token_indices", None))),
)
def test_adapters_of_every_kind_count(config: peft.PeftConfig) -> None:
    model = peft.get_peft_model(tiny_model("llama"), config)
    seen = {weights_fingerprint(model), weights_fingerprint(tiny_model("llama"))}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.data.view(-1)[-1] += 1
        seen.add(weights_fingerprint(model))
    assert len(seen) == 2 + len(trainable)


# Rows.


def rows_of(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


IDS = [[1, 2, 3], [], [4], [5, 6], [7, 8, 9, 10], [11]]
FLAGS = [[True, False, True], [], [False], [True, True], [False, False, True, True], [True]]


@pytest.fixture
def rows() -> datasets.Dataset:
    return rows_of(a=IDS, b=FLAGS, text=["x"] * len(IDS))


def test_equal_rows_give_an_equal_digest_however_they_came_there(
    rows: datasets.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rows_fingerprint(rows, ["a", "b"])
    doubled = datasets.concatenate_datasets([rows, rows])
    backwards = rows.select(range(5, -1, -1))
    same = [
        doubled.select(range(6, 12)),  # a slice of memory, packed flags not from a byte's first bit
        doubled.select([0, 7, 2, 9, 10, 5]),
        doubled.select([0, 7, 2, 9, 10, 5]).flatten_indices(),
        backwards.select(range(5, -1, -1)),
        datasets.concatenate_datasets([rows.select([0]), rows.select(range(1, 6))]),
        rows.remove_columns("text").with_format("torch"),
        rows.add_column("other", [0] * 6),
    ]
    assert {rows_fingerprint(each, ["a", "b"]) for each in same} == {expected}
    monkeypatch.setattr(fingerprint_module, "_ROWS_PER_PIECE", 2)
    assert {rows_fingerprint(each, ["a", "b"]) for each in same} == {expected}


def test_any_other_rows_give_another_digest(rows: datasets.Dataset) -> None:
    moved = [[1, 2], [3], [4], [5, 6], [7, 8, 9, 10], [11]]
    token = [*IDS[:-1], [12]]
    flag = [*FLAGS[:-1], [False]]
    others = [
        rows,
        rows_of(a=moved, b=FLAGS),
        rows_of(a=token, b=FLAGS),
        rows_of(a=IDS, b=flag),
        rows_of(a=[IDS[0], None, *IDS[2:]], b=FLAGS),
        rows_of(a=FLAGS, b=IDS),
        rows.select(range(5)),
        rows.select([0, 1, 3, 2, 4, 5]),
        rows.cast_column("a", datasets.List(datasets.Value("int32"))),
    ]
    assert len({rows_fingerprint(each, ["a", "b"]) for each in others}) == len(others)
    assert rows_fingerprint(rows, ["a"]) != rows_fingerprint(rows.rename_columns({"a": "c"}), ["c"])
