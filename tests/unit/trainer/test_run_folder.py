"""What a run writes and resumes from: its identity, its last checkpoint, its secrets, its trackers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
from datasets import Dataset
from transformers import TrainerCallback
from transformers.integrations import WandbCallback

from prefrl import ConfigError, GRPOConfig, SFTConfig, SFTTrainer
from prefrl.errors import DataError, GenerationError, RewardError
from prefrl.models.load import load_model
from prefrl.trainer.checkpointing import saved_at_errors
from prefrl.trainer.facts import model_fingerprint
from tests.assets import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from tests.contract.cases import dataset_of, make_trainer, model_of

TURNS = Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}]}] * 24)
LOUD = tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("<|end|>", "!<|end|>"))


@pytest.mark.parametrize(
    ("algorithm", "options", "names"),
    [
        ("sft", {"seed": 7}, ["seed"]),
        ("sft", {"optim": "adamw_torch", "weight_decay": 0.1}, ["optim", "weight_decay"]),
        ("sft", {"max_grad_norm": 1.0}, ["max_grad_norm"]),
        ("sft", {"lr_scheduler_type": "linear"}, ["lr_scheduler_type", "max_steps", "num_train_epochs"]),
        ("sft", {"model": tiny_model(hidden_size=64)}, ["model"]),
        ("sft", {"peft_config": peft.LoraConfig(target_modules=["q_proj"])}, ["model"]),
        ("sft", {"train_dataset": dataset_of("sft").select(range(23, -1, -1))}, ["data"]),
        ("grpo", {"train_dataset": TURNS, "processing_class": LOUD}, ["data"]),
        ("grpo", {"temperature": 0.5}, ["temperature"]),
        ("grpo", {"num_generations": 2}, ["num_generations", "prompts_per_generation"]),
        ("grpo", {"num_iterations": 2}, ["num_iterations", "steps_of_a_generation"]),
        ("dpo", {"loss_type": "ipo"}, ["loss_type"]),
        ("ppo", {"critic_learning_rate": 0.2}, ["critic_learning_rate"]),
    ],
    ids=str,
)
def test_what_decides_the_updates_is_in_the_identity(
    algorithm: str, options: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    usual = {"train_dataset": TURNS} if options.get("train_dataset") is TURNS else {}
    # An adapter changes the model that it is put into.
    before, after = (
        make_trainer(algorithm, tmp_path, **{"model": model_of(algorithm), **given}).decisive()
        for given in (usual, options)
    )
    assert [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)] == names


def test_what_does_not_decide_them_is_not(tmp_path: Path) -> None:
    free = {
        "save_steps": 7,
        "logging_steps": 3,
        "max_steps": 9,
        "max_tokens_per_micro_batch": 60,
        "save_total_limit": 2,
    }
    cut = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    assert make_trainer("sft", tmp_path).decisive() == make_trainer("sft", tmp_path, **free, **cut).decisive()


def test_special_tokens_that_the_loop_aligns_do_not_decide_them() -> None:
    # HuggingFace's loop gives the model the tokenizer's ids when training begins, and so after the identity was read.
    aligned = tiny_model(eos_token_id=7, pad_token_id=9, bos_token_id=3)
    assert model_fingerprint(aligned) == model_fingerprint(tiny_model())


@pytest.mark.parametrize(("error", "num_saved"), [(RewardError, 1), (DataError, 1), (GenerationError, 0)])
def test_errors_of_rewards_and_rows_they_cannot_use_lose_no_step(
    error: type[Exception], num_saved: int, tmp_path: Path
) -> None:
    saved: list[Any] = []
    run: Any = SimpleNamespace(
        args=SimpleNamespace(save_strategy="steps"),
        state=SimpleNamespace(global_step=3),
        run_folder=SimpleNamespace(path=tmp_path, wait=lambda: saved.append("waited")),
        save_checkpoint=lambda: saved.append("the model"),
    )
    with pytest.raises(error), saved_at_errors(run):
        raise error
    assert saved == ["the model", "waited"] * num_saved


SECRET = "open-sesame"
LOGIN = f"http://user:{SECRET}@proxy:1"


@dataclass
class OwnConfig(SFTConfig):
    """A user's subclass."""

    url: str = ""


@pytest.mark.parametrize("config_class", [SFTConfig, GRPOConfig, OwnConfig])
def test_no_form_of_a_config_shows_secrets(config_class: type[SFTConfig], tmp_path: Path) -> None:
    extra = {"url": LOGIN} if config_class is OwnConfig else {}
    config = config_class(
        output_dir=str(tmp_path),
        hub_token=SECRET,
        model_init_kwargs={"token": SECRET, "proxies": {"http": LOGIN}},
        run_name="shown",
        use_cpu=True,
        **extra,
    )
    forms = [repr(config), str(config), config.to_json_string(), str(config.to_sanitized_dict())]
    for form in forms:
        assert SECRET not in form
        assert "shown" in form
    assert config.hub_token == SECRET
    assert config.model_init_kwargs is not None
    assert config.model_init_kwargs["token"] == SECRET


def test_nothing_that_a_run_writes_or_prints_has_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    policy = tiny_model()
    policy.save_pretrained(tmp_path / "policy")
    config = SFTConfig(
        output_dir=str(tmp_path / "out"),
        hub_token=SECRET,
        model_init_kwargs={"token": SECRET},
        max_steps=1,
        logging_steps=1,
        save_steps=1,
        use_cpu=True,
        report_to="none",
    )
    rows = Dataset.from_list([{"text": "a b c"}] * 8)
    trainer = SFTTrainer(str(tmp_path / "policy"), config, train_dataset=rows, processing_class=tiny_tokenizer())
    trainer.train()
    trainer.save_model()
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"README.md", "trainer_state.json"} <= {path.name for path in written}
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    printed = capfd.readouterr()
    assert "loss" in printed.out
    assert SECRET not in printed.out + printed.err


def test_an_error_that_quotes_the_options_has_no_secrets() -> None:
    with pytest.raises(ConfigError, match=r"model_init_kwargs=.* has no effect") as error:
        load_model(tiny_model(), model_init_kwargs={"token": SECRET})
    assert SECRET not in str(error.value)
    with pytest.raises(ConfigError, match="vllm_server_base_url") as error:
        GRPOConfig(use_cpu=True, use_vllm=True, vllm_server_base_url=[f"ftp://user:{SECRET}@host"])
    assert SECRET not in str(error.value)


TOKEN = "hf_abcdefghijklmnopqrstuvwx"


class Own(WandbCallback):
    """A user's callback, although it inherits from a tracker."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_log(self, *_: Any, **__: Any) -> None:
        self.heard.append("log")
        raise RuntimeError("mine")

    def on_train_begin(self, *_: Any, **__: Any) -> None: ...

    on_train_end = on_train_begin


class Tracker(Own):
    """As if it were one of HuggingFace's own."""


Tracker.__module__ = WandbCallback.__module__


class Listener(TrainerCallback):
    """Behind a tracker that fails, others still hear of everything."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_log(self, *_: Any, **__: Any) -> None:
        self.heard.append("log")


def test_a_tracker_that_fails_is_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker, listener = Tracker(), Listener()
    trainer = make_trainer("sft", tmp_path, max_steps=3, callbacks=[tracker, listener])
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 3
    assert tracker.heard == ["log"]
    assert listener.heard == ["log"] * 4  # three steps, and the summary
    told = [record.getMessage() for record in caplog.records if "Tracker" in record.getMessage()]
    assert told == ["Tracker failed and is disabled for the rest of the run: RuntimeError: mine"]


def test_a_tracker_may_fail_as_training_begins_and_tells_no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused(Tracker):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            raise OSError(f"no network for https://me:{TOKEN}@host")

    Refused.__module__ = WandbCallback.__module__
    tracker = Refused()
    make_trainer("sft", tmp_path, callbacks=[tracker]).train()
    assert tracker.heard == []
    assert "Refused failed" in caplog.text
    assert TOKEN not in caplog.text


def test_a_users_callback_that_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"):
        make_trainer("sft", tmp_path, callbacks=[Own()]).train()
