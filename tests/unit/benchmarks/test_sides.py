"""prefrl's side of the benchmark, and the parts of TRL's that need no TRL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from benchmarks import prefrl_side
from benchmarks.inputs import END, POLICY_SEED, TokenCounter, build_model, completions_of, prompts_of
from benchmarks.job import Setup
from benchmarks.meter import TurnMeter
from benchmarks.trl_side import ForcedEnd, ScriptedGenerate
from benchmarks.truncation import FORMS, SAMPLING, cells, workload_of
from benchmarks.worker import Turn
from benchmarks.workloads import CPU_WORKLOADS, CUDA_WORKLOADS, Task, Workload
from prefrl.errors import ConfigError
from prefrl.generation.base import SamplingParams
from prefrl.generation.local import generator as local
from prefrl.generation.local.generator import LocalGenerator
from prefrl.losses.truncation import Truncation
from tests.unit.benchmarks.conftest import TINY, measured, tiny

WORKLOADS = CPU_WORKLOADS + CUDA_WORKLOADS
WITH_LIGER = [workload for workload in WORKLOADS if workload.options.get("use_liger_kernel")]


class OpenPipe:
    """A parent that always allows the next turn."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.num_allowed = 0

    def recv(self) -> None:
        self.num_allowed += 1

    def send(self, turn: Turn) -> None:
        self.turns.append(turn)


def setup_of(workload: Workload, folder: Path, pipe: Any = None, *, num_turns: int = 3) -> Setup:
    counter = TokenCounter()
    meter = TurnMeter(pipe, num_turns=num_turns, device="cpu", count_tokens=lambda: counter.total)
    return Setup(workload, meter, counter, str(folder), "cpu", num_turns)


@pytest.fixture
def uniform_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling is as before after the test."""
    monkeypatch.setattr(local, "uniform_numbers", local.uniform_numbers)


@pytest.mark.parametrize("workload", [w for w in WORKLOADS if w not in WITH_LIGER], ids=lambda workload: workload.name)
def test_prefrl_accepts_the_options_of_each_workload(workload: Workload, tmp_path: Path) -> None:
    config = prefrl_side.config_of(setup_of(workload, tmp_path))
    assert config.max_steps == 3 * workload.steps_per_turn
    if workload.is_online:
        assert config.completions_per_rank == len(workload.lengths) * workload.num_prompts
        assert config.num_generations == (1 if workload.task == "gkd" else len(workload.lengths))


@pytest.mark.parametrize("workload", WITH_LIGER, ids=lambda workload: workload.name)
def test_a_workload_with_liger_is_that_of_another_row_and_needs_a_gpu(workload: Workload, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Triton programs for GPUs"):
        prefrl_side.config_of(setup_of(workload, tmp_path))
    options = {name: value for name, value in workload.options.items() if name != "use_liger_kernel"}
    twin = replace(workload, options=options)
    assert any(twin == replace(w, name=twin.name, title=twin.title) for w in CUDA_WORKLOADS)


def test_names_of_workloads_are_unique() -> None:
    assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS)


@pytest.mark.parametrize(
    ("task", "num_tokens"),
    [
        ("grpo_loss", 2 * 18),  # 2 prompts, completions alone
        ("grpo", 2 * 18),
        ("generation", 2 * 18),
        ("distillation", 2 * 18),
        ("gkd", 18),
        ("dpo", 18 + 4 * 6),  # each of 4 rows with a prompt of 6
        ("kto", 18 + 4 * 6),
        ("reward", 18 + 4 * 6),
        ("sft", 18),
    ],
)
@pytest.mark.usefixtures("uniform_numbers")
def test_each_task_runs_the_tokens_that_its_workload_says(task: Task, num_tokens: int, tmp_path: Path) -> None:
    options = {"num_prompts": 2, "options": {"beta": 0.04}} if num_tokens == 2 * 18 else {}
    workload, pipe = tiny(task, **(options | ({"options": {"lmbda": 0.0}} if task == "gkd" else {}))), OpenPipe()
    outcome = prefrl_side.build(setup_of(workload, tmp_path, pipe))()
    assert workload.num_tokens == num_tokens
    assert pipe.num_allowed == len(pipe.turns) == 3
    counts = [turn.num_tokens for turn in pipe.turns] if workload.is_online else list(outcome.num_tokens)
    assert counts == [num_tokens] * 3
    assert all(turn.cpu_s > 0 and turn.wall_s > 0 for turn in pipe.turns)
    if task != "generation":
        assert outcome.grad_norm is not None
        assert outcome.grad_norm > 0


@pytest.mark.usefixtures("uniform_numbers")
def test_a_turn_may_be_several_optimizer_steps(tmp_path: Path) -> None:
    workload = tiny("grpo", steps_per_turn=2, options={"beta": 0.0, "num_iterations": 2})
    pipe = OpenPipe()
    prefrl_side.build(setup_of(workload, tmp_path, pipe))()
    assert [turn.num_tokens for turn in pipe.turns] == [18, 18, 18]


def test_the_reward_differs_within_each_group_of_given_completions() -> None:
    for workload in WORKLOADS:
        if workload.task == "grpo_loss":
            for group in completions_of(workload).values():
                assert len(set(TokenCounter().reward()(completion_ids=group))) > 1
                assert [len(ids) for ids in group] == list(workload.lengths)
                assert all(ids.index(END) == len(ids) - 1 for ids in group)


@pytest.mark.usefixtures("uniform_numbers")
def test_forced_lengths_of_prefrl_leave_the_other_tokens_random() -> None:
    lengths = (3, 9, 1, 6)
    model = build_model(TINY, seed=POLICY_SEED).eval()
    generator = LocalGenerator(model)
    sampling = SamplingParams(num_samples=4, max_tokens=9)
    free = generator.generate([[5, 6, 7]], sampling, seeds=[1])
    assert [len(completion.token_ids) for completion in free[0]] != list(lengths)
    prefrl_side.force_lengths(lengths)
    groups = generator.generate([[5, 6, 7], [5, 6, 7, 8]], sampling, seeds=[1, 2])
    for group in groups:
        assert [len(completion.token_ids) for completion in group] == list(lengths)
        assert {completion.finish_reason for completion in group} == {"stop"}
    assert len({tuple(completion.token_ids) for group in groups for completion in group}) > 6


def test_forced_lengths_of_transformers_generate() -> None:
    lengths = (3, 9, 1, 6)
    model = build_model(TINY, seed=POLICY_SEED).eval()
    torch.manual_seed(0)
    output = model.generate(
        torch.tensor([[5, 6, 7]] * 4),
        attention_mask=torch.ones(4, 3, dtype=torch.long),
        logits_processor=LogitsProcessorList([ForcedEnd(lengths, prompt_length=3)]),
        do_sample=True,
        max_new_tokens=9,
    )
    assert [row[3:].index(END) + 1 for row in output.tolist()] == list(lengths)


def test_the_end_is_impossible_before_its_place_and_all_else_at_it() -> None:
    force = ForcedEnd((2, 1), prompt_length=3)
    scores = torch.tensor([[9.0, 1.0, 2.0]] * 2)  # the end token is the likeliest
    infinity = torch.inf
    assert force(torch.zeros(2, 3), scores.clone()).tolist() == [[-infinity, 1.0, 2.0], [0.0, -infinity, -infinity]]
    assert force(torch.zeros(2, 4), scores.clone()).tolist()[0] == [0.0, -infinity, -infinity]


def test_scripted_completions_follow_their_prompts_in_any_order() -> None:
    workload = tiny("grpo_loss", num_prompts=2)
    first, second = prompts_of(workload)
    completions = completions_of(workload)
    generate = ScriptedGenerate(completions, workload.prompt_length)
    output = generate(torch.tensor([second] * 4 + [first] * 4))
    for prompt, rows in ((second, output[:4]), (first, output[4:])):
        for completion, row in zip(completions[tuple(prompt)], rows.tolist(), strict=True):
            assert row[: len(prompt) + len(completion)] == prompt + completion


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
def test_both_forms_sample_alike_and_score_differently(sampling: dict[str, Any], tmp_path: Path) -> None:
    softmax, exact = (prefrl_side.config_of(setup_of(workload_of(512, sampling, form), tmp_path)) for form in FORMS)
    assert softmax.sampling_params() == exact.sampling_params()  # type: ignore[attr-defined]
    cuts = {name: value for name, value in sampling.items() if name != "temperature"}
    assert (softmax.scoring_truncation, exact.scoring_truncation) == (None, Truncation(**cuts))


def test_ratios_are_of_consecutive_turns() -> None:
    softmax = measured([1.0, 2.0, 4.0], num_tokens=3, peak_mib=1000.0).turns
    exact = measured([3.0, 3.0, 4.0], num_tokens=3, peak_mib=2000.0).turns
    assert cells(softmax, exact) == [
        "2.00 (1.00 to 4.00)",
        "3.00 (3.00 to 4.00)",
        "1.50 (1.00 to 3.00)",
        "1,000",
        "2,000",
    ]
