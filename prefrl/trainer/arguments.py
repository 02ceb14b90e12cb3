"""What the constructors of all trainers check before anything is loaded: that each argument is what belongs there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets

from prefrl.errors import DataError

__all__ = ["check_dataset"]


def check_dataset(name: str, dataset: Any, *, takes_several: bool = False) -> None:
    """Refuse what is no dataset.

    Args:
        name: Of the argument, for the message.
        dataset: One dataset or None.
        takes_several: Whether it may also be a mapping of names to datasets.

    Raises:
        DataError: It is a mapping where one dataset is needed, or something else.
    """
    if isinstance(dataset, Mapping) and takes_several:
        for key, part in dataset.items():
            check_dataset(f"{name}[{key!r}]", part)
    elif isinstance(dataset, Mapping):
        names = list(dataset)
        example = "train" if "train" in names or not names else names[0]
        raise DataError(
            f"{name} is a {type(dataset).__name__} with the splits {', '.join(map(repr, names)) or 'none'}: must be "
            f"one dataset. Choose a split: {name}=ds[{example!r}]"
        )
    elif dataset is not None and not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        raise DataError(
            f"{name} is a {type(dataset).__name__}: must be a datasets.Dataset or IterableDataset"
            f"{', or several by name' if takes_several else ''}. Make one of a list of rows by "
            "datasets.Dataset.from_list(rows)"
        )
