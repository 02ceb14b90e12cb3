from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks import ready_first
from benchmarks.ready_first import RUNS, UPDATE, Run, Servers, table


def servers(*seconds: float) -> Servers:
    """Their groups take these seconds, one after the other."""
    local = SimpleNamespace(
        generate=lambda prompts, sampling, *, seeds: [[] for _ in prompts], sync=lambda *_, **__: None
    )
    made = Servers(local, 0)  # type: ignore[arg-type]
    durations = iter(seconds)
    made.random = SimpleNamespace(paretovariate=lambda shape: next(durations))  # type: ignore[assignment]
    return made


def start(made: Servers, count: int) -> Any:
    return made.start([[1]] * count, None, seeds=[0] * count)


def test_a_group_takes_its_seconds_divided_by_the_speed_of_its_server() -> None:
    made = servers(3.0, 1.0, 2.0, 2.0)  # the last server is half as fast as the others
    groups = start(made, 4)
    assert [(number, made.now) for number, _ in groups.as_completed()] == [(1, 1.0), (2, 2.0), (0, 3.0), (3, 4.0)]


def test_waiting_goes_to_the_next_group_and_an_update_takes_its_time() -> None:
    made = servers(5.0, 2.0, 1.0, 100.0)
    first, second = start(made, 2), start(made, 2)
    made.sync(None, version=1)
    assert made.now == UPDATE == 1.0
    assert [number for number, _ in second.arrived()] == [0]
    made.wait()
    assert made.now == 2.0
    assert [number for number, _ in first.arrived()] == [1]
    assert list(first.arrived()) == []
    made.wait()
    made.wait()  # the group is not read
    assert made.now == 5.0
    made.sync(None, version=1)
    assert made.now == 5.0
    assert [number for number, _ in second.as_completed()] == [1]
    assert made.now == ready_first.LONGEST / ready_first.SPEEDS[3]


def test_the_table_has_medians_and_ranges_and_says_who_missed_the_target() -> None:
    runs = [
        Run(name, seed, [10.0, 20.0 + seed], [0.5, 0.9], [1.0, 3.0], dropped=seed)
        for name in RUNS
        for seed in range(3)
    ]
    runs[1].rewards = [0.5, 0.6]
    first, second, *_ = table(runs).splitlines()[2:]
    assert first == "| sync | reached in 2 of 3 | 21 (20 to 22) | 0.90 (0.60 to 0.90) | 2.0 | 1 (0 to 2) |"
    assert second.split(" | ")[1] == "21 (20 to 22)"
