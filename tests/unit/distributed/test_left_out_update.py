"""An update that is left out under the loss scaler of float16, which GPUs use and which also runs here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from prefrl import distributed


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
