"""Run by test_pretend.py: trains on the pretend device, with options of every kind, and on the CPU to compare."""

from __future__ import annotations

import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from prefrl.errors import NonFiniteError
from prefrl.models.forward import verdict_of
from prefrl.registry import REGISTRY
from prefrl.rewards import ModelReward
from prefrl.scripts.commands import replay as main_of_replay
from prefrl.trainer.base_trainer import BaseTrainer
from prefrl.trainer.sft_trainer import SFTTrainer
from prefrl.types import LossOutput
from tests import plans, pretend
from tests.assets import tiny_reward_model, tiny_tokenizer
from tests.contract.cases import (
    ONLINE,
    REPRESENTATIVES,
    dataset_of,
    make_trainer,
    model_of,
    relative_difference,
    train_inside,
)
from tests.process import leave_modules_uncollected

STEPS = 2
# Sets of options that cut, lay out or repeat the work in another way: on the CPU, the update is the one without them.
SAME_UPDATE = (
    "packed checkpoints and resumed",
    "budget and average",
    "accumulation and evaluated",
    "padded",
    "precomputed",
)
# Of the representatives, those with all that trainers share, offline and online.
THOROUGH = ("sft", "grpo")
OF_EACH = {"packed checkpoints and resumed", "accumulation and evaluated"}
# An adapter's reference, a critic's optimizer, and a head that is not of words.
OWN_OF = {"dpo": {"lora"}, "ppo": {"adamw"}, "reward": {"padded"}}
# Rows of a step.
ROWS = {algorithm: 8 if algorithm in ONLINE else 4 for algorithm in REGISTRY}


@dataclass
class Outcome:
    """What training on the pretend device came to."""

    error: str = ""
    difference: float = 0.0  # of the update, from the CPU's
    inside: frozenset[pretend.Wait] = frozenset()  # waits within forward and backward, after the first step
    outside: frozenset[pretend.Wait] = frozenset()  # all others


def option_sets(algorithm: str) -> dict[str, dict[str, Any]]:
    """Runs of an algorithm that take different ways through the code: six or more of `THOROUGH`.

    With LoRA, the reference is the model without its adapter, elsewhere a copy of it. What trainers share is tried
    with those alone; the other representatives have what they keep, evaluate and load of their own. Of an algorithm
    that another one represents, all that it has of its own is in one run.
    """
    saved = {"save_strategy": "steps", "save_steps": 1}
    cut = {"per_device_train_batch_size": ROWS[algorithm] // 2, "gradient_accumulation_steps": 2}
    cut |= {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": dataset_of(algorithm, 5)}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    shared: dict[str, dict[str, Any]] = {
        "adamw": {
            **{"optim": "adamw_torch_fused", "adam_epsilon": 1e-3, "weight_decay": 0.1},
            **{"learning_rate": 0.01, "max_grad_norm": 1.0},
        },
        "lora": {"peft_config": lora},
        "packed checkpoints and resumed": {"activation_checkpointing": True, "forward_plan": "packed", **saved},
        "budget and average": {"max_tokens_per_micro_batch": 40, "ema_decay": 0.9},
        "accumulation and evaluated": cut,
        "padded": {"forward_plan": "padded"},
    }
    if algorithm not in REPRESENTATIVES:
        shared = {"accumulation and evaluated": {**cut, **saved}}
    elif algorithm not in THOROUGH:
        shared = {name: options for name, options in shared.items() if name in OF_EACH | OWN_OF.get(algorithm, set())}
    own: dict[str, dict[str, Any]] = {}
    if algorithm in ("dpo", "kto", "bco"):
        own["precomputed"] = {"precompute_ref_log_probs": True}
    if algorithm in ("dpo", "grpo"):
        own["moving reference"] = {"sync_ref_model": True, "ref_model_sync_steps": 1}
    if algorithm in ONLINE:
        own["reuse"] = {"num_iterations": 2, "steps_per_generation": 2}
    if algorithm in ("grpo", "ppo"):
        own["episodes"] = {"talks": "forgetful"}
    if algorithm == "grpo":
        own["reward model"] = {"reward": ModelReward(tiny_reward_model(), tokenizer=tiny_tokenizer())}
        own["sampling"] = {"top_k": None, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}
    if algorithm in ("sft", "grpo"):
        own["images"] = {"pictures": "qwen2_5_vl"}
    return shared | own


def outcome(algorithm: str, name: str, folder: Path) -> Outcome:
    """Train on both devices."""
    on_cpu = _update_on_cpu(algorithm, "" if name in SAME_UPDATE else name)
    with pretend.device() as waits:
        options = option_sets(algorithm)[name]
        on_device, inside = _train(algorithm, options, folder, use_cpu=False, bf16=False)
        return Outcome(
            difference=relative_difference(on_device, on_cpu),
            inside=frozenset(inside),
            outside=frozenset(waits) - frozenset(inside),
        )


@cache
def _update_on_cpu(algorithm: str, name: str) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        options = option_sets(algorithm)[name] if name else {}
        return _train(algorithm, options, Path(folder), use_cpu=True)[0]


def replayed(folder: Path) -> Outcome:
    """Train until a step is kept because its loss is NaN, and compute it again; it has its loss without the NaN."""
    losses: list[float] = []
    with pretend.device() as waits:
        trainer = make_trainer("dpo", folder, use_cpu=False, bf16=False)
        loss = trainer.loss

        def broken(model: Any, batch: Any) -> LossOutput:
            found = loss(model, batch)
            losses.append(found.total.raw.item() / (batch.num_rows // 2))
            return replace(found, total=found.total * math.nan)

        trainer.loss = broken
        with pytest.raises(NonFiniteError):
            trainer.train()
        kept = folder / "nan-step-1"
        with redirect_stdout(StringIO()) as text:
            assert main_of_replay([str(kept)]) == 0
        # Of process 0 and micro-batch 0: rows, tokens, loss, and the norm of the gradient.
        (row,) = (cells for line in text.getvalue().splitlines() if (cells := line.split())[:2] == ["0", "0"])
        return Outcome(difference=abs(float(row[4]) - losses[0]), outside=frozenset(waits))


def _train(
    algorithm: str, options: dict[str, Any], folder: Path, **device: Any
) -> tuple[torch.Tensor, list[pretend.Wait]]:
    """The change of the weights, and the waits within forward and backward after the first step."""
    inside: list[pretend.Wait] = []

    @contextmanager
    def watched(step: int) -> Iterator[None]:
        before = len(pretend.waits)
        yield
        if step:
            inside.extend(pretend.waits[before:])

    def new() -> BaseTrainer:
        torch.manual_seed(0)  # of adapters
        size: dict[str, Any] = {"per_device_train_batch_size": ROWS[algorithm]}
        if algorithm in ONLINE and "talks" not in options:
            size["max_completion_length"] = 6
        model = model_of(algorithm, num_hidden_layers=1)  # each operation is dispatched by Python
        return make_trainer(algorithm, folder, model=model, max_steps=STEPS, **{**size, **options}, **device)

    trainer = new()
    verdict_of(trainer.policy)
    before = _weights(trainer)
    train_inside(trainer, watched)
    if "save_steps" in options:
        trainer = new()
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    after = _weights(trainer)
    return torch.cat([(after[name] - value).flatten() for name, value in before.items()]), inside


def _weights(trainer: BaseTrainer) -> dict[str, torch.Tensor]:
    """Copies on the CPU, without a recorded wait."""
    return {name: getattr(weight, "raw", weight).detach().clone() for name, weight in trainer.model.named_parameters()}


def _mixed(loss: torch.Tensor) -> torch.Tensor:
    return (loss.reshape(1) + torch.zeros(1)).sum()


def _from_the_host(loss: torch.Tensor) -> torch.Tensor:
    return loss + torch.nn.functional.linear(torch.ones(1, 1), loss.reshape(1, 1)).sum() * 0


# What somebody might add to a loss: a function of a step's loss, which gives the same loss.
FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a tensor of the host is added": _mixed,
    "a matrix of the host is multiplied": _from_the_host,
    "an index of the host": lambda loss: loss.expand(2)[torch.tensor([0])].sum(),
    "a mask": lambda loss: loss.reshape(1)[torch.ones(1, dtype=torch.bool, device=loss.device)].sum(),
    "bool": lambda loss: loss if loss > 0 else loss * 1,
    "item": lambda loss: loss * (1 + 0 * loss.item()),
    "tolist": lambda loss: loss * (1 + 0 * loss.tolist()),
    "nonzero": lambda loss: loss * (1 + 0 * loss.reshape(1).nonzero().numel()),
    "a copy on the host": lambda loss: loss + loss.detach().cpu() * 0,
    "numpy": lambda loss: loss * (1 + 0 * loss.detach().numpy()),
    "repeat_interleave": lambda loss: loss.reshape(1).repeat_interleave(torch.ones_like(loss.reshape(1)).long()).sum(),
}


def with_fault(name: str, folder: Path) -> Outcome:
    """Train with one of the faults in the loss."""
    original = SFTTrainer.full_loss

    def broken(self: Any, model: Any, batch: Any) -> LossOutput:
        found = original(self, model, batch)
        return replace(found, total=FAULTS[name](found.total))

    with pytest.MonkeyPatch.context() as patch, pretend.device():
        patch.setattr(SFTTrainer, "full_loss", broken)
        return Outcome(inside=frozenset(_train("sft", {}, folder, use_cpu=False, bf16=False)[1]))


def main(result: str, what: list[str]) -> None:
    """Store the outcome of each set of options of algorithms, or of each fault."""
    plans.check_once()
    found: dict[tuple[str, str], Outcome] = {}
    jobs: list[tuple[tuple[str, str], Callable[[Path], Outcome]]] = [
        ((algorithm, name), partial(outcome, algorithm, name)) for algorithm in what for name in option_sets(algorithm)
    ]
    if "dpo" in what:
        jobs.append((("dpo", "replay"), replayed))
    for key, job in jobs or [(("sft", name), partial(with_fault, name)) for name in FAULTS]:
        leave_modules_uncollected()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[key] = job(Path(folder))
            except Exception:
                found[key] = Outcome(error=traceback.format_exc(limit=-6)[-3000:])
    torch.save({key: _plain(value) for key, value in found.items()}, result)


def _plain(found: Outcome) -> dict[str, Any]:
    waits = {part: sorted(map(tuple, getattr(found, part))) for part in ("inside", "outside")}
    return {"error": found.error, "difference": found.difference, **waits}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
