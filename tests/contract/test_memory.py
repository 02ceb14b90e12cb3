"""The memory of a training step, and that options that save memory do not change the update."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prefrl.losses import logprobs
from prefrl.models import forward, selfcheck
from prefrl.models.adapters import lora_config
from prefrl.models.footprint import Footprint, activations_of, head_bytes, weights_of
from prefrl.models.kernels import OffloadActivations
from prefrl.registry import REGISTRY
from prefrl.trainer.base_trainer import BaseTrainer
from prefrl.trainer.features.kernels import Offloading
from tests.contract.cases import REPRESENTATIVES, make_trainer, relative_difference, update_of
from tests.contract.memory_worker import BUDGET, MIB, ROWS, Case, CudaGauge, _model, growth_mib, measure

# MiB that a step of `Case(algorithm)` takes on one thread of a CPU, its 8 MiB of gradients included.
MEASURED = {"grpo": 48, "dpo": 63, "reward": 58, "sft": 50}
BOUNDS = {name: 1.25 * measured for name, measured in MEASURED.items()}


# Tokens that go through the model in such a step, and those whose log-probs are computed.
TOKENS = {"grpo": (796, 540), "dpo": (1152, 640), "reward": (1156, 0), "sft": (960, 956)}


def estimated(algorithm: str, monkeypatch: pytest.MonkeyPatch, *, checkpointed: bool = False) -> float:
    """MiB by `prefrl.models.footprint`."""
    monkeypatch.setattr(logprobs, "KEPT_BYTES", 0)  # as in the process that measures
    num_fed, num_scored = TOKENS[algorithm]
    model = _model(algorithm)
    head = head_bytes(model, num_scored, device=torch.device("cpu"))
    weights = weights_of(model)
    activations = activations_of(model, num_fed).peak(head, checkpointed=checkpointed)
    return (
        Footprint(
            weights=0,
            gradients=weights.trained,
            optimizer=0,
            reference=0,
            activations=activations,
            cache=0,
            first_gradients=weights.head,
        ).peak
        / MIB
    )


def budgeted(algorithm: str, times: int) -> Case:
    """Micro-batches of half the tokens of one time the rows."""
    return Case(algorithm, times, {"max_tokens_per_micro_batch": BUDGET[algorithm]})


PLAIN = {name: Case(name) for name in ROWS}
# Bounds that these exceed are narrow enough.
WASTEFUL = [Case("sft", options={"forward_plan": "padded"})]
WASTEFUL += [Case(name, full_logits=True) for name in ("grpo", "dpo")]
# What checkpoints and budgets do is the same for rows of every kind: with the head over words, and without it.
CHECKPOINTED = {name: Case(name, options={"activation_checkpointing": True}) for name in ("sft", "reward")}
# Twice the rows have two micro-batches of the full budget; the second one adds to gradients that are there.
# Once the rows have only one that is full. Groups of completions, and pairs.
BUDGETED = {name: (budgeted(name, 2), budgeted(name, 3)) for name in ("grpo", "dpo")}
UNBOUNDED = Case("dpo", 2)
MEASURED_CASES = [*PLAIN.values(), *WASTEFUL, *CHECKPOINTED.values(), *chain(*BUDGETED.values()), UNBOUNDED]


GrowthOf = Callable[[Case], float]


@pytest.fixture(scope="module")
def growth_of() -> GrowthOf:
    """In MiB. One process measures all cases."""
    growth = dict(zip(map(str, MEASURED_CASES), measure(MEASURED_CASES), strict=True))
    return lambda case: growth[str(case)]


def test_a_step_takes_no_more_memory_than_it_did_and_what_is_estimated(
    growth_of: GrowthOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = {name: growth_of(case) for name, case in PLAIN.items()}
    assert not {name: mib for name, mib in growth.items() if mib > BOUNDS[name]}
    assert {name: estimated(name, monkeypatch) for name in growth} == pytest.approx(growth, rel=0.2)


def test_padding_and_whole_logits_would_not_go_unnoticed(growth_of: GrowthOf) -> None:
    assert not [case for case in WASTEFUL if growth_of(case) <= BOUNDS[case.algorithm]]


def test_a_token_budget_bounds_the_memory_of_a_step_of_any_number_of_rows(growth_of: GrowthOf) -> None:
    for name, cases in BUDGETED.items():
        few, many = map(growth_of, cases)
        assert many < 1.1 * few, name
    assert growth_of(UNBOUNDED) > 1.6 * MEASURED[UNBOUNDED.algorithm]


def test_checkpointing_halves_the_memory_of_a_step_as_estimated(
    growth_of: GrowthOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = {name: growth_of(case) for name, case in CHECKPOINTED.items()}
    assert not {name: mib for name, mib in growth.items() if mib > MEASURED[name] / 2}
    assert {name: estimated(name, monkeypatch, checkpointed=True) for name in growth} == pytest.approx(growth, rel=0.2)


class Runs:
    """Counts passes through each layer, those of checkpoints that are computed again included."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: dict[str, int] = {}
        self.frozen_in_training_mode = 0
        for name, module in model.named_modules():
            if name.endswith("self_attn"):
                self.counts[name] = 0
                module.register_forward_hook(self._count(name))

    def _count(self, name: str) -> Any:
        def count(module: nn.Module, *_: Any) -> None:
            self.counts[name] += 1
            self.frozen_in_training_mode += module.training and not torch.is_grad_enabled()

        return count


_plain: dict[tuple[str, bool], tuple[torch.Tensor, dict[str, int]]] = {}


def trained(name: str, with_adapter: bool, folder: Path, **options: Any) -> tuple[torch.Tensor, Runs]:
    """The update of two steps, and the passes that they took."""
    if with_adapter:
        options["peft_config"] = lora_config(r=4, target_modules=["q_proj", "down_proj"])
    trainer = make_trainer(name, folder, max_steps=2, **options)
    runs = Runs(trainer.model)
    return update_of(trainer), runs


def expected(name: str, with_adapter: bool, folder: Path) -> tuple[torch.Tensor, dict[str, int]]:
    """Without checkpoints, computed once."""
    key = (name, with_adapter)
    if key not in _plain:
        update, runs = trained(*key, folder)
        assert update.norm() > 1e-4
        _plain[key] = update, runs.counts
    return _plain[key]


@pytest.mark.parametrize(
    ("name", "use_reentrant", "with_adapter"),
    [(name, False, False) for name in (*REPRESENTATIVES, "online_dpo", "distillation")]
    + [(name, True, True) for name in REPRESENTATIVES]
    + [(name, kind, not kind) for name in ("sft", "grpo") for kind in (False, True)],
)
def test_checkpointing_computes_each_layer_once_more_and_changes_no_update(
    name: str, use_reentrant: bool, with_adapter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "check_plans", selfcheck.check_plans)  # in both runs, or in none: its passes count
    update, counts = expected(name, with_adapter, tmp_path)
    checkpointed, runs = trained(
        name,
        with_adapter,
        tmp_path,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": use_reentrant},
    )
    assert relative_difference(checkpointed, update) < 1e-5
    # Two steps of one micro-batch. Passes of a reference, of a generator or before a step are as many as they were.
    assert {layer: count - 2 for layer, count in runs.counts.items()} == counts
    if not use_reentrant:  # reentrant checkpoints run forward without gradients
        assert runs.frozen_in_training_mode == 0


class CountingOffload(OffloadActivations):
    """Moves what is of any size, and counts it."""

    def __init__(self) -> None:
        super().__init__("cuda", smallest_bytes=0)
        self.num_moved = 0
        move = self.pack_hook

        def pack(tensor: torch.Tensor) -> Any:
            packed = move(tensor)
            self.num_moved += isinstance(packed, tuple)
            return packed

        self.pack_hook = pack


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in REPRESENTATIVES]
    + [(name, {"activation_checkpointing": True}) for name in ("sft", "grpo")],
    ids=str,
)
def test_offloading_changes_no_bit_of_an_update(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(name, tmp_path, **options)
    update = update_of(make_trainer(name, tmp_path, **options))
    offload = CountingOffload()
    trainer.parts.add(Offloading(lambda: offload))  # the option is an error on a CPU
    assert torch.equal(update_of(trainer), update)
    assert offload.num_moved > 0


def gpu(test: Any) -> Any:
    """Marks a test of a CUDA device."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


def gpu_growth(case: Case, folder: Path) -> float:
    """As torch's allocator counts it, in this process."""
    return growth_mib(case, CudaGauge(), folder)


@gpu
@pytest.mark.parametrize("name", ROWS)
def test_on_a_gpu_a_token_budget_bounds_the_memory_of_a_step(name: str, tmp_path: Path) -> None:
    many = gpu_growth(budgeted(name, 16), tmp_path)
    assert many < 1.15 * gpu_growth(budgeted(name, 4), tmp_path)
    assert many < 0.4 * gpu_growth(Case(name, 16), tmp_path)


@gpu
@pytest.mark.parametrize("name", ROWS)
def test_on_a_gpu_padding_and_whole_logits_need_more(name: str, tmp_path: Path) -> None:
    growth = gpu_growth(Case(name, 4), tmp_path)
    assert growth < 0.8 * gpu_growth(Case(name, 4, {"forward_plan": "padded"}), tmp_path)
    if name != "reward":
        # The allocator's figures do not depend on what else runs: this many chunks of logits are never held together.
        assert growth < 0.8 * gpu_growth(Case(name, 4, full_logits=True), tmp_path)


@gpu
@pytest.mark.parametrize("name", ROWS)
def test_on_a_gpu_checkpointing_and_offloading_save_memory(name: str, tmp_path: Path) -> None:
    growth = gpu_growth(Case(name, 4), tmp_path)
    checkpointed = gpu_growth(Case(name, 4, {"activation_checkpointing": True}), tmp_path)
    offloaded = gpu_growth(Case(name, 4, {"activation_offloading": True}), tmp_path)
    both = gpu_growth(Case(name, 4, {"activation_checkpointing": True, "activation_offloading": True}), tmp_path)
    assert checkpointed < 0.5 * growth
    assert offloaded < 0.5 * growth
    assert both < checkpointed


@gpu
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["all", "checkpoints"])
@pytest.mark.parametrize("name", REGISTRY)
def test_on_a_gpu_offloading_changes_no_update(name: str, checkpointing: bool, bf16: bool, tmp_path: Path) -> None:
    def trainer(*, offloading: bool) -> BaseTrainer:
        return make_trainer(
            name,
            tmp_path,
            use_cpu=False,
            bf16=bf16,
            activation_checkpointing=checkpointing,
            activation_offloading=offloading,
        )

    update = update_of(trainer(offloading=False))
    offloading, offload = trainer(offloading=True), CountingOffload()
    assert isinstance(offloading.parts[Offloading].activations(), OffloadActivations)
    offloading.parts[Offloading].activations = lambda: offload  # tiny tensors, too
    # Some CUDA kernels add in any order.
    assert relative_difference(update_of(offloading), update) < (1e-2 if bf16 else 1e-5)
    assert offload.num_moved > 0
