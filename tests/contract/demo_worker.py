"""`prefrl demo` with another number of steps of GRPO: `demo_worker FOLDER SEED STEPS`.

A process of its own, because the demo silences libraries. `FOLDER/after_sft.pt` is what it knows before GRPO.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from prefrl.scripts import demo
from prefrl.scripts.main import main


def keep_weights(folder: str) -> None:
    """Write the weights with which GRPO begins."""
    grpo = demo.grpo

    def watched(model: Any, *arguments: Any, **options: Any) -> None:
        torch.save(model.state_dict(), f"{folder}/after_sft.pt")
        grpo(model, *arguments, **options)

    demo.grpo = watched


if __name__ == "__main__":
    directory, seed, steps = sys.argv[1:]
    demo.GRPO_STEPS = int(steps)
    keep_weights(directory)
    sys.exit(main(["demo", "--seed", seed, "--output_dir", directory]))
