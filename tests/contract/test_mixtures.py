"""Mixtures of experts: every trainer adds the balancing loss of the routers, weighted as it weights its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerControl

from prefrl.errors import ConfigError
from prefrl.generation.local.generator import LocalGenerator
from prefrl.models.adapters import lora_config
from prefrl.registry import REGISTRY
from prefrl.types import Completion
from tests import vlms
from tests.assets import EXPERTS
from tests.contract.cases import ONLINE, dataset_of, make_trainer, model_of, relative_difference, update_of, weights_of

TOLERANCE = 1e-5
COEF = {"router_aux_loss_coef": 0.5}
CUT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "forward_plan": "padded"}
OVERLAP = {"arrival": 3, "generation_mode": "overlap", "use_vllm": True}
VARIANTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, {}, CUT) for name in REGISTRY),
    # Rows that have several responses, or are all learned from, and by another divisor.
    ("grpo", {"loss_type": "dapo", "talks": "forgetful"}, CUT),
    ("grpo", {"loss_type": "dr_grpo", "beta": 0.04}, OVERLAP),
]


def mixture_of(algorithm: str, **overrides: Any) -> PreTrainedModel:
    """A mixture of experts that the algorithm can train."""
    return model_of(algorithm, architecture="qwen3_moe", **EXPERTS, **overrides)


def trained(algorithm: str, folder: Path, **options: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """The update of one step, and what it logged."""
    if algorithm in ONLINE:
        options.setdefault("steps_per_generation", options.get("gradient_accumulation_steps", 1))
    options.setdefault("model", mixture_of(algorithm))
    trainer = make_trainer(algorithm, folder, **options)
    update = update_of(trainer)
    return update, trainer.state.log_history[0]


@pytest.mark.parametrize(("algorithm", "options", "cut"), VARIANTS, ids=str)
def test_the_update_is_the_same_however_the_work_is_cut(
    algorithm: str, options: dict[str, Any], cut: dict[str, Any], tmp_path: Path
) -> None:
    expected, logged = trained(algorithm, tmp_path, **options, **COEF)
    update, entry = trained(algorithm, tmp_path, **options, **COEF, **cut)
    assert relative_difference(update, expected) < TOLERANCE
    for name in ("loss", "aux_loss"):
        assert entry[name] == pytest.approx(logged[name], rel=TOLERANCE)


def test_the_loss_is_the_mean_over_rows_with_the_weights_of_the_trainer(tmp_path: Path) -> None:
    model = mixture_of("sft")
    trainer = make_trainer("sft", tmp_path, model=model, rows=8, **COEF)
    losses, weights = [], []
    for row in trainer.train_dataset:
        ids = torch.tensor([row["input_ids"]])
        losses.append(float(model(input_ids=ids[:, :-1], output_router_logits=True).aux_loss.detach()))
        weights.append(sum(row["trainable"]))
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    trainer.train()
    assert trainer.state.log_history[0]["aux_loss"] == pytest.approx(expected, rel=TOLERANCE)
    assert trainer.aux_loss_enabled
    _, plain = trained("sft", tmp_path, rows=8, router_aux_loss_coef=0.0)
    assert trainer.state.log_history[0]["loss"] - plain["loss"] == pytest.approx(0.5 * expected, rel=1e-4)
    assert "aux_loss" not in plain


def test_the_weight_is_that_of_the_models_config_unless_one_is_given(tmp_path: Path) -> None:
    given, _ = trained("sft", tmp_path, **COEF)
    of_config, _ = trained("sft", tmp_path, model=mixture_of("sft", router_aux_loss_coef=0.5))
    assert torch.equal(of_config, given)


def test_the_loss_of_an_evaluation_contains_it(tmp_path: Path) -> None:
    evaluation = {"model": mixture_of("dpo"), "eval_dataset": dataset_of("dpo", 6)}
    found = make_trainer("dpo", tmp_path, **evaluation, **COEF).evaluate()
    plain = make_trainer("dpo", tmp_path, **evaluation, router_aux_loss_coef=0.0).evaluate()
    assert found["eval_loss"] == pytest.approx(plain["eval_loss"] + 0.5 * found["eval_aux_loss"], rel=TOLERANCE)
    assert found["eval_aux_loss"] > 1


def test_an_evaluation_predicts_the_same_with_it(tmp_path: Path) -> None:
    found: list[Any] = []
    evaluation: dict[str, Any] = {"model": mixture_of("sft"), "eval_dataset": dataset_of("sft", 4)}
    evaluation["compute_metrics"] = lambda given: found.append(given.predictions) or {}
    for coef in (0.5, 0.0):
        make_trainer("sft", tmp_path, **evaluation, router_aux_loss_coef=coef).evaluate()
    assert found[0].tolist() == found[1].tolist()


class StopAfterOneStep(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop = True


def test_the_policy_does_not_move_while_the_critic_warms_up(tmp_path: Path) -> None:
    options = {"critic": "model", "critic_warmup": 1, "max_steps": 2, "callbacks": [StopAfterOneStep()]}
    trainer = make_trainer("ppo", tmp_path, model=mixture_of("ppo"), **options, **COEF)
    before = weights_of(trainer.policy)
    trainer.train()
    after = weights_of(trainer.policy)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all("critic" in name for name in moved)


def test_a_config_that_asks_for_router_logits_changes_nothing(tmp_path: Path) -> None:
    expected, _ = trained("grpo", tmp_path)
    update, logged = trained("grpo", tmp_path, model=mixture_of("grpo", output_router_logits=True))
    assert torch.equal(update, expected)
    assert logged["aux_loss"] > 1


def test_a_weight_for_a_dense_model_is_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0\.5 has no effect because a Qwen2ForCausalLM"):
        make_trainer("sft", tmp_path, strict_options=True, **COEF)


def test_reentrant_checkpoints_are_refused_because_they_cut_its_gradient(tmp_path: Path) -> None:
    reentrant = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ConfigError, match=r"with use_reentrant=True .* or router_aux_loss_coef=0\.0"):
        make_trainer("sft", tmp_path, model=mixture_of("sft"), **reentrant)
    make_trainer("sft", tmp_path, model=mixture_of("sft"), router_aux_loss_coef=0.0, **reentrant)


# Router replay: experts of the sampler.

REPLAY = {"router_replay": True, **COEF}


def test_with_replay_the_update_is_the_same_however_the_work_is_cut(tmp_path: Path) -> None:
    # The sampler has the trainer's weights and precision, so nearly all of its experts are the trainer's own.
    plain, _ = trained("grpo", tmp_path, router_replay=False, **COEF)
    expected, logged = trained("grpo", tmp_path, **REPLAY)
    assert relative_difference(expected, plain) < TOLERANCE
    assert logged["sampling/routes_changed"] == 0
    for options in (CUT, {"forward_plan": "packed", "activation_checkpointing": True}):
        update, entry = trained("grpo", tmp_path, **REPLAY, **options)
        assert relative_difference(update, expected) < TOLERANCE
        assert entry["aux_loss"] == pytest.approx(logged["aux_loss"], rel=TOLERANCE)


class Restless(LocalGenerator):
    """A sampler with other experts, if it says which: each number is one higher."""

    def generate(self, *args: Any, **options: Any) -> list[list[Completion]]:
        found = super().generate(*args, **options)
        if self._replay is None:
            return found
        return [[replace(one, routes=(one.routes + 1) % 4) for one in group] for group in found]


def restless(folder: Path, **options: Any) -> tuple[torch.Tensor, dict[str, float]]:
    trainer = make_trainer("grpo", folder, model=mixture_of("grpo"), **options)
    trainer.generator.__class__ = Restless
    update = update_of(trainer)
    return update, trainer.state.log_history[0]


def test_the_policy_uses_the_experts_of_the_sampler_and_says_how_many_are_not_its_own(tmp_path: Path) -> None:
    own, logged = trained("grpo", tmp_path, beta=0.1, **REPLAY)
    update, entry = restless(tmp_path, beta=0.1, **REPLAY)
    assert relative_difference(update, own) > 0.1
    assert entry["sampling/routes_changed"] > 0.5
    # The policy with other experts is not its reference, which chooses itself.
    assert logged["kl"] < 1e-6
    assert entry["kl"] > 1e-4
    padded, _ = restless(tmp_path, beta=0.1, **REPLAY, **CUT, steps_per_generation=4)
    assert relative_difference(padded, update) < TOLERANCE


def test_a_reference_that_is_the_policy_without_its_adapter_chooses_itself(tmp_path: Path) -> None:
    _, entry = restless(tmp_path, beta=0.1, peft_config=lora_config(target_modules=["q_proj"]), **REPLAY)
    assert entry["kl"] > 1e-4


def test_a_model_that_cannot_replay_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="router_replay does not work for Qwen2ForCausalLM: no module of it"):
        make_trainer("grpo", tmp_path, router_replay=True)


def test_by_default_a_mixture_replays_the_experts_of_its_sampler(tmp_path: Path) -> None:
    update, logged = restless(tmp_path, **COEF)
    expected, entry = restless(tmp_path, **REPLAY)
    assert torch.equal(update, expected)
    assert logged["sampling/routes_changed"] == entry["sampling/routes_changed"] > 0.5
    own, plain = restless(tmp_path, router_replay=False, **COEF)
    assert relative_difference(own, expected) > 0.1
    assert "sampling/routes_changed" not in plain
    _, dense = trained("grpo", tmp_path, model=model_of("grpo"))
    assert "sampling/routes_changed" not in dense


def test_by_default_a_mixture_that_cannot_replay_trains_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("grpo", architecture="phimoe", num_local_experts=4, num_experts_per_tok=2)
    _, logged = trained("grpo", tmp_path, model=model)
    assert "not replayed in training: router_replay does not work for PhimoeForCausalLM: no module" in caplog.text
    assert "sampling/routes_changed" not in logged
    caplog.clear()
    make_trainer("grpo", tmp_path, model=mixture_of("grpo"), torch_compile=True)
    assert "torch_compile=True with Qwen3MoeForCausalLM, a mixture of experts" in caplog.text


# Router replay: experts of the pass that computes old log-probs.

TWICE = {"num_iterations": 2, "max_steps": 2, "learning_rate": 3.0}


def logs_of_two_visits(folder: Path, **options: Any) -> list[dict[str, float]]:
    trainer = make_trainer("grpo", folder, model=mixture_of("grpo"), **TWICE, **COEF, **options)
    trainer.generator.__class__ = Restless
    trainer.train()
    return trainer.state.log_history[:2]


def test_later_updates_keep_the_experts_of_the_pass_that_computed_old_log_probs(tmp_path: Path) -> None:
    first, second = logs_of_two_visits(tmp_path, router_replay="R2")
    # The trainer's own experts, whatever the sampler has chosen; after an update, its routers would choose others.
    assert first["sampling/routes_changed"] == 0
    assert second["sampling/routes_changed"] > 0.01
    plain, other = logs_of_two_visits(tmp_path, router_replay=False)
    assert first["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    assert second["loss"] != pytest.approx(other["loss"], rel=1e-3)


class Asked(LocalGenerator):
    """Notes whether routers are known when completions are asked for, as those who read servers' answers need."""

    known: list[bool]

    def generate(self, *args: Any, **options: Any) -> list[list[Completion]]:
        assert self._replay is not None
        self.known.append(self._replay.is_proven)
        return super().generate(*args, **options)


def test_routers_are_known_before_an_evaluation_that_comes_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as several:  # processes, which leave the trial to their first passes
        several.setattr("prefrl.trainer.features.replay.distributed.num_processes", lambda: 2)
        model, evaluated = mixture_of("grpo"), dataset_of("grpo", 4)
        trainer = make_trainer("grpo", tmp_path, model=model, eval_dataset=evaluated)
    trainer.generator.__class__, trainer.generator.known = Asked, []
    trainer.evaluate()
    assert trainer.generator.known
    assert all(trainer.generator.known)


# Router replay: prompts with images.


def test_the_tokens_of_images_have_the_experts_of_the_sampler_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vlms.FAMILIES, "mixture", vlms.qwen3_vl_mixture)
    # Each token has its own experts: they are those that the trainer would choose.
    own = make_trainer("grpo", tmp_path, pictures="mixture", forward_plan="padded")
    expected = update_of(own)
    assert own.state.log_history[0]["sampling/routes_changed"] == 0
    other = make_trainer("grpo", tmp_path, pictures="mixture")
    other.generator.__class__ = Restless
    assert relative_difference(update_of(other), expected) > 0.1
    assert other.state.log_history[0]["sampling/routes_changed"] > 0.5
