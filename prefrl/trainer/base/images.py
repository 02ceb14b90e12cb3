"""The reader of images of a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefrl.data.image_example import example_batch
from prefrl.data.images import image_reader
from prefrl.models.forward import set_image_example

if TYPE_CHECKING:
    from torch import nn

    from prefrl.data.images import ImageReader, ProcessingClass

__all__ = ["reader_for"]


def reader_for(model: nn.Module, processing_class: ProcessingClass) -> ImageReader | None:
    """The reader of images of a processor, with which the model's self-check is prepared; None for text."""
    reader = image_reader(processing_class)
    if reader is not None:
        set_image_example(model, example_batch(reader))
    return reader
