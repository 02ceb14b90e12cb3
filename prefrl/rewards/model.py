"""Rewards from sequence-classification models, and what such a model reads."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from prefrl.distributed import is_main, is_sharded
from prefrl.errors import ConfigError, RewardError, cause_of, require
from prefrl.models.modes import hub_or_cache
from prefrl.options.names import nearest, unpinned_code
from prefrl.pictures import has_images, images_of, in_blocks, opened, with_placeholders
from prefrl.rewards.base import message_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    ProcessingClass: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin


@dataclass(frozen=True)
class ModelRow:
    """A prompt and a completion: tokens, or if there are images a text with one placeholder for each."""

    token_ids: list[int]
    text: str = ""
    pictures: list[Any] = field(default_factory=list)


class RowReader:
    """Reads rows with the tokenizer of a reward model, or with the processor of one that reads images.

    Args:
        name: Of the reward model, for messages.
        given: Its tokenizer or processor.
    """

    def __init__(self, name: str, given: ProcessingClass) -> None:
        self._name = name
        self._processor: Any | None = given if hasattr(given, "image_processor") else None
        self.tokenizer: Any = given if self._processor is None else self._processor.tokenizer
        own_template = getattr(self._processor, "chat_template", None)
        self._template: str | None = own_template if isinstance(own_template, str) else self.tokenizer.chat_template

    @property
    def reads_images(self) -> bool:
        """Whether there is a processor."""
        return self._processor is not None

    def row(self, prompt: Any, completion: Any, images: Sequence[Any] | None) -> ModelRow:
        """A row of text, or of messages with the images of the prompt as they are stored, or None for those in them.

        Raises:
            ConfigError: Messages, and there is no chat template.
            DataError: The images cannot be read, or do not fit their places.
            RewardError: A text with images.
        """
        if isinstance(prompt, str):
            if images and self.reads_images:
                raise RewardError(
                    f"reward model {self._name!r}: a prompt that is a text has {len(images)} images, which belong in "
                    "messages. Use lists of messages as prompts"
                )
            return ModelRow(self._text_ids(prompt + completion))
        if self._template is None:
            raise ConfigError(
                f"reward model {self._name!r}: the data are conversational, but its tokenizer has no chat template. "
                "Pass a tokenizer with a template in reward_processing_classes"
            )
        if not self.reads_images:
            plain = [{**m, "content": message_text(m)} if has_images([m]) else m for m in (*prompt, *completion)]
            return ModelRow(self._rendered_ids(self._rendered(plain)))
        stored = images_of({"images": images, "prompt": prompt}, "prompt")
        opening = with_placeholders(prompt, len(stored), "prompt")
        text = self._rendered([in_blocks(message) for message in (*opening, *completion)])
        return ModelRow(self._rendered_ids(text), text, [opened(image) for image in stored])

    def tensors(self, rows: Sequence[ModelRow]) -> dict[str, Tensor]:
        """The arguments of the model's forward for padded rows, which all have images, or none of them.

        Raises:
            RewardError: The processor cannot read the images.
        """
        if not rows[0].pictures:
            width = max(len(row.token_ids) for row in rows)
            padding = self.tokenizer.pad_token_id
            ids = torch.tensor([[*row.token_ids, *[padding] * (width - len(row.token_ids))] for row in rows])
            mask = torch.tensor([[int(i < len(row.token_ids)) for i in range(width)] for row in rows])
            return {"input_ids": ids, "attention_mask": mask}
        assert self._processor is not None
        texts, pictures = [row.text for row in rows], [row.pictures for row in rows]
        options = {"padding": True, "padding_side": "right", "add_special_tokens": False, "return_tensors": "pt"}
        try:
            return dict(self._processor(text=texts, images=pictures, **options))
        except Exception as error:  # processors check images and text in many ways
            raise RewardError(
                f"reward model {self._name!r}: {type(self._processor).__name__} cannot read the images of "
                f"{len(rows)} prompts: {type(error).__name__}: {error}"
            ) from error

    def _text_ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        end = self.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]  # RewardTrainer ends texts in the same way

    def _rendered(self, messages: Sequence[Any]) -> str:
        text: str = self.tokenizer.apply_chat_template(messages, chat_template=self._template, tokenize=False)
        return text.encode("utf-8", "replace").decode()  # half of a surrogate pair has no tokens

    def _rendered_ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has added them
        return ids


logger = logging.getLogger(__name__)


class ModelReward:
    """A reward that is one of the logits that a sequence-classification model gives to prompt and completion.

    Messages are rendered with the chat template of the reward model's own tokenizer. A vision-language model with its
    processor reads the images of prompts; every other model reads the text alone. The model is in eval mode while it
    scores, and gets no gradients. The name under which the reward is logged shows the options: `name`,
    `name[helpful]`, `name[per_token]` or `name[helpful,per_token]`.

    Args:
        model: Name, folder or instance. A folder or name may be that of a LoRA adapter with one label.
        head: Which label to use if the model has several: its name in `config.id2label`, or its index.
        per_token: Whether to divide the score by the number of sampled tokens in the completion.
        tokenizer: The model's tokenizer, or the processor of a vision-language model. None means the one loaded by the
            model's name. A tokenizer without a padding token pads with its end-of-sequence token.
        device: Device for the model. By default, it stays where it is.
        batch_size: Maximum number of completions that the model scores at once.
        max_length: Maximum number of tokens of a text; longer ones lose their first tokens. By default, a text that is
            longer than the model can read is an error. Texts with images are not shortened.
        model_init_kwargs: For `from_pretrained` of a model that is given by name or folder; of an adapter, for that of
            its base model. Weights have the type of the files unless it has a `dtype`.
    Raises:
        ConfigError: The model or tokenizer cannot be loaded, has no trained score head or no token to pad with, has
            several labels and no `head`, or one label and a `head`; `batch_size` or `max_length` is below 1;
            `model_init_kwargs` are given, and the model is loaded already.
        ImportError: The model is an adapter and peft is not installed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        *,
        head: str | int | None = None,
        per_token: bool = False,
        tokenizer: ProcessingClass | None = None,
        device: torch.device | str | None = None,
        batch_size: int = 16,
        max_length: int | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        for parameter, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value is not None and value < 1:
                raise ConfigError(f"{parameter}={value}: must be at least 1")
        if model_init_kwargs and isinstance(model, nn.Module):
            raise ConfigError(
                f"model_init_kwargs={dict(model_init_kwargs)} has no effect, because the reward model is loaded "
                "already. Remove it, or give the model by name."
            )
        self.batch_size, self._max_length = batch_size, max_length
        arguments = model_init_kwargs or {}
        self.model: PreTrainedModel = model if isinstance(model, nn.Module) else _load_model(model, arguments)
        name = _short_name(model)
        labels = _labels(name, self.model)
        self._column = _column(name, labels, head)
        self._is_per_token = per_token
        qualifiers = ([] if head is None else [labels[self._column]]) + (["per_token"] if per_token else [])
        self.__name__ = f"{name}[{','.join(qualifiers)}]" if qualifiers else name
        given = tokenizer if tokenizer is not None else _load_tokenizer(_repository(model), self.model, arguments)
        self._reader = RowReader(self.__name__, given)
        self.tokenizer: PreTrainedTokenizerBase = self._reader.tokenizer
        self._set_padding()
        if device is not None:
            self.model.to(device)

    def __call__(
        self,
        prompts: Sequence[str | list[dict[str, Any]]],
        completions: Sequence[str | list[dict[str, Any]]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        images: Sequence[Sequence[Any]] | None = None,
    ) -> list[float]:
        """Score B completions.

        Args:
            prompts: B texts or lists of messages.
            completions: B texts or lists of messages.
            completion_ids: B lists of token ids, as sampled; read only if the score is per token.
            images: B lists of the images of prompts, as a dataset holds them. None means those in the messages. Read
                only by a vision-language model with its processor.
        Raises:
            ConfigError: Messages, and the tokenizer has no chat template; or a model that reads images has partitioned
                weights.
            DataError: The images of a prompt cannot be read, or do not fit its places for images.
            RewardError: A text is longer than the model can read, or the score is per token and a completion has none.
        """
        self._check_whole()
        stored: Sequence[Sequence[Any] | None] = [None] * len(prompts) if images is None else images
        rows = [self._shortened(self._reader.row(*row)) for row in zip(prompts, completions, stored, strict=True)]
        scores = [0.0] * len(rows)
        with _evaluating(self.model):
            for chosen in self._batches(rows):
                for row, score in zip(chosen, self._scores(rows, chosen), strict=True):
                    scores[row] = score
        return self._divided(scores, completion_ids) if self._is_per_token else scores

    def _shortened(self, row: ModelRow) -> ModelRow:
        if self._max_length is None or row.pictures:
            return row
        return replace(row, token_ids=row.token_ids[-self._max_length :])

    def idle_pass(self) -> None:
        """Run one token without using its score: other processes wait for this pass if weights are partitioned."""
        self._check_whole()
        token = 0 if self.tokenizer.pad_token_id != 0 else 1
        with _evaluating(self.model):
            self._scores([ModelRow([token])], [0])

    def _divided(self, scores: Sequence[float], completion_ids: Sequence[Sequence[int]] | None) -> list[float]:
        lengths = [len(ids) for ids in completion_ids or ()]
        if len(lengths) != len(scores) or 0 in lengths:
            raise RewardError(
                f"reward model {self.__name__!r}: a score per token needs completion_ids for each of the "
                f"{len(scores)} completions, none of them empty. Their lengths are {lengths}"
            )
        return [score / length for score, length in zip(scores, lengths, strict=True)]

    def _batches(self, rows: Sequence[ModelRow]) -> Iterator[list[int]]:
        """Rows of similar lengths, so that there is little padding; those with images apart from those without."""
        for with_images in (False, True):
            alike = [row for row in range(len(rows)) if bool(rows[row].pictures) == with_images]
            alike.sort(key=lambda row: len(rows[row].token_ids))
            yield from (alike[start : start + self.batch_size] for start in range(0, len(alike), self.batch_size))

    def _scores(self, rows: Sequence[ModelRow], chosen: Sequence[int]) -> list[float]:
        inputs = self._reader.tensors([rows[row] for row in chosen])
        self._check_lengths(chosen, inputs["attention_mask"].sum(1).tolist())
        device = next(self.model.parameters()).device
        logits = self.model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits  # [rows, labels]
        values: list[float] = logits[:, self._column].float().tolist()
        return values

    def _check_lengths(self, chosen: Sequence[int], lengths: Sequence[int]) -> None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for row, length in zip(chosen, lengths, strict=True):
            if not length:
                raise RewardError(f"reward model {self.__name__!r}, row {row}: the text is empty")
            if limit is not None and length > limit:
                raise RewardError(
                    f"reward model {self.__name__!r}, row {row}: {length} tokens, but the model reads at most "
                    f"{limit}. Lower max_prompt_length or max_completion_length, set max_length, or use another model"
                )

    def _check_whole(self) -> None:
        """Refuse a model that reads images if each process holds a part of it: only some have images in a pass."""
        if self._reader.reads_images and is_sharded(self.model):
            raise ConfigError(
                f"reward model {self.__name__!r} reads images, and its weights are partitioned over processes (ZeRO-3 "
                "or FSDP), which then do not run the same layers. Train with DDP or ZeRO-2, or run the model in a "
                "separate process and call it from a reward function"
            )

    def _set_padding(self) -> None:
        if self.tokenizer.pad_token_id is None:
            if self.tokenizer.eos_token_id is None:
                raise ConfigError(
                    f"reward model {self.__name__!r}: its tokenizer has neither pad_token nor eos_token to pad with. "
                    "Set tokenizer.pad_token and pass it in reward_processing_classes"
                )
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # Decoder models take the last token that is not this one as the last token of a row.
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _labels(name: str, model: nn.Module) -> list[str]:
    """Names of the labels, in the order of the logits."""
    config = getattr(model, "config", None)
    num_labels = getattr(config, "num_labels", None)
    if config is None or not num_labels:
        raise ConfigError(
            f"reward model {name!r} has num_labels={num_labels}: a reward is the score of one label. Use a "
            "sequence-classification model"
        )
    return [str(config.id2label[index]) for index in range(num_labels)]


def _column(name: str, labels: Sequence[str], head: str | int | None) -> int:
    """The index of the logit that `head` selects."""
    if len(labels) == 1:
        if head is not None:
            raise ConfigError(f"head={head!r} has no effect: reward model {name!r} has one label. Leave head out")
        return 0
    known = f"{', '.join(map(repr, labels))}, or 0 to {len(labels) - 1}"
    if head is None:
        raise ConfigError(
            f"reward model {name!r} has num_labels={len(labels)}: a reward is a single number. Pass "
            f"ModelReward(model, head=...) with the label to score: {known}"
        )
    if isinstance(head, str) and labels.count(head) == 1:
        return labels.index(head)
    if isinstance(head, int) and 0 <= head < len(labels):
        return head
    raise ConfigError(
        f"head={head!r}: reward model {name!r} has no such label, or several with this name. It has {known}"
    )


def _load_model(name: str | os.PathLike[str], arguments: Mapping[str, Any]) -> PreTrainedModel:
    from transformers.utils import find_adapter_config_file  # slow to import

    from prefrl import rewards  # which imports this module

    source = os.fspath(name)
    if source in rewards.__all__:
        raise ConfigError(
            f"reward_funcs={source!r}: is the name of a function, but a text must be the name of a model. Pass the "
            f"function: from prefrl.rewards import {source}"
        )
    guess = nearest(source, rewards.__all__, otherwise=" ").strip()
    if guess and "/" not in source and not Path(source).exists():
        raise ConfigError(
            f"reward_funcs={source!r}: there is no folder with this name, and it is like that of a function. {guess} "
            "Pass the function, or the path of a model."
        )
    try:
        with hub_or_cache(source):
            adapter = find_adapter_config_file(source)
            if adapter is None:
                model, info = _load_classifier(source, arguments)
                untrained = set(info["missing_keys"])
            else:
                model, untrained = _load_adapter(source, Path(adapter), arguments)
    except (OSError, ValueError, RuntimeError) as error:
        given = f" with {dict(arguments)}" if arguments else ""
        raise ConfigError(f"reward model {source!r} cannot be loaded{given}: {error}") from cause_of(error)
    if untrained:
        raise ConfigError(
            f"reward model {source!r} has no trained weights for {sorted(untrained)}: it would score at random. Use a "
            "model that was trained for sequence classification"
        )
    return model


def _load_classifier(
    name: str, arguments: Mapping[str, Any], **more: Any
) -> tuple[PreTrainedModel, dict[str, Collection[str]]]:
    """The model and what transformers says about its weights."""
    # Slow to import, and not every run has such a model.
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from prefrl.models.classifier import add_classifier
    from prefrl.models.load import repository_arguments

    warning = unpinned_code(name, arguments.get("revision")) if arguments.get("trust_remote_code") else None
    if warning is not None and is_main():
        logger.warning(warning)
    add_classifier(AutoConfig.from_pretrained(name, **repository_arguments(arguments)))
    load = AutoModelForSequenceClassification.from_pretrained
    model, info = load(name, output_loading_info=True, **arguments, **more)
    return model, info


def _load_adapter(name: str, config: Path, arguments: Mapping[str, Any]) -> tuple[PreTrainedModel, set[str]]:
    """The base model with its adapter, and the names of weights that neither of them has."""
    require("peft", extra="peft", feature=f"the reward model {name!r}, an adapter,")
    base = json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]
    # An adapter's folder does not say how many labels there are; with another number, shapes would not match.
    model, info = _load_classifier(base, arguments, num_labels=1)
    model.load_adapter(name)
    # The base model has no score head; the adapter contains a complete one that replaces the original.
    replaced = {n.replace(".original_module.", ".") for n, _ in model.named_parameters() if ".original_module." in n}
    return model, set(info["missing_keys"]) - replaced


def _load_tokenizer(name: str, model: PreTrainedModel, arguments: Mapping[str, Any]) -> ProcessingClass:
    from transformers import AutoProcessor, AutoTokenizer

    from prefrl.models.load import repository_arguments

    reads_images = getattr(model.config, "vision_config", None) is not None
    what = "processor" if reads_images else "tokenizer"
    if not name:
        raise ConfigError(f"a reward model that was not loaded by name needs its {what} in reward_processing_classes")
    try:
        with hub_or_cache(name):
            return (AutoProcessor if reads_images else AutoTokenizer).from_pretrained(
                name, **repository_arguments(arguments)
            )
    except (OSError, ValueError, ImportError) as error:
        remedy = ", or its tokenizer to score text alone," if reads_images else ""
        raise ConfigError(
            f"reward model {name!r}: its {what} cannot be loaded: {error}. Pass it{remedy} in "
            "reward_processing_classes"
        ) from cause_of(error)


def _repository(model: str | os.PathLike[str] | nn.Module) -> str:
    """Where the model was loaded from; for an adapter its own folder or name. Empty if it was not loaded."""
    if isinstance(model, nn.Module):
        return str(getattr(getattr(model, "config", None), "name_or_path", ""))
    return os.fspath(model)


def _short_name(model: str | os.PathLike[str] | nn.Module) -> str:
    return PurePath(_repository(model)).name or type(model).__name__
