"""The update does not depend on how the work is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl.registry import REGISTRY
from tests.contract.cases import (
    ONLINE,
    Job,
    make_trainer,
    relative_difference,
    run_on_two_processes,
    update_of,
)

TOLERANCE = 1e-5

Case = tuple[str, dict[str, Any], dict[str, Any]]  # trainer, options, and how the work is cut
History = list[dict[str, float]]  # logs

# Two ways to cut a step, and two to lay it out, at once: what one of them breaks is not made up for by the other.
CUTS: list[dict[str, Any]] = [
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "forward_plan": "packed"},
    {"max_tokens_per_micro_batch": 60, "forward_plan": "padded", "activation_checkpointing": True},
]
# Each alone, and what could break in the code that all variants share, with rows, pairs and groups; and rows that are
# alone.
CUTS_OF_FIRST: list[dict[str, Any]] = [
    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    {"max_tokens_per_micro_batch": 60},
    {"max_tokens_per_micro_batch": 1},
    {"forward_plan": "packed"},
    {"forward_plan": "padded"},
    {"activation_checkpointing": True},
]
STEPS = {"max_steps": 3}
REDUCTIONS: dict[str, list[dict[str, Any]]] = {
    "sft": [
        {"loss_type": "nll"},
        {"loss_type": "dft"},
        {"packing": True, "max_length": 48},
        {"pictures": "qwen2_5_vl", "max_steps": 2},
        {"pictures": "llava", "packing": True, "max_length": 150},
    ],
    "dpo": [
        {"loss_type": ["sigmoid"], "max_steps": 2},
        {"loss_type": ["sft", "hinge", "bco_pair"], "loss_weights": [0.1, 1.0, 0.5], "rpo_alpha": 0.5, "max_steps": 3},
        {"loss_type": ["sigmoid", "sft"], "rpo_alpha": 0.5, "loss_balance": "gradnorm", "max_steps": 3},
        {"loss_type": ["aot"], "label_smoothing": 0.1, "max_steps": 2},
        {"loss_type": ["aot_unpaired"], "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 2},
        {"loss_type": ["ipo"], "ld_alpha": 0.5, "use_weighting": True, "f_divergence_type": "js_divergence"},
        {"loss_type": ["sigmoid"], "precompute_ref_log_probs": True, "max_steps": 2},
        {"pictures": "idefics3", "precompute_ref_log_probs": True, "max_steps": 2, "learning_rate": 0.1},
    ],
    "kto": [
        {"max_steps": 3, "undesirable_weight": 0.5},
        {"loss_type": "apo_zero_unpaired", "max_steps": 2},
        {"precompute_ref_log_probs": True, "max_steps": 2},
        {"pictures": "llava"},
    ],
    "orpo": [{"max_steps": 2}],
    "cpo": [
        {"loss_type": "sigmoid"},
        {"loss_type": "simpo", "cpo_alpha": 0.1},
        {"loss_type": "alphapo", "alpha": 0.5},
    ],
    "bco": [{"max_steps": 3}],
    "reward": [{}, {"center_rewards_coefficient": 0.1}, {"pictures": "qwen2_5_vl"}],
    "grpo": [
        {"loss_type": "dapo", "beta": 0.0},
        {
            "loss_type": "grpo",
            "beta": 0.04,
            "teacher_kl_coef": 0.5,
            "updates": 2,
            "num_iterations": 2,
            "max_steps": 4,
        },
        {
            "loss_type": "dr_grpo",
            "scale_rewards": "none",
            "mask_truncated_completions": True,
            "entropy_coef": 0.1,
        },
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "scale_rewards": "batch"},
        {"advantage_estimator": "optimal_token_baseline", "top_entropy_quantile": 0.3, "entropy_coef": 0.01},
        {
            "loss_type": "kl_cov",
            "loss_kwargs": {"ratio": 0.2},
            "updates": 2,
            "num_iterations": 2,
            "max_steps": 4,
            "beta": 0.0,
        },
        {
            "loss_kwargs": {"positive_nll_coef": 0.2},
            "kl_estimator": "full",
            "rollout_selection": "max_variance",
            "selection_kwargs": {"num_selected": 2},
        },
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "entropy_coef": 0.1,
            "advantage_estimator": "remax",
            "rollout_selection": "max_min",
            "loss_kwargs": {"min_filter_prefix_tokens": 1},
        },
        {
            "kl_kwargs": {"target": 0.1, "horizon": 20},
            "use_adaptive_entropy": True,
            "entropy_kwargs": {"target": 5.0},
            **STEPS,
        },
        {
            "reward_shaping_kwargs": {"normalize": True},
            "dynamic_sampling": True,
            "curriculum": "variance",
            "beta": 0.0,
            **STEPS,
        },
        # Episodes: a row has several responses where the template changes what was said, otherwise one.
        {"talks": "forgetful", "turn_credit": "return", "max_steps": 2},
        {"talks": "faithful", "loss_type": "dr_grpo", "mask_truncated_completions": True},
        {"pictures": "gemma3", "updates": 2, "num_iterations": 2, "max_steps": 4},
    ],
    "rloo": [
        {"teacher_kl_coef": 0.5, "teacher_kl_kwargs": {"in_reward": True}},
        {"talks": "agent", "turn_credit": "return", "turn_discount": 0.9},
        {"num_generations": 4, "updates": 2, "num_iterations": 2, "max_steps": 4, "kl_kwargs": {"target": 0.1}},
    ],
    "reinforce_plus_plus": [
        {"gamma": 0.9, "updates": 2, "max_steps": 2},
        {"talks": "forgetful", "turn_credit": "return"},
        {"advantage_estimator": "reinforce_plus_plus_baseline", "num_generations": 4, "beta": 0.1, "kl_in": "loss"},
    ],
    "ppo": [
        {"lam": 0.9, "teacher_kl_coef": 0.5, "updates": 2, "num_iterations": 2, "max_steps": 4},
        {"talks": "forgetful", "turn_credit": "return", "max_steps": 2},
        {"critic": "model", "critic_warmup": 1, "max_steps": 3, "normalize_advantages": False},
        {"pictures": "llava"},
    ],
    "online_dpo": [
        {"max_steps": 2},
        {"talks": "agent"},
        {"loss_type": "ipo", "num_generations": 4, "learning_rate": 0.01, "max_steps": 2},
    ],
    "distillation": [
        {"beta": 0.5, "num_generations": 1, "updates": 2, "num_iterations": 2, "max_steps": 4},
        {"later_tokens": True, "num_generations": 2, "num_iterations": 2, "max_steps": 2},
        {"talks": "agent", "max_steps": 2},
        {"several": True, "teacher_prompt": "hint", "num_generations": 2, "num_iterations": 2, "max_steps": 2},
    ],
}
# Groups of 8, of which two processes with 4 completions each cannot take equal numbers.
UNEVEN: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"loss_type": "dapo", "num_generations": 8, "max_steps": 2}),
    (
        "grpo",
        {
            "num_generations": 8,
            "updates": 3,
            "advantage_estimator": "remax",
            "loss_kwargs": {"min_filter_prefix_tokens": 1},
            **STEPS,
        },
    ),
    (
        "grpo",
        {
            "num_generations": 8,
            "reward_shaping_kwargs": {"normalize": True},
            "rollout_selection": "max_variance",
            "selection_kwargs": {"num_selected": 5},
            "dynamic_sampling": True,
            "curriculum": "variance",
            **STEPS,
        },
    ),
    ("rloo", {"num_generations": 8, "updates": 2, "num_iterations": 2, "max_steps": 4, "streams": True}),
    ("grpo", {"num_generations": 8, "talks": "forgetful", "turn_credit": "return", "max_steps": 2}),
    ("online_dpo", {"num_generations": 8, "updates": 2, "max_steps": 2}),
]
VARIANTS = [(name, options) for name in REGISTRY for options in REDUCTIONS[name]]
# The second way with one variant of each trainer, and with images and episodes, which have layers and rows of their
# own. The others differ in their losses, which see the same tokens whatever their layout.
FIRSTS = [(name, REDUCTIONS[name][0]) for name in REGISTRY]
OWN = [(name, options) for name, options in VARIANTS if "pictures" in options or "talks" in options]
CUT: list[Case] = [(*variant, CUTS[0]) for variant in VARIANTS]
CUT += [(*variant, CUTS[1]) for variant in [*FIRSTS, *OWN]]
CUT += [(name, REDUCTIONS[name][0], cut) for name in ("sft", "dpo", "grpo") for cut in CUTS_OF_FIRST]
SHARE = {"per_device_train_batch_size": 4}  # of two processes
# Under a budget of tokens, ranks take different numbers of rows.
BUDGET = {**SHARE, "max_tokens_per_micro_batch": 40}
SHARED = [(name, options, SHARE) for name, options in [*VARIANTS, *UNEVEN]]
# Its rounding depends on which rows a micro-batch has.
HALVES: Case = ("grpo", {"num_generations": 8, "bf16": True, "gradient_checkpointing": True, "max_steps": 3}, SHARE)
BUDGETED = [(name, {**REDUCTIONS[name][0], **STEPS}, BUDGET) for name in REGISTRY]


_expected: dict[str, tuple[torch.Tensor, History]] = {}


def expected(name: str, options: dict[str, Any], folder: Path) -> tuple[torch.Tensor, History]:
    """The update and the logs of a variant in one micro-batch on one process, computed once."""
    key = f"{name}{options}"
    if key not in _expected:
        trainer = make_trainer(name, folder, **with_cut(name, options, {}))
        _expected[key] = update_of(trainer), trainer.state.log_history
        assert _expected[key][0].norm() > 1e-3
    return _expected[key]


def history_of(job: Job) -> History:
    """What the main process logged."""
    history: History = json.loads(job.result.with_suffix(".json").read_text(encoding="utf-8"))
    return history


def logged(history: History, name: str) -> list[float]:
    """A metric, one value for each step."""
    return [entry[name] for entry in history if name in entry]


def with_cut(name: str, options: dict[str, Any], cut: dict[str, Any]) -> dict[str, Any]:
    """The options of a variant under a cut; `updates` are optimizer steps for each generation."""
    merged = {**options, **cut}
    updates = merged.pop("updates", 1)
    if name in ONLINE:
        merged["steps_per_generation"] = updates * merged.get("gradient_accumulation_steps", 1)
    return merged


@pytest.mark.parametrize(("name", "options", "cut"), CUT, ids=str)
def test_same_update_for_every_cut(name: str, options: dict[str, Any], cut: dict[str, Any], tmp_path: Path) -> None:
    update, history = expected(name, options, tmp_path)
    trainer = make_trainer(name, tmp_path, **with_cut(name, options, cut))
    assert relative_difference(update_of(trainer), update) < TOLERANCE
    losses = logged(trainer.state.log_history, "loss")
    assert losses == pytest.approx(logged(history, "loss"), rel=TOLERANCE, abs=TOLERANCE)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Everything that two processes share, trained in one launch."""
    folder = tmp_path_factory.mktemp("two")
    jobs = {
        str(case): Job(case[0], with_cut(*case), folder / f"{number}.pt")
        for number, case in enumerate([*SHARED, *BUDGETED, HALVES])
    }
    run_on_two_processes(list(jobs.values()))
    return jobs


@pytest.mark.parametrize("case", [*SHARED, *BUDGETED], ids=str)
def test_same_update_on_two_processes(case: Case, jobs: dict[str, Job], tmp_path: Path) -> None:
    name, options, _ = case
    job, (update, history) = jobs[str(case)], expected(name, options, tmp_path)
    assert relative_difference(torch.load(job.result), update) < TOLERANCE
    assert logged(history_of(job), "num_tokens") == logged(history, "num_tokens")


def test_two_processes_train_on_half_a_group_each_in_bf16(jobs: dict[str, Job], tmp_path: Path) -> None:
    name, options, cut = HALVES
    alone = make_trainer(name, tmp_path, **with_cut(name, options, {**cut, "gradient_accumulation_steps": 2}))
    assert relative_difference(torch.load(jobs[str(HALVES)].result), update_of(alone)) < TOLERANCE


@pytest.mark.parametrize("case", [case for case in SHARED if case[1].get("num_generations") == 8], ids=str)
def test_two_processes_share_the_rows_of_a_group(case: Case, jobs: dict[str, Job]) -> None:
    """All groups of a step; online DPO counts prompts, so that each process has its own."""
    idle = logged(history_of(jobs[str(case)]), "balance/idle_share")
    assert idle
    assert max(idle) < 0.5


@pytest.mark.parametrize("case", BUDGETED, ids=lambda case: case[0])
def test_two_processes_have_about_as_much_to_do(case: Case, jobs: dict[str, Job]) -> None:
    name = case[0]
    idle = logged(history_of(jobs[str(case)]), "balance/idle_share")
    # Consecutive shares leave 13 to 22 % idle. A step of two groups leaves nothing to choose.
    assert len(idle) == STEPS["max_steps"]
    assert name in ("grpo", "rloo", "reinforce_plus_plus") or sum(idle) / len(idle) < 0.11
