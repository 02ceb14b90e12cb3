"""What a run shows while it trains."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from prefrl.generation.vllm.handshake import Waiting
from prefrl.rollout.summary import Tables
from prefrl.run.folder import METRICS_FILE, append_metrics, read_metrics
from prefrl.trainer.progress import notebook
from prefrl.trainer.progress.history import (
    History,
    Row,
    duration,
    ending,
    line,
    next_commands,
    quantity,
    show_ending,
    sparkline,
)
from prefrl.trainer.progress.notebook import NotebookView
from prefrl.trainer.progress.views import RichProgressCallback

LOGS: dict[str, Any] = {
    "loss": -0.0,
    "kl": 0.25,
    "reward": 1.5,
    "rewards/correct/mean": 1.0,
    "rewards/format/mean": 0.5,
    "rewards/format/std": 0.1,
    "completions/mean_length": 7.0,
    "step_time": 2.0,
    "time/generation_s": 1.5,
    "time/forward_s": 0.5,
}


def history(*logs: dict[str, Any], total: int = 20) -> History:
    now = iter([100.0, *(100.0 + 3.0 * i for i in range(1, 99))])
    made = History(clock=lambda: next(now))
    made.begin(step=0, total=total)
    for step, entry in enumerate(logs, 1):
        made.add(step, entry)
    return made


def rollout(prompt: str, text: str, reward: float) -> Any:
    return SimpleNamespace(prompt=prompt, text=text, reward=reward)


def test_the_row_of_a_policy_gradient_step_begins_with_its_reward_and_leaves_the_loss_out() -> None:
    (row,) = history(LOGS).rows
    assert list(row.values.items()) == [("reward", 1.5), ("length", 7.0), ("KL", 0.25)]
    assert row.rewards == {"correct": 1.0, "format": 0.5}
    assert row.phases == {"generation": 1.5, "forward": 0.5}
    assert row.step_s == 2.0
    assert not history({"loss": 0.0, "reward": 1.0, "rewards/correct/mean": 1.0}).rows[0].rewards  # the same number


def test_a_reward_with_the_name_of_a_metric_does_not_take_its_place() -> None:
    (row,) = history(LOGS | {"rewards/length/mean": -0.5}).rows
    assert (row.values["length"], row.rewards["length reward"]) == (7.0, -0.5)


def test_evaluations_are_rows_of_their_own() -> None:
    made = history({"eval_easy_reward": 0.5, "eval_runtime": 3.0}, {"eval_loss": 2.0, "eval_mean_token_accuracy": 0.5})
    assert [row.values for row in made.evaluations] == [{"easy reward": 0.5}, {"loss": 2.0, "accuracy": 0.5}]
    assert not made.rows
    of_policy = made.add(3, {"eval_easy_reward": 0.5, "eval_easy_loss": 0.0, "eval_kl": 0.1})
    assert of_policy is not None
    assert of_policy.values == {"easy reward": 0.5, "KL": 0.1}
    assert made.add(9, {"train_runtime": 1.0}) is None


def test_lines_are_aligned_although_a_step_lacks_a_metric() -> None:
    made = history(LOGS | {"entropy": 1.25})
    first = line(made, made.rows[0])
    row = made.add(12, {name: value for name, value in LOGS.items() if name != "kl"})
    assert row is not None
    second = line(made, row)
    assert first.startswith("step  1/20  reward       1.5  length         7  KL      0.25  entropy      1.25  corr")
    assert second.startswith("step 12/20  reward       1.5  length         7  KL         -  entropy         -  corr")
    assert first.endswith("     2 s/step  57 s left")  # 3 s for 1 step, and 19 to go


def test_the_time_left_counts_from_the_step_at_which_a_run_was_resumed() -> None:
    now = iter([0.0, 10.0])
    made = History(clock=lambda: next(now))
    made.begin(step=90, total=100)
    assert made.seconds_left(90) is None
    assert made.seconds_left(95) == 10.0


def test_sparklines_reach_from_the_lowest_to_the_highest_of_the_last_values() -> None:
    assert sparkline([9.0, *map(float, range(8))], width=8) == "".join(map(chr, range(0x2581, 0x2589)))
    assert sparkline([2.0, float("nan"), 2.0]) == "\u2581\u2581"


def test_quantities_and_durations_are_short() -> None:
    assert [quantity(134_515_008), quantity(1.98e9, "B"), quantity(12)] == ["135 M", "1.98 GB", "12"]
    assert [duration(s) for s in (None, 42.4, 185, 7800)] == ["-", "42 s", "3 min 5 s", "2 h 10 min"]


def test_the_live_view_shows_metrics_times_and_the_best_and_worst_completion() -> None:
    screen = io.StringIO()
    view = RichProgressCallback(Console(file=screen, width=120))
    view.history = history(LOGS, {"eval_reward": 0.75})
    view.history.phase = lambda: "weight_sync"
    samples = [("a", float("nan")), ("b", 0.5), ("c\x1b[2J", 2.0), ("d", -1.0)]
    view.history.show_samples(rollout("p", text, reward) for text, reward in samples)
    view.console.print(view.view())
    rows = [" ".join(row.split()) for row in screen.getvalue().splitlines()]
    assert rows[0].endswith("weight sync")
    assert "reward 1.5 \u2581 generation 75% " + "\u2588" * 18 in rows
    assert "evaluation reward 0.75 step 2" in rows
    assert "best 2 p c\\x1b[2J" in rows
    assert "worst -1 p d" in rows


def test_the_table_of_a_notebook_has_reward_length_kl_and_time(tmp_path: Path) -> None:
    made = history()
    view, state = NotebookView(made), TrainerState(max_steps=20, num_train_epochs=1)
    hooks: Any = (TrainingArguments(str(tmp_path), report_to="none", use_cpu=True), state, TrainerControl())
    view.on_train_begin(*hooks)
    for step, logs in ((1, LOGS), (2, LOGS | {"entropy": 1.0})):
        state.global_step = step
        made.add(step, logs)
        view.on_log(*hooks, logs=logs)
    columns, first, second = view.training_tracker.inner_table
    assert columns == ["Step", "reward", "length", "KL", "correct", "format", "s/step", "entropy"]
    assert first[:4] == [1, "1.5", "7", "0.25"]
    assert second == [2, "1.5", "7", "0.25", "1", "0.5", "2", "1"]
    made.add(2, {"eval_reward": 0.75})
    view.on_evaluate(*hooks)
    columns, first, second = view.training_tracker.inner_table
    assert columns[-1] == "evaluation reward"
    assert first[-2:] == ["", ""]
    assert second == [2, "1.5", "7", "0.25", "1", "0.5", "2", "1", "0.75"]


def test_completions_in_a_notebook_are_folded_text_below_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[list[str]] = []  # what is displayed, each with its updates

    def display(shown: Any, *, display_id: bool) -> Any:
        places.append([shown.data])
        return SimpleNamespace(update=lambda shown: places[-1].append(shown.data))

    monkeypatch.setattr(notebook, "display", display)
    made = history()
    view, state = NotebookView(made), TrainerState(max_steps=20, num_train_epochs=1)
    hooks: Any = (TrainingArguments(str(tmp_path), report_to="none", use_cpu=True), state, TrainerControl())
    view.on_train_begin(*hooks)
    for step, best in ((0, None), (1, "<b>1</b>"), (2, "2\x1b" + "x" * 5000)):
        if best is not None:
            made.show_samples([rollout("1 < 2?", best, 2.0), rollout("p", "bad", -1.0)])
        made.add(step, LOGS)
        view.on_log(*hooks, logs=LOGS)
    ((first, second),) = places
    assert re.fullmatch(r"<details><summary>.*</details>", first, re.DOTALL)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", first, re.DOTALL)
    assert cells == ["best", "2", "1 &lt; 2?", "&lt;b&gt;1&lt;/b&gt;", "worst", "-1", "p", "bad"]
    assert "2\\x1bxxx" in second
    assert "x" * 2500 not in second


@pytest.mark.parametrize("step", [2, 3])
def test_a_resumed_run_replaces_the_rows_of_the_steps_that_it_repeats(step: int, tmp_path: Path) -> None:
    append_metrics(tmp_path, {"run": "a", "step": 1, "loss": 9.0})
    for number in (1, 2, 3):
        append_metrics(tmp_path, {"run": "b", "step": number, "loss": number / 10})
        append_metrics(tmp_path, {"run": "b", "step": number, "eval_loss": number / 10})
    append_metrics(tmp_path, {"run": "b", "step": step, "loss": float("nan")})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"run": "b", "st')  # cut off by a crash
    kept = [(number, loss) for number in range(1, step) for loss in (number / 10, number / 10)]
    found = [(row["step"], row.get("loss", row.get("eval_loss"))) for row in read_metrics(tmp_path)]
    assert found == [*kept, (step, None)]


def test_the_accuracy_of_pairs_is_shown_before_that_of_tokens() -> None:
    logs = {"mean_token_accuracy": 0.75, "rewards/accuracies": 0.5}
    assert Row.of(1, {"loss": 1.0, **logs}).values == {"loss": 1.0, "accuracy": 0.5}
    assert Row.of_evaluation(1, {f"eval_b_{name}": value for name, value in logs.items()}).values == {
        "b accuracy": 0.5
    }


def test_a_run_that_waits_for_a_server_says_for_how_long() -> None:
    screen = io.StringIO()
    waiting = Waiting("http://127.0.0.1:8000", 120.0, Console(file=screen))
    for seconds in (0.1, 1.0, 2.2, 3.0, 11.9, 12.3, 13.0):
        waiting.tell(seconds)
    assert screen.getvalue().splitlines() == [
        "waiting for http://127.0.0.1:8000 (2 of 120 s)",
        "waiting for http://127.0.0.1:8000 (12 of 120 s)",
    ]


def test_a_tracker_that_fails_keeps_no_other_from_its_tables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())  # log_table: AttributeError
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Table=lambda **_: "table", log=told.append))
    tables = Tables(["mlflow", "wandb"])
    for step in (1, 2):
        tables.send("completions", ["a"], [[1]], step=step)
    assert told == [{"completions": "table"}] * 2
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith("mlflow gets no further tables, because it failed: AttributeError")


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "comet_ml"])
def test_trackers_with_tables_get_the_columns_and_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    tracker = SimpleNamespace(
        Table=lambda **table: table,
        log=lambda values, **_: told.append(values["completions"]),
        log_table=lambda *args, **table: told.append((args, table)),
        get_running_experiment=lambda: tracker,
    )
    monkeypatch.setitem(sys.modules, name, tracker)
    Tables(["tensorboard", name]).send("completions", ["a", "b"], [[1, "x"], [2, "y"]], step=3)
    (found,) = told
    expected = {
        "wandb": {"columns": ["a", "b"], "data": [[1, "x"], [2, "y"]]},
        "mlflow": (({"a": [1, 2], "b": ["x", "y"]},), {"artifact_file": "completions_00003.json"}),
        "comet_ml": (("completions.csv",), {"tabular_data": [[1, "x"], [2, "y"]], "headers": ["a", "b"]}),
    }
    if name == "trackio":
        assert found["dataframe"].to_dict("list") == {"a": [1, 2], "b": ["x", "y"]}
    else:
        assert found == expected[name]


HISTORY = [
    {"step": 1, "loss": 0.5, "reward": 0.25},
    {"step": 2, "loss": 0.1, "reward": 0.75},
    {"step": 3, "loss": 0.3, "reward": float("nan")},
    {"step": 4, "loss": 0.2, "reward": 0.5},
    {"step": 4, "train_runtime": 3723.0},
]


def panel(history: list[dict[str, Any]], *, steps: int, max_steps: int) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(ending("grpo", history, where={"model": "runs/a"}, steps=steps, max_steps=max_steps))
    return console.export_text()


def commands_after(folder: Path, algorithm: str, **given: Any) -> list[str]:
    about = {"dataset": "data.jsonl", "rewards": None, "is_chat": True} | given
    return next_commands(algorithm, str(folder), **about)


def test_the_panel_says_where_and_how_it_went() -> None:
    text = panel(HISTORY, steps=4, max_steps=4)
    assert "runs/a" in text
    assert "4 in 1 h 2 min" in text
    assert "first 0.25, last 0.5 at step 4, best 0.75 at step 2" in text  # the reward, not the loss


def test_a_loss_is_best_where_it_is_lowest() -> None:
    text = panel([{k: v for k, v in entry.items() if k != "reward"} for entry in HISTORY], steps=2, max_steps=9)
    assert "first 0.5, last 0.2 at step 4, best 0.1 at step 2" in text
    assert "2 of 9 in 1 h 2 min: ended early" in text


def test_the_commands_have_the_paths_filled_in(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    (tmp_path / "adapter_config.json").touch()
    lines = commands_after(tmp_path, "grpo", rewards=["my.py:f", "string_check(reference='7')"])
    assert [line.split()[1] for line in lines] == ["chat", "generate", "eval", "look", "merge", "report"]
    assert all(f" {tmp_path}" in line for line in lines)
    assert any(
        f"prefrl eval {tmp_path} data.jsonl --reward_funcs my.py:f 'string_check(reference='" in x for x in lines
    )


def test_a_run_with_an_environment_is_played_and_not_evaluated_on_its_prompts(tmp_path: Path) -> None:
    lines = commands_after(tmp_path, "grpo", rewards=["my.py:f"], environment="my_env.py:Game(size=3)")
    assert f"prefrl play 'my_env.py:Game(size=3)' --model {tmp_path}" in lines
    assert not any("prefrl eval" in line for line in lines)
    assert f"""prefrl play '{{"a": "x.py:A"}}' --model {tmp_path}""" in commands_after(
        tmp_path, "grpo", environment={"a": "x.py:A"}
    )


def test_commands_that_the_run_has_no_use_for_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()  # of another run
    assert [line.split()[1] for line in commands_after(tmp_path, "sft")] == ["chat", "generate", "report"]
    assert commands_after(tmp_path, "reward") == [f"prefrl report {tmp_path}"]  # a reward model does not write


def test_a_model_without_a_chat_template_continues_texts(tmp_path: Path) -> None:
    assert commands_after(tmp_path, "sft", is_chat=False)[0] == f"prefrl generate {tmp_path} 'your prompt' --raw"


@pytest.mark.parametrize("saved", [True, False])
def test_the_ending_says_where_the_model_is_and_how_it_is_saved(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r/checkpoint-4").mkdir(parents=True)
    state = TrainerState(global_step=4, max_steps=4, log_history=HISTORY)
    show_ending("sft", state, Path("r"), lambda algorithm, folder: [f"prefrl {algorithm} {folder}"], saved=saved)
    panel, commands = capsys.readouterr().out.split("Next steps:\n")
    assert ("not saved yet; trainer.save_model() writes it to r" in panel) is not saved
    assert ("r/checkpoint-4" in panel) is not saved
    assert commands.split("\n  ") == (["  prefrl sft r\n"] if saved else ["  trainer.save_model()", "prefrl sft r\n"])
