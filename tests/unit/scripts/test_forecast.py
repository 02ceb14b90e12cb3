"""Forecasts of the time of a step: their formulas, and the costs that runs and files give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.run.folder import Identity, append_metrics, write_identity
from prefrl.scripts.checkup.forecast import MODES, Costs, Mode, Work, best_split, forecast

COSTS = Costs(flops=1e12, decode_step=0.01, decode_token=0.001, mean_length=100, weights=0.5, rest=0.25)
# 16 s of training on one device; a batch takes 4 s of decoding steps, and 6.4 s of tokens on one server.
WORK = Work(flops=16e12, completions=64, longest=400, mean_length=100)


@pytest.mark.parametrize(
    ("mode", "generation", "step"),
    [
        ("sync", 4 + 3.2, 4 + 3.2 + 4),
        ("overlap", 4 + 3.2, 4 + 3.2),
        ("async", 13.947185, 4.486796),  # 4 / (1 - 3.2 / s) = 4 s - 4
    ],
)
def test_a_step_is_what_its_phases_take_beside_each_other(mode: Mode, generation: float, step: float) -> None:
    found = forecast(WORK, COSTS, trainers=4, servers=2, mode=mode, ahead=3)
    assert found["generation"] == pytest.approx(generation)
    assert found["training"] == pytest.approx(4)
    assert found["step"] == pytest.approx(step + 0.75)


@pytest.mark.parametrize("ahead", [1, 2, 9])
@pytest.mark.parametrize("servers", [1, 8, 64])
def test_ahead_of_training_a_batch_ends_just_in_time_beside_the_others(servers: int, ahead: int) -> None:
    found = forecast(WORK, COSTS, trainers=8, servers=servers, mode="async", ahead=ahead)
    training, tokens, step = 2.0, 6.4 / servers, found["step"] - 0.75
    has_to_end = (ahead + 1) * step - training
    assert step >= max(training, tokens)
    if step > training:  # the servers are what is waited for
        assert found["generation"] == pytest.approx(4 / (1 - tokens / step)) == pytest.approx(has_to_end)
    else:
        assert found["generation"] <= has_to_end


def test_far_ahead_of_training_only_tokens_or_training_bound_a_step() -> None:
    found = [forecast(WORK, COSTS, trainers=8, servers=count, mode="async", ahead=10**6)["step"] for count in (1, 64)]
    assert found == pytest.approx([6.4 + 0.75, 2.0 + 0.75], rel=1e-4)


def test_a_batch_that_only_takes_tokens_bounds_a_step_by_them() -> None:
    costs = Costs(flops=1e12, decode_step=0, decode_token=0.001, mean_length=100)
    found = forecast(WORK, costs, trainers=8, servers=1, mode="async", ahead=2)
    assert (found["generation"], found["step"]) == pytest.approx((6.4, 6.4))


def test_gathering_weights_bounds_training_on_several_devices() -> None:
    costs = Costs(flops=1e12, decode_step=0, decode_token=0, mean_length=1, network=1e9)
    work = Work(flops=16e12, completions=1, longest=1, mean_length=1, weight_bytes=10**9, micro_batches=4)
    found = [forecast(work, costs, trainers=count, servers=1)["training"] for count in (1, 2, 64)]
    assert found == pytest.approx([16, 12, 12])


@pytest.mark.parametrize("mode", MODES)
def test_the_best_split_is_the_best_of_all(mode: Mode) -> None:
    costs = Costs(flops=1e12, decode_step=0.01, decode_token=0.001, mean_length=100, devices_per_server=3)
    servers, found = best_split(WORK, costs, 16, mode)
    all_steps = [
        forecast(WORK, costs, trainers=16 - 3 * count, servers=count, mode=mode)["step"] for count in range(1, 6)
    ]
    assert found["step"] == min(all_steps) == all_steps[servers - 1]
    with pytest.raises(ConfigError, match="3 devices do not suffice"):
        best_split(WORK, costs, 3, mode)


def write_run(folder: Path, steps: list[dict[str, Any]], **decisive: Any) -> str:
    sizes = {"prompts_per_generation": 2, "num_generations": 4, "steps_of_a_generation": 1, "generation_mode": "sync"}
    folder.mkdir(exist_ok=True)
    write_identity(folder, Identity("run", {**sizes, **decisive}))
    for number, step in enumerate(steps, 1):
        append_metrics(folder, {"run": "run", "step": number, "time": 0.0, **step})
    return str(folder)


def step(longest: float, mean: float, *, seconds: float, **more: float) -> dict[str, float]:
    passes = {"perf/flops": 4e9, "perf/tflops_per_s": 0.002}
    lengths = {"completions/max_length": longest, "completions/mean_length": mean}
    return {**passes, **lengths, "time/generation_s": seconds, **more}


def test_costs_of_runs_explain_their_steps(tmp_path: Path) -> None:
    """Decoding steps of 0.01 s and tokens of 0.002 s; the first step, which loads libraries, does not count."""
    sizes = [(9, 9), (20, 10), (40, 30), (40, 10)]
    steps = [step(most, mean, seconds=0.01 * most + 0.002 * 8 * mean, **{"time/other_s": 0.5}) for most, mean in sizes]
    steps[0]["time/generation_s"] = steps[0]["time/other_s"] = 100.0
    costs = Costs.read([write_run(tmp_path / "a", steps[:3]), write_run(tmp_path / "b", [steps[0], *steps[3:]])])
    assert costs == Costs(
        flops=pytest.approx(2e9),
        decode_step=pytest.approx(0.01),
        decode_token=pytest.approx(0.002),
        mean_length=pytest.approx(50 / 3),
        rest=pytest.approx(0.5),
    )


def test_the_longest_completion_is_that_of_large_batches_unless_some_were_cut_off(tmp_path: Path) -> None:
    steps = [step(most, 10, seconds=1.0, **{"completions/clipped_ratio": 0.0}) for most in (99, 30, 40)]
    few = write_run(tmp_path / "few", [{**row, "completions/max_length": 20} for row in steps], num_generations=2)
    many = write_run(tmp_path / "many", steps)
    assert Costs.read([few, many]).longest == pytest.approx(35)
    cut_off = write_run(tmp_path / "cut_off", [*steps, {**steps[0], "completions/clipped_ratio": 0.25}])
    assert Costs.read([few, cut_off]).longest is None


def test_steps_of_one_size_are_explained_by_their_tokens(tmp_path: Path) -> None:
    costs = Costs.read([write_run(tmp_path, [step(10, 10, seconds=1.0)] * 3)])
    assert (costs.decode_step, costs.decode_token) == (0, pytest.approx(1 / 80))


def test_no_cost_is_below_zero(tmp_path: Path) -> None:
    """Longer completions took less time: only the number of tokens is left to explain it."""
    steps = [step(10, 5, seconds=9.0), step(10, 5, seconds=1.0), step(40, 5, seconds=0.9), step(10, 10, seconds=2.0)]
    costs = Costs.read([write_run(tmp_path, steps)])
    assert costs.decode_step == 0
    assert costs.decode_token == pytest.approx((40 * 1.0 + 40 * 0.9 + 80 * 2.0) / (40**2 + 40**2 + 80**2))


@pytest.mark.parametrize(
    ("decisive", "steps", "message"),
    [
        ({"steps_of_a_generation": 2}, [step(1, 1, seconds=1.0)] * 2, "one optimizer step for each generation batch"),
        ({"generation_mode": "async"}, [step(1, 1, seconds=1.0)] * 2, "generation_mode='sync'"),
        ({}, [step(1, 1, seconds=1.0)], "no second step"),
        ({}, [{"time/generation_s": 1.0}] * 2, "log_flops"),
    ],
)
def test_a_run_that_holds_no_costs_says_how_to_measure(
    decisive: dict[str, Any], steps: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Costs.read([write_run(tmp_path, steps, **decisive)])


def test_a_folder_of_no_online_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a file nor the folder of a run"):
        Costs.read([str(tmp_path)])
    write_identity(tmp_path, Identity("run", {"algorithm": "sft"}))
    with pytest.raises(ConfigError, match="is not a run that samples completions"):
        Costs.read([str(tmp_path)])


def test_costs_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.yaml"
    values = {"flops": 1e12, "decode_step": 0.01, "decode_token": 0.001, "mean_length": 100}
    file.write_text(json.dumps(values))
    assert Costs.read([str(file)]) == Costs(**values)  # type: ignore[arg-type]
    for change, message in (
        ({"speed": 1}, "must have the keys decode_step, decode_token, flops, mean_length, and may have"),
        ({"flops": "fast"}, "flops: 'fast' is not a number"),
        ({"decode_step": -1}, "decode_step: -1 is not a number of at least 0"),
        ({"flops": 0}, "flops: must be more than 0"),
    ):
        file.write_text(json.dumps(values | change))
        with pytest.raises(ConfigError, match=message):
            Costs.read([str(file)])
    with pytest.raises(ConfigError, match="give one file of costs, or folders of runs"):
        Costs.read([str(file), str(tmp_path)])
