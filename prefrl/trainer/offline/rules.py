"""Which options of trainers on a fixed dataset exclude each other.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import check_unset, mapping_of

__all__ = ["check_density_ratios", "check_divergence", "check_labels", "check_packing", "check_shape", "check_workers"]


def check_workers(config: Any) -> None:
    """Reject options of data workers that there are not, and workers that cannot start.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    if not config.dataloader_num_workers:
        names = ("dataloader_persistent_workers", "dataloader_multiprocessing_context")
        because, remedy = "dataloader_num_workers=0: there are no workers", "Set dataloader_num_workers."
        check_unset(config, *names, because=because, remedy=remedy)
    elif config.dataloader_multiprocessing_context not in (None, "fork"):
        raise ConfigError(
            f"dataloader_multiprocessing_context={config.dataloader_multiprocessing_context!r}: workers use the "
            "trainer, which only a fork has. Leave it None."
        )


def check_packing(config: Any) -> None:
    """Reject packs without a length, a way of packing where nothing is packed, and packs of rows that are ready.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    if not (config.packing or config.eval_packing):
        remedy = "Set packing=True."
        check_unset(config, "packing_strategy", because="nothing is packed", remedy=remedy)
    elif config.max_length is None:
        raise ConfigError("packing=True with max_length=None: rows are packed up to that length. Set max_length.")
    given = mapping_of(config, "dataset_kwargs")
    if set(given) - {"skip_prepare_dataset"} or not all(isinstance(value, bool) for value in given.values()):
        raise ConfigError(
            f'dataset_kwargs={given}: its only key is "skip_prepare_dataset", which is True or False. Other '
            "arguments of datasets are options of SFTConfig."
        )
    if given.get("skip_prepare_dataset") and (config.packing or config.eval_packing):
        raise ConfigError(
            'packing=True with dataset_kwargs={"skip_prepare_dataset": True}: rows that are learned as they are '
            "are not packed. Leave dataset_kwargs out: rows with a column input_ids are not tokenized again."
        )


def check_divergence(config: Any) -> None:
    """Reject losses of DPO that are listed twice, weights that are not theirs, and an alpha that is not read.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    if len(set(config.loss_type)) < len(config.loss_type):
        raise ConfigError(f"loss_type={config.loss_type}: list each loss once, and weight it with loss_weights")
    if config.loss_weights is not None and len(config.loss_weights) != len(config.loss_type):
        raise ConfigError(
            f"loss_weights={config.loss_weights}: must have one number for each of loss_type={config.loss_type}"
        )
    if config.loss_weights and not any(config.loss_weights):
        raise ConfigError(f"loss_weights={config.loss_weights}: all are 0, so there is nothing to learn")
    if config.f_divergence_type != "alpha_divergence":
        because = f"f_divergence_type={config.f_divergence_type!r}"
        remedy = "Set f_divergence_type='alpha_divergence'."
        check_unset(config, "f_alpha_divergence_coef", because=because, remedy=remedy)


def check_labels(config: Any) -> None:
    """Reject weights of KTO with which nothing is learned.

    Raises:
        ConfigError: Says what to do.
    """
    if config.desirable_weight == config.undesirable_weight == 0:
        raise ConfigError("desirable_weight=0.0 with undesirable_weight=0.0: nothing is learned. Raise one of them.")


def check_density_ratios(config: Any) -> None:
    """Reject bounds of BCO's weights without a number between them.

    Raises:
        ConfigError: Names both bounds.
    """
    if config.min_density_ratio > config.max_density_ratio:
        raise ConfigError(
            f"min_density_ratio={config.min_density_ratio}: must be at most max_density_ratio="
            f"{config.max_density_ratio}"
        )


def check_shape(config: Any) -> None:
    """Reject AlphaPO's reward in the shape that is SimPO's.

    Raises:
        ConfigError: Says what to do.
    """
    if config.loss_type == "alphapo" and config.alpha == 0:
        raise ConfigError("alpha=0.0 with loss_type='alphapo': that is SimPO. Set alpha, or loss_type='simpo'.")
