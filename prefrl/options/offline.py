"""Options of training on a fixed dataset, and their rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from prefrl.options.balance import BALANCE_PARAMS, BALANCE_RULES
from prefrl.options.base import BaseOptions
from prefrl.options.fields import apply, check_unset, example, flat, mapping_of, opt, parse_json, unset, when
from prefrl.options.params import KwargsValue, Params, ParamsOf, kwargs
from prefrl.options.preference import (
    CPO_LOSS_FACTS,
    PAIR_LOSS_FACTS,
    PRECOMPUTED_REFERENCE_RULES,
    REFERENCE_RULES,
    Divergence,
    LabelSmoothing,
    PairLossFacts,
    ReferenceOptions,
)
from prefrl.options.types import LengthBound, TruncationMode


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
        hint=True,
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
        hint=True,
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
ENCODER_RULES = (
    when(
        lambda o: o.is_encoder_decoder,
        "is_encoder_decoder=True: models with an encoder are not supported. Use a decoder-only model.",
        example("cpo", is_encoder_decoder=True),
    ),
    *unset(
        {"max_completion_length": 64},
        lambda o: True,
        "max_length bounds prompt and completion together. Leave it out.",
        example("cpo"),
        hint=True,
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


@dataclass(init=False, repr=False, eq=False)
class OfflineOptions(BaseOptions):
    """Options of trainers that learn from a fixed dataset."""

    max_length: Annotated[int, Ge(2), Le(2 * 10**7)] | None = opt(
        1024, "Maximum sequence length in tokens. None means no limit."
    )
    truncation_mode: TruncationMode = opt(
        "keep_start", "How to handle longer sequences: keep their start, keep their end, or stop with an error."
    )
    chat_template_kwargs: dict[str, Any] | str | None = opt(
        None, "Arguments for the chat template. On the command line, give it as JSON."
    )
    invalid_rows: Literal["error", "drop"] = opt(
        "error",
        "How to handle unusable rows (empty, too long, nothing to learn): stop and list them, or drop them.",
    )

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        super().validate()
        parse_json(self, "chat_template_kwargs")
        apply(self, WORKERS_RULES)

    @property
    def length_bound(self) -> LengthBound:
        """See `BaseOptions.length_bound`."""
        return LengthBound(self.max_length, "max_length")


@dataclass(init=False, repr=False, eq=False)
class SampleOptions:
    """An option of the offline trainers that can sample completions in evaluations."""

    # Names of TRL, where these trainers also take models with an encoder.
    is_encoder_decoder: bool | None = flat()
    max_completion_length: int | None = flat()

    generate_during_eval: bool = opt(
        False,
        "At each evaluation, sample completions of the first per_device_eval_batch_size prompts, and log them as a "
        "table; see LogCompletionsCallback.",
        decides=False,
    )


@dataclass(init=False, repr=False, eq=False)
class OfflineReferenceOptions(ReferenceOptions):
    """The reference model, which the policy stays close to, for training on a fixed dataset."""

    beta: Annotated[float, Gt(0)] = opt(
        0.1,
        "Implicit rewards are beta * log(policy / reference). A larger beta keeps the policy closer to the reference.",
    )
    precompute_ref_log_probs: bool = opt(
        False,
        "Compute the reference log-probs of the datasets once, before training, and keep no reference model. They are "
        "cached on disk and reused for the same data and weights.",
        decides=False,
    )
    precompute_ref_batch_size: Annotated[int, Ge(1)] | None = opt(
        None,
        "Rows per forward pass of precompute_ref_log_probs. The default is per_device_train_batch_size.",
        decides=False,
        needs=["precompute_ref_log_probs"],
    )


@dataclass(init=False, repr=False, eq=False)
class SFTOptions(OfflineOptions):
    """Options of supervised fine-tuning."""

    adds_tokens: ClassVar[bool] = True

    learning_rate: float = opt(2e-5, "Initial learning rate.")
    loss_type: Literal["nll", "dft", "chunked_nll"] = opt(
        "nll",
        "'nll' is the negative log-likelihood; 'chunked_nll', TRL's name of a way to compute it, is the same. 'dft' "
        "also weights each token by its own probability (arXiv 2508.05629).",
    )
    completion_only_loss: bool | None = opt(
        None,
        "Compute the loss only on the completion. By default, this is on for prompt-completion data and off "
        "otherwise.",
    )
    assistant_only_loss: bool = opt(
        False,
        "Compute the loss only on assistant turns, which needs conversational data. Together with "
        "completion_only_loss, compute it only on the assistant turns of the completion.",
    )
    dataset_text_field: str = opt("text", "Name of the text column of language-modeling data.")
    dataset_kwargs: dict[str, Any] | str | None = opt(
        None,
        'With {"skip_prepare_dataset": true}, rows must hold token ids in a column input_ids, which are used '
        "unchanged, without truncation. On the command line, give it as JSON.",
    )
    shuffle_dataset: bool = opt(
        False, "Shuffle the rows before they are packed, so that each pack has rows from the whole dataset."
    )
    packing: bool = opt(
        False,
        "Pack several sequences into each row of at most max_length tokens, so that batches have similar sizes. "
        "Nothing is padded either way.",
    )
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = opt(
        "bfd",
        "'bfd' (best-fit decreasing) keeps sequences whole, truncated to max_length. 'bfd_split' packs longer ones in "
        "pieces. 'wrapped' joins all sequences into one stream of tokens and cuts it every max_length tokens.",
    )
    eval_packing: bool | None = opt(None, "Also pack the evaluation dataset. The default is the value of packing.")

    def take_other_forms(self) -> None:
        """See `BaseOptions.take_other_forms`: TRL computes the same loss in two ways."""
        super().take_other_forms()
        if self.loss_type == "chunked_nll":
            self.loss_type = "nll"

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        super().validate()
        apply(self, PACKING_RULES)

    @property
    def skips_preparation(self) -> bool:
        """Whether rows are token ids that are learned as they are."""
        return bool(mapping_of(self, "dataset_kwargs").get("skip_prepare_dataset"))

    @property
    def length_bound(self) -> LengthBound:
        """See `BaseOptions.length_bound`."""
        return LengthBound(None, "the length of rows") if self.skips_preparation else super().length_bound


@dataclass(init=False, repr=False, eq=False)
class DPOOptions(OfflineReferenceOptions, OfflineOptions):
    """Options of DPO."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    loss_type: list[str] = opt(["sigmoid"], f"One or several of: {', '.join(PAIR_LOSS_FACTS)}.")
    loss_weights: list[float] | None = opt(
        None, "Weights of the losses in loss_type, in the same order. By default, each weight is 1."
    )
    label_smoothing: LabelSmoothing = opt(
        0.0,
        "Probability that a label is wrong. The losses sigmoid (cDPO), robust, aot, aot_unpaired and exo_pair use it; "
        "exo_pair replaces 0 with its paper's 1e-3.",
    )
    discopop_tau: Annotated[float, Gt(0)] = opt(0.05, "Temperature of the mixture in the loss discopop.")
    f_divergence_type: Divergence = opt(
        "reverse_kl", "Divergence that regularizes the policy toward the reference (f-DPO, arXiv 2309.16240)."
    )
    f_alpha_divergence_coef: float = opt(0.5, "Parameter alpha of the alpha divergence.")
    ld_alpha: Annotated[float, Ge(0), Le(1)] | None = opt(
        None,
        "Weight of tokens beyond the length of the pair's shorter response (LD-DPO, arXiv 2409.06411). By "
        "default, they weigh as much as the others.",
    )
    use_weighting: bool = opt(
        False, "Weight each pair by the probability of its responses under the policy (WPO, arXiv 2406.11827)."
    )
    rpo_alpha: Annotated[float, Gt(0)] | None = opt(
        None,
        "Weight of an additional term, the length-normalized NLL of the chosen response (RPO, arXiv 2404.19733). "
        "By default, there is no such term.",
    )
    loss_balance: Literal["log_transform", "uncertainty", "gradnorm", "famo", "nash", "pareto"] | None = opt(
        None,
        "How to weight several losses in each step, from their values and gradients; loss_weights and rpo_alpha are "
        "the preferences. Each step needs another forward pass. The routers' loss of a mixture of experts keeps its "
        "weight. By default, all weights are fixed.",
    )
    loss_balance_kwargs: KwargsValue = kwargs(
        "Hyperparameters of loss_balance.",
        {name: params for name, params in BALANCE_PARAMS.items() if name != "fixed"},
        switch="loss_balance",
    )

    loss_balance_params = ParamsOf("loss_balance_kwargs", Params)

    @property
    def weighted_losses(self) -> list[tuple[str, float]]:
        """The names of the losses with their weights. `rpo` is the term of `rpo_alpha`."""
        losses = list(zip(self.loss_type, self.loss_weights or [1.0] * len(self.loss_type), strict=True))
        return losses if self.rpo_alpha is None else [*losses, ("rpo", self.rpo_alpha)]

    @property
    def pair_losses(self) -> Mapping[str, PairLossFacts]:
        """The losses that there are to choose from."""
        return PAIR_LOSS_FACTS

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        super().validate()
        apply(self, REFERENCE_RULES, PRECOMPUTED_REFERENCE_RULES, PAIR_LOSS_RULES)
        check_loss_options(self, PAIR_LOSS_FACTS, self.loss_type)
        apply(self, DIVERGENCE_RULES, BALANCE_RULES)


@dataclass(init=False, repr=False, eq=False)
class KTOOptions(OfflineReferenceOptions, OfflineOptions):
    """Options of KTO."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    loss_type: Literal["kto", "apo_zero_unpaired"] = opt(
        "kto", "Reference point of the rewards: an estimate of the KL ('kto'), or 0 ('apo_zero_unpaired')."
    )
    desirable_weight: Annotated[float, Ge(0)] = opt(1.0, "Weight of the loss of desirable rows.")
    undesirable_weight: Annotated[float, Ge(0)] = opt(1.0, "Weight of the loss of undesirable rows.")

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        super().validate()
        apply(self, REFERENCE_RULES, PRECOMPUTED_REFERENCE_RULES, LABELS_RULES)


@dataclass(init=False, repr=False, eq=False)
class ORPOOptions(SampleOptions, OfflineOptions):
    """Options of ORPO."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    beta: Annotated[float, Gt(0)] = opt(0.1, "Weight of the odds-ratio term, called lambda in the paper.")

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        super().validate()
        apply(self, ENCODER_RULES)


@dataclass(init=False, repr=False, eq=False)
class CPOOptions(SampleOptions, OfflineOptions):
    """Options of CPO, SimPO and AlphaPO."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"] = opt(
        "sigmoid",
        "'sigmoid' is CPO's loss; 'simpo' normalizes by length and adds a target margin. For pure SimPO, also set "
        "cpo_alpha=0.",
    )
    beta: Annotated[float, Gt(0)] = opt(0.1, "Implicit rewards are beta * log policy.")
    label_smoothing: LabelSmoothing = opt(0.0, "Probability that a label is wrong.")
    cpo_alpha: Annotated[float, Ge(0)] | None = opt(
        None, "Weight of the NLL of the chosen responses. The default is 1, but 0 with loss_type='alphapo'."
    )
    simpo_gamma: Annotated[float, Ge(0)] = opt(0.5, "Target margin of rewards in the losses simpo and alphapo.")
    alpha: float = opt(0.0, "Shape of AlphaPO's reward, (1 - p^-alpha) / alpha. At 0 it is log p, as in SimPO.")

    @property
    def nll_weight(self) -> float:
        """The effective value of `cpo_alpha`."""
        if self.cpo_alpha is None:
            return 0.0 if self.loss_type == "alphapo" else 1.0
        return self.cpo_alpha

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        super().validate()
        check_loss_options(self, CPO_LOSS_FACTS, [self.loss_type])
        apply(self, ENCODER_RULES, SHAPE_RULES)


@dataclass(init=False, repr=False, eq=False)
class BCOOptions(SampleOptions, OfflineReferenceOptions, OfflineOptions):
    """Options of BCO."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    prompt_sample_size: Annotated[int, Ge(2)] = opt(
        1024, "Number of prompts to fit the density-ratio classifier on, half of them desirable. Needs embedding_func."
    )
    min_density_ratio: Annotated[float, Ge(0)] = opt(
        0.5, "Smallest weight of an undesirable row. Needs embedding_func."
    )
    max_density_ratio: Annotated[float, Gt(0)] = opt(10.0, "Largest weight of such a row. Needs embedding_func.")

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        super().validate()
        apply(self, REFERENCE_RULES, PRECOMPUTED_REFERENCE_RULES, DENSITY_RATIOS_RULES, ENCODER_RULES)


@dataclass(init=False, repr=False, eq=False)
class RewardModelOptions(OfflineOptions):
    """Options of reward modeling."""

    adds_tokens: ClassVar[bool] = True

    learning_rate: float = opt(1e-4, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    center_rewards_coefficient: Annotated[float, Gt(0)] | None = opt(
        None,
        "Weight of the term (reward of chosen + reward of rejected)^2, which centers rewards on 0. The paper "
        "recommends 0.01.",
    )

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        super().validate()
        apply(self, TRUNCATION_SIDE_RULES)
