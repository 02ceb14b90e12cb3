"""The beginning of a process in a test that runs several of them."""

from __future__ import annotations

import gc


def leave_modules_uncollected() -> None:
    """Leave what is loaded out of garbage collection.

    HuggingFace's Trainer collects garbage in each training, which took four fifths of the time of a small one.
    """
    gc.collect()
    gc.freeze()
