"""Traces of chosen steps: which ones, what is in them, and what cannot be recorded."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from prefrl import ConfigError, SFTConfig
from prefrl.options.base import BaseOptions
from prefrl.options.params import kwargs_options
from prefrl.options.run import ProfileParams
from prefrl.trainer.features.profile import StepProfiler, profiler
from tests.contract.cases import make_trainer


def names_in(trace: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}


def config(folder: Path, **options: Any) -> SFTConfig:
    return SFTConfig(output_dir=str(folder), report_to="none", **options)


def test_traces_hold_the_active_steps_and_their_phases(tmp_path: Path) -> None:
    cycles = {"wait": 0, "warmup": 1, "active": 2, "repeat": 2, "skip_first": 1, "record_shapes": True}
    make_trainer("grpo", tmp_path, max_steps=6, profile=True, profile_kwargs=cycles).train()
    traces = sorted((tmp_path / "profile").iterdir())
    # Steps 1 and 2 are left out, 5 is the next warm-up, and training ends within the second trace.
    assert [trace.name for trace in traces] == ["steps-3-4-rank-0.json.gz", "steps-6-6-rank-0.json.gz"]
    names = names_in(traces[0])
    assert {"prefrl: generation", "prefrl: forward", "prefrl: backward", "aten::mm"} <= names
    assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#2", "ProfilerStep#3"}


def test_nothing_is_recorded_outside_of_the_window_and_other_processes(tmp_path: Path) -> None:
    # Training ends where the second trace would begin.
    cycles = {"wait": 0, "active": 1, "repeat": 0}
    make_trainer("sft", tmp_path, max_steps=3, profile=True, profile_kwargs=cycles).train()
    assert [trace.name for trace in (tmp_path / "profile").iterdir()] == ["steps-2-2-rank-0.json.gz"]
    args = config(tmp_path, profile=True)
    for ranks, is_traced in ((None, True), ([0], True), ([1], False)):
        args.profile_kwargs = {"ranks": ranks}
        found = profiler(args)
        assert isinstance(found, StepProfiler)
        assert found.is_traced is is_traced


def test_a_window_after_the_end_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, max_steps=3, profile=True, profile_kwargs={"skip_first": 1})
    with pytest.raises(ConfigError, match=r"profile=True has no effect because training ends after 3 steps"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"profile_kwargs": {"active": 2}}, "profile_kwargs={'active': 2} has no effect", id="off"),
        pytest.param({"profile": True, "profile_kwargs": {"active": 0}}, "active=0: must be a number >= 1", id="none"),
        pytest.param({"profile": True, "profile_kwargs": {"ranks": [1]}}, "ranks=[1]: must be numbers", id="rank"),
        pytest.param(
            {"profile": True, "profile_kwargs": {"shapes": True}}, "Did you mean 'record_shapes'?", id="name"
        ),
        pytest.param(
            {"profile": True, "profile_kwargs": '{"memory_snapshot": true}'},
            "memory_snapshot=True: only the memory of CUDA devices has a history, and this run is on the CPU",
            id="snapshot",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(tmp_path, strict_options=True, **options)


def test_defaults_are_those_of_the_help(tmp_path: Path) -> None:
    assert config(tmp_path, profile=True).profile_params == ProfileParams()
    (option,) = [option for option in kwargs_options(BaseOptions) if option.name == "profile_kwargs"]
    assert "wait=1, warmup=1, active=3, repeat=1, skip_first=0, ranks=[0]" in option.help
