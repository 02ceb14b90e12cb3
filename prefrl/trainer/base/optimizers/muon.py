"""Muon for the matrices of hidden layers, with AdamW for all other weights, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["MuonWithAdamW", "hidden_matrices"]


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon on the parameter groups in which `use_muon` is set, torch's AdamW on the others.

    Muon replaces the momentum of a matrix by the nearest semi-orthogonal matrix, computed by Newton-Schulz iterations.
    With `adjust_lr_fn="match_rms_adamw"`, an update has the size of AdamW's, so that both share a learning rate.

    Args:
        params: Parameter groups.
        lr: Learning rate of both.
        adamw_lr: Learning rate of AdamW; None: `lr`.
        weight_decay: Decoupled, of both.
        betas: Of AdamW.
        eps: Of AdamW.
        momentum: Of Muon.
        nesterov: Of Muon.
        ns_steps: Newton-Schulz iterations of Muon.
        adjust_lr_fn: How Muon's rate depends on the shape of a matrix: "match_rms_adamw" or "original".

    Source: Jordan 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982.
    """

    def __init__(  # noqa: PLR0913 - the arguments of two optimizers
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        adamw_lr: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        one = [torch.nn.Parameter(torch.zeros(2, 2))]
        of_muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        self._muon = torch.optim.Muon(one, lr=lr, weight_decay=weight_decay, **of_muon)  # type: ignore[arg-type]
        self._adamw = torch.optim.AdamW(one, lr=lr if adamw_lr is None else adamw_lr, betas=betas, eps=eps)
        own = {key: value for key, value in self._muon.defaults.items() if key != "weight_decay"}
        self.muon_settings = {**own, "use_muon": True}  # of a group of hidden matrices
        super().__init__(params, {**self._adamw.defaults, "weight_decay": weight_decay, "use_muon": False})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both, each on its parameter groups."""
        loss = None if closure is None else closure()
        for optimizer, uses_muon in ((self._muon, True), (self._adamw, False)):
            optimizer.state = self.state
            optimizer.param_groups = [group for group in self.param_groups if group["use_muon"] == uses_muon]
            optimizer.step()  # type: ignore[no-untyped-call]
        return loss


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained matrices of a model that are neither embeddings nor heads: those that Muon is for.

    Args:
        model: A model of transformers, which may hold a critic.
    """
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    heads = {id(p) for module in model.modules() for p in _head_of(module)}
    return [
        parameter
        for parameter in model.parameters()
        if parameter.ndim == 2 and min(parameter.shape) > 1 and id(parameter) not in embeddings | heads
    ]


def _head_of(module: nn.Module) -> list[nn.Parameter]:
    head = getattr(module, "get_output_embeddings", lambda: None)()
    return [] if head is None else list(head.parameters())
