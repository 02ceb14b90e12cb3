"""What trainers' constructors are given: arguments, checked before anything is loaded; models beside the policy."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import datasets
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.utils import PushToHubMixin, cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from prefrl import distributed
from prefrl.data.collate import flat_batch
from prefrl.data.images import ImageReader, ProcessingClass, image_reader, tokenizer_of
from prefrl.data.teacher_columns import is_stored
from prefrl.errors import ConfigError, DataError, require
from prefrl.models.flops import model_cost
from prefrl.models.forward import set_image_example
from prefrl.models.load import arguments_for_other, load_model
from prefrl.models.reference import Reference, make_reference
from prefrl.options.distillation import DistillationOptions, TeacherOptions
from prefrl.options.fields import default_of
from prefrl.options.names import ARGUMENTS, TRAINER_NAMES, nearest
from prefrl.options.online import OnlineOptions
from prefrl.options.preference import ReferenceOptions
from prefrl.registry import REGISTRY
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.parts import Run
from prefrl.types import TokenBatch

# The positional parameters after `args` where they are not named, in TRL's order.
_DATA = ("data_collator", "train_dataset", "eval_dataset", "processing_class")
_QUANTIZED_PEFT = ("quantization_config", "peft_config")
_OF_LOGITS = ("optimizer_cls_and_kwargs", "preprocess_logits_for_metrics")
_MOST = (*_DATA, "compute_metrics", "callbacks", "optimizers", *_QUANTIZED_PEFT)
_REFERENCE_FREE = (
    *(*_DATA, "model_init", "callbacks", "optimizers", "preprocess_logits_for_metrics", "peft_config"),
    "compute_metrics",
)
_POSITIONS = {
    "sft": (
        *(*_DATA, "compute_loss_func", "compute_metrics", "callbacks", "optimizers", *_OF_LOGITS, *_QUANTIZED_PEFT),
        "formatting_func",
    ),
    "dpo": _MOST,
    "kto": _MOST,
    "bco": _MOST,
    "orpo": _REFERENCE_FREE,
    "cpo": _REFERENCE_FREE,
    "online_dpo": (*_DATA, "reward_processing_classes", "peft_config", "compute_metrics", "callbacks", "optimizers"),
    "distillation": (*_DATA[1:], "callbacks", "optimizers", *_QUANTIZED_PEFT, "tools"),
    "reward": (*_DATA, "compute_metrics", "callbacks", "optimizers", *_OF_LOGITS, *_QUANTIZED_PEFT),
}


class _Algorithm(Protocol):
    """A trainer."""

    algorithm: str


def _is_model(value: Any) -> bool:
    return isinstance(value, str | os.PathLike | nn.Module)


def _is_teacher(value: Any) -> bool:
    several = isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value)
    return all(map(_is_model, value.values())) if several else _is_model(value)


def _is_rewards(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping) or _is_model(value) or callable(value)


# Argument -> test for a value that is not None, and the words of the error message for what it must be.
_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_model, "a name, a path or a model"),
    "ref_model": (_is_model, "a name, a path, a model or None"),
    "teacher_model": (_is_teacher, "a name, a path, a model, a mapping of names to these, or None"),
    "reward_funcs": (
        _is_rewards,
        "a reward, a list of them or a mapping to their weights: functions, and reward models or their names",
    ),
    "eval_reward_funcs": (_is_rewards, "what reward_funcs may be, or None: evaluations have the rewards of training"),
    "processing_class": (
        lambda value: isinstance(value, PreTrainedTokenizerBase | ProcessorMixin),
        "a tokenizer or processor of transformers or None",
    ),
    "compute_metrics": (callable, "a function of an EvalPrediction, which returns numbers by name, or None"),
    "callbacks": (lambda value: isinstance(value, list | tuple), "a list of callbacks or None"),
    "optimizers": (
        lambda value: isinstance(value, list | tuple) and len(value) == 2,
        "a pair of optimizer and scheduler, each of which may be None",
    ),
    "peft_config": (lambda value: isinstance(value, PushToHubMixin), "a config of peft, such as LoraConfig, or None"),
    "quantization_config": (
        lambda value: isinstance(value, QuantizationConfigMixin),
        "a quantization config of transformers, such as BitsAndBytesConfig, or None",
    ),
}


def check_arguments(trainer: type[_Algorithm], arguments: Mapping[str, Any]) -> None:
    """Reject constructor arguments of the wrong kind, such as those passed in the wrong position.

    Args:
        trainer: The class whose constructor was called.
        arguments: The arguments by name, in the order of the constructor. The first wrong one is reported.

    Raises:
        ConfigError: An argument is of the wrong kind.
        DataError: A dataset argument is not a dataset, or holds several where one is needed.
    """
    for name, value in arguments.items():
        if name == "args":
            _check_config(trainer, value)
        elif name in ARGUMENTS and value is not None:
            raise _error(trainer, name, value, f"None: {ARGUMENTS[name]}")
        elif name in ("train_dataset", "eval_dataset"):
            check_dataset(name, value, takes_several=name == "eval_dataset")
        elif name in _ARGUMENTS and (value is not None or name == "model" or _lacks_rewards(name, arguments)):
            is_right, allowed = _ARGUMENTS[name]
            if not is_right(value):
                raise _error(trainer, name, value, allowed)


def _lacks_rewards(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an argument is that for rewards, and neither an environment nor a teacher stands for them."""
    args = arguments.get("args")
    is_taught = isinstance(args, OnlineOptions) and not args.needs_rewards
    return name == "reward_funcs" and arguments.get("environment_factory") is None and not is_taught


def check_names(trainer: type[_Algorithm], names: Collection[str]) -> None:
    """Reject names that a constructor of prefrl does not have, with the one that is meant.

    Args:
        trainer: The class whose constructor was called. One with a constructor of the user's own has its own names.
        names: The names of its arguments.

    Raises:
        ConfigError: See above.
    """
    if not trainer.__init__.__module__.startswith("prefrl."):
        return
    known = set(_POSITIONS.get(trainer.algorithm, ()))
    for cls in trainer.__mro__:
        if cls.__module__.startswith("prefrl.") and "__init__" in vars(cls):
            _, *own = inspect.signature(vars(cls)["__init__"]).parameters.values()
            known |= {each.name for each in own if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    for name in names:
        if name not in known and (name not in ARGUMENTS or trainer.algorithm not in _POSITIONS):
            ours, advice = TRAINER_NAMES.get(name), ARGUMENTS.get(name)
            if ours in known:
                meant = f"It is {ours} here."
            elif advice is not None:
                meant = f"Instead, {advice}."
            elif name in _ARGUMENTS:  # of other trainers
                meant = "Leave it out."
            else:
                meant = nearest(name, known)
            raise ConfigError(f"{trainer.__name__} has no argument {name!r}. {meant}")


def check_has_data(arguments: Mapping[str, Any]) -> None:
    """Reject a trainer that can neither train nor evaluate.

    Raises:
        ConfigError: There is no dataset, and no environment that gives prompts.
    """
    if all(arguments.get(name) is None for name in ("train_dataset", "eval_dataset", "environment_factory")):
        raise ConfigError("train_dataset=None: training needs a dataset. For evaluation alone, pass eval_dataset.")


def named(trainer: type[_Algorithm], data: Sequence[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, for a constructor that takes those after `args` in TRL's order.

    Raises:
        TypeError: There are too many positional arguments, or one is given twice.
    """
    positions = _POSITIONS[trainer.algorithm]
    if len(data) > len(positions):
        raise TypeError(f"too many positional arguments: the order is {_order(trainer)}")
    by_position = dict(zip(positions, data, strict=False))
    twice = [name for name in by_position if name in arguments]
    if twice:
        raise TypeError(f"{twice[0]} is passed both by position and by name: the order is {_order(trainer)}")
    return {**by_position, **arguments}


def check_dataset(name: str, dataset: Any, *, takes_several: bool = False) -> None:
    """Reject a value that is not a dataset.

    Args:
        name: The argument's name, for the error message.
        dataset: The value: one dataset or None.
        takes_several: Whether a mapping of names to datasets is allowed, too.

    Raises:
        DataError: The value is a mapping where one dataset is needed, is not a dataset at all, or has a transform.
    """
    if isinstance(dataset, Mapping) and takes_several:
        for key, part in dataset.items():
            check_dataset(f"{name}[{key!r}]", part)
    elif isinstance(dataset, Mapping):
        names = list(dataset)
        example = "train" if "train" in names or not names else names[0]
        raise DataError(
            f"{name} is a {type(dataset).__name__} with the splits {', '.join(map(repr, names)) or 'none'}: must be "
            f"one dataset. Choose a split: {name}=ds[{example!r}]"
        )
    elif dataset is not None and not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        several = ", or several by name" if takes_several else ""
        raise DataError(
            f"{name} is a {type(dataset).__name__}: must be a datasets.Dataset or "
            f"IterableDataset{several}. {_how_to_load(dataset)}"
        )
    elif isinstance(dataset, datasets.Dataset) and dataset.format["type"] == "custom":
        raise DataError(
            f"{name} has a transform (with_transform or set_transform), which would run each time that rows are read, "
            "but rows are read once, before training. Apply it with map(), or remove it with with_format(None)"
        )


def _how_to_load(given: Any) -> str:
    """How a dataset is made of what was given for one."""
    if not isinstance(given, str | os.PathLike):
        return "To convert a list of rows, use datasets.Dataset.from_list(rows)"
    name, kind = os.fspath(given), Path(given).suffix.lower().lstrip(".")
    kind = {"jsonl": "json", "txt": "text"}.get(kind, kind)
    if kind not in ("json", "csv", "parquet", "text"):
        return f"Load it: datasets.load_dataset({name!r}, split='train')"
    return f"Load it: datasets.load_dataset({kind!r}, data_files={name!r}, split='train')"


def check_stream(dataset: Any, args: BaseConfig) -> None:
    """Reject a stream to train on without a number of optimizer steps, or with a limit in epochs.

    Raises:
        ConfigError: `max_steps` is not positive, or `stop_at_first_limit` is set.
    """
    if not isinstance(dataset, datasets.IterableDataset):
        return
    if args.max_steps <= 0:
        raise ConfigError(
            f"max_steps={args.max_steps} with an IterableDataset, whose length is not known: set the number of "
            "optimizer steps, max_steps > 0"
        )
    if args.stop_at_first_limit:
        raise ConfigError(
            "stop_at_first_limit=True with an IterableDataset, whose length is not known: its epochs cannot end the "
            "run. Leave it False; max_steps ends the run."
        )


def own_config(trainer: type[_Algorithm], args: Any, model: object, suffix: str) -> Any:
    """The config of a trainer's own class for its argument `args`.

    Plain `transformers.TrainingArguments` give all the options that they have, also where their default is another one
    than the trainer's. Only their `remove_unused_columns`, which is True unless set, is left out: the data layer
    chooses the columns.

    Args:
        trainer: The class whose constructor was called.
        args: Its argument.
        model: The trainer's argument.
        suffix: The output folder is `<model name>-<suffix>` if `args` is None.
    Raises:
        ConfigError: The arguments are of a subclass, and set an option that the trainer does not have.
    """
    config_class = REGISTRY[trainer.algorithm].load_config()
    if args is None:
        name = model if isinstance(model, str | Path) else getattr(getattr(model, "config", None), "name_or_path", "")
        return config_class(output_dir=f"{Path(name).name or type(model).__name__}-{suffix}")
    if isinstance(args, config_class):
        return args
    known = {field.name for field in fields(config_class) if field.init}
    given = {field.name: getattr(args, field.name) for field in fields(args) if field.init}
    defaults = {field.name: default_of(field) for field in fields(args)}
    lost = [name for name in given if name not in known and given[name] != defaults[name]]
    if lost:
        raise ConfigError(
            f"args={type(args).__name__}: {lost[0]}={given[lost[0]]!r} is not an option of {config_class.__name__}. "
            f"Pass args={config_class.__name__}(...)"
        )
    del given["remove_unused_columns"]
    return config_class(**{name: value for name, value in given.items() if name in known})


def _check_config(trainer: type[_Algorithm], value: Any) -> None:
    config_class = REGISTRY[trainer.algorithm].load_config()
    is_plain = isinstance(value, TrainingArguments) and not isinstance(value, BaseConfig)
    if value is not None and not is_plain and not isinstance(value, config_class):
        raise _error(trainer, "args", value, f"{config_class.__name__}(...) or None")


def _error(trainer: type[_Algorithm], name: str, value: Any, allowed: str) -> ConfigError:
    given = "None" if value is None else type(value).__name__
    order = f"The order is {_order(trainer)}; arguments can be given by name, too."
    return ConfigError(f"{name}={given}: must be {allowed}. {order}")


def _order(trainer: type[_Algorithm]) -> str:
    """The signature of prefrl's own constructor, for messages; a user's subclass may have a different one."""
    ours = next(cls for cls in trainer.__mro__ if cls.__module__.startswith("prefrl."))
    names: list[str] = []
    constructor: Callable[..., None] = ours.__init__  # type: ignore[misc]  # of the class itself
    for parameter in list(inspect.signature(constructor).parameters.values())[1:]:
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += _POSITIONS[trainer.algorithm]
    return f"{ours.__name__}({', '.join(names)})"


TeacherModel: TypeAlias = str | Path | PreTrainedModel
GivenTeacher: TypeAlias = TeacherModel | Mapping[str, TeacherModel] | None  # several by name; None: none or the policy


def loaded_reference(
    given: str | Path | PreTrainedModel | None, policy: PreTrainedModel, args: BaseConfig
) -> PreTrainedModel | None:
    """The user's `ref_model`; one that is given by name or path is loaded with `model_init_kwargs`."""
    if not isinstance(given, str | Path):
        return given
    arguments = cast("dict[str, Any] | None", args.model_init_kwargs)
    return load_model(given, model_init_kwargs=arguments_for_other(given, policy, arguments))


def kept_reference(
    run: Run,
    options: ReferenceOptions,
    model: PreTrainedModel,
    given: PreTrainedModel | None,
    *,
    moves: bool,
    name: str = "ref_model",
) -> Reference | None:
    """The reference that the options ask for, ready to score the policy `model`'s batches; see `make_reference`."""
    reference = make_reference(model, beta=options.beta, moves=moves, given=given, name=name)
    if reference is not None and reference.own_model is not None:
        run.parts.tell("made", run, reference.own_model, "reference")
        distributed.prepare_frozen(run.accelerator, reference.own_model)
    return reference


def chosen_teacher(trainer: type[_Algorithm], args: Any, given: GivenTeacher, rows: Any) -> GivenTeacher:
    """The teacher, which an option or the argument `teacher_model` names.

    None if the options need no other model, or if the teacher of a distillation is on servers, or what it finds likely
    is in the training dataset.

    Raises:
        ConfigError: It is given twice, missing, or has nothing to teach.
    """
    by_name, reason = None, f"{trainer.__name__} has no KL term of a teacher. Use DistillationTrainer or GRPOTrainer."
    needed = ""
    if isinstance(args, TeacherOptions):
        by_name, needed = args.teacher_model_name_or_path, args.needs_teacher
        reason = "teacher_kl_coef=0.0. Set teacher_kl_coef > 0, or leave the teacher out."
    if given is not None and by_name is not None:
        raise ConfigError(
            f"teacher_model_name_or_path={by_name!r} and the argument teacher_model: both name the teacher. "
            "Remove one of them."
        )
    is_distilled = isinstance(args, DistillationOptions)
    if given is not None and is_distilled and args.has_teacher_server:
        raise ConfigError(
            f"teacher_server_base_url={args.teacher_server_base_url} and the argument teacher_model: both name the "
            "teacher. Remove one of them."
        )
    if isinstance(given, Mapping) and not is_distilled:
        raise ConfigError(
            "teacher_model: several teachers, of which a column names one for each row, are for DistillationTrainer. "
            "Give one teacher."
        )
    if given is not None and not needed:
        raise ConfigError(f"teacher_model has no effect because {reason}")
    if needed and given is None and args.lacks_teacher:
        if is_distilled and is_stored(rows):
            return None
        raise ConfigError(f"teacher_model=None: {needed}.")
    return by_name if given is None else given


def loaded_teacher(run: Run, teacher: TeacherModel) -> PreTrainedModel:
    """A teacher of the policy; one that is given by name or path is loaded, after a look at its tokenizer.

    Raises:
        ConfigError: It splits texts of the dataset in another way, or options have no effect on an instance.
    """
    args: Any = run.args
    arguments: dict[str, Any] | None = args.teacher_model_init_kwargs
    if isinstance(teacher, str | Path):
        if arguments is None:
            arguments = arguments_for_other(teacher, run.policy, args.model_init_kwargs)
        _check_tokens(run, str(teacher), arguments)
        return load_model(teacher, model_init_kwargs=arguments)
    if arguments is not None:
        raise ConfigError(
            f"teacher_model_init_kwargs={arguments} has no effect because teacher_model is an instance. Leave it "
            "out, or give the teacher by name."
        )
    return teacher


_COMPARED = 100  # prompts on which the tokenizers of student and teacher are compared


def ids_of_prompts(run: Run) -> dict[str, list[int]]:
    """The first prompts of the training dataset as texts, and the ids that the policy's tokenizer makes of them."""
    rows = [row for row, _ in zip(run.train_dataset or (), range(_COMPARED), strict=False)]
    texts = [run.tokenizer.decode(row["prompt_ids"]) for row in rows]
    return {text: run.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts}


def _check_tokens(run: Run, teacher: str, arguments: Mapping[str, Any] | None) -> None:
    """Reject a teacher whose tokenizer splits the prompts in another way than the student's."""
    place = {key: value for key, value in (arguments or {}).items() if key in ("revision", "subfolder", "token")}
    try:
        found = cached_file(teacher, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False, **place)
    except OSError:  # which loading the model reports
        return
    if found is None:
        return
    other = AutoTokenizer.from_pretrained(teacher, trust_remote_code=run.args.trust_remote_code, **place)
    for text, ids in ids_of_prompts(run).items():
        if ids != (others := other(text, add_special_tokens=False)["input_ids"]):
            raise ConfigError(
                f"teacher_model={teacher!r}: its tokenizer makes {others[:8]} of {text[:40]!r}, and the student's "
                f"makes {ids[:8]}, so their distributions cannot be compared. Choose a teacher of the student's "
                "family."
            )


def add_teacher(run: Run, teacher: GivenTeacher, batch: TokenBatch) -> None:
    """Give the scorer a teacher beside the reference; None: there is none.

    Args:
        run: The training.
        teacher: The teacher.
        batch: Any, to score now: the teacher goes to its device, and runs its self-check.
    """
    if teacher is None:
        return
    args: Any = run.args
    model, options = loaded_teacher(run, teacher), ReferenceOptions(beta=1.0)
    run.scorer.teacher = kept_reference(run, options, run.policy, model, moves=False, name="teacher_model")
    if args.teacher_kl_params.name == "full":
        run.scorer.compared = "teacher"
    if run.account.flops is not None:
        run.account.flops.others["teacher"] = model_cost(model)
    run.scorer.of_reference(batch, "teacher")


def reader_for(model: nn.Module, processing_class: ProcessingClass) -> ImageReader | None:
    """The reader of images of a processor, with which the model's self-check is prepared; None for text."""
    reader = image_reader(processing_class)
    if reader is not None:
        set_image_example(model, example_batch(reader))
    return reader


def example_batch(reader: ImageReader) -> TokenBatch:
    """A few short rows with and without images; always the same."""
    picture = require("PIL.Image", extra="images", feature="a vision-language model")
    gradient = picture.linear_gradient("L").convert("RGB")
    pictures = [gradient.resize((56, 84)), gradient.rotate(90).resize((84, 56))]
    token, tokenizer = reader.processor.image_token, tokenizer_of(reader.processor)
    texts = {f"First {token} then {token} compare": pictures, f"{token} color?": pictures[1:], "No image here": []}
    answers = (("The first is red", "Both are blue and green"), ("It is green",), ("What is it",))
    prompts, responses, groups, images = [], [], [], {}
    for group, (text, own) in enumerate(texts.items()):
        ids = reader.expand(text, own).token_ids if own else tokenizer(text, add_special_tokens=False)["input_ids"]
        if own:
            images[group] = reader.read(own, ids)
        for answer in answers[group]:
            prompts.append(list(ids))
            responses.append(list(tokenizer(answer, add_special_tokens=False)["input_ids"]))
            groups.append(group)
    return flat_batch(prompts, responses, groups=groups, images=images)
