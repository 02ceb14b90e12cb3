"""Makes the reference model that a trainer keeps beside its policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefrl import distributed
from prefrl.models.reference import make_reference
from prefrl.trainer.base.kernels import add_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prefrl.models.reference import Reference
    from prefrl.trainer.base.config import BaseConfig
    from prefrl.trainer.base.reference_options import ReferenceOptions

__all__ = ["kept_reference"]


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
    reference = make_reference(
        model, beta=options.beta, moves=options.sync_ref_model, plan=args.forward_plan, given=given
    )
    if reference is not None and reference.own_model is not None:
        distributed.prepare_frozen(accelerator, reference.own_model)
    return reference
