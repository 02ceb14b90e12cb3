"""Callbacks that users may pass to a trainer."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)

from prefrl import (
    BEMACallback,
    ConfigError,
    LogCompletionsCallback,
    RewardError,
    RichProgressCallback,
    WeaveCallback,
)
from prefrl.run.folder import read_metrics
from tests.assets import tiny_model
from tests.contract.cases import dataset_of, make_trainer

BEMA: dict[str, Any] = {"update_freq": 2, "ema_power": 0.6, "bias_power": 0.3, "lag": 3, "multiplier": 0.5}
NAME = "model.layers.0.mlp.up_proj.weight"


class Weights(TrainerCallback):
    """Keeps a weight after each step."""

    def __init__(self, name: str = NAME) -> None:
        self.name = name
        self.seen: list[torch.Tensor] = []

    def _keep(self, model: Any) -> None:
        self.seen.append(dict(model.named_parameters())[self.name].detach().clone())

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._keep(kwargs["model"])

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._keep(kwargs["model"])


def expected(seen: list[torch.Tensor], *, after: int = 0) -> torch.Tensor:
    """BEMA of the weights after steps 0, 1, ..., at the last step at which it is updated."""
    start = average = corrected = seen[after]
    for step in range(after + 2, len(seen), 2):
        age = 3 + 0.5 * step
        average = (1 - age**-0.6) * average + age**-0.6 * seen[step]
        corrected = average + age**-0.3 * (seen[step] - start)
    return corrected


@pytest.mark.parametrize(("after", "tied"), [(0, False), (1, True)])
def test_bema_saves_the_corrected_average_of_the_weights(after: int, tied: bool, tmp_path: Path) -> None:
    weights = Weights("model.embed_tokens.weight" if tied else NAME)
    trainer = make_trainer(
        "sft",
        tmp_path,
        model=tiny_model(tie_word_embeddings=tied),
        max_steps=6,
        callbacks=[weights, BEMACallback(update_after=after, **BEMA)],
    )
    trainer.train()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "bema")
    found = dict(saved.named_parameters())[weights.name]
    torch.testing.assert_close(found, expected(weights.seen, after=after))
    assert (found - weights.seen[-1]).abs().max() > 1e-3
    assert torch.equal(trainer.policy.get_parameter(weights.name), weights.seen[-1])
    if tied:
        assert torch.equal(saved.lm_head.weight, found)


def test_bema_of_an_adapter_is_an_adapter(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
    weights = Weights(name)
    peft_config = LoraConfig(r=2, target_modules=["q_proj"])
    callbacks = [weights, BEMACallback(**BEMA)]
    make_trainer("sft", tmp_path, max_steps=4, callbacks=callbacks, peft_config=peft_config).train()
    saved = PeftModel.from_pretrained(tiny_model(), tmp_path / "bema")
    torch.testing.assert_close(dict(saved.named_parameters())[name], expected(weights.seen))


def test_bema_goes_on_after_a_resume(tmp_path: Path) -> None:
    def train(folder: Path, steps: int, **options: Any) -> torch.Tensor:
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
        callbacks = [BEMACallback(**BEMA)]
        make_trainer("sft", folder, max_steps=steps, callbacks=callbacks, **saving).train(**options)
        return AutoModelForCausalLM.from_pretrained(folder / "bema").get_parameter(NAME)

    whole = train(tmp_path / "whole", 6)
    train(tmp_path / "cut", 3)
    assert torch.equal(train(tmp_path / "cut", 6, resume_from_checkpoint=True), whole)


def test_bema_refuses_a_checkpoint_without_it_and_numbers_out_of_bounds(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    make_trainer("sft", tmp_path, max_steps=2, **saving).train()
    with pytest.raises(ConfigError, match="it was saved without BEMACallback"):
        make_trainer("sft", tmp_path, max_steps=4, callbacks=[BEMACallback()], **saving).train(
            resume_from_checkpoint=True
        )
    with pytest.raises(ConfigError, match=r"BEMACallback\(update_freq=0\): must be at least 1"):
        BEMACallback(update_freq=0)


def test_bema_without_an_update_saves_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer("sft", tmp_path, callbacks=[BEMACallback()]).train()
    assert not (tmp_path / "bema").exists()
    assert "training ended after step 1, before the first update" in caplog.text


def test_the_reference_gets_the_corrected_average_also_after_a_resume(tmp_path: Path) -> None:
    def train(folder: Path, steps: int, **options: Any) -> tuple[list[torch.Tensor], Any]:
        bema = BEMACallback(update_ref_model=True, ref_model_update_freq=3, ref_model_update_after=1, **BEMA)
        weights = Weights()
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
        trainer = make_trainer("dpo", folder, max_steps=steps, callbacks=[weights, bema], **saving)
        trainer.train(**options)
        return weights.seen, trainer.reference.state_dict()[NAME].detach()

    seen, whole = train(tmp_path / "whole", 6)
    torch.testing.assert_close(whole, expected(seen[:5]))  # after step 4, the last of 1, 4, 7, ...
    assert (whole - seen[0]).abs().max() > 1e-3
    train(tmp_path / "cut", 5)
    assert torch.equal(train(tmp_path / "cut", 6, resume_from_checkpoint=True)[1], whole)


@pytest.mark.parametrize(
    ("algorithm", "options", "told"),
    [
        ("sft", {}, "the trainer keeps no reference model"),
        ("dpo", {"sync_ref_model": True}, "with sync_ref_model=True: the reference cannot be moved by both"),
        ("grpo", {"beta": 0.1, "kl_estimator": "full"}, "with kl_estimator='full'"),
    ],
)
def test_bema_refuses_a_reference_that_cannot_follow(
    algorithm: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        make_trainer(algorithm, tmp_path, callbacks=[BEMACallback(update_ref_model=True)], **options).train()


class Weave(ModuleType):
    """W&B Weave, as far as an evaluation needs it."""

    def __init__(self) -> None:
        super().__init__("weave")
        self.projects: list[str] = []
        self.logged: list[Any] = []

    def init(self, project: str) -> None:
        self.projects.append(project)

    def get_weave_client(self) -> Any:
        return self if self.projects else None

    def EvaluationLogger(self, **about: Any) -> Any:
        self.logged.append(about)
        return self

    def log_prediction(self, *, inputs: dict[str, str], output: str) -> Any:
        self.logged.append((inputs["prompt"], output))
        return self

    def log_score(self, *, scorer: str, score: float) -> None:
        self.logged.append((scorer, score))

    def finish(self) -> None:
        self.logged.append("finish")

    def log_summary(self, summary: dict[str, float]) -> None:
        self.logged.append(summary)


def test_completions_and_their_scores_go_to_weave_at_each_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer("dpo", tmp_path, eval_dataset=dataset_of("dpo", 3))
    with pytest.raises(ConfigError, match=r"WeaveCallback needs weave: pip install weave"):
        WeaveCallback(trainer)
    weave = Weave()
    for name in ("weave", "weave.trace", "weave.trace.context", "weave.trace.context.weave_client_context"):
        monkeypatch.setitem(sys.modules, name, weave)
    with pytest.raises(ConfigError, match="neither a client of Weave nor a run"):
        WeaveCallback(trainer).on_train_begin(trainer.args, trainer.state, trainer.control)
    scorers = {"length": lambda prompt, completion: float(len(completion))}
    callback = WeaveCallback(trainer, "team/project", scorers, num_prompts=2, model_name="tiny")
    trainer.add_callback(callback)
    trainer.evaluate()
    trainer.evaluate()  # at the same step
    assert weave.projects == ["team/project"]
    about, first, score, ended, second, *_, summary = weave.logged
    assert (about["model"], about["dataset"]) == ("tiny", "eval_dataset")
    assert about["eval_attributes"]["training_step"] == 0
    assert (score, ended) == (("length", len(first[1])), "finish")
    mean = (len(first[1]) + len(second[1])) / 2
    assert summary == {"total_predictions": 2, "successful_predictions": 2, "avg_length": mean}
    assert [entry for entry in weave.logged if isinstance(entry, dict)] == [about, summary]
    callback.scorers = {"fails": lambda prompt, completion: 1 / 0}
    trainer.state.global_step = 1
    trainer.evaluate()
    assert "The completions of step 1 could not be logged to Weave: ZeroDivisionError" in caplog.text


def test_progress_is_shown_with_the_latest_metrics(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    callback = RichProgressCallback(console)
    trainer = make_trainer("sft", tmp_path, max_steps=2, callbacks=[callback])
    trainer.train()
    text = screen.getvalue()
    assert "Training" in text
    assert "100%" in text
    assert "accuracy" in text
    assert "s/step" in text
    shown = [type(c) for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback | PrinterCallback)]
    assert shown == [RichProgressCallback]
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_the_live_view_gives_the_terminal_back_after_an_error(tmp_path: Path) -> None:
    def fails(completions: Any, **_: Any) -> list[float]:
        raise ValueError("reward")

    screen = io.StringIO()
    callback = RichProgressCallback(Console(file=screen, force_terminal=True, width=80))
    trainer = make_trainer("grpo", tmp_path, reward=fails, callbacks=[callback])
    with pytest.raises(RewardError):
        trainer.train()
    assert screen.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_without_a_terminal_a_run_prints_its_facts_and_a_line_for_each_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer("grpo", tmp_path, max_steps=4, logging_steps=3, disable_tqdm=False)
    trainer.train()
    printed = capsys.readouterr().out
    assert "2 prompts x 4 completions of at most" in printed
    assert "all of them trained" in printed
    assert "shared_prefix where rows share a prompt" in printed
    assert re.search(r"\(weights .*, gradients .*B\) and the activations", printed)
    lines = [line.split() for line in printed.splitlines() if line.startswith("step ")]
    assert [line[1] for line in lines] == ["1/4", "3/4", "4/4"]
    assert lines[0][3] == "s/step"  # the metrics of the first step are logged with those of the third
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [line[3] for line in lines[1:]] == [f"{entry['reward']:.4g}" for entry in logged]
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["reward"]) for row in rows[:2]] == [(e["step"], e["reward"]) for e in logged]
    assert rows[-1]["step"] == 4
    assert "train_runtime" in rows[-1]
    assert trainer.history.best.reward >= trainer.history.worst.reward
    assert "grpo: done" in printed
    assert f"trainer.save_model()\n  prefrl chat {tmp_path}\n" in printed
    trainer.remove_callback(PrinterCallback)  # as without prefrl
    trainer.show_ending(saved=True)
    assert not capsys.readouterr().out
    assert not any(isinstance(c, PrinterCallback) for c in trainer.callback_handler.callbacks)


class Tracker(ModuleType):
    """Weights & Biases, as far as a table needs it."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.logged: list[Any] = []

    Table = dict

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append({name: {**table, "data": [*table["data"]]} for name, table in values.items()})


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "grpo"])
def test_completions_of_evaluation_prompts_are_logged(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = dataset_of(algorithm, 5)
    trainer = make_trainer(algorithm, tmp_path, max_steps=4, eval_dataset=evaluated)
    greedy = GenerationConfig(max_new_tokens=7)
    monkeypatch.setitem(sys.modules, "wandb", tracker := Tracker())
    trainer.args.report_to = ["wandb"]
    trainer.add_callback(LogCompletionsCallback(trainer, greedy, num_prompts=3, freq=2))
    trainer.train()
    assert [len(logged["completions"]["data"]) for logged in tracker.logged] == [3, 6]
    table = tracker.logged[-1]["completions"]
    assert table["columns"] == ["step", "prompt", "completion"]
    assert [row[0] for row in table["data"]] == [2, 2, 2, 4, 4, 4]
    assert [row[1] for row in table["data"][:3]] == evaluated["prompt"][:3]
    _, prompt, completion = table["data"][-1]
    ids = trainer.processing_class(prompt, return_tensors="pt").input_ids
    said = trainer.policy.generate(ids, max_new_tokens=7, do_sample=False)[0, ids.shape[1] :]
    assert completion == trainer.processing_class.decode(said, skip_special_tokens=True)
    assert "Completions" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["cpo", "orpo", "bco"])
def test_generate_during_eval_logs_completions_of_the_first_prompts(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"eval_dataset": dataset_of(algorithm, 5), "per_device_eval_batch_size": 2}
    trainer = make_trainer(algorithm, tmp_path, generate_during_eval=True, **options)
    assert "Completions" not in capsys.readouterr().out
    trainer.evaluate()
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, LogCompletionsCallback))
    assert [row[:2] for row in callback.table] == [(0, prompt) for prompt in options["eval_dataset"]["prompt"][:2]]
    assert "Completions" in capsys.readouterr().out


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer("dpo", tmp_path, eval_dataset=dataset_of("dpo", 2))
    trainer.args.report_to = ["comet_ml"]
    trainer.add_callback(LogCompletionsCallback(trainer, freq=1))
    trainer.train()
    assert "comet_ml gets no further tables, because it failed: KeyError: 'comet_ml'" in caplog.text


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("dpo", {}, "with eval_dataset=None: it samples from one dataset"),
        ("dpo", {"eval_dataset": {"a": dataset_of("dpo", 2)}}, r"with eval_dataset=the datasets \['a'\]"),
        ("reward", {"eval_dataset": dataset_of("reward", 2)}, "ForSequenceClassification, which cannot generate"),
    ],
)
def test_completions_need_one_dataset_and_a_model_that_generates(
    algorithm: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trainer = make_trainer(algorithm, tmp_path, **options)
    with pytest.raises(ConfigError, match=message):
        LogCompletionsCallback(trainer)
