from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    PreTrainedModel,
    T5Config,
)

from prefrl import SFTConfig, SFTTrainer
from prefrl.errors import ConfigError
from prefrl.models.adapters import is_peft_model
from prefrl.models.load import (
    arguments_for_other,
    load_model,
    load_processing_class,
    load_reward_model,
    load_tokenizer,
)
from prefrl.models.tokenizer_changes import TokenizerChanges
from tests.assets import tiny_model, tiny_tokenizer

peft = pytest.importorskip("peft")
# peft 0.21 asks transformers 5.23 by the old name.


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**({"target_modules": ["q_proj", "v_proj"], "r": 4} | options))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", seed=3).to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def trainable(model: PreTrainedModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("kind", [str, Path])
def test_weights_of_a_path_are_float32_unless_asked_otherwise(saved: Path, kind: type) -> None:
    model = load_model(kind(saved))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    expected = tiny_model("llama", seed=3).state_dict()
    assert all(tensor.equal(expected[name].bfloat16().float()) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "auto"])
def test_arguments_reach_from_pretrained_and_are_not_changed(saved: Path, dtype: object) -> None:
    arguments = {"dtype": dtype, "attn_implementation": "eager"}
    before = dict(arguments)
    model = load_model(str(saved), model_init_kwargs=arguments)
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert arguments == before


@pytest.mark.parametrize(("revision", "warns"), [(None, True), ("main", True), ("0" * 40, False)])
def test_code_of_a_model_that_may_change_is_a_warning(
    revision: str | None, warns: bool, saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"trust_remote_code": True} | ({} if revision is None else {"revision": revision})
    load_model(saved, model_init_kwargs=given)
    assert not caplog.records, "a folder has one version of the code"
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: tiny_model())
    load_model("org/model", model_init_kwargs=given)
    expected = [f"trust_remote_code=True with revision={revision!r}: code from the repository of 'org/model'"] * warns
    assert [record.getMessage().partition(" runs")[0] for record in caplog.records] == expected


def test_an_instance_is_taken_as_it_is() -> None:
    model = tiny_model()
    assert load_model(model) is model
    assert trainable(model) == {name for name, _ in model.named_parameters()}


def test_arguments_without_effect_and_unusable_models_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_init_kwargs=\{'dtype': 'bfloat16'\} has no effect"):
        load_model(tiny_model(), model_init_kwargs={"dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="model=3: must be a name, a path, a PreTrainedModel or a PeftModel"):
        load_model(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model=Linear.*: must be a name"):
        load_model(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=f"model='{tmp_path}' cannot be loaded"):
        load_model(tmp_path)


def test_a_peft_config_makes_an_adapter_and_is_not_changed(saved: Path) -> None:
    config = lora(target_modules="all-linear")
    before = copy.deepcopy(config.to_dict())
    model = load_model(saved, peft_config=config)
    assert is_peft_model(model)
    assert config.to_dict() == before
    assert all("lora_" in name for name in trainable(model))
    assert len(trainable(model)) == 2 * 7 * 2  # layers, projections, A and B


def test_a_seed_gives_the_adapter_and_leaves_the_global_state_alone() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = load_model(tiny_model(), peft_config=lora(), seed=5)
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(1)
    second = load_model(tiny_model(), peft_config=lora(), seed=5)
    other = load_model(tiny_model(), peft_config=lora(), seed=6)
    weights = [
        torch.cat([p.flatten() for n, p in m.named_parameters() if "lora_A" in n]) for m in (first, second, other)
    ]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


def test_an_adapter_that_is_there_is_trained_on() -> None:
    model = peft.get_peft_model(tiny_model(), lora())
    assert load_model(model) is model
    with pytest.raises(ConfigError, match="peft_config is given, but the model already has an adapter"):
        load_model(model, peft_config=lora())


def test_only_adapted_models_are_peft_models() -> None:
    model = tiny_model()
    assert not is_peft_model(model)
    assert is_peft_model(peft.get_peft_model(model, lora()))


def test_freezing_takes_exactly_the_names_in_which_a_pattern_is_found() -> None:
    model = load_model(tiny_model("llama"), freeze=[r"layers\.0\.", "norm"])
    names = {name for name, _ in model.named_parameters()}
    frozen = {name for name in names if ".layers.0." in name or "norm" in name}
    assert trainable(model) == names - frozen
    assert 0 < len(frozen) < len(names)


def test_overlapping_patterns_may_come_in_any_order() -> None:
    patterns = [r"layers\.0\.", r"layers\.0\.mlp"]
    assert trainable(load_model(tiny_model(), freeze=patterns)) == trainable(
        load_model(tiny_model(), freeze=patterns[::-1])
    )


@pytest.mark.parametrize(
    ("patterns", "adapter", "message"),
    [
        pytest.param(["layer7"], None, "freeze='layer7' matches no parameter name. Names look like model.embed"),
        pytest.param(["mlp", "layer7"], None, "freeze='layer7' matches no parameter name"),
        pytest.param(["(mlp"], None, r"freeze='\(mlp' is not a regular expression"),
        pytest.param(["."], None, r"freeze=\['.'\]: no parameter is left to train"),
        pytest.param(["embed_tokens"], lora(), "freeze='embed_tokens' has no effect: .* frozen already"),
        pytest.param(["lora_"], lora(), "no parameter is left to train"),
    ],
)
def test_freezing_nothing_or_everything_is_an_error(patterns: list[str], adapter: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(tiny_model(), peft_config=adapter, freeze=patterns)


def test_a_model_without_trainable_parameters_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nothing can be trained"):
        load_model(tiny_model().requires_grad_(False))


def test_the_tokenizer_comes_from_the_model_s_repository(saved: Path) -> None:
    text = "Hi there"
    for model in (load_model(saved), load_model(saved, peft_config=lora())):
        assert load_tokenizer(model)(text).input_ids == tiny_tokenizer()(text).input_ids


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the Hub with a repository a/m, whose tokenizer has one token more in the revision v2."""
    folder = tmp_path_factory.mktemp("hub")
    for revision, commit in (("main", "1" * 40), ("v2", "2" * 40)):
        snapshot = folder / "models--a--m" / "snapshots" / commit
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens([f"<{revision}>"] if revision == "v2" else [])
        tiny_model(seed=int(commit[0])).save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        reference = folder / "models--a--m" / "refs" / revision
        reference.parent.mkdir(exist_ok=True)
        reference.write_text(commit)
    return folder


def test_the_tokenizer_is_of_the_revision_that_the_model_is_loaded_in(hub: Path) -> None:
    arguments = {"cache_dir": str(hub)}
    for revision, has_token in ((None, False), ("v2", True)):
        given = arguments if revision is None else {**arguments, "revision": revision}
        model = load_model("a/m", model_init_kwargs=given)
        assert ("<v2>" in load_tokenizer(model, model_init_kwargs=given).get_vocab()) == has_token


def test_a_trainer_s_tokenizer_has_the_revision_and_the_arguments_of_its_model(hub: Path, tmp_path: Path) -> None:
    config = SFTConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        model_init_kwargs={"revision": "v2", "cache_dir": str(hub)},
    )
    rows = Dataset.from_list([{"prompt": "1+1=", "completion": "2"}])
    trainer = SFTTrainer("a/m", config, train_dataset=rows)
    assert "<v2>" in trainer.processing_class.get_vocab()


def test_arguments_of_the_policy_hold_for_another_model_but_for_its_place_and_quantization(saved: Path) -> None:
    policy = load_model(saved)
    arguments = {"revision": "v2", "dtype": "auto", "quantization_config": "of 4 bits", "token": "x"}
    assert arguments_for_other(saved, policy, arguments) == {"revision": "v2", "dtype": "auto", "token": "x"}
    assert arguments_for_other("other/model", policy, arguments) == {"dtype": "auto", "token": "x"}
    assert arguments_for_other("other/model", policy, None) == {}


def test_another_tokenizer_than_the_model_s_is_loaded_by_name(saved: Path, tmp_path: Path) -> None:
    own = tiny_tokenizer()
    own.add_tokens(["<own>"])
    own.save_pretrained(tmp_path / "own")
    model, changes = load_model(saved), TokenizerChanges(name_or_path=str(tmp_path / "own"))
    # The revision is that of the model, and there is none in a folder.
    loaded = load_processing_class(model, model_init_kwargs={"revision": "v2"}, changes=changes)
    assert "<own>" in loaded.get_vocab()
    with pytest.raises(ConfigError, match="has no effect because the trainer is given a processing_class"):
        load_processing_class(model, own, changes=changes)
    with pytest.raises(ConfigError, match="tokenizer_name_or_path='nowhere/at_all': no tokenizer can be loaded"):
        load_processing_class(model, changes=TokenizerChanges(name_or_path="nowhere/at_all"))


def test_a_given_tokenizer_is_used_and_keeps_its_padding_token() -> None:
    tokenizer = tiny_tokenizer()
    assert load_tokenizer(tiny_model(), tokenizer) is tokenizer
    assert tokenizer.pad_token == "<|pad|>"


def test_a_missing_padding_token_becomes_the_end_token() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    assert load_tokenizer(tiny_model(), tokenizer).pad_token == tokenizer.eos_token == "<|end|>"
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="neither pad_token nor eos_token"):
        load_tokenizer(tiny_model(), tokenizer)


def test_a_run_changes_the_tokenizer_before_padding_is_decided(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!")
    changes = TokenizerChanges(chat_template_path=str(tmp_path / "chat.jinja"), eos_token="~")
    assert load_tokenizer(tiny_model(), tokenizer, changes=changes) is tokenizer
    assert tokenizer.eos_token == tokenizer.pad_token == "~"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a!"
    load_tokenizer(tiny_model(), tokenizer, changes=TokenizerChanges(pad_token="z"))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("~", "z")


def test_the_template_of_another_model_is_taken(tmp_path: Path) -> None:
    tiny_tokenizer(chat_template="of another model").save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    TokenizerChanges(chat_template_path=str(tmp_path)).apply(tokenizer, tiny_model())
    assert tokenizer.chat_template == "of another model"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (TokenizerChanges(eos_token="<end>"), "eos_token='<end>': is not in the tokenizer's vocabulary"),
        (TokenizerChanges(chat_template_path="no/such"), "chat_template_path='no/such': is neither a file"),
    ],
)
def test_a_tokenizer_cannot_be_changed_to_what_there_is_not(changes: TokenizerChanges, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changes.apply(tiny_tokenizer(), tiny_model())


def test_code_that_comes_with_a_model_may_be_allowed_for_an_instance_whose_tokenizer_is_loaded() -> None:
    model = tiny_model()
    assert load_model(model, model_init_kwargs={"trust_remote_code": True}) is model
    with pytest.raises(ConfigError, match="has no effect, because the model is already loaded"):
        load_model(model, model_init_kwargs={"trust_remote_code": True, "revision": "v2"})


def test_a_tokenizer_that_cannot_belong_to_the_model_is_an_error(tmp_path: Path) -> None:
    num_tokens = len(tiny_tokenizer())
    assert load_tokenizer(tiny_model(vocab_size=num_tokens), tiny_tokenizer())
    with pytest.raises(ConfigError, match="was not loaded from a repository"):
        load_tokenizer(tiny_model())
    with pytest.raises(ConfigError, match="processing_class=str: must be a tokenizer"):
        load_tokenizer(tiny_model(), "gpt2")  # type: ignore[arg-type]
    for architecture in ("llama", "qwen2"):
        tiny_model(architecture).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=f"no tokenizer can be loaded from '{tmp_path}'"):
            load_tokenizer(load_model(tmp_path))


def test_more_tokens_than_embeddings_are_a_warning_unless_a_text_cannot_do_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_tokens = len(tiny_tokenizer())
    with caplog.at_level("WARNING", logger="prefrl"):
        load_tokenizer(tiny_model(vocab_size=num_tokens), tiny_tokenizer())
        assert not caplog.messages
        load_tokenizer(tiny_model(vocab_size=num_tokens - 1), tiny_tokenizer())
    (message,) = caplog.messages
    assert f"has {num_tokens} tokens, but the model has embeddings for only {num_tokens - 1}" in message
    for name in ("pad_token", "bos_token", "eos_token"):
        tokenizer = tiny_tokenizer()
        setattr(tokenizer, name, "~")  # the last but one
        last = tokenizer.convert_tokens_to_ids("~")
        message = f"{name}='~' has the id {last}, but the model has embeddings for only {last}"
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(tiny_model(vocab_size=last), tokenizer)


# Reward models.


def classifier(num_labels: int) -> PreTrainedModel:
    config = tiny_model("llama").config
    config.num_labels = num_labels
    return AutoModelForSequenceClassification.from_config(config)


def test_a_reward_model_is_the_body_of_a_language_model_with_a_new_output_in_float32(saved: Path) -> None:
    model = load_reward_model(saved, seed=5)
    assert model.config.num_labels == 1
    assert model.score.weight.shape == (1, 32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    body = load_model(saved).model.state_dict()
    assert all(tensor.equal(body[name]) for name, tensor in model.model.state_dict().items())
    assert trainable(model) == {name for name, _ in model.named_parameters()}


def test_a_seed_gives_the_new_output_and_leaves_the_global_state_alone(saved: Path) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = load_reward_model(saved, seed=5).score.weight
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(1)
    assert first.equal(load_reward_model(saved, seed=5).score.weight)
    assert not first.equal(load_reward_model(saved, seed=6).score.weight)
    assert 0 < first.abs().max() < 0.2  # 10 standard deviations


def test_a_reward_model_that_was_saved_keeps_its_output(tmp_path: Path) -> None:
    model = classifier(1)
    model.save_pretrained(tmp_path)
    assert load_reward_model(tmp_path, seed=5).score.weight.equal(model.score.weight)
    assert load_reward_model(model) is model


def test_a_model_that_has_not_one_output_is_no_reward_model(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model is a Qwen2ForCausalLM: .* Load it with AutoModelForSequenceClass"):
        load_reward_model(tiny_model())
    with pytest.raises(ConfigError, match=r"num_labels=2: a reward model has one output\. Load it with num_labels=1"):
        load_reward_model(classifier(2))
    with pytest.raises(ConfigError, match="num_labels=3: a reward model has one output"):
        load_reward_model(saved, model_init_kwargs={"num_labels": 3})
    classifier(2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"model='{tmp_path}' cannot be loaded: .* A reward model has num_labels=1"):
        load_reward_model(tmp_path)


def test_the_output_of_a_reward_model_is_trained_in_full_beside_its_adapter(saved: Path) -> None:
    model = load_reward_model(saved, peft_config=lora(target_modules=["q_proj"]), seed=5)
    assert type(model) is peft.PeftModelForSequenceClassification
    output = {name for name in trainable(model) if "lora_" not in name}
    assert output == {"base_model.model.score.modules_to_save.default.weight"}
    assert len(trainable(model) - output) == 2 * 2  # layers, A and B
    assert load_reward_model(model) is model
    with pytest.raises(ConfigError, match="task_type=CAUSAL_LM: must be SEQ_CLS for a LlamaForSequenceClassification"):
        load_reward_model(saved, peft_config=lora(task_type="CAUSAL_LM"))
    with pytest.raises(ConfigError, match="model is a Qwen2ForCausalLM: a reward model"):
        load_reward_model(peft.get_peft_model(tiny_model(), lora()))


def test_freezing_works_for_reward_models_too(saved: Path) -> None:
    assert trainable(load_reward_model(saved, freeze=["model"])) == {"score.weight"}


@pytest.mark.parametrize("load", [load_model, load_reward_model])
def test_an_encoder_with_a_decoder_is_refused(load: Any, tmp_path: Path) -> None:
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = AutoModelForSeq2SeqLM.from_config(BartConfig(vocab_size=8, max_position_embeddings=8, **sizes, **heads))
    t5 = AutoModelForSeq2SeqLM.from_config(
        T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    for model, name in ((bart, "bart"), (t5, "t5")):
        model.save_pretrained(tmp_path / name)
        for given in (model, tmp_path / name):
            with pytest.raises(
                ConfigError, match="ForConditionalGeneration, an encoder-decoder model, but prefrl trains"
            ):
                load(given)
