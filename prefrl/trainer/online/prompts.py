"""Which prompts are asked in a generation batch, and the scored rollouts that come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from prefrl import distributed
from prefrl.data.samplers import positions_of_rank
from prefrl.metrics import Metric
from prefrl.rollout.collect import Collected, Request, ask, prompt_seed
from prefrl.rollout.curriculum import SuccessCurriculum
from prefrl.rollout.prefetch import GenerationsAhead
from prefrl.rollout.resample import Resampling, groups_without_signal, replace_groups, signal_values

if TYPE_CHECKING:
    from prefrl.trainer.online.policy_gradient_config import PolicyGradientConfig
    from prefrl.trainer.online.trainer import OnlineTrainer

__all__ = ["Rollouts"]


class Rollouts:
    """Asks for the completions of a step, and for others in the place of those without a signal.

    A group's number is its prompt's position in the generation batch of all ranks.

    Args:
        trainer: Has generator, rewards and dataset.
        args: Options.
    """

    def __init__(self, trainer: OnlineTrainer, args: PolicyGradientConfig) -> None:
        self.trainer = trainer
        self.args = args
        self.ahead = GenerationsAhead(self._ask_for, num_ahead=args.generations_ahead)
        self.metrics: dict[str, Metric] = {}  # of the last generation batch
        self._rows: list[int] = []  # dataset rows that all ranks asked last
        self.curriculum: SuccessCurriculum | None = None
        if args.curriculum is not None and trainer.train_dataset is not None:  # without one, for evaluation alone
            self.curriculum = SuccessCurriculum(
                num_rows=len(trainer.train_dataset),
                reward_bounds=_pair(args.curriculum_reward_bounds),
                target_band=_pair(args.curriculum_band),
                weighting=args.curriculum,
                floor=args.curriculum_floor,
                momentum=args.curriculum_momentum,
            )

    def request(self, number: int, *, last: int) -> Request:
        """The completions of a generation batch, asked for now or in an earlier step.

        Args:
            number: Of the batch, counted from the start of training.
            last: Number of the last batch of the training.
        """
        return self.ahead.take(number, last=last) if self.args.generation_mode == "async" else self._ask_for(number)

    def collect(self, request: Request, number: int) -> Collected:
        """Wait for all completions of this rank and score them; ask other prompts where there is no signal."""
        collected = self.trainer.collector.collect(request)
        self._see(collected, self._rows)
        if self.args.dynamic_sampling:
            collected = self._with_signal(collected, number)
        if self.args.needs_greedy:
            self._add_greedy(collected)
        return collected

    def _add_greedy(self, collected: Collected) -> None:
        """Set `greedy_reward`: the total of one more completion of each prompt, decoded without randomness."""
        sampling = replace(self.args.sampling_params(), num_samples=1, temperature=0.0)
        rows = {rollout.group: rollout.row for rollout in collected.rollouts}
        seeds = dict.fromkeys(rows, 0)
        asked = ask(list(rows.values()), generator=self.trainer.generator, sampling=sampling, seeds=seeds)
        greedy = self.trainer.collector.collect(asked).rollouts
        self.trainer.set_totals(greedy)
        totals = {rollout.group: rollout.reward for rollout in greedy}
        for rollout in collected.rollouts:
            rollout.greedy_reward = totals[rollout.group]

    def _ask_for(self, number: int) -> Request:
        rows = self.trainer.train_sampler.rows_of_generation(number)
        if self.curriculum is not None:
            rows = self.curriculum.choose(rows, seed=self.args.seed, generation=number)
        self._rows = rows
        step = number * self.args.steps_of_a_generation
        return self._ask(rows, {group: prompt_seed(self.args.seed, step, group) for group in self._groups(len(rows))})

    def _ask(self, rows: Sequence[int], seeds: Mapping[int, int]) -> Request:
        dataset = self.trainer.train_dataset
        return ask(
            [dataset[rows[group]] for group in seeds],
            generator=self.trainer.generator,
            sampling=self.args.sampling_params(),
            seeds=seeds,
        )

    def _groups(self, num_prompts: int) -> list[int]:
        """This rank's."""
        return positions_of_rank(
            num_prompts,
            num_updates=self.args.updates_per_generation,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )

    def _see(self, collected: Collected, rows: Sequence[int]) -> None:
        """Tell the curriculum."""
        if self.curriculum is None:
            return
        self.trainer.set_totals(collected.rollouts)
        mine = [(rows[rollout.group], rollout.group, rollout.reward) for rollout in collected.rollouts]
        everyone = [row for part in distributed.gather_objects(mine) for row in part]
        self.curriculum.update(*(list(column) for column in zip(*everyone, strict=True)))

    def _with_signal(self, collected: Collected, number: int) -> Collected:
        resampling = Resampling(
            self._rows, num_rows=len(self.trainer.train_dataset), seed=self.args.seed, generation=number
        )
        groups = self._groups(len(resampling.rows))
        while True:
            self.trainer.set_totals(collected.rollouts)
            mine = signal_values(collected.rollouts, metric=self.args.filter_reward_metric)
            everyone = [pair for part in distributed.gather_objects(mine) for pair in part]
            without_signal = groups_without_signal(everyone)
            if not without_signal or resampling.tries == self.args.dynamic_sampling_max_tries:
                break
            weights = None if self.curriculum is None else self.curriculum.weights
            redrawn = resampling.redraw(without_signal, weights=weights)
            seeds = {group: resampling.sample_seed(group) for group in groups if group in redrawn}
            # All ranks ask, also those without a group to replace: they may be needed to bring a server back.
            new = self.trainer.collector.collect(self._ask(resampling.rows, seeds))
            self._see(new, resampling.rows)
            collected = replace_groups(collected, new)
        self.metrics = resampling.metrics(groups, without_signal)
        return collected

    # Checkpoints: the curriculum is the same on all ranks.

    def save(self, path: Path) -> None:
        """Write what decides the next prompts; called on one rank."""
        if self.curriculum is not None:
            save_file(self.curriculum.state_dict(), path)

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        if self.curriculum is not None:
            self.curriculum.load_state_dict(load_file(path))


def _pair(values: Sequence[float]) -> tuple[float, float]:
    low, high = values
    return low, high
