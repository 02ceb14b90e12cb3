"""What trainers on their own completions share: rollouts, rewards, advantages, reuse, evaluation by sampling."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import datasets
import torch
from rich.console import Console

from prefrl import distributed
from prefrl.data.samplers import EpochDataLoader, GenerationBatchSampler, StepBatchSampler, positions_of_rank
from prefrl.data.tokenize import prepare_prompt_dataset
from prefrl.errors import ConfigError, DataError
from prefrl.generation.vllm_client import VLLMGenerator
from prefrl.losses.reduce import token_weights
from prefrl.metrics import Max, Mean, Metric, Min, merge
from prefrl.models.export import PolicyWeights
from prefrl.rewards.runner import RewardRunner
from prefrl.rollout.ahead import GenerationsAhead
from prefrl.rollout.buffer import Minibatch, RolloutBuffer
from prefrl.rollout.collect import Collected, Collector, Request, ask, prompt_seed, to_token_batch
from prefrl.rollout.summary import print_table, rollout_metrics, staleness, write_parquet
from prefrl.trainer.base_config import TRUNCATION_SIDES
from prefrl.trainer.base_trainer import BaseTrainer, Optimizers
from prefrl.trainer.callbacks.new_training import NewTraining
from prefrl.trainer.generators import make_generator, server_metrics
from prefrl.types import TokenBatch

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from torch import Tensor, nn
    from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
    from transformers.trainer_utils import EvalLoopOutput

    from prefrl.generation.base import Generator
    from prefrl.losses.advantages import Advantages
    from prefrl.losses.logprobs import TokenScores
    from prefrl.rewards.base import RewardSource
    from prefrl.trainer.grpo_config import GRPOConfig
    from prefrl.types import Rollout

__all__ = ["OnlineTrainer", "clip_metrics", "token_mean"]


class OnlineTrainer(BaseTrainer):
    """Prompts in; completions, rewards and advantages of our own; one normalised update for each optimizer step out.

    A leaf gives `loss`, `num_items` and `advantages`.
    """

    args: GRPOConfig

    def __init__(  # noqa: PLR0913 - TRL's constructor
        self,
        model: str | Path | PreTrainedModel | nn.Module,
        reward_funcs: RewardSource | list[RewardSource],
        args: GRPOConfig,
        *,
        train_dataset: Dataset | None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None,
        processing_class: PreTrainedTokenizerBase | None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None,
        callbacks: list[TrainerCallback] | None,
        optimizers: Optimizers,
        peft_config: PeftConfig | None,
        quantization_config: BitsAndBytesConfig | None,
    ) -> None:
        self.rewards = RewardRunner(
            reward_funcs,
            weights=args.reward_weights,
            timeout=args.reward_timeout,
            processing_classes=reward_processing_classes,
            device=args.device,
        )
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            quantization_config=quantization_config,
        )
        self._check_dataset_size()
        self.add_reference(args)
        self.weights = PolicyWeights(self.policy)
        self.generator: Generator = make_generator(
            args, self.policy, self.processing_class, weights=self.weights, max_rows=args.completions_per_rank
        )
        self.buffer = RolloutBuffer(num_iterations=args.num_iterations)
        self.ahead = GenerationsAhead(self._ask_for, num_ahead=args.generations_ahead)
        self._fresh_logprobs: list[Tensor] = []
        self.add_callback(NewTraining(begin=self._start_over, end=self.ahead.drop))

    @abstractmethod
    def advantages(self, rewards: Tensor, groups: Tensor) -> Advantages:
        """Advantages of the whole generation batch.

        Args:
            rewards: [B, K] of all ranks; NaN where a reward has nothing to say.
            groups: [B] int64, the group of each row.
        """

    @property
    @abstractmethod
    def learns_from_zero_advantage(self) -> bool:
        """Whether a row without an advantage still has a gradient, from a KL or entropy term."""

    @property
    def scoring_temperature(self) -> float:
        """The temperature of sampling: log-probs are of the distribution sampled from."""
        return self.args.temperature

    # Datasets.

    def prepare_dataset(self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, training: bool) -> Dataset:
        """Add `prompt_ids`; the rewards find their columns."""
        if isinstance(dataset, datasets.Dataset):
            self.rewards.check_columns(dataset.column_names)
        return prepare_prompt_dataset(
            dataset,
            tokenizer,
            max_prompt_length=self.args.max_prompt_length,
            truncation=TRUNCATION_SIDES[self.args.truncation_mode],
            filter_overlong=self.args.filter_overlong_prompts,
            chat_template_kwargs=cast("dict[str, Any] | None", self.args.chat_template_kwargs),
            num_proc=self.args.dataset_num_proc,
        )

    def collate(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Dataset rows as they are."""
        return rows

    @property
    def _prompts_per_generation(self) -> int:
        return self.args.completions_per_rank // self.args.num_generations * distributed.world_size()

    def _check_dataset_size(self) -> None:
        if self.train_dataset is not None and len(self.train_dataset) < self._prompts_per_generation:
            raise DataError(
                f"train_dataset has {len(self.train_dataset)} prompts, one generation batch needs "
                f"{self._prompts_per_generation}: add prompts, or lower per_device_train_batch_size, "
                "steps_per_generation or generation_batch_size"
            )

    def get_train_dataloader(self) -> EpochDataLoader:
        """Prompts of this rank, see `GenerationBatchSampler`."""
        if self.train_dataset is None:
            raise ConfigError("train_dataset=None: training needs a dataset")
        return EpochDataLoader(self.train_dataset, self._train_sampler, collate_fn=self.collate)

    @property
    def _train_sampler(self) -> GenerationBatchSampler:
        assert self.train_dataset is not None
        return GenerationBatchSampler(
            len(self.train_dataset),
            prompts_per_window=self._prompts_per_generation,
            items_per_window=self.args.micro_batches_per_generation * self.args.num_iterations,
            num_updates=self.args.updates_per_generation,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            shuffle=self.args.shuffle_dataset,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> EpochDataLoader:
        """Prompts of an evaluation dataset in order; `per_device_eval_batch_size` counts completions."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        num_samples = self.args.sampling_params(evaluation=True).num_samples
        sampler = StepBatchSampler(
            len(dataset),
            micro_batch_size=max(1, self.args.per_device_eval_batch_size // num_samples),
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        return EpochDataLoader(dataset, sampler, collate_fn=self.collate)

    # One step.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[list[TokenBatch]], float]:
        """See `BaseTrainer.get_batch_samples`. What arrives in the step itself is counted at its end."""
        if self.args.generation_mode != "overlap":
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        self.account.start()
        items = [item for _, item in zip(range(num_batches), epoch_iterator, strict=False)]
        if not items:
            return [], 0.0
        step = ArrivingStep(self._request([row for item in items for row in item]))
        return [[] for _ in items[1:]] + [step], 1.0

    def micro_batches_of_step(self, items: list[list[dict[str, Any]]]) -> tuple[list[TokenBatch], float]:
        """The next minibatch of the buffer; new rollouts when it is spent."""
        if self.buffer.is_spent:
            self.buffer.fill(self._roll_out([row for item in items for row in item]))
        minibatch = self.buffer.next()
        return list(minibatch.micro_batches), minibatch.num_items

    def _roll_out(self, rows: list[dict[str, Any]]) -> list[Minibatch]:
        request = self._request(rows)
        with self.account.phase("generation"):
            collected = self._collector.collect(request)
            self.account.move("reward", collected.reward_s)
        self._assign_advantages(collected.rollouts)
        self._report(collected)
        size = self.args.completions_per_rank // self.args.updates_per_generation
        parts = [collected.rollouts[i : i + size] for i in range(0, len(collected.rollouts), size)]
        return [self._minibatch(part, is_first=i == 0) for i, part in enumerate(parts)]

    def _request(self, rows: list[dict[str, Any]]) -> Request:
        """The completions of this step, asked for now or in an earlier one."""
        self._sync_generator()
        number = self._generation_at(self.state.global_step)
        with self.account.phase("generation"):
            if self.args.generation_mode != "async":
                return self._ask(rows, number)
            return self.ahead.take(number, last=self._generation_at(self.state.max_steps - 1))

    def _start_over(self) -> None:
        """Optimizer steps are counted anew, so their numbers do not tell the weights of two trainings apart."""
        self.ahead.drop()
        self.generator.invalidate()

    @property
    def _collector(self) -> Collector:
        # HuggingFace makes a new state for each training.
        return Collector(self.rewards, self.processing_class, self.state, self.account.clock)

    def _generation_at(self, step: int) -> int:
        """Number of the generation batch that an optimizer step learns from."""
        return step // self.args.steps_of_a_generation

    def _ask_for(self, number: int) -> Request:
        """Ask for the completions of a generation batch before the loop brings its prompts."""
        assert self.train_dataset is not None
        return self._ask([self.train_dataset[i] for i in self._train_sampler.rows_of_generation(number)], number)

    def _ask(self, rows: Sequence[Mapping[str, Any]], number: int) -> Request:
        # A group's number is its prompt's position in the generation batch of all ranks.
        groups = positions_of_rank(
            self._prompts_per_generation,
            num_updates=self.args.updates_per_generation,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        step = number * self.args.steps_of_a_generation
        seeds = {group: prompt_seed(self.args.seed, step, group) for group in groups}
        return ask(rows, generator=self.generator, sampling=self.args.sampling_params(), seeds=seeds)

    def _sync_generator(self) -> None:
        """Give the generator the weights as they are now."""
        with self.account.phase("weight_sync" if self.args.use_vllm else "generation"):
            self.generator.sync(self.weights, version=self.state.global_step)

    def _assign_advantages(self, rollouts: list[Rollout], *, over_ranks: bool = True) -> None:
        """Set `reward` and `advantage` of this rank's rollouts, from the rewards of all ranks or of this one."""
        mine = [([_nan_if_none(v) for v in rollout.rewards.values()], rollout.group) for rollout in rollouts]
        parts = distributed.gather_objects(mine) if over_ranks else [mine]
        everyone = [row for part in parts for row in part]
        rewards = torch.tensor([values for values, _ in everyone], dtype=torch.float32)
        groups = torch.tensor([group for _, group in everyone], dtype=torch.long)
        result = self.advantages(rewards, groups)
        start = sum(len(part) for part in parts[: distributed.rank()]) if over_ranks else 0
        for i, rollout in enumerate(rollouts, start):
            rollout.reward = float(result.totals[i])
            rollout.advantage = float(result.values[i])

    def _minibatch(self, rollouts: list[Rollout], *, is_first: bool) -> Minibatch:
        batch = to_token_batch(rollouts, mask_truncated=self.args.mask_truncated_completions)
        num_items = float(self.num_items(batch))
        batch = batch.select(self._rows_with_gradient(rollouts, batch))
        micro_batches = self.cut(batch, self.args.per_device_train_batch_size)
        if micro_batches and (self.reference is not None or not is_first):
            # Scored before it is cut: a prompt is computed once for its whole group.
            batch = self._with_constants(batch, max_tokens=self.no_grad_budget(micro_batches), is_first=is_first)
            micro_batches = self.cut(batch, self.args.per_device_train_batch_size)
        return Minibatch(micro_batches, num_items)

    def _with_constants(self, batch: TokenBatch, *, max_tokens: int, is_first: bool) -> TokenBatch:
        """The batch with the log-probs that its loss compares with."""
        if self.reference is not None:
            batch = batch.replace(ref_logprobs=self.reference_logprobs(batch, max_tokens=max_tokens))
        if not is_first:
            # Earlier minibatches will have moved the policy by the time that this one is learned from.
            batch = batch.replace(old_logprobs=self.frozen_logprobs(batch, max_tokens=max_tokens))
        return batch

    def _rows_with_gradient(self, rollouts: list[Rollout], batch: TokenBatch) -> list[int]:
        every = self.learns_from_zero_advantage
        return [i for i, r in enumerate(rollouts) if batch.trainable_counts[i] > 0 and (every or r.advantage != 0)]

    def training_step(
        self, model: nn.Module, inputs: list[TokenBatch], num_items_in_batch: Tensor | float | None = None
    ) -> Tensor:
        """See `BaseTrainer.training_step`. The log-probs of a fresh minibatch are kept as its old ones."""
        self._fresh_logprobs = []
        if isinstance(inputs, ArrivingStep):
            return self._train_on_arrival(model, inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if inputs and self.args.num_iterations > 1 and self._fresh_logprobs:
            self.buffer.keep_old_logprobs(self._fresh_logprobs)
        return loss

    def _train_on_arrival(self, model: nn.Module, step: ArrivingStep) -> Tensor:
        """Forward and backward of each group when its completions are there.

        The count that sums are divided by is known when the last has come. Gradients are linear in the loss, so they
        are divided then, and the update is that of a step that waited.
        """
        total = torch.zeros((), device=self.args.device)
        for minibatch in self._arriving_minibatches(step):
            step.num_items += minibatch.num_items
            for batch in minibatch.micro_batches:
                total += self.micro_step(model, batch, 1.0, is_last=False)
                step.append(batch)
        if distributed.world_size() > 1:
            # A rank does not know which of its groups comes last: all synchronise gradients in a pass without any.
            self.micro_step(model, self._idle_batch(), 1.0, is_last=True)
        self.account.switch("optimizer")
        seen = sum(self.tokens_seen(batch) for batch in step)
        count, num_tokens = distributed.sum_over_ranks([step.num_items, seen], self.args.device)
        self.state.num_input_tokens_seen += int(num_tokens)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if step and not gradients:
            raise ConfigError(
                "generation_mode='overlap': the back-end keeps gradients where they cannot be divided. Use 'sync' or "
                "'async' with it."
            )
        for gradient in gradients:
            gradient.div_(max(count, 1.0))
        return total / max(count, 1.0)

    def _arriving_minibatches(self, step: ArrivingStep) -> Iterator[Minibatch]:
        """One for each group, in the order in which they come."""
        arriving = self._collector.by_group(step.request)
        parts = []
        while True:
            with self.account.phase("generation"):
                collected = next(arriving, None)
                if collected is None:
                    break
                self.account.move("reward", collected.reward_s)
            self._assign_advantages(collected.rollouts, over_ranks=False)
            parts.append(collected)
            yield self._minibatch(collected.rollouts, is_first=True)
        self._report(Collected.concat(parts))

    def old_logprobs(self, batch: TokenBatch, scores: TokenScores) -> Tensor:
        """[N] log-probs under the policy that sampled; those just computed if the policy has not moved since."""
        if batch.old_logprobs is not None:
            return batch.old_logprobs
        fresh = scores.logprobs.detach()
        self._fresh_logprobs.append(fresh)
        return fresh

    # Evaluation: samples and rewards, no loss.

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """See `BaseTrainer.evaluation_loop`; samples are of the weights as they are now."""
        if not self.is_in_train:
            self.generator.invalidate()
        self._sync_generator()
        return super().evaluation_loop(*args, **kwargs)

    def evaluation_step(self, model: nn.Module, item: list[dict[str, Any]]) -> dict[str, Metric]:
        """Rewards and lengths of the samples of some prompts."""
        # A prompt's samples do not depend on how the dataset is shared out.
        prompts = [zlib.crc32(repr(row["prompt_ids"]).encode()) for row in item]
        seeds = {group: prompt_seed(self.args.seed, 0, prompt) for group, prompt in enumerate(prompts)}
        sampling = self.args.sampling_params(evaluation=True)
        started = self.account.clock()
        # Also without a prompt: other ranks may need this one to bring a server back.
        collected = self._collector.collect(ask(item, generator=self.generator, sampling=sampling, seeds=seeds))
        if not item:
            return {}
        seconds = self.account.clock() - started
        weights = self.rewards.weights
        for rollout in collected.rollouts:
            scored = [(w, v) for w, v in zip(weights, rollout.rewards.values(), strict=True) if v is not None]
            rollout.reward = sum(w * v for w, v in scored) if scored else float("nan")
        times = {"generation": seconds - collected.reward_s, "reward": collected.reward_s}
        return self._metrics_of(collected) | {f"time/{name}_s": Mean(value, 1) for name, value in times.items()}

    def rows_of(self, item: list[dict[str, Any]]) -> int:
        """Prompts in an item of the evaluation loader."""
        return len(item)

    # Logs and checkpoints.

    @property
    def phases(self) -> list[str]:
        """See `BaseTrainer.phases`."""
        old_policy = ["old_policy"] if self.args.updates_per_generation > 1 else []
        weight_sync = ["weight_sync"] if self.args.use_vllm else []
        return [*weight_sync, "generation", "reward", *old_policy, *super().phases]

    def _metrics_of(self, collected: Collected) -> dict[str, Metric]:
        count = len(collected.rollouts)
        return {
            **rollout_metrics(collected.rollouts),
            **{name: Mean(value * count, count) for name, value in collected.logged_metrics.items()},
        }

    def _report(self, collected: Collected) -> None:
        """Metrics and the table of a generation batch."""
        metrics = self._metrics_of(collected)
        if self.args.use_vllm:
            metrics |= staleness(collected.rollouts, step=self.state.global_step)
        if isinstance(self.generator, VLLMGenerator):
            metrics |= server_metrics(self.generator.stats())
        if self.args.generation_mode == "async":
            metrics["sample/rollout_queue_size"] = Mean(len(self.ahead), 1)
        merge(self.metrics["train"], metrics)
        if self.args.log_completions:
            self._log_completions(collected, self.state.global_step)

    def _log_completions(self, collected: Collected, step: int) -> None:
        parts = distributed.gather_objects((collected.rollouts, collected.logged_columns))
        if not distributed.is_main():
            return
        rollouts = [rollout for part, _ in parts for rollout in part]
        extra = {name: [value for _, columns in parts for value in columns[name]] for name in parts[0][1]}
        print_table(rollouts, step=step, limit=self.args.num_completions_to_print, console=Console())
        write_parquet(rollouts, Path(self.args.output_dir) / "completions", step=step, extra=extra)

    def end(self) -> None:
        """See HuggingFace's; also lets go of the servers."""
        self.generator.close()
        super().end()

    def save_update_state(self, folder: Path) -> None:
        """The rollouts still to be learned from, and a reference that moves."""
        super().save_update_state(folder)
        self.buffer.save(folder / f"rollouts_{distributed.rank()}_of_{distributed.world_size()}.safetensors")

    def load_update_state(self, folder: Path) -> None:
        """Read what `save_update_state` wrote.

        Raises:
            ConfigError: The checkpoint was written by another number of processes, in the middle of its rollouts.
        """
        path = folder / f"rollouts_{distributed.rank()}_of_{distributed.world_size()}.safetensors"
        if not path.exists():
            found = sorted(p.name for p in folder.glob("rollouts_*.safetensors"))
            raise ConfigError(
                f"{folder} has no rollouts for process {distributed.rank()} of {distributed.world_size()} "
                f"(found: {', '.join(found) or 'none'}). Resume with the number of processes that wrote it."
            )
        self.buffer.load(path)
        super().load_update_state(folder)


class ArrivingStep(list[TokenBatch]):
    """The micro-batches of an optimizer step whose completions are still coming; those trained on are its items."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request
        self.num_items = 0.0  # of this rank, so far


def _nan_if_none(value: float | None) -> float:
    return float("nan") if value is None else value


def token_mean(values: Tensor, batch: TokenBatch) -> Mean:
    """Mean of [N] values over trainable tokens."""
    return Mean((values * batch.trainable).sum(), batch.trainable.sum())


def clip_metrics(stats: Mapping[str, Tensor], batch: TokenBatch) -> dict[str, Metric]:
    """Shares of tokens whose ratio is clipped, over all trainable tokens, and their extremes over rows."""
    metrics: dict[str, Metric] = {f"{name}_mean": token_mean(values, batch) for name, values in stats.items()}
    weights = token_weights(batch.trainable, batch.row_index, batch.num_rows, reduction="sequence_mean")
    for name, kind in (("clip_ratio/low", Min), ("clip_ratio/high", Max)):
        shares = torch.zeros(batch.num_rows, device=batch.device)
        shares.index_add_(0, batch.row_index, stats[name] * weights)
        metrics[f"{name}_{kind.__name__.lower()}"] = kind(shares.min() if kind is Min else shares.max())
    return metrics
