"""The routers of a mixture of experts: their load-balancing loss, for the sequences of a forward pass.

A sequence is what a padded batch has as a row: a response after its context, without the last token, which is not
run. A shared prompt counts in each sequence that uses it, and padding in none. The loss of a sequence is
therefore the same in every forward plan and micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from prefrl.distributed import sum_over_team
from prefrl.errors import ConfigError
from prefrl.models.plans import PaddedInputs
from prefrl.models.router_replay import given_experts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from prefrl.models.plans import ModelInputs


def routed(router_logits: Sequence[Tensor], *, top_k: int, routes: Tensor | None = None) -> Tensor:
    """How the routers of all layers treat each token, summed over layers.

    Args:
        router_logits: For each layer with a router, [T, E]; gradient flows.
        top_k: Number of experts of a token.
        routes: [T, L, k] the experts that ran, see `models.router_replay`; None: the most probable ones.

    Returns:
        [T, 2, E] float32 or wider: how many layers choose the expert, a constant; and the sum of its probabilities.
    """
    dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    probabilities = [logits.softmax(-1, dtype=dtype) for logits in router_logits]
    chosen = torch.zeros_like(probabilities[0])
    for layer, values in enumerate(probabilities):
        experts = values.detach().topk(top_k, dim=-1).indices
        if routes is not None:
            experts = given_experts(routes[:, layer], experts)
        chosen += torch.zeros_like(chosen).scatter_(-1, experts, 1.0)
    return torch.stack([chosen, torch.stack(probabilities).sum(0)], 1)


def sequence_balance(sums: Tensor, num_routed: Tensor) -> Tensor:
    """The loss of each sequence, see above.

    Args:
        sums: [R, 2, E], `routed` summed over the tokens of each sequence; gradient flows.
        num_routed: [R] tokens times layers.

    Returns:
        [R] without a unit, between 0 and E.
    """
    fractions, probabilities = (sums / num_routed[:, None, None]).unbind(1)
    return sums.size(-1) * (fractions * probabilities).sum(-1)


def router_loss_coef(model: PreTrainedModel, coef: float | None) -> float:
    """The weight of the routers' loss: `coef` or, if it is None, that of the model's config; 0: there is no such loss.

    It is also 0 for models for which transformers does not define this loss.
    """
    config = model.config.get_text_config()
    has_loss = hasattr(config, "output_router_logits") and hasattr(config, "router_aux_loss_coef")
    if not has_loss:
        return 0.0
    own: float | None = config.router_aux_loss_coef
    return (own or 0.0) if coef is None else coef


class RouterRecord:
    """Collects the routers' losses of the forward passes of a micro-batch."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    @property
    def losses(self) -> Tensor:
        """[R] the loss of each sequence, gradient flows; of the only pass that was recorded."""
        (losses,) = self._losses
        return losses

    def keep(self, count: int) -> None:
        """Leave out the last pass's sequences after the first `count`, which only kept other processes company."""
        self._losses[-1] = self._losses[-1][:count]

    def add(self, inputs: ModelInputs, model: PreTrainedModel, output: Any, num_positions: int) -> None:
        """Compute the losses of a pass.

        Args:
            inputs: What the model ran on.
            model: The model.
            output: What it returned, with `router_logits`.
            num_positions: Positions that it ran: the tokens of `inputs`, padding and virtual tokens of an adapter.

        Raises:
            ConfigError: The output has no router logits of these positions.
        """
        found: Sequence[Tensor] = output.get("router_logits") or ()
        if not found or any(logits.shape[:-1].numel() != num_positions for logits in found):
            raise ConfigError(
                f"the router logits of {type(model).__name__} cannot be read, so their balancing loss cannot be "
                "computed. Set router_aux_loss_coef=0.0."
            )
        rows, width = inputs.input_ids.shape
        # Virtual tokens, which stand at the beginning of each row, are not counted.
        logits = [layer.reshape(rows, -1, layer.size(-1))[:, -width:].flatten(0, 1) for layer in found]
        top_k = model.config.get_text_config().num_experts_per_tok
        tokens = routed(logits, top_k=top_k, routes=inputs.routes)
        self._losses.append(_of_sequences(tokens, _sequences(inputs), num_layers=len(found)))


@dataclass(frozen=True, eq=False)
class _Sequences:
    """The tokens of R sequences, which consist of S segments; a shared segment is part of several."""

    segment: Tensor  # [T] int64: the segment of each token that this process runs
    num_segments: int
    part_of: Tensor  # [C] int64: a sequence
    part: Tensor  # [C] int64: a segment of it
    lengths: Tensor  # [R] tokens
    is_shared: bool  # whether other processes run other tokens of the same sequences


def _of_sequences(tokens: Tensor, sequences: _Sequences, *, num_layers: int) -> Tensor:
    """[R] from [T, 2, E] of `routed`."""
    sums = tokens.new_zeros(sequences.num_segments, *tokens.shape[1:]).index_add(0, sequences.segment, tokens)
    if sequences.is_shared:
        sums = sum_over_team(sums)
    total = tokens.new_zeros(len(sequences.lengths), *tokens.shape[1:])
    total = total.index_add(0, sequences.part_of, sums[sequences.part])
    return sequence_balance(total, sequences.lengths * num_layers)


def _sequences(inputs: ModelInputs) -> _Sequences:
    if isinstance(inputs, PaddedInputs):
        return _of_rows(inputs)
    device, width = inputs.input_ids.device, inputs.input_ids.size(1)
    layout = inputs.layout
    paths = [(*layout.segments[end].ancestors, end) for end in inputs.ends]
    parts = [(number, segment) for number, path in enumerate(paths) for segment in path]
    lengths = [layout.segments[end].position + layout.segments[end].length for end in inputs.ends]
    segment = torch.repeat_interleave(torch.arange(len(layout.forest)), torch.tensor(layout.lengths))
    part_of, part = torch.tensor(parts).unbind(1)
    return _Sequences(
        segment=segment[inputs.start : inputs.start + width].to(device, non_blocking=True),
        num_segments=len(layout.forest),
        part_of=part_of.to(device, non_blocking=True),
        part=part.to(device, non_blocking=True),
        lengths=torch.tensor(lengths).to(device, non_blocking=True),
        is_shared=layout.num_parts > 1,
    )


def _of_rows(inputs: PaddedInputs) -> _Sequences:
    """Each row is a sequence of one segment; padding is a segment of none."""
    num_rows = len(inputs.input_ids)
    rows = torch.arange(num_rows, device=inputs.input_ids.device)
    segment = torch.where(inputs.attention_mask == 1, rows[:, None], num_rows).flatten()
    return _Sequences(segment, num_rows + 1, rows, rows, inputs.attention_mask.sum(1), is_shared=False)
