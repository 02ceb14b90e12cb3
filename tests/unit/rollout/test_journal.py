"""The journal of rollouts."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from prefrl.errors import CheckpointError, ConfigError
from prefrl.metrics import Mean
from prefrl.rollout.collect import Collected
from prefrl.rollout.journal import Journal, read_entry
from prefrl.types import Completion, Episode, Rollout, Turn

CPU = torch.device("cpu")


def rollout(group: int, text: str = "a b") -> Rollout:
    completion = Completion([5, 6], "stop", [-0.1, float(torch.tensor(-1.7))], [True, False], [3, 4])
    return Rollout(
        [Turn([1, 2, 3], completion)],
        {"prompt": "p", "prompt_ids": [1, 2, 3]},
        group,
        prompt="p",
        text=text,
        rewards={"length": 2.0, "style": None},
        reward=2.0,
        advantage=0.5,
        greedy_reward=float("nan"),
    )


def part(*groups: int) -> Collected:
    return Collected(
        [rollout(group) for group in groups],
        {"tokens": 0.1},
        {"note": [f"n{group}" for group in groups]},
        metrics={"tries": Mean(3.0, 2.0)},
        visits=[[(4, group, 2.0) for group in groups]],
    )


def journal(folder: Path, *, keep: int = 9) -> Journal:
    return Journal(folder, rank=0, world_size=1, keep=keep)


def begun(folder: Path, run: str = "r", *, first: int = 0, keep: int = 9) -> Journal:
    result = journal(folder, keep=keep)
    result.begin(run, generations=range(first, 10), steps_each=2, device=CPU)
    return result


def test_what_was_sealed_is_read_by_the_run_that_goes_on(tmp_path: Path) -> None:
    parts = [part(1), part(0, 2)]
    begun(tmp_path).seal(0, parts, step=0, needed_from=0)
    left = begun(tmp_path).left(0, step=0)
    assert left is not None
    for before, after in zip(parts, left, strict=True):
        for field in dataclasses.fields(Collected):
            if field.name != "rollouts":
                assert getattr(after, field.name) == getattr(before, field.name), field.name
        assert [repr(r) for r in after.rollouts] == [repr(r) for r in before.rollouts]
    assert begun(tmp_path).left(1, step=2) is None


def test_batches_of_another_run_or_after_a_gap_are_not_read(tmp_path: Path) -> None:
    first = begun(tmp_path)
    for number in (0, 2):
        first.seal(number, [part(0)], step=2 * number, needed_from=0)
    assert begun(tmp_path, "other").left(0, step=0) is None
    again = begun(tmp_path)
    assert again.left(0, step=0) is not None
    assert again.left(2, step=4) is None
    assert begun(tmp_path, first=2).left(2, step=4) is not None


def test_a_run_may_be_longer_than_any_list(tmp_path: Path) -> None:
    begun(tmp_path).seal(0, [part(0)], step=0, needed_from=0)
    endless = journal(tmp_path)
    endless.begin("r", generations=range(10**20), steps_each=2, device=CPU)
    assert endless.left(0, step=0) is not None
    assert endless.left(1, step=2) is None


def test_a_batch_that_was_being_written_is_not_there(tmp_path: Path) -> None:
    begun(tmp_path).seal(0, [part(0)], step=0, needed_from=0)
    path = tmp_path / "completions_00000.parquet"
    path.rename(path.with_suffix(".part"))
    assert begun(tmp_path).left(0, step=0) is None


def test_a_bit_that_changes_anywhere_in_a_batch_is_noticed(tmp_path: Path) -> None:
    begun(tmp_path).seal(0, [part(0)], step=0, needed_from=0)
    path = tmp_path / "completions_00000.parquet"
    data = path.read_bytes()
    for i in range(0, len(data), 11):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
        with pytest.raises(CheckpointError, match=rf"{path.name} is damaged"):
            read_entry(path)


@pytest.mark.parametrize("text", ["", 64 * "0", f"prefrl.seal sha256:{64 * '0'}"])
def test_the_seal_of_a_batch_does_not_depend_on_what_models_and_rewards_write(text: str, tmp_path: Path) -> None:
    batch = Collected([rollout(0, text)], {text: 0.1}, {text or "note": [text]})
    begun(tmp_path).seal(0, [batch], step=0, needed_from=0)
    (after,) = read_entry(tmp_path / "completions_00000.parquet").parts
    assert (after.rollouts[0].text, after.logged_metrics, after.logged_columns) == (
        text,
        batch.logged_metrics,
        batch.logged_columns,
    )


def test_a_damaged_batch_and_later_ones_are_collected_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = begun(tmp_path)
    for number in range(3):
        writer.seal(number, [part(0)], step=2 * number, needed_from=0)
    path = tmp_path / "completions_00002.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    again = begun(tmp_path)
    assert [again.left(number, step=2 * number) is None for number in range(3)] == [False, True, True]
    assert f"{path} is damaged" in caplog.text
    assert "are sampled and scored again" in caplog.text
    again.seal(1, [part(0)], step=2, needed_from=0)
    assert read_entry(path).generation == 1


def test_old_batches_go_unless_they_are_needed(tmp_path: Path) -> None:
    writer = begun(tmp_path, keep=2)
    for number in range(5):
        writer.seal(number, [part(0)], step=2 * number, needed_from=0 if number < 4 else 4)
    steps = sorted(path.name for path in tmp_path.iterdir())
    assert steps == [f"completions_{step:05d}.parquet" for step in (4, 6, 8)]


def test_a_batch_that_was_left_is_not_written_again_and_must_stay(tmp_path: Path) -> None:
    begun(tmp_path).seal(0, [part(0)], step=0, needed_from=0)
    again = begun(tmp_path)
    path = tmp_path / "completions_00000.parquet"
    before = path.stat().st_mtime_ns
    again.seal(0, [part(0)], step=0, needed_from=0)
    assert path.stat().st_mtime_ns == before
    path.unlink()
    with pytest.raises(CheckpointError, match="generation batch 0 has disappeared"):
        again.left(0, step=0)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "completions").write_text("a file")
    with pytest.raises(CheckpointError, match=r"step 0 cannot be written to .*completions.*journal_keep"):
        begun(tmp_path / "completions").seal(0, [part(0)], step=0, needed_from=0)


def test_each_rank_has_its_own_files(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = Journal(tmp_path, rank=rank, world_size=2, keep=9)
        writer.seal(0, [part(rank)], step=0, needed_from=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "completions_00000_rank0of2.parquet",
        "completions_00000_rank1of2.parquet",
    ]


def test_people_read_text_tokens_rewards_and_versions(tmp_path: Path) -> None:
    begun(tmp_path / "completions").seal(0, [part(0, 1)], step=0, needed_from=0)
    assert stat.S_IMODE((tmp_path / "completions").stat().st_mode) == 0o700
    rows = pq.read_table(tmp_path / "completions" / "completions_00000.parquet").to_pylist()
    assert rows[1] | {"greedy_reward": None} == {
        "step": 0,
        "group": 1,
        "rollout": 1,
        "turn": 0,
        "prompt": "p",
        "completion": "a b",
        "prompt_ids": [1, 2, 3],
        "completion_ids": [5, 6],
        "logprobs": [-0.1, float(torch.tensor(-1.7))],
        "trainable": [True, False],
        "finish_reason": "stop",
        "policy_versions": [3, 4],
        "length": 2.0,
        "style": None,
        "reward": 2.0,
        "greedy_reward": None,
        "advantage": 0.5,
        "note": "n1",
    }


def test_what_no_column_could_hold_is_kept_as_text(tmp_path: Path) -> None:
    rollouts = [rollout(0, "\ud800 \x1b"), rollout(0, "plain"), rollout(0, "")]
    logged = {"mixed": [1, "a", None], "surrogate": ["\ud800", "b", None]}
    begun(tmp_path).seal(0, [Collected(rollouts, logged_columns=logged)], step=0, needed_from=0)
    table = pq.read_table(tmp_path / "completions_00000.parquet").to_pydict()
    assert table["completion"] == [r"\ud800" + " \x1b", "plain", ""]
    assert table["mixed"] == ["1", "a", None]
    assert table["surrogate"] == [r"\ud800", "b", None]


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine", encoding="utf-8")
    folder = tmp_path / "completions"
    folder.mkdir()
    for suffix in ("parquet", "part"):
        (folder / f"completions_00000.{suffix}").symlink_to(target)
    Journal(folder, 0, 1, keep=9).seal(0, [part(0)], step=0, needed_from=0)
    assert target.read_text(encoding="utf-8") == "mine"
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="link is a symbolic link"):
        Journal(tmp_path / "link", 0, 1, keep=9).seal(0, [part(0)], step=0, needed_from=0)


def episode(group: int, *, reward: float | None, turns: int = 2) -> Rollout:
    completion = Completion([5, 6], "stop", [-0.1, -0.5], [True, True], [3, 4])
    call = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2\ud800"},
        {"role": "assistant", "content": "two"},
    ]
    return Rollout(
        [Turn([1, 2], completion), Turn([1, 2, 5, 6, 9], completion)][:turns],
        {"prompt": [], "prompt_ids": [1, 2]},
        group,
        prompt=[{"role": "user", "content": "1+1"}],
        text=said[: 2 * turns - 1],
        rewards={"World": reward},
        reward=float("nan") if reward is None else reward,
        advantage=0.5,
        episode=Episode("World", "tool_done", [0.25, 0.5][:turns], 1, 0, reward, {"won": 1.0}),
    )


def test_episodes_come_back_turn_by_turn(tmp_path: Path) -> None:
    failed = episode(1, reward=None, turns=1)
    failed.text = []
    assert failed.episode is not None
    failed.episode.stop_reason = "environment_error"
    before = [episode(0, reward=1.5), failed, episode(1, reward=2.0)]
    begun(tmp_path).seal(0, [Collected(before[:1]), Collected(before[1:])], step=0, needed_from=0)
    left = begun(tmp_path).left(0, step=0)
    assert left is not None
    after = [one for part in left for one in part.rollouts]
    assert [one.turns for one in after] == [one.turns for one in before]
    for now, then in zip(after, before, strict=True):
        assert now.episode is not None
        assert then.episode is not None
        assert now.episode == dataclasses.replace(then.episode, rewards={})  # the parts are in the metrics
        assert (now.rewards, now.group, now.advantage) == (then.rewards, then.group, then.advantage)
    assert [one.has_failed for one in after] == [False, True, False]
    rows = pq.read_table(tmp_path / "completions_00000.parquet").to_pylist()
    assert [(row["group"], row["turn"], row["turn_reward"], row["environment_reward"]) for row in rows] == [
        (0, 0, 0.25, 1.5),
        (0, 1, 0.5, 1.5),
        (1, 0, 0.25, None),
        (1, 0, 0.25, 2.0),
        (1, 1, 0.5, 2.0),
    ]
    assert rows[0]["turn_text"] == 'assistant: add({"a": 1})\ntool: 2\\ud800'
    assert [row["turn_text"] for row in rows[1:3]] == ["assistant: two", ""]
    assert rows[0]["completion"] == "\n".join(row["turn_text"] for row in rows[:2])
    assert {row["prompt"] for row in rows} == {"user: 1+1"}


def test_a_session_comes_back_with_all_its_conversations(tmp_path: Path) -> None:
    session = episode(0, reward=1.0)
    assert session.episode is not None
    said = [[{"role": "assistant", "content": text}] for text in ("one", "two")]
    session.episode = dataclasses.replace(
        session.episode, said=said, parents=[-1, -1], num_sampled=9, num_dropped=2, rewards={}
    )
    begun(tmp_path).seal(0, [Collected([session])], step=0, needed_from=0)
    (left,) = begun(tmp_path).left(0, step=0) or []
    (after,) = left.rollouts
    assert after.turns == session.turns
    assert after.episode is not None
    assert (after.episode.num_sampled, after.episode.num_dropped) == (9, 2)
    rows = pq.read_table(tmp_path / "completions_00000.parquet").to_pylist()
    assert [(row["turn_text"], row["goes_on_from"]) for row in rows] == [
        ("assistant: one", -1),
        ("assistant: two", -1),
    ]
    assert {row["completion"] for row in rows} == {"assistant: one\n[turn 1 begins a conversation]\nassistant: two"}


def test_a_run_may_mix_rollouts_with_and_without_episodes(tmp_path: Path) -> None:
    begun(tmp_path).seal(0, [Collected([rollout(0)]), Collected([episode(1, reward=1.0)])], step=0, needed_from=0)
    left = begun(tmp_path).left(0, step=0)
    assert left is not None
    assert [one.episode is None for part in left for one in part.rollouts] == [True, False]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_the_experts_of_a_mixture_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    one, other = rollout(0), rollout(1)
    routes = torch.arange(4 * 3 * 2).view(4, 3, 2).to(dtype)
    completion = dataclasses.replace(one.turns[0].completion, routes=routes)
    one.turns[0] = dataclasses.replace(one.turns[0], completion=completion)
    begun(tmp_path).seal(0, [Collected([one, other], {}, {})], step=0, needed_from=0)
    left = begun(tmp_path).left(0, step=0)
    assert left is not None
    found = [rollout.turns[0].completion.routes for rollout in left[0].rollouts]
    assert found[0].dtype == dtype
    assert torch.equal(found[0], routes)
    assert found[1] is None
