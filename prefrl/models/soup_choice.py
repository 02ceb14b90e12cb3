"""Which checkpoints go into a soup.

Source: Wortsman et al. 2022, arXiv 2203.05482.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ingredient:
    """A checkpoint and its share of a soup."""

    checkpoint: Path
    weight: float  # its share; all shares add up to 1; 0: not used
    metric: float | None = None  # of the checkpoint alone
    trial_metric: float | None = None  # of the greedy soup that included it on trial; None: it was not tried


@dataclass(frozen=True, slots=True)
class Soup:
    """The ingredients of an average, and its metric."""

    ingredients: list[Ingredient]
    metric: float | None  # None: not evaluated

    @property
    def used(self) -> list[Path]:
        """The checkpoints that are in it."""
        return [ingredient.checkpoint for ingredient in self.ingredients if ingredient.weight]

    def save(self, folder: Path, *, method: str, metric: str | None) -> None:
        """Write what it is made of into a folder, as `soup.json`."""
        record = {
            "method": method,
            "metric": metric,
            "soup": self.metric,
            "checkpoints": [dataclasses.asdict(i) | {"checkpoint": str(i.checkpoint)} for i in self.ingredients],
        }
        (folder / "soup.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def greedy_choice(
    ranked: Sequence[Ingredient], evaluate: Callable[[Sequence[Path]], float], *, greater_is_better: bool
) -> Soup:
    """Choose checkpoints one by one, from the best to the worst, that do not make their uniform soup worse.

    Args:
        ranked: With their metrics, best first.
        evaluate: The metric of the uniform soup of some of them.
        greater_is_better: Whether a greater metric is better.

    Returns:
        All of them, with their shares and the metrics of the soups that were tried.

    Source: algorithm 1, greedy soup; equal metrics are accepted, as there.
    """
    first, *others = ranked
    used, best = [first.checkpoint], first.metric
    trials = [best]
    for ingredient in others:
        metric = evaluate([*used, ingredient.checkpoint])
        assert best is not None
        if metric >= best if greater_is_better else metric <= best:
            used, best = [*used, ingredient.checkpoint], metric
        trials.append(metric)
    ingredients = [
        dataclasses.replace(ingredient, weight=(ingredient.checkpoint in used) / len(used), trial_metric=trial)
        for ingredient, trial in zip(ranked, trials, strict=True)
    ]
    return Soup(ingredients, metric=best)


def check_folders(checkpoints: Sequence[Path], output_dir: Path, top_k: int | None = None) -> None:
    """Refuse what cannot be averaged, as far as that can be known without reading the checkpoints.

    Raises:
        ConfigError: There are too few checkpoints, one is missing, or `output_dir` holds a model.
    """
    if len(checkpoints) < 2:
        raise ConfigError(f"checkpoints={[str(f) for f in checkpoints]}: must be at least two for an average")
    if top_k is not None and top_k < 2:
        raise ConfigError(f"top_k={top_k}: must be at least 2, or None for all checkpoints")
    for folder in checkpoints:
        if not folder.is_dir():
            raise ConfigError(f"checkpoint {str(folder)!r}: there is no such folder")
    if any(output_dir.glob("*.safetensors")):
        raise ConfigError(f"output_dir={str(output_dir)!r}: already holds a model. Choose another folder.")
