"""Teams of processes count each row once, and exchange tensors together with their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.teams_worker import NUM_PROCESSES
from tests.launch import launch

PROCESSES = range(NUM_PROCESSES)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes, in teams of two, has seen."""
    result = tmp_path_factory.mktemp("teams") / "result.pt"
    seen: list[dict[str, Any]] = launch(
        "tests.distributed.teams_worker", result, result=result, num_processes=NUM_PROCESSES
    )
    return seen


@pytest.mark.parametrize("process", PROCESSES)
def test_what_is_gathered_or_summed_counts_each_row_once(process: int, results: list[dict[str, Any]]) -> None:
    rank, place = divmod(process, 2)
    peers = [place, place + 2]  # those with this one's place in both teams
    assert results[process]["in_teams"] == {
        "rank": rank,
        "world_size": 2,
        "num_processes": 4,
        "team_size": 2,
        "place_in_team": place,
        "is_main": process == 0,
        "gathered": peers,
        "in_team": [2 * rank, 2 * rank + 1],
        "rows": ([peers[0], peers[1], peers[1]], rank),
        "exchanged": [10 * peer + rank for peer in peers],
        "sum": [sum(peers)],
        "team_totals": [4 * rank + 1],
        "max": [3],
        "min": [0],
    }


@pytest.mark.parametrize("process", PROCESSES)
def test_without_teams_every_process_is_a_rank(process: int, results: list[dict[str, Any]]) -> None:
    alone = results[process]["alone"]
    assert (alone["rank"], alone["world_size"], alone["place_in_team"]) == (process, 4, 0)
    assert alone["gathered"] == [0, 1, 2, 3]
    assert alone["in_team"] == [process]
    assert alone["exchanged"] == [10 * other + process for other in PROCESSES]
    assert alone["sum"] == [6]
    assert results[process]["alone_again"] == alone
    assert results[process]["without_teams"] == alone
    assert results[process]["in_teams_again"] == results[process]["in_teams"]


@pytest.mark.parametrize("process", PROCESSES)
def test_tokens_of_all_heads_become_all_tokens_of_some_heads(process: int, results: list[dict[str, Any]]) -> None:
    result = results[process]
    heads = (0, 1) if process % 2 == 0 else (2, 3)
    assert result["joined"] == [[10 * head + token for token in range(4)] for head in heads]
    # The loss is half the sum of squares, so that each value's gradient is the value: it has come back to its place.
    assert result["gradient"] == result["own"]


@pytest.mark.parametrize("process", PROCESSES)
def test_the_sum_over_a_team_has_the_gradient_of_all_its_losses(process: int, results: list[dict[str, Any]]) -> None:
    assert results[process]["total"] == 3
    assert results[process]["gradient_of_number"] == 2


@pytest.mark.parametrize("name", ["logprobs", "gradient"])
def test_processes_that_share_the_tokens_of_a_forest_compute_what_one_does(
    name: str, results: list[dict[str, Any]]
) -> None:
    for result in results:
        expected, found = (torch.tensor(result[scores][name]) for scores in ("scores", "scores_in_teams"))
        assert expected.norm() > 1
        assert (found - expected).norm() < 1e-5 * expected.norm()


def test_processes_that_share_tokens_all_know_the_experts_of_each(results: list[dict[str, Any]]) -> None:
    prompts, responses = results[0]["routes"]
    assert len({str(experts) for experts in prompts + responses}) > 3
    for result in results:
        assert result["routes"] == result["routes_in_teams"] == [prompts, responses]


def test_rows_with_several_responses_go_to_another_process_whole(results: list[dict[str, Any]]) -> None:
    own, dealt = ([result["rows"][which] for result in results] for which in ("own", "dealt"))
    assert dealt != own

    def of_all(parts: list[list[dict[str, Any]]]) -> list[str]:
        return sorted(str(row) for part in parts for row in part)

    assert of_all(dealt) == of_all(own)
    assert [len(part) for part in dealt] == [4, 4, 4, 4]


def test_waits_for_other_processes_end_after_their_time(results: list[dict[str, Any]]) -> None:
    waits = results[0]["waits"]
    assert len(waits) == 2
    assert all(0.5 < seconds < 180 for seconds in waits), waits  # by default it is 30 minutes
