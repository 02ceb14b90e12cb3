"""Sequence-classification models as rewards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prefrl.errors import ConfigError, RewardError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["ModelReward"]

_ROWS_PER_BATCH = 16


class ModelReward:
    """The score that a sequence-classification model with one label gives to prompt and completion.

    Messages are rendered by the chat template of the reward model's own tokenizer. The model is put in eval mode for
    the time of scoring and gets no gradients.

    Args:
        model: Name, folder or instance.
        tokenizer: Its tokenizer; None: the one that belongs to the model by name. Without a padding token it gets the
            end-of-sequence token as such.
        device: Where the model is put; None: it stays where it is.
    Raises:
        ConfigError: The model or tokenizer cannot be loaded, has other than one label, no trained score head or no
            token to pad with.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.model: PreTrainedModel = model if isinstance(model, nn.Module) else _load_model(model)
        self.__name__ = _short_name(model)
        num_labels = getattr(getattr(self.model, "config", None), "num_labels", None)
        if num_labels != 1:
            raise ConfigError(
                f"reward model {self.__name__!r} has num_labels={num_labels}: a reward is one number. Use a "
                "sequence-classification model with num_labels=1"
            )
        self.tokenizer = tokenizer if tokenizer is not None else _load_tokenizer(self.model)
        self._set_padding()
        if device is not None:
            self.model.to(device)

    def __call__(
        self,
        prompts: Sequence[str | list[dict[str, Any]]],
        completions: Sequence[str | list[dict[str, Any]]],
    ) -> list[float]:
        """Score B completions.

        Raises:
            ConfigError: Messages, and the tokenizer has no chat template.
            RewardError: A text is longer than the model can read.
        """
        rows = [self._token_ids(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        self._check_lengths(rows)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))  # like lengths together: little padding
        scores = [0.0] * len(rows)
        with _evaluating(self.model):
            for start in range(0, len(order), _ROWS_PER_BATCH):
                chosen = order[start : start + _ROWS_PER_BATCH]
                for row, score in zip(chosen, self._scores([rows[row] for row in chosen]), strict=True):
                    scores[row] = score
        return scores

    def _token_ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer(prompt + completion)["input_ids"]
            return ids
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"reward model {self.__name__!r}: the data are conversational, and its tokenizer has no chat "
                "template. Give one with a template in reward_processing_classes"
            )
        text = self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template brought them
        return ids

    def _check_lengths(self, rows: Sequence[Sequence[int]]) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        for row, ids in enumerate(rows):
            if not ids:
                raise RewardError(f"reward model {self.__name__!r}, row {row}: the text is empty")
            if limit is not None and len(ids) > limit:
                raise RewardError(
                    f"reward model {self.__name__!r}, row {row}: {len(ids)} tokens, and the model reads at most "
                    f"{limit}. Lower max_prompt_length or max_completion_length, or use another model"
                )

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        width = max(map(len, rows))
        padding = self.tokenizer.pad_token_id
        ids = torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        device = next(self.model.parameters()).device
        logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits  # [rows, 1]
        values: list[float] = logits.squeeze(1).float().tolist()
        return values

    def _set_padding(self) -> None:
        if self.tokenizer.pad_token_id is None:
            if self.tokenizer.eos_token_id is None:
                raise ConfigError(
                    f"reward model {self.__name__!r}: its tokenizer has neither pad_token nor eos_token to pad with. "
                    "Set tokenizer.pad_token and pass it in reward_processing_classes"
                )
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # Decoder models find a row's last token as the last that is not this one.
        self.model.config.pad_token_id = self.tokenizer.pad_token_id


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _load_model(name: str | os.PathLike[str]) -> PreTrainedModel:
    from transformers import AutoModelForSequenceClassification  # slow to import, and not every run has such a model

    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(name, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward model {os.fspath(name)!r} cannot be loaded: {error}") from error
    if info["missing_keys"]:
        raise ConfigError(
            f"reward model {os.fspath(name)!r} has no trained weights for {sorted(info['missing_keys'])}: it would "
            "score at random. Use a model that was trained for sequence classification"
        )
    return model


def _load_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    name = model.config.name_or_path
    if not name:
        raise ConfigError(
            "a reward model that was not loaded by name needs its tokenizer in reward_processing_classes"
        )
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"reward model {name!r}: its tokenizer cannot be loaded: {error}. Pass it in reward_processing_classes"
        ) from error


def _short_name(model: str | os.PathLike[str] | nn.Module) -> str:
    if isinstance(model, nn.Module):
        path = getattr(getattr(model, "config", None), "name_or_path", "")
        return PurePath(path).name or type(model).__name__
    return PurePath(model).name
