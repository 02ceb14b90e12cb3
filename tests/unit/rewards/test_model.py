"""Reward models that read images: their scores are those that the trainer of reward models computes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from prefrl import GRPOConfig, GRPOTrainer
from prefrl.data.collate import reward_batch
from prefrl.data.images import ImageReader, file_bytes
from prefrl.data.preference import prepare_reward_dataset
from prefrl.errors import ConfigError, RewardError
from prefrl.models.classifier import sequence_scores
from prefrl.rewards import RewardRunner
from prefrl.rewards import model as rewards_model
from prefrl.rewards.model import ModelReward, RowReader
from tests.assets import tiny_model, tiny_tokenizer
from tests.vlms import FAMILIES, forget_classifiers, image, tiny_vision_judge


def reward_model(architecture: str = "qwen2", *, num_labels: int = 1, **overrides: Any) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(architecture, **(sizes | {"num_labels": num_labels} | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.2)
    return model


def one_by_one(model: PreTrainedModel, rows: list[list[int]], *, column: int = 0) -> list[float]:
    with torch.no_grad():
        return [float(model.eval()(input_ids=torch.tensor([row])).logits[0, column]) for row in rows]


@pytest.fixture
def saved_reward_model(tmp_path: Path) -> Path:
    """As a reward trainer leaves it: one label, a padding token in the config, the tokenizer beside it."""
    folder = tmp_path / "judge"
    reward_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def saved_adapter(tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    """A LoRA adapter with a score head on a language model without one, and the model that it was saved from."""
    tiny_model("qwen2").save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"]))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    model.config.pad_token_id = tiny_tokenizer().pad_token_id
    model.save_pretrained(tmp_path / "lora-judge")
    tiny_tokenizer().save_pretrained(tmp_path / "lora-judge")
    return tmp_path / "lora-judge", model


def ended(ids: list[int]) -> list[int]:
    """With the end token, which plain text gets and rendered messages have."""
    end = tiny_tokenizer().eos_token_id
    return ids if ids[-1] == end else [*ids, end]


TEXTS = ["a", "bc" * 9, "d" * 5, "", "some words", *("x" * n for n in range(1, 18))]


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "bert"])  # a pooled last token; the same; a first token
def test_batches_with_padding_score_like_rows_on_their_own(architecture: str) -> None:
    model, tokenizer = reward_model(architecture), tiny_tokenizer()
    expected = one_by_one(model, [ended(tokenizer(f"prompt {text}")["input_ids"]) for text in TEXTS])
    assert ModelReward(model, tokenizer=tokenizer)(["prompt "] * len(TEXTS), TEXTS) == pytest.approx(
        expected, abs=1e-5
    )
    assert len(set(expected)) == len(TEXTS)


def test_messages_are_rendered_by_the_template_of_the_reward_models_tokenizer() -> None:
    model, tokenizer = reward_model(), tiny_tokenizer()
    scores = ModelReward(model, tokenizer=tokenizer)(
        [[{"role": "user", "content": content}] for content in ("hi", "hi\ud83d")],
        [[{"role": "assistant", "content": "yes"}]] * 2,
    )
    ids = [tokenizer(f"<|user|>{said}<|end|><|assistant|>yes<|end|>")["input_ids"] for said in ("hi", "hi?")]
    assert scores == pytest.approx(one_by_one(model, ids), abs=1e-5)


def test_special_tokens_are_added_to_texts_but_not_to_what_a_template_rendered() -> None:
    model, tokenizer = reward_model(), tiny_tokenizer()
    start = tokenizer.convert_tokens_to_ids("<|system|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", start)]
    )
    reward = ModelReward(model, tokenizer=tokenizer)
    text = tokenizer("hiyes", add_special_tokens=False)["input_ids"]
    chat = tokenizer("<|user|>hi<|end|><|assistant|>yes<|end|>", add_special_tokens=False)["input_ids"]
    scores = reward(["hi", [{"role": "user", "content": "hi"}]], ["yes", [{"role": "assistant", "content": "yes"}]])
    assert scores == pytest.approx(one_by_one(model, [ended([start, *text]), chat]), abs=1e-5)


def test_model_scores_in_eval_mode_without_gradients_and_is_left_as_it_was() -> None:
    model = reward_model(attention_dropout=0.5).train()
    reward = ModelReward(model, tokenizer=tiny_tokenizer())
    assert reward(["p"], ["abc"]) == reward(["p"], ["abc"])
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_padding_falls_back_to_the_end_of_sequence_token() -> None:
    model, tokenizer = reward_model(), tiny_tokenizer()
    tokenizer.pad_token = None
    model.config.pad_token_id = None
    # An end token that pads is not scored: the model finds the token before it.
    expected = one_by_one(model, [tokenizer(text)["input_ids"] for text in ("pa", "pbcd")])
    assert ModelReward(model, tokenizer=tokenizer)(["p", "p"], ["a", "bcd"]) == pytest.approx(expected, abs=1e-5)
    assert tokenizer.pad_token == tokenizer.eos_token


def test_model_and_tokenizer_are_loaded_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "my-reward-model"
    model = reward_model()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    runner = RewardRunner([str(folder), folder], device="cpu")
    assert runner.names == ["my-reward-model", "my-reward-model_2"]
    scores = runner.score(["p", "p"], ["abc", "d"], [[1], [1]], {"answer": [1, 2]})
    expected = one_by_one(model, [ended(tiny_tokenizer()(text)["input_ids"]) for text in ("pabc", "pd")])
    assert scores.by_name["my-reward-model"] == pytest.approx(expected, abs=1e-5)
    assert scores.by_name["my-reward-model_2"] == scores.by_name["my-reward-model"]


def test_model_without_a_trained_score_head_is_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.config.num_labels = 1
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no trained weights for \['score\.weight'\]"):
        RewardRunner(str(tmp_path))


LABELS = {0: "helpful", 1: "harmless", 2: "honest"}
CHATS = [[{"role": "user", "content": text}] for text in ("hi", "why is that?")]
ANSWERS = [[{"role": "assistant", "content": text}] for text in ("yes", "no idea")]
CHAT_TEXTS = ["<|user|>hi<|end|><|assistant|>yes<|end|>", "<|user|>why is that?<|end|><|assistant|>no idea<|end|>"]


@pytest.mark.parametrize("kind", ["whole", "adapter"])
@pytest.mark.parametrize(
    ("prompts", "completions", "texts"),
    [(["hi ", "why "], ["yes", "no idea"], ["hi yes", "why no idea"]), (CHATS, ANSWERS, CHAT_TEXTS)],
    ids=["texts", "messages"],
)
def test_folder_scores_like_the_model_that_was_saved_in_it(
    kind: str,
    prompts: list[Any],
    completions: list[Any],
    texts: list[str],
    saved_reward_model: Path,
    saved_adapter: tuple[Path, PreTrainedModel],
) -> None:
    folder, model = saved_adapter if kind == "adapter" else (saved_reward_model, reward_model())
    # Not tiny_tokenizer(): transformers makes a Qwen2Tokenizer of what lies beside a Qwen2 model.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = one_by_one(model, [ended(tokenizer(text)["input_ids"]) for text in texts])
    runner = RewardRunner(str(folder))
    assert runner.score(prompts, completions, [[1], [1]], {}).by_name == {
        folder.name: pytest.approx(expected, abs=1e-5)
    }
    assert abs(expected[0] - expected[1]) > 0.01


def test_grpo_takes_the_folder_and_logs_the_name_of_what_is_scored(saved_reward_model: Path, tmp_path: Path) -> None:
    trainer = GRPOTrainer(
        model=tiny_model("qwen2"),
        reward_funcs=[str(saved_reward_model), ModelReward(saved_reward_model, per_token=True)],
        args=GRPOConfig(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            report_to=[],
            max_steps=1,
            logging_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=4,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    whole, per_token = logged["rewards/judge/mean"], logged["rewards/judge[per_token]/mean"]
    assert 1 < abs(whole / per_token) <= 4  # completions of 1 to 4 tokens


OWN_CODE = """
from transformers import Qwen2ForSequenceClassification

class OwnJudge(Qwen2ForSequenceClassification):
    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * 0 + 7
        return found
"""


def test_a_reward_model_given_by_name_gets_the_models_dtype_attention_and_trust(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    model = reward_model()
    model.config.auto_map = {"AutoModelForSequenceClassification": "own.OwnJudge"}
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "own.py").write_text(OWN_CODE)
    tiny_model("qwen2").save_pretrained(tmp_path / "policy")

    def trainer(**options: Any) -> GRPOTrainer:
        return GRPOTrainer(
            model=str(tmp_path / "policy"),
            reward_funcs=str(folder),
            args=GRPOConfig(output_dir=str(tmp_path / "out"), use_cpu=True, report_to=[], **options),
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=tiny_tokenizer(),
        )

    arguments = {"dtype": "bfloat16", "attn_implementation": "eager", "revision": "of-the-policy"}
    (own,) = trainer(trust_remote_code=True, model_init_kwargs=arguments).rewards.models
    assert own.model.dtype == torch.bfloat16
    assert own.model.config._attn_implementation == "eager"
    assert own(["p"], ["abc"]) == [7.0]
    (plain,) = trainer(model_init_kwargs={"low_cpu_mem_usage": True}).rewards.models
    assert type(plain.model).__name__ == "Qwen2ForSequenceClassification"
    assert plain.model.dtype == torch.float32
    with pytest.raises(ConfigError, match=r"model_init_kwargs=\{'dtype': 'bfloat16'\} has no effect"):
        ModelReward(model, tokenizer=tiny_tokenizer(), model_init_kwargs={"dtype": "bfloat16"})


@pytest.mark.parametrize(("head", "column"), [("helpful", 0), ("honest", 2), (1, 1)])
def test_head_chooses_a_label_by_name_or_index_and_stands_in_the_name(head: str | int, column: int) -> None:
    model = reward_model(num_labels=3, id2label=LABELS)
    reward = ModelReward(model, head=head, tokenizer=tiny_tokenizer())
    rows = [ended(tiny_tokenizer()(text)["input_ids"]) for text in ("pabc", "pd")]
    assert reward(["p", "p"], ["abc", "d"]) == pytest.approx(one_by_one(model, rows, column=column), abs=1e-5)
    assert reward.__name__ == f"Qwen2ForSequenceClassification[{LABELS[column]}]"


@pytest.mark.parametrize(
    ("num_labels", "head", "message"),
    [
        pytest.param(3, None, r"num_labels=3.*'helpful', 'harmless', 'honest', or 0 to 2", id="several and no head"),
        pytest.param(3, "kind", r"head='kind'.*has 'helpful', 'harmless', 'honest'", id="unknown name"),
        pytest.param(3, 3, "head=3.*has 'helpful'", id="index too large"),
        pytest.param(3, -1, "head=-1.*has 'helpful'", id="negative index"),
        pytest.param(1, "helpful", "head='helpful' has no effect.*one label", id="name with one label"),
        pytest.param(1, 0, "head=0 has no effect.*one label", id="index with one label"),
    ],
)
def test_head_that_does_not_fit_the_labels_is_refused(num_labels: int, head: str | int | None, message: str) -> None:
    model = reward_model(num_labels=num_labels, id2label={i: LABELS[i] for i in range(num_labels)})
    with pytest.raises(ConfigError, match=message):
        ModelReward(model, head=head, tokenizer=tiny_tokenizer())


def test_label_that_two_heads_share_needs_its_index() -> None:
    model = reward_model(num_labels=2, id2label={0: "good", 1: "good"})
    with pytest.raises(ConfigError, match="no such label, or several"):
        ModelReward(model, head="good", tokenizer=tiny_tokenizer())


def test_several_labels_need_a_head_in_a_trainer_too() -> None:
    with pytest.raises(ConfigError, match="num_labels=2"):
        RewardRunner(reward_model(num_labels=2), processing_classes=tiny_tokenizer())


def test_score_per_token_is_the_score_over_the_number_of_sampled_tokens() -> None:
    model = reward_model()
    whole = ModelReward(model, tokenizer=tiny_tokenizer())
    per_token = ModelReward(model, per_token=True, tokenizer=tiny_tokenizer())
    prompts, completions, ids = ["p", "p", "p"], ["abc", "d", "ef"], [[7] * 5, [7], [7] * 2]
    a, b, c = whole(prompts, completions)
    assert per_token(prompts, completions, ids) == [a / 5, b, c / 2]
    runner = RewardRunner([whole, per_token])
    assert runner.score(prompts, completions, ids, {}).by_name == {
        "Qwen2ForSequenceClassification": [a, b, c],
        "Qwen2ForSequenceClassification[per_token]": [a / 5, b, c / 2],
    }


def test_name_says_both_the_label_and_the_normalization() -> None:
    model = reward_model(num_labels=3, id2label=LABELS)
    reward = ModelReward(model, head=0, per_token=True, tokenizer=tiny_tokenizer())
    assert reward.__name__ == "Qwen2ForSequenceClassification[helpful,per_token]"


@pytest.mark.parametrize("ids", [None, [[1], []], [[1]]], ids=["missing", "empty", "too few"])
def test_score_per_token_needs_the_tokens(ids: list[list[int]] | None) -> None:
    reward = ModelReward(reward_model(), per_token=True, tokenizer=tiny_tokenizer())
    with pytest.raises(RewardError, match="needs completion_ids for each of the 2 completions"):
        reward(["p", "p"], ["a", "b"], ids)


def test_adapter_without_a_score_head_is_refused(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"no trained weights for \['score\.weight'\]"):
        RewardRunner(str(tmp_path / "adapter"))


def test_adapter_with_several_labels_is_refused(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="adapter' cannot be loaded"):
        ModelReward(tmp_path / "adapter", head=1)


def test_adapter_without_its_base_model_is_refused(saved_adapter: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = saved_adapter
    shutil.rmtree(folder.parent / "base")
    with pytest.raises(ConfigError, match="lora-judge' cannot be loaded"):
        RewardRunner(str(folder))


def test_name_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        RewardRunner(str(tmp_path / "nothing"))


def test_instance_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="reward_processing_classes"):
        RewardRunner(reward_model())


def test_tokenizer_without_anything_to_pad_with_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="neither pad_token nor eos_token"):
        RewardRunner(reward_model(), processing_classes=tokenizer)


def test_messages_need_a_chat_template() -> None:
    reward = ModelReward(reward_model(), tokenizer=tiny_tokenizer(chat_template=None))
    with pytest.raises(ConfigError, match="has no chat template"):
        reward([[{"role": "user", "content": "hi"}]], [[{"role": "assistant", "content": "yes"}]])


def test_an_error_of_a_model_is_never_skipped() -> None:
    runner = RewardRunner(reward_model(), processing_classes=tiny_tokenizer(), on_error="skip")
    with pytest.raises(RewardError, match="row 0: 65 tokens"):
        runner.score(["p"], ["x" * 63], [[1]], {})


def test_text_longer_than_the_model_reads_is_refused_not_cut() -> None:
    reward = ModelReward(reward_model(), tokenizer=tiny_tokenizer())
    reward(["p"], ["x" * 62])
    with pytest.raises(RewardError, match=r"row 1: 65 tokens, but the model reads at most 64"):
        reward(["p", "p"], ["x", "x" * 63])


def zero(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


def test_each_reward_has_an_entry_of_tokenizers() -> None:
    with pytest.raises(ConfigError, match="1 entries for 2 rewards"):
        RewardRunner([reward_model(), zero], processing_classes=[None])


@pytest.mark.parametrize(
    ("rewards", "tokenizers", "message"),
    [
        (["model", zero], ["tokenizer", "tokenizer"], "reward_processing_classes[1] has no effect because"),
        (zero, "tokenizer", "reward_processing_classes has no effect because none of reward_funcs is a model"),
        ([zero, zero], ["tokenizer", None], "reward_processing_classes has no effect because none of"),
    ],
)
def test_tokenizers_of_functions_are_ignored_with_a_warning(rewards: Any, tokenizers: Any, message: str) -> None:
    warnings: list[str] = []
    if isinstance(rewards, list):
        rewards = [reward_model() if reward == "model" else reward for reward in rewards]
        tokenizers = [tiny_tokenizer() if entry else None for entry in tokenizers]
    else:
        tokenizers = tiny_tokenizer()
    RewardRunner(rewards, processing_classes=tokenizers, warn=warnings.append)
    (text,) = warnings
    assert text.startswith(message)


def test_one_tokenizer_for_several_models_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"one tokenizer for 2 models, .* Pass a list with one entry for each reward"
    ):
        RewardRunner([reward_model(), reward_model()], processing_classes=tiny_tokenizer())


def test_one_tokenizer_serves_the_only_model() -> None:
    model = reward_model()
    runner = RewardRunner([lambda completions: [0.5] * len(completions), model], processing_classes=tiny_tokenizer())
    assert runner.names == ["<lambda>", "Qwen2ForSequenceClassification"]
    assert runner.score(["p"], ["a"], [[1]], {}).by_name["<lambda>"] == [0.5]


@pytest.mark.parametrize(("batch_size", "sizes"), [(16, [3]), (2, [2, 1])])
def test_at_most_batch_size_completions_are_scored_at_once(batch_size: int, sizes: list[int]) -> None:
    model, seen = reward_model(), []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(len(given["input_ids"])), with_kwargs=True)
    reward = ModelReward(model, tokenizer=tiny_tokenizer(), batch_size=batch_size)
    scores = reward(["1"] * 3, ["2", "34", "567"])
    assert seen == sizes
    assert scores == pytest.approx(ModelReward(model, tokenizer=tiny_tokenizer())(["1"] * 3, ["2", "34", "567"]))
    with pytest.raises(ConfigError, match="batch_size=0"):
        ModelReward(model, tokenizer=tiny_tokenizer(), batch_size=0)


PICTURES = [image(seed=1), image(seed=2, size=(40, 70)), image((255, 0, 0))]
# The shortest text, the first in a batch of similar lengths, is the one without images.
QUESTIONS = ["Which color?", "And these two?", "No", "Is this one red?"]
OWN = [PICTURES[:1], PICTURES[1:], [], PICTURES[2:]]
SIDES = [("red", "blue or green"), ("yes", "no"), ("The", "is"), ("a", "b c d")]


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def trained_scores(judge: Any, processor: Any) -> list[float]:
    """[2 P] scores as the trainer computes them, of the chosen and the rejected side of each question."""
    rows = [
        {"prompt": asked(question), "chosen": said(good), "rejected": said(bad), "images": own}
        for question, (good, bad), own in zip(QUESTIONS, SIDES, OWN, strict=True)
    ]
    prepared = prepare_reward_dataset(Dataset.from_list(rows), processor, max_length=None, invalid_rows="error")
    reader = ImageReader(processor)
    batch = reward_batch([reader.attach(row) for row in prepared], padding_id=processor.tokenizer.pad_token_id)
    with torch.no_grad():
        return sequence_scores(judge, batch, plan="padded").squeeze(1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_and_without_images_score_as_in_training(family: str) -> None:
    judge, processor = tiny_vision_judge(family)
    tokenizer = processor.tokenizer
    # A tokenizer may begin a text with a token. What a template has rendered has it already.
    start = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{start[0]} $A", special_tokens=[start])
    judge.config.get_text_config().pad_token_id = None  # the tokenizer knows it
    expected = trained_scores(judge, processor)
    assert len({round(score, 3) for score in expected}) == len(expected)
    runner = RewardRunner(judge, processing_classes=processor)
    prompts = [asked(question) for question in QUESTIONS for _ in range(2)]
    stored = [[{"bytes": file_bytes(one), "path": None} for one in own] for own in OWN for _ in range(2)]
    completions = [said(text) for pair in SIDES for text in pair]
    scores = runner.score(prompts, completions, [[1]] * 8, {"images": stored}).by_name[runner.names[0]]
    assert scores == pytest.approx(expected, abs=1e-4)


def test_images_may_stand_in_the_messages() -> None:
    judge, processor = tiny_vision_judge("llava")
    reward = ModelReward(judge, tokenizer=processor)
    block = {"type": "image", "image": {"bytes": file_bytes(PICTURES[0]), "path": None}}
    prompt = [{"role": "user", "content": [block, {"type": "text", "text": "Which color?"}]}]
    apart = reward([asked("Which color?")], [said("red")], images=[PICTURES[:1]])
    assert reward([prompt], [said("red")]) == pytest.approx(apart, abs=1e-6)
    assert reward([asked("Which color?")], [said("red")]) != pytest.approx(apart, abs=1e-3)


def test_a_model_of_text_reads_the_text_of_prompts_with_images() -> None:
    reward = ModelReward(reward_model(), tokenizer=tiny_tokenizer())
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
    assert reward([prompt], [said("yes")], images=[PICTURES[:1]]) == reward([asked("hi")], [said("yes")])


def test_what_cannot_be_scored_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    judge, processor = tiny_vision_judge("llava")
    reward = ModelReward(judge, tokenizer=processor)
    with pytest.raises(RewardError, match="a prompt that is a text has 1 images"):
        reward(["hi"], ["yes"], images=[PICTURES[:1]])
    judge.config.text_config.max_position_embeddings = 24
    with pytest.raises(RewardError, match=r"row 1: 2[0-9] tokens, but the model reads at most 24"):
        reward([asked("a")] * 2, [said("a"), said("bcd")], images=[[], PICTURES[:1]])
    monkeypatch.setattr(rewards_model, "is_sharded", lambda model: True)
    with pytest.raises(ConfigError, match="reads images, and its weights are partitioned"):
        reward([asked("a")], [said("b")])
    judge.save_pretrained(tmp_path / "judge")
    forget_classifiers(monkeypatch)
    with pytest.raises(ConfigError, match=r"its processor cannot be loaded: .*or its tokenizer to score text alone"):
        ModelReward(tmp_path / "judge")


def test_the_first_tokens_of_a_long_text_are_removed() -> None:
    model, tokenizer = reward_model(max_position_embeddings=8), tiny_tokenizer()
    text = "one two three four five six seven eight nine ten"
    ids = RowReader("m", tokenizer).row(text, " end", None).token_ids
    assert len(ids) > 8
    score = ModelReward(model, tokenizer=tokenizer, max_length=5)
    assert score([text, "a"], [" end", " b"])[0] == pytest.approx(one_by_one(model, [ids[-5:]])[0], abs=1e-6)
    with pytest.raises(RewardError, match="set max_length"):
        ModelReward(model, tokenizer=tokenizer)([text], [" end"])


def test_options_of_models_reach_those_that_are_given_by_name_or_weights() -> None:
    given = {"batch_size": 3, "head": 1, "per_token": False, "max_length": 7}
    runner = RewardRunner(reward_model(num_labels=2), processing_classes=tiny_tokenizer(), model_kwargs=given)
    (reward,) = runner.models
    assert (reward.batch_size, reward._max_length, reward._column) == (3, 7, 1)
    with pytest.raises(ConfigError, match=r"reward_model_kwargs=.* has no effect: no reward is a model"):
        RewardRunner(lambda completions: [0.0], model_kwargs=given)
