"""Names that people write: the nearest known one, those of other libraries, and names that do not say enough."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from prefrl.errors import ConfigError


def nearest(name: str, known: Collection[str], *, otherwise: str | None = None) -> str:
    """A question with the known name most similar to `name`. If none is similar: `otherwise`, or all known names.

    Args:
        name: The unknown name.
        known: The possible names.
        otherwise: Text to return if the list of names is too long to print.
    """
    match = _nearest_of(name, known)
    if match is not None:
        return f"Did you mean {match!r}?"
    return otherwise or f"Known: {', '.join(sorted(known))}."


def _nearest_of(name: str, known: Collection[str]) -> str | None:
    """The name that was misspelled, or None if no name is near enough that the guess would be a good one.

    That is one that shares three quarters of its letters in their order, one with the same letters in another order,
    or the only one that has all words of the name among its own, such as `record_shapes` for `shapes`.
    """
    plain = {match.lstrip("-"): match for match in known}  # dashes in front are no similarity
    name = name.lstrip("-")
    similar = difflib.get_close_matches(name, plain, n=1, cutoff=0.75)
    swapped = [match for match in difflib.get_close_matches(name, plain) if sorted(match) == sorted(name)]
    words = {*_words_of(name)}
    longer = [match for match in plain if words and words <= {*_words_of(match)}]
    found = [*similar, *swapped, *(longer if len(longer) == 1 else ())]
    return plain[found[0]] if found else None


def _words_of(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", name.lower()) if word]


def check_known(option: str, name: str, known: Collection[str], what: str) -> None:
    """Reject a name that an option does not know.

    Raises:
        ConfigError: Has a suggestion.
    """
    if name not in known:
        raise ConfigError(f"{option}={name!r}: unknown {what}. {nearest(name, known)}")


FOREIGN_FILE = Path(__file__).with_name("foreign.json")

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


_REFERENCE = re.compile(r"\$\{[^}]*\}?")


def check_references(paths: Mapping[str, Any]) -> None:
    """Refuse paths with references: they would be names of folders.

    Args:
        paths: Options by name; None, a text, or texts in lists and mappings.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    for name, value in paths.items():
        if (found := _REFERENCE.search(str(value))) is not None:
            raise ConfigError(
                f"{name}={value!r}: the reference {found[0]} is not replaced by what it stands for. Write out the "
                "path."
            )


_COMMIT = re.compile(r"[0-9a-f]{40}")


def unpinned_code(model: str | os.PathLike[str], revision: str | None) -> str | None:
    """A warning if the code of a model on the Hub runs in whatever version the Hub has today, else None.

    Args:
        model: Name or path of a model that is loaded with `trust_remote_code=True`.
        revision: Branch, tag or commit; only a commit always means the same code.
    """
    if os.path.isdir(model) or (revision is not None and _COMMIT.fullmatch(revision)):
        return None
    return (
        f"trust_remote_code=True with revision={revision!r}: code from the repository of {os.fspath(model)!r} runs in "
        "this process, and its owner can change it at any time. Set the revision to the 40 digits of a commit."
    )
