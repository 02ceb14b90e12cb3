"""A run does not depend on the Hub, uploads the model alone, and writes a card that is text."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects

from prefrl import GRPOConfig
from prefrl.errors import ConfigError, HubError
from prefrl.trainer.features.hub import Hub, is_refusal
from prefrl.trainer.model_card import RunFacts, write_model_card
from tests.contract.cases import make_trainer

SECRET = "hf_abcdefghijklmnopqrstuvwx"
MODEL = {"README.md", "config.json", "generation_config.json", "model.safetensors", "training_args.json"}
MODEL |= {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
PUSHING = {"push_to_hub": True, "hub_model_id": "me/model", "hub_token": SECRET, "save_strategy": "steps"}


class StandIn:
    """The Hub, which can be reached or not. Notes the files that it is sent, by message."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_there = True
        self.tokens: set[str] = set()
        self.sent: dict[str, set[str]] = {}
        monkeypatch.setattr(HfApi, "create_repo", lambda _, name, **options: self.create_repo(name, **options))
        monkeypatch.setattr(HfApi, "upload_folder", lambda _, **options: self.upload_folder(**options))

    def create_repo(self, name: str, *, token: str, private: Any, exist_ok: bool) -> Any:
        self.check(token)

        class Url:
            repo_id = name

        return Url

    def check(self, token: str) -> None:
        self.tokens.add(token)
        if not self.is_there:
            raise ConnectionError(f"no route to https://user:{token}@hub")

    def upload_folder(self, *, run_as_future: bool, **options: Any) -> Any:
        upload: Future[Any] = Future()
        try:
            upload.set_result(self.upload(**options))
        except ConnectionError as error:
            upload.set_exception(error)
        return upload if run_as_future else upload.result()

    def upload(self, *, folder_path: Path, token: str, path_in_repo: str = "", **options: Any) -> None:
        self.check(token)
        patterns = {name: options[name] for name in ("allow_patterns", "ignore_patterns") if name in options}
        files = [p.relative_to(folder_path).as_posix() for p in Path(folder_path).rglob("*") if p.is_file()]
        self.sent[options["commit_message"]] = {
            Path(path_in_repo, p).as_posix() for p in filter_repo_objects(files, **patterns)
        }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def test_training_goes_on_without_the_hub_and_only_the_push_at_the_end_is_an_error(
    hub: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.is_there = False
    trainer = make_trainer("sft", tmp_path, max_steps=2, save_steps=1, **PUSHING)
    assert "push_to_hub=True: the repository 'me/model' cannot be created now; training continues" in caplog.text
    caplog.clear()
    trainer.train()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    last = "checkpoint-2"  # and once more at the end
    assert [words.partition(" could")[0] for words in told] == ["checkpoint-1", last, last]
    with pytest.raises(
        HubError, match=r"Training is complete\. The model is saved in .*: hf upload me/model "
    ) as raised:
        trainer.save_model()
    assert (tmp_path / "model.safetensors").is_file()
    assert hub.tokens == {SECRET}
    assert SECRET not in caplog.text + str(raised.value)


def test_the_repository_is_created_as_soon_as_the_hub_is_back(hub: StandIn, tmp_path: Path) -> None:
    hub.is_there = False
    trainer = make_trainer("sft", tmp_path, save_steps=1, **PUSHING)
    hub.is_there = True
    trainer.train()
    assert trainer.hub_model_id == "me/model"
    trainer.save_model()
    assert [*hub.sent] == ["Training in progress, step 1", "Model save"]


def test_an_upload_in_the_background_that_fails_is_a_warning(
    hub: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer("sft", tmp_path, save_steps=1, **PUSHING)
    hub.is_there = False
    trainer.train()
    assert (
        "'Training in progress, step 1' could not be pushed to me/model; training continues, and the next push"
        in caplog.text
    )
    assert SECRET not in caplog.text


def checkpoints_of(hub: StandIn) -> list[str]:
    return [message for message in hub.sent if message.endswith("checkpoint")]


@pytest.mark.parametrize("strategy", ["all_checkpoints", "checkpoint"])
def test_a_checkpoint_that_could_not_be_uploaded_is_uploaded_with_the_next(
    strategy: str, hub: StandIn, tmp_path: Path
) -> None:
    trainer = make_trainer("sft", tmp_path, save_steps=1, max_steps=3, hub_strategy=strategy, **PUSHING)
    save = trainer._save_checkpoint

    def without_hub(*arguments: Any) -> None:
        hub.is_there = trainer.state.global_step != 1
        save(*arguments)

    trainer._save_checkpoint = without_hub
    trainer.train()
    steps = ["2", "1", "3"] if strategy == "all_checkpoints" else ["2", "3"]
    assert checkpoints_of(hub) == [f"Training in progress, step {step}, checkpoint" for step in steps]
    assert not (tmp_path / ".pushing").exists()


def test_what_failed_last_is_tried_again_at_the_end(hub: StandIn, tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, save_steps=1, hub_strategy="all_checkpoints", **PUSHING)
    hub.is_there = False
    finish = trainer._finish_current_push

    def with_hub() -> None:
        hub.is_there = True
        finish()

    trainer._finish_current_push = with_hub
    trainer.train()
    assert [*hub.sent] == ["Training in progress, step 1", "Training in progress, step 1, checkpoint"]


def test_the_end_of_training_waits_until_a_failure_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload: Future[Any] = Future()
    upload.add_done_callback(lambda _: threading.Event().wait(0.3))  # before the failure is noted
    monkeypatch.setattr(HfApi, "upload_folder", lambda *_, **__: upload)
    hub = Hub(SimpleNamespace(hub_strategy="every_save", hub_token=None, hub_revision=None))  # type: ignore[arg-type]
    (tmp_path / "checkpoint-1").mkdir()
    hub.note(tmp_path / "checkpoint-1")
    hub.push_noted("me/model")
    assert (hub.is_busy, hub.noted) == (True, [])
    threading.Thread(target=upload.set_exception, args=[ConnectionError("is down")]).start()
    hub.wait()
    assert (hub.is_busy, hub.noted) == (False, [tmp_path / "checkpoint-1"])


def test_a_checkpoint_that_is_left_out_during_an_upload_follows(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("sft", tmp_path, save_steps=1, max_steps=3, hub_strategy="all_checkpoints", **PUSHING)
    monkeypatch.setattr(Hub, "is_busy", property(lambda _: trainer.state.global_step == 1))
    trainer.train()
    steps = [message.split(",")[1].removeprefix(" step ") for message in checkpoints_of(hub)]
    assert steps == ["2", "1", "3"]


def test_the_model_is_uploaded_without_what_it_was_trained_on(hub: StandIn, tmp_path: Path) -> None:
    trainer = make_trainer("ppo", tmp_path, save_steps=1, hub_strategy="checkpoint", **PUSHING)
    trainer.train()
    (tmp_path / "vllm-server.log").touch()
    trainer.push_to_hub()
    assert hub.sent["Training in progress, step 1"] == MODEL
    whole = {
        path.relative_to(tmp_path / "checkpoint-1")
        for path in (tmp_path / "checkpoint-1").rglob("*")
        if path.is_file()
    }
    assert hub.sent["Training in progress, step 1, checkpoint"] == {f"last-checkpoint/{path}" for path in whole}
    assert hub.sent["End of training"] - {"critic/value_head.safetensors"} == MODEL
    assert not (tmp_path / ".pushing").exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_what_the_hub_refuses_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the Hub refuses to create the repository 'my model': HFValidationError"):
        make_trainer("sft", tmp_path, **PUSHING | {"hub_model_id": "my model"})


@pytest.mark.parametrize(("status", "is_final"), [(401, True), (403, True), (429, False), (503, False)])
def test_a_server_that_is_busy_has_not_refused(status: int, is_final: bool) -> None:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    assert is_refusal(HfHubHTTPError("the Hub's words", response=response)) == is_final


def test_completions_and_records_of_the_run_are_not_pushed_with_the_model(hub: StandIn, tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, max_steps=1, **PUSHING)
    for name in ("completions/a.parquet", "evaluations/a.parquet", "run.json", "starts.jsonl", "report.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    trainer.save_model()
    (sent,) = hub.sent.values()
    assert "model.safetensors" in sent
    assert not [name for name in sent if Path(name).suffix in (".parquet", ".jsonl", ".html") or name == "run.json"]


def card(folder: Path, name: str = "loss", base_model: str = "org/model-1.5") -> str:
    write_model_card(folder, algorithm="sft", base_model=base_model, log_history=[{name: 0.5}])
    return (folder / "README.md").read_text(encoding="utf-8")


def test_names_of_metrics_are_no_markup(tmp_path: Path) -> None:
    text = card(tmp_path, "rewards/<img src=x>|\n# title\x1b[2J/mean")
    assert r"| rewards/&lt;img src=x&gt;&#124; # title\x1b[2J/mean | 0.5 | 0.5 |" in text


@pytest.mark.parametrize("name", ["https://user:password@host/model", "/home/me/model", "a\nb", "../model"])
def test_only_a_name_on_the_hub_is_the_base_model(tmp_path: Path, name: str) -> None:
    assert "base_model: org/model-1.5" in card(tmp_path)
    assert "base_model" not in card(tmp_path, base_model=name)


def test_the_card_names_what_it_is_asked_to(tmp_path: Path) -> None:
    write_model_card(
        tmp_path,
        algorithm="sft",
        base_model="org/base",
        log_history=[],
        model_name="Mine | <b>",
        dataset_name="org/data",
        tags=["maths", "sft"],
    )
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "# Mine &#124; &lt;b&gt;\n" in text
    metadata = ModelCard(text).data
    assert metadata.datasets == ["org/data"]
    assert metadata.tags == ["generated_from_trainer", "prefrl", "sft", "maths"]
    write_model_card(tmp_path, algorithm="sft", base_model="b", log_history=[], dataset_name="/home/me/data")
    assert "/home/me" not in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine", encoding="utf-8")
    (tmp_path / "README.md").symlink_to(target)
    assert "prefrl" in card(tmp_path)
    assert target.read_text(encoding="utf-8") == "mine"


def grpo_card(folder: Path, **options: Any) -> str:
    config = GRPOConfig(output_dir="/home/me/out", use_cpu=True, report_to=[], seed=7, **options)
    decisive = dict.fromkeys(options) | {
        "data": {"rows": 1234, "columns": ["prompt"], "hash": "0f0f"},
        "rewards": {"right": "abc", "Game": "def"},
        "episodes": {"open": "012", "Game": "def"},
    }
    facts = RunFacts.of(config, decisive)
    history = [
        {"step": 1, "reward": 0.25, "clip_ratio/low_mean": 0.5, "kl": 0.0},
        {"step": 3, "reward": 0.5, "step_time": 2.0, "kl": 0.0, "completions/mean_length": 7.0},
    ]
    write_model_card(folder, algorithm="grpo", base_model="org/base", log_history=history, facts=facts)
    return (folder / "README.md").read_text(encoding="utf-8")


def test_the_card_has_what_it_takes_to_train_the_model_again(tmp_path: Path) -> None:
    text = grpo_card(tmp_path, learning_rate=3e-6, loss_type="dr_grpo", epsilon=0.2, max_steps=3)
    assert "`prefrl grpo run.yaml`" in text
    options = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert {name: options[name] for name in ("model_name_or_path", "learning_rate", "loss_type", "seed")} == {
        "model_name_or_path": "org/base",
        "learning_rate": 3e-6,
        "loss_type": "dr_grpo",
        "seed": 7,
    }
    assert options["reward_funcs"] == ["right"]
    assert "epsilon" not in options  # its default
    assert "1,234 rows after preparation (hash of a sample: `0f0f`)" in text
    assert "# base, trained with GRPO\n" in text
    for row in (
        "| Loss | `dr_grpo` (Liu et al. 2025, [arXiv 2503.20783](https://arxiv.org/abs/2503.20783)",
        "| Reward functions | `right` |",
        "| Environment and tools | `open`, `Game` |",
        "| Optimizer steps | 3 |",
        "| `epsilon` | 0.2 |",
        "| reward | 0.25 | 0.5 |",
        "| completions/mean_length | 7 | 7 |",
    ):
        assert f"\n{row}" in text
    assert "| kl |" not in text  # it was always 0
    assert "step_time" not in text
    assert "clip_ratio" not in text
    assert "eprint = {2402.03300}" in text
    for part in ("How to use", "What decides the update", "Metrics", "How to reproduce", "Citation"):
        assert f"\n## {part}\n" in text


def test_a_card_has_no_empty_parts_and_says_how_its_model_is_asked(tmp_path: Path) -> None:
    write_model_card(tmp_path, algorithm="sft", base_model="b", log_history=[])
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "prefrl generate MODEL '...' --raw" in text
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["How to use", "How to reproduce", "Citation"]
    assert not re.search(r"\| *\|", text)
    (tmp_path / "chat_template.jinja").touch()
    text = card(tmp_path)
    assert "prefrl chat MODEL" in text
    assert "apply_chat_template" in text


def test_options_with_paths_texts_and_secrets_are_left_out(tmp_path: Path) -> None:
    init = {"token": "open-sesame", "cache_dir": "/home/me"}
    text = grpo_card(tmp_path, model_init_kwargs=init, max_steps=3)
    assert "max_steps: 3" in text
    for private in ("open-sesame", "/home/me", "model_init_kwargs"):
        assert private not in text


def test_an_adapter_is_loaded_with_peft(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    text = card(tmp_path)
    assert ModelCard(text).data.library_name == "peft"
    assert "from peft import AutoPeftModelForCausalLM" in text
