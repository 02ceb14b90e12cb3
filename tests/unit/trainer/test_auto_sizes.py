"""Automatic sizes: what follows from others, how a search goes on, and what is said when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from prefrl import ConfigError, GRPOConfig, SFTConfig
from prefrl.errors import OutOfMemoryError
from prefrl.scripts.parsing.argument_parser import ArgumentParser
from prefrl.trainer.features.sizes import EvaluationSize, Trial, best, candidates, search
from prefrl.trainer.memory import TrialMemory, explained, free_memory, is_out_of_memory
from tests.contract.cases import dataset_of, make_trainer

BOTH = {"per_device_train_batch_size": "auto", "gradient_accumulation_steps": "auto"}


def config(cls: Any = SFTConfig, **options: Any) -> Any:
    return cls(output_dir="runs/x", use_cpu=True, report_to="none", **options)


def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SFTConfig, "world_size", 2)
    monkeypatch.setattr("prefrl.distributed.check_processes", lambda *_: None)


# What follows from the effective batch size.


@pytest.mark.parametrize(
    ("options", "sizes", "sought"),
    [
        pytest.param({"gradient_accumulation_steps": "auto"}, (8, 3), set(), id="accumulation"),
        pytest.param(
            {"per_device_train_batch_size": "auto", "gradient_accumulation_steps": 4}, (6, 4), set(), id="rows"
        ),
        pytest.param(BOTH, (8, 3), {*BOTH}, id="both"),
        pytest.param(
            {**BOTH, "max_tokens_per_micro_batch": "auto"}, (8, 3), {"max_tokens_per_micro_batch"}, id="all three"
        ),
        pytest.param({**BOTH, "max_tokens_per_micro_batch": 9}, (8, 3), set(), id="a budget cuts the step"),
    ],
)
def test_a_step_has_the_effective_batch_size(
    options: dict[str, Any], sizes: tuple[int, int], sought: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_processes(monkeypatch)
    made = config(effective_batch_size=48, **options)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == sizes
    assert made.sought == sought


def test_rows_before_the_search_are_a_divisor_of_those_of_a_step() -> None:
    made = config(effective_batch_size=21, **BOTH)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (7, 3)


RULES = [
    pytest.param(
        SFTConfig,
        {"effective_batch_size": 20, "gradient_accumulation_steps": "auto"},
        r"effective_batch_size=20: must be a multiple of per_device_train_batch_size=8 \* 1 processes. Set 16 or 24",
        id="no multiple",
    ),
    pytest.param(
        SFTConfig,
        {"effective_batch_size": 5, "gradient_accumulation_steps": "auto"},
        "effective_batch_size=5: must be a multiple of .* Set 8",
        id="less than one micro-batch",
    ),
    pytest.param(
        SFTConfig,
        {"effective_batch_size": 16},
        r"effective_batch_size=16: .* is 8. Set gradient_accumulation_steps='auto'",
        id="another product",
    ),
    pytest.param(SFTConfig, {"effective_batch_size": 0}, "effective_batch_size=0: must be a number >= 1", id="zero"),
    pytest.param(
        SFTConfig, {"auto_size_kwargs": {"memory_share": 0.5}}, "auto_size_kwargs=.* has no effect", id="no search"
    ),
    pytest.param(
        SFTConfig,
        {"max_tokens_per_micro_batch": "auto", "auto_size_kwargs": {"memory_share": 1.5}},
        "auto_size_kwargs: memory_share=1.5: must be a number > 0 and <= 1",
        id="share",
    ),
    pytest.param(SFTConfig, {"learning_rate": "fast"}, "learning_rate='fast': must be a number", id="another word"),
    pytest.param(
        SFTConfig,
        {"per_device_train_batch_size": "Auto"},
        "per_device_train_batch_size='Auto': must be an integer",
        id="capital",
    ),
]


@pytest.mark.parametrize(("cls", "options", "message"), RULES)
def test_sizes_that_contradict_each_other_are_refused(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(cls, strict_options=True, **options)


def test_a_generation_keeps_its_size_however_it_is_cut() -> None:
    made = config(GRPOConfig, effective_batch_size=16, generation_batch_size=32, **BOTH)
    for rows in (1, 4, 16):
        made.per_device_train_batch_size, made.gradient_accumulation_steps = rows, 16 // rows
        assert (made.completions_per_rank, made.updates_per_generation) == (32, 2)


# The search.


def trials_of(speeds: dict[int, float], *, bytes_of_row: float = 0.0, gradients: float = 0.0) -> list[Trial]:
    tried = []

    def measure(rows: int) -> Trial | None:
        tried.append(rows)
        return Trial(rows, 10 * rows, speeds[rows], gradients + bytes_of_row * rows)

    trials = search(measure, list(speeds), load=gradients)
    assert [trial.rows for trial in trials] == tried, "a size was tried that does not fit"
    return trials


def test_sizes_double_and_the_last_is_the_largest() -> None:
    assert candidates(1, divides=False) == [1]
    assert candidates(24, divides=False) == [1, 2, 4, 8, 16, 24]
    assert candidates(24, divides=True) == [1, 2, 4, 8, 24]
    assert candidates(15, divides=True) == [1, 3, 15]


def test_what_the_line_through_two_sizes_says_is_too_large_is_not_tried() -> None:
    faster = {rows: float(rows) for rows in (1, 2, 4, 8, 16)}
    # 0.5 + 4 * 0.1 = 0.9 fits, 0.5 + 8 * 0.1 does not.
    assert [trial.rows for trial in trials_of(faster, bytes_of_row=0.1, gradients=0.5)] == [1, 2, 4]
    # The first size predicts the second: gradients are there however few rows there are.
    assert [trial.rows for trial in trials_of(faster, bytes_of_row=0.2, gradients=0.5)] == [1, 2]
    assert [trial.rows for trial in trials_of(faster, bytes_of_row=0.3, gradients=0.5)] == [1]


def test_the_first_size_is_kept_if_it_needs_more_than_its_share() -> None:
    assert [trial.rows for trial in trials_of({1: 1.0, 2: 2.0}, bytes_of_row=1.5)] == [1]


def test_a_search_ends_when_memory_runs_out_or_nothing_is_gained() -> None:
    slower = {1: 10.0, 2: 20.0, 4: 20.1, 8: 20.2, 16: 99.0}
    assert [trial.rows for trial in trials_of(slower)] == [1, 2, 4, 8]
    one_dip = {1: 10.0, 2: 5.0, 4: 20.0, 8: 30.0, 16: 40.0}
    assert [trial.rows for trial in trials_of(one_dip)] == [1, 2, 4, 8, 16]
    fits = search(lambda rows: Trial(rows, rows, rows, 0.0) if rows < 4 else None, [1, 2, 4, 8], load=0.0)
    assert [trial.rows for trial in fits] == [1, 2]


def test_the_smallest_of_the_fast_ones_is_chosen() -> None:
    assert best(trials_of({1: 10.0, 2: 98.9, 4: 99.1, 8: 100.0, 16: 90.0})).rows == 4


def test_memory_counts_what_passes_need_and_what_the_optimizer_will(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    free = free_memory(device)  # once: other processes take and free memory, too
    monkeypatch.setattr("prefrl.trainer.memory.free_memory", lambda _: free)
    memory = TrialMemory(device, share=0.5, trained=0, has_buckets=False)
    before = memory.load
    block = torch.ones(75_000_000)  # 300 MB, above anything that the process has needed
    more = TrialMemory(device, share=0.5, trained=2**30, has_buckets=True)
    grown = memory.load - before
    assert block.sum() > 0
    assert grown * memory._limit == pytest.approx(3e8, rel=0.35)
    assert memory._limit - more._limit == pytest.approx(3 * 2**30)
    assert more.load_of_gradients == pytest.approx(2**30 / more._limit)


# The learning rate, and the command line.


def test_the_automatic_learning_rate_is_the_default_and_ten_times_that_for_an_adapter(tmp_path: Path) -> None:
    auto = {"learning_rate": "auto", "optim": "adamw_torch"}
    assert make_trainer("sft", tmp_path, **auto).args.learning_rate == 2e-5
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    trainer = make_trainer("dpo", tmp_path, **auto, peft_config=adapter)
    assert trainer.args.learning_rate == pytest.approx(1e-5)
    assert trainer.decisive()["learning_rate"] == trainer.args.learning_rate


def test_command_lines_and_files_take_numbers_and_auto(tmp_path: Path) -> None:
    path = tmp_path / "sizes.yaml"
    path.write_text("per_device_train_batch_size: auto\nlearning_rate: 1e-5\nmax_tokens_per_micro_batch: 64\n")
    words = ["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", "--effective_batch_size", "16"]
    words += ["--gradient_accumulation_steps", "auto"]
    (made,) = ArgumentParser(SFTConfig).parse_args_and_config(words)
    assert made.automatic == {"per_device_train_batch_size", "gradient_accumulation_steps"}
    assert (made.learning_rate, made.max_tokens_per_micro_batch) == (1e-5, 64)
    with pytest.raises(ConfigError, match="'batch_size' is per_device_train_batch_size here"):
        ArgumentParser(SFTConfig).parse_args_and_config([*words, "--batch_size", "auto"])
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps='aut': must be a whole number, or auto\."):
        ArgumentParser(SFTConfig).parse_args_and_config([*words[:-1], "aut"])


CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB."
SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}


def of_device(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(f"{CUDA}\nMore lines.")


def of_host(*_: Any, **__: Any) -> Any:
    return torch.empty(2**50)


def after(calls: int, run: Callable[..., Any], fail: Callable[..., Any]) -> Callable[..., Any]:
    """`run` for a number of calls, then `fail`."""
    left = [run] * calls

    def either(*args: Any, **kwargs: Any) -> Any:
        return (left.pop() if left else fail)(*args, **kwargs)

    return either


def message_of(trainer: Any, owner: Any, name: str, fail: Callable[..., Any], *, calls: int) -> str:
    setattr(owner, name, after(calls, getattr(owner, name), fail))
    with pytest.raises(OutOfMemoryError) as raised:
        trainer.train()
    assert is_out_of_memory(raised.value.__cause__)
    return str(raised.value)


def test_of_a_training_pass(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, max_length=64, **SAVING)
    message = message_of(trainer, trainer, "loss", of_host, calls=1)
    assert message.startswith("out of memory in the training pass of a micro-batch with 8 rows and ")
    assert "DefaultCPUAllocator: can't allocate memory" in message
    options = ("set max_tokens_per_micro_batch (now None)", "set activation_checkpointing=True (now False)")
    assert f"To reduce it: {'; '.join(options)}; lower max_length (now 64). " in message
    assert message.endswith(f"Resume from {tmp_path / 'checkpoint-1'}: resume_from_checkpoint=True.")


def test_of_generation(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, gradient_accumulation_steps=2, **SAVING)
    message = message_of(trainer, trainer.generator, "_prefill", of_device, calls=0)
    assert message.startswith("out of memory in generation of 16 completions, 16 at a time, of up to ")
    assert " + 12 tokens: CUDA out of memory. Tried to allocate 20.00 GiB. To reduce it: " in message
    assert "lower max_completion_length (now 12); lower per_device_train_batch_size (now 8). " in message
    assert message.endswith("There is no checkpoint yet.")


def test_of_scoring(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, num_iterations=2, steps_per_generation=2, beta=0.1, **SAVING)
    message = message_of(trainer, trainer.scorer.reference, "scores", of_device, calls=0)
    assert message.startswith("out of memory in scoring a batch with 8 rows and ")
    assert "tokens under the reference: CUDA" in message
    assert "set max_tokens_per_micro_batch (now None); lower max_completion_length (now 12). There" in message


def test_of_a_checkpoint_of_which_nothing_is_left(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, **SAVING)
    message = message_of(trainer, trainer, "_save_rng_state", of_device, calls=1)
    assert message.startswith("out of memory in writing checkpoint-2: CUDA")
    assert f"set save_only_model=True (now False). Resume from {tmp_path / 'checkpoint-1'}: " in message
    assert not (tmp_path / ".saving").exists()


def test_of_evaluation(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, eval_strategy="steps", eval_steps=1, eval_dataset=dataset_of("sft", 24))
    message = message_of(trainer, trainer, "evaluation_step", of_device, calls=1)
    assert message.startswith("out of memory in evaluation, after 8 rows: CUDA")
    assert "lower per_device_eval_batch_size (now 8); lower max_length (now 1024). There is no" in message


class Updating(TrainerCallback):
    """Memory runs out in the third step, behind its passes."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            of_device()


@pytest.mark.parametrize(
    ("optim", "remedy"),
    [("sgd", ""), ("adamw_torch", " To reduce it: set optim='adafactor' (now adamw_torch).")],
)
def test_of_the_update_of_the_weights_and_training_goes_on_after_it(optim: str, remedy: str, tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, callbacks=[Updating()], **SAVING, optim=optim)
    with pytest.raises(OutOfMemoryError) as raised:
        trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    assert str(raised.value) == (
        f"out of memory in step 3, in its update, a reward or a callback: {CUDA}{remedy} Resume from {checkpoint}: "
        "resume_from_checkpoint=True."
    )
    trainer.remove_callback(Updating)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path)

    def fail(*_: Any) -> Any:
        raise RuntimeError("shapes do not match")

    trainer.loss = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"^shapes do not match$"):
        trainer.train()


@pytest.mark.parametrize(
    ("message", "is_memory"),
    [
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", False),
        ("Triton Error [CUDA]: out of memory", True),
        ("Triton Error [CUDA]: invalid argument", False),
    ],
)
def test_memory_that_torch_does_not_allocate_itself_counts(message: str, is_memory: bool) -> None:
    assert is_out_of_memory(RuntimeError(message)) is is_memory


def test_a_long_error_is_shortened() -> None:
    args: Any = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(OutOfMemoryError) as raised, explained(lambda: "a pass", args, ()):
        raise torch.OutOfMemoryError("many words " * 100)
    assert str(raised.value).startswith("out of memory in a pass: many words many words")
    assert str(raised.value).endswith(" [...]")
    assert len(str(raised.value)) < 230


@pytest.mark.parametrize(("fits", "found"), [(8, 8), (3, 2), (1, 1), (0, None)])
def test_the_size_of_evaluations_is_the_fastest_that_fits(fits: int, found: int | None) -> None:
    """Every pass takes a second, so the most rows are the fastest."""

    def evaluate(dataset: list[str], rows: int) -> int:
        if rows > fits:
            raise torch.OutOfMemoryError("out of memory")
        seconds.append(seconds[-1] + 1.0)
        return 10 * rows

    seconds = [0.0]
    made = config(per_device_eval_batch_size="auto")
    size = EvaluationSize(made, evaluate, lambda: 0)
    size.clock = lambda: seconds[-1]
    if found is None:
        with pytest.raises(OutOfMemoryError, match="out of memory in an evaluation of 1 of the longest rows"):
            size.settle(["row"] * 8)
        return
    rows = ["row"] * 8
    size.settle(rows)
    passes = len(seconds)
    size.settle(rows)
    assert len(seconds) == passes
    assert made.per_device_eval_batch_size == found
    assert [trial.rows for trial in size.trials] == [rows for rows in (1, 2, 4, 8) if rows <= fits]
