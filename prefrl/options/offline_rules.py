"""Which options of trainers on a fixed dataset exclude each other.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefrl.options.fields import check_unset, mapping_of
from prefrl.options.rules import example, unset, when

__all__ = [
    "DENSITY_RATIOS_RULES",
    "DIVERGENCE_RULES",
    "LABELS_RULES",
    "PACKING_RULES",
    "PAIR_LOSS_RULES",
    "SHAPE_RULES",
    "TRUNCATION_SIDE_RULES",
    "WORKERS_RULES",
    "check_loss_options",
]


def check_loss_options(config: Any, losses: Mapping[str, Any], chosen: Sequence[str]) -> None:
    """Reject options that no chosen loss reads, and values that a chosen loss does not allow.

    Args:
        config: Has an option for each hyperparameter of the losses.
        losses: The losses that there are to choose from; each row has `params`.
        chosen: The names of the chosen ones.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    readers: dict[str, list[str]] = {}
    for loss, row in losses.items():
        for name in row.params.names():
            readers.setdefault(name, []).append(loss)
    for name, names in readers.items():
        if not set(names) & set(chosen):
            because = f"loss_type={config.loss_type!r} does not read it"
            check_unset(config, name, because=because, remedy=f"It goes with {' or '.join(map(repr, names))}.")
    for loss in chosen:
        losses[loss].params.from_options(config)


def _other_keys(o: Any) -> bool:
    given = mapping_of(o, "dataset_kwargs")
    return bool(set(given) - {"skip_prepare_dataset"}) or not all(isinstance(value, bool) for value in given.values())


WORKERS_RULES = (
    *unset(
        {"dataloader_persistent_workers": True, "dataloader_multiprocessing_context": "fork"},
        lambda o: not o.dataloader_num_workers,
        "dataloader_num_workers=0: there are no workers. Set dataloader_num_workers.",
        example("sft"),
    ),
    when(
        lambda o: o.dataloader_num_workers and o.dataloader_multiprocessing_context not in (None, "fork"),
        "dataloader_multiprocessing_context={dataloader_multiprocessing_context!r}: workers use the trainer, which "
        "only a fork has. Leave it None.",
        example("sft", dataloader_num_workers=1, dataloader_multiprocessing_context="spawn"),
    ),
)
PACKING_RULES = (
    *unset(
        {"packing_strategy": "wrapped"},
        lambda o: not (o.packing or o.eval_packing),
        "nothing is packed. Set packing=True.",
        example("sft"),
    ),
    when(
        lambda o: (o.packing or o.eval_packing) and o.max_length is None,
        "packing=True with max_length=None: rows are packed up to that length. Set max_length.",
        example("sft", packing=True, max_length=None),
    ),
    when(
        _other_keys,
        'dataset_kwargs={dataset_kwargs}: its only key is "skip_prepare_dataset", which is True or False. Other '
        "arguments of datasets are options of SFTConfig.",
        example("sft", dataset_kwargs={"add_special_tokens": False}),
    ),
    when(
        lambda o: mapping_of(o, "dataset_kwargs").get("skip_prepare_dataset") and (o.packing or o.eval_packing),
        'packing=True with dataset_kwargs={{"skip_prepare_dataset": True}}: rows that are learned as they are are not '
        "packed. Leave dataset_kwargs out: rows with a column input_ids are not tokenized again.",
        example("sft", packing=True, dataset_kwargs={"skip_prepare_dataset": True}),
    ),
)
# `pair_losses` of DPO's options: the rows of `PAIR_LOSSES`, or what they say about combinations.
PAIR_LOSS_RULES = (
    when(
        lambda o: not o.loss_type or not {*o.loss_type} <= o.pair_losses.keys(),
        "loss_type={loss_type}: must be one or several of {known}",
        example("dpo", loss_type=["sigmo"]),
        known=lambda o: ", ".join(o.pair_losses),
    ),
    when(
        lambda o: (
            [name for name in o.loss_type if o.pair_losses[name].uses_log_ratios]
            if o.f_divergence_type != "reverse_kl"
            else None
        ),
        "f_divergence_type={f_divergence_type!r} with loss_type={found}: these losses use the log-ratios themselves. "
        "Use reverse_kl, or another loss.",
        example("dpo", loss_type=["nca_pair"], f_divergence_type="js_divergence"),
    ),
    when(
        lambda o: [name for name in o.loss_type if o.pair_losses[name].is_batch_loss] if o.use_weighting else None,
        "use_weighting=True with loss_type={found}: its values belong to positions in the sorted batch, not to pairs. "
        "Set use_weighting=False.",
        example("dpo", loss_type=["aot"], use_weighting=True),
    ),
)
DIVERGENCE_RULES = (
    when(
        lambda o: len(set(o.loss_type)) < len(o.loss_type),
        "loss_type={loss_type}: list each loss once, and weight it with loss_weights",
        example("dpo", loss_type=["sigmoid", "sigmoid"]),
    ),
    when(
        lambda o: o.loss_weights is not None and len(o.loss_weights) != len(o.loss_type),
        "loss_weights={loss_weights}: must have one number for each of loss_type={loss_type}",
        example("dpo", loss_weights=[1.0, 2.0]),
    ),
    when(
        lambda o: o.loss_weights and not any(o.loss_weights),
        "loss_weights={loss_weights}: all are 0, so there is nothing to learn",
        example("dpo", loss_weights=[0.0]),
    ),
    *unset(
        {"f_alpha_divergence_coef": 0.1},
        lambda o: o.f_divergence_type != "alpha_divergence",
        "f_divergence_type={f_divergence_type!r}. Set f_divergence_type='alpha_divergence'.",
        example("dpo"),
    ),
)
LABELS_RULES = (
    when(
        lambda o: o.desirable_weight == o.undesirable_weight == 0,
        "desirable_weight=0.0 with undesirable_weight=0.0: nothing is learned. Raise one of them.",
        example("kto", desirable_weight=0.0, undesirable_weight=0.0),
    ),
)
DENSITY_RATIOS_RULES = (
    when(
        lambda o: o.min_density_ratio > o.max_density_ratio,
        "min_density_ratio={min_density_ratio}: must be at most max_density_ratio={max_density_ratio}",
        example("bco", min_density_ratio=11.0),
    ),
)
SHAPE_RULES = (
    when(
        lambda o: o.loss_type == "alphapo" and o.alpha == 0,
        "alpha=0.0 with loss_type='alphapo': that is SimPO. Set alpha, or loss_type='simpo'.",
        example("cpo", loss_type="alphapo"),
    ),
)
TRUNCATION_SIDE_RULES = (
    when(
        lambda o: o.truncation_mode != "keep_start",
        "truncation_mode={truncation_mode!r} has no effect because a part of a response has no label: pairs above "
        "max_length cannot be used. Raise max_length, or leave such pairs out with invalid_rows='drop'.",
        example("reward", truncation_mode="keep_end"),
    ),
)
