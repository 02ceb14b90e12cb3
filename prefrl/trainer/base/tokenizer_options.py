"""Options of the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.models.tokenizer_changes import TokenizerChanges
from prefrl.options.fields import opt

__all__ = ["TokenizerOptions"]


@dataclass
class TokenizerOptions:
    """What is changed in the tokenizer, also in one that is given to the trainer."""

    chat_template_path: str | None = opt(
        None,
        "Chat template: a file with a Jinja template, or a model whose template to take; tokens that the vocabulary "
        "lacks are not added. None: the tokenizer's own.",
    )
    eos_token: str | None = opt(None, "Token of the vocabulary that ends texts; None: the tokenizer's own.")
    pad_token: str | None = opt(
        None, "Padding token, for users of the saved tokenizer; None: the tokenizer's own, or its eos_token."
    )

    @property
    def tokenizer_changes(self) -> TokenizerChanges:
        """What to change in the tokenizer."""
        return TokenizerChanges(self.chat_template_path, self.eos_token, self.pad_token)
