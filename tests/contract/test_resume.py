"""A resumed run ends with the weights of an uninterrupted run."""

from __future__ import annotations

import json
import logging
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback

from prefrl.errors import CheckpointError, ConfigError
from prefrl.run.checkpoints import manifest_of, seal
from prefrl.run.uploads import Uploads
from tests.assets import tiny_model
from tests.contract.cases import (
    assert_same_weights,
    dataset_of,
    make_trainer,
    model_of,
    ragged_reward,
    weights_of,
    whole_and_resumed,
)

SAVED_AT = 3
STEPS = 6
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_grad_norm": 1.0, "weight_decay": 0.1}
OWN_TEACHER = {"teacher_model": None, "teacher_prompt": "hint", "teacher_weights": "ema"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sft", {}),
    ("sft", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    ("dpo", {"loss_type": ["sigmoid", "bco_pair"], "loss_balance": "gradnorm"}),
    # Saved right after the optimizer has lost its state.
    ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": SAVED_AT, "reset_optimizer_with_reference": True}),
    ("dpo", {"precompute_ref_log_probs": True}),
    ("kto", {}),
    ("orpo", {}),
    ("cpo", {"loss_type": "simpo"}),
    ("bco", {"max_tokens_per_micro_batch": 60}),
    ("reward", {}),
    ("grpo", {"beta": 0.0}),
    # Saved in the middle of rollouts that are used 2 * 2 times.
    ("grpo", {"steps_per_generation": 2, "num_iterations": 2, "shuffle_minibatches": True}),
    # Used in all steps up to the sixth.
    ("grpo", {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 3, "max_steps": 8}),
    (
        "grpo",
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "num_iterations": 2, "teacher_kl_coef": 0.5},
    ),
    # Weights that move, running moments, rates of success.
    ("grpo", {"num_iterations": 2, "kl_kwargs": {"target": 0.01, "horizon": 20}}),
    ("grpo", {"use_adaptive_entropy": True, "entropy_kwargs": {"target": 5.0}, "entropy_coef": 0.01, "beta": 0.0}),
    ("grpo", {"reward_shaping_kwargs": {"normalize": True, "clip_range": [-1.0, 1.0], "missing_eos_penalty": 1.0}}),
    ("grpo", {"curriculum": "band", "curriculum_kwargs": {"band": [0.4, 0.6]}, "dynamic_sampling": True}),
    ("grpo", {"talks": "forgetful", "turn_credit": "return", "steps_per_generation": 2}),
    ("grpo", {"talks": "agent", "turn_credit": "return", "steps_per_generation": 2, "max_steps": 4}),
    ("rloo", {"num_iterations": 2, "kl_kwargs": {"target": 0.01, "horizon": 20}}),
    ("reinforce_plus_plus", {"gamma": 0.9}),
    ("ppo", {"steps_per_generation": 2, "num_iterations": 2, "critic_learning_rate": 1e-2}),
    ("ppo", {"critic": "model", "critic_warmup": 4, "critic_learning_rate": 1e-2}),
    ("online_dpo", {"num_iterations": 2}),
    ("distillation", {"later_tokens": True, "steps_per_generation": 2, "num_iterations": 2}),
    ("distillation", {**OWN_TEACHER, "teacher_weights_kwargs": {"update_rate": 0.5, "sync_steps": 2}}),
    ("distillation", {**OWN_TEACHER, "teacher_weights": "live", "max_completion_length": 6}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_resumed_run_is_bit_exact(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    settings = {**ADAM, "max_steps": STEPS, **options, "save_strategy": "steps", "save_steps": SAVED_AT, "rows": 40}
    whole, resumed = whole_and_resumed(name, tmp_path, SAVED_AT, **settings)
    start = weights_of(model_of(name))
    expected, actual = weights_of(whole.model), weights_of(resumed.model)
    assert any(not torch.equal(start[key], expected[key]) for key in start)
    for key, value in expected.items():
        assert torch.equal(value, actual[key]), key


def test_experts_that_are_saved_one_by_one_are_resumed(tmp_path: Path) -> None:
    settings = {**ADAM, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    whole = make_trainer("sft", tmp_path, model=tiny_model("qwen3_moe", **experts), **settings)
    whole.train()
    resumed = make_trainer("sft", tmp_path, model=tiny_model("qwen3_moe", **experts), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(resumed, whole)


def test_resumed_run_with_dropout_and_packing_is_bit_exact(tmp_path: Path) -> None:
    model_of("sft", attention_dropout=0.5).save_pretrained(tmp_path / "model")
    settings = {**ADAM, "model": str(tmp_path / "model"), "packing": True, "max_length": 48, "max_steps": 4}
    settings |= {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    whole = make_trainer("sft", tmp_path / "run", **settings)
    whole.train()
    resumed = make_trainer("sft", tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same_weights(resumed, whole)


class NoGeneration:
    """Any generation would fail."""

    def invalidate(self) -> None: ...


def test_resumed_run_generates_nothing_while_rollouts_are_left(tmp_path: Path) -> None:
    settings = {**ADAM, "steps_per_generation": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_trainer("grpo", tmp_path, **settings).train()
    resumed = make_trainer("grpo", tmp_path, **settings)
    resumed.generator = NoGeneration()  # type: ignore[attr-defined]
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4


def test_a_rank_that_saves_first_makes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer("grpo", tmp_path)
    trainer.create_optimizer_and_scheduler(1)
    # Another rank writes model and optimizer, later.
    monkeypatch.setattr(type(trainer.args), "should_save", property(lambda args: False))
    trainer._save_optimizer_and_scheduler(str(tmp_path / "checkpoint-1"))
    assert (tmp_path / "checkpoint-1" / "rollouts_0_of_1.safetensors").exists()


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        ({"backend": "ZeRO-3", "num_processes": 2}, r"2 processes with ZeRO-3.*1 process with no sharding.*model="),
        (None, r"has no written_by\.json.*model="),
    ],
    ids=["another backend", "a model alone"],
)
def test_resume_from_what_cannot_be_read_is_refused(
    writer: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    settings = {**ADAM, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer("sft", tmp_path, **settings).train()
    signature = tmp_path / "checkpoint-1" / "written_by.json"
    if writer is None:
        signature.unlink()
    else:
        signature.write_text(json.dumps(writer), encoding="utf-8")
        seal(signature.parent, run="any", step=1, resumable=True)
    with pytest.raises(ConfigError, match=message):
        make_trainer("sft", tmp_path, **settings).train(resume_from_checkpoint=str(signature.parent))


@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_resume_from_a_model_alone_says_what_is_missing(name: str, tmp_path: Path) -> None:
    settings = {**ADAM, "save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    make_trainer(name, tmp_path, **settings, max_steps=1).train()
    with pytest.raises(ConfigError, match=r"a model without the training state \(from save_only_model=True.*model="):
        make_trainer(name, tmp_path, **settings, max_steps=2).train(resume_from_checkpoint=True)


class Canary:
    """Whoever unpickles it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_nothing_in_a_checkpoint_is_unpickled(name: str, tmp_path: Path) -> None:
    settings = {**ADAM, "save_strategy": "steps", "save_steps": 1}
    make_trainer("sft", tmp_path / "run", **settings, max_steps=1).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    torch.save(Canary(tmp_path / "canary"), checkpoint / name)
    run = manifest_of(checkpoint)
    assert run is not None
    seal(checkpoint, run=run.run, step=1, resumable=True)
    resumed = make_trainer("sft", tmp_path / "run", **settings, max_steps=2)
    with nullcontext() if name == "training_args.bin" else pytest.raises(CheckpointError, match=name):
        resumed.train(resume_from_checkpoint=True)
    assert not (tmp_path / "canary").exists()


def test_a_finished_training_that_is_resumed_makes_no_further_step(tmp_path: Path) -> None:
    settings = {**ADAM, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole = make_trainer("sft", tmp_path, **settings)
    whole.train()
    resumed = make_trainer("sft", tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert_same_weights(resumed, whole)


def num_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


@pytest.mark.parametrize("balance", ["uncertainty", "gradnorm", "famo", "pareto"])
def test_the_balance_of_rewards_goes_on(balance: str, tmp_path: Path) -> None:
    settings = {**ADAM, "reward_balance": balance, "reward": [ragged_reward, num_letters], "max_steps": 4, "beta": 0.0}
    settings |= {"save_strategy": "steps", "save_steps": 2, "rows": 40}
    whole, resumed = whole_and_resumed("grpo", tmp_path, 2, **settings)
    assert_same_weights(resumed, whole)
    weights = [entry["reward_balance/num_letters"] for entry in whole.state.log_history if "loss" in entry]
    assert len(set(weights)) == 4


def test_a_checkpoint_of_a_backend_is_read_as_data_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_trainer("sft", tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    seen: dict[str, str | None] = {}

    def note(name: str) -> Any:
        return lambda *_, **__: seen.update({name: os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")})

    trainer = make_trainer("sft", tmp_path, max_steps=2)
    monkeypatch.setattr(Trainer, "_load_optimizer_and_scheduler", note("resumed"))
    trainer.train(resume_from_checkpoint=True)
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    monkeypatch.setattr(Trainer, "_load_best_model", note("best"))
    trainer._load_best_model()
    note("after")()
    assert seen == {"resumed": "1", "best": "1", "after": None}


def test_a_tied_head_is_not_missing_but_a_lost_weight_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    make_trainer("sft", tmp_path, model=model_of("sft", tie_word_embeddings=True), max_steps=1, **options).train()
    resumed = make_trainer("sft", tmp_path, model=model_of("sft", tie_word_embeddings=True), max_steps=2, **options)
    logging.getLogger("transformers").addHandler(caplog.handler)
    resumed.train(resume_from_checkpoint=True)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "missing keys" not in caplog.text
    path = tmp_path / "checkpoint-1" / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks weights of the model: model\.norm\.weight"):
        resumed._load_from_checkpoint(str(path.parent))


URL = "memory://bucket/run"
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-2}


@pytest.fixture(autouse=True)
def memory() -> Any:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return fsspec.filesystem("memory")


def train(folder: Path, resume: Any = None, *, algorithm: str = "sft", **options: Any) -> Any:
    trainer = make_trainer(algorithm, folder, **{"max_steps": 3, **SAVING, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(a: Any, b: Any) -> bool:
    x, y = weights_of(a.model), weights_of(b.model)
    return all(torch.equal(x[name], y[name]) for name in x)


def steps_of(trainer: Any) -> list[int]:
    return [entry["step"] for entry in trainer.state.log_history if "loss" in entry]


def uploaded(memory: Any) -> list[str]:
    return sorted(Path(path).parent.name for path in memory.find("/bucket/run") if path.endswith("manifest.json"))


@pytest.mark.parametrize("algorithm", ["sft", "ppo"])
@pytest.mark.parametrize("resume", [True, f"{URL}/checkpoint-2"])
def test_a_run_whose_disk_is_gone_resumes_from_what_was_uploaded(
    algorithm: str, resume: Any, tmp_path: Path, memory: Any
) -> None:
    whole = train(tmp_path / "whole", algorithm=algorithm)
    # The schedule is constant, so two steps of a run of three are a run of two.
    train(tmp_path / "first", True, algorithm=algorithm, max_steps=2, upload_to=URL)
    assert uploaded(memory) == ["checkpoint-1", "checkpoint-2"]
    shutil.rmtree(tmp_path / "first")
    to = URL if resume is True else None
    resumed = train(tmp_path / "second", resume, algorithm=algorithm, upload_to=to)
    assert steps_of(resumed) == [1, 2, 3]
    assert (tmp_path / "second" / "checkpoint-2").is_dir()
    assert not (tmp_path / "second" / "checkpoint-1").exists()
    assert same(resumed, whole)
    assert uploaded(memory)[-1] == ("checkpoint-3" if resume is True else "checkpoint-2")


def test_the_best_checkpoint_is_fetched_and_loaded_at_the_end(tmp_path: Path, memory: Any) -> None:
    rising = iter([1.0, 0.5, 2.0, 3.0])
    options = {
        **{"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": dataset_of("sft", 4)},
        **{"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "upload_to": URL, "max_steps": 4},
    }

    def make(folder: Path, **others: Any) -> Any:
        trainer = make_trainer("sft", folder, **SAVING | options | others)
        evaluate = trainer.evaluate
        trainer.evaluate = lambda *a, **k: {**evaluate(*a, **k), "eval_loss": next(rising)}
        return trainer

    make(tmp_path / "first", allow_resume_changes=["max_steps"], max_steps=3).train()
    saved = load_file(tmp_path / "first" / "checkpoint-2" / "model.safetensors")
    shutil.rmtree(tmp_path / "first")
    resumed = make(tmp_path / "second")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_model_checkpoint == str(tmp_path / "second" / "checkpoint-2")
    found = dict(resumed.model.named_parameters())
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    assert not (tmp_path / "second" / "checkpoint-1").exists()


@pytest.mark.parametrize("word", ["auto", "true"])
def test_auto_goes_on_if_there_is_a_checkpoint_and_disable_starts_anew(word: str, tmp_path: Path) -> None:
    train(tmp_path, "Auto", max_steps=1)
    assert steps_of(train(tmp_path, word, max_steps=2)) == [1, 2]
    assert json.loads((tmp_path / "checkpoint-2" / "manifest.json").read_text())["step"] == 2
    last = (tmp_path / "checkpoint-2").stat().st_mtime_ns
    assert steps_of(train(tmp_path, "disable", max_steps=1)) == [1]
    assert (tmp_path / "checkpoint-2").stat().st_mtime_ns == last


def test_a_path_is_a_place(tmp_path: Path) -> None:
    train(tmp_path / "run", max_steps=1, upload_to=tmp_path / "mounted")
    assert (tmp_path / "mounted" / "checkpoint-1" / "manifest.json").is_file()


def test_local_checkpoints_come_before_uploaded_ones(tmp_path: Path, memory: Any) -> None:
    train(tmp_path, max_steps=2, upload_to=URL)
    shutil.rmtree(tmp_path / "checkpoint-2")
    fetched = train(tmp_path, True, max_steps=2, upload_to=URL)
    assert fetched.state.global_step == 2
    assert not [path for path in memory.find("/bucket/run") if "uploading" in path]


def test_a_run_that_began_anew_does_not_go_on_with_an_earlier_one(tmp_path: Path, memory: Any) -> None:
    train(tmp_path / "first", max_steps=2, upload_to=URL)
    train(tmp_path / "second", "disable", max_steps=1)
    shutil.rmtree(tmp_path / "second" / "checkpoint-1")
    assert steps_of(train(tmp_path / "second", "auto", max_steps=1, upload_to=URL)) == [1]
    assert not (tmp_path / "second" / "checkpoint-2").exists()


def test_final_uploads_the_last_checkpoint_alone_once_training_is_complete(tmp_path: Path, memory: Any) -> None:
    final = {"upload_to": URL, "upload_kwargs": {"checkpoints": "final"}}
    with pytest.raises(SystemExit):
        train(tmp_path, max_train_time=1e-9, **final)
    assert uploaded(memory) == []
    train(tmp_path, True, **final)
    assert uploaded(memory) == ["checkpoint-3"]


def test_a_place_that_is_out_of_reach_ends_no_training_and_the_next_start_completes_the_uploads(
    tmp_path: Path, memory: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(*_: Any) -> None:
        raise ConnectionError("is out of reach")

    monkeypatch.setitem(Uploads.__init__.__kwdefaults__, "pauses", ())
    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, "pipe_file", put)
        trainer = train(tmp_path, max_steps=2, upload_to=URL, upload_kwargs={"timeout": 60.0})
    assert trainer.state.global_step == 2
    told = caplog.records[-1].getMessage()
    assert told.startswith(f"not uploaded to {URL}:\n  checkpoint-1: ConnectionError: is out of reach\n  checkpoint-2")
    assert uploaded(memory) == []
    train(tmp_path, True, max_steps=2, upload_to=URL)
    assert uploaded(memory) == ["checkpoint-1", "checkpoint-2"]


def test_a_place_that_cannot_be_read_is_no_reason_to_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ls(*_: Any, **options: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    with pytest.raises(ConfigError, match=r"upload_to='memory://bucket/run' cannot be read: PermissionError: Access"):
        train(tmp_path, True, upload_to=URL)
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint='memory://bucket/run' cannot be read"):
        train(tmp_path, URL)


def test_a_url_without_checkpoints_is_an_error_and_true_starts_at_step_0(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint='memory://nothing': there is no checkpoint"):
        train(tmp_path, "memory://nothing")
    assert train(tmp_path, True, max_steps=1, upload_to=URL).state.global_step == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"upload_kwargs": {"timeout": 1.0}}, r"upload_kwargs=.* has no effect because upload_to=None"),
        ({"upload_to": URL, "upload_kwargs": {"timeout": 0.0}}, r"upload_kwargs: timeout=0.0: must be a number > 0"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer("sft", tmp_path, **SAVING | options, strict_options=True)


# Without the optimizer's state.


def test_a_checkpoint_without_the_optimizer_goes_on_at_its_step_with_new_moments(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "linear", "max_steps": 4}
    whole = train(tmp_path / "whole", **options)
    parts = tmp_path / "parts"
    train(parts, **options, checkpoint_kwargs={"save_optimizer": False})
    assert not list(parts.rglob("optimizer.pt"))
    for step in (3, 4):
        shutil.rmtree(parts / f"checkpoint-{step}")
    with pytest.raises(ConfigError, match=r"checkpoint-2 holds no optimizer state.*load_optimizer': False"):
        train(parts, True, **options)
    changed = {"learning_rate": 0.02, "allow_resume_changes": ["learning_rate"]}
    resumed = train(parts, True, **options | changed, checkpoint_kwargs={"load_optimizer": False})
    logs = [entry for entry in resumed.state.log_history if "loss" in entry]
    assert [entry["learning_rate"] for entry in logs] == pytest.approx([0.01, 0.0075, 0.01, 0.005])
    assert {state["step"].item() for state in resumed.optimizer.state.values()} == {2.0}  # of Adam, since resumed
    assert logs[2]["loss"] == next(e["loss"] for e in whole.state.log_history if e["step"] == 3)  # the same rows
    assert not same(resumed, whole)


def test_the_schedule_of_the_weight_decay_goes_on_without_the_optimizer(tmp_path: Path) -> None:
    options = {"weight_decay": 0.1, "weight_decay_schedule": "linear", "max_steps": 4}
    train(tmp_path, **options)
    shutil.rmtree(tmp_path / "checkpoint-4")
    shutil.rmtree(tmp_path / "checkpoint-3")
    seen = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            seen.append(optimizer.param_groups[0]["weight_decay"])

    whole = make_trainer("sft", tmp_path / "whole", **SAVING | options)
    whole.add_callback(Watch())
    whole.train()
    expected, seen[:] = seen[2:], []
    assert expected[0] != 0.1
    resumed = make_trainer("sft", tmp_path, **SAVING | options, checkpoint_kwargs={"load_optimizer": False})
    resumed.add_callback(Watch())
    resumed.train(resume_from_checkpoint=True)
    assert seen == expected


def test_a_whole_checkpoint_can_be_read_without_its_optimizer(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2)
    resumed = train(tmp_path, True, checkpoint_kwargs={"load_optimizer": False})
    assert {state["step"].item() for state in resumed.optimizer.state.values()} == {1.0}


def test_a_schedule_that_may_change_is_that_of_the_config(tmp_path: Path) -> None:
    train(tmp_path, lr_scheduler_type="linear", max_steps=2)
    names = ["lr_scheduler_type", "max_steps", "num_train_epochs"]
    options = {"lr_scheduler_type": "constant", "allow_resume_changes": names}
    resumed = train(tmp_path, True, max_steps=4, **options)
    rates = [entry["learning_rate"] for entry in resumed.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.01, 0.005, 0.01, 0.01])
