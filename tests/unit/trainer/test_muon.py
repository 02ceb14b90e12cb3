"""Muon with AdamW is torch's Muon on some weights, and torch's AdamW on the others."""

from __future__ import annotations

import torch

from prefrl.trainer.optimizers import MuonWithAdamW, regroup


def gradient(parameter: torch.nn.Parameter, step: int) -> torch.Tensor:
    return torch.sin(torch.arange(parameter.numel()).reshape(parameter.shape) * (step + 1.0))


def test_each_weight_moves_as_with_its_own_optimizer() -> None:
    matrix, vector = (torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(shape)) for shape in ((3, 4), (12,)))
    both = MuonWithAdamW([matrix, vector], lr=0.1, adamw_lr=0.01, weight_decay=0.2, betas=(0.8, 0.9), momentum=0.7)
    regroup(both, lambda parameter: both.muon_settings if parameter is matrix else {})
    other_matrix, other_vector = (torch.nn.Parameter(parameter.detach().clone()) for parameter in (matrix, vector))
    apart = [
        torch.optim.Muon([other_matrix], lr=0.1, weight_decay=0.2, momentum=0.7, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([other_vector], lr=0.01, weight_decay=0.2, betas=(0.8, 0.9)),
    ]
    for step in range(3):
        for parameter in (matrix, vector, other_matrix, other_vector):
            parameter.grad = gradient(parameter, step)
        for optimizer in (both, *apart):
            optimizer.step()
    assert torch.equal(matrix, other_matrix)
    assert torch.equal(vector, other_vector)
