"""What a trainer does to models: changes that options ask for, the reference, and the reader of images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prefrl import distributed
from prefrl.data.image_example import example_batch
from prefrl.data.images import image_reader
from prefrl.models.forward import set_image_example
from prefrl.models.kernels import apply_liger, compile_layers, compute_in_fp8
from prefrl.models.load import arguments_for_other, load_model
from prefrl.models.modes import disable_dropout
from prefrl.models.reference import make_reference

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from prefrl.data.images import ImageReader, ProcessingClass
    from prefrl.models.reference import Reference
    from prefrl.options.reference import ReferenceOptions
    from prefrl.trainer.base.config import BaseConfig

__all__ = ["add_kernels", "change_policy", "kept_reference", "loaded_reference", "reader_for"]


def add_kernels(args: BaseConfig, model: nn.Module) -> None:
    """Patch the policy or a reference model with Liger's kernels if the options say so; see `apply_liger`."""
    if args.use_liger_kernel:
        apply_liger(model, cast("dict[str, bool]", args.liger_kernel_config))


def change_layers(args: BaseConfig, model: nn.Module) -> None:
    """Let the layers of the policy or a reference model compute in 8 bits, and compile them, if the options say so."""
    if args.fp8:
        compute_in_fp8(model)
    if args.torch_compile:
        compile_layers(model, backend=args.torch_compile_backend, mode=args.torch_compile_mode)


def change_policy(args: BaseConfig, model: nn.Module) -> None:
    """Change the policy as the options say; without dropout, that of its adapter is off, too."""
    add_kernels(args, model)
    change_layers(args, model)
    if args.disable_dropout:
        disable_dropout(model)


def loaded_reference(
    given: str | Path | PreTrainedModel | None, policy: PreTrainedModel, args: BaseConfig
) -> PreTrainedModel | None:
    """The user's `ref_model`; one that is given by name or path is loaded with `model_init_kwargs`."""
    if not isinstance(given, str | Path):
        return given
    arguments = cast("dict[str, Any] | None", args.model_init_kwargs)
    return load_model(given, model_init_kwargs=arguments_for_other(given, policy, arguments))


def kept_reference(
    args: BaseConfig,
    options: ReferenceOptions,
    model: PreTrainedModel,
    given: PreTrainedModel | None,
    *,
    accelerator: Any,
) -> Reference | None:
    """The reference that the options ask for, ready to score the policy `model`'s batches; see `make_reference`."""
    if given is not None:
        add_kernels(args, given)
    reference = make_reference(model, beta=options.beta, moves=options.sync_ref_model, given=given)
    if reference is not None and reference.own_model is not None:
        change_layers(args, reference.own_model)
        distributed.prepare_frozen(accelerator, reference.own_model)
    return reference


def reader_for(model: nn.Module, processing_class: ProcessingClass) -> ImageReader | None:
    """The reader of images of a processor, with which the model's self-check is prepared; None for text."""
    reader = image_reader(processing_class)
    if reader is not None:
        set_image_example(model, example_batch(reader))
    return reader
