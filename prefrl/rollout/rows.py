"""The batch of some rollouts. What is trained on is ids that were sent and ids that were sampled, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from prefrl.data.collate import flat_batch
from prefrl.metrics import Mean, Metric
from prefrl.types import Completion, Images, Rollout, SampledBatch, Turn

if TYPE_CHECKING:
    from prefrl.data.images import ImageReader

__all__ = ["Response", "responses_of", "sampled_batch", "token_counts", "turn_index", "turn_rewards"]


@dataclass(slots=True)
class Response:
    """Turns that continue each other: the ids behind a prompt, in order. All lists have one entry for each id."""

    prompt_ids: list[int]
    token_ids: list[int]
    trainable: list[bool]  # False for ids of tools and environments
    logprobs: list[float]  # nats, under the distribution that was sampled from; 0 for ids that were not sampled
    turn: list[int]  # number of the turn in the rollout; ids before a turn's completion belong to the turn before

    def continues_with(self, turn: Turn) -> bool:
        """Whether what was sent for a turn begins with all ids of this response and its prompt."""
        start, stop = len(self.prompt_ids), len(self.prompt_ids) + len(self.token_ids)
        return turn.sent_ids[:start] == self.prompt_ids and turn.sent_ids[start:stop] == self.token_ids

    def extend(self, number: int, turn: Turn) -> None:
        """Add a turn that this response continues with."""
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
            responses.append(Response(turn.sent_ids, [*ids], [*flags], [*logprobs], [number] * len(ids)))
    return responses


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
    logprobs = [value for _, response in responses for value in response.logprobs]
    return SampledBatch.of(batch, sampling_logprobs=torch.tensor(logprobs, dtype=torch.float32))


def _add_images(rollouts: Sequence[Rollout], reader: ImageReader) -> None:
    found: dict[int, Images | None] = {}
    for rollout in rollouts:
        if rollout.images is None and rollout.row.get("images"):
            if rollout.group not in found:
                found[rollout.group] = reader.of_prompt(rollout.row)
            rollout.images = found[rollout.group]


def token_counts(rollouts: Sequence[Rollout], batch: SampledBatch) -> dict[str, Metric]:
    """Tokens of an episode in a forward pass: if each response were computed alone, and with what they share once.

    Args:
        rollouts: B rollouts. Without episodes there is nothing to count.
        batch: Their rows.
    """
    if not any(rollout.episode is not None for rollout in rollouts):
        return {}
    alone = batch.num_tokens + sum(batch.context_lengths)
    counts = {"tokens": alone, "forward_tokens": batch.num_forward_tokens}
    return {f"episodes/mean_{name}": Mean(count, len(rollouts)) for name, count in counts.items()}


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
