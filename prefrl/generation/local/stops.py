"""Finds where a completion ends because its text contains a stop string. Nothing here runs without `stop`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

from prefrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class _Text:
    """The text of a completion so far, of which only the end can become part of a stop string."""

    stream: Any
    end: str = ""


@dataclass
class StopStrings:
    """Reads completions token by token, as vLLM does, until their text contains one of the strings.

    Special tokens are part of the text, so that they can be in a stop string. A character that is spread over tokens
    counts once its last token is there. Only what was sampled counts: no string begins in the prompt.

    Args:
        tokenizer: The policy's tokenizer.
        strings: The stop strings, none of them empty.
        prompts: The prompts, which decide whether the first word of a completion has a space in front.

    Raises:
        ConfigError: The tokenizer cannot decode token by token.
    """

    tokenizer: PreTrainedTokenizerBase | None
    strings: Sequence[str]
    prompts: Sequence[Sequence[int]]
    _texts: dict[tuple[int, int], _Text] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Check the tokenizer."""
        if self.tokenizer is None or not self.tokenizer.is_fast:
            raise ConfigError(
                f"stop={list(self.strings)}: text is compared token by token, which needs a tokenizer of the library "
                f"tokenizers, and {type(self.tokenizer).__name__} is none. Use such a tokenizer, or remove stop."
            )
        self._backend = self.tokenizer.backend_tokenizer
        self._num_kept = max(map(len, self.strings)) - 1  # characters with which a stop string may begin

    def is_complete(self, prompt: int, sample: int, token: int) -> bool:
        """Whether the next token of a completion completes a stop string.

        Args:
            prompt: Number of the prompt.
            sample: Number of the completion among those of the prompt.
            token: Id of the token. Tokens have to come in order.
        """
        text = self._texts.get((prompt, sample))
        if text is None:
            stream = DecodeStream(ids=list(self.prompts[prompt]), skip_special_tokens=False)
            text = self._texts[prompt, sample] = _Text(stream)
        found = text.end + self._piece(text, token)
        text.end = found[max(len(found) - self._num_kept, 0) :]
        return any(stop in found for stop in self.strings)

    def _piece(self, text: _Text, token: int) -> str:
        """The text that a token adds."""
        try:
            return text.stream.step(self._backend, token) or ""
        except Exception as error:
            # After bytes that are no text, a stream may find that its text has changed; its class has no own error.
            if "prefix" not in str(error):
                raise
            text.stream = DecodeStream(skip_special_tokens=False)
            return text.stream.step(self._backend, token) or ""
