"""An update that is left out: under the loss scaler of float16, which also runs here, and by the device itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from prefrl import distributed

CPU = torch.device("cpu")


def test_the_scaler_goes_on_after_an_update_that_was_left_out() -> None:
    accelerator = Accelerator(cpu=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    setup = SimpleNamespace(
        scaler=scaler,
        gradient_state=accelerator.gradient_state,
        distributed_type=accelerator.distributed_type,
        mixed_precision="fp16",
    )
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.5), scaler=scaler)
    values = []
    for leaves_out in (False, True, False):
        accelerator.gradient_state._set_sync_gradients(True)  # as HuggingFace does in each step
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer.optimizer)  # as clipping does
        distributed.leave_out_update(setup, optimizer, leaves_out=leaves_out)
        optimizer.step()
        values.append((float(weight.detach()), optimizer.step_was_skipped))
    assert values == [(0.5, False), (0.5, True), (0.0, False)]


@pytest.mark.parametrize(
    ("precision", "scale", "expected"), [("fp16", 2.0, True), ("fp16", 1.0, False), ("bf16", 2.0, False)]
)
def test_gradients_may_overflow_while_the_scale_is_above_one(precision: str, scale: float, expected: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    setup = SimpleNamespace(scaler=scaler, mixed_precision=precision)
    scaler.scale(torch.ones(()))  # sets the scale
    assert distributed.is_finding_scale(setup) is expected


class Changed(torch.optim.AdamW):
    """May do more in a step than AdamW."""


def decides(
    kind: Any = torch.optim.AdamW,
    device: torch.device = CPU,
    backend: str = "NO",
    scaler: object = None,
    **options: Any,
) -> bool:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = SimpleNamespace(optimizer=kind([weight], lr=0.1, **options))
    accelerator = SimpleNamespace(distributed_type=backend, scaler=scaler)
    return distributed.updates_conditionally(accelerator, optimizer, device)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_with_fused_adam_it_does(kind: Any) -> None:
    assert decides(kind, fused=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"fused": None},
        {"kind": Changed},
        {"kind": torch.optim.SGD},
        {"backend": "DEEPSPEED"},
        {"scaler": "a scaler"},
        {"device": torch.device("cuda:0")},  # where the numbers are; the weights are on the host
    ],
    ids=str,
)
def test_otherwise_the_host_does(changed: dict[str, Any]) -> None:
    assert not decides(**{"fused": True, **changed})


def test_the_condition_holds_for_one_update() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW([weight], fused=True))
    accelerator: Any = SimpleNamespace(distributed_type="NO", scaler=None, gradient_state=SimpleNamespace())
    accelerator.gradient_state._set_sync_gradients = lambda _: None
    for is_left_out in (True, False, True):
        before = weight.detach().clone()
        weight.grad = torch.ones(3)
        distributed.leave_out_update_if(optimizer, torch.tensor(is_left_out))
        optimizer.optimizer.step()
        distributed.leave_out_update(accelerator, optimizer, leaves_out=is_left_out)
        assert torch.equal(weight, before) == is_left_out
        assert optimizer._is_overflow == is_left_out
    weight.grad = torch.ones(3)
    optimizer.optimizer.step()
    assert not torch.equal(weight, before)
    assert optimizer.optimizer.state[weight]["step"] == 2
