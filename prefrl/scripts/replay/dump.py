"""Computes a step again whose numbers were not finite, and looks for where that begins."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from prefrl import distributed
from prefrl.registry import REGISTRY
from prefrl.scripts.replay.setup import config_of, never, processing_class_of
from prefrl.trainer.base.step_dump import DumpedBatch, read_dump

if TYPE_CHECKING:
    from prefrl.run.records import Identity
    from prefrl.types import TokenBatch

__all__ = ["replay_dump"]

# Characters of a row that are shown.
_SHOWN = 200


def replay_dump(folder: Path, identity: Identity) -> None:
    """Print loss and gradient norm of each micro-batch, and the first weight, row and gradient that is not finite.

    Dropout is off. What a loss reads besides its micro-batch (running means, adaptive coefficients, the KL estimate of
    KTO) is as it is at the start of a run.

    Args:
        folder: A folder nan-step-N.
        identity: The run.
    """
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _trainer(folder, identity, scratch)
        trainer.state.global_step = int(folder.resolve().name.rpartition("-")[2]) - 1
        weight = distributed.first_non_finite(trainer.policy, trainer.args.device)
        if weight is not None:
            console.print(f"Before the step, {weight} holds NaN or infinity.")
        table, finding = Table(title=f"{folder.name}: dropout is off"), None
        for column in ("process", "micro-batch", "rows", "tokens", "loss", "gradient norm"):
            table.add_column(column, justify="right")
        for dumped in read_dump(folder):
            loss, norm = _pass(trainer, dumped.batch, dumped.num_items)
            rows, tokens = dumped.batch.num_rows, dumped.batch.num_tokens
            numbers = (f"{loss:.9g}", f"{norm:.9g}")  # as many digits as tell apart all numbers of 32 bits
            table.add_row(*map(str, (dumped.rank, dumped.number, rows, tokens)), *numbers)
            if finding is None and not (math.isfinite(loss) and math.isfinite(norm)):
                finding = _gradient(trainer) if math.isfinite(loss) else _rows(trainer, dumped)
                finding = f"Process {dumped.rank}, micro-batch {dumped.number}: {finding}"
        console.print(table)
        console.print(finding or "Every loss and every gradient is finite here.", markup=False)
        trainer.end()


def _trainer(folder: Path, identity: Identity, scratch: str) -> Any:
    algorithm = REGISTRY[str(identity.decisive["algorithm"])]
    config = config_of(folder, algorithm.name, scratch)
    rewards = identity.decisive.get("rewards")
    extra: dict[str, Any] = {"eval_dataset": {}}  # the step has its rows
    if rewards is not None:
        extra["reward_funcs"] = [never(name) for name in rewards]
    processing_class = processing_class_of(folder)
    trainer = algorithm.load_trainer()(model=str(folder), args=config, processing_class=processing_class, **extra)
    if (folder / "critic").is_dir():
        trainer.critic.load(folder / "critic")
    return trainer


def _loss(trainer: Any, batch: TokenBatch) -> torch.Tensor:
    with trainer.accelerator.autocast():
        total: torch.Tensor = trainer.full_loss(trainer.policy, batch.to(trainer.args.device)).total
    return total


def _pass(trainer: Any, batch: TokenBatch, num_items: float) -> tuple[float, float]:
    """A micro-batch's share of the loss, and the norm of its gradient; leaves the gradient on the parameters."""
    trainer.policy.zero_grad()
    loss = _loss(trainer, batch) * (1.0 / num_items)  # as in training, bit by bit
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    gradients = [p.grad for p in trainer.policy.parameters() if p.grad is not None]
    return float(loss.detach()), float(torch.nn.utils.get_total_norm(gradients))


def _gradient(trainer: Any) -> str:
    named = trainer.policy.named_parameters()
    name = next((name for name, p in named if p.grad is not None and not p.grad.isfinite().all()), None)
    return f"the loss is finite, but the gradient of {name or 'all parameters together'} is not."


def _rows(trainer: Any, dumped: DumpedBatch) -> str:
    """The first rows whose loss alone is not finite; a group stays together."""
    batch = dumped.batch
    for group in dict.fromkeys(batch.group_index):
        rows = [row for row, of in enumerate(batch.group_index) if of == group]
        with torch.no_grad():
            own = batch.select(rows)
            loss = float(_loss(trainer, own))
        if not math.isfinite(loss):
            decode = trainer.tokenizer.decode
            texts = [repr(decode(ids.tolist()))[:_SHOWN] for ids in (own.prompt_ids, own.response_ids)]
            return f"the loss of rows {rows} alone is {loss}: prompt {texts[0]}, response {texts[1]}"
    return "the loss of each group alone is finite."
