"""The images of dataset rows: the columns that hold them, their placeholder tokens, and what a model reads.

A processor of transformers replaces each placeholder in a rendered conversation by as many tokens as the model has
features for the image. Datasets are tokenized with these tokens; pixels are computed when a batch is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import datasets
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from prefrl.data.formats import AnyDataset
from prefrl.errors import ConfigError, DataError
from prefrl.pictures import IMAGE_COLUMNS, in_rgb, opened
from prefrl.types import Images

ProcessingClass: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin

# The column of prepared datasets that holds the images of a row.
IMAGE_FEATURES = {"images": datasets.List(datasets.Image())}

# What a processor returns about the text.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class ExpandedText:
    """A text's tokens once placeholders are expanded.

    Args:
        token_ids: All ids.
        stops: For each token, the character of the original text at which it stops; of an image's tokens, that of its
            placeholder.
        is_image: Whether each token belongs to an image.
    """

    token_ids: list[int]
    stops: list[int]
    is_image: list[bool]


@dataclass(frozen=True)
class ImageReader:
    """Reads images with a processor."""

    processor: Any  # a ProcessorMixin with an image processor; the attributes of its kinds differ

    def expand(self, text: str, images: Sequence[Any]) -> ExpandedText:
        """Tokenize a rendered text with placeholders, without adding special tokens.

        Raises:
            ConfigError: The processor does not tell which tokens belong to images.
            DataError: It cannot read the images.
        """
        output = self._call(
            text, images, add_special_tokens=False, return_offsets_mapping=True, return_text_replacement_offsets=True
        )
        if "text_replacement_offsets" not in output or "offset_mapping" not in output:
            raise ConfigError(
                f"processing_class={type(self.processor).__name__}: it does not report which tokens belong to images "
                "(text_replacement_offsets of transformers >= 5.19, with a fast tokenizer). Use another model"
            )
        replaced = output["text_replacement_offsets"][0]
        found = [_original(start, stop, replaced) for start, stop in output["offset_mapping"][0]]
        stops, is_image = ([values[i] for values in found] for i in (0, 1))
        return ExpandedText(list(output["input_ids"][0]), [int(stop) for stop in stops], [bool(x) for x in is_image])

    def read(self, images: Sequence[Any], token_ids: Sequence[int]) -> Images:
        """What the model reads of images whose placeholders are among the tokens of a sequence.

        Raises:
            DataError: The processor cannot read the images.
        """
        output = self._call(self.processor.image_token * len(images), images, return_tensors="pt")
        inputs = {name: value for name, value in output.items() if name not in _OF_TEXT}
        return Images(inputs, tuple(self._runs(token_ids)))

    def attach(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row of a prepared dataset with what the model reads of its images.

        Returns:
            The row without `images`; and, if it has images, `image_inputs`: a list with the images of each of its
            sequences, of which only a packed row has more than one.
        """
        rest = {name: value for name, value in row.items() if name != "images"}
        stored = row.get("images")
        if not stored or not any(stored):
            return rest
        ids = next(list(row[name]) for name in ("input_ids", "prompt_ids", "chosen_ids") if row.get(name))
        lengths = row.get("seq_lengths")
        if lengths is None:
            return {**rest, "image_inputs": [self.read(stored, ids)]}
        stops = list(accumulate(lengths))
        sequences = [ids[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]
        inputs = [self.read(of, own) if of else None for of, own in zip(stored, sequences, strict=True)]
        return {**rest, "image_inputs": inputs}

    def of_prompt(self, row: Mapping[str, Any]) -> Images | None:
        """What a model and servers read of the images of a row with `images` and `prompt_ids`; None without images."""
        stored = row.get("images")
        if not stored:
            return None
        return replace(
            self.read(stored, row["prompt_ids"]),
            pictures=tuple(opened(image) for image in stored),
            unexpanded_ids=tuple(row.get("unexpanded_ids", ())),  # rollouts of the journal have been sampled
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of placeholders in expanded texts."""
        return tuple(self.processor.image_token_ids)

    def _runs(self, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Start and stop of consecutive placeholders."""
        start = None
        for position, token in enumerate([*token_ids, None]):
            is_placeholder = token in self.token_ids
            if is_placeholder and start is None:
                start = position
            elif not is_placeholder and start is not None:
                yield start, position
                start = None

    def _call(self, text: str, images: Sequence[Any], **options: Any) -> Any:
        pictures = [opened(image) for image in images]
        try:
            return self.processor(text=[text], images=pictures, **options)
        except Exception as error:  # processors check images and text in many ways
            raise DataError(
                f"{type(self.processor).__name__} cannot read {len(images)} images: {type(error).__name__}: {error}"
            ) from error


def image_reader(processing_class: ProcessingClass) -> ImageReader | None:
    """The reader of images that belongs to a processor; None for a tokenizer."""
    return None if isinstance(processing_class, PreTrainedTokenizerBase) else ImageReader(processing_class)


def tokenizer_of(processing_class: ProcessingClass) -> PreTrainedTokenizerBase:
    """The tokenizer, or that of a processor."""
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return processing_class
    tokenizer: PreTrainedTokenizerBase = processing_class.tokenizer
    return tokenizer


def image_column(dataset: AnyDataset) -> str | None:
    """The column that holds images; None if there is none.

    Raises:
        DataError: There are two.
    """
    names = dataset.column_names or []
    found = [name for name in IMAGE_COLUMNS if name in names]
    if len(found) > 1:
        raise DataError(
            f"columns {found}: only one of them can hold the images. Remove the other: dataset.remove_columns(...)"
        )
    return found[0] if found else None


def with_named_images(dataset: AnyDataset, key: str | None) -> AnyDataset:
    """The dataset with the column `key` as its column of images; None: as it is.

    Raises:
        DataError: There is no such column, or there are other images.
    """
    if key is None or key == "images":
        return dataset
    names = dataset.column_names or []
    if key not in names:
        raise DataError(
            f"image_key={key!r}: the dataset has no such column, only {names}. Name the one with the images"
        )
    if "images" in names:
        raise DataError(f"image_key={key!r}: the dataset also has a column 'images'. Remove or rename one of the two")
    return dataset.rename_column(key, "images")


def with_stored_images(dataset: AnyDataset) -> AnyDataset:
    """The dataset with the images of its image column as they are stored, so that reading a row decodes none."""
    column = image_column(dataset)
    feature = (dataset.features or {}).get(column)
    if column is not None and isinstance(feature, datasets.Image):
        return dataset.cast_column(column, datasets.Image(decode=False))
    if column is not None and isinstance(getattr(feature, "feature", None), datasets.Image):
        return dataset.cast_column(column, datasets.List(datasets.Image(decode=False)))
    return dataset


def file_bytes(image: Any) -> bytes:
    """An image, as it is stored or opened, as the bytes of an image file from which the same pixels are read."""
    if hasattr(image, "getbands"):  # PIL's own formats may lose: an image that was read from a JPEG is one, too
        file = BytesIO()
        in_rgb(image).save(file, format="PNG")
        return file.getvalue()
    stored = datasets.Image().encode_example(image)
    data: bytes | None = stored["bytes"]
    return Path(stored["path"]).read_bytes() if data is None else data


def _original(start: int, stop: int, replaced: Sequence[Mapping[str, Any]]) -> tuple[int, bool]:
    """The character of the original text at which a token stops, and whether the token belongs to an image.

    Args:
        start: Character of the expanded text.
        stop: One past its last character there.
        replaced: Places in the original and the expanded text, in order.
    """
    shift = 0
    for one in replaced:
        first, last = one["new_span"]
        if start >= first and stop <= last and start < stop:
            return one["span"][1], True
        if stop <= first:
            break
        shift = one["span"][1] - last
    return stop + shift, False
