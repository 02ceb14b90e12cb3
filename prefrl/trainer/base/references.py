"""The reference that a trainer keeps beside its policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefrl import distributed
from prefrl.models.flops import model_cost
from prefrl.models.reference import make_reference
from prefrl.trainer.base.kernels import add_kernels
from prefrl.trainer.base.sync_reference import SyncReference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prefrl.trainer.base.reference_options import ReferenceOptions
    from prefrl.trainer.base.trainer import BaseTrainer

__all__ = ["keep_reference"]


def keep_reference(trainer: BaseTrainer, options: ReferenceOptions, given: PreTrainedModel | None) -> None:
    """Set `trainer.reference` to what the options ask for, and move it during training if they say so."""
    if given is not None:
        add_kernels(trainer.args, given)
    reference = make_reference(
        trainer.model,
        beta=options.beta,
        moves=options.sync_ref_model,
        plan=trainer.args.forward_plan,
        given=given,
    )
    trainer.reference = reference
    if reference is None:
        return
    if reference.own_model is not None:
        distributed.prepare_frozen(trainer.accelerator, reference.own_model)
    if trainer.account.flops is not None:
        cost = model_cost(trainer.model, with_adapter=False) if given is None else model_cost(given)
        trainer.account.flops.reference = cost
        trainer.reference_logprobs(trainer.idle_batch())  # as for the policy: the check of the first use
    if options.sync_ref_model:
        alpha, steps = options.ref_model_mixup_alpha, options.ref_model_sync_steps
        trainer.add_callback(SyncReference(reference, alpha=alpha, steps=steps))
        trainer.reference_moves = True
