"""The data types of prefrl: completions, rollouts, the stages of a flat batch, and losses.

The class of a batch is its stage, and every field of a stage is set in all its batches. What only one algorithm adds
is a subclass next to that algorithm.

Shape letters used in every file: N response tokens of a flat batch, B rows, R responses, P prompts, G completions of a
prompt, K rewards, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, Self

import torch
from torch import Tensor

from prefrl.forest import Forest
from prefrl.metrics import Metric

# Why a completion ended: an end token, a stop string, the limit of tokens, or the server gave it up.
FinishReason = Literal["stop", "stop_string", "length", "abort"]
# Why an episode ended: the model called no tool and got no answer; max_turns or max_tool_calling_iterations;
# max_completion_length; the model's or the server's longest context; a tool or the environment said that it is over;
# a limit was reached right after a call that could not be read; episode_timeout; the environment failed.
StopReason = Literal[
    "stop", "max_turns", "max_tokens", "context", "tool_done", "parse_error", "timeout", "environment_error"
]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a generator returns for one sample. All lists have one entry per token."""

    token_ids: list[int]
    finish_reason: FinishReason
    # Nats, under the distribution that the token was sampled from.
    logprobs: list[float]
    # False for tokens of tools and environments, which the policy did not choose.
    trainable: list[bool]
    # Optimizer step of the weights that sampled each token.
    policy_versions: list[int]
    # [S, L, k] the experts that the L routers of a mixture chose for the last S tokens that were run. All that were
    # run are those that were sent, and the completion's without the last one; of a turn that continues another one,
    # only what is new is kept. See `models.router_replay`. None: they were not recorded.
    routes: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to the sampler and its answer. A trained row is always ids that were sent and ids that came back."""

    sent_ids: list[int]
    completion: Completion


@dataclass(slots=True)
class Episode:
    """What tools and the environment did in a rollout."""

    kind: str  # name of the environment's class; "tools" without one
    stop_reason: StopReason
    turn_rewards: list[float]  # of the environment's observations, one for each turn
    num_calls: int = 0
    num_failed_calls: int = 0  # that could not be read or run
    reward: float | None = None  # of the environment, with those of the turns; None: it has none
    rewards: Mapping[str, float] = field(default_factory=dict)  # the parts of `reward` that have names
    environment: Any = None  # until the rollout is scored
    result: Any = None  # that an agent returned for the rewards
    num_sampled: int = 0  # tokens that were sampled for it
    # Of these, tokens that stand in none of its turns: of tries that failed, and of answers that came after its end.
    num_dropped: int = 0
    # Of an agent, for each turn: its messages, since `Rollout.text` has those of one conversation only; and the number
    # of the turn that it goes on from, -1 if it begins a conversation.
    said: list[Any] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Rollout:
    """What the policy did with one prompt, the dataset row that the prompt comes from, and its rewards."""

    turns: list[Turn]  # in order
    row: Mapping[str, Any]
    # Completions of one prompt share this number, which is unique over all ranks of a generation batch.
    group: int
    prompt: Any = None  # text or messages, as the rewards saw it
    text: Any = None  # the completion: text, or a list with one assistant message
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float = float("nan")
    advantage: float = float("nan")
    greedy_reward: float = float("nan")  # total of the greedy completion of the same prompt, if there is one
    episode: Episode | None = None  # what tools and the environment did; None: there are none
    images: Images | None = None  # of the prompt, as the model reads them; None: it has none, or they are not read yet
    # What follows from the turns and the episode, found at construction.
    prompt_ids: list[int] = field(init=False)  # the ids that were sent first
    sampled_ids: list[int] = field(init=False)  # all ids that were sampled
    # Why the last completion ended; "length" also if an episode was cut off at a limit of tokens or time.
    finish_reason: FinishReason = field(init=False)
    has_failed: bool = field(init=False)  # the environment failed, so that there is nothing to learn from

    def __post_init__(self) -> None:
        """Find what follows from the turns and the episode."""
        self.prompt_ids = self.turns[0].sent_ids
        self.sampled_ids = self.turns[0].completion.token_ids
        if len(self.turns) > 1:
            self.sampled_ids = [token for turn in self.turns for token in turn.completion.token_ids]
        self.finish_reason, self.has_failed = self.turns[-1].completion.finish_reason, False
        if self.episode is not None:
            if self.episode.stop_reason in ("max_tokens", "context", "timeout"):
                self.finish_reason = "length"
            self.has_failed = self.episode.stop_reason == "environment_error"

    @property
    def sampling_logprobs(self) -> list[float]:
        """Nats, of `sampled_ids`."""
        return [value for turn in self.turns for value in turn.completion.logprobs]

    @property
    def policy_versions(self) -> list[int]:
        """Optimizer step of the weights that sampled each of `sampled_ids`."""
        return [version for turn in self.turns for version in turn.completion.policy_versions]


@dataclass(frozen=True, eq=False)
class Images:
    """The images of a sequence of tokens, as a model reads them: what its processor returned besides the tokens.

    They stay on the host until a forward pass lays them out.
    """

    inputs: Mapping[str, Tensor]  # keyword arguments of the model's forward, such as `pixel_values`
    # Start and stop of each run of placeholder tokens, counted from the first token of the sequence, in order.
    runs: tuple[tuple[int, int], ...]
    # For servers, which read images with processors of their own: PIL images in RGB, and the tokens of the sequence
    # with a single placeholder for each image. Only prompts that are sampled from have them.
    pictures: tuple[Any, ...] = ()
    unexpanded_ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenBatch(Forest):
    """Rows of different lengths laid end to end, without padding; every prompt is stored once.

    `Forest` says which response belongs to which row and follows which prompt. Outside of episodes, a row is one
    response.

    Log-probs, losses and advantages exist for response tokens only, so every `[N]` tensor is aligned with
    `response_ids`. Lengths and indices are host integers, so reading them never waits for a device.

    A subclass is a stage. Its tensors have one entry for each response token, and its tuples one for each row.
    """

    prompt_ids: Tensor  # [sum(prompt_lengths)] int64
    response_ids: Tensor  # [N] int64
    trainable: Tensor  # [N] bool: tokens that have a loss
    # B entries: trainable tokens of each row, counted at construction; they determine shapes in the forward pass.
    trainable_counts: tuple[int, ...] = ()
    # P entries: the images of each root prompt and of what continues it; None: it has none. (): no prompt has any.
    images: tuple[Images | None, ...] = ()
    # [sum(prompt_lengths), L, k] and [N, L, k] the experts that the routers of a mixture use, which may be unknown,
    # see `unknown_routes`; None: the routers choose.
    prompt_routes: Tensor | None = None
    response_routes: Tensor | None = None

    # What follows from these, found at construction.
    device: torch.device = field(init=False)
    num_trainable: int = field(init=False)  # M, tokens that have a loss
    has_images: bool = field(init=False)  # whether some prompt has images

    def __post_init__(self) -> None:
        """Count the trainable tokens, unless the counts were given, and find out what follows from the fields."""
        super().__post_init__()
        facts = vars(self)  # the class is frozen
        facts["device"] = self.response_ids.device
        if len(self.trainable_counts) != self.num_rows:
            counts = torch.zeros(self.num_rows, dtype=torch.long, device=self.device)
            counts.index_add_(0, self.row_index, self.trainable.long())
            facts["trainable_counts"] = tuple(counts.tolist())
        facts["num_trainable"] = sum(self.trainable_counts)
        facts["has_images"] = any(images is not None for images in self.images)

    def images_of(self, response: int) -> Images | None:
        """The images before and in a response."""
        return self.images[self.contexts[response][0]] if self.images else None

    @cached_property
    def row_index(self) -> Tensor:
        """[N] int64: the row of each response token."""
        rows, lengths = torch.tensor([self.response_row, self.response_lengths], dtype=torch.long)
        index = torch.repeat_interleave(rows, lengths, output_size=self.num_tokens)
        return index.to(self.device, non_blocking=True)

    @cached_property
    def trainable_positions(self) -> Tensor:
        """[M] int64: positions of the tokens that have a loss. Their number is known: nothing waits for the device."""
        if self.num_trainable == self.num_tokens:
            return torch.arange(self.num_tokens, device=self.device)
        return torch.nonzero_static(self.trainable, size=self.num_trainable).squeeze(1)

    @cached_property
    def texts(self) -> list[Tensor]:
        """R entries: the token ids of each response's context and of the response."""
        prompts = torch.split(self.prompt_ids, list(self.prompt_lengths))
        responses = torch.split(self.response_ids, list(self.response_lengths))
        return [
            torch.cat([*(prompts[prompt] for prompt in context), response])
            for context, response in zip(self.contexts, responses, strict=True)
        ]

    def given(self) -> dict[str, Any]:
        """The fields that a batch is made of, by name, without those that follow from others."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}

    @classmethod
    def of(cls, batch: TokenBatch, **more: Any) -> Self:
        """The same rows in this stage: the fields that both stages have, and those in `more`."""
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{**{name: value for name, value in batch.given().items() if name in names}, **more})

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields replaced."""
        if "trainable" in changes:
            changes.setdefault("trainable_counts", ())
        return dataclasses.replace(self, **changes)

    def to(self, device: torch.device | str) -> Self:
        """The batch with all tensors on `device`: itself, if they are there."""
        found = self.tensors()
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in found.items()}
        if all(moved[name] is tensor for name, tensor in found.items()):
            return self
        return dataclasses.replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields that are set, by name. All but the prompts' have an entry for each response token."""
        return {name: value for name, value in self.given().items() if isinstance(value, torch.Tensor)}

    def on_device(self, values: Sequence[float]) -> Tensor:
        """Host numbers as a tensor on the batch's device, without waiting for the device."""
        return torch.tensor(values).to(self.device, non_blocking=True)

    def select(self, rows: Sequence[int]) -> Self:
        """The given rows, in the given order, without the prompts that none of them uses; itself, if that is all.

        Raises:
            IndexError: A row number is outside 0 .. B-1.
        """
        bad = [row for row in rows if not 0 <= row < self.num_rows]
        if bad:
            raise IndexError(f"rows {bad} are outside 0..{self.num_rows - 1}")
        prompts = self.used_prompts(rows)
        if [*rows] == [*range(self.num_rows)] and prompts == [*range(self.num_prompts)]:
            return self
        position = {-1: -1, **{prompt: i for i, prompt in enumerate(prompts)}}
        responses = [response for row in rows for response in self.responses[row]]
        layout: dict[str, Any] = {
            "prompt_ids": _take_segments(self.prompt_ids, self.prompt_lengths, prompts),
            "prompt_lengths": tuple(self.prompt_lengths[prompt] for prompt in prompts),
            "prompt_parent": tuple(position[self.prompt_parent[prompt]] for prompt in prompts),
            "images": tuple(self.images[prompt] for prompt in prompts) if self.images else (),
            "prompt_index": tuple(position[self.prompt_index[response]] for response in responses),
            "response_lengths": tuple(self.response_lengths[response] for response in responses),
            "response_row": tuple(i for i, row in enumerate(rows) for _ in self.responses[row]),
        }
        if self.prompt_routes is not None:
            layout["prompt_routes"] = _take_segments(self.prompt_routes, self.prompt_lengths, prompts)
        others: dict[str, Any] = {}
        for name, value in self.given().items():
            if name not in layout and isinstance(value, torch.Tensor):
                others[name] = _take_segments(value, self.response_lengths, responses)
            elif name not in layout and isinstance(value, tuple):
                others[name] = tuple(value[row] for row in rows)
        return dataclasses.replace(self, **layout, **others)

    def with_routes(self, like: Tensor) -> Self:
        """The batch, with unknown routes like others if it has none."""
        if self.prompt_routes is not None:
            return self
        prompts, responses = (unknown_routes(like, len(ids)) for ids in (self.prompt_ids, self.response_ids))
        return self.replace(prompt_routes=prompts, response_routes=responses)

    def chunks(self, rows_per_chunk: int) -> list[Self]:
        """Consecutive batches of at most `rows_per_chunk` rows."""
        starts = range(0, self.num_rows, rows_per_chunk)
        return [self.select(range(start, min(start + rows_per_chunk, self.num_rows))) for start in starts]

    def largest_chunk(self, rows_per_chunk: int) -> int:
        """Forward tokens of the largest of `chunks`, which are not made; 1 without rows."""
        starts = range(0, self.num_rows, rows_per_chunk)
        costs = (self.forward_tokens(range(start, min(start + rows_per_chunk, self.num_rows))) for start in starts)
        return max(costs, default=1)

    def split(self, token_budget: int, *, whole_groups: bool = False) -> list[Self]:
        """Split into batches of at most `token_budget` forward tokens, as few and as even as a greedy fit finds.

        Rows that share a prompt stay together where they fit, so that their prompt is computed once. A row is never
        torn apart: one above the budget becomes its own batch.

        Args:
            token_budget: Limit on a batch's response tokens plus its prompt tokens, each prompt counted once.
            whole_groups: Never split a group; a group above the budget becomes its own batch.

        Raises:
            ValueError: The budget is not positive.
        """
        return [self.select(rows) for rows in self.cut(token_budget, whole_groups=whole_groups)]

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """One batch of all rows, in order. Prompts are not merged; groups keep their numbers.

        Raises:
            ValueError: There are no batches, they are of different stages, or a tensor is set in some and missing in
                others.
        """
        if not batches:
            raise ValueError("concat needs at least one batch")
        stages = {type(batch).__name__ for batch in batches}
        if len(stages) > 1:
            raise ValueError(f"batches are of different stages: {sorted(stages)}")
        routes = next((batch.prompt_routes for batch in batches if batch.prompt_routes is not None), None)
        if routes is not None:
            batches = [batch.with_routes(routes) for batch in batches]
        names = {frozenset(batch.tensors()) for batch in batches}
        if len(names) > 1:
            raise ValueError(f"batches carry different tensors: {sorted(map(sorted, names))}")
        prompts = [0, *accumulate(batch.num_prompts for batch in batches)]
        rows = [0, *accumulate(batch.num_rows for batch in batches)]
        given = [batch.given() for batch in batches]
        images = (batch.images or (None,) * batch.num_prompts for batch in batches)
        layout: dict[str, Any] = {
            "prompt_parent": _shifted((batch.prompt_parent for batch in batches), prompts),
            "images": sum(images, ()) if any(batch.images for batch in batches) else (),
            "prompt_index": _shifted((batch.prompt_index for batch in batches), prompts),
            "response_row": _shifted((batch.response_row for batch in batches), rows),
        }
        others: dict[str, Any] = {}
        for name, value in given[0].items():
            if name not in layout and isinstance(value, torch.Tensor):
                others[name] = torch.cat([fields[name] for fields in given])
            elif name not in layout and isinstance(value, tuple):
                others[name] = sum((fields[name] for fields in given), ())
        return dataclasses.replace(batches[0], **layout, **others)


class IdleBatch(TokenBatch):
    """Nothing to learn: rows that only take part in the forward and backward passes of other ranks."""

    @classmethod
    def of_token(cls, token: int = 0) -> Self:
        """A prompt and a response of one token each, without a loss: what ranks without rows run beside others."""
        ids = torch.tensor([token])
        return cls(
            prompt_ids=ids,
            prompt_lengths=(1,),
            prompt_index=(0,),
            response_ids=ids,
            response_lengths=(1,),
            trainable=torch.tensor([False]),
            group_index=(0,),
        )


# Rows of a dataset with preferences.


@dataclass(frozen=True, eq=False, kw_only=True)
class LabeledBatch(TokenBatch):
    """Rows that are labeled good or bad."""

    # B entries: True for chosen or desirable rows, False for rejected or undesirable ones, None for rows without a
    # label or loss, which are only used to estimate a KL divergence.
    is_preferred: tuple[bool | None, ...]
    weights: tuple[float, ...]  # B entries: weight of each row's loss

    def pairs(self) -> tuple[list[int], list[int]]:
        """The chosen rows and, in the same order, the rejected rows of the same groups.

        Raises:
            ValueError: A group does not consist of one chosen and one rejected row.
        """
        sides: dict[bool | None, dict[int, int]] = {True: {}, False: {}, None: {}}
        for row, (group, side) in enumerate(zip(self.group_index, self.is_preferred, strict=True)):
            sides[side][group] = row
        chosen, rejected = sides[True], sides[False]
        if chosen.keys() != rejected.keys() or len(chosen) + len(rejected) != self.num_rows:
            raise ValueError(f"groups {self.group_index} with is_preferred {self.is_preferred} are not pairs")
        return list(chosen.values()), [rejected[group] for group in chosen]

    @cached_property
    def preferred(self) -> Tensor:
        """[B] bool: whether a row is chosen or desirable."""
        return self.on_device([side is True for side in self.is_preferred])

    @cached_property
    def pair_index(self) -> tuple[Tensor, Tensor]:
        """`pairs` as two [B / 2] int64 tensors on the batch's device."""
        chosen, rejected = self.pairs()
        return self.on_device(chosen), self.on_device(rejected)


@dataclass(frozen=True, eq=False, kw_only=True)
class MarginBatch(LabeledBatch):
    """Pairs with a margin: how much better the chosen side is."""

    margins: tuple[float, ...]  # B entries: how much better the chosen row of the pair is; 0 if unknown


@dataclass(frozen=True, eq=False, kw_only=True)
class ReferencedBatch(LabeledBatch):
    """Rows with a label whose log-probs are compared with the reference's."""

    ref_logprobs: Tensor  # [N] nats, of the reference model


# Rows that were sampled.


@dataclass(frozen=True, eq=False, kw_only=True)
class SampledBatch(TokenBatch):
    """Completions."""

    sampling_logprobs: Tensor  # [N] nats, under the distribution that was sampled from


@dataclass(frozen=True, eq=False, kw_only=True)
class ReadyBatch(SampledBatch):
    """Completions with advantages, ready for a policy-gradient loss; `PolicyBatch` adds what options need."""

    advantages: Tensor  # [N] float32
    # [N] factor on each token's policy loss, for losses of selected tokens or rows; the loss denominator is unchanged.
    loss_scale: Tensor
    # [N] nats, of the policy before this generation's first update. None: there was no update yet, so the log-probs of
    # the training pass are the old ones.
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None  # [N] nats, of the reference model; None: the loss has no KL term
    # [N, h] last hidden states of the model whose whole distributions a KL term compares; None: no term does that.
    ref_hidden: Tensor | None = None


def unknown_routes(like: Tensor, count: int) -> Tensor:
    """[count, L, k] in the form of other routes: experts that are not known, so that the router of a pass chooses."""
    return like.new_full((count, *like.shape[1:]), torch.iinfo(like.dtype).max)


def _shifted(parts: Iterable[Sequence[int]], offsets: Sequence[int]) -> tuple[int, ...]:
    """The numbers of all parts, each with the offset of its part; -1, which means none, stays."""
    return tuple(-1 if i < 0 else i + offset for part, offset in zip(parts, offsets, strict=False) for i in part)


def _take_segments(flat: Tensor, lengths: Sequence[int], which: Sequence[int]) -> Tensor:
    segments = torch.split(flat, list(lengths))
    # A slice would keep all tokens in memory, and in what is sent to other ranks.
    return torch.cat([segments[i] for i in which]) if which else flat[:0].clone()


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What a leaf trainer returns for one micro-batch."""

    total: Tensor  # scalar SUM over the micro-batch; only `Loop.compute_loss` divides
    metrics: dict[str, Metric]
    # What `compute_metrics` gets about an evaluated micro-batch: [N] token ids, or [B] rewards; no gradient.
    predictions: Tensor | None = None
    logprobs: Tensor | None = None  # [N] nats, that the pass found for the response tokens; no gradient
