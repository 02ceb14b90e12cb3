"""The models of a training beside the policy: its reference, and the reader of images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prefrl import distributed
from prefrl.data.image_example import example_batch
from prefrl.data.images import image_reader
from prefrl.models.forward import set_image_example
from prefrl.models.load import arguments_for_other, load_model
from prefrl.models.reference import make_reference

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from prefrl.data.images import ImageReader, ProcessingClass
    from prefrl.models.reference import Reference
    from prefrl.options.reference import ReferenceOptions
    from prefrl.trainer.base.config import BaseConfig
    from prefrl.trainer.parts import Run

__all__ = ["kept_reference", "loaded_reference", "reader_for"]


def loaded_reference(
    given: str | Path | PreTrainedModel | None, policy: PreTrainedModel, args: BaseConfig
) -> PreTrainedModel | None:
    """The user's `ref_model`; one that is given by name or path is loaded with `model_init_kwargs`."""
    if not isinstance(given, str | Path):
        return given
    arguments = cast("dict[str, Any] | None", args.model_init_kwargs)
    return load_model(given, model_init_kwargs=arguments_for_other(given, policy, arguments))


def kept_reference(
    run: Run, options: ReferenceOptions, model: PreTrainedModel, given: PreTrainedModel | None
) -> Reference | None:
    """The reference that the options ask for, ready to score the policy `model`'s batches; see `make_reference`."""
    reference = make_reference(model, beta=options.beta, moves=options.sync_ref_model, given=given)
    if reference is not None and reference.own_model is not None:
        run.parts.tell("made", run, reference.own_model, "reference")
        distributed.prepare_frozen(run.accelerator, reference.own_model)
    return reference


def reader_for(model: nn.Module, processing_class: ProcessingClass) -> ImageReader | None:
    """The reader of images of a processor, with which the model's self-check is prepared; None for text."""
    reader = image_reader(processing_class)
    if reader is not None:
        set_image_example(model, example_batch(reader))
    return reader
