"""The batch of some rollouts, and the buffer of the minibatches that training currently learns from.

What is trained on is ids that were sent and ids that were sampled, and nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prefrl.data.collate import batch_of, flat_batch, parts_of_batch
from prefrl.errors import DataError
from prefrl.metrics import Mean, Metric, Sum, from_json, merge, to_json
from prefrl.types import Completion, Images, Rollout, SampledBatch, TokenBatch, Turn, unknown_routes

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.data.images import ImageReader
    from prefrl.options.online import OnlineOptions


@dataclass(slots=True)
class Response:
    """Turns that continue each other: the ids behind a prompt, in order. All lists have one entry for each id."""

    prompt_ids: list[int]
    token_ids: list[int]
    trainable: list[bool]  # False for ids of tools and environments
    logprobs: list[float]  # nats, under the distribution that was sampled from; 0 for ids that were not sampled
    turn: list[int]  # number of the turn in the rollout; ids before a turn's completion belong to the turn before
    # [T, L, k] of the prompt and of the ids, see `Completion.routes`; None: they are not known.
    routes: Tensor | None = None

    def continues_with(self, turn: Turn) -> bool:
        """Whether what was sent for a turn begins with all ids of this response and its prompt."""
        start, stop = len(self.prompt_ids), len(self.prompt_ids) + len(self.token_ids)
        return turn.sent_ids[:start] == self.prompt_ids and turn.sent_ids[start:stop] == self.token_ids

    def extend(self, number: int, turn: Turn) -> None:
        """Add a turn that this response continues with."""
        if self.routes is not None or turn.completion.routes is not None:
            self.routes = _longer_routes(self.routes, turn, num_before=len(self.prompt_ids) + len(self.token_ids))
        new = turn.sent_ids[len(self.prompt_ids) + len(self.token_ids) :]
        nothing: list[float] = [0.0] * len(new)
        more = Completion(new, "stop", nothing, [False] * len(new), [])
        for part, of_turn in ((more, number - 1), (turn.completion, number)):
            self.token_ids += part.token_ids
            self.trainable += part.trainable
            self.logprobs += part.logprobs
            self.turn += [of_turn] * len(part.token_ids)


def responses_of(rollout: Rollout) -> list[Response]:
    """The responses of a rollout, in order.

    A turn continues the response of the turn before it if and only if what was sent for it begins with all ids of that
    response and its prompt. Otherwise, for example because a template drops earlier thinking, it is a response of its
    own, whose prompt is what was sent for it.
    """
    responses: list[Response] = []
    for number, turn in enumerate(rollout.turns):
        if responses and responses[-1].continues_with(turn):
            responses[-1].extend(number, turn)
        else:
            ids, flags, logprobs = turn.completion.token_ids, turn.completion.trainable, turn.completion.logprobs
            response = Response(turn.sent_ids, [*ids], [*flags], [*logprobs], [number] * len(ids))
            if turn.completion.routes is not None:
                response.routes = _routes_of(turn)
            responses.append(response)
    return responses


def _routes_of(turn: Turn) -> Tensor | None:
    """[T, L, k] of all ids that were sent and sampled; the last one was not run, and the first may be left out."""
    routes = turn.completion.routes
    if routes is None:
        return None
    num_before = len(turn.sent_ids) + len(turn.completion.token_ids) - 1 - len(routes)
    return torch.cat([unknown_routes(routes, num_before), routes, unknown_routes(routes, 1)])


def _longer_routes(routes: Tensor | None, turn: Turn, *, num_before: int) -> Tensor:
    """Those of a response, and of the ids that a turn adds to `num_before` ids, of which the last is run only now."""
    new = _routes_of(turn)
    if new is None:
        assert routes is not None
        new = unknown_routes(routes, len(turn.sent_ids) + len(turn.completion.token_ids))
    before = unknown_routes(new, num_before) if routes is None else routes
    return torch.cat([before[:-1], new[num_before - 1 :]])


def sampled_batch(
    rollouts: Sequence[Rollout], *, mask_truncated: bool, reader: ImageReader | None = None
) -> SampledBatch:
    """The flat batch of some rollouts: a row for each, with a shared prefix of a group's prompts once.

    Args:
        rollouts: Completed rollouts.
        mask_truncated: Whether to exclude rollouts that were cut off at a limit from the loss.
        reader: Reads images of prompts that are not read yet, as those of rollouts from the journal are not.
    """
    if reader is not None:
        _add_images(rollouts, reader)
    responses = [(row, response) for row, rollout in enumerate(rollouts) for response in responses_of(rollout)]
    is_masked = [mask_truncated and rollout.finish_reason == "length" for rollout in rollouts]
    batch = flat_batch(
        [response.prompt_ids for _, response in responses],
        [response.token_ids for _, response in responses],
        trainable=[
            [False] * len(response.token_ids) if is_masked[row] else response.trainable for row, response in responses
        ],
        groups=[rollout.group for rollout in rollouts],
        rows=[row for row, _ in responses],
        images={rollout.group: rollout.images for rollout in rollouts if rollout.images is not None},
    )
    if any(response.routes is not None for _, response in responses):
        batch = _with_routes(batch, [response for _, response in responses])
    logprobs = [value for _, response in responses for value in response.logprobs]
    return SampledBatch.of(batch, sampling_logprobs=torch.tensor(logprobs, dtype=torch.float32))


def _with_routes(batch: TokenBatch, responses: Sequence[Response]) -> TokenBatch:
    """The batch with the routes of its responses, if some are known. A shared prompt has those of its first response.

    The sampler has computed such a prompt once for all, unless it has dropped it from its cache.
    """
    like = next(response.routes for response in responses if response.routes is not None)
    of_prompts: dict[int, Tensor] = {}
    of_responses = []
    for context, response in zip(batch.contexts, responses, strict=True):
        num_ids, start = len(response.prompt_ids), 0
        routes = response.routes
        if routes is None:
            routes = unknown_routes(like, num_ids + len(response.token_ids))
        for prompt in context:
            stop = start + batch.prompt_lengths[prompt]
            of_prompts.setdefault(prompt, routes[start:stop])
            start = stop
        of_responses.append(routes[num_ids:])
    prompts = torch.cat([of_prompts[prompt] for prompt in range(batch.num_prompts)])
    return batch.replace(prompt_routes=prompts, response_routes=torch.cat(of_responses))


def _add_images(rollouts: Sequence[Rollout], reader: ImageReader) -> None:
    found: dict[int, Images | None] = {}
    for rollout in rollouts:
        if rollout.images is None and rollout.row.get("images"):
            if rollout.group not in found:
                found[rollout.group] = reader.of_prompt(rollout.row)
            rollout.images = found[rollout.group]


def token_counts(rollouts: Sequence[Rollout], batch: SampledBatch, *, num_trained: int) -> dict[str, Metric]:
    """What became of the tokens of episodes.

    `episodes/mean_tokens` and `episodes/mean_forward_tokens` are those of an episode in a forward pass: if each
    response were computed alone, and with what they share once. Sums over all episodes: `episodes/tokens_sampled`,
    which is `episodes/tokens_trained` + `episodes/tokens_masked` (they stand in a row, but have no loss) +
    `episodes/tokens_dropped` (they stand in no row: the environment failed, an answer came after the end).

    Args:
        rollouts: B rollouts. Without episodes there is nothing to count.
        batch: Their rows.
        num_trained: Tokens of these rows that have a loss.
    """
    if not any(rollout.episode is not None for rollout in rollouts):
        return {}
    alone = batch.num_tokens + sum(batch.context_lengths)
    counts = {"tokens": alone, "forward_tokens": batch.num_forward_tokens}
    means: dict[str, Metric] = {f"episodes/mean_{name}": Mean(count, len(rollouts)) for name, count in counts.items()}
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    # Of the rows that are learned from; an environment that failed has dropped its tokens.
    in_rows = sum(len(rollout.sampled_ids) for rollout in rollouts if not rollout.has_failed)
    sums = {
        "sampled": sum(episode.num_sampled for episode in episodes),
        "trained": num_trained,
        "masked": in_rows - num_trained,
        "dropped": sum(episode.num_dropped for episode in episodes),
    }
    return means | {f"episodes/tokens_{name}": Sum(count) for name, count in sums.items()}


def turn_index(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """[N] int64: the turn that each token of `sampled_batch` belongs to, numbered through all rollouts."""
    index, start = [], 0
    for rollout in rollouts:
        index += [start + number for response in responses_of(rollout) for number in response.turn]
        start += len(rollout.turns)
    return torch.tensor(index, dtype=torch.long)


def turn_rewards(rollouts: Sequence[Rollout], totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rewards of all turns of some rollouts, laid end to end, and the rollout of each.

    A turn has the reward of its observations; the last one also has the rest of the rollout's total.

    Args:
        rollouts: B rollouts.
        totals: [B], NaN for rollouts without a reward, whose turns have none either.

    Returns:
        [U] float64 and [U] int64.
    """
    rewards: list[float] = []
    for rollout, total in zip(rollouts, totals.tolist(), strict=True):
        of_turns = [0.0] * len(rollout.turns) if rollout.episode is None else list(rollout.episode.turn_rewards)
        of_turns[-1] += total - sum(of_turns)
        rewards += of_turns
    counts = torch.tensor([len(rollout.turns) for rollout in rollouts], dtype=torch.long)
    return torch.tensor(rewards, dtype=torch.float64), torch.arange(len(rollouts)).repeat_interleave(counts)


def rows_of_parts(rollouts: Sequence[Rollout], args: OnlineOptions, *, num_parts: int) -> list[list[int]]:
    """The rows of each optimizer step in a pass over a generation batch.

    Each step learns from consecutive completions of all ranks, whatever the rank that has them.

    Args:
        rollouts: Whole groups, of one generation batch or several, see `joined`; the number of a group is the position
            of its prompt in the batches of all ranks.
        args: Options.
        num_parts: Number of optimizer steps; with one, the numbers of groups do not matter.
    """
    if num_parts == 1:
        return [list(range(len(rollouts)))]
    rows: list[list[int]] = [[] for _ in range(num_parts)]
    seen: Counter[int] = Counter()
    for row, rollout in enumerate(rollouts):
        position = rollout.group * args.num_generations + seen[rollout.group]
        seen[rollout.group] += 1
        position %= args.completions_of_generation  # in its own of several generation batches
        rows[position * num_parts // args.completions_of_generation].append(row)
    return rows


Ready = TypeVar("Ready", bound=TokenBatch)


@dataclass(frozen=True)
class Minibatch(Generic[Ready]):
    """The data of one optimizer step on this rank."""

    micro_batches: list[Ready]  # rows without a gradient may be left out
    num_items: float  # counts all rows, including those left out
    metrics: dict[str, Metric] = field(default_factory=dict)  # of the rows left out; values on the host


@dataclass
class RolloutBuffer(Generic[Ready]):
    """The minibatches of one generation batch, each visited `num_iterations` times.

    Args:
        num_iterations: Number of visits.
        stage: The class of the micro-batches.
    """

    num_iterations: int
    stage: type[Ready]
    minibatches: list[Minibatch[Ready]] = field(default_factory=list)
    position: int = 0  # number of minibatches returned since the buffer was filled
    order: list[int] = field(default_factory=list)  # the minibatch of each visit

    @property
    def is_spent(self) -> bool:
        """Whether new rollouts are needed."""
        return self.position >= len(self.order)

    def fill(self, minibatches: Sequence[Minibatch[Ready]], *, order: Sequence[int] | None = None) -> None:
        """Replace the contents with the minibatches of a new generation batch.

        Args:
            minibatches: In the order of the first pass.
            order: The minibatch of each visit; None: all passes have the same order.
        """
        self.minibatches = list(minibatches)
        self.position = 0
        self.order = [*range(len(minibatches))] * self.num_iterations if order is None else list(order)

    def next(self) -> Minibatch[Ready]:
        """The next minibatch.

        Raises:
            IndexError: The buffer is spent.
        """
        if self.is_spent:
            raise IndexError("the rollout buffer is spent; fill it first")
        minibatch = self.minibatches[self.order[self.position]]
        self.position += 1
        return minibatch

    def change_visited(self, change: Callable[[Ready, Tensor], Ready], logprobs: Sequence[Tensor]) -> None:
        """Change the minibatch that was returned last, for its later visits.

        Args:
            change: Maps a micro-batch and its log-probs to the changed micro-batch.
            logprobs: For each micro-batch, [N] nats, as computed in this visit. They stay on their device.
        """
        index = self.order[self.position - 1]
        minibatch = self.minibatches[index]
        changed = [change(batch, values) for batch, values in zip(minibatch.micro_batches, logprobs, strict=True)]
        self.minibatches[index] = replace(minibatch, micro_batches=changed)

    def save(self, path: Path) -> None:
        """Write the buffer to a safetensors file. Tensors are saved bit by bit, and nothing is pickled."""
        tensors: dict[str, Tensor] = {}
        layout = []
        for i, minibatch in enumerate([] if self.is_spent else self.minibatches):
            batches = []
            for j, batch in enumerate(minibatch.micro_batches):
                of_batch, host = parts_of_batch(batch, f"{i}.{j}.")
                tensors |= of_batch
                batches.append(host)
            metrics = {name: to_json(metric) for name, metric in minibatch.metrics.items()}
            layout.append({"micro_batches": batches, "num_items": minibatch.num_items, "metrics": metrics})
        state = {
            "position": self.position if layout else 0,
            "num_iterations": self.num_iterations,
            "order": self.order if layout else [],
        }
        save_file(tensors, path, metadata={"layout": json.dumps(layout), "state": json.dumps(state)})

    def load_share(
        self, paths: Sequence[Path], *, cut: Callable[[Ready], list[Ready]], rank: int, world_size: int
    ) -> None:
        """Read this rank's file; of a run with another number of ranks, read all files and keep this rank's share.

        A sum over the rows of a minibatch does not depend on how they are distributed, so the update is the same up to
        rounding. Log-probs and advantages are read from the files.

        Args:
            paths: The files of all ranks, in order.
            cut: Cuts the rows of a minibatch into micro-batches.
            rank: Number of this process; it takes every `world_size`-th micro-batch.
            world_size: Number of processes.

        Raises:
            DataError: See `load`.
        """
        if len(paths) == world_size:
            self.load(paths[rank])
            return
        parts = []
        for path in paths:
            self.load(path)
            parts.append(self.minibatches)
        self.minibatches = []
        for shares in zip(*parts, strict=True):
            batches = [batch for share in shares for batch in share.micro_batches]
            micro_batches = cut(self.stage.concat(batches)) if batches else []
            # Item counts are summed over ranks, so only one rank keeps them.
            num_items = sum(share.num_items for share in shares) if rank == 0 else 0.0
            metrics: dict[str, Metric] = {}
            for share in shares if rank == 0 else []:
                merge(metrics, share.metrics)
            self.minibatches.append(Minibatch(micro_batches[rank::world_size], num_items, metrics))

    def load(self, path: Path) -> None:
        """Read what `save` wrote.

        Raises:
            DataError: The file belongs to a run with another `num_iterations`.
        """
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        state = json.loads(metadata["state"])
        if state["num_iterations"] != self.num_iterations:
            raise DataError(
                f"{path}: num_iterations was {state['num_iterations']} when the checkpoint was written and is "
                f"{self.num_iterations} now. Resume with the same value."
            )
        self.minibatches = [
            Minibatch(
                [batch_of(self.stage, host, tensors, f"{i}.{j}.") for j, host in enumerate(row["micro_batches"])],
                row["num_items"],
                {name: from_json(metric) for name, metric in row["metrics"].items()},
            )
            for i, row in enumerate(json.loads(metadata["layout"]))
        ]
        self.position = state["position"]
        self.order = state.get("order", [*range(len(self.minibatches))] * self.num_iterations)
