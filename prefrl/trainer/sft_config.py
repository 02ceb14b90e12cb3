"""Options of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from prefrl.options.fields import mapping_of, opt
from prefrl.options.length_bound import LengthBound
from prefrl.options.offline_rules import PACKING_RULES
from prefrl.options.rules import apply
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["SFTConfig"]


@dataclass
class SFTConfig(OfflineConfig):
    """Options of `SFTTrainer`."""

    adds_tokens: ClassVar[bool] = True

    learning_rate: float = opt(2e-5, "Initial learning rate.")
    loss_type: Literal["nll", "dft"] = opt(
        "nll", "nll: negative log-likelihood. dft: each token weighted by its own probability (arXiv 2508.05629)."
    )
    completion_only_loss: bool | None = opt(
        None, "Compute the loss only on the completion. None: yes for prompt-completion data, no otherwise."
    )
    assistant_only_loss: bool = opt(
        False,
        "Compute the loss only on assistant turns; needs conversational data. With completion_only_loss, only on "
        "the assistant turns of the completion.",
    )
    dataset_text_field: str = opt("text", "Name of the text column of language-modeling data.")
    dataset_kwargs: dict[str, Any] | str | None = opt(
        None,
        '{"skip_prepare_dataset": true}: the rows are token ids (column input_ids), which are used as they are, '
        "without truncation. JSON on the command line.",
    )
    shuffle_dataset: bool = opt(
        False, "Shuffle the rows before they are packed, so that each pack has rows from the whole dataset."
    )
    packing: bool = opt(
        False,
        "Pack several sequences into each row of at most max_length tokens, so that batches have similar sizes. "
        "Nothing is padded either way.",
    )
    packing_strategy: Literal["bfd", "wrapped"] = opt(
        "bfd", "bfd: best-fit decreasing, sequences stay whole. wrapped: one stream of tokens, cut at max_length."
    )
    eval_packing: bool | None = opt(None, "Pack the evaluation dataset, too. None: same as packing.")

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        apply(self, PACKING_RULES)

    @property
    def skips_preparation(self) -> bool:
        """Whether rows are token ids that are learned as they are."""
        return bool(mapping_of(self, "dataset_kwargs").get("skip_prepare_dataset"))

    @property
    def length_bound(self) -> LengthBound:
        """See `BaseConfig.length_bound`."""
        return LengthBound(None, "the length of rows") if self.skips_preparation else super().length_bound
