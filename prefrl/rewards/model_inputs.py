"""What a reward model reads of prompts and completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from prefrl.errors import ConfigError, RewardError
from prefrl.pictures import has_images, images_of, in_blocks, opened, with_placeholders
from prefrl.rewards.base import message_text

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    ProcessingClass: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin

__all__ = ["ModelRow", "RowReader"]


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
        """A row of text, or of messages with the images of the prompt as they are stored; None: those in the messages.

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
        return text

    def _rendered_ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has added them
        return ids
