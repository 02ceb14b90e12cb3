"""What a run changes in its tokenizer: the chat template, and the tokens that end and pad texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from prefrl.errors import ConfigError
from prefrl.options.suggest import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TokenizerChanges"]


@dataclass(frozen=True)
class TokenizerChanges:
    """What to change in a tokenizer; None: nothing.

    Args:
        chat_template_path: A file with a Jinja template; or a model, by name or folder, whose template to take. Tokens
            that the template writes and the vocabulary lacks are not added.
        eos_token: A token of the vocabulary that ends texts.
        pad_token: A token of the vocabulary for padding.
    """

    chat_template_path: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None

    def apply(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Change the tokenizer in place.

        Raises:
            ConfigError: A token is not in the vocabulary, or there is no such template.
        """
        for name in ("eos_token", "pad_token"):
            token = getattr(self, name)
            if token is not None:
                if token not in (known := tokenizer.get_vocab()):
                    remedy = nearest(token, known, otherwise="Name one that is, or add it to model and tokenizer.")
                    raise ConfigError(f"{name}={token!r}: is no token of the tokenizer's vocabulary. {remedy}")
                setattr(tokenizer, name, token)
        if self.chat_template_path is not None:
            tokenizer.chat_template = _template(self.chat_template_path)


def _template(path: str) -> str:
    if Path(path).is_file():
        return Path(path).read_text(encoding="utf-8")
    try:
        template: str | None = AutoTokenizer.from_pretrained(path).chat_template
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template_path={path!r}: is neither a file with a Jinja template nor a model: {error}"
        ) from error
    if template is None:
        raise ConfigError(f"chat_template_path={path!r}: the tokenizer of this model has no chat template")
    return template
