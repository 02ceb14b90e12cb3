"""What training passes find of each token, in files beside the journal: `prefrl watch` colors tokens by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from prefrl import distributed
from prefrl.errors import CheckpointError
from prefrl.options.policy_gradient import PolicyGradientOptions
from prefrl.rollout.journal import write_table
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.parts import Part, Run
from prefrl.types import LossOutput, ReadyBatch, TokenBatch

# Fields of a batch that are written; those that the loss does not read are not there.
_OF_BATCH = ("response_ids", "sampling_logprobs", "advantages", "ref_logprobs", "teacher_logprobs")


def token_record(args: BaseConfig) -> TokenRecord | None:
    """What keeps the values of tokens, if the options say so."""
    if not isinstance(args, PolicyGradientOptions) or not args.journal_tokens:
        return None
    return TokenRecord(Path(args.output_dir, "completions"), keep=args.journal_keep)


class TokenRecord(Part):
    """Writes the tokens of each optimizer step to `tokens_<step>.parquet`, where `<step>` counts the steps before it.

    The log-probs are those of the training pass, so they cost no pass, and completions without a gradient, which are
    not run, are not there. Nothing reads the files but people and the page about the run: a resumed run writes them
    anew.

    Args:
        folder: That of the journal.
        keep: Number of generation batches whose steps are kept.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep
        # The micro-batches of a step on this process; None: losses are those of an evaluation or a trial.
        self._found: list[tuple[TokenBatch, dict[str, Tensor]]] | None = None
        self._files: list[Path] = []  # of this process, in order

    def begin(self, run: Run) -> None:
        """Find the files of earlier steps, and delete those of steps that follow, which will be written anew."""
        files = sorted(self._folder.glob(f"tokens_[0-9]*{self._suffix()}"), key=_step_of)
        self._files = [path for path in files if _step_of(path) < run.plan.position]
        for path in files[len(self._files) :]:
            path.unlink(missing_ok=True)

    def before_step(self, run: Run) -> None:
        """See `Part`."""
        self._found = []

    def around_loss(self, run: Run, batch: TokenBatch, compute: Callable[[], LossOutput]) -> LossOutput:
        """See `Part`."""
        output = compute()
        if self._found is not None and isinstance(batch, ReadyBatch) and output.logprobs is not None:
            values = {name: value for name, value in batch.tensors().items() if name in _OF_BATCH}
            self._found.append((batch, values | {"logprobs": output.logprobs}))
        return output

    def gradients(self, run: Run, model: nn.Module) -> None:
        """Write what was found, now that all passes of the step are done.

        Raises:
            CheckpointError: It cannot be written.
        """
        found, self._found = self._found, None
        if not found or distributed.place_in_team() > 0:
            return
        path = self._path(run)
        try:
            write_table(_table(found, run=run.run_folder.run, step=run.plan.position), path)
        except OSError as error:
            raise CheckpointError(
                f"the values of tokens cannot be written to {path.parent}: {error}. Free space, or set "
                "journal_tokens=False, then resume with resume_from_checkpoint=True."
            ) from error
        self._files.append(path)
        while len(self._files) > self._keep * run.plan.unit:
            self._files.pop(0).unlink(missing_ok=True)

    def _path(self, run: Run) -> Path:
        return self._folder / f"tokens_{run.plan.position:05d}{self._suffix()}"

    def _suffix(self) -> str:
        rank, size = distributed.rank(), distributed.world_size()
        return ".parquet" if size == 1 else f"_rank{distributed.rank_in_names(rank, size)}of{size}.parquet"


def _step_of(path: Path) -> int:
    return int(path.stem.split("_")[1])


def _table(found: list[tuple[TokenBatch, dict[str, Tensor]]], *, run: str, step: int) -> pa.Table:
    """A row for each response, with lists of its tokens' values."""
    batches = [batch for batch, _ in found]
    lengths = np.array([length for batch in batches for length in batch.response_lengths])
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int32())
    columns: dict[str, pa.Array] = {
        "group": pa.array([batch.group_index[row] for batch in batches for row in batch.response_row]),
        "num_before": pa.array(list(chain.from_iterable(batch.context_lengths for batch in batches)), pa.int32()),
    }
    for name in found[0][1]:
        dtype = torch.int32 if name == "response_ids" else torch.float32
        values = torch.cat([of_batch[name].to(dtype) for _, of_batch in found]).cpu().numpy()
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
    return pa.table(columns).replace_schema_metadata({b"prefrl": json.dumps({"run": run, "step": step}).encode()})
