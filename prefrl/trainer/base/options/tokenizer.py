"""Options of the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from prefrl.models.tokenizer_changes import TokenizerChanges
from prefrl.options.fields import opt

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["TokenizerOptions"]


@dataclass
class TokenizerOptions:
    """Changes to the tokenizer, including one that is passed to the trainer."""

    # Whether tokens that a chat format needs are added. Reference models and servers would not have them.
    adds_tokens: ClassVar[bool] = False

    chat_template_path: str | None = opt(
        None,
        "Chat template: a file with a Jinja template; chatml, llama-3, gemma, mistral or zephyr; or a model whose "
        "template is copied. A name or a model also sets eos_token, and adds tokens in SFT and reward models. None: "
        "the tokenizer's own.",
    )
    eos_token: str | None = opt(
        None, "Token of the vocabulary that ends texts; None: the one of chat_template_path, or the tokenizer's own."
    )
    pad_token: str | None = opt(
        None,
        "Padding token of the saved tokenizer; training itself needs none. None: the tokenizer's own, or its "
        "eos_token.",
    )

    @property
    def tokenizer_changes(self) -> TokenizerChanges:
        """What to change in the tokenizer."""
        return TokenizerChanges(
            self.chat_template_path,
            self.eos_token,
            self.pad_token,
            adds_tokens=self.adds_tokens,
            seed=cast("TrainingArguments", self).seed,
        )
