"""Who teaches each row of a dataset, and what the teacher sees: columns of the dataset, and the models behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import datasets
import torch
from transformers import PreTrainedModel

from prefrl.data.checks import check_positions
from prefrl.data.collate import share_equal
from prefrl.data.formats import check_not_reserved, get_dataset_column_names, map_anew
from prefrl.data.images import image_reader, tokenizer_of
from prefrl.data.packing import list_lengths, map_rows
from prefrl.data.teacher_columns import with_columns, without_columns
from prefrl.data.tokenize import prepare_prompt_dataset, with_given_ids
from prefrl.errors import ConfigError, DataError
from prefrl.generation.vllm.teacher import TeacherServers, teacher_key
from prefrl.http import Http
from prefrl.models.flops import model_cost, num_weights
from prefrl.models.plans import position_limit
from prefrl.models.teachers import AssignedBatch, Teachers
from prefrl.options.preference import ReferenceOptions
from prefrl.options.server_rules import are_local
from prefrl.rollout.journal import TEACHER_COLUMNS
from prefrl.trainer.arguments import GivenTeacher, TeacherModel, ids_of_prompts, kept_reference, loaded_teacher
from prefrl.trainer.configs import DistillationConfig

if TYPE_CHECKING:
    from prefrl.data.formats import AnyDataset
    from prefrl.data.images import ProcessingClass
    from prefrl.trainer.base_trainer import BaseTrainer
    from prefrl.types import Rollout, SampledBatch

TeacherPrompt: TypeAlias = str | Callable[[Mapping[str, Any]], Any]

_NUMBER, _PROMPT_IDS, *_ = TEACHER_COLUMNS  # are added


def check_weights(teacher: GivenTeacher, args: DistillationConfig) -> None:
    """Refuse options of a teacher that is the student if another one teaches, and the reverse.

    Raises:
        ConfigError: Names the option.
    """
    if teacher is not None and args.teacher_weights != "frozen":
        raise ConfigError(
            f"teacher_weights={args.teacher_weights!r} with teacher_model: only a teacher that is the student itself "
            "moves with it. Leave one of them out."
        )
    if teacher is None and args.teacher_model_init_kwargs is not None:
        raise ConfigError(
            f"teacher_model_init_kwargs={args.teacher_model_init_kwargs} has no effect because the student teaches "
            "itself. Leave it out, or name a teacher."
        )


@dataclass(frozen=True)
class _TeacherOfRow:
    """The number of the teacher that a row names."""

    names: tuple[str, ...]

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if row["teacher"] not in self.names:
            raise DataError(
                f"column 'teacher' is {row['teacher']!r}: the teachers are {', '.join(map(repr, self.names))}"
            )
        return {_NUMBER: self.names.index(row["teacher"])}


def taught_rows(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    args: DistillationConfig,
    with_prompts: Callable[[AnyDataset], AnyDataset],
    *,
    names: Sequence[str] | None,
    num_tokens: int,
    training: bool,
    has_stored: bool,
) -> AnyDataset:
    """The rows of a dataset, with all that distillation reads of them.

    Args:
        dataset: Of any columns; completions are taken from a `Dataset` alone.
        processing_class: A tokenizer, or a processor.
        args: Options.
        with_prompts: Adds the columns of prompts.
        names: Those of the teachers, if there are several.
        num_tokens: Size of the student's vocabulary.
        training: Whether the rows are for training, and not for evaluations.
        has_stored: Whether a teacher's log-probs are in the rows.

    Raises:
        ConfigError: An option does not fit the dataset.
        DataError: A column is missing, or a row cannot be used.
    """
    stored: datasets.Dataset | None = None
    if has_stored:  # for evaluations, too: no teacher can be asked about other completions
        dataset, stored = without_columns(dataset, "train_dataset" if training else "eval_dataset")
    if has_stored or (training and args.on_policy_fraction < 1):
        dataset = with_given_ids(
            dataset,
            processing_class,
            chat_template_kwargs=cast("dict[str, Any] | None", args.chat_template_kwargs),
            num_proc=args.dataset_num_proc,
        )
    dataset = with_prompts(dataset)
    if stored is not None:
        return with_columns(dataset, stored, tokenizer_of(processing_class), num_tokens, args)
    if names is not None:
        dataset = with_teachers(dataset, names)
    prompt = args.teacher_prompt
    return dataset if prompt is None else with_teacher_prompts(dataset, prompt, processing_class, args)


def with_teachers(dataset: AnyDataset, names: Sequence[str]) -> AnyDataset:
    """Add the number of the teacher that each row has in its column `teacher`.

    Args:
        dataset: Of any columns; a stream is read row by row.
        names: Those of the teachers.

    Raises:
        DataError: There is no such column, or it has other names; the message has the rows and the names.
    """
    columns = get_dataset_column_names(dataset)
    if "teacher" not in columns:
        raise DataError(
            f"teacher_model has {len(names)} teachers, {', '.join(map(repr, names))}, but the dataset has no column "
            f"'teacher' that names the one of each row: its columns are {', '.join(columns)}. Add it, or give one "
            "teacher."
        )
    check_not_reserved(dataset, (_NUMBER,))
    features = {**(dataset.features or dict.fromkeys(columns)), _NUMBER: datasets.Value("int32")}
    remedy = "Correct them, or give teachers of these names"
    return map_rows(
        dataset,
        _TeacherOfRow(tuple(names)),
        features,
        invalid_rows="error",
        num_proc=None,
        desc="Finding teachers",
        remedy=remedy,
    )


def with_teacher_prompts(
    dataset: AnyDataset, prompt: TeacherPrompt, processing_class: ProcessingClass, args: DistillationConfig
) -> AnyDataset:
    """Add the ids of the prompts that the teacher sees, tokenized as the student's are, but never cut off.

    Args:
        dataset: With the student's prompts and their ids.
        prompt: A column with text or messages, or a function of a row that returns one of these.
        processing_class: A tokenizer.
        args: Options.

    Raises:
        ConfigError: The processing class reads images.
        DataError: There is no such column, or a row cannot be used.
    """
    if image_reader(processing_class) is not None:
        raise ConfigError(
            f"teacher_prompt with a {type(processing_class).__name__}, which reads images: only prompts of text can "
            "be exchanged. Pass its tokenizer as processing_class, or leave teacher_prompt out."
        )
    aside = {"prompt": "student_prompt", "prompt_ids": "student_prompt_ids"}
    check_not_reserved(dataset, (_PROMPT_IDS, *aside.values()))
    if not isinstance(prompt, str):
        check_not_reserved(dataset, ("teacher_prompt",))
        dataset, prompt = map_anew(dataset, prompt, "teacher_prompt", "teacher_prompt"), "teacher_prompt"
    columns = [column for column in get_dataset_column_names(dataset) if column not in aside]
    if prompt not in columns:
        raise DataError(
            f"teacher_prompt={prompt!r}: beside the student's prompts, the dataset has no such column, only "
            f"{', '.join(columns) or 'these'}. Name the column that has the teacher's prompts."
        )
    try:
        prepared = prepare_prompt_dataset(
            dataset.rename_columns(aside).rename_column(prompt, "prompt"),
            processing_class,
            max_prompt_length=None,
            chat_template_kwargs=cast("dict[str, Any] | None", args.chat_template_kwargs),
            num_proc=args.dataset_num_proc,
        )
    except DataError as error:
        raise DataError(f"teacher_prompt: column {prompt!r}, which is read like column 'prompt': {error}") from error
    prepared = prepared.rename_columns({"prompt_ids": _PROMPT_IDS, "prompt": prompt})
    return prepared.rename_columns({new: name for name, new in aside.items()})


def assigned(batch: SampledBatch, rollouts: Sequence[Rollout], *, by_column: bool, has_prompts: bool) -> SampledBatch:
    """The rows of some rollouts with what their dataset rows say of teachers; unchanged if they say nothing.

    Args:
        batch: B rows.
        rollouts: B rollouts.
        by_column: Whether each row has a teacher of its own, see `with_teachers`.
        has_prompts: Whether the teacher sees other prompts, see `with_teacher_prompts`.
    """
    if not (by_column or has_prompts):
        return batch
    return AssignedBatch.of(
        batch,
        teacher=tuple(rollout.row[_NUMBER] if by_column else 0 for rollout in rollouts),
        teacher_prompts=tuple(tuple(rollout.row[_PROMPT_IDS]) for rollout in rollouts) if has_prompts else None,
    )


def as_the_teacher_sees(batch: SampledBatch) -> SampledBatch:
    """The same responses after the prompts that the teacher sees: other branches of the forest."""
    if not isinstance(batch, AssignedBatch) or batch.teacher_prompts is None:
        return batch
    shared = share_equal(batch.teacher_prompts, batch.group_index)
    return batch.replace(
        prompt_ids=torch.tensor(list(chain.from_iterable(shared.segments)), dtype=torch.long).to(batch.device),
        prompt_lengths=tuple(map(len, shared.segments)),
        prompt_parent=tuple(shared.parents),
        prompt_index=tuple(shared.ends),
    )


def several_teachers(trainer: BaseTrainer[Any], given: Mapping[str, TeacherModel]) -> Teachers:
    """Several teachers by name, ready to score the policy's batches; see `loaded_teacher`."""
    models = {name: loaded_teacher(trainer, teacher) for name, teacher in given.items()}
    options = ReferenceOptions(beta=1.0)
    references = [
        kept_reference(trainer, options, trainer.model, model, moves=False, name=f"teacher_model[{name!r}]")
        for name, model in models.items()
    ]
    if trainer.account.flops is not None:  # rows need at least the smallest
        trainer.account.flops.others["reference"] = model_cost(min(models.values(), key=num_weights))
    return Teachers([reference for reference in references if reference is not None], list(models))


def check_context(trainer: BaseTrainer[Any], model: PreTrainedModel, *, has_prompts: bool) -> None:
    """Refuse prompts that are too long for a teacher's table of positions, or warn if it computes positions.

    Streams are not read.

    Args:
        trainer: Has prepared its dataset.
        model: The teacher, or the student if it teaches itself.
        has_prompts: Whether the teacher sees prompts of its own, which are never cut off.

    Raises:
        DataError: Names the first row that is too long.
    """
    if isinstance(trainer.train_dataset, datasets.Dataset):
        bound = trainer.args.length_bound
        bound = replace(bound, max_length=None) if has_prompts else bound
        column = _PROMPT_IDS if has_prompts else "prompt_ids"
        check_positions(trainer.train_dataset, position_limit(model), bound, columns=(column,))


def served_teacher(trainer: BaseTrainer[Any]) -> TeacherServers:
    """The servers of the teacher, which answer and were compared with the student. All ranks must call it.

    Raises:
        ConfigError: Their tokenizer splits prompts in another way than the student's, or the student reads images.
        DataError: A prompt is too long for them, with what is sampled after it.
        GenerationError: They do not answer, or not as they should.
    """
    if trainer.images is not None:
        raise ConfigError(
            f"teacher_server_base_url with a {type(trainer.processing_class).__name__}, which reads images: only "
            "texts are sent to a teacher's servers. Pass its tokenizer as processing_class, or give a teacher_model."
        )
    args: Any = trainer.args
    urls, params = args.teacher_urls, args.teacher_server_params
    vocab_size = trainer.policy.config.get_text_config().vocab_size
    http = Http(key=teacher_key(params, are_local=are_local(urls)))
    servers = TeacherServers(urls, params, vocab_size=vocab_size, http=http)
    servers.recover()
    servers.check_tokenizer(ids_of_prompts(trainer))
    if isinstance(trainer.train_dataset, datasets.Dataset):
        column = "prompt_ids" if args.teacher_prompt is None else _PROMPT_IDS
        lengths, sampled = list_lengths(trainer.train_dataset, column), args.length_bound.sampled
        row = int(lengths.argmax())
        if lengths[row] + sampled > servers.longest_text:
            raise DataError(
                f"row {row} of the dataset has {lengths[row]} tokens in the prompt, and {sampled} are sampled, but "
                f"the teacher's servers take texts of {servers.longest_text} tokens. Start them with a larger "
                "--max-model-len, or lower max_prompt_length or max_completion_length."
            )
    return servers
