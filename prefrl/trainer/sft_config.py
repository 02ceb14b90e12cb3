"""Options of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect, opt
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["SFTConfig"]


@dataclass
class SFTConfig(OfflineConfig):
    """Options of `SFTTrainer`."""

    learning_rate: float = opt(2e-5, "Initial learning rate.")
    loss_type: Literal["nll", "dft"] = opt(
        "nll", "nll: negative log-likelihood. dft: each token weighted by its own probability (arXiv 2508.05629)."
    )
    completion_only_loss: bool | None = opt(
        None, "Compute the loss only on the completion. None: yes for prompt-completion data, no otherwise."
    )
    assistant_only_loss: bool = opt(False, "Compute the loss only on assistant turns; needs conversational data.")
    dataset_text_field: str = opt("text", "Name of the text column of language-modeling data.")
    shuffle_dataset: bool = opt(
        False, "Shuffle the rows before they are packed, so that each pack has rows from all of the dataset."
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
        if (self.packing or self.eval_packing) and self.max_length is None:
            raise ConfigError("packing=True with max_length=None: rows are packed up to that length. Set max_length.")
        if not (self.packing or self.eval_packing):
            check_no_effect(
                name="packing_strategy",
                value=self.packing_strategy,
                unset="bfd",
                because="nothing is packed",
                remedy="Set packing=True.",
            )
        if self.assistant_only_loss and self.completion_only_loss:
            raise ConfigError(
                "assistant_only_loss=True with completion_only_loss=True: choose one. assistant_only_loss trains on "
                "every assistant turn, completion_only_loss on everything in the column completion."
            )
