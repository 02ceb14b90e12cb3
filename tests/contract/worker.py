"""Run by the contract tests on several processes: trains each job and stores its update and what it logged."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import torch

from prefrl import distributed
from tests import plans
from tests.contract.cases import make_trainer, update_of
from tests.process import leave_modules_uncollected

if __name__ == "__main__":
    plans.check_once()
    for text in sys.argv[1:]:
        leave_modules_uncollected()
        algorithm, options, result, checkpoint = ast.literal_eval(text)
        trainer = make_trainer(algorithm, Path(result).parent / "run", **options)
        assert trainer.args.world_size == 2, "the processes are independent"
        update = update_of(trainer, resume_from_checkpoint=checkpoint)
        if distributed.is_main():
            torch.save(update, result)
            Path(result).with_suffix(".json").write_text(json.dumps(trainer.state.log_history), encoding="utf-8")
