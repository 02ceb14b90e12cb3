"""The defaults of TRL's configs, stored by `python -m benchmarks.trl_defaults`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from prefrl.options.fields import about
from prefrl.registry import REGISTRY

__all__ = ["CONFIGS", "NOT_COMPARED", "defaults_of"]

_STORED = json.loads((Path(__file__).parent / "data" / "trl_defaults.json").read_text(encoding="utf-8"))
CONFIGS = sorted(_STORED.keys() - {"TrainingArguments"})
# What differs, but means the same.
_SAME = {
    "remove_unused_columns": "the data layer chooses the columns",
    "vllm_server_host": "for a client, 0.0.0.0 is this machine",
    "vllm_gpu_memory_utilization": "None: chosen from what training leaves",
    "vllm_importance_sampling_correction": "None: True where it is possible",
    "cpo_alpha": "None: 1 where the loss has an NLL term",
    "use_bias_correction_kl": "written if there is a KL term",
    "include_num_input_tokens_seen": "'no' is False",
    "debug": "nothing either way",
}
_FIELDS = [field for row in REGISTRY.values() for field in dataclasses.fields(row.load_config())]
# And what is only a name of TRL here.
_NAMES = {field.name for field in _FIELDS} - {field.name for field in _FIELDS if about(field).is_listed}
NOT_COMPARED = _SAME.keys() | _NAMES


def defaults_of(config: str) -> dict[str, Any]:
    """All defaults of TRL's config; those that it computes as it computes them."""
    return {**_STORED["TrainingArguments"]["defaults"], **_STORED[config]["defaults"], "bf16": True}
