"""Teachers that are not one other model: several models, of which each row has one, and the student as it is now."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from prefrl import distributed
from prefrl.losses.per_token import TokenScores, WantName
from prefrl.models.forward import Scoring, in_batch_order
from prefrl.models.reference import Reference, called_inside
from prefrl.types import SampledBatch, TokenBatch


@dataclass(frozen=True, eq=False, kw_only=True)
class AssignedBatch(SampledBatch):
    """Completions, and what scores them."""

    teacher: tuple[int, ...]  # B entries: the number of the row's teacher
    # B entries: ids of the prompt that the teacher sees. None: those of the rows.
    teacher_prompts: tuple[tuple[int, ...], ...] | None = None


class LiveTeacher(Reference):
    """The policy with its current weights, without dropout and without gradients."""

    def state_dict(self) -> dict[str, Tensor]:
        """See `Reference`; empty, because nothing is kept."""
        return {}

    def _head(self, head: nn.Module, hidden: Tensor) -> Tensor:
        return called_inside(head, hidden)

    @contextmanager
    def _in_place(self) -> Iterator[PreTrainedModel]:
        yield self._model


class Teachers:
    """Several models with the same vocabulary; in a batch that is assigned, each row has one of them.

    Hidden states are those of the row's teacher, with zeros up to the width of the widest one, and the number of the
    teacher in one more column: so each token brings along whose head makes its logits.

    Args:
        teachers: Each is a model of its own.
        names: Their names.
    """

    def __init__(self, teachers: Sequence[Reference], names: Sequence[str]) -> None:
        self.teachers, self.names = teachers, names
        self._models = [teacher.own_model for teacher in teachers if teacher.own_model is not None]
        self._widths = [model.config.get_text_config().hidden_size for model in self._models]
        self.own_model = self._models[0]

    def scores(
        self, batch: TokenBatch, scoring: Scoring, *, max_tokens: int | None = None, want: Collection[WantName] = ()
    ) -> TokenScores:
        """See `Reference.scores`. All ranks must call it: each runs every teacher, even those of none of its rows."""
        of_row = batch.teacher if isinstance(batch, AssignedBatch) else (0,) * batch.num_rows
        found: list[tuple[TokenBatch, TokenScores]] = []
        for number, teacher in enumerate(self.teachers):
            rows = [row for row, own in enumerate(of_row) if own == number]
            part = batch.select(rows)
            scores = teacher.scores(part, scoring, max_tokens=max_tokens, want=want)
            if "hidden" in scores.wanted:
                scores = TokenScores(scores.logprobs, {**scores.wanted, "hidden": self._marked(scores.hidden, number)})
            found.append((part.replace(group_index=tuple(rows)), scores))
        with_rows = [(part, scores) for part, scores in found if part.num_rows] or found[:1]
        if len(with_rows) == 1:
            return with_rows[0][1]
        parts = [part for part, _ in with_rows]
        names = list(with_rows[0][1].wanted)
        return TokenScores(
            in_batch_order(batch, parts, [scores.logprobs for _, scores in with_rows]),
            {name: in_batch_order(batch, parts, [scores.wanted[name] for _, scores in with_rows]) for name in names},
        )

    def _marked(self, hidden: Tensor, number: int) -> Tensor:
        wide = pad(hidden.detach(), (0, max(self._widths) + 1 - hidden.shape[1]))
        wide[:, -1] = number
        return wide

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Reference.logits`; from the hidden states of `scores`."""
        parts, places = [], []
        for number, (teacher, model, width) in enumerate(zip(self.teachers, self._models, self._widths, strict=True)):
            rows = (hidden[:, -1] == number).nonzero().squeeze(1)
            # Ranks that share weights must call a head equally often, even without a token for it.
            if len(rows) or not len(hidden) or distributed.is_sharded(model):
                parts.append(teacher.logits(hidden[rows, :width].to(model.dtype)))
                places.append(rows)
        return parts[0] if len(parts) == 1 else torch.cat(parts)[torch.cat(places).argsort()]

    def fingerprint(self) -> str:
        """Those of all teachers, with their names."""
        pairs = zip(self.names, self.teachers, strict=True)
        return " ".join(f"{name}={teacher.fingerprint()}" for name, teacher in pairs)
