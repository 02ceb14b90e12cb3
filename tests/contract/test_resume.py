"""A resumed run ends with the weights of an uninterrupted run."""

from __future__ import annotations

import json
import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer

from prefrl.errors import CheckpointError, ConfigError
from prefrl.run.seal import manifest_of, seal
from tests.assets import tiny_model
from tests.contract.cases import (
    assert_same_weights,
    make_trainer,
    model_of,
    ragged_reward,
    weights_of,
    whole_and_resumed,
)

SAVED_AT = 3
STEPS = 8
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_grad_norm": 1.0, "weight_decay": 0.1}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sft", {}),
    ("sft", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    ("dpo", {"loss_type": ["sigmoid", "bco_pair"]}),
    ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 2, "gradient_accumulation_steps": 2}),
    ("dpo", {"precompute_ref_log_probs": True}),
    ("kto", {}),
    ("orpo", {}),
    ("cpo", {"loss_type": "simpo"}),
    ("bco", {"max_tokens_per_micro_batch": 60}),
    ("reward", {}),
    ("grpo", {"beta": 0.0}),
    # Saved in the middle of rollouts that are used 2 * 2 times.
    ("grpo", {"steps_per_generation": 2, "num_iterations": 2}),
    ("grpo", {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 3}),
    ("grpo", {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "num_iterations": 2}),
    # Weights that move, running moments, rates of success.
    ("grpo", {"num_iterations": 2, "kl_kwargs": {"target": 0.01, "horizon": 20}}),
    ("grpo", {"use_adaptive_entropy": True, "entropy_kwargs": {"target": 3.0}, "entropy_coef": 0.01, "beta": 0.0}),
    ("grpo", {"reward_shaping_kwargs": {"normalize": True, "clip_range": [-1.0, 1.0], "missing_eos_penalty": 1.0}}),
    ("grpo", {"curriculum": "band", "curriculum_kwargs": {"band": [0.4, 0.6]}, "dynamic_sampling": True}),
    ("grpo", {"talks": "forgetful", "turn_credit": "return", "steps_per_generation": 2}),
    ("rloo", {"num_iterations": 2, "kl_kwargs": {"target": 0.01, "horizon": 20}}),
    ("reinforce_plus_plus", {"gamma": 0.9}),
    ("ppo", {"steps_per_generation": 2, "num_iterations": 2, "critic_learning_rate": 1e-2}),
    ("ppo", {"critic": "model", "critic_warmup": 4, "critic_learning_rate": 1e-2}),
    ("online_dpo", {"num_iterations": 2}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_resumed_run_is_bit_exact(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    settings = {**ADAM, **options, "max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED_AT, "rows": 40}
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
