"""Run by a test as one of two processes: generates with partitioned weights, and prints the result."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from prefrl.errors import PrefrlError
from prefrl.generation.base import SamplingParams
from prefrl.models.export import PolicyWeights
from tests.vllm.client import PROMPTS, SEEDS, be_patient, generators, policy

if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    folder = Path(job["folder"])
    be_patient()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=job["rank"], world_size=2, timeout=timedelta(seconds=300)
    )
    model = policy(Path(job["model_dir"]))
    result: dict[str, Any] = {}
    with generators(model, folder, key=job["key"]) as make:
        generator = make([job["url"]])
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        weights = PolicyWeights(model)
        try:
            generator.sync(weights, version=1)
        except PrefrlError as error:
            result["refusal"] = str(error)
        generator.sync(weights, version=1)
        sampling = SamplingParams(num_samples=1, max_tokens=8, temperature=0)
        groups = generator.generate(PROMPTS, sampling, seeds=SEEDS)
        result |= {"completions": [group[0].token_ids for group in groups], "retries": generator.stats().retries}
        prompts = [PROMPTS[0], [128]] if job["rank"] == 1 else PROMPTS  # the model has no token 128
        try:
            generator.generate(prompts, sampling, seeds=SEEDS[: len(prompts)])
        except PrefrlError as error:
            result["error"] = str(error)
    print(json.dumps(result), flush=True)
