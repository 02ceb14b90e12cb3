"""What constructors take, and what they refuse."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
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
    PrefrlError,
    RewardError,
    SFTConfig,
    SFTTrainer,
)
from prefrl.options.names import ARGUMENTS
from prefrl.registry import REGISTRY
from prefrl.rewards import confinement
from tests.assets import tiny_model, tiny_tokenizer
from tests.contract.cases import ONLINE, dataset_of, make_trainer, model_of, ragged_reward
from tests.patience import PATIENCE

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
    more: dict[str, Any] = {"reward_funcs": ragged_reward} if algorithm in ONLINE else {}
    more |= {"teacher_model": tiny_model(seed=1)} if algorithm == "distillation" else {}
    trainer = REGISTRY[algorithm].load_trainer()(
        model_of(algorithm), args=plain, processing_class=tokenizer, train_dataset=dataset_of(algorithm), **more
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


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ([{"prompt": "a", "completion": "b"}], {}, r"train_dataset is a list: .*Dataset\.from_list"),
        ("a.jsonl", {}, r"train_dataset is a str: .*load_dataset\('json', data_files='a.jsonl', split='train'\)"),
        ("org/data", {}, r"train_dataset is a str: .*load_dataset\('org/data', split='train'\)"),
        (dataset_of("sft"), {"eval_strategy": "epoch"}, "eval_strategy='epoch' with eval_dataset=None: "),
    ],
    ids=["list", "file", "name", "nothing to evaluate on"],
)
def test_datasets_are_looked_at_before_the_model_is_loaded(
    dataset: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    with pytest.raises(PrefrlError, match=message):
        SFTTrainer("no/such-model", config, train_dataset=dataset)


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


@pytest.mark.parametrize("streams", [False, True])
def test_a_formatting_func_that_raises_names_the_row(
    streams: bool, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows: Any = Dataset.from_list([{"question": "a b"}, {"question": None}])
    rows = rows.to_iterable_dataset() if streams else rows
    options = {"processing_class": tokenizer, "formatting_func": lambda row: row["question"] + "?"}
    args = config_of("sft", tmp_path)
    args.max_steps = 1
    with pytest.raises(
        DataError, match=r"formatting_func raised TypeError: .*, for row 1 of the dataset\. Correct it"
    ):
        SFTTrainer(tiny_model(), args, None, rows, **options).train()


@pytest.mark.parametrize("algorithm", ["sft", "distillation"])
def test_a_function_of_rows_that_was_edited_is_called_again(
    algorithm: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset_of("sft").to_parquet(tmp_path / "rows.parquet")
    found = []
    for version in ("Old", "New"):
        module: Any = ModuleType("functions_of_rows")  # by which, with its name, datasets knows the function
        exec(f"def text_of(row): return '{version} ' + row['prompt']", module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        rows: Any = Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
        if algorithm == "sft":
            config = config_of("sft", tmp_path)
            trainer: Any = SFTTrainer(
                tiny_model(), config, None, rows, processing_class=tokenizer, formatting_func=module.text_of
            )
        else:
            trainer = make_trainer("distillation", tmp_path, train_dataset=rows, teacher_prompt=module.text_of)
        column = {"sft": "input_ids", "distillation": "teacher_prompt_ids"}[algorithm]
        found.append(tokenizer.decode(trainer.train_dataset[0][column][:4]))
    assert found == ["Old ", "New "]


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


def grpo(
    tmp_path: Path,
    *,
    dataset: Any = None,
    reward: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> GRPOTrainer:
    config = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        num_generations=4,
        max_completion_length=4,
        max_steps=1,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    return GRPOTrainer(
        tiny_model(),
        reward or (lambda completions, **_: [0.0] * len(completions)),
        config,
        Dataset.from_list([{"prompt": "one"}, {"prompt": "two, three"}]) if dataset is None else dataset,
        processing_class=tokenizer or tiny_tokenizer(),
    )


def sft(tmp_path: Path, dataset: Any, **options: Any) -> SFTTrainer:
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    return SFTTrainer(tiny_model(), config, train_dataset=dataset, processing_class=tiny_tokenizer())


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_several_splits_are_no_dataset_to_train_on(tmp_path: Path, algorithm: str) -> None:
    splits = DatasetDict({"train": dataset_of(algorithm), "test": dataset_of(algorithm, 4)})
    message = r"train_dataset is a DatasetDict with the splits 'train', 'test': .* train_dataset=ds\['train'\]"
    with pytest.raises(DataError, match=message):
        make_trainer(algorithm, tmp_path, train_dataset=splits)
    with pytest.raises(DataError, match=r"dict with the splits 'a': .*ds\['a'\]"):
        make_trainer(algorithm, tmp_path, train_dataset={"a": dataset_of(algorithm)})


def test_several_splits_are_evaluated_by_name(tmp_path: Path) -> None:
    splits = DatasetDict({"easy": dataset_of("sft", 4), "hard": dataset_of("sft", 6)})
    trainer = make_trainer("sft", tmp_path, eval_dataset=splits, eval_strategy="steps", eval_steps=1)
    trainer.train()
    logged = {name for logs in trainer.state.log_history for name in logs}
    assert {"eval_easy_loss", "eval_hard_loss"} <= logged
    with pytest.raises(DataError, match=r"eval_dataset\['x'\] is a DatasetDict"):
        trainer.evaluate({"x": splits})


def needs_column(completions: list[str], answer: list[str]) -> list[float]:
    return [1.0] * len(completions)


DATA_CASES: list[Any] = [
    pytest.param({"dataset": Dataset.from_list([{"promt": "a"}])}, DataError, r"prompt.*promt", id="missing prompt"),
    pytest.param({"dataset": Dataset.from_dict({"prompt": []})}, DataError, "0 rows", id="empty dataset"),
    pytest.param({"dataset": [{"prompt": "a"}]}, DataError, "Dataset", id="list"),
    pytest.param({"dataset": Dataset.from_list([{"prompt": "a"}])}, DataError, "1 prompts.*needs 2", id="too few"),
    pytest.param({"dataset": Dataset.from_list([{"prompt": "a"}, {"prompt": None}])}, DataError, "1", id="None"),
    pytest.param({"dataset": Dataset.from_list([{"prompt": "a"}, {"prompt": ""}])}, DataError, "1", id="empty prompt"),
    pytest.param(
        {"truncation_mode": "error", "max_prompt_length": 5}, DataError, "row 1.*10.*5", id="over-long prompt"
    ),
    pytest.param({"reward": needs_column}, ConfigError, "needs_column.*answer", id="missing reward column"),
    pytest.param({"reward": "no/such-model-anywhere"}, PrefrlError, "no/such-model-anywhere", id="reward model"),
    pytest.param({"reward": 3}, ConfigError, "reward_funcs=int: must be", id="reward of another kind"),
    pytest.param({"reward_weights": [1.0, 2.0]}, ConfigError, "reward_weights", id="weights"),
]


@pytest.mark.parametrize(("given", "error", "message"), DATA_CASES)
def test_refused_before_training(given: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        grpo(tmp_path, **given)


def _raises(**_: Any) -> list[float]:
    raise KeyError("answer")


def _sleeps(**_: Any) -> list[float]:
    time.sleep(8)  # shorter than until its process would be ended
    return []


async def _sleeps_async(**_: Any) -> list[float]:
    await asyncio.sleep(600)
    return []


def _returns(value: Any) -> Callable[..., Any]:
    def reward(completions: list[str], **_: Any) -> Any:
        return value(completions)

    return reward


REWARD_CASES: list[Any] = [
    pytest.param(_returns(lambda c: [1.0]), r"reward.*1.*8", id="wrong length"),
    pytest.param(_returns(lambda c: [0.0, float("nan")] + [0.0] * 6), r"reward.*1.*nan", id="nan"),
    pytest.param(_returns(lambda c: [float("inf")] * 8), r"reward.*0.*inf", id="inf"),
    pytest.param(_returns(lambda c: None), "reward.*None", id="None"),
    pytest.param(_returns(lambda c: 1.0), "reward.*1.0", id="scalar"),
    pytest.param(_returns(lambda c: ["good"] * 8), "reward.*good", id="text"),
    pytest.param(_raises, "_raises.*KeyError.*answer", id="exception"),
    pytest.param(_sleeps, "_sleeps.*0.2", id="time-out"),
    pytest.param(_sleeps_async, "_sleeps_async.*0.2", id="async time-out"),
]


@pytest.mark.parametrize(("reward", "message"), REWARD_CASES)
def test_bad_reward_stops_the_run(reward: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "_GRACE_S", 10 * PATIENCE)  # a late one must not end the process that tests
    is_late = reward in (_sleeps, _sleeps_async)
    trainer = grpo(tmp_path, reward=reward, reward_timeout=0.2 if is_late else PATIENCE)
    with pytest.raises(RewardError, match=f"(?s){message}"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_run_without_a_signal_stops_where_it_was_asked_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = grpo(tmp_path, reward=_returns(lambda c: [1.0] * 8), stop_without_signal=2)
    trainer.args.max_steps = 4
    with pytest.raises(RewardError, match="stop_without_signal=2"):
        trainer.train()
    assert trainer.state.global_step == 1
    grpo(tmp_path, reward=_returns(lambda c: [None] * 8)).train()
    assert "got None from every reward" in caplog.text


SFT_CASES: list[Any] = [
    pytest.param(Dataset.from_list([{"txt": "a"}]), {}, DataError, "text.*txt", id="missing column"),
    pytest.param(Dataset.from_dict({"text": []}), {}, DataError, "0 rows", id="empty"),
    pytest.param(
        Dataset.from_list([{"text": "abc"}, {"text": 3 * "abc"}]),
        {"max_length": 5, "truncation_mode": "error"},
        DataError,
        "row 1.*5",
        id="over-long",
    ),
    pytest.param(Dataset.from_list([{"text": None}]), {}, DataError, "0", id="None"),
    pytest.param(
        Dataset.from_list([{"messages": [{"role": "usr", "content": "hi"}]}]), {}, DataError, "usr.*user", id="role"
    ),
    pytest.param(
        Dataset.from_list([{"text": "hello"}]),
        {"assistant_only_loss": True},
        ConfigError,
        "assistant_only_loss",
        id="assistant only on text",
    ),
    pytest.param(
        Dataset.from_list([{"prompt": "a" * 30, "completion": "b"}]),
        {"max_length": 8},
        DataError,
        "max_length",
        id="nothing to learn",
    ),
]


@pytest.mark.parametrize(("dataset", "options", "error", "message"), SFT_CASES)
def test_sft_refuses(
    dataset: Any, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        sft(tmp_path, dataset, **options)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_trainer_without_a_dataset_is_refused(algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_dataset=None: .* For evaluation alone, pass eval_dataset"):
        make_trainer(algorithm, tmp_path, train_dataset=None)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo"])
def test_a_dataset_with_a_transform_is_refused(algorithm: str, tmp_path: Path) -> None:
    dataset = dataset_of(algorithm).with_transform(lambda batch: batch)
    with pytest.raises(
        DataError, match=r"train_dataset has a transform .* Apply it with map\(\), or .*with_format\(None"
    ):
        make_trainer(algorithm, tmp_path, train_dataset=dataset)
    with pytest.raises(DataError, match=r"eval_dataset\['a'\] has a transform"):
        make_trainer(algorithm, tmp_path, eval_dataset={"a": dataset})


def test_training_without_a_dataset_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, train_dataset=None, eval_dataset=dataset_of("sft", 2))
    with pytest.raises(ConfigError, match="train_dataset=None"):
        trainer.train()


def test_evaluation_without_a_dataset_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path)
    with pytest.raises(ConfigError, match="eval_dataset=None"):
        trainer.evaluate()
