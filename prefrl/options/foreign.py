"""What names of other libraries are here, for messages.

Their tables belong to `prefrl migrate`, whose rows also convert values. `python -m prefrl.scripts.migrate.foreign`
writes what messages need of them to `foreign.json`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

__all__ = ["ARGUMENTS", "FOREIGN_FILE", "TRAINER_NAMES", "advice"]

FOREIGN_FILE = Path(__file__).with_suffix(".json")

# Arguments of TRL's trainers that must be None here, and why.
ARGUMENTS: dict[str, str] = {
    "data_collator": "the trainer lays out batches itself",
    "compute_loss_func": "a trainer's loss is its algorithm. Derive from the trainer and write its method loss",
    "optimizer_cls_and_kwargs": "give optimizers=(optimizer, None), or the options optim and optim_args",
    "preprocess_logits_for_metrics": "no logits are kept; compute_metrics gets the most likely tokens, or rewards",
    "model_init": "load the model and give it as model",
    "rollout_func": "write an environment, whose methods respond and edit decide what follows a completion",
}
# Arguments of TRL's trainers by another name.
TRAINER_NAMES: dict[str, str] = {
    "tokenizer": "processing_class",
    "config": "args",
    "reward_model": "reward_funcs",
    "policy": "model",
    "ref_policy": "ref_model",
}


def advice(name: str, known: Collection[str]) -> str | None:
    """What to do about an unknown option that is another library's; None if it is no such name.

    Args:
        name: The unknown option, or only the last part of a path of keys. Dashes before it do not count.
        known: The options that there are where it was given.
    """
    name = name.lstrip("-").replace("-", "_")
    whole = [(library, [rows[name]]) for library, rows in _libraries().items() if name in rows]
    parts = [
        (library, [row for path, row in rows.items() if path.endswith(f".{name}")])
        for library, rows in _libraries().items()
    ]
    for library, found in [*whole, *parts]:
        texts = {says for option, says in found if not option or option in known}
        if len(texts) == 1:
            whose = "" if library == "others" else f", an option of {library},"
            return f"{name!r}{whose} {texts.pop()}."
    return None


@cache
def _libraries() -> Mapping[str, Mapping[str, tuple[str, str]]]:
    """For each library, by name: the option that a config must have for the advice (or ""), and the advice."""
    libraries: Mapping[str, Mapping[str, tuple[str, str]]] = json.loads(FOREIGN_FILE.read_text(encoding="utf-8"))
    return libraries
