"""The base of online trainers: rollouts, rewards, advantages, reuse of rollouts, evaluation by sampling."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prefrl import distributed
from prefrl.data.formats import get_dataset_column_names
from prefrl.metrics import Mean, Metric, merge
from prefrl.models.export import PolicyWeights
from prefrl.rollout.batches import Minibatch, RolloutBuffer, sampled_batch, token_counts
from prefrl.rollout.collect import Collected, RolloutSampler, joined
from prefrl.rollout.episodes.environment import with_agents
from prefrl.rollout.journal import Journal
from prefrl.rollout.selection import visit_order
from prefrl.rollout.summary import SignalHealth, Tables, log_collected, rollout_metrics
from prefrl.trainer.arguments import (
    GivenTeacher,
    add_teacher,
    check_arguments,
    check_has_data,
    check_stream,
    chosen_teacher,
    loaded_reference,
    own_config,
)
from prefrl.trainer.base_trainer import BaseTrainer, Optimizers, Ready
from prefrl.trainer.checkpointing import saved_at_errors
from prefrl.trainer.features import SharedDevice
from prefrl.trainer.online.evaluation import EvaluationRollouts, add_rollouts, find_routers
from prefrl.trainer.online.generators import make_generator, server_metrics
from prefrl.trainer.online.learner import restore, state_of
from prefrl.trainer.online.minibatches import LongestRollouts, MinibatchMaker, OverlapStep
from prefrl.trainer.online.policy_gradient import PolicyGradient
from prefrl.trainer.online.prompts import (
    Prompts,
    check_prompts,
    evaluation_loader,
    most_completions,
    numbered_rows,
    prompt_loader,
    prompts_per_generation,
    tokenized_prompts,
)
from prefrl.trainer.online.sampling import Episodes, collector_of, evaluation_rewards, reward_runner
from prefrl.trainer.scorer import Scores
from prefrl.trainer.steps import LongBatch, Step
from prefrl.types import LossOutput, ReadyBatch, Rollout, TokenBatch

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from torch import Tensor, nn
    from torch.utils.data import DataLoader
    from transformers import BitsAndBytesConfig, PreTrainedModel, TrainerCallback
    from transformers.trainer_utils import EvalLoopOutput

    from prefrl.data.images import ProcessingClass
    from prefrl.generation.base import Generator
    from prefrl.losses.per_token import TokenScores
    from prefrl.rewards.base import RewardSources
    from prefrl.rewards.runner import RewardRunner
    from prefrl.trainer.configs import PolicyGradientConfig
    from prefrl.trainer.evaluation import ComputeMetrics
    from prefrl.trainer.online.learner import Learned, Learner
    from prefrl.trainer.online.sampling import Agents, EnvironmentFactory, Tools

_STATE_FILE = "learning_state.json"  # adaptive coefficients and running moments in a checkpoint


class OnlineTrainer(BaseTrainer[Ready]):
    """Samples completions of prompts, scores them, and makes one normalized update for each optimizer step.

    A leaf sets its config class and its learner, which computes advantages and the loss. `micro_batches_of_step` is
    the algorithm.

    Args:
        model: Name, path or instance. An instance is trained in place.
        reward_funcs: One or several of: a function `f(prompts, completions, completion_ids, **columns)`, the name or
            instance of a sequence-classification model, or the name of a built-in or registered reward. A mapping
            gives each of them its weight. None means only environments give rewards, or a teacher is learned from.
        args: Options. The default options write to `<model name>-<algorithm>`.
        train_dataset: Rows with `prompt` (text or messages) and the columns that the rewards read; a stream is read
            in its order and needs `max_steps`.
        eval_dataset: One dataset, or several by name.
        processing_class: Tokenizer, or processor of a model that reads images. None means the model's.
        reward_processing_classes: Tokenizers or processors of reward models. None means their own.
        callbacks: HuggingFace callbacks.
        optimizers: Optimizer and scheduler to use instead of those that `args` describes.
        quantization_config: Load the model, given by name, quantized; needs an adapter.
        peft_config: Train an adapter of this kind instead of the model.
        tools: Functions that the model may call, sync or async, with types and docstrings.
        rollout_func: Must be None; it is there for TRL's order.
        environment_factory: A `prefrl.Environment`, or several by the value of the dataset's column `environment`.
        compute_metrics: Further metrics of evaluations, from completions, rewards and dataset rows.
        eval_reward_funcs: Rewards of evaluations instead of `reward_funcs`. Evaluations then have no loss.
        teacher_model: The teacher of `teacher_kl_coef`, with the model's vocabulary: name, path or instance.
        agent: A program that asks the policy over a chat API, see `Agent`, or several by the column `environment`.

    Raises:
        ConfigError: The options cannot be combined.
        DataError: A dataset cannot be used; the message names the row and the column.
        RewardError: A reward failed during training.
    """

    args: PolicyGradientConfig
    config_class: type[PolicyGradientConfig]
    learner_class: Callable[[Any, RewardRunner], Learner[Any, Any]] = PolicyGradient
    _id_columns = ("prompt_ids",)  # other columns belong to the rewards
    _ref_model: str | Path | PreTrainedModel | None = None  # set by leaves whose constructor takes one

    def __init__(  # noqa: PLR0913 - TRL's constructor
        self,
        model: str | Path | PreTrainedModel | nn.Module,
        reward_funcs: RewardSources | None = None,
        args: PolicyGradientConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset | IterableDataset] | None = None,
        processing_class: ProcessingClass | None = None,
        reward_processing_classes: ProcessingClass | list[ProcessingClass | None] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: Tools | None = None,
        rollout_func: None = None,
        environment_factory: EnvironmentFactory | None = None,
        compute_metrics: ComputeMetrics | None = None,
        eval_reward_funcs: RewardSources | None = None,
        teacher_model: GivenTeacher = None,
        agent: Agents | None = None,
    ) -> None:
        check_arguments(type(self), {"rollout_func": rollout_func, "eval_reward_funcs": eval_reward_funcs})
        shared: dict[str, Any] = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        shared |= {"processing_class": processing_class, "compute_metrics": compute_metrics, "callbacks": callbacks}
        shared |= {"optimizers": optimizers, "quantization_config": quantization_config, "peft_config": peft_config}
        environment_factory = with_agents(environment_factory, agent)
        given = shared | {"environment_factory": environment_factory}
        check_arguments(type(self), {"model": model, "reward_funcs": reward_funcs, "args": args, **given})
        check_has_data(given)
        args = cast("PolicyGradientConfig", own_config(type(self), args, model, self.algorithm.upper()))
        self._teacher = chosen_teacher(type(self), args, teacher_model, train_dataset)
        check_stream(train_dataset, args)
        self.episodes = Episodes(args, tools, environment_factory)
        shared["train_dataset"] = self.episodes.training_prompts(train_dataset, num_rows=prompts_per_generation(args))
        shared["eval_dataset"] = self.episodes.with_prompts(eval_dataset)
        environments = self.episodes.rewards
        self.rewards = reward_runner(args, reward_funcs or [], environments, processors=reward_processing_classes)
        self.eval_rewards = evaluation_rewards(args, eval_reward_funcs, environments) or self.rewards
        super().__init__(model, args, **shared)
        check_prompts(args, self.train_dataset)
        for reward in {id(one.model): one for one in self.rewards.models + self.eval_rewards.models}.values():
            distributed.prepare_frozen(self.accelerator, reward.model)
        self._set_up_reference()
        self._set_up_sampling(args)
        self._set_up_learning(args)

    def _set_up_reference(self) -> None:
        """What the loss compares the policy with, if anything."""
        self._add_reference(self.args, loaded_reference(self._ref_model, self.policy, self.args))
        add_teacher(self, self._teacher, self._idle_batch())

    @distributed.without_teams()
    def _set_up_sampling(self, args: PolicyGradientConfig) -> None:
        """From prompts to scored rollouts, for which each process has prompts of its own."""
        self.weights = PolicyWeights(self.policy)
        autocast, max_rows = self.accelerator.autocast, most_completions(args)
        self.generator: Generator = make_generator(
            args, self.policy, self.tokenizer, weights=self.weights, max_rows=max_rows, autocast=autocast
        )
        if args.use_vllm and args.vllm_mode == "colocate":
            self.parts.add(SharedDevice(cast("Any", self.generator).rest))
        collects = partial(collector_of, args, self._sampler(), lambda: self.state, lambda: self.account.clock())
        self._collector = collects(self.rewards)
        has_loss = self.eval_rewards is self.rewards
        collector = self._collector if has_loss else collects(self.eval_rewards)
        self._evaluation = EvaluationRollouts(args, collector, has_loss=has_loss)
        rows, folder = numbered_rows(args, self.train_dataset), Path(args.output_dir, "completions")
        self.prompts = Prompts(args, *rows, collector=self._collector, sync=self._sync_generator)
        self.journal = Journal(folder, distributed.rank(), distributed.world_size(), keep=args.journal_keep)

    def _sampler(self) -> RolloutSampler:
        """What samples rollouts, with the current generator."""
        return self.episodes.sampler(self.processing_class, lambda: self.generator)

    def _set_up_learning(self, args: PolicyGradientConfig) -> None:
        """From scored rollouts to minibatches and their loss."""
        self.learner: Learner[Any, Ready] = self.learner_class(args, self.rewards)
        self.objective = self.learner.objective
        self.buffer = RolloutBuffer(args.num_iterations, self.objective.stage)
        hidden_size = self.policy.config.get_text_config().hidden_size
        cut = lambda batch: self.cut(batch, args.rows_per_micro_batch)  # noqa: E731 - the number may change
        self._minibatches = MinibatchMaker(args, self.objective, self.scorer, cut, hidden_size)
        self._tables = Tables(args.report_to)
        self.health = SignalHealth(args, has_rewards=bool(self.rewards.names))
        self._fresh_logprobs: list[Tensor] = []  # of this step's micro-batches, if they are visited again
        self._num_sampled_tokens = 0  # sampled since the last addition to `num_tokens`

    def loss(self, model: nn.Module, batch: Ready) -> LossOutput:
        """See the objective."""
        ref_hidden = batch.ref_hidden if isinstance(batch, ReadyBatch) else None
        return self._policy_loss(batch, self.scorer.scores(model, batch, self.objective.want, ref_hidden=ref_hidden))

    def _policy_loss(self, batch: Ready, scores: TokenScores) -> LossOutput:
        """See the objective; keeps the log-probs for the later visits of the batch."""
        if self.args.num_iterations > 1:
            self._fresh_logprobs.append(scores.logprobs.detach())
        return self.objective(batch, scores)

    def row_items(self, batch: Any) -> Tensor:
        """See the objective."""
        return self.objective.row_items(batch)

    # Datasets.

    def prepare_dataset(self, dataset: Dataset, processing_class: ProcessingClass, *, training: bool) -> Dataset:
        """Check that the rewards find their columns, and add `prompt_ids`."""
        columns = get_dataset_column_names(dataset)
        if training:
            self.rewards.check_columns(columns)
        if not training or self.args.evaluate_training_set:
            self.eval_rewards.check_columns(columns)
        return tokenized_prompts(dataset, processing_class, self.args, tools=self.episodes.schemas)

    def collate(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The dataset rows, unchanged."""
        return rows

    def training_loader(self) -> DataLoader[Any]:
        """See `prompt_loader`."""
        return prompt_loader(self.args, self.train_dataset)

    def evaluation_loader(self, dataset: Any) -> DataLoader[Any]:
        """The prompts of an evaluation dataset, in order."""
        return evaluation_loader(dataset, num_prompts=self.args.prompts_per_evaluation_batch)

    # One step.

    @contextmanager
    def trial(self, num_rows: int) -> Iterator[LongBatch]:
        """See `BaseTrainer`."""
        state, learn = state_of(self.learner), partial(self._learned, num_parts=1)
        longest = LongestRollouts(self.args, self.train_dataset, self.rewards.names)
        try:
            batch = longest.micro_batch(num_rows, lambda rollouts: self._minibatches.of(learn(rollouts)))
            yield LongBatch(batch, batch.num_forward_tokens)
        finally:
            restore(self.learner, state)

    def micro_batches_of_step(self, items: list[list[dict[str, Any]]]) -> tuple[list[Ready], float]:
        """The next minibatch of the buffer, which is filled with new rollouts when it is spent.

        `items` are empty: prompts are read by the number of their generation batch, or several if a step has grown.
        """
        if self.buffer.is_spent:
            own = {number: self._collect(number) for number in self.plan.units}
            generations = {number: collected.of_team() for number, collected in own.items()}
            rollouts = joined(list(generations.values()), num_prompts=self.prompts.num_prompts)
            learned = self._learned(rollouts, num_parts=self.plan.unit // self.args.num_iterations)
            merge(self.metrics["train"], learned.metrics)
            for number, collected in own.items():
                self._seal(number, [collected])  # with the advantages, and before anything has learned from it
            minibatches, order, args = self._minibatches.of(learned), None, self.args
            if args.shuffle_minibatches:
                order = visit_order(len(minibatches), args.num_iterations, seed=args.seed, generation=min(generations))
            self.buffer.fill(minibatches, order=order)
            for number, collected in generations.items():
                self._report(own[number], collected)
        minibatch = self.buffer.next()
        merge(self.metrics["train"], minibatch.metrics)
        return list(minibatch.micro_batches), minibatch.num_items

    @distributed.without_teams()
    def _collect(self, number: int) -> Collected:
        """This process's part of a generation batch: what an interrupted run has left, or new scored rollouts."""
        left = self.journal.left(number, step=number * self.plan.unit)
        if left is not None:
            self.prompts.repeat(left[0])
            return left[0]
        with saved_at_errors(self):
            self._sync_generator()
            # Nothing that is saved has changed yet, so a single process can be stopped meanwhile.
            stoppable = nullcontext() if distributed.num_processes() > 1 else self.stop_request.interruptible()
            with stoppable, self.account.phase("generation"):
                request = self.prompts.request(number, last=self.plan.last_unit)  # or that of an earlier step
                collected = self.prompts.collect(request, number)
                self.account.move("reward", collected.reward_s)
            self.parts.tell("sampled", self)
        return collected

    def _seal(self, number: int, parts: list[Collected]) -> None:
        """Write a generation batch to the journal."""
        step, saves = number * self.plan.unit, self.args.save_strategy != "no"
        self.journal.seal(number, parts, step=step, needed_from=max(self.run_folder.last_saved, 0) if saves else step)

    def _learned(self, rollouts: list[Rollout], *, num_parts: int, over_ranks: bool = True) -> Learned[Any]:
        """Compute advantages of rollouts and make rows of them; also sets `advantage` of the rollouts.

        For the arguments see `Learner.advantages`.
        """
        batch = sampled_batch(rollouts, mask_truncated=self.args.mask_truncated_completions, reader=self.images)
        needs, scores = self.learner.needs, Scores({})
        if needs:
            scores = self.scorer.needed(batch, needs, rows_per_pass=self.args.rows_per_micro_batch)
            batch = scores.with_routes(batch)
        learned = self.learner.advantages(
            batch, scores, rollouts, num_parts=num_parts, step=self.state.global_step, over_ranks=over_ranks
        )
        for rollout, advantage in zip(rollouts, learned.advantages, strict=True):
            rollout.advantage = advantage
        if self.episodes.exist:
            learned.metrics.update(token_counts(rollouts, batch, num_trained=learned.batch.num_trainable))
        return learned

    def make_step(self, items: list[Any]) -> tuple[Step, float]:
        """See `BaseTrainer`. With overlap, items are counted at the end of the step."""
        if self.args.generation_mode != "overlap":
            return super().make_step(items)
        (number,) = self.plan.units
        groups = self._arriving(number, self._scored_groups(number))
        return OverlapStep(groups, lambda: self.policy, self._idle_batch(), self.accelerator), 1.0

    def _scored_groups(self, number: int) -> Iterator[Collected]:
        """The scored groups of a generation batch, in the order in which they arrive or arrived."""
        left = self.journal.left(number, step=number * self.plan.unit)
        if left is not None:
            return iter(left)
        self._sync_generator()
        with self.account.phase("generation"):
            return self._collector.by_group(self.prompts.request(number, last=self.plan.last_unit))

    def _arriving(self, number: int, groups: Iterator[Collected]) -> Iterator[Minibatch[Ready]]:
        """A minibatch for each group."""
        parts = []
        while True:
            with self.account.phase("generation"):
                collected = next(groups, None)
                if collected is None:
                    break
                self.account.move("reward", collected.reward_s)
            parts.append(collected)
            learned = self._learned(collected.rollouts, num_parts=1, over_ranks=False)
            merge(self.metrics["train"], learned.metrics)
            (minibatch,) = self._minibatches.of(learned, over_ranks=False)
            merge(self.metrics["train"], minibatch.metrics)
            yield minibatch
        self._seal(number, parts)
        collected = Collected.concat(parts)
        self._report(collected, collected)
        (num_tokens,) = distributed.sum_over_ranks([self._tokens_seen([])], self.args.device)
        self.state.num_input_tokens_seen += int(num_tokens)

    def _tokens_seen(self, batches: Sequence[TokenBatch]) -> int:
        """See `BaseTrainer`; counts all new rollouts, as in TRL, even those without a gradient."""
        count, self._num_sampled_tokens = self._num_sampled_tokens, 0
        return count

    def _begin_training(self) -> None:
        """See `BaseTrainer`."""
        super()._begin_training()
        # A new training run may count steps from 0 again, so step numbers no longer identify weight versions.
        self.prompts.begin(self.plan.units_left.start)
        self.generator.invalidate()
        # The rollouts that an interrupted run has left after its checkpoint.
        if self.start.changed:  # what was learned from them belongs to other settings
            self.journal.forget(from_step=self.plan.position)
        needed, each = self.plan.units_left, self.plan.unit
        self.journal.begin(self.run_folder.run, generations=needed, steps_each=each, device=self.args.device)

    def _end_training(self) -> None:
        """See `BaseTrainer`."""
        super()._end_training()
        self.prompts.drop_prefetched()
        self.health.end()

    @distributed.without_teams()
    def _sync_generator(self) -> None:
        """Send the current weights to the generator."""
        with self.account.phase("weight_sync" if self.args.use_vllm else "generation"):
            self.generator.sync(self.weights, version=self.state.global_step)

    def run_step(self, model: nn.Module, step: Step, num_items: Tensor | float | None) -> Tensor:
        """See `BaseTrainer`; changes a minibatch that is visited again, see `Objective.visited`."""
        self._fresh_logprobs = []
        loss = super().run_step(model, step, num_items)
        if step.micro_batches:
            self.objective.end_step(self.args.device)
            if self._fresh_logprobs:
                self.buffer.change_visited(self.objective.visited, self._fresh_logprobs)
        return loss

    # Evaluation: completions, rewards and their loss.

    def run_evaluation(self, dataloader: Any, prefix: str) -> EvalLoopOutput:
        """See `BaseTrainer`; samples with the current weights, and learning goes on as before."""
        has_average = self.evaluates_averages  # other weights of the same version
        if has_average or not self.is_in_train:
            self.generator.invalidate()
        find_routers(self.policy, self.args.device)
        self._sync_generator()
        state = state_of(self.learner)
        self._evaluation.take()  # what an evaluation that failed has left
        try:
            return super().run_evaluation(dataloader, prefix)
        finally:
            restore(self.learner, state)
            if has_average:
                self.generator.invalidate()

    def evaluation_step(self, model: nn.Module, item: list[dict[str, Any]]) -> dict[str, Metric]:
        """Rewards and lengths of the completions of some prompts."""
        return self._evaluation.sample(item)

    def end_evaluation(self, model: nn.Module, name: str) -> dict[str, Metric]:
        """The loss, as in a step that learns from all completions of the evaluation at once, and its metrics."""
        collected = self._evaluation.take()
        self.parts.tell("sampled", self)
        if self.predicted is not None:
            add_rollouts(self.predicted, collected.rollouts)
        if not self._evaluation.has_loss:  # it belongs to the rewards of training
            return self._evaluation.report(collected, name=name, step=self.state.global_step)
        learned = self._learned(collected.rollouts, num_parts=1)
        (minibatch,) = self._minibatches.of(learned)
        metrics = {"loss": Mean(0.0, minibatch.num_items, empty=0.0), **learned.metrics}
        merge(metrics, self._evaluation.report(collected, name=name, step=self.state.global_step) | minibatch.metrics)
        num_missing = distributed.missing_passes(model, len(minibatch.micro_batches), self.args.device)
        for output in self._evaluated(model, minibatch.micro_batches, num_missing=num_missing):
            merge(metrics, {"loss": Mean(output.total, 0.0), **output.metrics})
        return metrics

    def rows_of(self, item: list[dict[str, Any]]) -> int:
        """Prompts in an item of the evaluation loader."""
        return len(item)

    # Logs and checkpoints.

    @cached_property
    def phases(self) -> list[str]:
        """See `BaseTrainer.phases`."""
        is_scored = self.args.updates_per_generation > 1 or self.learner.needs or self.args.router_replay == "R2"
        old_policy = ["old_policy"] if is_scored else []
        return [*(["weight_sync"] if self.args.use_vllm else []), "generation", "reward", *old_policy, *super().phases]

    def _report(self, own: Collected, collected: Collected) -> None:
        """Record the metrics of a generation batch of this process and its team, and print its table if that is on."""
        self._num_sampled_tokens += sum(len(r.prompt_ids) + len(r.sampled_ids) for r in collected.rollouts)
        rollouts, has_rewards = collected.rollouts, bool(self.rewards.names)
        metrics = rollout_metrics(rollouts, has_rewards=has_rewards, logged=collected.logged_metrics)
        of_process = self.prompts.learned(own) if self.args.generation_mode == "async" else {}
        if self.args.use_vllm:
            of_process |= server_metrics(own.rollouts, self.generator, step=self.state.global_step)
        for part in distributed.gather_in_team(of_process):
            merge(metrics, part)
        merge(self.metrics["train"], metrics | self.health.check(rollouts) | collected.metrics)
        self.history.show_samples(rollouts)
        if self.args.log_completions:
            limit, unique = self.args.num_completions_to_print, self.args.log_unique_prompts
            log_collected(own, step=self.state.global_step, limit=limit, unique=unique, tables=self._tables)

    def decisive(self) -> dict[str, Any]:
        """See `BaseTrainer`. The updates also depend on the rewards and on the number of prompts in a generation."""
        return {
            **super().decisive(),
            "prompts_per_generation": self.prompts.num_prompts,
            "steps_of_a_generation": self.args.steps_of_a_generation,
            "rewards": self.rewards.fingerprints,
            "episodes": self.episodes.fingerprints,
        }

    def close(self) -> None:
        """Release the servers."""
        self._collector.sampler.close()
        self.generator.close()

    def _save_update_state(self, folder: Path) -> None:
        """See `BaseTrainer`; also writes the rollout buffer, the curriculum and the state of learner and objective."""
        super()._save_update_state(folder)
        if distributed.place_in_team() == 0:
            self.buffer.save(folder / distributed.rollouts_file(distributed.rank(), distributed.world_size()))
        self.prompts.save(folder)
        if self.args.should_save:
            (folder / _STATE_FILE).write_text(json.dumps(state_of(self.learner)), encoding="utf-8")

    def _load_update_state(self, folder: Path) -> None:
        """Read what `_save_update_state` wrote; with another number of processes, redistribute the rollouts."""
        rank, size = distributed.rank(), distributed.world_size()
        num_files = distributed.writer_of(folder).num_ranks
        paths = [folder / distributed.rollouts_file(number, num_files) for number in range(num_files)]
        self.buffer.load_share(paths, cut=self._minibatches.cut, rank=rank, world_size=size)
        self.prompts.load(folder)
        restore(self.learner, json.loads((folder / _STATE_FILE).read_text(encoding="utf-8")))
        super()._load_update_state(folder)
