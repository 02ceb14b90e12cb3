"""Arguments of constructors: TRL's order works, and what stands in the wrong place is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

from prefrl import (
    BCOTrainer,
    ConfigError,
    DataError,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOTrainer,
    PPOTrainer,
    SFTConfig,
    SFTTrainer,
)
from prefrl.options.names import ARGUMENTS
from prefrl.registry import REGISTRY
from tests.assets import tiny_model, tiny_tokenizer
from tests.contract.cases import ONLINE, dataset_of, model_of, ragged_reward

DPO_ORDER = (
    "DPOTrainer(model, ref_model, args, data_collator, train_dataset, eval_dataset, processing_class, "
    "compute_metrics, callbacks, optimizers, quantization_config, peft_config)"
)
GRPO_ORDER = "GRPOTrainer(model, reward_funcs, args, train_dataset, eval_dataset, processing_class"


def config_of(algorithm: str, tmp_path: Path) -> Any:
    return REGISTRY[algorithm].load_config()(output_dir=str(tmp_path), use_cpu=True, report_to="none")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


Call = Callable[[PreTrainedModel, Any, Dataset], Any]
CASES: list[Any] = [
    pytest.param("dpo", lambda m, c, ds: DPOTrainer(m, c, ds), ["ref_model=DPOConfig: must be", DPO_ORDER], id="dpo"),
    pytest.param("dpo", lambda m, c, ds: DPOTrainer(m, c), ["ref_model=DPOConfig", DPO_ORDER], id="dpo without data"),
    pytest.param("kto", lambda m, c, ds: KTOTrainer(m, c, ds), ["ref_model=KTOConfig"], id="kto"),
    pytest.param("bco", lambda m, c, ds: BCOTrainer(m, c, ds), ["ref_model=BCOConfig"], id="bco"),
    pytest.param("sft", lambda m, c, ds: SFTTrainer(c, m), ["model=SFTConfig: must be a name, a path"], id="swapped"),
    pytest.param(
        "sft", lambda m, c, ds: SFTTrainer(m, ds), ["args=Dataset: must be SFTConfig(...) or None"], id="data"
    ),
    pytest.param("sft", lambda m, c, ds: SFTTrainer(m, c, ds), ["data_collator=Dataset: must be None"], id="collator"),
    pytest.param(
        "grpo",
        lambda m, c, ds: GRPOTrainer(m, c, ragged_reward),
        ["reward_funcs=GRPOConfig: must be a reward", GRPO_ORDER],
        id="grpo: config and reward",
    ),
    pytest.param(
        "grpo",
        lambda m, c, ds: GRPOTrainer(m, ragged_reward, ragged_reward, ds),
        ["args=function: must be GRPOConfig(...)", GRPO_ORDER],
        id="grpo: reward as config",
    ),
    pytest.param("grpo", lambda m, c, ds: GRPOTrainer(m, None, c), ["reward_funcs=None: must be a"], id="no reward"),
    pytest.param("sft", lambda m, c, ds: GRPOTrainer(m, ragged_reward, c), ["args=SFTConfig"], id="other config"),
    pytest.param("sft", lambda m, c, ds: PPOTrainer(m, ragged_reward, c), ["args=SFTConfig", "PPOTrainer("], id="ppo"),
    pytest.param(
        "sft",
        lambda m, c, ds: SFTTrainer(m, c, peft_config={"r": 8}),
        ["peft_config=dict: must be"],
        id="peft",
    ),
    pytest.param(
        "sft",
        lambda m, c, ds: SFTTrainer(m, c, callbacks=print),
        ["callbacks=builtin_function"],
        id="callback",
    ),
]


@pytest.mark.parametrize(("algorithm", "call", "parts"), CASES)
def test_an_argument_in_the_wrong_place_is_named_with_the_order(
    algorithm: str, call: Call, parts: list[str], model: PreTrainedModel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        call(model, config_of(algorithm, tmp_path), dataset_of(algorithm))
    assert all(part in str(caught.value) for part in parts), caught.value


NAMES: list[Any] = [
    pytest.param(SFTTrainer, {"tokenizer": None}, "'tokenizer'. It is processing_class here.", id="of earlier TRL"),
    pytest.param(GRPOTrainer, {"reward_model": "m"}, "'reward_model'. It is reward_funcs here.", id="reward model"),
    pytest.param(PPOTrainer, {"policy": "m"}, "'policy'. It is model here.", id="policy"),
    pytest.param(GRPOTrainer, {"model_init": print}, "'model_init'. Instead, load the model and", id="init"),
    pytest.param(GRPOTrainer, {"train_datset": None}, "Did you mean 'train_dataset'?", id="typo"),
    pytest.param(DPOTrainer, {"beta": 0.1}, "'beta'. Known: args, callbacks, ", id="option of the config"),
]


@pytest.mark.parametrize(("trainer", "arguments", "message"), NAMES)
def test_an_unknown_argument_is_named_with_the_one_that_is_meant(
    trainer: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{trainer.__name__} has no argument ") as caught:
        trainer("m", **arguments)
    assert message in str(caught.value)


def test_a_subclass_may_have_arguments_of_its_own(model: PreTrainedModel, tmp_path: Path) -> None:
    class Own(SFTTrainer):
        def __init__(self, *positional: Any, **arguments: Any) -> None:
            self.own = arguments.pop("own")
            super().__init__(*positional, **arguments)

    data, tokenizer = dataset_of("sft"), tiny_tokenizer()
    assert Own(model, config_of("sft", tmp_path), train_dataset=data, processing_class=tokenizer, own=3).own == 3


@pytest.mark.parametrize("algorithm", REGISTRY)
def test_plain_training_arguments_give_all_the_options_that_they_have(
    algorithm: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    plain = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", learning_rate=1e-4, hub_token="of mine", eval_steps=3
    )
    rewards = {"reward_funcs": ragged_reward} if algorithm in ONLINE else {}
    trainer = REGISTRY[algorithm].load_trainer()(
        model_of(algorithm), args=plain, processing_class=tokenizer, train_dataset=dataset_of(algorithm), **rewards
    )
    assert type(trainer.args) is REGISTRY[algorithm].load_config()
    assert (trainer.args.learning_rate, trainer.args.hub_token, trainer.args.eval_steps) == (1e-4, "of mine", 3)
    assert trainer.args.logging_steps == 500  # HuggingFace's default, not the config's


def test_options_that_a_conversion_would_lose_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    arguments: Any = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, generation_num_beams=4)
    with pytest.raises(
        ConfigError, match="Seq2SeqTrainingArguments: generation_num_beams=4 is not an option of SFTConfig"
    ):
        SFTTrainer(model, arguments, train_dataset=dataset_of("sft"))


def test_a_list_of_rows_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    rows: Any = [{"prompt": "a", "completion": "b"}]
    with pytest.raises(DataError, match=r"train_dataset is a list: .*Dataset\.from_list"):
        SFTTrainer("no/such-model", config_of("sft", tmp_path), train_dataset=rows)


# What follows processing_class in the constructors of TRL 1.16, up to callbacks, and how many follow optimizers.
TRL_ORDER = {
    "sft": (2, ["optimizer_cls_and_kwargs", "preprocess_logits_for_metrics", "quantization_config", "peft_config"]),
    "dpo": (1, ["quantization_config", "peft_config"]),
    "kto": (1, ["quantization_config", "peft_config"]),
    "reward": (1, ["optimizer_cls_and_kwargs", "preprocess_logits_for_metrics", "quantization_config", "peft_config"]),
    "orpo": (1, ["preprocess_logits_for_metrics", "peft_config"]),
    "cpo": (1, ["preprocess_logits_for_metrics", "peft_config"]),
    "grpo": (1, ["quantization_config", "peft_config"]),
    "rloo": (1, ["quantization_config", "peft_config"]),
}


@pytest.mark.parametrize("algorithm", TRL_ORDER)
def test_the_order_of_trl_works(algorithm: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    config, train, test = config_of(algorithm, tmp_path), dataset_of(algorithm), dataset_of(algorithm, 4)
    if algorithm in ONLINE:
        before: list[Any] = [ragged_reward, config]
    else:
        before = [*([None] if algorithm in ("dpo", "kto") else []), config, None]
    num_between, last = TRL_ORDER[algorithm]
    callback, adapter = PrinterCallback(), LoraConfig(r=2, target_modules=["q_proj"])
    after = [*[None] * num_between, [callback], (None, None), *[None] * (len(last) - 1), adapter]
    trainer = REGISTRY[algorithm].load_trainer()(model_of(algorithm), *before, train, test, tokenizer, *after)
    assert trainer.args is config
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (len(train), len(test))
    assert trainer.processing_class is tokenizer
    assert callback in trainer.callback_handler.callbacks
    assert trainer.policy.peft_config["default"].r == 2


def test_formatting_func_is_the_last_of_sft_by_position(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    data = Dataset.from_list([{"question": "a b"}] * 4)
    rest: list[Any] = [*[None] * 3, (None, None), *[None] * 4, lambda row: row["question"]]
    trainer = SFTTrainer(model, config_of("sft", tmp_path), None, data, None, tokenizer, *rest)
    assert len(trainer.train_dataset) == 4


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_trl_that_must_be_none_says_what_to_do(
    name: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    algorithm, first = ("grpo", {"reward_funcs": ragged_reward}) if name == "rollout_func" else ("sft", {})
    trainer = REGISTRY[algorithm].load_trainer()
    with pytest.raises(ConfigError, match=re.escape(f"{name}=function: must be None: {ARGUMENTS[name]}.")):
        trainer(model, args=config_of(algorithm, tmp_path), **first, **{name: ragged_reward})


def test_an_argument_given_twice_or_too_many_are_errors(model: PreTrainedModel, tmp_path: Path) -> None:
    config, data = config_of("sft", tmp_path), dataset_of("sft")
    message = r"train_dataset is passed both by position and by name: .*SFTTrainer\(model, args"
    with pytest.raises(TypeError, match=message):
        SFTTrainer(model, config, None, data, train_dataset=data)
    with pytest.raises(TypeError, match=re.escape("too many positional arguments: the order is SFTTrainer(model,")):
        SFTTrainer(model, config, None, data, data, *[None] * 11)


def test_a_subclass_of_the_user_may_have_another_constructor(model: PreTrainedModel, tmp_path: Path) -> None:
    class Mine(DPOTrainer):
        def __init__(self, *everything: Any, **more: Any) -> None:
            super().__init__(*everything, **more)

    config: Any = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match=re.escape(DPO_ORDER)):
        Mine(model, None, config)


def test_a_config_may_be_a_subclass(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    class MyConfig(SFTConfig):
        pass

    class MyPairs(DPOConfig):
        pass

    config = MyConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert SFTTrainer(tiny_model(), config, None, dataset_of("sft", 2), None, tokenizer).args is config
    with pytest.raises(ConfigError, match="args=MyPairs"):
        SFTTrainer(tiny_model(), MyPairs(output_dir=str(tmp_path), use_cpu=True))  # type: ignore[arg-type]
