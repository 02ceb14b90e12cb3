"""Trains cases and stores the results: `worker RESULT BACKEND:CASE...`, with any number of processes.

One launch runs several backends, because imports take longer than a case. Rank 0 writes the file `RESULT`: for each
backend and case its update, its metrics and how its parameters were partitioned.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from safetensors.torch import load_file

from prefrl import distributed
from prefrl.generation.local.generator import LocalGenerator
from prefrl.trainer.base_trainer import BaseTrainer
from prefrl.trainer.online.trainer import OnlineTrainer
from prefrl.types import Completion
from tests import plans
from tests.assets import tiny_model, tiny_reward_model, tiny_tokenizer
from tests.contract.cases import dataset_of, make_trainer, model_of
from tests.distributed.backends import enter, leave_training
from tests.distributed.cases import CASES, Case
from tests.process import leave_modules_uncollected

# A case takes seconds on a quiet machine. Ranks that wait for each other for ever say where, and end.
SECONDS_FOR_A_CASE = 300


def weights_of(trainer: BaseTrainer) -> dict[str, torch.Tensor]:
    """Whole copies of all parameters, on every rank."""
    return {
        name: distributed.whole(parameter).detach().clone().float()
        for name, parameter in distributed.unwrap(trainer.model_wrapped).named_parameters()
    }


def make(name: str, case: Case, folder: Path, **options: Any) -> BaseTrainer:
    """The trainer of a case, as every rank makes it."""
    import prefrl.losses.logprobs as logprobs

    logprobs.default_chunk_size = lambda device: case.chunk or 128
    arguments: dict[str, Any] = {"max_steps": 2, **case.options, **options}
    # There is no process group before the first config.
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    num_ranks = num_processes // (options["parallelism_config"].sp_size if "parallelism_config" in options else 1)
    rows = 8 if case.rows_per_micro_batch is None else 2 * case.rows_per_micro_batch
    arguments["per_device_train_batch_size"] = rows // num_ranks
    if case.lora:
        from peft import LoraConfig

        arguments["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules=list(case.lora))
    if case.eval_rows:
        arguments.setdefault("eval_dataset", dataset_of(case.algorithm, case.eval_rows))
        arguments["per_device_eval_batch_size"] = 8
    leave_training()
    arguments["model"] = model_of(case.algorithm, **case.model)
    if case.algorithm == "distillation" or "teacher_kl_coef" in case.options:  # made before a config partitions models
        arguments.setdefault("teacher_model", tiny_model(seed=9, hidden_size=24))
    if case.by_name:
        path = str(folder / "models" / name)
        save_once(path, arguments["model"])
        arguments["model"] = path
    reward: Any = case.reward
    if case.reward_model:
        reward = str(folder / "models" / "reward")
        save_once(reward, tiny_reward_model(seed=3), tiny_tokenizer())
    return make_trainer(case.algorithm, folder / "runs" / name, reward=reward, **arguments)


def save_once(path: str, *parts: Any) -> None:
    """Write models and tokenizers, unless another backend did; every rank comes back when they are there.

    There may be no process group yet.
    """
    done = Path(path, "done")
    if os.environ.get("RANK", "0") == "0" and not done.exists():
        for part in parts:
            part.save_pretrained(path)
        done.touch()
    while not done.exists():
        time.sleep(0.01)


def record_widths(trainer: BaseTrainer) -> list[int]:
    """The tokens of a row, here, in each forward pass of a training step from now on."""
    widths: list[int] = []

    def record(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            widths.append(arguments[0].size(1))

    trainer.policy.get_input_embeddings().register_forward_pre_hook(record)
    return widths


def record_prompts(trainer: BaseTrainer) -> list[int]:
    """How many prompts are sampled from here, in each call of the generator from now on, if there is one."""
    counts: list[int] = []
    if isinstance(trainer, OnlineTrainer) and isinstance(trainer.generator, LocalGenerator):
        generate = trainer.generator.generate

        def counted(prompts: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[list[Completion]]:
            counts.append(len(prompts))
            return generate(prompts, *args, **kwargs)

        trainer.generator.generate = counted  # type: ignore[method-assign]
    return counts


def record_layers(trainer: BaseTrainer) -> list[int]:
    """Elements of the layers that are here when a forward pass of a training step begins, from now on."""
    elements: list[int] = []

    def record(*_: object) -> None:
        if torch.is_grad_enabled():
            named = trainer.policy.named_parameters()  # FSDP2 exchanges them when it gathers a layer
            elements.append(sum(distributed.num_local_elements(p) for name, p in named if ".layers." in name))

    trainer.policy.get_input_embeddings().register_forward_pre_hook(record)
    return elements


def non_finite(trainer: BaseTrainer) -> tuple[bool, bool]:
    """Whether a weight is found not finite after training, and once the last number of one is.

    DeepSpeed does not write the padding of its parts, so it may hold anything: here NaN.
    """
    model, device = trainer.model, trainer.args.device
    trained = {n: p for n, p in distributed.unwrap(trainer.model_wrapped).named_parameters() if p.requires_grad}
    for parameter in trained.values():
        if hasattr(parameter, "ds_tensor"):
            whole = distributed.whole(parameter).flatten()
            part, rank = parameter.ds_tensor, torch.distributed.get_rank(parameter.ds_process_group)
            part[max(0, whole.numel() - part.numel() * rank) :] = torch.nan
    before = distributed.first_non_finite(model, device)
    name, parameter = list(trained.items())[-1]
    lost = distributed.whole(parameter).detach().clone()
    lost.view(-1)[-1] = torch.nan
    distributed.load_whole(parameter, lost)
    return before is not None, distributed.first_non_finite(model, device) == name


def averaged(trainer: BaseTrainer) -> torch.Tensor:
    """The weights that BEMACallback has saved, if there are some. They are deleted: another backend saves its own."""
    path = Path(trainer.args.output_dir, "bema", "model.safetensors")
    if not distributed.is_main() or not path.exists():
        return torch.zeros(0)
    weights = torch.cat([weight.flatten() for weight in load_file(path).values()])
    path.unlink()
    return weights


def run(name: str, case: Case, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train a case: what a test compares."""
    started = time.perf_counter()
    trainer = make(name, case, folder, **options)
    before = weights_of(trainer)
    widths, layers, prompts = record_widths(trainer), record_layers(trainer), record_prompts(trainer)
    trainer.train()
    after = weights_of(trainer)
    parameters = list(distributed.unwrap(trainer.model_wrapped).parameters())
    own = trainer.reference and trainer.reference.own_model
    history = trainer.state.log_history
    return {
        "update": torch.cat([_change(before[key], after[key]).flatten() for key in before]),
        "widths": widths,
        "prompts": prompts,
        "layers": layers,
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "grad_norms": [entry["grad_norm"] for entry in history if "loss" in entry],
        "eval": {
            f"{key} of step {entry['step']}": value
            for entry in history
            for key, value in entry.items()
            if _is_eval_metric(key)
        },
        "averaged": averaged(trainer),
        "elements": sum(distributed.shape_of(p).numel() for p in parameters),
        "local_elements": sum(map(distributed.num_local_elements, parameters)),
        "reference_is_sharded": own and distributed.is_sharded(own),
        "type": str(trainer.accelerator.distributed_type),
        "non_finite": non_finite(trainer),
        "seconds": time.perf_counter() - started,
    }


def _change(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """0 where no bit changed: four-bit weights are kept in float tensors, some of whose numbers are NaN."""
    return torch.where(before.view(torch.int32) == after.view(torch.int32), 0.0, after - before)


def _is_eval_metric(name: str) -> bool:
    return name.startswith("eval_") and not name.endswith(("_second", "runtime")) and "time/" not in name


def main(result: Path, jobs: list[str]) -> None:
    """Run the jobs one after another."""
    plans.check_once()
    folder = result.parent
    results: dict[str, dict[str, Any]] = {}
    for job in jobs:
        faulthandler.dump_traceback_later(SECONDS_FOR_A_CASE, exit=True)
        print(f"job {job}", file=sys.stderr, flush=True)
        leave_modules_uncollected()
        backend, name = job.split(":")
        # Where precomputed scores are kept: a backend must not find those of another.
        datasets.config.HF_DATASETS_CACHE = str(folder / "datasets" / backend)
        results.setdefault(backend, {})[name] = run(name, CASES[name], folder, enter(backend, folder))
    faulthandler.cancel_dump_traceback_later()
    if distributed.is_main():
        torch.save(results, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
