"""Router replay: the routers of the policy use the experts that its sampler has chosen, or its own pass before the
first update; see `models.router_replay`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from prefrl import distributed
from prefrl.metrics import Mean
from prefrl.models.router_replay import RouterReplay
from prefrl.models.scoring import prepare_for_scoring, user_model
from prefrl.options.online import OnlineOptions
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.parts import Part, Role, Run
from prefrl.types import LossOutput, TokenBatch

_log = logging.getLogger(__name__)


def router_replay(args: BaseConfig, policy: PreTrainedModel) -> ReplayedRouters | None:
    """What makes the policy's routers replay, if the options ask for it, or leave it open and it is a mixture."""
    if not isinstance(args, OnlineOptions) or args.router_replay is False:
        return None
    is_open, config = args.router_replay is None, policy.config.get_text_config().to_dict()
    # A trial tells whether they can replay.
    has_experts = any("experts" in name and isinstance(value, int) and value > 1 for name, value in config.items())
    if is_open and not has_experts:
        return None
    if is_open and args.torch_compile:
        if distributed.is_main():
            _log.warning(
                "torch_compile=True with %s, a mixture of experts: its routers will choose other experts than those "
                "of the sampler for some tokens, since a choice cannot be replaced inside compiled layers. See "
                "docs/moe.md, and set router_replay=False, or torch_compile=False.",
                type(policy).__name__,
            )
        return None
    return ReplayedRouters(records=args.router_replay == "R2", is_required=not is_open)


class ReplayedRouters(Part):
    """Lets the routers of the policy replay, and logs how many would have chosen other experts.

    Args:
        records: See `RouterReplay`.
        is_required: See `RouterReplay`.
    """

    def __init__(self, *, records: bool, is_required: bool) -> None:
        self._records, self._is_required = records, is_required

    def made(self, run: Run, model: nn.Module, role: Role) -> None:
        """See `Part`. With one process, a model that cannot replay is refused now; otherwise in its first passes."""
        if role == "policy":
            replay = RouterReplay(records=self._records, is_required=self._is_required)
            prepare_for_scoring(model).replay = replay
            if distributed.num_processes() == 1:
                replay.prove(user_model(model))

    def around_loss(self, run: Run, batch: TokenBatch, compute: Callable[[], LossOutput]) -> LossOutput:
        """See `Part`."""
        replay = prepare_for_scoring(run.policy).replay
        assert replay is not None
        if batch.prompt_routes is None or not replay.is_proven:
            return compute()
        replay.counts = counts = [torch.zeros(2, device=batch.device)]
        try:
            output = compute()
        finally:
            replay.counts = None
        num_known, num_changed = torch.stack([each.to(counts[0]) for each in counts]).sum(0)
        metrics = {"sampling/routes_changed": Mean(num_changed, num_known)}
        return replace(output, metrics=output.metrics | metrics)
