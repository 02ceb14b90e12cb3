"""The self-check of models, once for those that are built alike: most trainings of tests would repeat it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from prefrl.models import forward, selfcheck
from prefrl.models.attention import interface as attention
from prefrl.models.plans import PlanVerdict
from prefrl.models.scoring import prepare_for_scoring
from prefrl.types import TokenBatch

# What was found, and whether the check has left our attention in the model.
_known: dict[str, tuple[PlanVerdict, bool]] = {}


def check_plans(model: nn.Module, image_example: TokenBatch | None = None) -> PlanVerdict:
    """`prefrl.models.selfcheck.check_plans`. All processes of a training find the same models here."""
    state = prepare_for_scoring(model)
    config, parameter = state.model.config, next(model.parameters())
    kind = (state.fingerprint(model), state.is_compiled, image_example is None, parameter.dtype, parameter.device)
    text = config.to_dict() | {"_name_or_path": ""}  # where it was loaded from is nothing of the model
    key = f"{kind} {torch.is_autocast_enabled('cpu')} {model} {text}"
    if key not in _known:
        verdict = selfcheck.check_plans(model, image_example)
        _known[key] = verdict, attention.reads_layouts(state.model)
        return verdict
    verdict, is_installed = _known[key]
    (attention.install if is_installed else attention.uninstall)(state.model)
    return replace(verdict, fingerprint=state.fingerprint(model))


def check_once() -> None:
    """From now on, in a process that trains many models and tests nothing of the check."""
    forward.check_plans = check_plans


@pytest.fixture(autouse=True)
def checked_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For folders whose tests train models that are built alike. Tests of the check are in tests/unit/models.

    On a GPU each model is checked: which kernels it gets there is what those tests are about.
    """
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(forward, "check_plans", check_plans)
