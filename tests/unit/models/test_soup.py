"""Averages of checkpoints, and the greedy choice of what goes into them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from prefrl.errors import ConfigError
from prefrl.models.soup import best_soup, greedy_soup, load_checkpoint, uniform_soup
from prefrl.models.soup_choice import Ingredient, greedy_choice
from tests.assets import tiny_model, tiny_tokenizer


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def save_model(name: str, *, seed: int = 0, architecture: str = "qwen2", **overrides: Any) -> Path:
        tiny_model(architecture, seed=seed, **overrides).save_pretrained(tmp_path / name)
        return tmp_path / name

    return save_model


@pytest.fixture
def handmade(tmp_path: Path) -> Callable[..., Path]:
    """A folder with these weights and this config; no model needs to have them."""

    def write(name: str, tensors: dict[str, Tensor], **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"architectures": ["X"], **config}), encoding="utf-8")
        return folder

    return write


def weights_of(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def assert_equal_weights(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, atol: float = 0.0) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name], atol=atol, rtol=0.0, msg=name)


def test_uniform_soup_is_the_mean_of_the_weights(save: Callable[..., Path], tmp_path: Path) -> None:
    folders = [save("a", seed=1), save("b", seed=2), save("c", seed=3)]
    soup = uniform_soup(folders, tmp_path / "soup")
    a, b, c = map(weights_of, folders)
    assert_equal_weights(
        weights_of(tmp_path / "soup"), {name: (a[name] + b[name] + c[name]) / 3 for name in a}, atol=1e-7
    )
    assert [(i.checkpoint, i.weight) for i in soup.ingredients] == [
        (folder, pytest.approx(1 / 3)) for folder in folders
    ]
    assert soup.metric is None


def test_weights_are_shares_of_their_sum(save: Callable[..., Path], tmp_path: Path) -> None:
    folders = [save("a", seed=1), save("b", seed=2)]
    soup = uniform_soup(folders, tmp_path / "soup", weights=[6, 2])
    a, b = map(weights_of, folders)
    assert_equal_weights(
        weights_of(tmp_path / "soup"), {name: 0.75 * a[name] + 0.25 * b[name] for name in a}, atol=1e-7
    )
    assert [i.weight for i in soup.ingredients] == [0.75, 0.25]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_soup_of_a_model_with_itself_is_that_model_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_model().to(dtype).save_pretrained(tmp_path / "a")
    uniform_soup([tmp_path / "a"] * 3, tmp_path / "soup", weights=[1, 2, 5])
    got, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("soup", "a"))
    assert_equal_weights(got, expected)
    assert {tensor.dtype for tensor in got.values()} == {dtype}


def test_means_of_bfloat16_are_formed_in_float32(handmade: Callable[..., Path], tmp_path: Path) -> None:
    # In bfloat16, whose next number after 1 is 1 + 2**-7, a running mean would stay at 1.
    values = [1.0, 1 + 2**-7, 1 + 2**-7]
    folders = [handmade(str(i), {"w": torch.tensor([value], dtype=torch.bfloat16)}) for i, value in enumerate(values)]
    uniform_soup(folders, tmp_path / "soup")
    expected = torch.tensor([1 + 2**-7], dtype=torch.bfloat16)
    assert_equal_weights(load_file(tmp_path / "soup/model.safetensors"), {"w": expected})


def test_soup_has_the_dtype_of_the_first(handmade: Callable[..., Path], tmp_path: Path) -> None:
    folders = [
        handmade("a", {"w": torch.tensor([1.0], dtype=torch.bfloat16)}, dtype="bfloat16"),
        handmade("b", {"w": torch.tensor([4.0], dtype=torch.float32)}, dtype="float32"),
    ]
    uniform_soup(folders, tmp_path / "soup")
    soup = load_file(tmp_path / "soup/model.safetensors")
    assert_equal_weights(soup, {"w": torch.tensor([2.5], dtype=torch.bfloat16)})


def test_tied_weights_stay_tied(save: Callable[..., Path], tmp_path: Path) -> None:
    folders = [save(name, seed=seed, tie_word_embeddings=True) for seed, name in enumerate("ab")]
    uniform_soup(folders, tmp_path / "soup")
    assert "lm_head.weight" not in load_file(tmp_path / "soup/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "soup")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    a, b = (weights_of(folder)["lm_head.weight"] for folder in folders)
    torch.testing.assert_close(model.lm_head.weight.data, (a + b) / 2, atol=1e-7, rtol=0.0)


def test_shards_are_read_as_one_model(save: Callable[..., Path], tmp_path: Path) -> None:
    whole = [save("a", seed=1), save("b", seed=2)]
    tiny_model(seed=2).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    uniform_soup(whole, tmp_path / "from whole")
    uniform_soup([whole[0], tmp_path / "shards"], tmp_path / "from shards")
    assert_equal_weights(weights_of(tmp_path / "from shards"), weights_of(tmp_path / "from whole"))


def test_integers_are_kept_if_they_are_equal_and_refused_if_not(handmade: Callable[..., Path], tmp_path: Path) -> None:
    def tensors(step: int, weight: float) -> dict[str, Tensor]:
        return {"step": torch.tensor([step]), "w": torch.tensor([weight], dtype=torch.float32)}

    a, b, c = handmade("a", tensors(7, 1)), handmade("b", tensors(7, 2)), handmade("c", tensors(8, 2))
    uniform_soup([a, b], tmp_path / "soup")
    assert_equal_weights(load_file(tmp_path / "soup/model.safetensors"), tensors(7, 1.5))
    with pytest.raises(ConfigError, match=r"step \(torch\.int64\) differs between .*a' and .*c'"):
        uniform_soup([a, c], tmp_path / "other")


def test_config_and_tokenizer_are_those_of_the_first(save: Callable[..., Path], tmp_path: Path) -> None:
    a, b = save("a", seed=1), save("b", seed=2, eos_token_id=5, attention_dropout=0.5)
    tiny_tokenizer().save_pretrained(a)
    for name in ("optimizer.pt", "trainer_state.json", "training_args.json"):
        (a / name).write_text("{}", encoding="utf-8")
    uniform_soup([a, b], tmp_path / "soup")
    written = {path.name for path in (tmp_path / "soup").iterdir()}
    copied = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert written == copied | {"model.safetensors", "README.md"}
    for name in copied:
        assert (tmp_path / "soup" / name).read_bytes() == (a / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "soup").eos_token == "<|end|>"


def test_card_names_the_checkpoints_and_shares_and_no_other_path(save: Callable[..., Path], tmp_path: Path) -> None:
    folders = [save("run1/checkpoint-5", seed=1), save("run2/checkpoint-5", seed=2)]
    uniform_soup(folders, tmp_path / "soup", weights=[1, 3])
    card = (tmp_path / "soup/README.md").read_text(encoding="utf-8")
    assert "| run1/checkpoint-5 | 0.25 |\n| run2/checkpoint-5 | 0.75 |" in card
    assert str(tmp_path) not in card


def test_soup_of_classifiers_is_a_classifier(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=1,
    )
    models = [AutoModelForSequenceClassification.from_config(config) for _ in range(2)]
    for i, model in enumerate(models):
        model.save_pretrained(tmp_path / str(i))
    uniform_soup([tmp_path / "0", tmp_path / "1"], tmp_path / "soup")
    loaded = load_checkpoint(tmp_path / "soup")
    assert type(loaded) is type(models[0])
    expected = (models[0].score.weight + models[1].score.weight) / 2
    torch.testing.assert_close(loaded.score.weight, expected, atol=1e-7, rtol=0.0)


BASE = {"w": torch.ones(2), "v": torch.ones(2)}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        pytest.param(BASE, {"architectures": ["Y"]}, r"architectures=\['X'\] and \['Y'\]", id="architecture"),
        pytest.param(BASE, {"model_type": "y"}, "model_type=None and y", id="model type"),
        pytest.param({"w": torch.ones(2)}, {}, "different weights: v in one of them only", id="keys"),
        pytest.param(BASE | {"w": torch.ones(3)}, {}, r"different shapes: w is \[2\] and \[3\]", id="shape"),
        pytest.param(BASE, {"rope": {"theta": 2, "dtype": 3}}, "config.json differs in rope$", id="option"),
        pytest.param(BASE, {"quantization_config": {}}, "quantized weights cannot be averaged", id="quantized"),
    ],
)
def test_checkpoints_that_compute_something_else_are_refused(
    tensors: dict[str, Tensor], config: dict[str, Any], message: str, handmade: Callable[..., Path], tmp_path: Path
) -> None:
    folders = [handmade("a", BASE, rope={"theta": 1}), handmade("b", tensors, **({"rope": {"theta": 1}} | config))]
    with pytest.raises(ConfigError, match=message):
        uniform_soup(folders, tmp_path / "soup")
    assert not (tmp_path / "soup").exists()


def test_options_that_change_no_weights_function_may_differ(handmade: Callable[..., Path], tmp_path: Path) -> None:
    part = {
        "rope": {"theta": 1, "dtype": "float32"},
        "use_cache": True,
        "resid_pdrop": 0.1,
        "transformers_version": "5",
    }
    other = {"rope": {"theta": 1, "dtype": "bfloat16"}, "use_cache": False, "resid_pdrop": 0.0, "eos_token_id": 3}
    uniform_soup([handmade("a", BASE, **part), handmade("b", BASE, **other)], tmp_path / "soup")
    assert_equal_weights(load_file(tmp_path / "soup/model.safetensors"), BASE)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_weights_are_one_positive_number_for_each_checkpoint(weights: list[float], save: Callable[..., Path]) -> None:
    folder = save("a")
    with pytest.raises(ConfigError, match="must be 2 positive numbers"):
        uniform_soup([folder, folder], folder.parent / "soup", weights=weights)


def test_folders_that_are_no_checkpoints_are_refused(save: Callable[..., Path], tmp_path: Path) -> None:
    folder = save("a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="at least two"):
        uniform_soup([folder], tmp_path / "soup")
    with pytest.raises(ConfigError, match="nowhere': there is no such folder"):
        uniform_soup([folder, tmp_path / "nowhere"], tmp_path / "soup")
    with pytest.raises(ConfigError, match=r"empty': has no model\.safetensors"):
        uniform_soup([folder, tmp_path / "empty"], tmp_path / "soup")
    with pytest.raises(ConfigError, match="already holds a model"):
        uniform_soup([folder, folder], folder)


# Soups that are chosen by a metric. A model's one number of interest is its last norm's first weight.


@pytest.fixture
def checkpoints(tmp_path: Path) -> Callable[..., list[Path]]:
    def save_all(*values: float) -> list[Path]:
        folders = [tmp_path / f"checkpoint-{value}-{i}" for i, value in enumerate(values)]
        for folder, value in zip(folders, values, strict=True):
            model = tiny_model()
            model.model.norm.weight.data[0] = value
            model.save_pretrained(folder)
        return folders

    return save_all


def number(model: PreTrainedModel) -> float:
    return float(model.get_parameter("model.norm.weight").detach()[0])


def squared_error(model: PreTrainedModel) -> float:
    return (number(model) - 1) ** 2


# Best first: 0.8 is first. Mean with 0.7: 0.75, worse. With 1.35: 1.075, better. With 0.6: 0.917, worse than 1.075.
VALUES = (0.6, 1.35, 0.7, 0.8)
TRIALS = [
    (0.8, 0.04, 0.04, 0.5),
    (0.7, 0.09, 0.0625, 0),
    (1.35, 0.1225, 0.075**2, 0.5),
    (0.6, 0.16, (0.25 / 3) ** 2, 0),
]


@pytest.mark.parametrize("greater_is_better", [False, True])
def test_greedy_soup_leaves_out_what_makes_it_worse(
    greater_is_better: bool, checkpoints: Callable[..., list[Path]], tmp_path: Path
) -> None:
    sign = -1 if greater_is_better else 1
    soup = greedy_soup(
        checkpoints(*VALUES),
        tmp_path / "soup",
        lambda model: sign * squared_error(model),
        greater_is_better=greater_is_better,
    )
    got = [(float(i.checkpoint.name.split("-")[1]), i.metric, i.trial_metric, i.weight) for i in soup.ingredients]
    expected = [(value, sign * metric, sign * trial, weight) for value, metric, trial, weight in TRIALS]
    assert got == [pytest.approx(row, abs=1e-6) for row in expected]
    assert soup.metric == pytest.approx(sign * 0.075**2, abs=1e-6)
    assert number(load_checkpoint(tmp_path / "soup")) == pytest.approx((0.8 + 1.35) / 2)
    assert not list((tmp_path / "soup").glob("trial-*"))


def test_greedy_soup_tries_the_top_k_only(checkpoints: Callable[..., list[Path]], tmp_path: Path) -> None:
    soup = greedy_soup(checkpoints(*VALUES), tmp_path / "soup", squared_error, greater_is_better=False, top_k=2)
    assert [(i.weight, i.trial_metric is None) for i in soup.ingredients] == [
        (1, False),
        (0, False),
        (0, True),
        (0, True),
    ]
    assert number(load_checkpoint(tmp_path / "soup")) == pytest.approx(0.8)


def test_greedy_soup_takes_what_makes_it_no_worse(checkpoints: Callable[..., list[Path]], tmp_path: Path) -> None:
    soup = greedy_soup(checkpoints(0.5, 0.5), tmp_path / "soup", squared_error, greater_is_better=False)
    assert [i.weight for i in soup.ingredients] == [0.5, 0.5]


def test_greedy_soup_leaves_out_what_makes_its_metric_nan(
    checkpoints: Callable[..., list[Path]], tmp_path: Path
) -> None:
    folders = checkpoints(0.5, 0.25)
    nan_in_between = {0.5: 2.0, 0.25: 1.0}
    soup = greedy_soup(
        folders, tmp_path / "soup", lambda m: nan_in_between.get(number(m), float("nan")), greater_is_better=True
    )
    assert [i.weight for i in soup.ingredients] == [1, 0]


def test_checkpoint_whose_own_metric_is_nan_is_refused(checkpoints: Callable[..., list[Path]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint-0\.5-0': its metric is nan"):
        greedy_soup(checkpoints(0.5, 0.25), tmp_path / "soup", lambda model: float("nan"), greater_is_better=True)


def test_best_soup_is_the_mean_of_the_top_k(checkpoints: Callable[..., list[Path]], tmp_path: Path) -> None:
    soup = best_soup(checkpoints(*VALUES), tmp_path / "soup", squared_error, greater_is_better=False, top_k=2)
    assert number(load_checkpoint(tmp_path / "soup")) == pytest.approx(0.75)
    assert [i.weight for i in soup.ingredients] == [0.5, 0.5, 0, 0]
    assert [i.metric for i in soup.ingredients] == pytest.approx([row[1] for row in TRIALS], abs=1e-6)
    assert soup.metric == pytest.approx(0.0625)


@pytest.mark.parametrize("make", [best_soup, greedy_soup])
def test_a_top_k_without_an_average_is_refused(make: Any, save: Callable[..., Path]) -> None:
    folder = save("a")
    with pytest.raises(ConfigError, match="top_k=1: must be at least 2"):
        make([folder, folder], folder.parent / "soup", squared_error, greater_is_better=False, top_k=1)


# Adapters.


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def save_adapter(base: Path, name: str, *, config: type[Any] = LoraConfig, **options: Any) -> Path:
    """An adapter with random weights, which depend on the name."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(
        model, config(**({"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "up_proj"]} | options))
    )
    generator = torch.Generator().manual_seed(ord(name))
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.normal_(0.0, 0.2, generator=generator)
    model.save_pretrained(base.parent / name)
    tiny_tokenizer().save_pretrained(base.parent / name)
    return base.parent / name


def merged(base: Path, adapter: Path) -> dict[str, Tensor]:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    state: dict[str, Tensor] = model.merge_and_unload().state_dict()
    return state


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"r": 4, "lora_alpha": 8}, {"r": 4, "lora_alpha": 8}, id="alike"),
        pytest.param({"r": 4, "lora_alpha": 8}, {"r": 2, "lora_alpha": 1}, id="other rank and scale"),
        pytest.param({"r": 2}, {"r": 2, "target_modules": ["q_proj", "v_proj"]}, id="other layers"),
        pytest.param({"r": 4, "use_rslora": True}, {"r": 2, "use_rslora": True}, id="rsLoRA"),
        pytest.param({"r": 2}, {"r": 3, "use_rslora": True}, id="LoRA and rsLoRA"),
        pytest.param(
            {"r": 2, "rank_pattern": {"q_proj": 5}}, {"r": 2, "alpha_pattern": {"up_proj": 3}}, id="patterns"
        ),
        pytest.param(
            {"r": 2, "target_modules": ["embed_tokens"]}, {"r": 3, "target_modules": ["embed_tokens"]}, id="embedding"
        ),
        pytest.param(
            {"r": 2, "target_modules": "all-linear"}, {"r": 3, "target_modules": "all-linear"}, id="all-linear"
        ),
    ],
)
def test_soup_of_adapters_is_the_mean_of_what_they_add(
    first: dict[str, Any], second: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    folders = [save_adapter(base, "a", **first), save_adapter(base, "b", **second)]
    uniform_soup(folders, tmp_path / "soup", weights=[3, 1])
    a, b = (merged(base, folder) for folder in folders)
    got = merged(base, tmp_path / "soup")
    assert_equal_weights(got, {name: 0.75 * a[name] + 0.25 * b[name] for name in a}, atol=1e-6)
    assert max(float((got[name] - a[name]).abs().max()) for name in a) > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "soup").eos_token == "<|end|>"


def test_soup_of_adapters_on_a_bfloat16_base_is_not_rounded(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model().to(torch.bfloat16).save_pretrained(base)
    folders = [save_adapter(base, name, r=2) for name in "ab"]
    uniform_soup(folders, tmp_path / "soup")
    a, b = (merged(base, folder) for folder in folders)
    assert_equal_weights(merged(base, tmp_path / "soup"), {name: (a[name] + b[name]) / 2 for name in a}, atol=1e-6)


def test_gpt2_adapters_whose_weights_are_transposed_are_averaged_too(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path / "base")
    folders = [
        save_adapter(tmp_path / "base", name, r=2, target_modules=["c_attn"], fan_in_fan_out=True) for name in "ab"
    ]
    uniform_soup(folders, tmp_path / "soup")
    a, b = (merged(tmp_path / "base", folder) for folder in folders)
    expected = {name: (a[name] + b[name]) / 2 for name in a}
    assert_equal_weights(merged(tmp_path / "base", tmp_path / "soup"), expected, atol=1e-6)


def test_greedy_soup_of_adapters_can_be_one_of_them(base: Path, tmp_path: Path) -> None:
    a, b = (save_adapter(base, name, r=2) for name in "ab")
    seen = []

    def evaluate(model: PreTrainedModel) -> float:
        seen.append(any(parameter.requires_grad for parameter in model.parameters()))
        return [1.0, 2.0, 0.5][len(seen) - 1]

    soup = greedy_soup([a, b], tmp_path / "soup", evaluate, greater_is_better=True)
    assert [(i.checkpoint, i.weight) for i in soup.ingredients] == [(b, 1), (a, 0)]
    assert seen == [True] * 3
    assert_equal_weights(merged(base, tmp_path / "soup"), merged(base, b))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"use_dora": True}, "use_dora=True does more than add B A", id="DoRA"),
        pytest.param({"lora_bias": True}, "lora_bias=True", id="LoRA bias"),
        pytest.param({"bias": "lora_only"}, "bias='lora_only'", id="bias"),
        pytest.param({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]", id="whole modules"),
        pytest.param({"trainable_token_indices": [1]}, "trainable_token_indices", id="tokens"),
        pytest.param({"layers_to_transform": [0]}, r"layers_to_transform=\[0\]", id="layers"),
        pytest.param({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'", id="PiSSA"),
        pytest.param(
            {"config": IA3Config, "feedforward_modules": ["up_proj"]}, "only LoRA adapters can be averaged", id="IA3"
        ),
    ],
)
def test_adapters_that_do_more_than_add_are_refused(
    options: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    folders = [save_adapter(base, "a"), save_adapter(base, "b", **options)]
    with pytest.raises(ConfigError, match=message):
        uniform_soup(folders, tmp_path / "soup")


def test_adapters_that_peft_cannot_put_together_are_refused(base: Path, tmp_path: Path) -> None:
    folders = [save_adapter(base, "a"), save_adapter(base, "b", target_modules=".*q_proj")]
    with pytest.raises(ConfigError, match=r"adapters cannot be averaged: .* Merge them into their base model first\."):
        uniform_soup(folders, tmp_path / "soup")


def test_adapters_need_one_base_model_that_is_there(base: Path, save: Callable[..., Path], tmp_path: Path) -> None:
    a, b, c = save_adapter(base, "a"), save_adapter(base, "b"), save_adapter(save("other"), "c")
    with pytest.raises(ConfigError, match=r"adapters of different base models: .*base' and .*other'"):
        uniform_soup([a, c], tmp_path / "soup")
    with pytest.raises(ConfigError, match=r"a' is an adapter, but .*base' is not"):
        uniform_soup([base, a], tmp_path / "soup")
    shutil.rmtree(base)
    with pytest.raises(ConfigError, match="base' cannot be loaded"):
        uniform_soup([a, b], tmp_path / "soup")


@pytest.mark.parametrize(("sign", "greater_is_better"), [(1, True), (-1, False)])
def test_a_checkpoint_that_leaves_the_metric_as_it_is_is_taken_and_one_that_makes_it_worse_is_not(
    sign: int, greater_is_better: bool
) -> None:
    metrics = {"a": 0.5, "ab": 0.5, "abc": 0.4, "abd": 0.7}

    def evaluate(folders: Sequence[Path]) -> float:
        return sign * metrics["".join(folder.name for folder in folders)]

    ranked = [
        Ingredient(Path(name), 0.0, sign * metric) for name, metric in zip("abcd", (0.5, 0.3, 0.2, 0.1), strict=True)
    ]
    soup = greedy_choice(ranked, evaluate, greater_is_better=greater_is_better)
    assert [path.name for path in soup.used] == ["a", "b", "d"]
    assert soup.metric == sign * 0.7
    assert [i.weight for i in soup.ingredients] == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert [i.trial_metric for i in soup.ingredients] == [sign * value for value in (0.5, 0.5, 0.4, 0.7)]
