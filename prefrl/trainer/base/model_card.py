"""Writes the model card, the README.md of a saved model."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from prefrl import __version__
from prefrl.printable import printable

__all__ = ["write_model_card"]

_PAPERS = {
    "sft": "Supervised fine-tuning: the mean negative log-likelihood of the trained tokens.",
    "dpo": "Direct preference optimization: [arXiv 2305.18290](https://arxiv.org/abs/2305.18290).",
    "kto": "Kahneman-Tversky optimization: [arXiv 2402.01306](https://arxiv.org/abs/2402.01306).",
    "orpo": "Odds ratio preference optimization: [arXiv 2403.07691](https://arxiv.org/abs/2403.07691).",
    "cpo": "Contrastive preference optimization: [arXiv 2401.08417](https://arxiv.org/abs/2401.08417).",
    "bco": "Binary classifier optimization: [arXiv 2404.04656](https://arxiv.org/abs/2404.04656).",
    "reward": "Reward modeling: the Bradley-Terry likelihood of preferences.",
    "grpo": "Group relative policy optimization: DeepSeekMath, [arXiv 2402.03300](https://arxiv.org/abs/2402.03300).",
    "rloo": "REINFORCE with a leave-one-out baseline: [arXiv 2402.14740](https://arxiv.org/abs/2402.14740).",
    "reinforce_plus_plus": "REINFORCE++: [arXiv 2501.03262](https://arxiv.org/abs/2501.03262).",
    "ppo": "Proximal policy optimization: [arXiv 1707.06347](https://arxiv.org/abs/1707.06347).",
    "online_dpo": "Online direct preference optimization: [arXiv 2402.04792](https://arxiv.org/abs/2402.04792).",
}
_NAME_ON_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_PACKAGES = ("transformers", "torch", "datasets", "tokenizers")


def write_model_card(
    folder: Path,
    *,
    algorithm: str,
    base_model: str,
    log_history: Sequence[dict[str, Any]],
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: Sequence[str] = (),
) -> None:
    """Write `README.md` with the method, base model, last metrics and versions, but no local paths or options.

    Args:
        folder: The folder in which the model is saved.
        algorithm: The algorithm's name in the registry.
        base_model: The name of the base model. It is left out if it is a local path.
        log_history: HuggingFace's log; the card shows the last value of each metric.
        model_name: The title; None: a general one.
        dataset_name: The dataset that was trained on. It is left out if it is a local path.
        tags: More tags.
    """
    data = ModelCardData(
        library_name="transformers",
        tags=list(dict.fromkeys(["generated_from_trainer", "prefrl", algorithm, *tags])),
        base_model=base_model if _is_on_hub(base_model) else None,
        datasets=[dataset_name] if dataset_name is not None and _is_on_hub(dataset_name) else None,
    )
    last: dict[str, Any] = {}
    for entry in log_history:
        last |= entry
    floats = {_cell(name): value for name, value in sorted(last.items()) if isinstance(value, float)}
    rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in floats.items())
    text = f"""---
{data.to_yaml()}
---

# {_cell(model_name or "Model trained with prefrl")}

{_PAPERS[algorithm]}

## Last logged values

| metric | value |
|---|---|
{rows}

## Versions

- prefrl {__version__}
{chr(10).join(f"- {package} {version(package)}" for package in _PACKAGES)}
"""
    path = folder / "README.md"
    path.unlink(missing_ok=True)  # it could be a link
    ModelCard(text).save(path)


def _is_on_hub(name: str) -> bool:
    return _NAME_ON_HUB.fullmatch(name) is not None and not Path(name).exists()


def _cell(text: str) -> str:
    """A name in a title or a cell of a Markdown table, where it is nothing but text."""
    return html.escape(printable(text)).replace("|", "&#124;").replace("\n", " ")
