"""Imports everything that benchmark processes need. The server from which they are forked imports this module once."""

import logging
from importlib import import_module

logging.disable(logging.WARNING)
for module in (
    "transformers.models.qwen2.modeling_qwen2",
    "benchmarks.prefrl_side",
    "prefrl.trainer.dpo_trainer",
    "prefrl.trainer.grpo_trainer",
    "prefrl.trainer.kto_trainer",
    "prefrl.trainer.reward_trainer",
    "prefrl.trainer.sft_trainer",
    "benchmarks.trl_side",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.kto_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.sft_trainer",
):
    import_module(module)
import_module("datasets").disable_progress_bars()
import_module("transformers.utils.logging").disable_progress_bar()
