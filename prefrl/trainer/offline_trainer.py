"""What trainers on a fixed dataset share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefrl import distributed
from prefrl.data.collate import sft_batch
from prefrl.data.samplers import EpochDataLoader, StepBatchSampler
from prefrl.errors import ConfigError
from prefrl.metrics import Mean, Metric
from prefrl.trainer.base_trainer import BaseTrainer
from prefrl.types import TokenBatch

if TYPE_CHECKING:
    from torch import nn

    from prefrl.trainer.offline_config import OfflineConfig

__all__ = ["OfflineTrainer"]


class OfflineTrainer(BaseTrainer):
    """Rows of a dataset in, one normalised update for each optimizer step out."""

    args: OfflineConfig

    def collate(self, rows: list[dict[str, Any]]) -> TokenBatch | None:
        """The flat batch of some rows; None for no rows."""
        return sft_batch(rows) if rows else None

    def get_train_dataloader(self) -> EpochDataLoader:
        """Micro-batches of this rank, see `StepBatchSampler`."""
        if self.train_dataset is None:
            raise ConfigError("train_dataset=None: training needs a dataset")
        sampler = StepBatchSampler(
            len(self.train_dataset),
            micro_batch_size=self.args.per_device_train_batch_size,
            micro_batches_per_step=self.args.gradient_accumulation_steps,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            shuffle=self.args.train_sampling_strategy == "random",
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_last=self.args.dataloader_drop_last,
        )
        if len(sampler) == 0:
            raise ConfigError(
                f"the dataset's {len(self.train_dataset)} rows do not fill one step of {sampler.rows_per_step}, and "
                "dataloader_drop_last=True leaves shorter steps out"
            )
        return self._loader(self.train_dataset, sampler)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> EpochDataLoader:
        """All rows of an evaluation dataset in order, shared out over the ranks."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        sampler = StepBatchSampler(
            len(dataset),
            micro_batch_size=self.args.per_device_eval_batch_size,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        return self._loader(dataset, sampler)

    def _loader(self, dataset: Any, sampler: StepBatchSampler) -> EpochDataLoader:
        return EpochDataLoader(
            dataset,
            sampler,
            collate_fn=self.collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=False,  # batches are moved by _prepare_inputs
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def micro_batches_of_step(self, items: list[TokenBatch | None]) -> tuple[list[TokenBatch], float]:
        """The loader's micro-batches as they are, or cut anew by tokens."""
        batches = [batch for batch in items if batch is not None]
        count = sum(float(self.num_items(batch)) for batch in batches)
        if batches and self.args.max_tokens_per_micro_batch is not None:
            batches = TokenBatch.concat(batches).split(self.args.max_tokens_per_micro_batch)
        return batches, count

    def evaluation_step(self, model: nn.Module, item: TokenBatch | None) -> dict[str, Metric]:
        """The loss and its metrics on one micro-batch."""
        if item is None:
            return {}
        count = float(self.num_items(item))
        output = self.loss(model, item.to(self.args.device))
        return {"loss": Mean(output.total, count), **output.metrics}

    def rows_of(self, item: TokenBatch | None) -> int:
        """Rows in a micro-batch."""
        return 0 if item is None else item.num_rows
