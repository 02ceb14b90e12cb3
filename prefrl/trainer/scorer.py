"""Computes the scores of tokens: all forward passes of the policy, the reference and the critic over a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import torch

from prefrl import distributed
from prefrl.losses.kl import ReferenceLogits
from prefrl.losses.top_logprobs import ReferenceDistribution, TopLogprobs
from prefrl.models.forward import Scoring, in_pieces, scores_in_pieces, token_logprobs
from prefrl.models.modes import eval_mode
from prefrl.models.scoring import inside, packed, prepare_for_scoring, unpacked
from prefrl.trainer.memory import SCORING, explained, size_of

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from prefrl.generation.vllm.teacher import TeacherServers
    from prefrl.losses.per_token import TokenScores, WantName
    from prefrl.models.critic import Critic
    from prefrl.models.reference import Reference
    from prefrl.models.routers import RouterRecord
    from prefrl.models.teachers import Teachers
    from prefrl.trainer.base_config import BaseConfig
    from prefrl.trainer.steps import StepAccount
    from prefrl.types import TokenBatch

# What is found out about the tokens of a batch before the first update from it, in nats but for the last two:
# log-probs, entropies and log sum p^2 of the policy, log-probs of reference and teacher; [N] values of the critic;
# [N, h] the last hidden states of the reference, or of the teacher, to compute its full distribution; [N, k] the
# likeliest tokens of a teacher on servers, and their log-probs; the experts that the policy's routers chose meanwhile,
# see `TokenBatch`, which nobody has to ask for.
ScoreNeed = Literal[
    "old_logprobs",
    "entropies",
    "log_collision",
    "ref_logprobs",
    "teacher_logprobs",
    "values",
    "ref_hidden",
    "top_ids",
    "top_logprobs",
    "prompt_routes",
    "response_routes",
]

_PolicyScore = Literal["entropy", "log_collision"]
_OF_POLICY: dict[ScoreNeed, _PolicyScore] = {"entropies": "entropy", "log_collision": "log_collision"}
Frozen = Literal["reference", "teacher"]
_OF_FROZEN: dict[Frozen, ScoreNeed] = {"reference": "ref_logprobs", "teacher": "teacher_logprobs"}
TOP: frozenset[ScoreNeed] = frozenset({"top_ids", "top_logprobs"})
_NOT_OF_POLICY: frozenset[ScoreNeed] = frozenset({*_OF_FROZEN.values(), "ref_hidden", *TOP})

# A no-grad pass keeps the activations of one layer at a time, so it may hold this many times more tokens than a
# training pass, which keeps those of all layers.
_NO_GRAD_TOKENS = 4

Batch = TypeVar("Batch", bound="TokenBatch")


@dataclass(frozen=True, slots=True)
class Scores:
    """What passes without gradients found out about the tokens of a batch: `scores.old_logprobs`, see `ScoreNeed`.

    Raises:
        ValueError: A score is read that was not needed.
    """

    found: Mapping[ScoreNeed, Tensor]  # those that were needed

    def with_routes(self, batch: Batch) -> Batch:
        """The rows that were scored, with the experts of that pass if it recorded them."""
        if "prompt_routes" not in self.found:
            return batch
        return batch.replace(prompt_routes=self.prompt_routes, response_routes=self.response_routes)

    def __getattr__(self, name: str) -> Tensor:
        """A score."""
        if name not in get_args(ScoreNeed):
            raise AttributeError(name)
        if (score := cast("ScoreNeed", name)) not in self.found:
            raise ValueError(f"{name} was not computed, only {sorted(self.found)}. Name it among the needs.")
        return self.found[score]


@dataclass
class Scorer:
    """Scores batches under a trainer's models. Log-probs are at the temperature that completions are sampled with."""

    args: BaseConfig
    accelerator: Any
    account: StepAccount
    policy: Callable[[], PreTrainedModel]  # without the backend's wrapper
    reference: Reference | Teachers | None = None
    critic: Critic | None = None
    routers: RouterRecord | None = None  # records the passes of `scores`, if it is set
    teacher: Reference | None = None  # a further model beside the reference
    teacher_servers: TeacherServers | None = None  # of a teacher that is not here
    compared: Frozen = "reference"  # whose whole distributions `scores` compares
    beta: float = 1.0  # which divergence from it is computed, see `losses.kl.divergence`

    def __post_init__(self) -> None:
        args = self.args
        self.scoring = Scoring(args.scoring_temperature, args.scoring_truncation, args.forward_plan)

    @property
    def frozen(self) -> dict[Frozen, Reference | Teachers]:
        """The models beside the policy that there are."""
        both: dict[Frozen, Reference | Teachers | None] = {"reference": self.reference, "teacher": self.teacher}
        return {name: model for name, model in both.items() if model is not None}

    @property
    def phases(self) -> list[str]:
        """Those of a step in which others than the policy score."""
        return [*self.frozen, *(["teacher"] if self.teacher_servers is not None else [])]

    # With gradients.

    def scores(
        self,
        model: nn.Module,
        batch: TokenBatch,
        want: Sequence[WantName],
        *,
        ref_hidden: Tensor | None = None,
        top: TopLogprobs | None = None,
    ) -> TokenScores:
        """[N] scores of the response tokens under `model`: the policy, with or without the backend's wrapper.

        Args:
            model: Runs in its current mode.
            batch: At least one row.
            want: What to compute besides log-probs.
            ref_hidden: [N, h] the hidden states of the model that is compared, for `divergence`.
            top: What is known of a model that is compared and is not here, for `divergence`.
        """
        reference: ReferenceDistribution | None = top
        if ref_hidden is not None:
            reference = ReferenceLogits(ref_hidden, self.frozen[self.compared].logits, self.beta)
        return token_logprobs(model, batch, **vars(self.scoring), want=want, reference=reference, routers=self.routers)

    def scores_and_values(
        self,
        model: nn.Module,
        batch: TokenBatch,
        critic: Critic,
        want: Sequence[WantName],
        *,
        ref_hidden: Tensor | None = None,
    ) -> tuple[TokenScores, Tensor]:
        """[N] scores of the policy and [N] values of the critic, in one forward call of the model."""

        def task() -> dict[str, Tensor]:
            scores = self.scores(model, batch, (*want, *critic.wants), ref_hidden=ref_hidden)
            values = critic.values(batch, hidden=scores.wanted.get("hidden"))
            return packed(scores.without("hidden"), values=values)

        divergence = () if ref_hidden is None else ("divergence",)
        scores, (values,) = unpacked(inside(model, task), {*want, *divergence}, "values")
        return scores, values

    # Without gradients. All ranks must call these, even those without rows.

    def needed(self, batch: TokenBatch, needs: Collection[ScoreNeed], *, rows_per_pass: int) -> Scores:
        """The scores that `needs` names: at most one pass each of the policy, the reference and the teacher.

        A teacher on servers gets one request for each response.

        Args:
            batch: The rows to score, on the host.
            needs: Those of the policy are computed with its current weights, without dropout.
            rows_per_pass: Rows in a training pass; see `budget`.
        """
        max_tokens = self.budget(batch.largest_chunk(rows_per_pass))
        found: dict[ScoreNeed, Tensor] = {}
        if set(needs) - _NOT_OF_POLICY:
            found |= self._recorded(batch, lambda rows: self._of_policy(rows, needs, max_tokens=max_tokens))
        for frozen, need in _OF_FROZEN.items():
            want: tuple[WantName, ...] = ("hidden",) if "ref_hidden" in needs and frozen == self.compared else ()
            if want or need in needs:
                scores = self.of_reference(batch, frozen, max_tokens=max_tokens, want=want)
                found[need] = scores.logprobs
                if want:
                    found["ref_hidden"] = scores.hidden
        if set(needs) & TOP:
            assert self.teacher_servers is not None
            with self.account.phase("teacher"):
                top = self.teacher_servers.top_logprobs(batch)
            found |= {"top_ids": top.ids, "top_logprobs": top.logprobs}
        return Scores(found)

    def _recorded(
        self, batch: TokenBatch, score: Callable[[TokenBatch], dict[ScoreNeed, Tensor]]
    ) -> dict[ScoreNeed, Tensor]:
        """The scores of the policy and, if its own choices are replayed, the experts that its routers chose."""
        replay = prepare_for_scoring(self.policy()).replay
        if replay is None or not replay.records:
            return score(batch)
        with replay.recording(batch) as record:
            found = score(record.batch)
        prompts, responses = record.routes(replay)
        return found | {"prompt_routes": prompts, "response_routes": responses}

    def _of_policy(
        self, batch: TokenBatch, needs: Collection[ScoreNeed], *, max_tokens: int
    ) -> dict[ScoreNeed, Tensor]:
        wanted = {need: score for need, score in _OF_POLICY.items() if need in needs}
        if "values" in needs:
            return self._with_values(batch, wanted, max_tokens=max_tokens)
        scores = self.of_policy(batch, max_tokens=max_tokens, want=list(wanted.values()))
        return {"old_logprobs": scores.logprobs, **{need: scores.wanted[want] for need, want in wanted.items()}}

    def _with_values(
        self, batch: TokenBatch, wanted: Mapping[ScoreNeed, _PolicyScore], *, max_tokens: int
    ) -> dict[ScoreNeed, Tensor]:
        """Scores of the policy and values from one pass, because the critic may read the policy's hidden states."""
        assert self.critic is not None
        policy, critic = self.policy(), self.critic

        def score(piece: TokenBatch) -> Tensor:
            scores, values = self.scores_and_values(policy, piece, critic, list(wanted.values()))
            return torch.stack([scores.logprobs, values, *(scores.wanted[name] for name in wanted.values())], 1)

        with self._pass("old_policy", batch), eval_mode(policy), self.accelerator.autocast():
            columns = in_pieces(policy, score, batch.to(self.args.device), max_tokens=max_tokens).to(batch.device)
        names: list[ScoreNeed] = ["old_logprobs", "values", *wanted]
        return dict(zip(names, columns.unbind(1), strict=True))

    @contextmanager
    def _pass(self, kind: Literal["old_policy"] | Frozen, batch: TokenBatch) -> Iterator[None]:
        """Context of a pass that scores a batch."""
        model = "policy" if kind == "old_policy" else kind
        work = explained(lambda: f"scoring a batch with {size_of(batch)} under the {model}", self.args, SCORING)
        with work, self.account.phase(kind, kind, [batch]):
            yield

    def of_reference(
        self,
        batch: TokenBatch,
        frozen: Frozen = "reference",
        *,
        max_tokens: int | None = None,
        want: Sequence[WantName] = (),
    ) -> TokenScores:
        """[N] scores under the reference or teacher, in passes of at most `max_tokens`; None: the token budget."""
        reference = self.reference if frozen == "reference" else self.teacher
        assert reference is not None
        if batch.prompt_routes is not None:  # it is another network, which chooses experts itself
            batch = batch.replace(prompt_routes=None, response_routes=None)
        usable = nullcontext() if reference.own_model is not None else distributed.usable(self.policy())
        with self._pass(frozen, batch), self.accelerator.autocast(), usable:
            scores = reference.scores(
                batch.to(self.args.device),
                self.scoring,
                max_tokens=max_tokens or self.args.max_tokens_per_micro_batch,
                want=want,
            )
        return scores.to(batch.device)

    def of_policy(
        self, batch: TokenBatch, *, max_tokens: int | None = None, want: Sequence[WantName] = ()
    ) -> TokenScores:
        """[N] scores under the current policy, without dropout; see `of_reference`."""
        policy = self.policy()
        with (
            self._pass("old_policy", batch),
            eval_mode(policy),
            self.accelerator.autocast(),
            distributed.usable(policy),
        ):
            scores = scores_in_pieces(
                policy,
                batch.to(self.args.device),
                self.scoring,
                max_tokens=max_tokens or self.args.max_tokens_per_micro_batch,
                want=want,
            )
        return scores.to(batch.device)

    def budget(self, with_gradients: int) -> int:
        """Most forward tokens of a no-grad pass, if the largest training pass has `with_gradients` of them."""
        # With either option, a training pass keeps hardly more activations than a no-grad pass.
        is_lean = self.args.activation_checkpointing or self.args.activation_offloading
        factor = 1 if is_lean else _NO_GRAD_TOKENS
        return factor * (self.args.max_tokens_per_micro_batch or with_gradients)
