"""The greedy choice of the checkpoints of a soup."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from prefrl.models.soup_choice import Ingredient, greedy_choice


@pytest.mark.parametrize(("sign", "greater_is_better"), [(1, True), (-1, False)])
def test_a_checkpoint_that_leaves_the_metric_as_it_is_is_taken_and_one_that_makes_it_worse_is_not(
    sign: int, greater_is_better: bool
) -> None:
    metrics = {"a": 0.5, "ab": 0.5, "abc": 0.4, "abd": 0.7}

    def evaluate(folders: Sequence[Path]) -> float:
        return sign * metrics["".join(folder.name for folder in folders)]

    ranked = [
        Ingredient(Path(name), 0.0, sign * metric) for name, metric in zip("abcd", (0.5, 0.3, 0.2, 0.1), strict=True)
    ]
    soup = greedy_choice(ranked, evaluate, greater_is_better=greater_is_better)
    assert [path.name for path in soup.used] == ["a", "b", "d"]
    assert soup.metric == sign * 0.7
    assert [i.weight for i in soup.ingredients] == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert [i.trial_metric for i in soup.ingredients] == [sign * value for value in (0.5, 0.5, 0.4, 0.7)]
