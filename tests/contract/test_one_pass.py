"""A step runs each prompt once, one pass with gradients and none for old log-probs; it never waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prefrl.models.forward import verdict_of
from prefrl.registry import REGISTRY
from prefrl.trainer.base_trainer import BaseTrainer
from prefrl.trainer.online.policy_objective import PolicyObjective
from prefrl.types import TokenBatch
from tests.contract.cases import make_trainer, relative_difference, train_inside, update_of


@dataclass(frozen=True)
class Pass:
    """A forward pass of a model, seen at its token embedding."""

    num_tokens: int
    has_gradients: bool


@contextmanager
def passes_of(model: torch.nn.Module) -> Iterator[list[Pass]]:
    """The passes of a model, without those that generate and those of its first-use check."""
    verdict_of(model)
    passes: list[Pass] = []

    def note(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if not torch.is_inference_mode_enabled():
            passes.append(Pass(inputs[0].numel(), torch.is_grad_enabled()))

    handle = model.get_input_embeddings().register_forward_pre_hook(note)
    yield passes
    handle.remove()


@contextmanager
def micro_batches_of(trainer: BaseTrainer) -> Iterator[list[TokenBatch]]:
    """All micro-batches that the trainer learns from."""
    batches: list[TokenBatch] = []
    original = trainer.compute_loss

    def note(model: torch.nn.Module, inputs: TokenBatch, *args: Any, **options: Any) -> Any:
        batches.append(inputs)
        return original(model, inputs, *args, **options)

    trainer.compute_loss = note
    yield batches
    trainer.compute_loss = original


def tokens(batches: list[TokenBatch]) -> list[int]:
    """Of each batch: every prompt once, and every response without its last token, which predicts nothing."""
    return [batch.num_forward_tokens - batch.num_rows for batch in batches]


@pytest.mark.parametrize("algorithm", REGISTRY)
def test_a_micro_batch_is_one_pass_and_a_prompt_runs_once(algorithm: str, tmp_path: Path) -> None:
    options = {"precompute_ref_log_probs": True} if algorithm in ("dpo", "kto", "bco") else {}
    trainer = make_trainer(
        algorithm, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2, **options
    )
    with passes_of(trainer.policy) as passes, micro_batches_of(trainer) as batches:
        trainer.train()
    assert len(batches) == 4
    assert [p.num_tokens for p in passes if p.has_gradients] == tokens(batches)
    # KTO's estimate of the KL divergence is of rows that have no loss; rewards with a KL penalty and a critic's values
    # are there before the step: one pass for each step.
    scores_first = ("kto", "rloo", "reinforce_plus_plus", "ppo")
    assert sum(not p.has_gradients for p in passes) == (2 if algorithm in scores_first else 0)


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "bco", "grpo"])
def test_the_reference_scores_a_whole_step_in_one_pass(algorithm: str, tmp_path: Path) -> None:
    options = {"beta": 0.1} if algorithm == "grpo" else {}
    trainer = make_trainer(
        algorithm, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, **options
    )
    reference = trainer.reference._model
    with passes_of(reference) as passes, micro_batches_of(trainer) as batches:
        trainer.train()
    assert len(batches) == 4
    (seen,) = passes
    assert not seen.has_gradients
    if algorithm == "grpo":
        # Groups of 4 are cut in two for the passes with gradients, which run their prompts twice.
        repeated = sum(tokens(batches)) - seen.num_tokens
        assert repeated == sum(sum(batch.prompt_lengths) for batch in batches) / 2
    elif algorithm != "kto":
        assert seen.num_tokens == sum(tokens(batches))


def test_a_pass_without_gradients_holds_four_micro_batches(tmp_path: Path) -> None:
    trainer = make_trainer("dpo", tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=20)
    with passes_of(trainer.reference._model) as passes, micro_batches_of(trainer) as batches:
        trainer.train()
    most = 4 * max(batch.num_forward_tokens for batch in batches)
    assert 1 < len(passes) <= 4
    assert max(p.num_tokens for p in passes) <= most


@pytest.mark.parametrize(("checkpointing", "factor"), [(False, 4), (True, 1)])
def test_a_token_budget_bounds_passes_without_gradients_too(checkpointing: bool, factor: int, tmp_path: Path) -> None:
    trainer = make_trainer(
        "dpo",
        tmp_path,
        gradient_accumulation_steps=2,
        max_tokens_per_micro_batch=60,
        activation_checkpointing=checkpointing,
    )
    with passes_of(trainer.reference._model) as passes:
        trainer.train()
    assert len(passes) > 1
    assert max(p.num_tokens for p in passes) <= factor * 60


@pytest.mark.parametrize(
    ("options", "steps", "old_policy_passes"),
    [
        pytest.param({}, 2, 0, id="on-policy"),
        pytest.param({"num_iterations": 3}, 3, 0, id="fresh log-probs serve later iterations"),
        pytest.param({"steps_per_generation": 3}, 3, 2, id="a pass for each later minibatch"),
        pytest.param({"steps_per_generation": 2, "num_iterations": 2}, 4, 1, id="and none again when it is reused"),
    ],
)
def test_old_log_probs_cost_a_pass_only_where_the_policy_has_moved(
    options: dict[str, int], steps: int, old_policy_passes: int, tmp_path: Path
) -> None:
    trainer = make_trainer("grpo", tmp_path, max_steps=steps, **options)
    with passes_of(trainer.policy) as passes:
        trainer.train()
    assert [p.has_gradients for p in passes].count(True) == steps
    assert [p.has_gradients for p in passes].count(False) == old_policy_passes


def reward_with_a_dull_group(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """Equal rewards in the groups of some prompts."""
    return [0.5 if len(prompt) % 2 else float(len(text)) for prompt, text in zip(prompts, completions, strict=True)]


def test_groups_without_signal_are_left_out_and_still_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(name: str) -> tuple[torch.Tensor, int]:
        trainer = make_trainer(
            "grpo",
            tmp_path / name,
            per_device_train_batch_size=16,
            beta=0.0,
            reward=reward_with_a_dull_group,
            shuffle_dataset=False,
        )
        with passes_of(trainer.policy) as passes:
            update = update_of(trainer)
        return update, sum(p.num_tokens for p in passes)

    update, num_tokens = train("left-out")
    monkeypatch.setattr(PolicyObjective, "has_gradient", lambda _, batch: [True] * batch.num_rows)
    everything, all_tokens = train("all")
    assert 0 < num_tokens < all_tokens
    assert relative_difference(update, everything) < 1e-5


# Operations whose result decides shapes or branches on the host, so that the host waits for the device.
_WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.unique_dim.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten.bincount.default,
}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


class NoWaiting(TorchDispatchMode):
    """Fails where an accelerator's host would wait. Tensors made from host numbers are not told apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_mask = func in _INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
        kwargs = kwargs or {}
        assert func not in _WAITING or "output_size" in kwargs, f"{func} waits for the device"
        assert not is_mask, f"{func} with a mask waits for the device"
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("sft", {"assistant_only_loss": False, "completion_only_loss": True, "loss_type": "dft"}),
        ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "use_weighting": True}),
        ("grpo", {"beta": 0.1, "importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2}),
        ("grpo", {"mask_truncated_completions": True, "loss_type": "dr_grpo"}),
        ("distillation", {"later_tokens": True, "beta": 1.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "default",
)
def test_a_step_does_not_wait_for_the_device(algorithm: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Without options, test_pretend.py tells for every trainer."""
    trainer = make_trainer(algorithm, tmp_path, max_steps=2, **options)
    verdict_of(trainer.policy)
    assert train_inside(trainer, lambda _: NoWaiting()) == 2
