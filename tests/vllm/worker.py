"""Run by a test on several processes: trains on a server and stores the update."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from prefrl import distributed
from tests.contract.cases import update_of
from tests.vllm.client import be_patient
from tests.vllm.test_training import online

if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    server = SimpleNamespace(url=job["url"], model_dir=Path(job["model_dir"]))
    result = Path(job["result"])
    be_patient()
    trainer = online(result.parent / "run", server, max_steps=2, per_device_train_batch_size=8)
    assert trainer.args.world_size == 2, "the processes are independent"
    update = update_of(trainer)
    if distributed.is_main():
        torch.save(update, result)
