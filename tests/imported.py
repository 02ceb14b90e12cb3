"""Imports what trainings of tests need. `tests/launch.py` forks their processes from one that has done so."""

from __future__ import annotations

import deepspeed  # noqa: F401 - accelerate does, with each process's first trainer
import peft  # noqa: F401

import tests.contract.cases  # noqa: F401
from prefrl.registry import REGISTRY
from tests.assets import tiny_model

for row in REGISTRY.values():
    row.load_trainer()
tiny_model()
