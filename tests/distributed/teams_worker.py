"""One of four processes in teams of two: `teams_worker FILE` writes what each of them sees, by rank, to `FILE`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from prefrl import distributed
from prefrl.data.collate import flat_batch
from prefrl.distributed.processes import form_teams, limit_waits
from prefrl.models.forward import token_logprobs, verdict_of
from prefrl.models.router_replay import RouterReplay
from prefrl.models.scoring import prepare_for_scoring
from prefrl.trainer.online.minibatches import share_out
from prefrl.types import TokenBatch
from tests.assets import tiny_mixture, tiny_model
from tests.property.test_types import rows_of

NUM_PROCESSES = 4
# Seconds. Teams form within theirs, however busy the machine is; that of the group of all is shortened afterwards.
_LONGEST_WAIT_IN_TEAMS, _LONGEST_WAIT = 10.0, 1.0
CPU = torch.device("cpu")


def seen(process: int) -> dict[str, Any]:
    """Who this process is, and what it gets from others."""
    return {
        "rank": distributed.rank(),
        "world_size": distributed.world_size(),
        "num_processes": distributed.num_processes(),
        "team_size": distributed.team_size(),
        "place_in_team": distributed.place_in_team(),
        "is_main": distributed.is_main(),
        "gathered": distributed.gather_objects(process),
        "in_team": distributed.gather_in_team(process),
        "rows": distributed.gather_rows([process] * (1 + distributed.rank())),
        "exchanged": distributed.exchange([10 * process + to for to in range(distributed.world_size())], CPU),
        "sum": distributed.sum_over_ranks([process], CPU),
        "team_totals": distributed.team_totals([process], CPU),
        "max": distributed.max_over_ranks([process], CPU),
        "min": distributed.min_over_ranks([process], CPU),
    }


def exchanged() -> dict[str, Any]:
    """Values and gradients of four heads of two tokens each, numbered 10 * head + token."""
    tokens = 2 * distributed.place_in_team() + torch.arange(2.0)
    own = (10 * torch.arange(4.0)[:, None] + tokens).view(1, 4, 2, 1).requires_grad_()
    joined = distributed.exchange_in_team(own, split=1, join=2)
    (joined * joined.detach()).sum().backward()
    number = torch.tensor(float(distributed.place_in_team() + 1), requires_grad=True)
    total = distributed.sum_over_team(number)
    total.backward()
    assert own.grad is not None
    assert number.grad is not None
    return {
        "own": own.flatten().tolist(),
        "gradient": own.grad.flatten().tolist(),
        "joined": joined.squeeze().tolist(),
        "total": total.item(),
        "gradient_of_number": number.grad.item(),
    }


def forest(process: int) -> TokenBatch:
    """Two groups of two episodes, whose second context continues the first one, and a third one branches off."""
    draw = torch.Generator().manual_seed(process)
    contexts: list[list[int]] = []
    for _ in range(2):
        prompt, *more = (torch.randint(2, 128, (n,), generator=draw).tolist() for n in (4 + 3 * process, 3, 5, 2, 6))
        contexts += [prompt, prompt + more[0], prompt + more[0] + more[1], prompt, prompt + more[2], prompt + more[3]]
    responses = [torch.randint(2, 128, (2 + i % 4,), generator=draw).tolist() for i in range(len(contexts))]
    groups = [2 * process, 2 * process, 2 * process + 1, 2 * process + 1]
    return flat_batch(contexts, responses, groups=groups, rows=[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])


def scores_of_a_forest() -> dict[str, list[float]]:
    """Log-probs of the same rows in all processes, and the gradient averaged over them."""
    model, batch = tiny_model("llama"), forest(0)
    logprobs = token_logprobs(model, batch, plan="shared_prefix").logprobs
    (logprobs * torch.linspace(-1, 1, batch.num_tokens)).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    dist.all_reduce(gradient)
    return {"logprobs": logprobs.tolist(), "gradient": (gradient / NUM_PROCESSES).tolist()}


def routes_of_a_forest() -> list[Any]:
    """The experts that the passes of a mixture record for the same rows in all processes."""
    model, batch = tiny_mixture(), forest(0)
    state = prepare_for_scoring(model)
    state.replay = replay = RouterReplay(records=True)
    with torch.no_grad():
        verdict_of(model)
        with replay.recording(batch) as record:
            for piece in record.batch.chunks(2):  # of which several run the same prompts
                token_logprobs(model, piece, plan="packed")
    return [routes.tolist() for routes in record.routes(replay)]


def dealt_rows(process: int) -> dict[str, list[dict[str, Any]]]:
    """The rows that this process brings, and those that it gets."""
    own = forest(process)
    return {"own": rows_of(own), "dealt": rows_of(share_out(own, hidden_size=8, equal_counts=True, device=CPU))}


def seconds_of_waits(folder: Path) -> list[float]:
    """How long process 0 waits for the others, in the group of all and in its team, and what it is told."""
    limit_waits(_LONGEST_WAIT_IN_TEAMS)
    form_teams(2)
    distributed.wait_for_all()
    limit_waits(_LONGEST_WAIT)
    waits = []
    if distributed.is_main():
        for collective in (distributed.max_over_ranks, distributed.team_totals):
            started = time.monotonic()
            with pytest.raises(RuntimeError, match="imed out"):
                collective([1.0], CPU)
            waits.append(time.monotonic() - started)
        (folder / "waited").touch()
    while not (folder / "waited").exists():
        time.sleep(0.05)
    return waits


def main(process: int, path: Path) -> None:
    """Alone, then in teams, then alone again."""
    dist.init_process_group("gloo")
    alone, scores, rows, routes = seen(process), scores_of_a_forest(), dealt_rows(process), routes_of_a_forest()
    form_teams(2)
    results = {"alone": alone, "in_teams": seen(process), **exchanged()}
    results |= {"scores": scores, "scores_in_teams": scores_of_a_forest(), "rows": rows}
    with distributed.without_teams():
        results["without_teams"] = seen(process)
    results["in_teams_again"] = seen(process)
    results |= {"routes": routes, "routes_in_teams": routes_of_a_forest()}
    distributed.wait_for_all()
    form_teams(1)
    results["alone_again"] = seen(process)
    everything = distributed.gather_objects(results)
    if distributed.is_main():
        torch.save(everything, path)
    waits = seconds_of_waits(path.parent)
    if waits:
        everything[0]["waits"] = waits
        torch.save(everything, path)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), Path(sys.argv[1]))
