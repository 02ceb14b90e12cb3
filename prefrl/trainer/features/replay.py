"""Router replay: the routers of the policy use the experts that its sampler has chosen; see `models.router_replay`."""

from __future__ import annotations

import logging
from collections.abc import Callable

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
    """What makes the policy's routers replay, if the options ask for it."""
    if not isinstance(args, OnlineOptions):
        return None
    is_open = args.router_replay is None and args.use_vllm
    if is_open and hasattr(policy.config.get_text_config(), "num_experts_per_tok") and distributed.is_main():
        _log.warning(
            "%s is a mixture of experts: the server's routers will choose other experts than the trainer's for some "
            "tokens. Set router_replay=True, so that training uses those of the server (see docs/moe.md), or False.",
            type(policy).__name__,
        )
    return ReplayedRouters() if args.router_replay else None


class ReplayedRouters(Part):
    """Lets the routers of the policy replay, and logs how many would have chosen other experts."""

    def made(self, run: Run, model: nn.Module, role: Role) -> None:
        """See `Part`. With one process, a model that cannot replay is refused now; otherwise in its first passes."""
        if role == "policy":
            prepare_for_scoring(model).replay = replay = RouterReplay()
            if distributed.num_processes() == 1:
                replay.prove(user_model(model))

    def around_loss(self, run: Run, batch: TokenBatch, compute: Callable[[], LossOutput]) -> LossOutput:
        """See `Part`."""
        replay = prepare_for_scoring(run.policy).replay
        assert replay is not None
        replay.counts = counts = [torch.zeros(2, device=batch.device)]
        try:
            output = compute()
        finally:
            replay.counts = None
        num_known, num_changed = torch.stack([each.to(counts[0]) for each in counts]).sum(0)
        metrics = {"sampling/routes_changed": Mean(num_changed, num_known)}
        return LossOutput(output.total, output.metrics | metrics, output.predictions)
