"""The page about a run: what is on it, what is escaped, how it is served."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import math
import os
import re
import socket
import stat
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.rollout.collect import Collected
from prefrl.rollout.journal import Entry, write_entry
from prefrl.run.folder import Identity, record_start, write_identity
from prefrl.scripts.main import main
from prefrl.scripts.report import LivePage, serve
from prefrl.scripts.report_page import histograms_of, page, side_by_side
from prefrl.scripts.report_record import events_of, read_run, state_of, thinned
from prefrl.types import Completion, Rollout, Turn
from tests.patience import PATIENCE

HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e"


def rollout(group: int, text: str, reward: float, *, prompt: str = "1+1=") -> Rollout:
    return Rollout(
        [Turn([1, 2], Completion([5], "stop", [-0.1], [True], [0]))],
        {"prompt": prompt, "prompt_ids": [1, 2]},
        group,
        prompt=prompt,
        text=text,
        rewards={"right": reward},
        reward=reward,
        advantage=0.0,
        greedy_reward=math.nan,
    )


def write_batch(folder: Path, step: int, rollouts: list[Rollout], *, place: str = "completions/completions") -> None:
    write_entry(Entry("r", step, step, [Collected(rollouts, {}, {})]), folder / f"{place}_{step:05d}.parquet")


def write_metrics(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"run": "r", **row}) + "\n" for row in rows), encoding="utf-8"
    )


def run_folder(folder: Path, **decisive: Any) -> Path:
    folder.mkdir(parents=True)
    write_identity(folder, Identity("r", {"algorithm": "grpo", "seed": 7, **decisive}, "some/model"))
    times = {"step_time": 4.0, "time/generation_s": 3.0, "time/backward_s": 1.0}
    write_metrics(folder, [{"step": i, "loss": 1.0, "reward": i / 4, "epoch": 0.1, **times} for i in range(1, 4)])
    write_batch(folder, 0, [rollout(0, "3", 0.0), rollout(0, "4", 0.0)])
    write_batch(folder, 2, [rollout(0, "5", 0.25), rollout(0, HOSTILE, 1.0)])
    return folder


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and the texts of each kind, up to the first element in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open][-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.texts["script"][0])


def test_what_a_model_wrote_is_text_and_nothing_else(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "<b>run</b>", note="<img src=y>")
    write_batch(folder, 3, [rollout(0, HOSTILE, 0.0, prompt=f"prompt {HOSTILE}")])
    parsed = Parsed(page([folder]))
    assert [dict(attributes) for tag, attributes in parsed.elements if tag == "script"] == [
        {"type": "application/json", "id": "data"},
        {},
    ]
    assert "img" not in parsed.texts
    assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert parsed.texts["pre"] == [f"prompt {shown}", shown, shown]  # best and worst of one
    assert parsed.data["names"] == ["b>"]  # the folder's name ends behind its last slash
    assert "<img src=y>" in parsed.texts["td"]


def test_control_characters_of_names_and_recorded_commands_are_shown_as_text(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    write_metrics(folder, [{"step": 1, "re\x00w\x1b\u202eard": 1.0}])
    start = {
        "run": "r",
        "time": "now\x1b",
        "command": "prefrl\x00",
        "versions": {"to\u202erch": "\x1b"},
        "platform": "\ud800",
    }
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n", encoding="utf-8")
    text = page([folder])
    assert text.replace("\n", "").isprintable()
    parsed = Parsed(text)
    assert r"re\x00w\x1b\u202eard" in parsed.data["curves"]
    assert parsed.texts["pre"][-1] == r"prefrl\x00"


def test_the_page_loads_nothing_and_runs_only_its_own_script(tmp_path: Path) -> None:
    parsed = Parsed(page([run_folder(tmp_path / "run")]))
    addresses = [a[name] for _, a in parsed.elements for name in ("src", "href", "srcset", "action") if name in a]
    assert addresses == ["data:,"]
    (policy,) = [str(a["content"]) for tag, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(parsed.texts["script"][1].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in policy
    assert "url(" not in parsed.texts["style"][0]
    assert "@import" not in parsed.texts["style"][0]


def test_curves_times_options_and_command_are_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run")
    monkeypatch.setattr("sys.orig_argv", ["/x/python", "/x/prefrl", "grpo", "--hub_token", "hf_secret", "--beta=0.1"])
    record_start(folder, "r")
    record_start(folder, "of another run")
    parsed = Parsed(page([folder]))
    assert parsed.data["curves"]["reward"] == [[[1, 0.25], [2, 0.5], [3, 0.75]]]
    assert "epoch" not in parsed.data["curves"]
    text = page([folder])
    assert re.search(r"generation 3 s <span class=\"quiet\">75 %", text)
    assert "<td>seed</td><td>7</td>" in text
    assert parsed.texts["pre"][-1] == "prefrl grpo --hub_token '***' --beta=0.1"
    assert "<td>torch</td>" in text
    assert "hf_secret" not in (folder / "starts.jsonl").read_text()


def test_a_comparison_shows_differing_options_and_the_same_prompts(tmp_path: Path) -> None:
    a, b = run_folder(tmp_path / "a", beta=0.0), run_folder(tmp_path / "b", beta=0.04, only_here=1)
    write_batch(
        b, 3, [rollout(5, "first of its group", 0.5), rollout(5, "second", 1.0), rollout(6, "x", 0, prompt="?")]
    )
    text = page([a, b])
    differing = text[text.index('id="options"') : text.index('id="all-options"')]
    assert re.findall(r"<td>(\w+)</td><td>(.*?)</td><td>(.*?)</td>", differing) == [("beta", "0.0", "0.04")]
    (table,) = side_by_side([a, b], ["a", "b"])
    ((left, right),) = table.pairs
    assert (left.completion, left.step, right.completion, right.step) == ("5", 3, "first of its group", 4)


def test_one_run_shows_first_and_last_evaluation_and_best_and_worst(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    long = "x" * 2000
    for step, texts in ((0, ("a", "b")), (3, ("c", "d"))):
        rows = [rollout(i, text, 0.0, prompt=long + str(i)) for i, text in enumerate(texts)]
        write_batch(folder, step, rows, place="evaluations/eval")
    evaluation, batch = side_by_side([folder], ["run"])
    assert [(x.completion, y.completion, x.step, y.step) for x, y in evaluation.pairs] == [
        ("a", "c", 0, 3),
        ("b", "d", 0, 3),
    ]
    assert evaluation.pairs[1][0].prompt.endswith("x1")
    ((best, worst),) = batch.pairs
    assert (best.reward, worst.reward, worst.completion, worst.step) == (1.0, 0.25, "5", 3)


def test_three_runs_have_a_column_each_and_no_difference(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / f"{name}/run") for name in "abc"]
    write_batch(folders[2], 3, [rollout(7, "6", 0.5)])
    text = page(folders)
    for name in ("run (A)", "run (B)", "run (C)"):
        assert f"checked> {name}</label>" in text
    assert '<th class="n">run (C)</th></tr>' in text
    (table,) = side_by_side(folders, ["a", "b", "c"])
    assert [[sample.completion for sample in columns] for columns in table.pairs] == [["5", "5", "6"]]


def test_evaluations_are_spread_over_the_run_and_show_what_is_new(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    for step in range(0, 50, 5):
        write_batch(folder, step, [rollout(0, f"so it is {step} <i>", 0.0)], place="evaluations/eval")
    (columns,) = side_by_side([folder], ["run"])[0].pairs
    assert [sample.step for sample in columns] == [0, 15, 30, 45]
    assert columns[1].changes(columns[0]) == [("so it is ", False), ("15", True), (" <i>", False)]
    assert "<pre>so it is <ins>45</ins> &lt;i&gt;</pre>" in page([folder])


def test_what_is_empty_equal_or_long_can_be_read(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", a_long_option_of_the_run="<i>")
    write_batch(folder, 2, [rollout(0, "", 1.0), rollout(0, "word", 1.0)])
    write_batch(folder, 0, [rollout(0, "3", 1.0)])
    text = page([folder])
    assert text.count('<p class="quiet">(empty)</p>') == 1  # the worst of equal ones is another one
    assert "<pre>word</pre>" in text
    assert re.findall(r'<div class="ends">(.*?)</div>', text) == ["<span>1</span>"] * 2
    assert "<td>a_<wbr>long_<wbr>option_<wbr>of_<wbr>the_<wbr>run</td><td>&lt;i&gt;</td>" in text


def test_histograms_of_a_reward_have_the_same_bins(tmp_path: Path) -> None:
    ((first, last),) = histograms_of(run_folder(tmp_path / "run"))
    assert (first.step, last.step, first.low, last.high) == (1, 3, 0.0, 1.0)
    assert [i for i, count in enumerate(first.counts) for _ in range(count)] == [0, 0]
    assert [i for i, count in enumerate(last.counts) for _ in range(count)] == [5, 19]


@pytest.mark.parametrize("count", [1, 5, 6, 7, 1000])
def test_a_thinned_curve_keeps_its_last_point_and_its_level(count: int) -> None:
    points = [(step, 2.0 * step) for step in range(1, count + 1)]
    few = thinned(points, 5)
    assert len(few) <= 5
    assert few[-1] == points[-1]
    assert few == sorted(few)
    assert points[0][1] <= few[0][1] <= max(points[0][1], 2.0 * count / 3)


def test_the_mean_of_every_reward_is_drawn_behind_the_total(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    parts = {f"rewards/r{i:02}/mean": 0.5 for i in range(12)}
    others = {"kl": 0.1, "entropy": 1.0, "grad_norm": 1.0, "learning_rate": 1e-6}
    write_metrics(folder, [{"step": 1, "loss": 0.0, "reward": 0.5, **others, **parts}])
    shown = page([folder]).split('id="more-curves"')[0]
    assert re.findall(r'data-metric="([^"]+)"', shown) == ["reward", *parts]


@pytest.mark.parametrize(
    ("last", "writer", "seconds", "state"),
    [
        ({"step": 8, "train_runtime": 1.0}, False, 900, "finished"),
        ({"step": 5, "train_runtime": 1.0}, False, 900, "ended at step 5 of 8"),
        ({"step": 5, "loss": 1.0}, False, 1, "stopped at step 5 of 8"),
        ({"step": 5, "loss": 1.0}, True, 1, "live"),
        ({"step": 5, "loss": 1.0}, True, 900, "no news for 15 min"),
        ({"step": 5, "loss": 1.0}, None, 900, "no news for 15 min"),
    ],
)
def test_the_state_of_a_run_is_told_by_its_last_log_and_its_process(
    last: dict[str, Any], writer: bool | None, seconds: float, state: str, tmp_path: Path
) -> None:
    folder = run_folder(tmp_path / "run")
    write_metrics(folder, [{"step": 1, "loss": 1.0}, last])
    (folder / "training_args.json").write_text('{"max_steps": 8}', encoding="utf-8")
    (folder / "starts.jsonl").unlink(missing_ok=True)
    if writer is not None:
        pid = os.getpid() if writer else ended_process()
        (folder / ".writer").write_text(json.dumps({"host": socket.gethostname(), "pid": pid}), encoding="utf-8")
    now = (folder / "metrics.jsonl").stat().st_mtime + seconds
    assert state_of(read_run(folder), now) == state


def ended_process() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_events_are_ranges_of_steps(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    bad = [False, True, True, False, True]
    rows = [
        {
            "step": i,
            "health/signal_fraction": float(not b),
            "guard/skipped_steps": float(i >= 3),
            "rewards/x/none": 0.0,
        }
        for i, b in enumerate(bad)
    ]
    write_metrics(folder, [*rows, {"step": 5, "loss": None}])
    (folder / "nan-step-5").mkdir()
    found = [(event.first, event.last, event.text.split(",")[0]) for event in events_of(read_run(folder))]
    assert found == [
        (1, 2, "No completion had a learning signal."),
        (3, 3, "Steps were skipped"),
        (4, 4, "No completion had a learning signal."),
        (5, 5, "The loss was not finite."),
        (5, 5, "The state before a failed step is in nan-step-5."),
    ]


def test_rows_of_an_earlier_run_in_the_folder_are_not_shown(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    write_metrics(folder, [{"run": run, "step": step, "time": 1e9, "kl": 0.5} for run, step in (("a", 1), ("b", 2))])
    assert Parsed(page([folder])).data["curves"] == {"kl": [[[2, 0.5]]]}


def test_without_metrics_of_its_own_a_run_has_those_of_its_last_checkpoint(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    for step in (9, 10):
        (folder / f"checkpoint-{step}").mkdir()
        state = {"log_history": [{"step": step, "loss": 1.0}], "max_steps": 20}
        (folder / f"checkpoint-{step}/trainer_state.json").write_text(json.dumps(state))
    run = read_run(folder)
    assert (run.step, run.num_steps) == (10, 20)


def test_a_long_comparison_is_small(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name) for name in "abcdef"]
    for folder in folders:
        row = {f"area/long_name_of_metric_{i}": -1.2345678e-05 for i in range(250)}
        write_metrics(folder, [{"step": 1000 + i, **row} for i in range(400)])
        write_batch(folder, 9, [rollout(i, HOSTILE * 1000, i, prompt=f"{HOSTILE * 1000}{i // 2}") for i in range(40)])
    for number in (2, 6):
        assert 1e6 < len(page(folders[:number]).encode()) < 3e6


def test_the_command_writes_a_file_for_this_user_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run")
    other = tmp_path / "other"
    other.write_text("kept")
    (folder / "report.html").symlink_to(other)
    assert main(["report", str(folder)]) == 0
    written = Path(capsys.readouterr().out.strip())
    assert written == folder / "report.html"
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert other.read_text() == "kept"


@pytest.mark.parametrize("command", ["report", "watch"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["."], "has no run.json, metrics.jsonl or checkpoint-N. Pass the output_dir of a run."),
        ([], "runs: not given. Write the output_dir of a run"),
        ([*"abcdefg"], "runs=['a', 'b', 'c', 'd', 'e', 'f', 'g']: are 7, and at most 6 are compared."),
        ([".", "--outptu", "x"], "unknown option '--outptu'."),
    ],
)
def test_errors_are_one_line(
    command: str, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main([command, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_live_page_is_sent_when_it_is_new_and_only_to_this_machine(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    live = LivePage([folder], clock=lambda: 0.0)
    with serve(live, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert server.server_address[0] == "127.0.0.1"

        def get(path: str = live.path, **headers: str) -> tuple[int, str | None, str]:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers["ETag"], answer.read().decode()

        status, tag, text = get()
        assert (status, Parsed(text).data["curves"]["reward"][0][-1]) == (200, [3, 0.75])
        assert get(**{"If-None-Match": str(tag)})[0] == 304
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"run": "r", "step": 4, "reward": 1.0}\n{"run": "r", "step": 5, "rew')
        status, new_tag, text = get(**{"If-None-Match": str(tag)})
        assert (status, Parsed(text).data["curves"]["reward"][0][-1]) == (200, [4, 1.0])
        assert new_tag != tag
        assert get(Host="evil.example:80")[0] == 403
        assert get("/run.json")[0] == 404
        for path in ("/", "/?token=", "/?token=%e9", live.path[:-1], f"{live.path}0", live.path.upper()):
            status, tag, text = get(path)
            assert (status, tag) == (403, None)
            assert "open the address that prefrl watch printed" in text
        assert LivePage([folder]).path != live.path
        with pytest.raises(ConfigError, match=rf"port={server.server_port}: .* in use"):
            serve(LivePage([folder]), server.server_port)
        server.shutdown()
