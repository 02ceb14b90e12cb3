"""Distillation: a student learns from a teacher's distributions, on its own completions or on those of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import datasets

from prefrl.data.teacher_columns import check_stored, is_stored, top_of
from prefrl.errors import ConfigError
from prefrl.losses.kl import completion_kl
from prefrl.losses.per_token import row_items
from prefrl.losses.top_logprobs import TopLogprobs
from prefrl.metrics import token_mean
from prefrl.models.teachers import LiveTeacher
from prefrl.rollout.batches import rows_of_parts
from prefrl.rollout.given import GivenCompletions
from prefrl.trainer.arguments import GivenTeacher, check_arguments, loaded_teacher, named
from prefrl.trainer.configs import DistillationConfig
from prefrl.trainer.online.learner import Learned, PlainObjective
from prefrl.trainer.online.sampling import OnlineArguments
from prefrl.trainer.online.teachers import (
    as_the_teacher_sees,
    assigned,
    check_context,
    check_weights,
    served_teacher,
    several_teachers,
    taught_rows,
)
from prefrl.trainer.online.trainer import OnlineTrainer
from prefrl.trainer.scorer import TOP
from prefrl.types import LossOutput, SampledBatch

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from prefrl.data.images import ProcessingClass
    from prefrl.losses.per_token import TokenScores, WantName
    from prefrl.metrics import Metric
    from prefrl.options.policy import Reduction
    from prefrl.rewards.base import RewardSources
    from prefrl.rewards.runner import RewardRunner
    from prefrl.rollout.collect import RolloutSampler
    from prefrl.trainer.scorer import ScoreNeed, Scores
    from prefrl.types import Rollout


@dataclass(frozen=True, eq=False, kw_only=True)
class TaughtBatch(SampledBatch):
    """Completions, and what the teacher's distributions at their tokens are computed from."""

    ref_hidden: Tensor | None = None  # [N, h] the last hidden states of a teacher that is here
    # Of another one, its most likely tokens: [N, k] ids, [N, k] nats and [N] nats of all others, see `TopLogprobs`.
    teacher_ids: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_other_logprobs: Tensor | None = None

    def top(self, beta: float) -> TopLogprobs | None:
        """What is known of a teacher that is not here."""
        if self.teacher_ids is None or self.teacher_logprobs is None:
            return None
        return TopLogprobs(self.teacher_ids, self.teacher_logprobs, beta, self.teacher_other_logprobs)


class DistillationObjective(PlainObjective[SampledBatch, TaughtBatch]):
    """The sum of the divergences from the teacher over tokens."""

    want: tuple[WantName, ...] = ("entropy",)
    stage = TaughtBatch

    def __init__(self, args: DistillationConfig) -> None:
        self.args = args
        self.splits_groups = not args.later_tokens

    def row_items(self, batch: SampledBatch) -> Tensor:
        """Tokens of each row; with `later_tokens` the longest completion, because a mean would change the gradient."""
        constant = float(self.args.longest_completion) if self.args.later_tokens else None
        reduction: Reduction = "token" if constant is None else "constant"
        return row_items(batch.trainable, batch.row_index, batch.num_rows, reduction=reduction, constant=constant)

    def ready(
        self,
        batch: SampledBatch,
        score: Callable[[SampledBatch, Collection[ScoreNeed]], Scores],
        *,
        is_first: bool,
    ) -> TaughtBatch:
        """See `Objective`."""
        if isinstance(batch, TaughtBatch):  # with what is stored
            return batch
        seen = as_the_teacher_sees(batch)
        if self.args.has_teacher_server:
            scores = score(seen, TOP)
            return TaughtBatch.of(batch, teacher_ids=scores.top_ids, teacher_logprobs=scores.top_logprobs)
        return TaughtBatch.of(batch, ref_hidden=score(seen, {"ref_hidden"}).ref_hidden)

    def __call__(self, batch: TaughtBatch, scores: TokenScores) -> LossOutput:
        """The sum over a micro-batch."""
        losses = scores.divergence
        if self.args.later_tokens:
            log_ratio, longest = scores.logprobs - batch.sampling_logprobs, max(batch.trainable_counts)
            losses = completion_kl(losses, log_ratio, batch.trainable, batch.row_index, batch.group_index, longest)
        divergence = token_mean(scores.divergence.detach(), batch.trainable)
        entropy = token_mean(scores.entropy, batch.trainable)
        metrics: dict[str, Metric] = {"divergence": divergence, "entropy": entropy}
        return LossOutput(losses.where(batch.trainable, 0.0).sum(), metrics)


def with_stored(batch: SampledBatch, rollouts: Sequence[Rollout]) -> TaughtBatch:
    """The rows of some rollouts with what their dataset rows say that the teacher finds likely."""
    return TaughtBatch.of(batch, **top_of([(rollout.row, len(rollout.sampled_ids)) for rollout in rollouts]))


class DistillationLearner:
    """Every completion is learned from, whatever its reward.

    Args:
        args: Options.
        rewards: Not used: they are only logged.
        with_rows: Adds what dataset rows say of their teachers to the batch of their rollouts.
    """

    needs: frozenset[ScoreNeed] = frozenset()

    def __init__(
        self,
        args: DistillationConfig,
        rewards: RewardRunner,
        *,
        with_rows: Callable[[SampledBatch, Sequence[Rollout]], SampledBatch],
    ) -> None:
        self.args = args
        self.objective = DistillationObjective(args)
        self._with_rows = with_rows

    def advantages(
        self,
        batch: SampledBatch,
        scores: Scores,
        rollouts: Sequence[Rollout],
        *,
        num_parts: int,
        step: int,
        over_ranks: bool,
    ) -> Learned[SampledBatch]:
        """See `Learner`; all advantages are 0."""
        parts = rows_of_parts(rollouts, self.args, num_parts=num_parts)
        return Learned(self._with_rows(batch, rollouts), [list(part) for part in parts], [0.0] * len(rollouts))

    def state_dict(self) -> dict[str, Any]:
        """Empty: nothing is carried from batch to batch."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do: nothing is carried from batch to batch."""


class DistillationTrainer(OnlineTrainer[TaughtBatch]):
    """Minimizes the divergence of the student's distribution from the teacher's at each token of completions.

    By default, the student samples the completions, and the divergence is the reverse KL, KL(student || teacher); see
    the option `beta`. The loss is the mean over tokens. With `later_tokens`, it is the KL of whole completions
    divided by `max_completion_length`, and its gradient is exact: see `losses.kl.completion_kl`.

    Args:
        model: The student: name, path or instance. An instance is trained in place.
        teacher_model: The teacher, which has the same vocabulary: name, path or instance, or a mapping of names to
            these, from which each row chooses by its column `teacher`. It can also be given as the option
            `teacher_model_name_or_path`. None: the student itself, which then sees `teacher_prompt`.
        args: Options. The default options write to `<model name>-DISTILLATION`.
        data: Further arguments in TRL's order: `train_dataset`, `eval_dataset`, `processing_class`, `callbacks`,
            `optimizers`, `quantization_config`, `peft_config`, `tools`.
        reward_funcs: Rewards that are logged, and not learned from; see `OnlineTrainer`.
        arguments: The other arguments of `OnlineTrainer`.

    Raises:
        ConfigError: The options cannot be combined, or the teacher cannot be compared with the student.
        DataError: A dataset cannot be used; the message names the row and the column.

    Source: Agarwal et al. 2023 (GKD), arXiv 2306.13649; Gu et al. 2023 (MiniLLM), arXiv 2306.08543
    """

    algorithm = "distillation"
    config_class = DistillationConfig
    args: DistillationConfig

    def __init__(
        self,
        model: str | Path | PreTrainedModel | nn.Module,
        teacher_model: GivenTeacher = None,
        args: DistillationConfig | None = None,
        *data: Any,
        reward_funcs: RewardSources | None = None,
        **arguments: Unpack[OnlineArguments],
    ) -> None:
        given = named(type(self), data, arguments)
        check_arguments(type(self), {"model": model, "teacher_model": teacher_model, "args": args, **given})
        self._is_stored = is_stored(given.get("train_dataset"))
        if self._is_stored:
            check_stored(teacher_model, args or DistillationConfig())
        super().__init__(model, reward_funcs, args, teacher_model=teacher_model, **given)

    def _set_up_reference(self) -> None:
        """The teacher: a reference that is no copy of the policy, or sees other prompts; none if it is stored."""
        if self._is_stored:
            self.learner_class = partial(DistillationLearner, with_rows=with_stored)
            return
        teacher, args = self._teacher, self.args
        by_column, has_prompts = isinstance(teacher, Mapping), args.teacher_prompt is not None
        with_rows = partial(assigned, by_column=by_column, has_prompts=has_prompts)
        self.learner_class = partial(DistillationLearner, with_rows=with_rows)
        if args.has_teacher_server:
            self.scorer.teacher_servers = served_teacher(self)
            self.scorer.needed(self._idle_batch(), TOP, rows_per_pass=1)  # servers that refuse do so now
            return
        check_weights(teacher, args)
        if isinstance(teacher, Mapping):
            self.scorer.reference = several_teachers(self, teacher)
        elif teacher is None and args.teacher_weights == "live":
            self.scorer.reference, self._reference_moves = LiveTeacher(self.policy), True
        else:
            given = None if teacher is None else loaded_teacher(self, teacher)
            self._add_reference(args.of_teacher, given, name="teacher_model")
        self.scorer.beta = args.beta
        if self.ref_model is not None:
            self.scorer.of_reference(self._idle_batch())  # goes to its device, and runs its self-check now
        check_context(self, self.ref_model or self.policy, has_prompts=has_prompts)

    def prepare_dataset(self, dataset: Dataset, processing_class: ProcessingClass, *, training: bool) -> Dataset:
        """See `OnlineTrainer` and `taught_rows`."""
        takes = self._is_stored or (training and self.args.on_policy_fraction < 1)
        if takes and (isinstance(dataset, datasets.IterableDataset) or self.episodes.exist):
            raise ConfigError(
                f"on_policy_fraction={self.args.on_policy_fraction} with an IterableDataset, tools or an "
                "environment: completions are taken from the rows of a Dataset. Set on_policy_fraction=1."
            )
        return taught_rows(
            dataset,
            processing_class,
            self.args,
            partial(super().prepare_dataset, processing_class=processing_class, training=training),
            names=list(self._teacher) if isinstance(self._teacher, Mapping) else None,
            num_tokens=self._num_embeddings,
            training=training,
            has_stored=self._is_stored,
        )

    def _sampler(self) -> RolloutSampler:
        """See `OnlineTrainer`."""
        sampler, fraction = super()._sampler(), self.args.on_policy_fraction
        return sampler if fraction == 1 else GivenCompletions(sampler, fraction, self.args.max_prompt_length)

    def close(self) -> None:
        """See `OnlineTrainer`."""
        super().close()
        if self.scorer.teacher_servers is not None:
            self.scorer.teacher_servers.close()

    def loss(self, model: nn.Module, batch: TaughtBatch) -> LossOutput:
        """See the objective."""
        want = self.objective.want
        top = batch.top(self.args.beta)
        return self._policy_loss(batch, self.scorer.scores(model, batch, want, ref_hidden=batch.ref_hidden, top=top))

    def cut(self, batch: TaughtBatch, rows_per_micro_batch: int) -> list[TaughtBatch]:
        """See `BaseTrainer`; with `later_tokens`, never splits a group."""
        budget = self.args.max_tokens_per_micro_batch
        if not self.args.later_tokens:
            return super().cut(batch, rows_per_micro_batch)
        if budget is not None:
            return batch.split(budget, whole_groups=True)
        groups: dict[int, list[int]] = {}
        for row, group in enumerate(batch.group_index):
            groups.setdefault(group, []).append(row)
        size = max(rows_per_micro_batch // self.args.num_generations, 1)
        parts = [list(groups.values())[start : start + size] for start in range(0, len(groups), size)]
        return [batch.select([row for rows in part for row in rows]) for part in parts]
