"""Chooses the prompts of a generation batch, and collects their scored rollouts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import datasets
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from prefrl import distributed
from prefrl.data.images import ProcessingClass
from prefrl.data.samplers import (
    EmptyItems,
    EpochDataLoader,
    GenerationBatchSampler,
    StepBatchSampler,
    StreamLoader,
    StreamRows,
    positions_of_rank,
)
from prefrl.data.tokenize import prepare_prompt_dataset
from prefrl.errors import ConfigError, DataError
from prefrl.generation.base import Polled
from prefrl.metrics import Mean, Metric, Sum
from prefrl.options.rollout import ResamplingParams
from prefrl.options.types import TRUNCATION_SIDES
from prefrl.rollout.collect import Collected, Collector, PrefetchQueue, Request, add_greedy, prompt_seed
from prefrl.rollout.curriculum import (
    Resampling,
    SuccessCurriculum,
    groups_without_any_signal,
    replace_groups,
    signal_values,
)
from prefrl.rollout.pool import GroupPool, PoolLimits, Ticket
from prefrl.trainer.configs import PolicyGradientConfig
from prefrl.types import Rollout

logger = logging.getLogger(__name__)
_CURRICULUM_FILE, _POOL_FILE = "curriculum.safetensors", "pool.json"

# Without a limit of tries, a line is logged each time that this many more of them have not been enough.
_TRIES_PER_LINE = 5


def tokenized_prompts(
    dataset: Any, processing_class: ProcessingClass, args: PolicyGradientConfig, *, tools: Any = None
) -> Any:
    """See `data.tokenize.prepare_prompt_dataset`."""
    return prepare_prompt_dataset(
        dataset,
        processing_class,
        max_prompt_length=args.max_prompt_length,
        truncation=TRUNCATION_SIDES[args.truncation_mode],
        filter_overlong=args.filter_overlong_prompts,
        chat_template_kwargs=cast("dict[str, Any] | None", args.chat_template_kwargs),
        tools=tools,
        num_proc=args.dataset_num_proc,
    )


def prompts_per_generation(args: PolicyGradientConfig) -> int:
    """Prompts of a generation batch, over all ranks."""
    return args.completions_of_generation // args.num_generations


def most_completions(args: PolicyGradientConfig) -> int:
    """The most completions of a generation batch that are sampled on one rank: prompts are sampled whole."""
    return -(-prompts_per_generation(args) // distributed.world_size()) * args.num_generations


def check_prompts(args: PolicyGradientConfig, dataset: Any) -> None:
    """Reject groups that processes would share, but get at other times, and a stream for what needs all rows.

    A dataset that is smaller than a generation batch is rejected, too.

    Raises:
        ConfigError: Names the option.
        DataError: Says how many prompts are needed.
    """
    if args.generation_mode == "overlap" and distributed.team_size() > 1:
        raise ConfigError(
            f"generation_mode='overlap' with sp_size={distributed.team_size()} of parallelism_config: processes of "
            "a team train on the same groups, but would get them in different orders. Use generation_mode='sync' or "
            "'async'."
        )
    if isinstance(dataset, datasets.IterableDataset):
        for name in ("dynamic_sampling", "curriculum"):
            if getattr(args, name):
                raise ConfigError(
                    f"{name}={getattr(args, name)!r} with an IterableDataset: it chooses among all prompts, but a "
                    f"stream is read in order. Leave {name} out, or give a Dataset, such as "
                    "Dataset.from_list(list(stream.take(n)))."
                )
        return
    needed = prompts_per_generation(args)
    if dataset is not None and len(dataset) < needed:
        raise DataError(
            f"train_dataset has {len(dataset)} prompts, one generation batch needs {needed}: add prompts, or lower "
            "per_device_train_batch_size, steps_per_generation or generation_batch_size"
        )


def prompt_loader(args: PolicyGradientConfig, dataset: Any) -> DataLoader[Any]:
    """An empty item for each micro-batch, see `GenerationBatchSampler`; of a stream, for ever."""
    if isinstance(dataset, datasets.IterableDataset):
        return DataLoader(EmptyItems(), batch_size=None, generator=torch.Generator())
    return EpochDataLoader(dataset, prompt_sampler(args, num_rows=len(dataset)), collate_fn=list)


def evaluation_loader(dataset: Any, *, num_prompts: int) -> DataLoader[Any]:
    """This rank's prompts of an evaluation dataset, in order.

    Args:
        dataset: Prepared.
        num_prompts: Prompts of an item.
    """
    place: dict[str, Any] = {"rank": distributed.rank(), "world_size": distributed.world_size()}
    if isinstance(dataset, datasets.IterableDataset):
        cut: dict[str, Any] = {"micro_batch_size": num_prompts, "micro_batches_per_step": 1, "drop_last": False}
        return StreamLoader(dataset, collate_fn=list, **cut, **place)
    sampler = StepBatchSampler(len(dataset), micro_batch_size=num_prompts, **place)
    return EpochDataLoader(dataset, sampler, collate_fn=list)


def numbered_rows(args: PolicyGradientConfig, dataset: Any) -> tuple[Any, Callable[[int], list[int]]]:
    """The rows of a training dataset by number, and the numbers of those of a generation batch, over all ranks.

    A stream's rows are numbered by position.
    """
    if isinstance(dataset, datasets.IterableDataset):
        size = prompts_per_generation(args)
        return StreamRows(dataset), lambda number: list(range(number * size, (number + 1) * size))
    num_rows = 0 if dataset is None else len(dataset)
    return dataset, prompt_sampler(args, num_rows=num_rows).rows_of_generation


def prompt_sampler(args: PolicyGradientConfig, *, num_rows: int) -> GenerationBatchSampler:
    """Determines which prompts each generation batch has.

    Args:
        args: Options.
        num_rows: Rows of the training dataset.
    """
    return GenerationBatchSampler(
        num_rows,
        prompts_per_window=prompts_per_generation(args),
        items_per_window=args.micro_batches_per_generation * args.num_iterations,
        shuffle=args.shuffle_dataset,
        seed=args.seed if args.data_seed is None else args.data_seed,
    )


def _tell(resampling: Resampling, without_signal: Sequence[int]) -> None:
    if distributed.is_main():
        logger.warning(
            "dynamic sampling: after %d tries, %d of %d prompts of generation batch %d still have completions with "
            "equal rewards; other prompts are tried",
            resampling.tries,
            len(without_signal),
            len(resampling.rows),
            resampling.generation,
        )


class Prompts:
    """Requests the completions of generation batches, and replaces groups without a learning signal.

    The number of a group is the position of its prompt in the generation batch of all ranks.

    Args:
        args: Options.
        dataset: Rows of the training dataset by number; None if there is no training.
        rows_of_generation: Maps the number of a generation batch to its dataset rows, over all ranks.
        collector: Turns completions into scored rollouts.
        sync: Waits for the servers and sends them the weights.
    """

    def __init__(
        self,
        args: PolicyGradientConfig,
        dataset: Any,
        rows_of_generation: Callable[[int], list[int]],
        *,
        collector: Collector,
        sync: Callable[[], None],
    ) -> None:
        self._args = args
        self._dataset = dataset
        self._rows_of_generation = rows_of_generation
        self._collector = collector
        self._sampling = args.sampling_params()
        self._steps_each = args.steps_of_a_generation
        self.num_prompts = prompts_per_generation(args)
        self._groups = positions_of_rank(  # those of this rank
            self.num_prompts,
            num_updates=args.updates_per_generation,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        # Dataset rows of the generation batch that was asked for last, over all ranks. The curriculum and resampling
        # read them, which exclude requests ahead of time.
        self._rows: list[int] = []
        # What options add; None: the option is off.
        self.prefetched: PrefetchQueue | None = None
        self.pool: GroupPool | None = None
        if args.generation_mode == "async" and args.async_params.order == "ready":
            limits = PoolLimits(
                num_prompts=self.num_prompts,
                groups=self._groups,
                num_ahead=args.generations_ahead,
                steps_each=self._steps_each,
                max_staleness=args.max_staleness,
                drops=args.async_params.stale == "drop",
            )
            self.pool = GroupPool(
                limits,
                prompt=self._prompt,
                ask=self._ask_for_tickets,
                release=collector.sampler.release,
                recover=sync,
            )
        elif args.generation_mode == "async":
            self.prefetched = PrefetchQueue(self._ask_for, num_ahead=args.generations_ahead)
        self._resampling_params = args.resampling_params if args.dynamic_sampling else None
        self._needs_greedy = args.needs_greedy
        self.curriculum: SuccessCurriculum | None = None
        if args.curriculum is not None and dataset is not None:  # None: only evaluation
            self.curriculum = SuccessCurriculum(
                num_rows=len(dataset),
                weighting=args.curriculum,
                params=args.curriculum_params,
            )

    def request(self, number: int, *, last: int) -> Request:
        """The request for a generation batch, made now or in an earlier step.

        Args:
            number: Number of the batch, counted from the start of training.
            last: Number of the last batch of training.
        """
        ahead = self.pool if self.prefetched is None else self.prefetched
        return self._ask_for(number) if ahead is None else ahead.take(number, last=last)

    def collect(self, request: Request, number: int) -> Collected:
        """Wait for all completions of this rank and score them; replace groups without a learning signal.

        If it raises, the curriculum is as it was before.
        """
        before = None if self.curriculum is None else self.curriculum.state_dict()
        try:
            collected = self._collector.collect(request)
            if self.curriculum is not None:
                collected = self._with_visits(collected, self._rows)
            if self._resampling_params is not None:
                collected = self._with_signal(collected, number, self._resampling_params)
            if self._needs_greedy:
                add_greedy(collected, self._collector, self._sampling)
        except BaseException:
            if self.curriculum is not None and before is not None:
                self.curriculum.load_state_dict(before)
            raise
        return collected

    def begin(self, first: int) -> None:
        """Begin a training whose first new generation batch has this number."""
        self.drop_prefetched()
        if self.pool is not None:
            self.pool.begin(first)

    def learned(self, collected: Collected) -> dict[str, Metric]:
        """Hear that a generation batch is in the rollout buffer; what is to be logged of requests made ahead."""
        if self.prefetched is not None:
            return {"sample/rollout_queue_size": Mean(len(self.prefetched), 1)}
        if self.pool is None:
            return {}
        self.pool.learned(collected.tickets)
        num_dropped, self.pool.num_dropped = self.pool.num_dropped, 0
        return {
            "sample/rollout_queue_size": Mean(len(self.pool), max(len(self._groups), 1)),
            "sample/groups_dropped": Sum(num_dropped),
        }

    def drop_prefetched(self) -> None:
        """Cancel the requests of batches that training does not need yet."""
        ahead = self.pool if self.prefetched is None else self.prefetched
        if ahead is not None:
            ahead.drop()

    def repeat(self, collected: Collected) -> None:
        """Update the curriculum as `collect` did when these rollouts were collected."""
        for visit in collected.visits:
            self._visit(visit)

    def _ask_for(self, number: int) -> Request:
        rows = self._rows_of_generation(number)
        if self.curriculum is not None:
            rows = self.curriculum.choose(rows, seed=self._args.seed, generation=number)
        self._rows = rows
        step = number * self._steps_each
        seeds = {group: prompt_seed(self._args.seed, step, group) for group in self._groups}
        return self._collector.ask([self._dataset[rows[group]] for group in seeds], self._sampling, seeds)

    def _prompt(self, ticket: int) -> tuple[dict[str, Any], int]:
        """The dataset row and the seed of a prompt, by its position in the run: those that it has in every mode."""
        number, group = divmod(ticket, self.num_prompts)
        row = self._dataset[self._rows_of_generation(number)[group]]
        return row, prompt_seed(self._args.seed, number * self._steps_each, group)

    def _ask_for_tickets(self, tickets: Sequence[Ticket]) -> Polled[Rollout]:
        seeds = {ticket.number % self.num_prompts: ticket.seed for ticket in tickets}
        request = self._collector.ask([ticket.row for ticket in tickets], self._sampling, seeds)
        return cast("Polled[Rollout]", request.pending)

    def _with_visits(self, collected: Collected, rows: Sequence[int]) -> Collected:
        """Update the curriculum with the rewards of all ranks, and note them."""
        mine = [(rows[rollout.group], rollout.group, rollout.reward) for rollout in collected.rollouts]
        everyone = [row for part in distributed.gather_objects(mine) for row in part]
        self._visit(everyone)
        return replace(collected, visits=[*collected.visits, everyone])

    def _visit(self, visit: Sequence[tuple[int, int, float]]) -> None:
        if self.curriculum is not None:
            self.curriculum.update(*(list(column) for column in zip(*visit, strict=True)))

    def _with_signal(self, collected: Collected, number: int, params: ResamplingParams) -> Collected:
        resampling = Resampling(
            self._rows,
            num_rows=len(self._dataset),
            seed=self._args.seed,
            generation=number,
            is_endless=params.max_tries <= 0,
        )
        while True:
            mine = [signal_values(collected.rollouts, metric=metric) for metric in params.metrics]
            without_signal = groups_without_any_signal(distributed.gather_objects(mine))
            if not without_signal or resampling.tries == params.max_tries:
                break
            if resampling.is_endless and resampling.tries % _TRIES_PER_LINE == _TRIES_PER_LINE - 1:
                _tell(resampling, without_signal)
            weights = None if self.curriculum is None else self.curriculum.weights
            redrawn = resampling.redraw(without_signal, weights=weights)
            seeds = {group: resampling.sample_seed(group) for group in self._groups if group in redrawn}
            # All ranks make a request, even those without a group to replace: recovery of a server may need them.
            asked = [self._dataset[resampling.rows[group]] for group in seeds]
            new = self._collector.collect(self._collector.ask(asked, self._sampling, seeds))
            if self.curriculum is not None:
                new = self._with_visits(new, resampling.rows)
            collected = replace(replace_groups(collected, new), visits=[*collected.visits, *new.visits])
        return replace(collected, metrics=resampling.metrics(self._groups, without_signal))

    # Checkpoints.

    @distributed.without_teams()
    def save(self, folder: Path) -> None:
        """Write the state of the curriculum, which is the same on all ranks, and the open tickets of all ranks."""
        if self.curriculum is not None and self._args.should_save:
            save_file(self.curriculum.state_dict(), folder / _CURRICULUM_FILE)
        if self.pool is not None:
            self.pool.save(folder / _POOL_FILE, writes=self._args.should_save)

    @distributed.without_teams()
    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        if self.curriculum is not None:
            self.curriculum.load_state_dict(load_file(folder / _CURRICULUM_FILE))
        if self.pool is not None:
            self.pool.load(folder / _POOL_FILE, rank=distributed.rank(), world_size=distributed.world_size())
