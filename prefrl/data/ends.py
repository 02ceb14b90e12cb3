"""Whether rows end where generation stops."""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import islice
from typing import TYPE_CHECKING, Any

import datasets

from prefrl.data.chat import special_tokens
from prefrl.distributed import is_main

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["last_written", "warn_of_unknown_end"]

logger = logging.getLogger(__name__)

# Columns of prepared datasets whose rows end as the model learns to end.
_COLUMNS = ("input_ids", "chosen_ids", "completion_ids")
# How many rows are searched for one that is not truncated before its end.
_ROWS_LOOKED_AT = 10


def last_written(token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The last tokens that are more than white space, of a row's last 8."""
    return [token_id for token_id in token_ids[-8:] if tokenizer.decode([token_id]).strip()]


def warn_of_unknown_end(dataset: Any, tokenizer: PreTrainedTokenizerBase, *, end_ids: Collection[int]) -> None:
    """Warn on the main process if rows end with a special token at which generation does not stop.

    Args:
        dataset: Prepared. The first of its rows that ends with a special token is checked. Streams are not read.
        tokenizer: Its own.
        end_ids: Where generation stops.
    """
    if not is_main() or not isinstance(dataset, datasets.Dataset):
        return
    special = special_tokens(tokenizer)
    for row in islice(dataset, _ROWS_LOOKED_AT):
        token_ids = next(row[name] for name in _COLUMNS if name in row)
        written = last_written(token_ids[: row.get("seq_lengths", [None])[0]], tokenizer)
        last = tokenizer.convert_ids_to_tokens(written[-1:])
        if not last or last[0] not in special:
            continue
        if written[-1] not in end_ids:
            ends = tokenizer.convert_ids_to_tokens(sorted(end_ids))
            logger.warning(
                "Rows end with %r (id %d), but generation stops only at %s. Add the id to "
                "model.generation_config.eos_token_id, which is saved with the model, or use a chat template that "
                "ends turns with such a token.",
                last[0],
                written[-1],
                " or ".join(map(repr, ends)),
            )
        return
