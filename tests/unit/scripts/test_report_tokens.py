"""Tokens on the page about a run and in `prefrl look`: their values, worked out by hand, and their colors."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from prefrl.rollout.journal import write_table
from prefrl.scripts.main import main
from prefrl.scripts.report_page import page, side_by_side
from prefrl.scripts.report_tokens import ADVANTAGE, KL, LOGPROB, RATIO, SCALES, BatchTokens, turns_of
from prefrl.types import Completion, Episode, Turn
from tests.assets import tiny_tokenizer
from tests.unit.scripts.test_report import Parsed, rollout, run_folder, write_batch

IDS: list[int] = tiny_tokenizer(chat_template=None)("a<b")["input_ids"]
LOGPROBS = [-0.25, -3.0, -9.0]
# Of the policy and of the reference. Ratios: e^0, e^1, e^-1; KL: e^d - d - 1 with d = 0, 1, -1.
NOW, REFERENCE = [-0.25, -2.0, -10.0], [-0.25, -1.0, -11.0]
RATIOS = [1.0, math.e, 1 / math.e]
KLS = [0.0, math.e - 2.0, 1 / math.e]


def with_tokens(folder: Path) -> Path:
    """A run whose last batch has a completion of three tokens, and its tokenizer."""
    tiny_tokenizer(chat_template=None).save_pretrained(run_folder(folder))
    write_batch(folder, 2, [completion(1.0), replace(rollout(0, "x", 0.0), advantage=0.0)])
    return folder


def completion(reward: float) -> Any:
    tokens = Completion(IDS, "stop", LOGPROBS, [True] * 3, [0] * 3)
    return replace(rollout(0, "a<b", reward), turns=[Turn([1, 2], tokens)])


def write_record(folder: Path, step: int, row: dict[str, Any], *, run: str = "r") -> None:
    whole = {"group": 0, "num_before": 2, "response_ids": IDS, "sampling_logprobs": LOGPROBS, "logprobs": NOW}
    whole |= {"advantages": [0.5, -1.0, 2.0]} | row
    table = pa.table({name: [value] for name, value in whole.items()})
    about = {b"prefrl": json.dumps({"run": run, "step": step}).encode()}
    write_table(table.replace_schema_metadata(about), folder / "completions" / f"tokens_{step:05d}.parquet")


def batch_of(folder: Path) -> Path:
    return folder / "completions" / "completions_00002.parquet"


def turns(folder: Path, **options: Any) -> BatchTokens:
    return turns_of(
        folder, [folder / "completions" / "completions_00002.parquet"], [(0, 0), (0, 1)], first=2, **options
    )


def values(found: BatchTokens, key: str, *, number: int = 0) -> list[float]:
    return [token.values[key] for token in found.turns[0, number][0].tokens if key in token.values]


def missing(found: BatchTokens) -> dict[str, str]:
    return {scale.key: scale.missing for scale in found.scales if scale.missing}


def test_ratio_advantage_and_kl_of_each_token_are_those_of_the_pass(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    write_record(folder, 2, {"ref_logprobs": REFERENCE})
    found = turns(folder)
    assert [token.text for token in found.turns[0, 0][0].tokens] == ["a", "<", "b"]
    assert values(found, "logprob") == LOGPROBS
    assert values(found, "ratio") == pytest.approx(RATIOS)
    assert values(found, "advantage") == [0.5, -1.0, 2.0]
    assert values(found, "kl") == pytest.approx(KLS)
    assert found.turns[0, 0][0].step == 3
    assert {*missing(found)} == {"teacher_kl"}


def test_what_a_run_does_not_have_is_said(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    assert {*missing(turns(folder))} == {"ratio", "advantage", "kl", "teacher_kl"}
    assert all(words.startswith("not recorded. With journal_tokens=True") for words in missing(turns(folder)).values())
    write_record(folder, 2, {}, run="another run in this folder")
    assert {*missing(turns(folder))} == {"ratio", "advantage", "kl", "teacher_kl"}
    write_record(folder, 2, {"teacher_logprobs": REFERENCE})
    assert missing(turns(folder)) == {"kl": "beta is 0, so there is no reference"}
    assert values(turns(folder), "teacher_kl") == pytest.approx(KLS)


def test_a_completion_that_no_pass_has_seen_has_only_log_probs(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    write_record(folder, 2, {})
    found = turns(folder)
    assert values(found, "logprob", number=1) == [-0.1]
    assert values(found, "ratio", number=1) == []
    assert found.turns[0, 1][0].step is None
    assert "No step has trained on these tokens that is known" in page([folder])


def test_the_last_step_that_learned_from_a_batch_counts(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    for step, now in ((1, -3.0), (2, -2.0), (3, -1.0), (4, -4.0)):
        write_record(folder, step, {"logprobs": [-0.25, now, -9.0]})
    found = turns(folder, end=4)
    assert values(found, "ratio") == pytest.approx([1.0, math.exp(2.0), 1.0])
    assert found.turns[0, 0][0].step == 4


def write_episode(folder: Path) -> None:
    """Make an episode of two turns the last batch, of which a pass has seen both as one response."""
    first, second = [Completion(ids, "stop", [-1.0], [True], [0]) for ids in ([IDS[0]], [IDS[2]])]
    between = [7, 8]
    played = [Turn([1, 2], first), Turn([1, 2, IDS[0], *between], second)]
    talk = [("assistant", "one"), ("user", "and?"), ("assistant", "two")]
    said = [{"role": role, "content": text} for role, text in talk]
    episode = Episode("Talk", "max_turns", [0.5, 0.0], num_calls=3, num_failed_calls=1)
    write_batch(folder, 2, [replace(rollout(0, "x", 1.0), text=said, turns=played, episode=episode)])
    row = {"response_ids": [IDS[0], *between, IDS[2]], "sampling_logprobs": [-1.0, 0.0, 0.0, -1.0]}
    write_record(folder, 2, {**row, "logprobs": [-1.0, -5.0, -5.0, -3.0], "advantages": [1.0, 0.0, 0.0, 2.0]})


def test_the_tokens_of_a_turn_are_found_behind_those_before_it(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    write_episode(folder)
    one, two = turns_of(folder, [batch_of(folder)], [(0, 0)], first=2).turns[0, 0]
    assert (one.tokens[0].values["ratio"], one.tokens[0].values["advantage"], one.reward) == (1.0, 1.0, 0.5)
    assert two.tokens[0].values == {"logprob": -1.0, "ratio": pytest.approx(math.exp(-2.0)), "advantage": 2.0}
    assert "and?" in one.text
    text = page([folder])
    assert "turns: Talk, ended by max_turns, 3 calls, 1 of them failed" in text
    turns = text[text.index("<ol>") : text.index("</ol>")]
    assert (
        turns.index("assistant: one")
        < turns.index("assistant: two")
        < turns.index('aria-label="Tokens of turn 2 of the best')
    )


@pytest.mark.parametrize(
    ("scale", "of_values"),
    [
        (LOGPROB, {-9.0: -4, -4.0: -3, -3.0: -3, -0.6: -1, -0.5: 0, 0.0: 0}),
        (RATIO, {0.4: -4, 0.6: -3, 0.97: -1, 1.0: 0, 1.02: 1, 1.2: 3, 9.0: 4}),
        (KL, {0.0: 0, 0.001: 1, 0.5: 3, 2.0: 4}),
        (SCALES["teacher_kl"], {0.0: 0, 2.0: 4}),
    ],
)
def test_colors_diverge_around_what_is_no_change(scale: Any, of_values: dict[float, int]) -> None:
    assert {value: scale.level(value) for value in of_values} == of_values
    levels = [level for level, _ in scale.legend()]
    assert levels == [*range(levels[0], levels[-1] + 1)]
    assert {*of_values.values()} <= {*levels}


def test_advantages_are_colored_by_their_share_of_the_largest(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    write_record(folder, 2, {"advantages": [0.0, -10.0, 40.0]})
    scale = next(scale for scale in turns(folder).scales if scale.key == ADVANTAGE.key)
    assert [scale.level(value) for value in (0.0, -10.0, 40.0, -40.0)] == [0, -1, 4, -4]
    assert scale.legend()[0] == (-4, "below -30")


def test_the_page_has_the_values_of_each_token_and_what_colors_mean(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    write_record(folder, 2, {"ref_logprobs": REFERENCE})
    text = page([folder])
    spans = re.findall(r'<span class="(logprob[^"]*)" title="(log-prob[^"]*)">(.*?)</span>', text)
    assert spans[:3] == [
        ("logprob0 ratio0 advantage2 kl0", "log-prob -0.25, ratio 1, advantage 0.5, KL 0", "a"),
        ("logprob_3 ratio4 advantage_2 kl3", "log-prob -3, ratio 2.718, advantage -1, KL 0.7183", "&lt;"),
        ("logprob_4 ratio_4 advantage4 kl3", "log-prob -9, ratio 0.3679, advantage 2, KL 0.3679", "b"),
    ]
    assert "3 tokens, as step 3 saw them" in text
    assert '<span class="ratio_4">below 0.5</span>' in text
    assert "None is shown: teacher_kl_coef is 0: no teacher." in text
    options = [attributes["value"] for tag, attributes in Parsed(text).elements if tag == "option"]
    assert options == [*SCALES]


def test_each_color_of_the_page_has_a_style(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    write_record(folder, 2, {"ref_logprobs": REFERENCE, "teacher_logprobs": REFERENCE})
    style = Parsed(page([folder])).texts["style"][0]
    for scale in side_by_side([folder], ["run"])[0].scales:
        for level, _ in scale.legend():
            rule = f'[data-color="{scale.key}"] .{scale.key}{"_" * (level < 0)}{abs(level)}'
            assert (rule in style) == (level != 0)
        assert f'[data-color="{scale.key}"] [data-of="{scale.key}"]' in style


def test_look_writes_the_numbers_where_it_has_no_colors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_tokens(tmp_path / "run")
    assert main(["look", str(folder), "--best", "1", "--tokens", "ratio"]) == 0
    assert "not recorded. With journal_tokens=True" in " ".join(capsys.readouterr().out.split())
    write_record(folder, 2, {})
    assert main(["look", str(folder / "completions"), "--best", "1", "--tokens", "ratio"]) == 0
    assert "a<[2.72]b[0.368]" in capsys.readouterr().out
    (folder / "tokenizer.json").unlink()
    assert main(["look", str(folder), "--best", "1", "--tokens", "ratio"]) == 2
    assert "tokens='ratio': " in capsys.readouterr().err


def test_a_page_with_many_turns_and_tokens_is_small(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    ids, said = IDS * 40, [{"role": "assistant", "content": "<" * 2000}] * 30
    spoken = Completion(ids, "stop", [-1.23456] * 120, [True] * 120, [0] * 120)
    episode = Episode("Talk", "max_turns", [0.5] * 30)
    played = [
        replace(rollout(i // 2, "x", float(i)), text=said, turns=[Turn([1, 2], spoken)] * 30, episode=episode)
        for i in range(40)
    ]
    write_batch(folder, 2, played)
    rows = {"response_ids": ids, "sampling_logprobs": [-1.1] * 120, "advantages": [0.123456] * 120}
    for group in range(20):
        row = {"group": group, "logprobs": [-1.2] * 120, "ref_logprobs": [-1.3] * 120}
        write_record(folder, 2 + group, {**rows, **row, "teacher_logprobs": [-1.4] * 120})
    text = page([folder])
    assert text.count('title="log-prob -1.235, ratio 0.9048') == 16 * 300
    assert text.count("<pre>10 more turns are not shown</pre>") == 16
    assert len(text.encode()) < 3e6


def test_a_page_without_a_tokenizer_has_no_tokens(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    (folder / "tokenizer.json").unlink()
    assert [table.scales for table in side_by_side([folder], ["run"])] == [()]
