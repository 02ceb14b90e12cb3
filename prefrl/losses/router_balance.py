"""The load-balancing loss of a mixture of experts, one value for each sequence.

    f_e = routed pairs (token, layer) of the sequence whose k most probable experts contain e / (tokens * layers)
    P_e = mean over the tokens and layers of the sequence of the router's probability of expert e
    loss = E * sum over e of f_e * P_e

The f_e are constants. The loss is k if all experts are used alike, and grows up to E with the imbalance.

As in transformers, f and P are means over layers, too.

Source: over the tokens of a batch, Fedus et al. 2021 (Switch Transformers), arXiv 2101.03961, eq. 4-6; over those of a
sequence, DeepSeek-AI 2024 (DeepSeek-V3), arXiv 2412.19437, eq. 17-20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["routed", "sequence_balance"]


def routed(router_logits: Sequence[Tensor], *, top_k: int) -> Tensor:
    """How the routers of all layers treat each token, summed over layers.

    Args:
        router_logits: For each layer with a router, [T, E]; gradient flows.
        top_k: Number of experts of a token.

    Returns:
        [T, 2, E] float32 or wider: how many layers choose the expert, a constant; and the sum of its probabilities.
    """
    dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    probabilities = [logits.softmax(-1, dtype=dtype) for logits in router_logits]
    chosen = torch.zeros_like(probabilities[0])
    for values in probabilities:
        experts = values.detach().topk(top_k, dim=-1).indices
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
