"""What a sampler knew of the text before each token of a batch, for a repetition penalty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from prefrl.losses.truncation import History, TokenTruncation

if TYPE_CHECKING:
    from prefrl.losses.truncation import Truncation
    from prefrl.types import TokenBatch

__all__ = ["token_truncation"]


def token_truncation(batch: TokenBatch, cuts: Truncation) -> TokenTruncation:
    """The truncation of the trainable tokens of a batch; its history is only built for a repetition penalty."""
    return TokenTruncation(cuts, None if cuts.repetition_penalty == 1.0 else _history(batch))


def _history(batch: TokenBatch) -> History:
    """The context of each response and its tokens, and how many of these come before each trainable token."""
    prompts = torch.split(batch.prompt_ids, list(batch.prompt_lengths))
    responses = torch.split(batch.response_ids, list(batch.response_lengths))
    texts = [
        torch.cat([*(prompts[prompt] for prompt in batch.contexts[number]), response])
        for number, response in enumerate(responses)
    ]
    lengths = [
        start + place
        for start, count in zip(batch.context_lengths, batch.response_lengths, strict=True)
        for place in range(count)
    ]
    numbers = [number for number, count in enumerate(batch.response_lengths) for _ in range(count)]
    index = torch.tensor([numbers, lengths]).to(batch.device, non_blocking=True)[:, batch.trainable_positions]
    return History(pad_sequence(texts, batch_first=True), *index)
