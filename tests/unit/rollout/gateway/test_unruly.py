"""Many episodes at once, some of whose agents do what they should not."""

from __future__ import annotations

from operator import le

from tests.patience import wait_until
from tests.unit.rollout.gateway.unruly import LATE, UNRULY, opened, play

NUM_TURNS = {"talk": 10, "send_100_mb": 1, "fork_20": 22, "call_after_the_end": 1, "outlast": 1}


def test_agents_that_misbehave_change_nothing_for_others_and_leave_nothing() -> None:
    play({"talk": 1}, num_turns=1)  # what is loaded once
    before = opened()
    found = play({**dict.fromkeys(UNRULY, 2), "flood": 1, "talk": 10}, num_turns=10, flood=300, num_late=2)

    for name, num_turns in NUM_TURNS.items():
        for rollout in found[name]:
            assert rollout.episode is not None
            assert (len(rollout.turns), rollout.episode.stop_reason, rollout.episode.reward) == (
                num_turns,
                "stop",
                1.0,
            )
            assert all(turn.completion.finish_reason == "stop" for turn in rollout.turns)
    for name in ("never_call", "exit_1"):
        assert all(rollout.has_failed for rollout in found[name])
    (flooded,) = found["flood"]
    assert 1 <= len(flooded.turns) <= 300
    assert [late.result() for late in LATE] == [410, 410]
    # A thread of the first episode may have ended since.
    assert wait_until(lambda: all(map(le, opened(), before))), (before, opened())
