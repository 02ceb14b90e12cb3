"""Other kernels for the same computation: Liger's, products in 8 bits, torch.compile, and activations on the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

from torch import nn

from prefrl.models.kernels import OffloadActivations, apply_liger, compile_layers, compute_in_fp8
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.parts import Part, Role, Run
from prefrl.types import LossOutput, TokenBatch


def kernels(args: BaseConfig) -> Kernels | None:
    """What changes the models of a training, if the options ask for it."""
    return Kernels() if args.use_liger_kernel or args.fp8 or args.torch_compile else None


class Kernels(Part):
    """Patches models with Liger's kernels, lets their layers compute in 8 bits, and compiles them.

    The critic has Liger's kernels alone.
    """

    def made(self, run: Run, model: nn.Module, role: Role) -> None:
        """See `Part`."""
        args = run.args
        self._add_liger(run, model)
        if role == "critic":
            return
        if args.fp8:
            compute_in_fp8(model)
        if args.torch_compile:
            compile_layers(model, backend=args.torch_compile_backend, mode=args.torch_compile_mode)

    def prepare(self, run: Run) -> None:
        """HuggingFace has just applied Liger again, to the whole process: our choice must come last."""
        self._add_liger(run, run.policy)

    def _add_liger(self, run: Run, model: nn.Module) -> None:
        if run.args.use_liger_kernel:
            apply_liger(model, cast("dict[str, bool]", run.args.liger_kernel_config))


def offloading(args: BaseConfig) -> Offloading | None:
    """What moves activations, if the options ask for it."""
    return Offloading(partial(OffloadActivations, args.device.type)) if args.activation_offloading else None


class Offloading(Part):
    """Forward passes store what their backward passes need on the host.

    Args:
        activations: Returns the context of a forward pass that does so.
    """

    def __init__(self, activations: Callable[[], AbstractContextManager[Any]]) -> None:
        self.activations = activations

    def around_loss(self, run: Run, batch: TokenBatch, compute: Callable[[], LossOutput]) -> LossOutput:
        """See `Part`."""
        with self.activations():
            return compute()
