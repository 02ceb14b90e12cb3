"""Communication between the processes of a team, which share the tokens of a row (Ulysses).

Source: Jacobs et al. 2023, arXiv 2309.14509.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from prefrl.distributed.processes import team_group, team_size


def exchange_in_team(tensor: torch.Tensor, *, split: int, join: int) -> torch.Tensor:
    """All-to-all in the team: split dimension `split` evenly over the processes, and join the parts along `join`.

    It converts some tokens of all heads to all tokens of some heads, and back. All processes of the team must call it.
    """
    output: torch.Tensor = _Exchange.apply(tensor, split, join)  # type: ignore[no-untyped-call]
    return output


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, split: int, join: int) -> torch.Tensor:
        ctx.split, ctx.join = split, join
        return _exchanged(tensor, split, join)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchanged(grad, ctx.join, ctx.split), None, None


def _exchanged(tensor: torch.Tensor, split: int, join: int) -> torch.Tensor:
    parts = torch.stack(tensor.chunk(team_size(), dim=split))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=team_group())
    return torch.cat(received.unbind(), dim=join)


def sum_over_team(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the processes of the team, with gradients. All of them must call it and compute the same from it."""
    output: torch.Tensor = _SumOverTeam.apply(tensor)  # type: ignore[no-untyped-call]
    return output


class _SumOverTeam(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=team_group())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        # Every process of the team computes the same loss from the sum, and backends average gradients over all
        # processes. The gradient is therefore the sum of team_size equal gradients.
        return grad * team_size()
