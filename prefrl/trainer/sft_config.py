"""Options of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect, mapping_of, opt
from prefrl.options.length_bound import LengthBound
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
        "those of the completion.",
    )
    dataset_text_field: str = opt("text", "Name of the text column of language-modeling data.")
    dataset_kwargs: dict[str, Any] | str | None = opt(
        None,
        '{"skip_prepare_dataset": true}: the rows are token ids (column input_ids), to be learned as they are, '
        "without truncation. JSON on the command line.",
    )
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
        self._validate_dataset_kwargs()

    def _validate_dataset_kwargs(self) -> None:
        given = mapping_of(self, "dataset_kwargs")
        if set(given) - {"skip_prepare_dataset"} or not all(isinstance(value, bool) for value in given.values()):
            raise ConfigError(
                f'dataset_kwargs={given}: its only key is "skip_prepare_dataset", which is True or False. Other '
                "arguments of datasets are options of SFTConfig."
            )
        if self.skips_preparation and (self.packing or self.eval_packing):
            raise ConfigError(
                'packing=True with dataset_kwargs={"skip_prepare_dataset": True}: rows that are learned as they are '
                "are not packed. Leave dataset_kwargs out: rows with a column input_ids are not tokenized again."
            )

    @property
    def skips_preparation(self) -> bool:
        """Whether rows are token ids that are learned as they are."""
        return bool(mapping_of(self, "dataset_kwargs").get("skip_prepare_dataset"))

    @property
    def length_bound(self) -> LengthBound:
        """See `BaseConfig.length_bound`."""
        return LengthBound(None, "the length of rows") if self.skips_preparation else super().length_bound
