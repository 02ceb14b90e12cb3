"""Distillation: a student learns from a teacher's distributions, on its own completions or on those of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import datasets
import numpy as np
import torch
from transformers import AutoTokenizer

from prefrl.data.formats import get_dataset_column_names
from prefrl.data.images import tokenizer_of
from prefrl.data.teacher_columns import IDS, TEACHER_COLUMNS, TeacherColumns, top_of
from prefrl.data.tokenize import with_given_ids
from prefrl.errors import ConfigError, DataError
from prefrl.losses.kl import completion_kl
from prefrl.losses.per_token import row_items
from prefrl.losses.top_logprobs import TopLogprobs
from prefrl.metrics import token_mean
from prefrl.models.load import arguments_for_other, load_model
from prefrl.options.preference import ReferenceOptions
from prefrl.rollout.batches import rows_of_parts
from prefrl.rollout.given import GivenCompletions
from prefrl.trainer.arguments import check_arguments, named
from prefrl.trainer.configs import DistillationConfig
from prefrl.trainer.online.learner import Learned
from prefrl.trainer.online.sampling import OnlineArguments
from prefrl.trainer.online.trainer import OnlineTrainer
from prefrl.types import LossOutput, SampledBatch

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, device, nn
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


_COMPARED = 100  # prompts on which the tokenizers of student and teacher are compared


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


def _check_stored(teacher: object, args: DistillationConfig) -> None:
    """Reject what a dataset with a teacher's columns cannot be combined with."""
    for option, value, allowed, why in (
        ("teacher_model", teacher, None, "both say what the teacher's distributions are"),
        ("teacher_model_init_kwargs", args.teacher_model_init_kwargs, None, "there is no model to load"),
        ("later_tokens", args.later_tokens, False, "the importance weights are those of completions that are sampled"),
        (
            "repetition_penalty",
            args.repetition_penalty,
            1.0,
            "it changes logits, and those of the teacher are not known",
        ),
        ("on_policy_fraction", args.on_policy_fraction, 0.0, "they are of the dataset's completions, not of others"),
    ):
        if value != allowed:
            shown = repr(value) if isinstance(value, str | bool | float | dict) else type(value).__name__
            raise ConfigError(
                f"{option}={shown} and a train_dataset with a column {IDS}: {why}. Set {option}={allowed}, or remove "
                f"the columns {', '.join(TEACHER_COLUMNS)}."
            )


class DistillationObjective:
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

    def has_gradient(self, batch: SampledBatch) -> list[bool]:
        """Every row has one."""
        return [True] * batch.num_rows

    def prepared(self, batch: SampledBatch, *, num_items: float) -> SampledBatch:
        """The batch unchanged: no row depends on others."""
        return batch

    def metrics_without_pass(self, batch: SampledBatch) -> dict[str, Metric]:
        """Empty, because every row has a gradient."""
        return {}

    def ready(
        self,
        batch: SampledBatch,
        score: Callable[[SampledBatch, Collection[ScoreNeed]], Scores],
        *,
        is_first: bool,
    ) -> TaughtBatch:
        """See `Objective`."""
        if isinstance(batch, TaughtBatch):  # the dataset has the teacher's log-probs
            return batch
        return TaughtBatch.of(batch, ref_hidden=score(batch, {"ref_hidden"}).ref_hidden)

    def visited(self, batch: TaughtBatch, logprobs: Tensor) -> TaughtBatch:
        """The batch unchanged: the loss compares with the teacher and with the sampler."""
        return batch

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

    def end_step(self, device: device) -> None:
        """Nothing to do: no weights adapt."""

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Empty: no weights adapt."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Nothing to do: no weights adapt."""


class DistillationLearner:
    """Every completion is learned from, whatever its reward.

    Args:
        args: Options.
        rewards: Not used: they are only logged.
    """

    needs: frozenset[ScoreNeed] = frozenset()

    def __init__(self, args: DistillationConfig, rewards: RewardRunner) -> None:
        self.args = args
        self.objective = DistillationObjective(args)

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
        if rollouts and IDS in rollouts[0].row and self.args.on_policy_fraction == 0:
            known = [top_of(one.row, len(one.sampled_ids)) for one in rollouts]
            columns = {name: np.concatenate([of_row[name] for of_row in known]) for name in known[0]}
            batch = TaughtBatch.of(batch, **{name: torch.from_numpy(values) for name, values in columns.items()})
        return Learned(batch, [list(part) for part in parts], [0.0] * len(rollouts))

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
        teacher_model: The teacher, which has the same vocabulary: name, path or instance. It can also be given as
            the option `teacher_model_name_or_path`.
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
    learner_class = DistillationLearner

    def __init__(
        self,
        model: str | Path | PreTrainedModel | nn.Module,
        teacher_model: str | Path | PreTrainedModel | None = None,
        args: DistillationConfig | None = None,
        *data: Any,
        reward_funcs: RewardSources | None = None,
        **arguments: Unpack[OnlineArguments],
    ) -> None:
        given = named(type(self), data, arguments)
        check_arguments(type(self), {"model": model, "teacher_model": teacher_model, "args": args, **given})
        by_name = args.teacher_model_name_or_path if isinstance(args, DistillationConfig) else None
        if teacher_model is not None and by_name is not None:
            raise ConfigError(
                f"teacher_model_name_or_path={by_name!r} and the argument teacher_model: both name the teacher. "
                "Remove one of them."
            )
        self._teacher = by_name if teacher_model is None else teacher_model
        rows = given.get("train_dataset")
        self._is_stored = rows is not None and IDS in (rows.column_names or ())
        if self._is_stored:
            _check_stored(self._teacher, args or DistillationConfig())
        elif self._teacher is None:
            raise ConfigError(
                "teacher_model=None: there is nothing to learn from. Set it, or the option "
                "teacher_model_name_or_path, to a model with the student's vocabulary, or give a dataset with the "
                f"columns {', '.join(TEACHER_COLUMNS)} of prefrl teacher."
            )
        super().__init__(model, [] if reward_funcs is None else reward_funcs, args, **given)

    def _set_up_reference(self) -> None:
        """The teacher, which is a reference that is not a copy of the policy, unless the dataset has its log-probs."""
        if self._is_stored:
            return
        teacher, arguments = self._teacher, cast("dict[str, Any] | None", self.args.teacher_model_init_kwargs)
        if isinstance(teacher, str | Path):
            if arguments is None:
                shared = cast("dict[str, Any] | None", self.args.model_init_kwargs)
                arguments = arguments_for_other(teacher, self.policy, shared)
            self._check_tokens(Path(teacher))
            teacher = load_model(teacher, model_init_kwargs=arguments)
        elif arguments is not None:
            raise ConfigError(
                f"teacher_model_init_kwargs={arguments} has no effect because teacher_model is an instance. Leave it "
                "out, or give the teacher by name."
            )
        self._add_reference(ReferenceOptions(beta=1.0), teacher, name="teacher_model")
        self.scorer.beta = self.args.beta
        self.scorer.of_reference(self._idle_batch())  # goes to its device, and runs its self-check now

    def _check_tokens(self, folder: Path) -> None:
        """Reject a teacher in a folder whose tokenizer splits the prompts in another way than the student's."""
        if self.train_dataset is None or not (folder / "tokenizer_config.json").exists():
            return
        rows = [row for row, _ in zip(self.train_dataset, range(_COMPARED), strict=False)]
        texts = [self.tokenizer.decode(row["prompt_ids"]) for row in rows]
        other = AutoTokenizer.from_pretrained(folder, trust_remote_code=self.args.trust_remote_code)
        for text in texts:
            ids, others = (each(text, add_special_tokens=False)["input_ids"] for each in (self.tokenizer, other))
            if ids != others:
                raise ConfigError(
                    f"teacher_model={str(folder)!r}: its tokenizer makes {others[:8]} of {text[:40]!r}, and the "
                    f"student's makes {ids[:8]}, so their distributions cannot be compared. Choose a teacher of the "
                    "student's family."
                )

    def prepare_dataset(self, dataset: Dataset, processing_class: ProcessingClass, *, training: bool) -> Dataset:
        """See `OnlineTrainer`; also tokenizes completions that are given."""
        if self._is_stored:
            return self._with_teacher(dataset, processing_class, training=training)
        if training and self.args.on_policy_fraction < 1:
            dataset = self._with_completions(dataset, processing_class)
        return super().prepare_dataset(dataset, processing_class, training=training)

    def _with_teacher(self, dataset: Dataset, processing_class: ProcessingClass, *, training: bool) -> Dataset:
        """The prepared dataset, whose rows have completions and the teacher's log-probs, even those of evaluations."""
        names = get_dataset_column_names(dataset)
        if missing := [name for name in TEACHER_COLUMNS if name not in names]:
            raise DataError(
                f"{'train' if training else 'eval'}_dataset has no columns {', '.join(missing)}: its columns are "
                f"{', '.join(names)}. Without a teacher_model, all rows need what prefrl teacher adds to them."
            )
        # Whatever maps rows would copy these columns number by number.
        stored, others = dataset.select_columns([*TEACHER_COLUMNS]), dataset.remove_columns([*TEACHER_COLUMNS])
        given = self._with_completions(others, processing_class)
        args, num_tokens = self.args, self._num_embeddings
        columns = TeacherColumns(tokenizer_of(processing_class), num_tokens, args.temperature, args.max_prompt_length)
        columns.check(datasets.concatenate_datasets([given, stored], axis=1))
        prepared = super().prepare_dataset(given, processing_class, training=training)
        return datasets.concatenate_datasets([prepared, stored], axis=1)

    def _with_completions(self, dataset: Dataset, processing_class: ProcessingClass) -> Dataset:
        """The dataset with the tokens of its completions."""
        if isinstance(dataset, datasets.IterableDataset) or self.episodes.exist:
            raise ConfigError(
                f"on_policy_fraction={self.args.on_policy_fraction} with an IterableDataset, tools or an "
                "environment: completions are taken from the rows of a Dataset. Set on_policy_fraction=1."
            )
        return with_given_ids(
            dataset,
            processing_class,
            chat_template_kwargs=cast("dict[str, Any] | None", self.args.chat_template_kwargs),
            num_proc=self.args.dataset_num_proc,
        )

    def _sampler(self) -> RolloutSampler:
        """See `OnlineTrainer`."""
        sampler, fraction = super()._sampler(), self.args.on_policy_fraction
        return sampler if fraction == 1 else GivenCompletions(sampler, fraction, self.args.max_prompt_length)

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
