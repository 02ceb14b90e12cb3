"""If memory runs out, the error says where, names options with their values, and where to resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from prefrl.errors import OutOfMemoryError
from prefrl.trainer.memory import explained, is_out_of_memory
from tests.contract.cases import dataset_of, make_trainer

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
