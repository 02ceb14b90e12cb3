"""The columns that `prefrl teacher` adds to a dataset: a teacher's most likely tokens at the places of completions.

| column | of a row whose completion has n tokens |
|---|---|
| teacher_ids | [n][k] int32, the most likely token first |
| teacher_logprobs | [n][k] float16, nats, at the temperature of the fingerprint |
| teacher_other_logprobs | [n] float16, nats, of all other tokens together |
| teacher_fingerprint | JSON: what the numbers depend on, see `fingerprint_of`, and a digest of the row's tokens |

The fingerprint is a column, because `datasets` drops what else a file says when it loads, joins or shuffles rows. In a
file it takes no space: it differs between rows by its digest alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import torch
import xxhash

from prefrl.errors import ConfigError, DataError
from prefrl.models.fingerprint import joint_digest

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from prefrl.options.distillation import DistillationOptions

IDS, LOGPROBS, OTHERS, FINGERPRINT = TEACHER_COLUMNS = (
    "teacher_ids",
    "teacher_logprobs",
    "teacher_other_logprobs",
    "teacher_fingerprint",
)
# Rounded to float16, probabilities may sum to 1.0005, and to 1.004 in bfloat16.
_LARGEST_SUM = 1.01
_ROWS_AT_ONCE = 64
_REMEDY = "Make the columns again with prefrl teacher"


def fingerprint_of(
    tokenizer: PreTrainedTokenizerBase, *, temperature: float, weights: str | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """What stored log-probs depend on besides the tokens of a row.

    Args:
        tokenizer: Its vocabulary says which tokens the ids are.
        temperature: Of the distribution.
        weights: Digest of the teacher's weights.
        dtype: In which it computed.
    """
    return {
        "vocabulary": joint_digest(sorted(tokenizer.get_vocab().items())),
        "chat_template": joint_digest([tokenizer.chat_template]),
        "temperature": temperature,
        "weights": weights,
        "dtype": dtype,
    }


def tokens_digest(token_ids: Sequence[int] | NDArray[Any]) -> str:
    """Digest of the ids of a row, prompt included."""
    return xxhash.xxh3_64(np.asarray(token_ids, np.int32).tobytes()).hexdigest()


def row_fingerprint(fingerprint: Mapping[str, Any], token_ids: Sequence[int] | NDArray[Any]) -> str:
    """The column `teacher_fingerprint` of a row with these tokens."""
    return json.dumps({**fingerprint, "tokens": tokens_digest(token_ids)})


def is_stored(rows: Any) -> bool:
    """Whether some rows are a dataset with a teacher's columns, perhaps not with all of them."""
    is_dataset = isinstance(rows, datasets.Dataset | datasets.IterableDataset)
    return is_dataset and not {IDS, FINGERPRINT}.isdisjoint(rows.column_names or ())


def check_stored(teacher: object, args: DistillationOptions) -> None:
    """Reject what a dataset with a teacher's columns cannot be combined with.

    Raises:
        ConfigError: See above.
    """
    both = "both say what the teacher's distributions are"
    for option, value, allowed, why in (
        ("teacher_model", teacher, None, both),
        ("teacher_model_name_or_path", args.teacher_model_name_or_path, None, both),
        ("teacher_server_base_url", args.teacher_server_base_url, None, "nothing is asked of a server"),
        ("teacher_model_init_kwargs", args.teacher_model_init_kwargs, None, "there is no model to load"),
        ("teacher_prompt", args.teacher_prompt, None, "no teacher can be asked"),
        ("teacher_weights", args.teacher_weights, "frozen", "the teacher is not the student"),
        ("later_tokens", args.later_tokens, False, "the importance weights are those of completions that are sampled"),
        ("repetition_penalty", args.repetition_penalty, 1.0, "it changes logits, and the teacher's are not known"),
        ("filter_overlong_prompts", args.filter_overlong_prompts, False, "no prompt may be longer than the limit"),
        ("on_policy_fraction", args.on_policy_fraction, 0.0, "they are of the dataset's completions, not of others"),
    ):
        if value != allowed:
            shown = repr(value) if isinstance(value, str | bool | float | dict | list) else type(value).__name__
            raise ConfigError(
                f"{option}={shown} and a train_dataset with a column {IDS}: {why}. Set {option}={allowed}, or remove "
                f"the columns {', '.join(TEACHER_COLUMNS)}."
            )


def without_columns(dataset: datasets.Dataset, name: str) -> tuple[datasets.Dataset, datasets.Dataset]:
    """A dataset without a teacher's columns, and these: whatever maps rows would copy them number by number.

    Args:
        dataset: Any.
        name: The argument that it was given as, for messages.

    Raises:
        DataError: It lacks one.
    """
    names = dataset.column_names or []
    if missing := [column for column in TEACHER_COLUMNS if column not in names]:
        raise DataError(
            f"{name} has no columns {', '.join(missing)}: its columns are {', '.join(names)}. Without a "
            "teacher_model, all rows need what prefrl teacher adds to them."
        )
    return dataset.remove_columns([*TEACHER_COLUMNS]), dataset.select_columns([*TEACHER_COLUMNS])


def with_columns(
    dataset: datasets.Dataset,
    stored: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    args: DistillationOptions,
) -> datasets.Dataset:
    """A dataset with the teacher's columns of its rows.

    Args:
        dataset: With the columns of `data.tokenize.with_given_ids`.
        stored: From `without_columns`.
        tokenizer: The student's.
        num_tokens: Size of the student's vocabulary.
        args: Options.

    Raises:
        DataError: See `TeacherColumns.check`.
    """
    joined = datasets.concatenate_datasets([dataset, stored], axis=1)
    TeacherColumns(tokenizer, num_tokens, args.temperature, args.max_prompt_length).check(joined)
    return joined


def top_of(rows: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Tensor]:
    """The columns of numbers of some rows, laid end to end.

    Each row comes with a number of tokens to take: the first ones of its completion. Columns with fewer are repeated,
    because trials of memory make completions longer than those of the dataset.
    """
    found = {}
    for name, dtype, no_place in ((IDS, np.int32, (0, 1)), (LOGPROBS, np.float16, (0, 1)), (OTHERS, np.float16, (0,))):
        parts = [(np.asarray(row[name], dtype), count) for row, count in rows]
        repeated = [np.resize(part, (count, *part.shape[1:])) for part, count in parts]
        found[name] = torch.from_numpy(np.concatenate(repeated or [np.empty(no_place, dtype)]))
    return found


@dataclass(frozen=True, slots=True)
class TeacherColumns:
    """Checks the columns of a dataset.

    Args:
        tokenizer: The student's.
        num_tokens: Size of the student's vocabulary.
        temperature: At which student and teacher are compared.
        max_prompt_length: Tokens of a prompt, whose beginning is cut off; None: no limit.
    """

    tokenizer: PreTrainedTokenizerBase
    num_tokens: int
    temperature: float
    max_prompt_length: int | None

    def check(self, dataset: datasets.Dataset) -> None:
        """Check all rows.

        Args:
            dataset: With the columns of `data.tokenize.with_given_ids`.

        Raises:
            DataError: A row's columns were not made for these tokens, or are no log-probs.
        """
        own = fingerprint_of(self.tokenizer, temperature=self.temperature)
        columns = ["given_ids", "given_trainable", *TEACHER_COLUMNS]
        sizes: set[int] = set()
        number = 0
        for table in dataset.select_columns(columns).with_format("arrow").iter(_ROWS_AT_ONCE):
            token_ids, flags = (_lists(table[name]) for name in columns[:2])
            stored = zip(_nested(table[IDS]), _nested(table[LOGPROBS]), _lists(table[OTHERS]), strict=True)
            texts = table[FINGERPRINT].to_pylist()
            for tokens, is_trainable, found, text in zip(token_ids, flags, stored, texts, strict=True):
                start = int(np.argmax(is_trainable))
                ids, logprobs, others = found
                self._check_origin(f"row {number}", own, text, tokens, start)
                self._check_shape(f"row {number}", found, len(tokens) - start)
                self._check_values(f"row {number}", np.stack(ids), np.stack(logprobs), others)
                sizes.add(len(ids[0]))
                number += 1
        if len(sizes) > 1:
            raise DataError(
                f"{IDS}: rows have {' and '.join(map(str, sorted(sizes)))} tokens at each place. Join only datasets "
                "that were made with the same top_k."
            )

    def _check_origin(self, where: str, own: Mapping[str, Any], text: str, tokens: Any, start: int) -> None:
        """The row was scored with the student's tokens, at the student's temperature."""
        try:
            other = dict(json.loads(text).items())
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: {FINGERPRINT}={text!r:.80} is not what prefrl teacher writes. {_REMEDY}."
            ) from error
        if other.get("temperature") != own["temperature"]:
            raise DataError(
                f"{where}: the teacher's log-probs are at temperature {other.get('temperature')}, and temperature="
                f"{own['temperature']}. Set temperature={other.get('temperature')}, or make the columns again."
            )
        if other.get("tokens") != tokens_digest(tokens):
            reasons = {
                "vocabulary": "its tokenizer has another vocabulary",
                "chat_template": "its template is another",
            }
            default = "the text has changed since, or its tokenizer splits it in another way"
            reason = next((text for name, text in reasons.items() if other.get(name) != own[name]), default)
            raise DataError(
                f"{where}: the teacher has seen other tokens than the student's of this prompt and completion: "
                f"{reason}. Choose a teacher of the student's family, give it the student's chat template and "
                f"chat_template_kwargs, and run prefrl teacher after all other changes of the dataset."
            )
        if self.max_prompt_length is not None and start > self.max_prompt_length:
            raise DataError(
                f"{where}: its prompt has {start} tokens, all of which the teacher has seen, and "
                f"max_prompt_length={self.max_prompt_length} would cut it off. Raise max_prompt_length."
            )

    def _check_shape(self, where: str, found: tuple[Sequence[Any] | NDArray[Any], ...], length: int) -> None:
        lengths = [len(part) for part in found]
        if lengths != [length] * len(found):
            shown = ", ".join(f"{name} has {count}" for name, count in zip(TEACHER_COLUMNS, lengths, strict=False))
            raise DataError(f"{where}: {shown} places, but the completion has {length} tokens. {_REMEDY}.")
        widths = {len(place) for part in found[:2] for place in part}
        if len(widths) > 1 or not 1 <= max(widths) <= self.num_tokens:
            raise DataError(
                f"{where}: {IDS} and {LOGPROBS} have {' and '.join(map(str, sorted(widths)))} entries at some places. "
                f"All places need equally many, from 1 to {self.num_tokens}."
            )

    def _check_values(self, where: str, ids: NDArray[Any], logprobs: NDArray[Any], others: NDArray[Any]) -> None:
        if ids.min() < 0 or ids.max() >= self.num_tokens or (np.diff(np.sort(ids, 1), axis=1) == 0).any():
            raise DataError(
                f"{where}: {IDS} needs different ids in 0..{self.num_tokens - 1} at each place; they are in "
                f"{ids.min()}..{ids.max()}. {_REMEDY}."
            )
        if not np.isfinite(logprobs).all() or np.isnan(others).any():
            raise DataError(f"{where}: {LOGPROBS} or {OTHERS} has numbers that are not finite. {_REMEDY}.")
        sums = np.exp(logprobs.astype(np.float32)).sum(1) + np.exp(others.astype(np.float32))
        largest = float(sums.max())
        if largest > _LARGEST_SUM:
            raise DataError(
                f"{where}: the probabilities exp({LOGPROBS}) and exp({OTHERS}) of a place sum to {largest:.4g}, which "
                "is more than 1. Store the log-probs of the whole distribution, in nats."
            )


def _lists(column: pa.ChunkedArray) -> Iterator[NDArray[Any]]:
    """The lists of a column."""
    lists = column.combine_chunks()
    offsets, items = lists.offsets.to_numpy(), lists.values.to_numpy(zero_copy_only=False)
    return (items[start:stop] for start, stop in pairwise(offsets))


def _nested(column: pa.ChunkedArray) -> Iterator[list[NDArray[Any]]]:
    """The lists of lists of a column."""
    lists = column.combine_chunks()
    offsets, inner = lists.offsets.to_numpy(), lists.values
    places, items = inner.offsets.to_numpy(), inner.values.to_numpy(zero_copy_only=False)
    return (
        [items[places[place] : places[place + 1]] for place in range(start, stop)] for start, stop in pairwise(offsets)
    )
