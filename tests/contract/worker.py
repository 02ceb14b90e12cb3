"""Run by the contract tests on several processes: trains, from a checkpoint if one is named, and stores the update."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import torch

from prefrl import distributed
from tests.contract.cases import make_trainer, update_of
from tests.leave import leave

if __name__ == "__main__":
    name, options, result, *checkpoint = sys.argv[1:]
    trainer = make_trainer(name, Path(result).parent / "run", **ast.literal_eval(options))
    assert trainer.args.world_size == 2, "torchrun started independent processes"
    update = update_of(trainer, resume_from_checkpoint=checkpoint[0] if checkpoint else None)
    if distributed.is_main():
        torch.save(update, result)
    leave(0)
