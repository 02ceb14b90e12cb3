"""`prefrl replay`: past steps are computed again, bit by bit, and what cannot be is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig

from prefrl import GRPOConfig
from prefrl.errors import NonFiniteError
from prefrl.scripts.main import main
from prefrl.scripts.replay import Replay, _Pair, config_of_run
from tests.assets import tiny_tokenizer
from tests.contract.cases import dataset_of, make_trainer, model_of, stopping_model

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
ADAM: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-2}
# Saved in the middle of rollouts that are visited twice; the reference is the model that the run began with.
REUSE: dict[str, Any] = {"num_iterations": 2, "beta": 0.1, "reward_weights": [2.0, 1.0]}
# Metrics are named after the rewards, which must be in their order.
BALANCED = {"reward_balance": "gradnorm"}
# Evaluations have other rewards than those in the journal.
EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 6,
    "pass_at_k_kwargs": {"k": [1], "reward": "ends_early"},
    "eval_reward_weights": [2.0],
}


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def ends_early(completions: list[str], **_: Any) -> list[float]:
    return [1.0 / (1 + len(text)) for text in completions]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "reuse": ("grpo", {**REUSE, **BALANCED, "reward": [length, ends_early]}),
    "adapter": (
        "grpo",
        {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), "beta": 0.1, "ema_decay": 0.5},
    ),
    "critic, stop strings and evaluations": (
        "ppo",
        {
            "critic_learning_rate": 1e-2,
            "stop": ["a", "e", "1"],
            **EVALUATED,
            "eval_reward_funcs": ends_early,
            "eval_dataset": dataset_of("ppo", 2),
        },
    ),
    "episodes": ("grpo", {"talks": "forgetful", "turn_credit": "return", "beta": 0.0}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    stopping_model().save_pretrained(folder)
    return str(folder)


def files_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_an_online_run_is_the_same_bit_by_bit(
    case: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm, options = CASES[case]
    trainer = make_trainer(algorithm, tmp_path, **{**SAVING, **ADAM, **options}, model=model)
    trainer.train()
    before = files_of(tmp_path)
    capsys.readouterr()
    assert main(["replay", str(tmp_path), "--step", "5"]) == 0
    assert files_of(tmp_path) == before
    shown = capsys.readouterr().out
    (entry,) = [entry for entry in trainer.state.log_history if entry["step"] == 5 and "loss" in entry]
    rows = [line.split() for line in shown.splitlines()]
    assert ["loss", *[f"{entry['loss']:.6g}"] * 2] in rows
    (verdict,) = re.findall(r"Verdict: All (\d+) numbers that the run logged of this step are the same", shown)
    assert int(verdict) == sum(len(row) == 3 and row[2] == f"{entry.get(row[0], math.nan):.6g}" for row in rows) > 20
    assert "Completions and rewards were read from" in shown
    assert f"prefrl look {tmp_path} --step 5" in shown


SAME = [_Pair("loss", 0.5, 0.5), _Pair("grad_norm", math.nan, math.nan), _Pair("new", 1.0, None)]


@pytest.mark.parametrize(
    ("pairs", "first", "verdict"),
    [
        (SAME, 4, "All 2 numbers that the run logged of this step are the same to the last digit."),
        (
            [*SAME, _Pair("kl", 1.0, 1.25), _Pair("entropy", 1.0, 1.01)],
            4,
            "2 of 4 .* kl most, by 2.0e-01 .*more",
        ),
        (
            [*SAME, _Pair("kl", 1.0, 1.000001)],
            4,
            "1 of 3 .* kl most, by 1.0e-06 of its value. This is rounding",
        ),
        ([*SAME, _Pair("kl", math.nan, 1.0)], 4, "1 of 3 numbers .* kl most, by inf .* more than rounding"),
        (SAME, 2, "The run logged only the mean of steps 2 to 4, so there is nothing to compare."),
        (SAME, None, "The run logged nothing at this step"),
    ],
)
def test_the_verdict_says_what_differs_and_by_how_much(pairs: list[_Pair], first: int | None, verdict: str) -> None:
    replay: Any = SimpleNamespace(step=4)
    assert re.match(verdict, Replay._verdict(replay, pairs, first))


def test_from_a_checkpoint_without_the_optimizer_one_step_can_be_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"checkpoint_kwargs": {"save_optimizer": False}, "upload_to": str(tmp_path / "mounted"), "beta": 0.0}
    options["lr_scheduler_type"] = "linear"
    trainer = make_trainer("grpo", tmp_path / "run", **SAVING, **ADAM, **options)
    trainer.train()
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "run"), "--step", "4"]) == 0
    (entry,) = [entry for entry in trainer.state.log_history if entry["step"] == 4 and "loss" in entry]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert all([name, *[f"{entry[name]:.6g}"] * 2] in rows for name in ("grad_norm", "learning_rate"))
    assert main(["replay", str(tmp_path / "run"), "--step", "5"]) == 2
    assert "only step 4 can be recomputed" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of GRPO without a reference, of a model without a name."""
    folder = tmp_path_factory.mktemp("run")
    make_trainer("grpo", folder, **SAVING, journal_keep=1, beta=0.0).train()
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "0"], "step=0: must be a number >= 1"),
        ([], "step: not given. Write prefrl replay RUN --step N"),
        (["--step", "3"], "step=3: .* has no complete checkpoint of an earlier step"),
        (["--step", "7"], "step=7: the run has 6 steps"),
        (["--step", "4"], "generation batch 3, which step 4 learns from first, is not in the journal"),
    ],
)
def test_a_step_that_cannot_be_computed_is_refused(
    arguments: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "completions" / "completions_00003.parquet").unlink(missing_ok=True)
    capsys.readouterr()
    assert main(["replay", str(run), *arguments]) == 2
    errors = capsys.readouterr().err
    assert re.search(message, errors), errors


@pytest.mark.parametrize("option", [{"on_spike": "rollback"}, {"increase_batch_size_on_plateau": 1}], ids=str)
def test_a_run_that_chose_its_steps_is_refused(
    option: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer("grpo", tmp_path, **{**SAVING, "max_steps": 4}, **option, beta=0.0).train()
    assert main(["replay", str(tmp_path), "--step", "4"]) == 2
    ((name, value),) = option.items()
    assert f"with {name}={value!r}, the journal does not record" in capsys.readouterr().err


def test_a_run_whose_rate_followed_evaluations_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluates = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "reduce_on_plateau": 1,
        "eval_dataset": dataset_of("grpo", 2),
    }
    keys = {"metric": "eval_reward", "mode": "max"}
    make_trainer("grpo", tmp_path, **SAVING, **evaluates, reduce_on_plateau_kwargs=keys, beta=0.0).train()
    assert main(["replay", str(tmp_path), "--step", "4"]) == 2
    assert "a learning rate that is reduced by a metric of evaluations" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        {"eval_strategy": "epoch", "eval_epochs": 0.5, "evaluate_training_set": True},
        {"save_strategy": "epoch", "save_epochs": 2.0},
        {"eval_strategy": "steps", "eval_steps": 2, "warmup_evaluations": 1},
        {"eval_strategy": "steps", "eval_steps": 2, "reduce_on_plateau": 1},
        {"profile": True, "profile_kwargs": {"wait": 0}},
        {"journal_tokens": True},
    ],
    ids=str,
)
def test_a_replay_has_no_use_for_what_surrounds_the_steps(options: dict[str, Any], tmp_path: Path) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)
    (tmp_path / "training_args.json").write_text(config.to_json_string(), encoding="utf-8")
    replayed = config_of_run(tmp_path, "grpo", str(tmp_path / "scratch"))
    assert (replayed.eval_strategy, replayed.save_strategy, replayed.profile) == ("no", "no", False)
    assert replayed.warmup_steps == config.warmup_steps


def test_folders_that_hold_too_little_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "has no run.json" in capsys.readouterr().err
    make_trainer("sft", tmp_path / "sft", **SAVING).train()
    assert main(["replay", str(tmp_path / "sft"), "--step", "4"]) == 2
    assert "sft learns from a dataset, which the folder does not hold" in capsys.readouterr().err
    make_trainer("grpo", tmp_path / "grpo", **SAVING).train()  # beta > 0
    assert main(["replay", str(tmp_path / "grpo"), "--step", "4"]) == 2
    assert "was passed as an instance without a name" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["ppo", "dpo", "reward"])
def test_a_step_that_was_kept_is_computed_with_the_weights_before_it(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = make_trainer(algorithm, tmp_path / "whole", max_steps=2)
    whole.train()
    broken: Any = make_trainer(algorithm, tmp_path / "broken", max_steps=2)
    loss = broken.loss

    def nan(model: Any, batch: Any) -> Any:
        output = loss(model, batch)
        factor = math.nan if broken.state.global_step == 1 else 1.0
        return type(output)(output.total * factor, output.metrics)

    broken.loss = nan
    with pytest.raises(NonFiniteError):
        broken.train()
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "broken" / "nan-step-2")]) == 0
    shown = capsys.readouterr().out
    entry = [entry for entry in whole.state.log_history if "loss" in entry][1]
    assert f" {entry['loss']:.9g} " in shown
    assert f" {entry['grad_norm']:.9g} " in shown or algorithm == "ppo"  # logged of the policy alone
    assert "Every loss and every gradient is finite here." in shown


def test_the_first_row_that_is_not_finite_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of("sft")
    token = tiny_tokenizer().convert_tokens_to_ids("W")  # in two of the eight prompts
    model.get_input_embeddings().weight.data[token] = math.nan
    trainer = make_trainer("sft", tmp_path, model=model, freeze=["embed_tokens"], max_steps=3)
    with pytest.raises(NonFiniteError):
        trainer.train()
    (kept,) = tmp_path.glob("nan-step-*")
    capsys.readouterr()
    assert main(["replay", str(kept)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Process 0, micro-batch 0: the loss of rows [" in shown
    assert "alone is nan: prompt 'What is 23 + 4?" in shown
    assert "Next step: Look at these rows" in shown
    assert main(["replay", str(kept), "--step", "1"]) == 2
    assert "step=1 has no effect" in capsys.readouterr().err
