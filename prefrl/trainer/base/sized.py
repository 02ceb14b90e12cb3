"""A trainer whose sizes and learning rate may be "auto"."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.models.adapters import is_peft_model
from prefrl.options.size import automatic_rate
from prefrl.run.records import Identity, write_identity
from prefrl.trainer.base.guarded import GuardedTrainer
from prefrl.trainer.base.sizes.auto import AutomaticSizes, LongBatch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prefrl.trainer.base.config import BaseConfig
    from prefrl.types import TokenBatch

__all__ = ["SizedTrainer"]


class SizedTrainer(GuardedTrainer):
    """HuggingFace's loop, before which the options that are "auto" get their values.

    Args:
        model: What is trained, with its adapter if it has one.
        args: Options.
        arguments: See HuggingFace's `Trainer`.

    Raises:
        ConfigError: The backend fixes sizes before they can be found.
    """

    def __init__(self, *, model: nn.Module, args: BaseConfig, **arguments: Any) -> None:
        if "learning_rate" in args.automatic:
            args.learning_rate = automatic_rate(args, has_adapter=is_peft_model(model))
        super().__init__(model=model, args=args, **arguments)
        _check_backend(args, is_deepspeed=self.is_deepspeed_enabled, is_fsdp=self.is_fsdp_enabled)
        self.sizes = AutomaticSizes(args, model, self.trial, self._run_trial)

    @abstractmethod
    def trial(self, num_rows: int) -> AbstractContextManager[LongBatch]:
        """A context with a micro-batch of rows that are as long as any.

        At its end, everything that the next update depends on is as it was before. All ranks must enter it.
        """

    @abstractmethod
    def _micro_step(
        self, model: nn.Module, batch: TokenBatch, num_items: Tensor | float | None, *, is_last: bool
    ) -> Tensor:
        """Forward and backward pass of one micro-batch."""

    def _run_trial(self, batch: TokenBatch) -> None:
        metrics = self.metrics["train"]
        self.metrics["train"] = {}
        with self.accelerator.autocast():  # accelerate wraps the model's forward only once training has started
            self._micro_step(self.model, batch, 1.0, is_last=True)
        self.metrics["train"] = metrics

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """HuggingFace's hook: the loop, whose data loader and schedule depend on the sizes."""
        num_rows = len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None
        self.sizes.settle(self._start.sizes, num_rows=num_rows)
        if self.sizes.found:  # a resumed run needs them, also before there is a checkpoint
            distributed.on_main(lambda: write_identity(self.run_folder.path, self._identity()))
        self._train_batch_size = self.args.train_batch_size  # HuggingFace's copy, for its state
        return super()._inner_training_loop(*args, **kwargs)

    def _identity(self) -> Identity:
        identity = replace(super()._identity(), sizes=self.sizes.found)
        if self.args.sought == {"per_device_train_batch_size"}:  # `sizes` knows how many rows were found
            return replace(identity, decisive={**identity.decisive, "rows_per_step": "auto"})
        return identity


def _check_backend(args: BaseConfig, *, is_deepspeed: bool, is_fsdp: bool) -> None:
    """Reject what cannot be found before the first step.

    Raises:
        ConfigError: Names the options.
    """
    names = args.automatic - {"learning_rate"} if is_deepspeed else args.sought if is_fsdp else frozenset()
    if names:
        backend = "DeepSpeed" if is_deepspeed else "FSDP"
        raise ConfigError(
            f"{' and '.join(sorted(names))}='auto' with {backend}: weights are partitioned only when training begins, "
            "after the data loader needs the sizes. Find them once on one process, or set numbers."
        )
