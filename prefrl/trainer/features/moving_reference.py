"""A reference model that moves toward the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file

from prefrl import distributed
from prefrl.trainer.optimizers import discard_state
from prefrl.trainer.parts import Part, Run

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.models.reference import Reference

_FILE = "reference.safetensors"


class MovingReference(Part):
    """reference = alpha * policy + (1 - alpha) * reference, every `steps` optimizer steps; None: a callback moves it.

    Args:
        reference: Moves.
        alpha: Share of the policy.
        steps: Optimizer steps between two moves; None: a callback moves it.
        resets_optimizer: Whether the optimizer's state is discarded with each move.

    Source: Gorbatovski et al. 2024 (TR-DPO), arXiv 2404.09656, eq. 2.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        alpha: float = 0.0,
        steps: int | None = None,
        resets_optimizer: bool = False,
    ) -> None:
        self.reference = reference
        self.alpha = alpha
        self.steps = steps
        self.resets_optimizer = resets_optimizer

    def after_step(self, run: Run) -> None:
        """Mix the policy into the reference, if it is due."""
        if self.steps is not None and run.state.global_step % self.steps == 0:
            self.reference.mix(distributed.unwrap(run.model), self.alpha)
            if self.resets_optimizer:
                discard_state(run.optimizer)

    def save(self, run: Run, folder: Path) -> None:
        """Write the weights that move; processes that do not write hold one of them at a time."""
        state = distributed.whole_on_host(self.reference.state_dict(), keep=run.args.should_save)
        if run.args.should_save:
            save_file(state, folder / _FILE)

    def load(self, run: Run, folder: Path) -> None:
        """Read what `save` wrote, one weight at a time."""
        with safe_open(folder / _FILE, framework="pt") as file:
            self.reference.load_state_dict(_Tensors(file))


class _Tensors(Mapping[str, "Tensor"]):
    """The tensors of a file, each read on access."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())
